"""How every command line of the house speaks: one way to show help, and one line for what cannot be understood."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose help keeps the lines of its examples, and whose errors name what was probably meant."""

    def __init__(self, **options: Any) -> None:
        """As argparse's; an option is never abbreviated, so that a new one cannot change an old command."""
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """End with exit code 2 and one line: who speaks, what is wrong, what was probably meant, where to read on."""
        name = self.prog.removeprefix("python -m ")
        self.exit(2, f"{name}: error: {message}{fix(message, self.format_usage())}; see {self.prog} --help\n")


def told(error: Exception) -> str:
    """What a call that cannot work ends with, in one line; a file that cannot be opened is told in words."""
    text = str(error)
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        text = f"no file or folder {error.filename}, seen from {os.getcwd()}; check the path"
    elif isinstance(error, IsADirectoryError):
        text = f"{error.filename} must be a file, got a folder"
    return " ".join(text.split())


def fix(message: str, usage: str) -> str:
    """What to try, for some of argparse's messages: the nearest word that is known, or how numbers are written.

    >>> fix("unrecognized arguments: --sizes 3", "usage: x [--size N] [--split RULE]")
    '; did you mean --size?'
    >>> fix("argument --computed: invalid int value: '4,0'", "")
    '; numbers stand apart: 4 0'
    """
    if numbers := re.search(r"invalid int value: '([\d, ]+,[\d, ]*)'", message):
        return f"; numbers stand apart: {' '.join(re.findall(r'[0-9]+', numbers[1]))}"
    if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
        word, known = choice[1], re.findall(r"[\w.-]+", choice[2])
    elif unknown := re.match(r"unrecognized arguments: ([^ =]+)", message):
        word, known = unknown[1].lstrip("-"), re.findall(r"--([\w-]+)", usage)  # dashes would look alike
    else:
        return ""
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {'' if choice else '--'}{near[0]}?" if near else ""
