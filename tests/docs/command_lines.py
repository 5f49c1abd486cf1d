"""Command lines as texts show them: found in a page or a help, and parsed without being run."""

from __future__ import annotations

import contextlib
import io
import re
import shlex

from dsacp_npu.__main__ import COMMANDS, parser
from dsacp_ref import __main__ as reference

# How a text may call the command line, and with what the rest is parsed.
PROGRAMS = ("python -m dsacp_npu.integrations.transformers", "python -m dsacp_npu", "python -m dsacp_ref", "dsacp")


def examples_of(help_text: str) -> list[str]:
    """The command lines of the paragraph `examples:`, without what is said beside them."""
    paragraph = help_text.partition("\nexamples:\n")[2].partition("\n\n")[0]
    return [re.split(r" {2,}", line.strip())[0] for line in paragraph.splitlines()]


def parse(line: str) -> None:
    """Read a command line as the program would; SystemExit, with what it says on stderr, where that fails."""
    line = bare(line)
    program = next(name for name in PROGRAMS if line == name or line.startswith(name + " "))
    words = shlex.split(line.removeprefix(program))
    if program.endswith("transformers"):
        from dsacp_npu.commands.transformers_demo import parser as demo_parser

        demo_parser().parse_args(words)
    elif program.endswith("dsacp_ref"):
        reference.parser().parse_args(words)
    else:
        parser(COMMANDS).parse_args(words)


def parse_mention(line: str) -> None:
    """The same of a command that a text names without all that it needs: its options are known at least."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parse(line)
    except SystemExit:
        lack = "the following arguments are required|argument --\\S+: expected"
        missing = re.match(rf"(\S+) ?(\S*): error: ({lack})", said.getvalue())
        assert missing is not None, f"{line}: {said.getvalue()}"
        with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
            parse(f"python -m {missing[1]} {missing[2]} --help")
        unknown = set(re.findall(r"(?<!\S)--[\w-]+", line)) - set(re.findall(r"--[\w-]+", shown.getvalue()))
        assert not unknown, f"{line}: {unknown}"


def bare(line: str) -> str:
    """Without the environment's folder, and without the file that it goes to."""
    return line.replace(".venv-ascend/bin/", "").replace(".venv/bin/", "").partition(" > ")[0]
