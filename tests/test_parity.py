"""`python -m dsacp_npu parity`: the grid is covered, right cells pass, broken layers are found and can be repeated."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsacp_npu.__main__ import main
from dsacp_npu.commands import outside, parity, parity_cells, parity_geometry, parity_trace
from dsacp_npu.commands.parity_cells import Cell, all_cells, covering_set, parsed_cell, refusals
from dsacp_npu.commands.parity_compare import MismatchError, error_of, scoring_noise, swapped_rows
from dsacp_npu.commands.parity_geometry import geometry
from dsacp_npu.commands.parity_results import FAIL, OK, REFUSED, cell_result, device_result
from dsacp_npu.commands.parity_runs import CONFIG, Reference, reference
from dsacp_npu.commands.parity_scenarios import PLANS, is_slot, scenario, totals
from dsacp_npu.commands.parity_trace import Request, drawn_steps, requests_of, service
from dsacp_npu.planning.schemes import ENGINES
from dsacp_ref import layer
from dsacp_ref.config import check_combination
from dsacp_ref.spec import ContractError, UnsupportedError

REAL_TRACE = Path(__file__).parents[2] / "shared" / "data" / "mooncake_conversation.csv"

# One way per scenario and ratio, so that every scenario meets every kind of key side.
WAYS = (
    (3, "contiguous", "full", "replicate", "all_to_all"),
    (8, "zigzag", "scattered", "gather_compressed", "all_to_all"),
    (5, "round_robin", "scattered", "gather_kv", "gather_weight"),
    (4, "round_robin_page(128)", "full", "gather_compressed", "replicated_weight"),
    (2, "contiguous_request", "scattered", "gather_hidden", "replicated_weight"),
    (3, "zigzag_padded", "full", "gather_kv", "all_to_all"),
)


@cache
def reference_of(name: str, ratio: int) -> Reference:
    return reference(PLANS[name], ratio, 0)


def a_cell(**changes: Any) -> Cell:
    return Cell(4, 3, "zigzag", "full", "replicate", "all_to_all", "mixed")._replace(**changes)


def judged(cell: Cell) -> Any:
    return cell_result(cell, reference_of(cell.scenario, cell.ratio))


# --- the grid ---


def test_every_two_legal_values_meet_in_the_covering_set() -> None:
    scenarios = list(PLANS)
    chosen = covering_set(scenarios, 0)

    def pairs(cells: Sequence[Cell]) -> set[tuple[object, ...]]:
        named = ([*cell._asdict().items()] for cell in cells if not refusals(cell))
        return {pair for values in named for pair in combinations(values, 2)}

    assert pairs(chosen) == pairs(all_cells(scenarios))
    assert 100 <= len(chosen) <= 170
    assert len(set(chosen)) == len(chosen)
    assert chosen == covering_set(scenarios, 0) != covering_set(scenarios, 1)
    ways = {(cell.ratio, cell[2:6]) for cell in chosen}
    assert ways >= set(product((1, 4, 128), ENGINES.values()))


def test_every_kind_of_refusal_is_in_the_covering_set() -> None:
    grid, chosen = all_cells(list(PLANS)), covering_set(list(PLANS), 3)
    kinds = [{kind for cell in cells for kind in parity_cells.refused_kinds(cell)} for cells in (grid, chosen)]
    assert kinds[0] == kinds[1]
    assert {name for name, *_ in kinds[0]} == {"key_mode", "split", "cp_size"}


def test_what_must_be_refused_is_what_the_definition_refuses() -> None:
    for cell in all_cells(["long"]):
        words = {"rows": cell.rows, "key_mode": cell.keys, "output_mode": cell.output, "compress_ratio": cell.ratio}
        sizes = {"cp_size": cell.ranks, "num_heads": CONFIG.num_heads, "o_groups": CONFIG.o_groups}
        if not refusals(cell):
            check_combination(split=cell.split, **words, **sizes)
            continue
        with pytest.raises(UnsupportedError) as refused:
            check_combination(split=cell.split, **words, **sizes)
        assert str(refused.value).split()[0] in refusals(cell), cell


def test_a_cell_is_read_back() -> None:
    for cell in covering_set(list(PLANS), 0):
        assert parsed_cell(str(cell), list(PLANS)) == cell
    swapped = " , ".join(reversed(str(a_cell()).split(",")))
    assert parsed_cell(swapped, ["mixed"]) == a_cell()


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("ratio=4", "ratio=5", r"--cell ratio must be one of \(1, 4, 128\), got 5"),
        ("ratio=4", "ratio=four", "--cell ratio must be an int, got 'four'"),
        ("ranks=3", "ranks=0", r"--cell ranks must be an int in \[1, 64\], got 0"),
        ("ranks=3,", "", "--cell must give ranks, got"),
        ("ranks=3", "ranks", "--cell must give ranks once, as ranks=value"),
        ("ranks=3", "ranks=3,ranks=3", "--cell must give ranks once"),
        ("ranks=3", "ranks=3,page=2", "--cell must be one of 'ratio', 'ranks'"),
        ("zigzag", "zickzack", "--cell split must be one of 'contiguous'"),
        ("zigzag", "round_robin_page", "--cell split must carry a page size"),
        ("full", "half", "--cell rows must be one of 'full', 'scattered', got 'half'"),
        ("mixed", "step9", "--cell scenario must be one of 'long'"),
    ],
)
def test_a_wrong_cell_is_told(old: str, new: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = str(a_cell()).replace(old, new)
    with pytest.raises(ContractError, match=message):
        parsed_cell(text, list(PLANS))
    assert main(["parity", "--cell", text]) == 2
    err = capsys.readouterr().err
    assert err.startswith("dsacp_npu parity: error: --cell")
    assert err.count("\n") == 1


# --- scenarios ---


def test_scenarios_hold_what_they_are_named_for() -> None:
    made = {name: scenario(plan, 128, hidden_size=2, seed=0) for name, plan in PLANS.items()}
    for name, plan in PLANS.items():
        assert sum(totals(plan).values()) >= 300
        for step in made[name].steps:
            real = [not is_slot(request) for request in step.requests]
            assert (step.batch.seq_lens[real] >= np.diff(step.batch.query_start_loc)[real]).all()
    ends = {name: [step.batch.seq_lens for step in made[name].steps] for name in made}
    assert all(length % 4 in (0, 2) for lens in ends["on"][:3] for length in lens.tolist())
    assert any(128 in lens for lens in ends["on"])
    assert 1 in np.diff(made["inside"].steps[0].batch.query_start_loc)
    assert len(made["short"].steps[1].x) < 3
    assert [layer.uses_context_parallel(*step.batch[:2]) for step in made["mixed"].steps] == [True, True, False, True]
    assert [position for _, position in PLANS["prefix"].forks.values()] == [128, 173]
    slots = [request for step in made["padded"].steps for request in step.requests if is_slot(request)]
    assert len(slots) == 4
    assert np.isnan(made["padded"].steps[0].x[-5:]).all()


def test_a_fork_shares_blocks_and_copies_the_cut_one() -> None:
    made = scenario(PLANS["prefix"], 4, hidden_size=2, seed=0)
    parent, _, child = made.steps[2].batch.swa_block_table
    assert (parent[:21] == child[:21]).all()  # 173 = 21 blocks of 8, and 5 tokens
    assert ("swa", parent[21], child[21]) in made.steps[2].block_copies
    assert (made.streams["a"][:173] == made.streams["c"][:173]).all()
    assert (made.streams["a"][173:] != made.streams["c"][173:263]).all()


# --- cells ---


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize("name", list(PLANS))
def test_cells_agree_with_one_device_and_with_transformers(name: str, ratio: int) -> None:
    compared = device_result(reference_of(name, ratio))
    assert (compared.verdict, compared.text) == (OK, "")
    first = list(PLANS).index(name) + ratio
    for way in (WAYS[(first + i) % len(WAYS)] for i in (0, 2)):
        result = judged(Cell(ratio, *way, name))
        assert (result.verdict, result.text) == (OK, "")
        assert 0 < result.share < 1
        assert 0 < result.theirs < 2e-5


def test_refused_cells_name_the_argument() -> None:
    result = judged(a_cell(keys="gather_hidden"))
    assert result.verdict == REFUSED
    assert result.text.startswith("key_mode must not be 'gather_hidden'")
    assert judged(a_cell(ranks=5)).text.startswith("cp_size must divide num_heads")
    assert judged(a_cell(split="round_robin_page(6)", keys="gather_compressed")).text.startswith("split must")


def test_a_wrong_refusal_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise UnsupportedError("moon must be full, got half")

    monkeypatch.setattr(layer, "check_combination", refuse)
    assert judged(a_cell()).text == "must run, but is refused: moon must be full, got half"
    assert judged(a_cell(ranks=5)).text == "must be refused for cp_size, but is for: moon must be full, got half"
    monkeypatch.setattr(layer, "check_combination", lambda **_: None)
    result = judged(a_cell(keys="gather_hidden"))
    assert (result.verdict, result.text) == (FAIL, "must be refused for key_mode, but runs")


def untrimmed_extents(right: Any) -> Any:
    def extents(query_start_loc: Any, seq_lens: Any, *args: Any, **kwargs: Any) -> Any:
        rows = right(query_start_loc, seq_lens, *args, **kwargs)
        return rows._replace(seqused_kv=seq_lens[rows.request_indices] * (np.diff(rows.cu_seqlens_q) > 0))

    return extents


# What is broken: its name in dsacp_ref.layer, how, and a cell that must notice.
BROKEN: dict[str, tuple[str, Callable[[Any], Any], Cell]] = {
    "extents not trimmed": ("local_extents", untrimmed_extents, a_cell()),
    "ranks' rows cut, not put in order": (
        "restored_rows",
        lambda _: lambda rows, partition: rows[: len(partition.restore_indices)],
        a_cell(),
    ),
    "the sink of rank 0 on every rank": (
        "share_of",
        lambda right: lambda weight, rank, size: right(weight, rank if weight.ndim > 1 else 0, size),
        a_cell(),
    ),
    "halo one window row short": (
        "window_tokens",
        lambda right: lambda place, batch, compressor, window, rows: right(place, batch, compressor, window - 1, rows),
        a_cell(ratio=1, scenario="long", keys="gather_compressed"),
    ),
    "state not carried": ("with_carried_state", lambda _: lambda cache, *_: cache, a_cell(scenario="on")),
    "index keys not written": (
        "with_entries",
        lambda right: lambda cache, entries, _, *args: right(cache, entries, None, *args),
        a_cell(scenario="long"),
    ),
    "the state off by a hundredth": (
        "updated_state",
        lambda right: lambda *args: (new := right(*args))._replace(kv=new.kv * np.float32(1.01)),
        a_cell(ratio=128, scenario="long"),  # no later step pools from it, so the cache alone shows it
    ),
    "one rank's output off": (
        "all_reduce",
        lambda right: lambda shards: [(1 + 1e-5 * (rank == 2)) * out for rank, out in enumerate(right(shards))],
        a_cell(),
    ),
}


@pytest.mark.parametrize("what", list(BROKEN))
def test_a_broken_layer_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, broken, cell = BROKEN[what]
    assert judged(cell).verdict == OK
    monkeypatch.setattr(layer, name, broken(getattr(layer, name)))
    result = judged(cell)
    assert result.verdict == FAIL
    assert result.text


def test_the_worst_place_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = layer.all_reduce

    def one_row_off(shards: Any) -> Any:
        outputs = right(shards)
        if len(outputs[0]) == 153:
            outputs[2][100] += 1
        return outputs

    monkeypatch.setattr(layer, "all_reduce", one_row_off)
    result = judged(a_cell())
    assert str(result.place) == "rank 2, request d, token 99 (step 1)"  # one decode row of c comes first
    assert "off transformers at rank 2, request d, token 99 (step 1)" in result.text


def test_writing_for_others_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    reference_of("mixed", 4)  # made before the layer is broken
    right = layer.with_window_rows

    def everywhere(cache: Any, *args: Any) -> Any:
        new = right(cache, *args)
        return new._replace(swa_cache=np.nan_to_num(new.swa_cache))

    monkeypatch.setattr(layer, "with_window_rows", everywhere)
    assert judged(a_cell()).text == "the step wrote into blocks or state of other requests"


def test_transformers_is_compared_with() -> None:
    right = reference_of("mixed", 4)
    wrong = right._replace(theirs=[rows * np.float32(1.0001) for rows in right.theirs])
    assert device_result(wrong).verdict == FAIL
    result = cell_result(a_cell(), wrong)
    assert result.verdict == FAIL
    assert "off transformers at rank" in result.text
    assert "budget" not in result.text


def test_a_near_tie_may_be_swapped_and_no_more() -> None:
    right = reference_of("long", 4)
    topk, scores = right.exact.topk[0].copy(), right.exact.scores[0].copy()
    row = 600
    worst = int(topk[row, -1])
    other = next(entry for entry in range(100) if entry not in topk[row])
    topk[row, -1] = other
    exact = right.exact._replace(topk=[topk])
    cell = a_cell(scenario="long")
    assert f"row {row} chose" in device_result(right._replace(exact=exact)).text
    assert "differ clearly" in cell_result(cell, right._replace(exact=exact)).text

    scores[row, other] = scores[row, worst] + 1e-9
    tied = right._replace(exact=exact._replace(scores=[scores]))
    compared = device_result(tied)
    assert (compared.verdict, compared.swaps, compared.theirs_swaps) == (OK, 1, 1)
    result = cell_result(cell, tied)
    assert result.swaps == 1
    # Given the wrong choice, that row's output is off, and it is the reference that is wrong here.
    assert result.place == (result.place.rank, "a", row, 0)


# --- comparing ---


def test_a_budget_is_twice_the_plain_error_and_two_ulps() -> None:
    exact = np.array([[1.0, 2.0], [4.0, 8.0]])
    plain = (exact + np.array([[0, 0], [0, 1e-3]])).astype(np.float32)
    inside = error_of(plain, exact, plain)
    assert inside.share == pytest.approx(0.5, rel=1e-2)
    assert inside.row == 1
    assert error_of((exact + np.array([[0.0025, 0], [0, 0]])).astype(np.float32), exact, plain).share > 1
    missing = exact.astype(np.float32)
    missing[0, 0] = np.nan
    assert error_of(missing, exact, plain).share == np.inf
    assert error_of(missing, np.where(np.isnan(missing), np.nan, exact), plain).share == 0


def test_selections_are_sets_of_visible_entries() -> None:
    scores = np.array([[4.0, 3.0, 2.0, np.nan]])
    expected = np.array([[0, 1, -1]], np.int32)
    assert not swapped_rows(np.array([[1, 0, -1]], np.int32), expected, scores, 0.5).any()
    for chosen, message in (
        ([0, 2, -1], "scores of 2 and 1 differ clearly"),
        ([0, 3, -1], "entry 3 is not visible"),
        ([0, 9, -1], "entry 9 is not visible"),
        ([0, -1, 1], "as many distinct entries, then -1"),
        ([0, 0, -1], "as many distinct entries, then -1"),
        ([0, -1, -1], "as many distinct entries, then -1"),
        ([0, 1, 2], "as many distinct entries, then -1"),
    ):
        with pytest.raises(MismatchError, match=message):
            swapped_rows(np.array([chosen], np.int32), expected, scores, 0.5)
    with pytest.raises(MismatchError, match="int64"):
        swapped_rows(expected.astype(np.int64), expected, scores, 0.5)
    assert scoring_noise([scores], [scores.astype(np.float32)]) == 4 * np.spacing(np.float32(4))


# --- the command ---


def printed_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip().startswith("python -m dsacp_npu parity")]


def test_a_failing_line_repeats_the_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = a_cell(split="round_robin_page(12)", scenario="short")
    call = ["parity", "--cell", str(cell), "--seed", "2"]
    assert main(call) == 0
    with monkeypatch.context() as broken:
        broken.setattr(layer, "restored_rows", BROKEN["ranks' rows cut, not put in order"][1](None))
        assert main(call) == 1
        out = capsys.readouterr().out
        (line,) = printed_lines(out)
        assert shlex.split(line)[3:] == call
        assert "0 ok, 0 refused as they have to be, 1 failed" in out
        assert main(shlex.split(line)[3:]) == 1
    assert main(shlex.split(line)[3:]) == 0


def test_one_device_that_breaks_down_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise IndexError("out of bounds")

    monkeypatch.setattr(layer, "attention_layer", broken)
    assert main(["parity", "--cell", str(a_cell())]) == 1
    out = capsys.readouterr().out
    assert "mixed, ratio 4: IndexError: out of bounds" in out
    assert len(printed_lines(out)) == 2


@pytest.mark.parametrize(
    "words, message",
    [
        (["--batches", "3"], "--batches must come with --trace"),
        (["--trace", "no/such/file"], "no file or folder no/such/file"),
        (["--seed", "-1"], "--seed must be an int >= 0"),
        (["--jobs", "0"], "--jobs must be an int >= 1"),
        (["--full", "--trace", __file__], "--full must not come with --trace"),
    ],
)
def test_a_call_that_cannot_work_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["parity", *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_without_transformers_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["parity", "--cell", str(a_cell())]) == 2
    assert outside.INSTALL in capsys.readouterr().err


def test_without_rich_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["parity"]) == 2
    assert capsys.readouterr().err == "dsacp_npu parity: error: parity prints with rich; pip install rich\n"


def test_an_unknown_command_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["parify"])
    assert "parity" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_runs_and_prints_no_colours() -> None:
    words = [sys.executable, "-m", "dsacp_npu", "parity", "--cell", str(a_cell())]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    (row,) = [line.split() for line in done.stdout.splitlines() if " zigzag " in line and line.endswith(" ok")]
    assert row[:7] == list(map(str, a_cell()))
    assert "1 ok, 0 refused as they have to be, 0 failed" in done.stdout


# --- traces ---


def small_trace() -> list[dict[str, Any]]:
    """A few conversations that grow turn by turn, each turn finding its history in the cache."""
    rng = np.random.default_rng(0)
    rows, histories = [], [[1000 * talk] for talk in range(6)]
    for turn in range(40):
        history = histories[int(rng.integers(6))]
        history.extend(range(10000 + 10 * turn, 10000 + 10 * turn + int(rng.integers(1, 8))))
        length = 512 * len(history) - int(rng.integers(0, 512))
        rows.append(
            {
                "timestamp": 100 * turn,
                "input_length": length,
                "output_length": int(rng.integers(1, 300)),
                "hash_ids": list(history),
            }
        )
    return rows


def cached_tokens(rows: list[dict[str, Any]]) -> list[int]:
    """The prefix hits, block by block; the last token of a prompt is always computed."""
    seen: set[int] = set()
    hits = []
    for row in rows:
        tokens = 0
        for block in row["hash_ids"]:
            if block not in seen or tokens + 512 >= row["input_length"]:
                break
            tokens += 512
        hits.append(tokens)
        seen.update(row["hash_ids"])
    return hits


@pytest.fixture
def traces(tmp_path: Path) -> tuple[str, str]:
    rows = small_trace()
    lines = tmp_path / "trace.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = tmp_path / "trace.csv"
    numbers = [
        f"{row['timestamp']},{row['input_length']},{cached},{row['output_length']}"
        for row, cached in zip(rows, cached_tokens(rows), strict=True)
    ]
    table.write_text("\n".join(["arrival_ms,input_tokens,cached_prefix_tokens,output_tokens", *numbers]) + "\n")
    return str(lines), str(table)


def test_both_formats_give_the_same_batches(traces: tuple[str, str]) -> None:
    lines, table = traces
    assert requests_of(lines) == requests_of(table)
    assert sum(request.cached > 0 for request in requests_of(lines)) > 20
    assert drawn_steps(lines, 6, 0) == drawn_steps(table, 6, 0) != drawn_steps(table, 6, 1)


def test_a_prompt_that_is_known_whole_is_still_computed_at_its_end(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [7, 8]}
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(row) + "\n\n" + json.dumps(row | {"timestamp": 1.5}) + "\n")
    assert requests_of(str(file)) == [Request(1024, 0, 1), Request(1024, 512, 1)]


@pytest.mark.parametrize("kind", parity_trace.SERVERS)
def test_a_server_computes_every_token_once(kind: str, traces: tuple[str, str]) -> None:
    requests = requests_of(traces[0])
    done = [request.cached for request in requests]
    last = -1
    for step in service(requests, kind):
        number = int(step.name.removeprefix(kind))
        assert number > last
        last = number
        assert sum(share.new for share in step.shares) <= parity_trace.TOKEN_BUDGET
        assert len(step.shares) <= parity_trace.MAX_RUNNING
        for share in step.shares:
            prompt = requests[share.request].prompt
            assert share.new == 1 or share.computed + share.new <= prompt
            assert share.computed >= done[share.request]
            assert share.computed == done[share.request] or share.computed > prompt  # decode steps are not all shown
            done[share.request] = share.computed + share.new
    assert all(tokens >= request.prompt for tokens, request in zip(done, requests, strict=True))


def test_scaled_steps_fit_and_keep_their_kind(traces: tuple[str, str]) -> None:
    for step in drawn_steps(traces[0], 20, 0):
        assert layer.uses_context_parallel(*step.arrays())
        *before, drawn = parity_trace.plan(step).steps
        computed = before[0] if before else {}
        assert sum(computed.values()) + sum(drawn.values()) <= parity_trace.SCALED_TOKENS
        assert [f"r{share.request}" for share in step.shares] == list(drawn)
        divisor = parity_trace.divisor_of(step)
        for share, new in zip(step.shares, drawn.values(), strict=True):
            assert (new == 1) == (share.new == 1)
            assert computed.get(f"r{share.request}", 0) == -(-share.computed // divisor)
            if share.computed % 512 == 0:
                assert share.computed % divisor == 0  # pages stay pages


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "--trace must hold requests, got an empty file"),
        ("arrival_ms,input_tokens,cached_prefix_tokens,output_tokens\n", "only a header"),
        ("a,b\n1,2\n", "line 1 must be the header arrival_ms,input_tokens"),
        ("HEADER\n0,5,0\n", "line 2 must have 4 fields, got 3"),
        ("HEADER\n0,5,0,1\n\n0,x,0,1\n", r"line 4: input_tokens must be an int in \[1, 2147483647\], got str 'x'"),
        ("HEADER\n0,0,0,1\n", r"line 2: input_tokens must be an int in \[1, .*, got 0"),
        ("HEADER\n0,5,-1,1\n", "line 2: cached_prefix_tokens must be an int"),
        ("HEADER\n0,5,5,1\n", "line 2: cached_prefix_tokens must be below 5, got 5"),
        ("HEADER\n0,99999999999,5,1\n", "line 2: input_tokens must be an int in .*, got 99999999999"),
        ('JSON\n{"timestamp": 0\n', "line 2 must be a JSON object"),
        ("JSON\n[1]\n", "line 2 must have timestamp, input_length"),
        ('JSON\n{"timestamp": 0, "input_length": 5}\n', "line 2 must have output_length, hash_ids"),
        ("BAD hash_ids 7", "line 1: hash_ids must be a list of ints, got 7"),
        ('BAD hash_ids ["a"]', "line 1: hash_ids must be a list of ints"),
        ("BAD input_length 0", r"line 1: input_length must be an int in \[1, .*, got 0"),
        ("BAD output_length 1.5", "line 1: output_length must be an int in .*, got float 1.5"),
        ("BAD timestamp null", "line 1: timestamp must be a finite number"),
    ],
)
def test_a_malformed_line_is_named(text: str, message: str, tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}
    text = text.replace("HEADER", ",".join(parity_trace.CSV_COLUMNS)).replace("JSON", json.dumps(row))
    if text.startswith("BAD "):
        _, key, value = text.split(maxsplit=2)
        text = json.dumps(row | {key: json.loads(value)})
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(ContractError, match=message):
        requests_of(str(file))


def test_binary_rubbish_is_no_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ContractError, match="--trace must be a text file in UTF-8"):
        requests_of(str(file))


def test_geometry_is_right_and_wrong_extents_are_found(
    traces: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = drawn_steps(traces[0], 2, 0)[0]
    results = geometry(step)
    assert not [result for result in results if result.text]
    alone = [result for result in results if result.ranks == 1]
    assert all(result.attended == result.scored == 1 for result in alone)
    uneven = {result.split: result.scored for result in results if result.ranks == 4}
    assert uneven["contiguous"] > uneven["zigzag"] >= 1

    right = parity_geometry.local_extents
    monkeypatch.setattr(parity_geometry, "local_extents", untrimmed_extents(right))
    wrong = {result.split for result in geometry(step) if result.text}
    assert wrong == set(parity_cells.SPLITS)
    texts = [result.text for result in geometry(step) if result.split == "contiguous" and result.ranks == 4]
    assert "rank 0: extents put queries at other positions" in texts[0]


def test_a_wrong_geometry_can_be_repeated(
    traces: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = drawn_steps(traces[1], 1, 0)[0].name
    call = ["parity", "--trace", traces[1], "--cell", str(a_cell(ratio=1, ranks=2, scenario=name)), "--seed", "0"]
    assert main(call) == 0
    capsys.readouterr()
    right = parity_geometry.partition_tokens

    def unordered(*args: Any, **kwargs: Any) -> Any:
        partition = right(*args, **kwargs)
        return partition._replace(restore_indices=np.sort(partition.restore_indices))

    monkeypatch.setattr(parity_geometry, "partition_tokens", unordered)
    assert main(call) == 1
    out = capsys.readouterr().out
    assert f"{name}, zigzag over 2 ranks: restore_indices do not put the tokens in order" in out
    assert main(shlex.split(printed_lines(out)[0])[3:]) == 1


def test_a_step_that_is_not_there_is_told(traces: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "--trace", traces[0], "--cell", str(a_cell(scenario="mixed987654"))]) == 2
    assert "--cell scenario must name a step of" in capsys.readouterr().err


def test_a_trace_runs_and_prints_its_tables(
    traces: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parity, "covering_set", lambda *args, **options: covering_set(*args, **options)[::25])
    assert main(["parity", "--trace", traces[0], "--batches", "2", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert "108 splits of a step right, 0 wrong" in out  # 2 steps, 9 splits, 6 numbers of ranks
    assert ", 0 failed" in out
    for title in ("Steps drawn", "Every split at real lengths", "One device against", "Ranks against one device"):
        assert f"\n{title}" in out
    assert max(map(len, out.splitlines())) < 250
    assert "\x1b" not in out


@pytest.mark.slow
def test_processes_give_the_same_results() -> None:
    cells = [a_cell(), a_cell(ratio=1), a_cell(split="contiguous"), a_cell(scenario="padded", keys="gather_hidden")]
    groups: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.scenario, cell.ratio), []).append(cell)

    def untimed(jobs: int) -> set[Any]:
        return {result._replace(seconds=0) for result in parity.results_of(PLANS, groups, 0, jobs)}

    assert len(untimed(1)) == 7
    assert untimed(2) == untimed(1)


def test_the_real_trace_is_read() -> None:
    if not REAL_TRACE.exists():
        pytest.skip(f"{REAL_TRACE.name}, a production trace, is not beside the checkout")
    requests = requests_of(str(REAL_TRACE))
    assert len(requests) == 12031
    assert requests[1] == Request(7322, 512, 490)
    for step in drawn_steps(str(REAL_TRACE), 2, 0):
        assert not [result for result in geometry(step) if result.text]
