"""`parity` with backends and over processes: right cells pass, broken functions, halos and ranks are found."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from dsacp_npu import _rank_layer, backend, exchange
from dsacp_npu import layer as torch_layer
from dsacp_npu.__main__ import main
from dsacp_npu.commands import parity, parity_cann, parity_processes
from dsacp_npu.commands.parity_caches import foreign, guarded, unguarded
from dsacp_npu.commands.parity_cells import Cell, all_cells, covering_set, refusals, refused_kinds
from dsacp_npu.commands.parity_compare import MismatchError, error_of
from dsacp_npu.commands.parity_engines import DEFINITION, Way, arrays, operators, operators_of, rounded, tensors
from dsacp_npu.commands.parity_results import FAIL, OK, REFUSED, CellResult, cell_result, device_result
from dsacp_npu.commands.parity_runs import CONFIG, Reference, reference
from dsacp_npu.commands.parity_scenarios import PLANS
from dsacp_npu.emulator import real_library
from dsacp_ref.config import check_combination
from dsacp_ref.spec import UnsupportedError

TORCH, CANN, OVER_PROCESSES = Way("torch"), Way("cann"), Way("torch", processes=True)
emulated = pytest.mark.skipif(real_library() is not None, reason="the real library is here: these need the emulator")


@cache
def made(name: str, ratio: int, cann: bool) -> Reference:
    if cann:
        return parity_cann.reference(parity_cann.PLANS[name], ratio, 0, CANN)
    return reference(PLANS[name], ratio, 0)


def judged(cell: Cell, way: Way) -> CellResult:
    right = made(cell.scenario, cell.ratio, way.backend == "cann")
    return cell_result(cell, right._replace(way=way))


def a_cell(**changes: Any) -> Cell:
    return Cell(4, 2, "zigzag", "full", "replicate", "all_to_all", "mixed")._replace(**changes)


def half_cell(**changes: Any) -> Cell:
    return a_cell(scenario="chunks")._replace(**changes)


@pytest.fixture
def operators_here() -> Iterator[None]:
    with operators_of(CANN):
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    parity_processes.close_all()


# --- which cells run ---


@pytest.mark.parametrize("name", ["numpy", "torch", "cann"])
def test_every_two_legal_values_meet_in_the_short_set(name: str) -> None:
    scenarios = list(parity.plans_of(Way(name)))
    chosen, grid = covering_set(scenarios, 0, name, short=True), all_cells(scenarios, name, short=True)

    def pairs(cells: Sequence[Cell]) -> set[tuple[object, ...]]:
        named = ([*cell._asdict().items()] for cell in cells if not refusals(cell, name))
        return {pair for values in named for pair in combinations(values, 2)}

    def kinds(cells: Sequence[Cell]) -> set[tuple[object, ...]]:
        reasons = (list(refused_kinds(cell, name)) for cell in cells)
        return {kinds[0] for kinds in reasons if len(kinds) == 1}

    assert pairs(chosen) == pairs(grid)
    assert kinds(chosen) == kinds(grid)
    assert {cell.ranks for cell in chosen} == {2, 3, 4}
    assert {cell.ratio for cell in chosen} == {1, 4, 128}
    assert 30 <= len(set(chosen)) == len(chosen) <= 70


def test_operators_run_with_the_sizes_of_the_grid() -> None:
    """What must be refused is told by heads and groups, which are the same in both configs."""
    for cell in all_cells(["chunks"], "cann"):
        words = {"rows": cell.rows, "key_mode": cell.keys, "output_mode": cell.output, "compress_ratio": cell.ratio}
        sizes = {"num_heads": parity_cann.CONFIG.num_heads, "o_groups": parity_cann.CONFIG.o_groups}
        if not set(refusals(cell, "cann")) - {"backend"}:
            check_combination(split=cell.split, cp_size=cell.ranks, **words, **sizes)
    assert parity_cann.CONFIG.num_heads == CONFIG.num_heads == 2 * CONFIG.o_groups


# --- torch ---


@pytest.mark.parametrize(
    "cell",
    [
        a_cell(ratio=1, ranks=4, split="round_robin", rows="scattered", keys="gather_kv", output="gather_weight"),
        a_cell(ranks=3, split="zigzag_padded", keys="gather_compressed", scenario="padded"),
        a_cell(ratio=128, ranks=5, rows="scattered", keys="gather_hidden", output="replicated_weight"),
    ],
    ids=str,
)
def test_torch_cells_pass(cell: Cell) -> None:
    result = judged(cell, TORCH)
    assert (result.verdict, result.text) == (OK, "")
    assert 0 < result.share < 1
    assert 0 < result.theirs < 2e-5


def test_torch_refuses_what_the_definition_refuses() -> None:
    for cell in (a_cell(keys="gather_hidden"), a_cell(ranks=5)):
        refused = judged(cell, TORCH)
        assert (refused.verdict, refused.text) == (REFUSED, judged(cell, DEFINITION).text)


def short_window(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, window_size, **sizes: right(*args, window_size=window_size - 1, **sizes)


def turned_ranks(right: Callable[..., Any]) -> Callable[..., Any]:
    def exchanged(shards: Sequence[Any], *args: Any) -> Any:
        first, second, *rest = right(shards, *args)
        return [second, first, *rest]

    return exchanged


def no_halo(right: Callable[..., Any]) -> Callable[..., Any]:
    """The farthest token that is wanted is dropped."""
    return lambda *args: right(*args)[1:]


def break_backend(monkeypatch: pytest.MonkeyPatch, name: str, function: str, broken: Callable[..., Any]) -> None:
    right = backend.get(name).functions
    wrong = backend.Backend(name, {**right, function: broken(right[function])})
    monkeypatch.setitem(backend.made, name, wrong)


BROKEN_TORCH: dict[str, tuple[Any, str, Callable[..., Any], Cell]] = {
    "a window one short": (backend, "selected_attention", short_window, a_cell()),
    "a dropped halo": (
        _rank_layer,
        "window_tokens",
        no_halo,
        a_cell(ratio=1, ranks=3, keys="gather_compressed", scenario="long"),
    ),
    "two ranks take each other's heads": (exchange, "head_shards", turned_ranks, a_cell()),
    "two ranks keep each other's rows": (
        exchange,
        "reduce_scatter",
        turned_ranks,
        a_cell(rows="scattered", keys="gather_hidden"),
    ),
    "one device's share of a weight": (
        torch_layer,
        "with_heads",
        lambda right: lambda weights, rank, size: right(weights, 0, size),
        a_cell(scenario="mixed"),  # its third step runs by heads
    ),
}


@pytest.mark.parametrize("what", list(BROKEN_TORCH))
def test_a_broken_torch_layer_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, broken, cell = BROKEN_TORCH[what]
    assert judged(cell, TORCH).verdict == OK
    if module is backend:
        break_backend(monkeypatch, "torch", name, broken)
    else:
        monkeypatch.setattr(module, name, broken(getattr(module, name)))
    result = judged(cell, TORCH)
    assert result.verdict == FAIL
    assert result.text
    assert judged(cell, DEFINITION).verdict == OK


# --- cann ---


@emulated
@pytest.mark.usefixtures("operators_here")
@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_cann_cells_pass(ratio: int) -> None:
    for cell in (
        half_cell(ratio=ratio, ranks=4, rows="scattered", keys="gather_hidden", output="gather_weight"),
        half_cell(ratio=ratio, ranks=3, split="round_robin", output="replicated_weight"),
    ):
        result = judged(cell, CANN)
        assert (result.verdict, result.text) == (OK, "")
        assert 0 < result.share < 1
        assert result.theirs == 0
    compared = device_result(made("chunks", ratio, True))
    assert (compared.verdict, compared.text) == (OK, "")


@emulated
def test_the_operators_choose_and_complete_entries() -> None:
    """What the scenario is for: more entries than are chosen, and entries of 128 that end in a step."""
    right = made("chunks", 4, True)
    visible = np.isfinite(right.exact.scores[0]).sum(axis=1)
    assert visible.max() > parity_cann.CONFIG.index_topk
    assert ((right.exact.topk[0] >= 0).sum(axis=1)[:9] == parity_cann.CONFIG.index_topk).all()
    before, *steps = (step.batch.seq_lens for step in (right.scenario.before, *right.scenario.steps))
    assert before[1] // 128 < steps[0][1] // 128
    assert right.scenario.block_size % 16 == right.scenario.cmp_block_size % 16 == 0
    for part in (right.weights.wq_b, right.start.swa_cache, right.scenario.steps[0].x):
        known = part[np.isfinite(part)]
        assert np.array_equal(rounded(known, "bfloat16"), known)


@emulated
@pytest.mark.usefixtures("operators_here")
def test_cann_refuses_by_name() -> None:
    for keys in ("gather_kv", "gather_compressed"):
        result = judged(half_cell(keys=keys), CANN)
        assert result.verdict == REFUSED
        assert result.text.startswith("backend 'cann' has no projected_rows")
    assert judged(half_cell(keys="gather_hidden"), CANN).text.startswith("key_mode must not be 'gather_hidden'")
    assert judged(half_cell(ranks=5), CANN).text.startswith("cp_size must divide num_heads")


def keyed(name: str, change: Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
    return name, lambda right: lambda *args, **options: change(right, *args, **options)


BROKEN_CANN: dict[str, tuple[str, Callable[..., Any]]] = {
    "a window one short": ("selected_attention", short_window),
    "output not turned back": ("apply_inverse_rope", lambda _: lambda x, cos, sin: x),
    "a hundredth too much": keyed("projected_output", lambda right, *args: 1.01 * right(*args)),
    "index queries not turned": keyed(
        "index_queries", lambda right, qr, wq_b, cos, sin, **d: right(qr, wq_b, cos * 0 + 1, sin * 0, **d)
    ),
    "index heads of one weight": keyed(
        "lightning_indexer", lambda right, q, weights, *args, **sizes: right(q, weights * 0 + 0.01, *args, **sizes)
    ),
    "entries of another eps": keyed("compress_", lambda right, *args, eps: right(*args, eps=1e-2)),
    "a row not written": keyed(
        "scattered_rows_",
        lambda right, part, rows, slots: right(part, rows, slots.masked_fill(torch.arange(len(slots)) == 0, -1)),
    ),
}


@emulated
@pytest.mark.usefixtures("operators_here")
@pytest.mark.parametrize("what", list(BROKEN_CANN))
def test_a_broken_cann_function_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, broken = BROKEN_CANN[what]
    cell = half_cell(output="replicated_weight")
    assert judged(cell, CANN).verdict == OK
    break_backend(monkeypatch, "cann", name, broken)
    result = judged(cell, CANN)
    assert result.verdict == FAIL
    assert 0 < len(result.text) < 600


@emulated
def test_foreign_int8_keys_are_guarded() -> None:
    right = made("chunks", 4, True)
    step, start = right.scenario.steps[2], right.exact.cache
    masks = foreign(step, start, 4)
    hidden = guarded(start, masks)
    assert np.isnan(hidden.index_cache.scales[masks.index_cache.scales].astype(np.float32)).all()
    touched = hidden._replace(index_cache=hidden.index_cache._replace(values=hidden.index_cache.values ^ 1))
    with pytest.raises(MismatchError, match="blocks or state of other requests"):
        unguarded(touched, start, masks)


def test_numbers_come_back_as_they_went() -> None:
    right = made("mixed", 4, False)
    for record in (right.weights, right.exact.cache._replace(swa_cache=right.plain.cache.swa_cache)):
        back = arrays(tensors(record, "float32"))
        assert type(back) is type(record)
        for mine, theirs in zip(parity_leaves(back), parity_leaves(record), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    half = tensors(right.start, "bfloat16")
    assert (half.swa_cache.dtype, half.cmp_state.kv.dtype) == (torch.bfloat16, torch.float32)
    norm = np.array([[1.0, 1.0]])
    assert error_of(np.float32([[1.0, 1.005]]), norm, norm.astype(np.float32), 2**16).share > 1  # by its norm


def parity_leaves(record: Any) -> list[np.ndarray]:
    if not hasattr(record, "_fields"):
        return [record]
    return [leaf for part in record for leaf in parity_leaves(part)]


# --- processes ---


@pytest.mark.parametrize(
    "cell",
    [
        a_cell(ranks=2, keys="gather_compressed", rows="scattered"),
        a_cell(ranks=3, ratio=128, split="round_robin", keys="gather_kv", output="gather_weight", scenario="short"),
        a_cell(ranks=4, ratio=1, split="contiguous_request", rows="scattered", keys="gather_hidden"),
    ],
    ids=str,
)
def test_processes_pass_and_agree_with_one_process(cell: Cell) -> None:
    result, alone = judged(cell, OVER_PROCESSES), judged(cell, TORCH)
    assert (result.verdict, result.text) == (OK, "")
    assert result.error == pytest.approx(alone.error, rel=0.5)


@emulated
def test_operators_run_in_processes() -> None:
    assert judged(half_cell(), Way("cann", processes=True)).verdict == OK
    refused = judged(half_cell(keys="gather_kv"), Way("cann", processes=True))
    assert (refused.verdict, refused.text[:40]) == (REFUSED, "backend 'cann' has no projected_rows; it")


def test_processes_refuse_by_name() -> None:
    for cell in (a_cell(keys="gather_hidden"), a_cell(ranks=5)):
        assert judged(cell, OVER_PROCESSES)[1:3] == (REFUSED, judged(cell, DEFINITION).text)
    assert judged(a_cell(), OVER_PROCESSES).verdict == OK


def test_swapped_processes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = a_cell(rows="scattered", keys="gather_hidden", scenario="long", split="contiguous")
    assert judged(cell, OVER_PROCESSES).verdict == OK
    right = parity_processes.step
    monkeypatch.setattr(
        parity_processes, "step", lambda way, weights, tasks: right(way, weights, [tasks[1], tasks[0], *tasks[2:]])
    )
    result = judged(cell, OVER_PROCESSES)
    assert result.verdict == FAIL
    assert result.text


@pytest.mark.parametrize(
    "sign, text",
    [(signal.SIGKILL, "rank 1: the process ended"), (signal.SIGSTOP, "no answer in 1.5 s")],
)
def test_a_process_that_ends_or_hangs_is_a_failed_cell(
    sign: signal.Signals, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert judged(a_cell(), OVER_PROCESSES).verdict == OK
    monkeypatch.setattr(parity_processes, "STEP", 1.5)
    monkeypatch.setattr(parity_processes, "GRACE", 0.5)
    pool = parity_processes.POOLS[OVER_PROCESSES, 2]
    os.kill(pool.processes[1].pid, sign)
    result = judged(a_cell(), OVER_PROCESSES)
    assert result.verdict == FAIL
    assert text in result.text
    assert not any(process.is_alive() for process in pool.processes)
    monkeypatch.undo()
    assert judged(a_cell(), OVER_PROCESSES).verdict == OK  # by another pool


def test_an_error_in_a_process_is_told() -> None:
    with pytest.raises(parity_processes.ProcessError, match=r"rank 0: AttributeError: .*no_such_layer.*; rank 1: Attr"):
        parity_processes.step(OVER_PROCESSES, made("mixed", 4, False).weights, [("no_such_layer", *[None] * 4, {})] * 2)
    assert (OVER_PROCESSES, 2) not in parity_processes.POOLS


# --- the command ---


def repeating(text: str) -> list[list[str]]:
    lines = (line.strip() for line in text.splitlines())
    return [shlex.split(line)[3:] for line in lines if line.startswith("python -m dsacp_npu parity")]


def test_a_failing_line_repeats_the_failure_with_its_backend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["parity", "--backend", "torch", "--cell", str(a_cell(scenario="short")), "--seed", "1"]
    assert main(call) == 0
    assert "=== torch (dsacp_npu.layer, float32)" in capsys.readouterr().out
    with monkeypatch.context() as broken:
        break_backend(broken, "torch", "selected_attention", short_window)
        assert main(call) == 1
        (line,) = repeating(capsys.readouterr().out)
        assert line == call
    broken_step = turned_ranks(lambda tasks: tasks)
    with monkeypatch.context() as broken:
        right = parity_processes.step
        broken.setattr(parity_processes, "step", lambda way, weights, tasks: right(way, weights, broken_step(tasks)))
        cell = a_cell(scenario="short", rows="scattered", keys="gather_hidden")
        call = ["parity", "--backend", "torch", "--processes", "--cell", str(cell), "--seed", "0"]
        assert main(["parity", "--processes", "--cell", str(cell), "--jobs", "1"]) == 1
        assert repeating(capsys.readouterr().out) == [call]
    assert main(call) == 0
    assert not parity_processes.POOLS


@emulated
def test_everything_is_one_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def few(scenarios: Sequence[str], seed: int, name: str, *, short: bool) -> list[Cell]:
        assert short
        return [half_cell(ratio=1)] if name == "cann" else [a_cell(ratio=1, scenario="short")]

    monkeypatch.setattr(parity, "covering_set", few)
    call = ["parity", "--everything", "--short", "--jobs", "1"]
    assert main(call) == 0
    out = capsys.readouterr().out
    headings = [line.split()[1] for line in out.splitlines() if line.startswith("===")]
    assert headings == ["the", "torch", "cann", "torch", "cann"]
    assert out.count("emulated operators, contract only") == 4
    assert out.count("1 ok, 0 refused as they have to be, 0 failed") == 5
    assert "Everything: all passed" in out

    break_backend(monkeypatch, "torch", "window_attention", short_window)
    assert main(call) == 1
    out = capsys.readouterr().out
    assert [line[1:3] for line in repeating(out)] == [["--backend", "torch"]]  # processes have their own code
    assert "Everything: 1 failed" in out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--everything", "--processes"], "--everything must not come with --processes"),
        (["--everything", "--cell", str(a_cell())], "--everything must not come with --cell"),
        (["--everything", "--trace", "x"], "--everything must not come with --trace"),
        (["--backend", "cann", "--trace", "x"], "--trace must not come with --backend cann"),
        (["--backend", "cann", "--cell", str(a_cell())], "--cell scenario must be one of 'chunks', 'prefill'"),
    ],
)
def test_a_call_that_cannot_work_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["parity", *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_an_npu_is_not_reached_over_gloo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("dsacp_npu.emulator.real_library", lambda: "torch_npu")
    assert operators() == "operators of torch_npu"
    assert main(["parity", "--backend", "cann", "--processes"]) == 2
    assert "--processes runs over gloo, on the CPU; torch_npu has" in capsys.readouterr().err
    with pytest.raises(UnsupportedError, match="--processes runs over gloo"):
        parity.device_of(Way("cann", processes=True))
    assert parity.device_of(CANN) == "npu"
