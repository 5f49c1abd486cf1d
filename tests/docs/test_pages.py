"""What the pages name is there: commands parse, `make` knows its targets, files exist, and shown output is true."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsacp_npu.__main__ import COMMANDS
from tests.docs.command_lines import PROGRAMS, bare, parse_mention

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
CHEAP = ("explain", "doctor", "mirror", "completion")  # commands that are run wherever a page shows them
PLACEHOLDERS = re.compile(r"[<…]|\.\.\.")

pytestmark = pytest.mark.skipif(
    not PAGES[0].exists(), reason="the pages are missing: the tests run beside an installed wheel"
)


def spans(page: Path) -> list[str]:
    """All that a page sets in code: inline, and the lines of blocks that are for a shell."""
    text = page.read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    found = [
        line.removeprefix("$ ") for kind, block in blocks for line in block.splitlines() if kind in ("sh", "console")
    ]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return found + re.findall(r"`([^`\n]+)`", prose)


def commands(page: Path) -> list[str]:
    """The command lines of our programs among them."""
    lines = map(bare, spans(page))
    ours = [line for line in lines if line in PROGRAMS or line.startswith(tuple(f"{name} " for name in PROGRAMS))]
    return [line for line in ours if not PLACEHOLDERS.search(line)]


def test_there_are_commands_to_look_at() -> None:
    assert len(commands(PAGES[0])) > 10
    assert any("compile-check --own" in line for page in PAGES for line in commands(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_parse(page: Path) -> None:
    for line in commands(page):
        parse_mention(line)
    for span in spans(page):  # as `parity --model v32`
        if re.match(rf"({'|'.join(COMMANDS)}) --\w", span) and not PLACEHOLDERS.search(span):
            parse_mention(f"python -m dsacp_npu {span}")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_make_has_the_targets(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for span in spans(page) for name in re.findall(r"^(?:\w+=\S+ )?make ([a-z][a-z-]*)", span)}
    assert named <= targets


def test_every_target_has_a_line_of_help() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) == set(re.findall(r"^([a-z-]+):.*## ", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_that_are_named_are_there(page: Path) -> None:
    """By their path from the root, from a package, or from the tests; and what is linked, from the page."""
    text = page.read_text()
    linked = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert [link for link in linked if not (page.parent / link).exists()] == []
    kinds = "md|py|ipynb|png|toml|txt|sh"
    named = [span for span in spans(page) if re.fullmatch(rf"[\w.-]+(/[\w.-]+)+\.({kinds})|[\w-]+(/[\w-]+)*/", span)]
    roots = (ROOT, ROOT / "dsacp_ref", ROOT / "dsacp_npu", ROOT / "tests")
    missing = [name for name in named if not any((root / name).exists() for root in roots)]
    # A checkpoint's files are another project's.
    assert [name for name in missing if name.split("/")[0] not in ("inference", "encoding")] == []


WIDEST = 120  # columns, as of our own lines
ELSEWHERE = {
    "compile-check": "tests/ascend/test_page.py runs it, where the Ascend compiler is",
    "validate": "tests/validate/test_page.py runs it, with the files that its page writes",
}


def shown() -> list[tuple[str, str, str]]:
    """Every command of every page that shows its output: page, command, output."""
    pattern = re.compile(r"^```console\n\$ (.*?)\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [(page.name, *found) for page in PAGES if page.exists() for found in pattern.findall(page.read_text())]


@pytest.mark.parametrize("page, command, output", shown(), ids=lambda text: text.split("\n")[0][:40])
def test_shown_output_is_true(page: str, command: str, output: str) -> None:
    if elsewhere := next((why for word, why in ELSEWHERE.items() if word in command), None):
        pytest.skip(elsewhere)
    words = shlex.split(command.removeprefix("python "))
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.rstrip() == output.rstrip()
    assert max(map(len, output.splitlines())) <= WIDEST


def cheap() -> list[Any]:
    """What follows `python` in every command line of any page that is complete and does not take long."""
    lines = {
        re.sub("^dsacp ", "python -m dsacp_npu ", line) for page in PAGES if page.exists() for line in commands(page)
    }
    calls = [shlex.split(line)[1:] for line in sorted(lines)]
    chosen = [words for words in calls if len(words) > 2 and words[2] in CHEAP and words[-1] not in ("explain", "FILE")]
    marks = dict.fromkeys(("doctor", "mirror"), pytest.mark.slow)  # they import torch; test_commands runs them too
    return [pytest.param(words, marks=marks.get(words[2], ())) for words in chosen]


@pytest.mark.parametrize("words", cheap(), ids=" ".join)
def test_cheap_commands_run(words: list[str]) -> None:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
