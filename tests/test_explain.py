"""`python -m dsacp_ref explain`: its numbers are the library's, its tables fit a terminal, a refusal is one line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsacp_npu.__main__ import main as dsacp_npu_main
from dsacp_ref.__main__ import RULE_WORDS, WIDTH, cut, main
from dsacp_ref.config import SPLITS
from dsacp_ref.extents import build_cp_local_metadata, local_extents, token_positions
from dsacp_ref.partition import partition_tokens, rank_pieces
from dsacp_ref.visibility import visible_entries
from tests import strategies
from tests.oracles import splits as oracle
from tests.strategies import Batch

WORKED = "--query-lens 1 2 3 4 5 6 7 8 9 --cp-size 3"
ZIGZAG = "--query-lens 5 9 --computed 4 0 --cp-size 2 --split zigzag --compress-ratio 4"


def explain(options: str | list[str]) -> str:
    """What the command prints, in this process."""
    words = options.split() if isinstance(options, str) else options
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["explain", *words]) == 0
    return out.getvalue()


def explained(options: str | list[str]) -> dict[str, Any]:
    words = options.split() if isinstance(options, str) else options
    return json.loads(explain([*words, "--json"]))


def block(text: str, start: str) -> str:
    """The paragraph of the output that starts with these words."""
    return next(paragraph for paragraph in text.split("\n\n") if paragraph.startswith(start))


def fresh(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, encoding="utf-8", check=False, **options)


# --- the table -------------------------------------------------------------------------------------------------------


def test_worked_example_as_a_table() -> None:
    text = explain(WORKED)
    assert text.startswith(
        "contiguous, cp_size 3: the flat stream in equal slices; tokens 45, padded 45, rows per rank 15"
    )
    drawn = [line.split()[-1] for line in block(text, "  request").splitlines()[1:]]
    assert drawn == ["0" * n for n in range(1, 6)] + ["111111", "1111111", "11222222", "222222222"]
    assert block(text, "rank 1").splitlines() == [
        "rank 1 (rows 15, pad rows 0)",
        "  row  request  new tokens  positions  q_len  seqused_kv",
        "    0        0       [1,1)          -      0           0",
        "    1        1       [2,2)          -      0           0",
        "    2        2       [3,3)          -      0           0",
        "    3        3       [4,4)          -      0           0",
        "    4        4       [5,5)          -      0           0",
        "    5        5       [0,6)      [0,6)      6           6",
        "    6        6       [0,7)      [0,7)      7           7",
        "    7        7       [0,2)      [0,2)      2           2",
        "    8        8       [0,0)          -      0           0",
        "  token_indices       15 16 17 18 19 20 21 22 23 24 25 26 27 28 29",
        "  cu_seqlens_q        0 0 0 0 0 0 6 13 15 15",
        "  seqused_kv          0 0 0 0 0 6 7 2 0",
        "  local_kv_start_loc  0 0 0 0 0 0 6 13 15 15",
    ]
    for row in ("cu_seqlens_q        0 1 3 6 10 15 15 15 15 15", "seqused_kv          1 2 3 4 5 0 0 0 0"):
        assert row in block(text, "rank 0")
    assert "local_kv_start_loc  0 0 0 0 0 0 0 0 8 17" in block(text, "rank 2")


def test_zigzag_table() -> None:
    assert (
        explain(ZIGZAG)
        == """\
zigzag, cp_size 2: blocks r and 3-r of a request to rank r;
  tokens 14, padded 14, rows per rank 6-8, compress_ratio 4

  request  new  seq_len  each new token: its rank
        0    5        9  00110
        1    9        9  000111100

rank 0 (rows 8, pad rows 0)
  row  request  new tokens  positions  q_len  seqused_kv  entries seen
    0        0       [0,2)      [4,6)      2           6        1 to 1
    1        0       [4,5)      [8,9)      1           9        2 to 2
    2        1       [0,3)      [0,3)      3           3        0 to 0
    3        1       [7,9)      [7,9)      2           9        2 to 2
  token_indices       0 1 4 5 6 7 12 13
  cu_seqlens_q        0 2 3 6 8
  seqused_kv          6 9 3 9

rank 1 (rows 6, pad rows 0)
  row  request  new tokens  positions  q_len  seqused_kv  entries seen
    0        0       [2,3)      [6,7)      1           7        1 to 1
    1        0       [3,4)      [7,8)      1           8        2 to 2
    2        1       [3,5)      [3,5)      2           5        1 to 1
    3        1       [5,7)      [5,7)      2           7        1 to 1
  token_indices       2 3 8 9 10 11
  cu_seqlens_q        0 1 2 4 6
  seqused_kv          7 8 5 7

  restore_indices     0 1 8 9 2 3 4 5 10 11 12 13 6 7
"""
    )


def test_round_robin_shows_pad_rows() -> None:
    text = explain("--query-lens 10 --cp-size 4 --split round_robin")
    assert text.startswith(
        "round_robin, cp_size 4: flat token t to rank t mod 4; tokens 10, padded 12, rows per rank 3\n"
    )
    assert block(text, "  request").splitlines()[1:] == [
        "        0   10       10  0123012301",
        "  padding    2        -  ..",
    ]
    assert "    2      pad           -          -      0           0\n  token_indices       3 7 -1" in block(
        text, "rank 3"
    )
    assert "restore_indices     0 3 6 9 1 4 7 10 2 5" in text


@pytest.mark.parametrize("split, drawn", [("zigzag_padded", "01221."), ("round_robin_page(2)", "00112.")])
def test_pad_rows_of_a_request_stand_behind_it(split: str, drawn: str) -> None:
    assert f"  0    5        5  {drawn}\n" in explain(f"--query-lens 5 --cp-size 3 --split {split}")


@pytest.mark.parametrize("split", [*SPLITS[:-1], "round_robin_page(4)"])
def test_empty_batch(split: str) -> None:
    text = explain(f"--query-lens --cp-size 2 --split {split}")
    assert "tokens 0, padded 0, rows per rank 0" in text
    assert "(no requests)" in text
    assert "  (no operator rows)\n  token_indices       (none)\n  cu_seqlens_q        0\n" in block(text, "rank 1")
    assert explain(f"--query-start-loc 0 --seq-lens --cp-size 2 --split {split}") == text


def test_padded_slot_has_queries_and_no_positions() -> None:
    text = explain("--query-start-loc 0 3 5 --seq-lens 0 5 --cp-size 1 --compress-ratio 2")
    assert "    0        0       [0,3)          -      3           0        0 to 0\n" in text
    assert "    1        1       [0,2)      [3,5)      2           5        2 to 2\n" in text


def test_options_change_what_is_shown() -> None:
    alone = explain(WORKED + " --rank 1")
    assert block(alone, "rank 1") == block(explain(WORKED), "rank 1")
    assert "\nrank 0" not in alone
    assert "\nrank 2" not in alone
    assert block(alone, "  request") == block(explain(WORKED), "  request")
    prefix = explain(WORKED + " --rank 1 --empty-extent prefix")
    assert "empty_extent prefix" in prefix
    assert "seqused_kv          1 2 3 4 5 6 7 2 0" in prefix
    draft = explain(WORKED + " --rank 1 --non-causal")
    assert "causal False" in draft
    assert "seqused_kv          0 0 0 0 0 6 7 8 0" in draft
    padded = explain(WORKED + " --rank 2 --num-input-tokens 50")
    assert "padded 51, rows per rank 17, num_input_tokens 50" in padded
    assert "padding    6        -  ......" in padded


def test_every_rule_has_plain_words() -> None:
    assert set(RULE_WORDS) == set(SPLITS)
    assert "zigzag, cp_size 2" in explain("--query-lens 3 --cp-size 2 --split in-seq-split")


LARGE = (
    "--query-lens 8192 3000 9 --computed 1000000 0 4 --cp-size 16 --split zigzag --compress-ratio 128",
    "--query-lens 8192 --cp-size 16 --split round_robin",
    "--query-lens 8192 --cp-size 16 --split round_robin_page(128)",
    "--query-lens 8192 --cp-size 62 --split zigzag_padded --empty-extent prefix",
    "--query-lens 300 --cp-size 63 --rank 62",
    "--query-lens " + "1 " * 500 + "--cp-size 12 --num-input-tokens 700",
)


@pytest.mark.parametrize("options", [WORKED, ZIGZAG, *LARGE])
def test_lines_fit_the_terminal(options: str) -> None:
    text = explain(options)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert all(len(paragraph.splitlines()) <= 31 for paragraph in text.split("\n\n"))
    assert not re.search(r"[ \t]\n", text)


def test_long_requests_say_that_they_are_cut() -> None:
    assert "cut here" not in explain("--query-lens 68 --cp-size 2")
    text = explain("--query-lens 800 --cp-size 4")
    assert "… cut here" in text
    drawn = block(text, "  request").splitlines()[1].split()[-1]
    assert re.fullmatch("0+…0+1+…1+2+…2+3+…3+", drawn)  # every owner is still seen
    assert "(800 numbers)" in text
    many = explain("--query-lens " + "1 " * 100 + "--cp-size 4 --rank 2")
    assert "lines left out; --json has them" in block(many, "  request")
    # 25 of the 100 operator rows have queries; these are the ones to see
    rows = block(many, "rank 2").splitlines()
    assert rows[1] == "  … 75 rows without queries left out; --json has them"
    assert [line.split()[0] for line in rows[3:-4]] == [*map(str, range(50, 68)), "…", *map(str, range(71, 75))]
    assert "a is rank 10" in explain("--query-lens 30 --cp-size 11")


@given(st.text("01.", max_size=60), st.integers(5, 20))
def test_cut_fits_and_keeps_both_ends(signs: str, width: int) -> None:
    short = cut(signs, width)
    assert len(short) <= width
    assert short == signs if len(signs) <= width else "…" in short
    assert short[:1] == signs[:1]
    assert short[-1:] == signs[-1:]


@given(strategies.batches(), strategies.cp_sizes, strategies.splits())
def test_picture_agrees_with_the_oracle(batch: Batch, cp_size: int, split: str) -> None:
    """Each request's signs, and as many dots as the ranks together have pad rows."""
    lines = block(explain(options_of(batch, cp_size, split)), "  ").splitlines()[1:]
    owned = oracle.owned_tokens(batch.query_lens, cp_size, split)
    owner = {token: str(rank) for rank, tokens in enumerate(owned) for token in tokens}
    drawn = [line[25:] for line in lines if "padding" not in line]
    assert [signs.rstrip(".…") for signs in drawn] == [
        "".join(owner[token] for token in range(start, start + length))
        for start, length in zip(batch.query_start_loc.tolist(), batch.query_lens, strict=False)
    ]
    if not any("…" in line for line in lines):
        dots = sum(line[25:].count(".") for line in lines)
        assert dots == sum(tokens.count(-1) for tokens in owned)


# --- the object ------------------------------------------------------------------------------------------------------


def options_of(batch: Batch, cp_size: int, split: str) -> list[str]:
    words = ["--query-start-loc", *batch.query_start_loc.tolist(), "--seq-lens", *batch.seq_lens]
    return [str(word) for word in [*words, "--cp-size", cp_size, "--split", split]]


def test_worked_example_as_json() -> None:
    shown = explained(WORKED)
    assert shown["call"] == {
        "query_start_loc": [0, 1, 3, 6, 10, 15, 21, 28, 36, 45],
        "seq_lens": [1, 2, 3, 4, 5, 6, 7, 8, 9],
        "cp_size": 3,
        "split": "contiguous",
        "num_input_tokens": None,
        "causal": True,
        "empty_extent": "zero",
        "compress_ratio": None,
    }
    assert (shown["schema"], shown["num_tokens"], shown["num_tokens_pad"]) == (1, 45, 45)
    assert shown["rows_per_rank"] == [15, 15, 15]
    assert shown["restore_indices"] == list(range(45))
    assert [rank["cu_seqlens_q"] for rank in shown["ranks"]] == [
        [0, 1, 3, 6, 10, 15, 15, 15, 15, 15],
        [0, 0, 0, 0, 0, 0, 6, 13, 15, 15],
        [0, 0, 0, 0, 0, 0, 0, 0, 6, 15],
    ]
    assert [rank["seqused_kv"] for rank in shown["ranks"]] == [
        [1, 2, 3, 4, 5, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 6, 7, 2, 0],
        [0, 0, 0, 0, 0, 0, 0, 8, 9],
    ]
    assert [rank["local_kv_start_loc"] for rank in shown["ranks"]] == [
        [0, 1, 3, 6, 10, 15, 15, 15, 15, 15],
        [0, 0, 0, 0, 0, 0, 6, 13, 15, 15],
        [0, 0, 0, 0, 0, 0, 0, 0, 8, 17],
    ]


def test_both_spellings_are_one_batch() -> None:
    lengths = explained("--query-lens 1 2 3 --computed 0 4 0 --cp-size 3")
    assert lengths == explained("--query-start-loc 0 1 3 6 --seq-lens 1 6 3 --cp-size 3")
    assert lengths["ranks"][1]["positions"] == [5, 0]
    assert explained("--query-lens 1 2 --cp-size 1") == explained("--query-lens 1 2 --computed 0 0 --cp-size 1")


def test_rank_picks_one() -> None:
    shown, alone = explained(WORKED), explained(WORKED + " --rank 2")
    assert alone == shown | {"ranks": [shown["ranks"][2]]}


@given(strategies.batches(), strategies.cp_sizes, strategies.splits(), st.data())
def test_json_is_the_library(batch: Batch, cp_size: int, split: str, data: st.DataObject) -> None:
    padded = data.draw(strategies.padded_counts(batch, split))
    causal = data.draw(st.booleans())
    empty_extent = data.draw(st.sampled_from(["zero", "prefix"])) if causal else "zero"
    ratio = data.draw(st.none() | st.integers(1, 5)) if causal else None
    words = [*options_of(batch, cp_size, split), "--empty-extent", empty_extent]
    words += [] if causal else ["--non-causal"]
    words += [] if padded is None else ["--num-input-tokens", str(padded)]
    words += [] if ratio is None else ["--compress-ratio", str(ratio)]
    shown = explained(words)

    def same(numbers: list[int], array: np.ndarray) -> bool:
        assert all(type(number) is int for number in numbers)
        back = np.array(numbers, np.int32)
        return back.dtype == array.dtype and np.array_equal(back, array)

    rule, mask = {"split": split, "num_input_tokens": padded}, {"causal": causal, "empty_extent": empty_extent}
    query_start_loc, seq_lens = batch.query_start_loc, batch.key_lens
    lengths = {"query_start_loc": query_start_loc.tolist(), "seq_lens": seq_lens.tolist(), "cp_size": cp_size}
    assert shown["call"] == lengths | rule | mask | {"compress_ratio": ratio}
    partition = partition_tokens(query_start_loc, cp_size, **rule)
    assert same(shown["restore_indices"], partition.restore_indices)
    assert shown["rows_per_rank"] == [len(rows) for rows in partition.token_indices]
    assert shown["num_tokens"] == batch.num_tokens
    assert shown["num_tokens_pad"] == sum(shown["rows_per_rank"])
    assert [rank["cp_rank"] for rank in shown["ranks"]] == list(range(cp_size))
    for cp_rank, rank in enumerate(shown["ranks"]):
        tokens = partition.token_indices[cp_rank]
        positions = token_positions(tokens, query_start_loc, seq_lens)
        arrays = {"token_indices": tokens, "positions": positions}
        arrays |= rank_pieces(query_start_loc, cp_size, cp_rank, **rule)._asdict()
        arrays |= local_extents(query_start_loc, seq_lens, cp_size, cp_rank, **rule, **mask)._asdict()
        if split == "contiguous":
            local = build_cp_local_metadata(
                query_start_loc, seq_lens, cp_size, cp_rank, None, None, num_input_tokens=padded, **mask
            )
            arrays["local_kv_start_loc"] = local.local_kv_start_loc
            assert same(rank["cu_seqlens_q"], local.local_query_start_loc)
            assert same(rank["seqused_kv"], local.local_seq_lens)
        if ratio is not None:
            arrays["visible_entries"] = visible_entries(positions, ratio)
        assert set(rank) == {"cp_rank", *arrays}
        for name, array in arrays.items():
            assert same(rank[name], array), name
    # whatever has an object has a table, and it fits
    assert max(map(len, explain(words).splitlines())) <= WIDTH


# --- refusals --------------------------------------------------------------------------------------------------------

ONE_SPELLING = "the batch must be spelled --query-lens with or without --computed, or --query-start-loc with --seq-lens"


@pytest.mark.parametrize(
    "options, message",
    [
        ("", f"{ONE_SPELLING}, got neither"),
        ("--query-lens 3 --seq-lens 3", f"{ONE_SPELLING}, got --query-lens --seq-lens"),
        ("--query-lens 3 --query-start-loc 0 3", f"{ONE_SPELLING}, got --query-lens --query-start-loc"),
        ("--computed 3", f"{ONE_SPELLING}, got --computed"),
        ("--query-start-loc 0 3", f"{ONE_SPELLING}, got --query-start-loc"),
        ("--query-start-loc 0 3 --computed 0", f"{ONE_SPELLING}, got --computed --query-start-loc"),
        ("--query-lens 3 --computed 0 0", "computed must have 1 entries, got 2; one per request"),
        ("--query-lens 3 --computed -1", "computed must be an int in [0, 2147483647], got -1"),
        ("--query-lens 2147483648", "query_lens must be an int in [0, 2147483647], got 2147483648"),
        ("--query-lens 2147483647 1", "query_lens must sum to less than 2**31, got 2147483648"),
        ("--query-lens 1 --computed 2147483647", "seq_lens must be an int in [0, 2147483647], got 2147483648"),
        ("--query-start-loc --seq-lens", "query_start_loc must have num_reqs + 1 entries, got 0"),
        ("--query-start-loc 0 3 2 --seq-lens 3 3", "query_start_loc must not decrease, got [3, 2] at request 1"),
        ("--query-start-loc 0 3 --seq-lens 2", "seq_lens must be 0 (padded slot) or at least the request's query"),
        ("--query-start-loc 0 3 --seq-lens 3 3", "seq_lens must have shape [1], got [2]"),
        ("--query-lens 3 --cp-size 0", "cp_size must be an int in [1, 1048576], got 0"),
        ("--query-lens 3 --rank 2", "cp_rank must be an int in [0, 1], got 2"),
        ("--query-lens 3 --rank -1", "cp_rank must be an int in [0, 1], got -1"),
        ("--query-lens 3 --split spiral", "split must be one of 'contiguous'"),
        ("--query-lens 3 --split round_robin_page", "split must carry a page size"),
        ("--query-lens 3 --num-input-tokens 2", "num_input_tokens must be an int in [3,"),
        ("--query-lens 3 --num-input-tokens 4 --split zigzag", "num_input_tokens must equal the 3 tokens"),
        ("--query-lens 3 --empty-extent none", "empty_extent must be one of 'zero', 'prefix', got 'none'"),
        ("--query-lens 3 --non-causal --empty-extent prefix", "empty_extent must be 'zero' when causal is False"),
        ("--query-lens 3 --compress-ratio 0", "compress_ratio must be an int in [1, 2147483647], got 0"),
        ("--query-lens 3 --compress-ratio 4 --non-causal", "compress_ratio must be left out when causal is False"),
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_broken_contract_is_one_line(
    options: str, message: str, form: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--cp-size", "2", *options.split(), *form]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"dsacp_ref explain: error: {message}")
    assert err.count("\n") == 1
    assert err.endswith("\n")


@pytest.mark.parametrize(
    "options", ["explain --query-lens 3", "explain --query-lens 3.5 --cp-size 2", "explain --cp 2", "explode"]
)
def test_what_argparse_refuses(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(options.split())
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert re.match(r"dsacp_ref( explain)?: error: ", err)
    assert err.count("\n") == 1
    assert err.endswith(" --help\n")


def test_without_a_command_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "explain" in capsys.readouterr().out


def test_it_is_a_command_of_the_mirror_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = "explain --query-lens 3 --cp-size 2".split()
    assert main(words) == 0
    here = capsys.readouterr().out
    assert dsacp_npu_main(words) == 0
    assert capsys.readouterr().out == here
    assert dsacp_npu_main("explain --query-lens 3 --cp-size 0".split()) == 2
    assert capsys.readouterr().err.startswith("dsacp_npu explain: error: cp_size")


# --- the process -----------------------------------------------------------------------------------------------------


def test_runs_as_a_module() -> None:
    done = fresh("-m", "dsacp_ref", "explain", *WORKED.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == explain(WORKED)
    refused = fresh("-m", "dsacp_ref", "explain", "--query-lens", "3", "--cp-size", "0")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "dsacp_ref explain: error: cp_size must be an int in [1, 1048576], got 0\n"


def test_imports_numpy_and_nothing_else() -> None:
    program = (
        "import sys; before = set(sys.modules)\n"
        "from dsacp_ref.__main__ import main\n"
        "for form in ([], ['--json']): main(['explain', *sys.argv[1:], *form])\n"
        "roots = {name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names\n"
        "print(*sorted(roots), file=sys.stderr)"
    )
    done = fresh("-c", program, *ZIGZAG.split())
    assert done.returncode == 0
    assert done.stderr.split() == ["dsacp_ref", "numpy"]


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_reader_that_leaves_is_no_error(form: list[str]) -> None:
    words = [sys.executable, "-m", "dsacp_ref", "explain", "--query-lens", "9", "--cp-size", "2", *form]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


def test_a_terminal_without_unicode_gets_its_table() -> None:
    done = fresh("-m", "dsacp_ref", "explain", *LARGE[1].split(), env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == explain(LARGE[1]).replace("…", "?")


def test_help_names_the_program_and_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["explain", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m dsacp_ref explain")
    options = "query-lens computed query-start-loc seq-lens cp-size split num-input-tokens empty-extent non-causal rank"
    for option in [*options.split(), "compress-ratio", "json"]:
        assert re.search(rf"^  --{option}\b", text, re.MULTILINE), option
    for name in SPLITS:
        assert name in text
    # the examples run as they stand
    examples = re.findall(r"^  python -m dsacp_ref (explain .*?)(?:   .*)?$", text, re.MULTILINE)
    assert len(examples) == 4
    first, second, *_ = [main(example.split()) or capsys.readouterr().out for example in examples]
    assert first == second
