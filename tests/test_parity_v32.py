"""`parity --model v32`: right cells pass, broken stacks, layers and ranks are found and can be repeated."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsacp_npu import backend
from dsacp_npu.__main__ import main
from dsacp_npu.commands import (
    outside,
    parity_processes,
    parity_v32,
    parity_v32_cann,
    parity_v32_layer,
    parity_v32_outside,
    parity_v32_runs,
)
from dsacp_npu.commands.parity_compare import MismatchError
from dsacp_npu.commands.parity_engines import Way, arrays, operators_of, rounded, tensors
from dsacp_npu.commands.parity_results import FAIL, OK, REFUSED, CellResult
from dsacp_npu.commands.parity_scenarios import is_slot
from dsacp_npu.commands.parity_v32_cells import (
    CACHES,
    INTER,
    StackCell,
    all_stack_cells,
    parsed_stack_cell,
    refused_kinds,
    stack_covering_set,
    stack_refusals,
)
from dsacp_npu.commands.parity_v32_layer import checked_layer, layer_check
from dsacp_npu.commands.parity_v32_outside import BlockRun, model_blocks
from dsacp_npu.commands.parity_v32_results import device_result, stack_cell_result
from dsacp_npu.commands.parity_v32_runs import StackReference, stack_reference
from dsacp_npu.commands.parity_v32_scenarios import STACK_PLANS, stack_scenario
from dsacp_npu.commands.parity_v32_weights import CONFIG, stack_weights
from dsacp_npu.emulator import real_library
from dsacp_ref.block import check_expert_mode
from dsacp_ref.layer import uses_context_parallel
from dsacp_ref.spec import ContractError, UnsupportedError

# By their paths: the packages have functions of the same names.
REF_LAYER, REF_STACK, NPU_PARTS = (
    importlib.import_module(name) for name in ("dsacp_ref.mla_layer", "dsacp_ref.mla_stack", "dsacp_npu._mla_parts")
)
REF_BLOCK = importlib.import_module("dsacp_ref.block")
NUMPY, TORCH, CANN = (Way(name, model="v32") for name in ("numpy", "torch", "cann"))
OVER_PROCESSES = Way("torch", processes=True, model="v32")
emulated = pytest.mark.skipif(real_library() is not None, reason="the real library is here: these need the emulator")


@cache
def made(name: str, kind: str, cann: bool) -> StackReference:
    if cann:
        return parity_v32_cann.layer_reference(parity_v32_cann.LAYER_PLANS[name], kind, 0, CANN)
    return stack_reference(STACK_PLANS[name], kind, 0, TORCH)  # as the definition makes it, without transformers


def judged(cell: StackCell, way: Way = NUMPY) -> CellResult:
    right = made(cell.scenario, "float" if way.backend == "cann" else cell.cache, way.backend == "cann")
    return stack_cell_result(cell, right._replace(way=way))


def a_cell(**changes: Any) -> StackCell:
    return StackCell("zigzag", 3, "split", "float", "mixed")._replace(**changes)


def half_cell(**changes: Any) -> StackCell:
    return StackCell("zigzag", 2, "whole", "float", "chunks")._replace(**changes)


@pytest.fixture
def operators_here() -> Iterator[None]:
    with operators_of(CANN):
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    parity_processes.close_all()


# --- the grid ---


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("way", [NUMPY, CANN])
def test_every_two_legal_values_meet_in_the_covering_set(way: Way, short: bool) -> None:
    scenarios, name = list(parity_v32.plans_of(way)), way.backend
    grid = all_stack_cells(scenarios, name, short=short)
    chosen = stack_covering_set(scenarios, 0, name, short=short)

    def pairs(cells: Sequence[StackCell]) -> set[tuple[object, ...]]:
        named = ([*cell._asdict().items()] for cell in cells if not stack_refusals(cell, name))
        return {pair for values in named for pair in combinations(values, 2)}

    def kinds(cells: Sequence[StackCell]) -> set[tuple[object, ...]]:
        reasons = (list(refused_kinds(cell, name)) for cell in cells)
        return {kinds[0] for kinds in reasons if len(kinds) == 1}

    assert pairs(chosen) == pairs(grid)
    assert kinds(chosen) == kinds(grid)
    assert len(set(chosen)) == len(chosen) <= (20 if short else 140)
    assert {"zigzag", "round_robin"} <= {cell.split for cell in chosen}
    assert chosen == stack_covering_set(scenarios, 0, name, short=short)


def test_every_split_meets_every_scenario_with_both_caches() -> None:
    chosen = {(cell.split, cell.cache, cell.scenario) for cell in stack_covering_set(list(STACK_PLANS), 0)}
    splits = {cell.split for cell in all_stack_cells(["long"])}
    assert chosen == set(product(splits, CACHES, STACK_PLANS))


def test_what_must_be_refused_is_what_the_definition_refuses() -> None:
    experts = stack_weights(0).blocks[0].experts
    assert len(experts.w1) == INTER
    for cell in all_stack_cells(["long"]):
        if not stack_refusals(cell):
            check_expert_mode(cell.experts, experts, cell.ranks)
            continue
        with pytest.raises(UnsupportedError, match=r"^cp_size must divide"):
            check_expert_mode(cell.experts, experts, cell.ranks)


def test_a_cell_is_read_back_and_sglangs_names_are_known() -> None:
    for cell in stack_covering_set(list(STACK_PLANS), 0):
        assert parsed_stack_cell(str(cell), list(STACK_PLANS)) == cell
    for theirs, ours in (("in-seq-split", "zigzag"), ("round-robin-split", "round_robin")):
        assert parsed_stack_cell(str(a_cell(split=theirs)), ["mixed"]) == a_cell(split=ours)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("ranks=3", "ranks=0", r"--cell ranks must be an int in \[1, 64\], got 0"),
        ("ranks=3", "ranks=three", "--cell ranks must be an int, got 'three'"),
        ("ranks=3,", "", "--cell must give ranks, got"),
        ("ranks=3", "ranks=3,ratio=4", "--cell must be one of 'split', 'ranks', 'experts', 'cache', 'scenario'"),
        ("experts=split", "experts=half", "--cell experts must be one of 'whole', 'split', 'sliced', got 'half'"),
        ("cache=float", "cache=int8", "--cell cache must be one of 'float', 'fp8', got 'int8'"),
        ("zigzag", "zickzack", "--cell split must be one of 'contiguous'"),
        ("mixed", "inside", "--cell scenario must be one of 'long'"),
    ],
)
def test_a_wrong_cell_is_told(old: str, new: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = str(a_cell()).replace(old, new)
    with pytest.raises(ContractError, match=message):
        parsed_stack_cell(text, list(STACK_PLANS))
    assert main(["parity", "--model", "v32", "--cell", text]) == 2
    err = capsys.readouterr().err
    assert err.startswith("dsacp_npu parity: error: --cell")
    assert err.count("\n") == 1


# --- scenarios ---


def test_scenarios_hold_what_they_are_named_for() -> None:
    steps = {name: stack_scenario(plan, seed=0).steps for name, plan in STACK_PLANS.items()}
    assert max(len(step.token_ids) for step in steps["few"]) < 8
    assert min(len(step.token_ids) for step in steps["few"]) == 1
    assert len(steps["short"][0].requests) == 12
    assert 0 in np.diff(steps["short"][0].batch.query_start_loc)
    assert [uses_context_parallel(*step.batch[:2]) for step in steps["mixed"]] == [True, True, False, True]
    ends = [length for step in steps["chunks"] for length in step.batch.seq_lens.tolist()]
    assert {length % 8 == 0 for length in ends} == {True, False}
    parent, _, child = steps["prefix"][2].batch.block_table
    assert (parent[:5] == child[:5]).all()  # 45 = 5 blocks of 8, and 5 tokens
    assert (parent[5], child[5]) in steps["prefix"][2].copies
    slots = [name for step in steps["padded"] for name in step.requests if is_slot(name)]
    assert len(slots) == 4
    assert all(step.num_rows == len(step.token_ids) + 5 for step in steps["padded"])
    assert CONFIG.index_topk < max(ends)


# --- beside transformers ---


@pytest.mark.parametrize("name", ["few", "prefix", "padded"])
def test_layers_agree_with_transformers(name: str) -> None:
    scenario = stack_scenario(STACK_PLANS[name], seed=0)
    check = layer_check(scenario, 0)
    assert not check.text
    assert 0 < check.theirs <= check.given < parity_v32_layer.THEIRS_LIMIT
    reference = made(name, "float", False)._replace(checked=check)
    assert device_result(reference).compared
    assert device_result(reference._replace(checked=check._replace(text="off"))).verdict == FAIL


def test_yarn_and_its_mscale_are_in_what_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = stack_scenario(STACK_PLANS["few"], seed=0)
    for change in ({"mscale_all_dim": 0.5}, {"rope_beta_fast": 4.0}, {"rms_norm_eps": 1e-3}):
        with monkeypatch.context() as broken:
            broken.setattr(parity_v32_layer, "CONFIG", replace(CONFIG, **change))
            assert layer_check(scenario, 0).text.startswith("layer 0, "), change


def test_another_choice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = stack_scenario(STACK_PLANS["long"], seed=0)
    weights = stack_weights(0).blocks[1].attention
    theirs = {name: model_blocks(0, ids)[1] for name, ids in scenario.streams.items()}
    assert not checked_layer(scenario, weights, theirs).text

    def with_choice(chosen: np.ndarray) -> dict[str, BlockRun]:
        return {"a": theirs["a"]._replace(selections=chosen)}

    other = theirs["a"].selections.copy()
    other[100, 0] = next(token for token in range(100) if token not in other[100])
    with pytest.raises(MismatchError, match=r"transformers, step 0: row 100 chose .* differ clearly"):
        checked_layer(scenario, weights, with_choice(other))
    later = theirs["a"].selections.copy()
    later[50, 0] = 51
    with pytest.raises(MismatchError, match="entry 51 is not visible"):
        checked_layer(scenario, weights, with_choice(later))
    off = {"a": theirs["a"]._replace(outputs=theirs["a"].outputs * np.float32(1.0001))}
    with pytest.raises(MismatchError, match="off transformers at rank 0, request a, token"):
        checked_layer(scenario, weights, off)


# --- cells ---

WAYS = [
    ("zigzag", 4, "sliced", "fp8"),
    ("round_robin", 3, "split", "float"),
    ("round_robin", 8, "whole", "fp8"),
    ("contiguous", 5, "whole", "float"),
    ("zigzag_padded", 2, "split", "fp8"),
    ("round_robin_page(6)", 3, "sliced", "float"),
    ("zigzag", 8, "split", "float"),
]


@pytest.mark.parametrize("name", list(STACK_PLANS))
def test_cells_agree_with_one_device(name: str) -> None:
    first = list(STACK_PLANS).index(name)
    for way in (WAYS[(first + i) % len(WAYS)] for i in (0, 3)):
        result = judged(StackCell(*way, name))
        assert (result.verdict, result.text) == (OK, "")
        assert result.share < 1


def test_refused_cells_name_the_argument() -> None:
    result = judged(a_cell(ranks=5))
    assert result.verdict == REFUSED
    assert result.text.startswith("cp_size must divide the 48 rows of w1")


def test_a_wrong_refusal_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise UnsupportedError("moon must be full, got half")

    monkeypatch.setattr(REF_STACK, "check_expert_mode", refuse)
    assert judged(a_cell()).text == "must run, but is refused: moon must be full, got half"
    assert judged(a_cell(ranks=5)).text == "must be refused for cp_size, but is for: moon must be full, got half"


def without_prefix(right: Callable[..., Any]) -> Callable[..., Any]:
    def extents(query_start_loc: Any, seq_lens: Any, *args: Any, **kwargs: Any) -> Any:
        rows = right(query_start_loc, seq_lens, *args, **kwargs)
        computed = np.maximum(seq_lens - np.diff(query_start_loc), 0)[rows.request_indices]
        return rows._replace(seqused_kv=rows.seqused_kv - np.where(rows.seqused_kv > 0, computed, 0).astype(np.int32))

    return extents


def unordered(_: Callable[..., Any]) -> Callable[..., Any]:
    """What ranks gathered is left as it came: rank by rank, pad rows cut."""

    def gathered(shards: Sequence[Any], partition: Any) -> Any:
        real = np.concatenate(partition.token_indices) >= 0
        return [np.concatenate(shards)[real]] * len(shards)

    return gathered


def one_bit_off(right: Callable[..., Any]) -> Callable[..., Any]:
    def coded(*args: Any) -> Any:
        rows = right(*args).copy()
        rows[..., -1:, 0] ^= 1
        return rows

    return coded


def without_the_first(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda shards, *args: right([shards[0] * 0, *shards[1:]], *args)


# What is broken: the module, a name in it, how, and a cell that must notice.
BROKEN: dict[str, tuple[Any, str, Callable[[Any], Any], StackCell]] = {
    "extents without their prefix": (REF_LAYER, "local_extents", without_prefix, a_cell()),
    "gathered rows not put in order": (REF_LAYER, "gathered_in_order", unordered, a_cell(scenario="long")),
    "a code one bit off": (
        REF_LAYER,
        "encoded_latents",
        one_bit_off,
        a_cell(cache="fp8", scenario="long", experts="whole"),
    ),
    "scores of the wrong position": (
        REF_LAYER,
        "lightning_indexer",
        lambda right: lambda q, weights, *args, **sizes: right(q[::-1].copy(), weights, *args, **sizes),
        a_cell(split="round_robin"),
    ),
    "one rank's summand lost": (REF_BLOCK, "reduce_scatter", without_the_first, a_cell()),
    "one rank's slice lost": (REF_BLOCK, "all_reduce", without_the_first, a_cell(experts="sliced")),
    "the first row of a request for its last": (
        REF_STACK,
        "gathered_last_rows",
        lambda right: lambda shards, *args: right([shard[::-1].copy() for shard in shards], *args),
        a_cell(scenario="prefix"),
    ),
}


@pytest.mark.parametrize("what", list(BROKEN))
def test_a_broken_stack_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, broken, cell = BROKEN[what]
    assert judged(cell).verdict == OK
    monkeypatch.setattr(module, name, broken(getattr(module, name)))
    result = judged(cell)
    assert result.verdict == FAIL
    assert result.text


def test_logits_are_compared_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    right = REF_STACK.gathered_last_rows

    def off(shards: Any, *args: Any) -> Any:
        rows = right(shards, *args)
        return [*rows[:-1], rows[-1] * (1 + 1e-9)]

    made("mixed", "float", False)
    monkeypatch.setattr(REF_STACK, "gathered_last_rows", off)
    result = judged(a_cell())
    assert result.place.rank == 2
    assert "float64 budget off one device at rank 2, request" in result.text


@pytest.mark.parametrize("kind", CACHES)
def test_writing_for_others_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made("mixed", kind, False)  # before the layer is broken
    monkeypatch.setattr(REF_LAYER, "scattered_rows", lambda part, *_: np.zeros_like(part))
    assert judged(a_cell(cache=kind)).text == "the step wrote into blocks of other requests"


# --- torch ---


@pytest.mark.parametrize(
    "cell",
    [
        a_cell(ranks=4, cache="fp8"),
        a_cell(split="round_robin", experts="sliced", scenario="padded"),
        a_cell(ranks=8, split="zigzag_ceil", experts="whole", scenario="few"),
    ],
    ids=str,
)
def test_torch_cells_pass(cell: StackCell) -> None:
    result = judged(cell, TORCH)
    assert (result.verdict, result.text) == (OK, "")
    assert result.share < 1


def test_torch_refuses_what_the_definition_refuses() -> None:
    assert judged(a_cell(ranks=5), TORCH)[1:3] == (REFUSED, judged(a_cell(ranks=5)).text)


def test_a_broken_torch_layer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = a_cell()
    assert judged(cell, TORCH).verdict == OK
    right = NPU_PARTS.local_extents

    def extents(query_start_loc: Any, seq_lens: Any, *args: Any, **kwargs: Any) -> Any:
        rows = right(query_start_loc, seq_lens, *args, **kwargs)
        computed = (seq_lens - query_start_loc.diff())[rows.request_indices].clamp(min=0)
        return rows._replace(seqused_kv=(rows.seqused_kv - computed * (rows.seqused_kv > 0)).int())

    monkeypatch.setattr(NPU_PARTS, "local_extents", extents)
    assert judged(cell, TORCH).verdict == FAIL
    assert judged(cell).verdict == OK


def test_numbers_and_codes_come_back_as_they_went() -> None:
    for kind in CACHES:
        right = made("mixed", kind, False)
        for record in (right.weights, *right.exact.caches):
            back = arrays(tensors(record, "float64"))
            assert type(back) is type(record)
            for mine, theirs in zip(parts_of(back), parts_of(record), strict=True):
                assert (mine is None) == (theirs is None)
                if mine is not None:
                    assert mine.dtype == theirs.dtype
                    assert mine.tobytes() == theirs.tobytes()


def parts_of(record: Any) -> list[Any]:
    if not isinstance(record, (tuple, list)):
        return [record]
    return [leaf for part in record for leaf in parts_of(part)]


# --- cann ---


@emulated
@pytest.mark.usefixtures("operators_here")
@pytest.mark.parametrize(
    "cell",
    [half_cell(), half_cell(ranks=4, split="round_robin"), half_cell(ranks=3, split="contiguous", scenario="prefill")],
    ids=str,
)
def test_cann_cells_pass(cell: StackCell) -> None:
    result = judged(cell, CANN)
    assert (result.verdict, result.text) == (OK, "")
    assert 0 < result.share < 1


@emulated
@pytest.mark.usefixtures("operators_here")
def test_cann_refuses_codes_by_name() -> None:
    result = judged(half_cell(cache="fp8"), CANN)
    assert result.verdict == REFUSED
    assert result.text.startswith("lightning_indexer on cann: index_cache must hold")


@emulated
def test_the_operators_choose_among_more_tokens_than_they_may() -> None:
    right = made("chunks", "float", True)
    choices = right.choices
    assert choices is not None
    assert np.isfinite(choices.scores[0]).sum(axis=1).max() > parity_v32_cann.CONFIG.index_topk
    assert ((choices.topk[0] >= 0).sum(axis=1)[:9] == parity_v32_cann.CONFIG.index_topk).all()
    for part in (*right.weights[:3], right.start[0].latent_cache):
        known = part[np.isfinite(part)]
        assert np.array_equal(rounded(known, "bfloat16"), known)


def keyed(name: str, change: Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
    return name, lambda right: lambda *args, **options: change(right, *args, **options)


BROKEN_CANN: dict[str, tuple[str, Callable[..., Any]]] = {
    "a hundredth too much": keyed(
        "latent_attention", lambda right, *args, **scale: (got := right(*args, **scale))._replace(out=1.03 * got.out)
    ),
    "index heads of one weight": keyed(
        "lightning_indexer", lambda right, q, weights, *args, **sizes: right(q, weights * 0 + 0.01, *args, **sizes)
    ),
    "rope channels not turned": ("apply_rope", lambda _: lambda x, cos, sin: x),
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
    assert judged(half_cell(), CANN).verdict == OK
    functions = backend.get("cann").functions
    wrong = backend.Backend("cann", {**functions, name: broken(functions[name])})
    monkeypatch.setitem(backend.made, "cann", wrong)
    result = judged(half_cell(), CANN)
    assert result.verdict == FAIL
    assert 0 < len(result.text) < 600


# --- processes ---


@pytest.mark.parametrize(
    "cell", [a_cell(ranks=2, cache="fp8"), a_cell(ranks=4, split="round_robin", experts="sliced")], ids=str
)
def test_processes_pass_and_agree_with_one_process(cell: StackCell) -> None:
    result, alone = judged(cell, OVER_PROCESSES), judged(cell, TORCH)
    assert (result.verdict, result.text) == (OK, "")
    assert result.share < 1 > alone.share


@emulated
def test_operators_run_in_processes() -> None:
    way = Way("cann", processes=True, model="v32")
    assert judged(half_cell(), way).verdict == OK
    assert judged(half_cell(cache="fp8"), way).verdict == REFUSED


def test_swapped_processes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = a_cell(ranks=2)
    right = parity_processes.outputs
    monkeypatch.setattr(parity_processes, "outputs", lambda *args: right(*args)[::-1])
    assert judged(cell, OVER_PROCESSES).verdict == FAIL
    monkeypatch.undo()
    assert judged(cell, OVER_PROCESSES).verdict == OK
    assert judged(a_cell(ranks=5), OVER_PROCESSES)[1:3] == (REFUSED, judged(a_cell(ranks=5)).text)


# --- the command ---


def printed_lines(text: str) -> list[list[str]]:
    lines = (line.strip() for line in text.splitlines())
    return [shlex.split(line)[3:] for line in lines if line.startswith("python -m dsacp_npu parity")]


def test_a_failing_line_repeats_the_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = a_cell(scenario="few")
    call = ["parity", "--model", "v32", "--cell", str(cell), "--seed", "0"]
    sglangs = ["parity", "--model", "v32", "--cell", str(cell._replace(split="in-seq-split"))]
    assert main(call) == 0
    out = capsys.readouterr().out
    assert "=== V3.2, the definition (dsacp_ref.mla_stack, float64)" in out
    assert "against transformers" in out
    with monkeypatch.context() as broken:
        broken.setattr(REF_LAYER, "local_extents", without_prefix(REF_LAYER.local_extents))
        assert main(sglangs) == 1
        out = capsys.readouterr().out
        (line,) = printed_lines(out)
        assert line == call
        assert "0 ok, 0 refused as they have to be, 1 failed" in out
        assert main(line) == 1
    capsys.readouterr()
    assert main(line) == 0


@pytest.mark.parametrize("way", [["--backend", "torch"], ["--backend", "torch", "--processes"]])
def test_a_failing_line_repeats_it_with_its_backend(
    way: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parity_processes.close_all()
    call = ["parity", "--model", "v32", *way, "--cell", str(a_cell(ranks=2, scenario="few")), "--seed", "1"]
    with monkeypatch.context() as broken:
        right = parity_v32_runs.in_order
        broken.setattr(
            parity_v32_runs, "in_order", lambda parts, tokens, count: right(parts[::-1], tokens[::-1], count - 1)
        )
        assert main(call) == 1
        assert printed_lines(capsys.readouterr().out) == [call]
    assert main(call) == 0
    assert not parity_processes.POOLS


def test_one_device_that_breaks_down_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise IndexError("out of bounds")

    monkeypatch.setattr(parity_v32_runs, "mla_decoder_stack", broken)
    assert main(["parity", "--model", "v32", "--cell", str(a_cell())]) == 1
    out = capsys.readouterr().out
    assert "mixed, cache float: IndexError: out of bounds" in out
    assert len(printed_lines(out)) == 2


@emulated
def test_everything_is_one_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def few(scenarios: Sequence[str], seed: int, name: str, *, short: bool) -> list[StackCell]:
        assert short
        return [half_cell()] if name == "cann" else [a_cell(ranks=2, scenario="few"), a_cell(ranks=5, scenario="few")]

    monkeypatch.setattr(parity_v32, "stack_covering_set", few)
    call = ["parity", "--model", "v32", "--everything", "--short", "--jobs", "1"]
    assert main(call) == 0
    out = capsys.readouterr().out
    headings = [line.split()[2] for line in out.splitlines() if line.startswith("===")]
    assert headings == ["the", "torch", "cann", "torch", "cann"]
    assert out.count("1 ok, 1 refused as they have to be, 0 failed") == 3
    assert out.count("1 ok, 0 refused as they have to be, 0 failed") == 2
    assert "Everything: all passed" in out
    assert max(map(len, out.splitlines())) < 250
    assert "\x1b" not in out


V4_CELL = "ratio=4,ranks=3,split=zigzag,rows=full,keys=replicate,output=all_to_all,scenario=mixed"


@pytest.mark.parametrize(
    "words, message",
    [
        (["--model", "v32", "--cell", V4_CELL], "--cell must be one of 'split', 'ranks', 'experts'"),
        (["--cell", str(a_cell())], "--cell must be one of 'ratio', 'ranks'"),
        (["--model", "v32", "--batches", "3"], "--batches must come with --trace"),
        (["--model", "v32", "--full", "--trace", __file__], "--full must not come with --trace"),
        (["--model", "v32", "--everything", "--cell", "x"], "--everything must not come with --cell"),
        (["--model", "v32", "--backend", "cann", "--trace", "x"], "--trace must not come with --backend cann"),
        (
            ["--model", "v32", "--backend", "cann", "--cell", str(half_cell(experts="split"))],
            "--cell experts must be one of 'whole', got 'split'",
        ),
        (
            ["--model", "v32", "--backend", "cann", "--cell", str(half_cell(scenario="long"))],
            "--cell scenario must be one of 'chunks', 'prefill'",
        ),
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
    parity_v32_outside.model.cache_clear()
    monkeypatch.setitem(sys.modules, "transformers", None)
    cell = str(a_cell(scenario="few"))
    assert main(["parity", "--model", "v32", "--cell", cell]) == 2
    assert outside.INSTALL in capsys.readouterr().err
    assert main(["parity", "--model", "v32", "--backend", "torch", "--cell", cell]) == 0


def test_a_trace_runs_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{100 * i},{700 + 37 * i},{512 * (i % 2)},{3 + i}" for i in range(12)]
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join(["arrival_ms,input_tokens,cached_prefix_tokens,output_tokens", *rows]) + "\n")
    monkeypatch.setattr(
        parity_v32, "stack_covering_set", lambda *args, **options: stack_covering_set(*args, **options)[:2]
    )
    call = ["parity", "--model", "v32", "--backend", "torch", "--trace", str(trace), "--jobs", "1"]
    assert main([*call, "--batches", "1", "--short"]) == 0
    out = capsys.readouterr().out
    assert "54 splits of a step right, 0 wrong" in out  # a step, 9 splits, 6 numbers of ranks
    assert "index keys that it scores (V3.2)" in out
    right = NPU_PARTS.rope_table
    with monkeypatch.context() as broken:
        broken.setattr(NPU_PARTS, "rope_table", lambda positions, frequencies: right(positions // 2, frequencies))
        assert main([*call, "--batches", "1", "--short"]) == 1
        line = printed_lines(capsys.readouterr().out)[0]
        assert main(line) == 1
    assert main(line) == 0
