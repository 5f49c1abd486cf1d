"""The command line: ``python -m dsacp_npu <command>``; ``--help`` lists the commands, and each has its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Sequence
from importlib import import_module

import dsacp_ref
from dsacp_ref._arguments import Parser, told
from dsacp_ref.spec import ContractError, UnsupportedError

# A command is a module dsacp_npu.commands.<name> with add_arguments(parser) and run(args) -> exit code; - is _ there.
COMMANDS = {
    "explain": "who owns which token of a batch, and the operator rows of every rank",
    "parity": "ranks against one device, for the definition and the backends, over every way to combine them",
    "plan": "what one prefill costs under every way to share it among ranks, and the best of them",
    "validate": "tensors that another engine dumped, against the definition: where they part, and the likely cause",
    "bench": "rates against the same run's matrix multiply, memory, metadata times",
    "mirror": "which function has which twin, and where it was tested (docs/mirror.md)",
    "compile-check": "the Triton kernels, or one of your own, under the Ascend compiler: what they take of a chip",
    "doctor": "versions, devices, backends and operators: what is usable here, and why not",
    "completion": "the script that lets a shell complete dsacp's commands, options and choices by Tab",
}

EXAMPLES = """\
examples:
  %(prog)s explain --query-lens 5 9 --cp-size 2 --split zigzag
  %(prog)s parity --short
  %(prog)s doctor

Every command has its own --help, with examples. An installed `dsacp` is the same as `%(prog)s`.
"""


def parser(loaded: Container[str | None]) -> Parser:
    """All commands by name; only the loaded ones are imported, so that none waits for another's libraries."""
    words = "Context-parallel DeepSeek Sparse Attention: its definition, explained and compared."
    top = Parser(prog="python -m dsacp_npu", description=words, epilog=EXAMPLES)
    top.add_argument("--version", action="version", version=f"dsacp {dsacp_ref.__version__}")
    commands = top.add_subparsers(dest="command", metavar="command")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name in loaded:
            module = import_module(f"dsacp_npu.commands.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.set_defaults(run=module.run, parser=command)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 1 for a finding, 2 for a call that cannot work."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if not word.startswith("-")), None)
    try:
        top = parser([chosen])
        args, unknown = top.parse_known_args(words)
        if unknown:  # told by the command's own parser, which knows what is near
            getattr(args, "parser", top).error(f"unrecognized arguments: {' '.join(unknown)}")
        if args.command is None:
            top.print_help()
            return 0
        code: int = args.run(args)
        sys.stdout.flush()
    except (ContractError, UnsupportedError, ImportError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # The reader has seen enough; what is still buffered must not fail again when the interpreter closes stdout.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        print(f"dsacp_npu {chosen}: error: {told(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
