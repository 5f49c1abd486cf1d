"""``dsacp completion bash``: the script that lets a shell complete commands, options, choices and files by Tab."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from dsacp_npu.planning.chips import presets
from dsacp_npu.planning.models import PRESETS
from dsacp_ref.config import SPLITS
from dsacp_ref.extents import EMPTY_EXTENTS

SHELLS = ("bash", "zsh")
# What an option can be completed with that takes more than these words, so that they are no choices; and what stands
# for a file in a help.
WORDS = {"split": SPLITS, "empty_extent": EMPTY_EXTENTS, "model": PRESETS, "config": PRESETS[:2]}
FILES = ("FILE", "DUMP")

EXAMPLES = """\
examples:
  %(prog)s bash

For the shell at hand, or in its start-up file, for every one:

  eval "$(dsacp completion bash)"                                  bash
  eval "$(dsacp completion zsh)"                                   zsh, after compinit
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's one word."""
    parser.epilog = EXAMPLES
    parser.add_argument("shell", choices=SHELLS, help="whose script is printed")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    print(script(args.shell))
    return 0


def script(shell: str) -> str:
    """What a shell has to read, made by shtab from all commands as they are."""
    try:
        import shtab
    except ImportError as error:
        raise ImportError("completion is made by shtab; pip install shtab") from error
    from dsacp_npu.__main__ import COMMANDS, parser

    words = WORDS | {"chip": tuple(presets())}
    top = parser(COMMANDS)
    top.prog = "dsacp"
    for action in actions_of(top):
        if action.metavar in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.choices is None and action.dest in words:
            action.choices = words[action.dest]
    found: str = shtab.complete(top, shell)
    return found


def actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of a parser and of its commands."""
    for action in parser._actions:  # argparse has no public way to ask; shtab does the same
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from actions_of(command)
        else:
            yield action
