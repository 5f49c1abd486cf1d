"""One result for each row of the tables of `parity`: what was run, how far it is off, and where."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from dsacp_npu.commands.parity_cells import Cell, refusals
from dsacp_npu.commands.parity_compare import (
    GRAINS,
    THEIRS_LIMIT,
    Error,
    MismatchError,
    Place,
    error_of,
    swapped_rows,
)
from dsacp_npu.commands.parity_runs import RankStep, Reference, one_device, over_ranks, rank_inputs, run_layer
from dsacp_npu.commands.parity_scenarios import Scenario, step_tokens
from dsacp_ref.layer import LayerCache
from dsacp_ref.paging import slot_mapping
from dsacp_ref.quant import QuantizedVectors
from dsacp_ref.spec import UnsupportedError

OK, REFUSED, FAIL = "ok", "refused", "FAIL"
NOWHERE = Place(0, "-", 0, 0)
NOTHING = Error(0.0, 0.0, 0)


class CellResult(NamedTuple):
    """One cell.

    Fields:
        cell: Cell, or StackCell of V3.2.
        verdict: OK, REFUSED (and had to be) or FAIL.
        text: of a refusal, or what is wrong.
        error: against one device in float64, largest error over largest value.
        share: of the budget, the worse of largest and Frobenius error.
        place: of the largest error.
        theirs, theirs_place: largest absolute difference from transformers; 0 where that is not compared with.
        swaps: rows in which another selection was accepted.
    """

    cell: Any
    verdict: str
    text: str = ""
    error: float = 0.0
    share: float = 0.0
    place: Place = NOWHERE
    theirs: float = 0.0
    theirs_place: Place = NOWHERE
    swaps: int = 0
    seconds: float = 0.0


class DeviceResult(NamedTuple):
    """One scenario on one device, against transformers.

    Fields:
        verdict, text: OK or FAIL, and what is wrong.
        plain: error of float32 against float64, largest error over largest value.
        swaps: rows in which float32 chose otherwise than float64.
        theirs: largest absolute difference from transformers, rows of another selection left out.
        theirs_swaps: how many those are.
        given: the difference in all rows, given transformers' selection; place: where.
    """

    scenario: str
    ratio: int
    verdict: str
    text: str = ""
    steps: int = 0
    requests: int = 0
    tokens: int = 0
    plain: float = 0.0
    swaps: int = 0
    theirs: float = 0.0
    theirs_swaps: int = 0
    given: float = 0.0
    place: Place = NOWHERE
    seconds: float = 0.0

    @property
    def kind(self) -> str:
        """What beside the scenario tells it from others."""
        return f"ratio {self.ratio}"


# --- one device ---


def device_result(reference: Reference) -> DeviceResult:
    """One device against transformers: in rows of equal selection, and in all rows given transformers' selection."""
    start = time.perf_counter()
    scenario, exact, plain = reference.scenario, reference.exact, reference.plain
    result = DeviceResult(
        scenario.name,
        scenario.ratio,
        OK,
        steps=len(scenario.steps),
        requests=sum(len(rows) > 0 for rows in scenario.streams.values()),
        tokens=sum(int((step_tokens(step).positions >= 0).sum()) for step in scenario.steps),
        plain=error_of(
            joined(scenario, plain.outputs), joined(scenario, exact.outputs), joined(scenario, plain.outputs)
        ).size,
    )
    try:
        swaps = accepted(f"one device in {reference.way.dtype}", reference.own.topk, reference)
        if not reference.theirs:
            return result._replace(swaps=swaps, seconds=time.perf_counter() - start)
        theirs_swaps = accepted("transformers", reference.theirs_topk, reference)
        result = result._replace(swaps=swaps, theirs_swaps=theirs_swaps)
        same = ~theirs_differ(reference)
        theirs, at = theirs_error(joined(scenario, plain.outputs), reference, same)
        given, given_at = theirs, at
        if theirs_swaps:
            outputs = one_device(
                scenario, reference.weights, reference.config, reference.start, reference.theirs_topk
            ).outputs
            given, given_at = theirs_error(joined(scenario, outputs), reference, np.ones_like(same))
        result = result._replace(theirs=theirs, given=given, place=row_place(scenario, 0, given_at))
        if not max(theirs, given) < THEIRS_LIMIT:
            off = f"{max(theirs, given):.3g} off transformers"
            raise MismatchError(f"one device is {off} at {result.place}, allowed {THEIRS_LIMIT}")
    except MismatchError as error:
        result = result._replace(verdict=FAIL, text=str(error))
    return result._replace(seconds=time.perf_counter() - start)


def accepted(who: str, topk: list[np.ndarray], reference: Reference) -> int:
    """In how many rows another set than float64's was chosen, after all are found acceptable."""
    exact, swaps = reference.exact, 0
    for i, (chosen, due, scores) in enumerate(zip(topk, exact.topk, exact.scores, strict=True)):
        try:
            swaps += int(swapped_rows(chosen, due, scores, reference.noise).sum())
        except MismatchError as error:
            raise MismatchError(f"{who}, step {i}: {error}") from None
    return swaps


# --- rows of a whole scenario, end to end ---


def real_rows(scenario: Scenario) -> list[int]:
    """The rows of every step that belong to its requests, graph slots included, padding not."""
    return [int(step.batch.query_start_loc[-1]) for step in scenario.steps]


def joined(scenario: Scenario, per_step: list[np.ndarray]) -> np.ndarray:
    """Arrays by row of a step, all steps end to end, without padding."""
    return np.concatenate([rows[:count] for rows, count in zip(per_step, real_rows(scenario), strict=True)])


def row_place(scenario: Scenario, rank: int, row: int) -> Place:
    """The place of a row of `joined`."""
    ends = np.cumsum(real_rows(scenario))
    i = int(np.searchsorted(ends, row, side="right"))
    step, local = scenario.steps[i], row - int(ends[i] - real_rows(scenario)[i])
    request = int(np.searchsorted(step.batch.query_start_loc, local, side="right")) - 1
    return Place(rank, step.requests[request], int(step_tokens(step).positions[local]), i)


def theirs_differ(reference: Reference) -> np.ndarray:
    """The joined rows in which transformers attends to another set of entries than the exact run."""
    theirs, exact = (joined(reference.scenario, topk) for topk in (reference.theirs_topk, reference.exact.topk))
    return np.asarray((np.sort(theirs, axis=1) != np.sort(exact, axis=1)).any(axis=1))


def theirs_error(rows: np.ndarray, reference: Reference, compared: np.ndarray) -> tuple[float, int]:
    """The largest absolute difference of joined rows from transformers', and in which row."""
    theirs = joined(reference.scenario, reference.theirs)
    compared = compared & ~np.isnan(theirs).any(axis=1)
    error = np.where(compared[:, None], np.abs(rows - np.where(np.isnan(theirs), 0, theirs)), 0)
    error = np.nan_to_num(error, nan=np.inf).max(axis=1, initial=0)
    return float(error.max(initial=0)), int(error.argmax()) if len(error) else 0


# --- a cell ---


def cell_result(cell: Cell, reference: Reference) -> CellResult:
    """The cell run and compared. Whatever the layer raises is a finding about the layer, not the end of `parity`."""
    start = time.perf_counter()
    try:
        refused = refusals(cell, reference.way.backend)
        result = refused_result(cell, reference) if refused else compared_result(cell, reference)
    except MismatchError as error:
        result = CellResult(cell, FAIL, str(error))
    except UnsupportedError as error:
        result = CellResult(cell, FAIL, f"must run, but is refused: {error}")
    except Exception as error:
        result = CellResult(cell, FAIL, f"{type(error).__name__}: {error}")
    return result._replace(seconds=time.perf_counter() - start)


def refused_result(cell: Cell, reference: Reference) -> CellResult:
    """A cell that must be refused, by the name of an argument that the design refuses."""
    step, names = reference.scenario.steps[0], refusals(cell, reference.way.backend)
    _, inputs = rank_inputs(cell, step)
    try:
        run_layer(cell, reference, step, inputs, [reference.start] * cell.ranks)
    except UnsupportedError as error:
        if str(error).split(maxsplit=1)[0] not in names:
            raise MismatchError(f"must be refused for {' or '.join(names)}, but is for: {error}") from None
        return CellResult(cell, REFUSED, str(error))
    raise MismatchError(f"must be refused for {' or '.join(names)}, but runs")


def compared_result(cell: Cell, reference: Reference) -> CellResult:
    """A cell that must run, compared with one device and with transformers."""
    scenario = reference.scenario
    exact, plain = joined(scenario, reference.exact.outputs), joined(scenario, reference.plain.outputs)
    steps, caches = over_ranks(cell, reference)
    left_out = joined(scenario, [step.left_out for step in steps])
    same = ~theirs_differ(reference) & ~left_out if reference.theirs else None
    grain = GRAINS[reference.way.dtype]
    worst, theirs = (NOTHING, NOWHERE), (0.0, NOWHERE)
    for rows, owners in views(scenario, steps):
        rows[left_out] = exact[left_out]
        error = error_of(rows, exact, plain, grain)
        if error.share >= worst[0].share:
            worst = error, row_place(scenario, int(owners[error.row]), error.row)
        off, row = (0.0, 0) if same is None else theirs_error(rows, reference, same)
        if off >= theirs[0]:
            theirs = off, row_place(scenario, int(owners[row]), row)
    swaps = sum(int(step.swapped.sum()) for step in steps)
    result = CellResult(cell, OK, "", worst[0].size, worst[0].share, worst[1], *theirs, swaps)
    wrong = list(wrong_caches(cell, reference, caches))
    if not theirs[0] < THEIRS_LIMIT:
        wrong.insert(0, f"{theirs[0]:.3g} off transformers at {theirs[1]}, allowed {THEIRS_LIMIT}")
    if not worst[0].share <= 1:
        budget = f"{worst[0].share:.3g} times the {reference.way.dtype} budget"
        wrong.insert(0, f"{budget} off one device at {worst[1]}")
    return result._replace(verdict=FAIL, text="; ".join(wrong[:3])) if wrong else result


def views(scenario: Scenario, steps: list[RankStep]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The joined output rows as each rank knows them, and the rank that each row is from.

    A step that leaves every rank with all rows is seen from each rank; of one that leaves rows scattered there is one
    view, put together from all ranks.
    """
    num_views = max(len(step.result.outputs) if step.tokens is None else 1 for step in steps)
    for view in range(num_views):
        rows, owners = [], []
        for i, (step, planned) in enumerate(zip(steps, scenario.steps, strict=True)):
            num_rows, outputs = len(planned.x), step.result.outputs
            if step.tokens is None:
                out, owner = outputs[view], np.full(num_rows, view)
                if (out[real_rows(scenario)[i] :] != 0).any():
                    raise MismatchError(f"rank {view}, step {i}: output is not 0 in rows beyond the last request")
            else:
                out, owner = np.full(planned.x.shape, np.nan, np.float32), np.full(num_rows, 0)
                for rank, (part, tokens) in enumerate(zip(outputs, step.tokens, strict=True)):
                    out[tokens[tokens >= 0]] = part[tokens >= 0]
                    owner[tokens[tokens >= 0]] = rank
            rows.append(out)
            owners.append(owner)
        yield joined(scenario, rows), joined(scenario, owners)


# --- caches ---


def wrong_caches(cell: Cell, reference: Reference, caches: list[LayerCache]) -> Iterator[str]:
    """What is wrong with any rank's cache after the last step, in every place where one device's is defined."""
    exact, plain = leaves(reference.exact.cache), leaves(reference.plain.cache)
    for rank, cache in enumerate(caches):
        for (name, mine), (_, high), (_, low) in zip(leaves(cache), exact, plain, strict=True):
            if mine.dtype.kind != "f":
                if not np.array_equal(mine, high):
                    yield f"rank {rank}: {name} is {mine.tolist()}, expected {high.tolist()}"
                continue
            known, due = ~np.isnan(mine), ~np.isnan(high)
            if name == "swa_cache" and cell.keys == "gather_compressed":
                # A rank has the raw rows that it read, and those that the next step reads.
                due &= known | last_windows(reference, len(high))[..., None]
            if (known != due).any():
                block = int(np.argwhere(known != due)[0][0])
                yield f"rank {rank}: {name} {'lacks' if due[block].any() else 'has'} rows at {block}"
                continue
            dtype = "float32" if "_state." in name else reference.way.dtype
            error = error_of(mine, np.where(due, high, np.nan), low, GRAINS[dtype])
            if not error.share <= 1:
                yield f"rank {rank}: {name} is {error.share:.3g} times the {dtype} budget off at {error.row}"


def leaves(record: Any, name: str = "") -> list[tuple[str, np.ndarray]]:
    """Every array of a record, with its name; int8 keys as the vectors that their codes stand for."""
    if isinstance(record, QuantizedVectors):
        record = record.values * record.scales.astype(np.float64)[..., None]
    if not hasattr(record, "_fields"):
        return [(name, record)]
    named = zip(record._fields, record, strict=True)
    return [leaf for field, part in named for leaf in leaves(part, f"{name}.{field}" if name else field)]


def last_windows(reference: Reference, num_blocks: int) -> np.ndarray:
    """bool[num_blocks, block_size]: the raw rows that the next token of any request would read."""
    scenario = reference.scenario
    tables = {name: (step.batch, row) for step in scenario.steps for row, name in enumerate(step.requests)}
    due = np.zeros(num_blocks * scenario.block_size, np.bool_)
    for batch, row in tables.values():
        seq_len = int(batch.seq_lens[row])
        positions = np.arange(max(0, seq_len - reference.config.window_size + 1), seq_len, dtype=np.int32)
        owner = np.full(len(positions), row, np.int32)
        due[slot_mapping(positions, owner, batch.swa_block_table, scenario.block_size)] = True
    return due.reshape(num_blocks, scenario.block_size)
