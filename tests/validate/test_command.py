"""The command: exit codes, JSON, tables, what is listed besides."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsacp_npu import __main__ as command
from dsacp_npu.validation.kinds import KINDS
from tests.layer_strategies import CSA
from tests.validate.dumps import recorded, written
from tests.validate.test_length_faults import ints
from tests.validate.test_number_faults import RANKS


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """A right dump of two ranks."""
    return [str(path) for path in written(tmp_path, recorded(kind=CSA, cut=RANKS))]


def damaged(tmp_path: Path) -> list[str]:
    """The same, with extents of whole requests, and without slots on rank 1."""
    dumps = recorded(kind=CSA, cut=RANKS)
    for dump in dumps:
        dump["seqused_kv"] = dump["seq_lens"][dump["request_indices"]]
        dump["q_seq_lens"], dump["mine"] = ints(1), ints(2)
    del dumps[1]["slot_mapping"]
    return [str(path) for path in written(tmp_path, dumps)]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, output, complaints."""
    code = command.main(["validate", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_right_dump(paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, *paths)
    assert (code, err) == (0, "")
    assert "rank 0, 1; cp_size 2; split zigzag; compress_ratio 4" in out
    assert " 0 differ" in out


def test_a_wrong_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, *damaged(tmp_path))
    assert code == 1
    assert "they first part at key_extents: seqused_kv of rank 0" in out
    assert "global_key_length: key length is global, queries are local (xLLM-AI/xllm#2097)" in out
    assert f"fix: {KINDS['global_key_length'].fix}" in out
    assert "slots: no slot_mapping on rank [1]" in out
    assert "q_seq_lens (xLLM: lengths on an NPU" in out
    assert "\n  mine\n" in out


def test_all_ranks_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few, every = (said(capsys, *damaged(tmp_path), *more)[1] for more in ([], ["--all"]))
    assert few.count(" key_extents ") == 1
    assert "0 (of 0, 1)" in few
    assert every.count(" key_extents ") == 2


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, *damaged(tmp_path), "--json")
    told: dict[str, Any] = json.loads(out)
    assert code == 1
    assert told.keys() == {"right", "first", "findings", "results", "notes", "unknown"}
    assert (told["right"], told["first"]) == (False, "key_extents")
    finding = told["findings"][0]
    assert finding.keys() == {
        "check", "tensor", "rank", "request", "token", "index", "expected", "got", "differing", "size", "causes",
    }  # fmt: skip
    assert finding["causes"][0].keys() == {"kind", "sentence", "fix", "detail"}
    assert (finding["rank"], finding["request"], finding["index"]) == (0, 0, [0])
    assert {result["status"] for result in told["results"]} == {"right", "differs", "skipped"}
    assert all(result.keys() == {"check", "rank", "status", "missing"} for result in told["results"])


def test_a_right_dump_as_json(paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, *paths, "--json")
    assert code == 0
    assert json.loads(out)["right"] is True
    assert json.loads(out)["first"] is None


def test_every_kind_of_number_is_plain_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lists, words and floats among expected and got."""
    dumps = recorded(kind=CSA, cut=RANKS)
    dumps[0]["topk_indices"] = dumps[0]["topk_indices"][::-1].copy()
    dumps[0]["out"] = dumps[0]["out"] + 1
    dumps[0]["cos"] = dumps[0]["cos"][:3]
    code, out, _ = said(capsys, *map(str, written(tmp_path, dumps)), "--json")
    assert code == 1
    assert {finding["check"] for finding in json.loads(out)["findings"]} == {"rope", "selection", "attention"}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["missing.npz"], "no file or folder"),
        (["--set", "colour=1"], "--set must be NAME=VALUE with a name of cp_size"),
        (["--set", "block_size=x"], "block_size must be a value of type int, got 'x'"),
        (["--split", "zigzig"], "split must be one of"),
        (["--config", "missing.json"], "no file or folder"),
    ],
)
def test_calls_that_cannot_work(
    paths: list[str], capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    dumps = [] if words[0].endswith(".npz") else paths
    code, out, err = said(capsys, *dumps, *words)
    assert (code, out) == (2, "")
    assert err.startswith("dsacp_npu validate: error: ")
    assert complaint in err


def test_nothing_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "a.npz", seqused_kv=ints(3))
    code, _, err = said(capsys, str(tmp_path / "a.npz"))
    assert code == 2
    assert "dump must hold something to compare, got nothing; missing: " in err
    assert "query_start_loc" in err


def test_settings_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dump by hand has the lengths only; a model's constants come from its name."""
    tensors = {"query_start_loc": ints(0, 5), "seq_lens": ints(9), "seqused_kv": ints(6, 9), "cp_rank": 0}
    np.savez(tmp_path / "a.npz", **tensors)
    words = [str(tmp_path / "a.npz"), "--cp-size", "2", "--split", "zigzag"]
    assert said(capsys, *words)[0] == 0
    assert said(capsys, *words[:3], "--split", "contiguous")[0] == 1
    positions = np.array([4, 5, 8], np.float32)[:, None]
    flash = 160000.0 ** (-np.arange(32) / 32.0)
    np.savez(tmp_path / "a.npz", **tensors, cos=np.cos(positions * flash), sin=np.sin(positions * flash))
    code, out, _ = said(capsys, *words, "--config", "v4-flash", "--compress-ratio", "4")
    assert code == 1
    assert "plain_frequencies" in out


def test_a_missing_table_library_is_named(
    paths: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("rich", "rich.box", "rich.console", "rich.table"):
        monkeypatch.setitem(sys.modules, name, None)
    code, _, err = said(capsys, *paths)
    assert code == 2
    assert "pip install rich, or use --json" in err
    assert said(capsys, *paths, "--json")[0] == 0


def test_in_a_process_without_torch(paths: list[str]) -> None:
    """npz needs numpy and rich only."""
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['ml_dtypes'] = None\n"
        "from dsacp_npu.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    call = [sys.executable, "-c", program, "validate", *paths]
    result = subprocess.run(call, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    assert " 0 differ" in result.stdout


def test_numbers_that_json_has_not_are_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dumps = recorded(kind=CSA, cut=RANKS)
    dumps[0]["out"][0], dumps[0]["lse"][0] = np.nan, -np.inf
    _, out, _ = said(capsys, *map(str, written(tmp_path, dumps)), "--json")
    told = json.loads(out, parse_constant=pytest.fail)
    assert [finding["got"] for finding in told["findings"]] == ["nan", "-inf"]


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["validate", "--help"])
    out = capsys.readouterr().out
    assert "examples:" in out
    assert "exit code:" in out
