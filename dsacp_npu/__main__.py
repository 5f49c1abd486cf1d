"""The command line: ``python -m dsacp_npu <command>``; ``--help`` lists the commands, and each has its own."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from dsacp_ref.spec import ContractError, UnsupportedError

# A command is a module dsacp_npu.commands.<name> with add_arguments(parser) and run(args) -> exit code; - is _ there.
COMMANDS = {
    "explain": "who owns which token of a batch, and the operator rows of every rank",
    "parity": "ranks against one device, for the definition and the backends, over every way to combine them",
    "validate": "tensors that another engine dumped, against the definition: where they part, and the likely cause",
    "bench": "rates against the same run's matrix multiply, memory, metadata times",
    "mirror": "which function has which twin, and where it was tested (docs/mirror.md)",
    "compile-check": "the Triton kernels, or one of your own, under the Ascend compiler: what they take of a chip",
    "doctor": "versions, devices, backends and operators: what is usable here, and why not",
}


def parser(chosen: str | None) -> argparse.ArgumentParser:
    """All commands by name; only the chosen one is imported, so that none waits for another's libraries."""
    top = argparse.ArgumentParser(prog="python -m dsacp_npu", description="Context-parallel sparse attention.")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name == chosen:
            module = import_module(f"dsacp_npu.commands.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 1 for a finding, 2 for a call that cannot work."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if not word.startswith("-")), None)
    try:
        args = parser(chosen).parse_args(words)
        code: int = args.run(args)
        sys.stdout.flush()
    except (ContractError, UnsupportedError, ImportError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # The reader has seen enough; what is still buffered must not fail again when the interpreter closes stdout.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        print(f"dsacp_npu {chosen}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
