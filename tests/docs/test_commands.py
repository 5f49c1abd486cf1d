"""Every command helps a newcomer: a help with examples, completion, errors that name the fix, progress, silence."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsacp_npu.__main__ import COMMANDS, main
from dsacp_npu.commands import completion
from dsacp_npu.commands.parity_cells import parsed_cell
from dsacp_npu.commands.parity_scenarios import PLANS
from tests.docs.command_lines import examples_of, parse

HEAVY = {"torch", "transformers", "triton", "rich", "einops", "matplotlib", "shtab"}


def fresh(code: str, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Some lines of Python in a process of their own."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        **options,  # type: ignore[call-overload]
    )
    return done


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    return capsys.readouterr().out


# --- help ---


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_a_description_and_examples_that_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(command, capsys)
    assert text.startswith(f"usage: python -m dsacp_npu {command} [-h]")
    assert text.split("\n\n")[1].rstrip().endswith(".")
    examples = examples_of(text)
    assert examples, "write them into the parser's epilog, under 'examples:'"
    for example in examples:
        assert example.startswith(f"python -m dsacp_npu {command}")
        parse(example)
        if cell := re.search("--cell ([^ ]+)", example):
            parsed_cell(cell[1], list(PLANS))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_what_it_is(command: str) -> None:
    from dsacp_npu.__main__ import parser

    silent = [action.dest for action in completion.actions_of(parser([command])) if not action.help]
    assert silent == []


@pytest.mark.parametrize("words", [[], ["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)])
def test_help_needs_no_heavy_library(words: list[str]) -> None:
    code = f"""
import sys
from dsacp_npu.__main__ import main
try:
    main(sys.argv[1:])
except SystemExit as stop:
    assert stop.code == 0
sys.exit(', '.join(sorted({HEAVY} & set(sys.modules))) or 0)
"""
    done = fresh(code, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_alone_it_shows_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert [name for name in COMMANDS if f"\n    {name}" not in text] == []
    for example in examples_of(text):
        parse(example)


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    import dsacp_ref

    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"dsacp {dsacp_ref.__version__}\n"


# --- errors ---


@pytest.mark.parametrize(
    "words, due",
    [
        ("exlain", "did you mean explain?; see python -m dsacp_npu --help"),
        ("--vresion", "did you mean --version?"),
        ("--json", "unrecognized arguments: --json; see"),
        ("parity --shrot", "did you mean --short?; see python -m dsacp_npu parity --help"),
        ("parity short", "did you mean --short?"),
        ("parity --backend troch", "did you mean torch?"),
        ("bench --only splitts", "did you mean splits?"),
        ("bench --tokens many", "argument --tokens: invalid int value: 'many'"),
        ("explain --cp-size 2 --query-lens 4,5", "numbers stand apart: 4 5"),
        ("explain --query-lens 4 5", "arguments are required: --cp-size; see python -m dsacp_npu explain --help"),
        ("explain --cp-size=2 --querylens=4", "did you mean --query-lens?"),
        ("completion bsh", "did you mean bash?"),
    ],
)
def test_what_was_probably_meant_is_named(words: str, due: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    out, err = capsys.readouterr()
    assert out == ""
    assert due in err
    assert err.startswith("dsacp_npu")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "words, due",
    [
        ("parity --trace nowhere.csv", "no file or folder nowhere.csv, seen from FOLDER; check the path"),
        ("parity --trace .", ". must be a file, got a folder"),
        ("bench --only splits --trace nowhere.csv", "no file or folder nowhere.csv"),
        ("parity --trace empty.csv", "--trace must hold requests, got an empty file"),
        ("explain --query-lens 3 --cp-size 2 --plot picture.jpeg", "--plot must end in .png, .svg or .pdf"),
        ("explain --query-lens 3 --cp-size 2 --plot nowhere/a.png", "no file or folder nowhere/a.png"),
        ("explain --query-lens 3 --cp-size 2 --split zigzagg", "split must be one of 'contiguous'"),
        ("compile-check --target A3", "an A3 Ascend910_9391"),
        ("parity --batches 3", "--batches must come with --trace, got 3"),
    ],
)
def test_what_cannot_work_is_one_line(
    words: str, due: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.csv").touch()
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert due.replace("FOLDER", str(tmp_path)) in err
    assert err.startswith(f"dsacp_npu {words.split()[0]}: error: ")
    assert err.count("\n") == 1


def test_doctor_needs_nothing_to_say_what_is_missing() -> None:
    code = """
import sys
for name in ("torch", "rich", "rich.console", "rich.table", "rich.box"):
    sys.modules[name] = None
from dsacp_npu.__main__ import main
sys.exit(main(["doctor"]))
"""
    done = fresh(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search("^torch +no +torch is not installed", done.stdout, re.MULTILINE)


# What a command needs beside numpy, and what it says without.
WITHOUT = [
    ("parity --short", "rich.console", "pip install rich"),
    ("parity --short --backend torch", "torch", "pip install 'dsacp[torch]'"),
    ("mirror", "torch", "pip install 'dsacp[torch]'"),
    ("bench --only torch-layer --tokens 128", "torch", "pip install 'dsacp[torch]'"),
    ("bench --device cuda", "torch", "pip install 'dsacp[torch]'"),
    ("compile-check", "torch", "make ascend"),
    ("completion bash", "shtab", "pip install shtab"),
]


@pytest.mark.parametrize("words, missing, due", WITHOUT)
def test_without_a_library_it_says_how_to_get_it(words: str, missing: str, due: str) -> None:
    code = f"import sys\nsys.modules[{missing!r}] = None\nfrom dsacp_npu.__main__ import main\nsys.exit(main())"
    done = fresh(code, *words.split())
    said = done.stderr if done.returncode == 2 else done.stdout  # bench leaves sections out, and goes on
    assert due in said
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == (done.returncode == 2)


# --- progress, and silence ---


@pytest.mark.slow
@pytest.mark.parametrize("words", ["doctor", "mirror", "bench --only core --tokens 128 --repeats 1"])
def test_into_a_pipe_go_results_and_nothing_else(words: str) -> None:
    done = fresh("import sys\nfrom dsacp_npu.__main__ import main\nsys.exit(main())", *words.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout


WAITING = """
import time
from dsacp_npu.commands.progress import followed, waiting
with waiting("looking about"):
    print("found")
    time.sleep(0.3)
for item in followed("ab", 2, "letters"):
    time.sleep(0.1)
print("done")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a pseudo-terminal needs a Unix")
def test_progress_is_drawn_on_a_terminal_and_apart_from_results() -> None:
    import pty

    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", WAITING],
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
            check=True,
            timeout=60,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "80"},
        )
        os.close(theirs)
        drawn = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
    assert done.stdout == "found\ndone\n"
    assert "looking about" in drawn
    assert "letters" in drawn
    assert "2/2" in drawn
    assert "found" not in drawn


def test_progress_is_silent_elsewhere_and_without_rich() -> None:
    for first in ("", "import sys\nsys.stderr.isatty = lambda: True\nsys.modules['rich.progress'] = None\n"):
        done = fresh(first + WAITING)
        assert (done.returncode, done.stdout, done.stderr) == (0, "found\ndone\n", "")


# --- completion ---


def completed(line: str, folder: Path) -> list[str]:
    """What Tab offers at the end of a line, by a real bash."""
    words = line.split(" ")
    script = f"""
{completion.script("bash")}
COMP_WORDS=({" ".join(word or "''" for word in words)}); COMP_CWORD={len(words) - 1}
COMP_LINE={line!r}; COMP_POINT={len(line)}; COMPREPLY=()
function=$(complete -p dsacp | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash"], input=script, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_options_choices_and_files(tmp_path: Path) -> None:
    pytest.importorskip("shtab", reason="shtab is missing: pip install shtab")
    (tmp_path / "requests.csv").touch()
    assert completed("dsacp ", tmp_path) == list(COMMANDS)
    assert completed("dsacp expl", tmp_path) == ["explain"]
    assert completed("dsacp explain --spl", tmp_path) == ["--split"]
    assert completed("dsacp explain --cp-size 2 --split zig", tmp_path) == ["zigzag", "zigzag_ceil", "zigzag_padded"]
    assert completed("dsacp explain --query-lens 4 5 --split round", tmp_path) == ["round_robin", "round_robin_page"]
    assert completed("dsacp explain --empty-extent p", tmp_path) == ["prefix"]
    assert completed("dsacp parity --backend ", tmp_path) == ["torch", "cann"]
    assert completed("dsacp parity --trace req", tmp_path) == ["requests.csv"]
    assert completed("dsacp plan --chip 910", tmp_path) == ["910b3", "910c"]
    assert completed("dsacp plan --model v4-f", tmp_path) == ["v4-flash"]
    assert completed("dsacp validate --config v4-", tmp_path) == ["v4-flash", "v4-pro"]
    assert completed("dsacp validate req", tmp_path) == ["requests.csv"]
    assert completed("dsacp bench --only torch-s", tmp_path) == ["torch-swap"]


def test_zsh_gets_a_script_with_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """It is not run: there may be no zsh."""
    pytest.importorskip("shtab", reason="shtab is missing: pip install shtab")
    assert main(["completion", "zsh"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#compdef dsacp")
    assert [name for name in COMMANDS if name not in text] == []
