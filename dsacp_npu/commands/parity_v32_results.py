"""One result for each row of the tables of `parity --model v32`: what was run, how far it is off, and where."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dsacp_npu.commands import parity_v32_cann
from dsacp_npu.commands.parity_compare import GRAINS, Error, MismatchError, Place, error_of
from dsacp_npu.commands.parity_engines import Way
from dsacp_npu.commands.parity_results import FAIL, NOWHERE, OK, REFUSED, CellResult
from dsacp_npu.commands.parity_scenarios import Plan
from dsacp_npu.commands.parity_v32_caches import Layers, fresh_layers, leaves, raw
from dsacp_npu.commands.parity_v32_cells import StackCell, stack_refusals
from dsacp_npu.commands.parity_v32_runs import (
    RankRows,
    StackReference,
    float64_budget,
    ranks_run,
    stack_reference,
    stack_step,
)
from dsacp_npu.commands.parity_v32_scenarios import StackScenario
from dsacp_ref.spec import UnsupportedError


class StackDeviceResult(NamedTuple):
    """One scenario on one device, and its layers beside transformers.

    Fields:
        verdict, text: OK or FAIL, and what is wrong.
        plain: error of the plain precision against float64, largest error over largest value.
        swaps: rows in which a layer in the plain precision chooses otherwise than in float64.
        theirs, theirs_swaps, given: see `LayerCheck`; compared is False where transformers is not compared with.
    """

    scenario: str
    cache: str
    verdict: str
    text: str = ""
    steps: int = 0
    requests: int = 0
    tokens: int = 0
    plain: float = 0.0
    swaps: int = 0
    compared: bool = False
    theirs: float = 0.0
    theirs_swaps: int = 0
    given: float = 0.0
    seconds: float = 0.0

    @property
    def kind(self) -> str:
        """What beside the scenario tells it from others."""
        return f"cache {self.cache}"


def stack_reference_result(
    plan: Plan, cache: str, seed: int, way: Way
) -> tuple[StackDeviceResult, StackReference | None]:
    """A group's reference and how it compares with transformers; no reference where one device breaks down."""
    start = time.perf_counter()
    try:
        make = parity_v32_cann.layer_reference if way.backend == "cann" else stack_reference
        made = make(plan, cache, seed, way)
        return device_result(made)._replace(seconds=time.perf_counter() - start), made
    except ImportError:
        raise
    except Exception as error:
        return StackDeviceResult(plan.name, cache, FAIL, f"{type(error).__name__}: {error}"), None


def device_result(reference: StackReference) -> StackDeviceResult:
    """What is known of one device."""
    scenario, exact, plain = reference.scenario, joined(reference.exact.hidden), joined(reference.plain.hidden)
    result = StackDeviceResult(
        scenario.name,
        reference.cache,
        OK,
        steps=len(scenario.steps),
        requests=sum(len(ids) > 0 for ids in scenario.streams.values()),
        tokens=sum(int((step.tokens().positions >= 0).sum()) for step in scenario.steps),
        plain=error_of(plain, exact, plain).size,
        swaps=reference.swaps,
    )
    if reference.checked is None:
        return result
    text, swaps, theirs, theirs_swaps, given = reference.checked
    verdict = FAIL if text else OK
    result = result._replace(verdict=verdict, text=text, swaps=swaps, compared=True)
    return result._replace(theirs=theirs, theirs_swaps=theirs_swaps, given=given)


def joined(per_step: Sequence[np.ndarray]) -> np.ndarray:
    """The rows of all steps end to end."""
    return np.concatenate(per_step)


# --- a cell ---


def stack_cell_result(cell: StackCell, reference: StackReference) -> CellResult:
    """The cell run and compared. Whatever the stack raises is a finding about it, not the end of `parity`."""
    start = time.perf_counter()
    try:
        refused = stack_refusals(cell, reference.way.backend)
        result = refused_result(cell, reference, refused) if refused else compared_result(cell, reference)
    except MismatchError as error:
        result = CellResult(cell, FAIL, str(error))
    except UnsupportedError as error:
        result = CellResult(cell, FAIL, f"must run, but is refused: {error}")
    except Exception as error:
        result = CellResult(cell, FAIL, f"{type(error).__name__}: {error}")
    return result._replace(seconds=time.perf_counter() - start)


def runner(reference: StackReference) -> Callable[..., tuple[RankRows, list[Layers]]]:
    """What makes a step over ranks: of the stack, or of a layer on operators."""
    return parity_v32_cann.layer_step if reference.way.backend == "cann" else stack_step


def refused_result(cell: StackCell, reference: StackReference, names: tuple[str, ...]) -> CellResult:
    """A cell that must be refused, by a name that the design gives."""
    start = reference.start
    if cell.cache != reference.cache:  # refused, whatever it holds
        num_blocks, block_size = start[0].latent_cache.shape[:2]
        start = fresh_layers(reference.config, len(start), num_blocks, block_size, "float32", cell.cache)
    try:
        runner(reference)(cell, reference, 0, [start] * cell.ranks)
    except UnsupportedError as error:
        if str(error).split(maxsplit=1)[0] not in names:
            raise MismatchError(f"must be refused for {' or '.join(names)}, but is for: {error}") from None
        return CellResult(cell, REFUSED, str(error))
    raise MismatchError(f"must be refused for {' or '.join(names)}, but runs")


def compared_result(cell: StackCell, reference: StackReference) -> CellResult:
    """A cell that must run, compared with one device: rows, every rank's logits, every rank's caches."""
    steps, caches = ranks_run(cell, reference, runner(reference))
    rows, owners = joined([step.hidden for step in steps]), joined([step.owners for step in steps])
    error = error_against(reference, rows, joined(reference.exact.hidden), joined(reference.plain.hidden))
    worst, wrong = (error, row_place(reference.scenario, int(owners[error.row]), error.row)), []
    for rank, place in logit_errors(steps, reference):
        if place[0].share > worst[0].share:
            worst = place[0], place[1]._replace(rank=rank)
    if not worst[0].share <= 1:
        budget = f"{worst[0].share:.3g} times the {reference.way.dtype} budget"
        wrong.append(f"{budget} off one device at {worst[1]}")
    wrong += wrong_caches(reference, caches)
    swaps = sum(step.swapped for step in steps)
    result = CellResult(cell, OK, "", worst[0].size, worst[0].share, worst[1], 0.0, NOWHERE, swaps)
    return result._replace(verdict=FAIL, text="; ".join(wrong[:3])) if wrong else result


def error_against(reference: StackReference, actual: np.ndarray, exact: np.ndarray, plain: np.ndarray) -> Error:
    """The error of some rows, by the budget of the way's dtype."""
    if actual.shape != exact.shape:
        raise MismatchError(f"rows have shape {list(actual.shape)}, expected {list(exact.shape)}")
    dtype = reference.way.dtype
    due = float64_budget(exact, plain) if dtype == "float64" else plain
    return error_of(actual, exact, due, GRAINS[dtype])


def logit_errors(steps: Sequence[RankRows], reference: StackReference) -> Iterator[tuple[int, tuple[Error, Place]]]:
    """The error of every rank's logits, all requests of all steps end to end; nothing for a layer alone."""
    exact, plain = reference.exact.logits, reference.plain.logits
    if not exact:
        return
    names = [
        Place(0, name, int(length) - 1, i)
        for i, step in enumerate(reference.scenario.steps)
        for name, length in zip(step.requests, step.batch.seq_lens, strict=True)
    ]
    for rank in range(len(steps[0].logits)):
        mine = joined([step.logits[rank] for step in steps])
        error = error_against(reference, mine, joined(exact), joined(plain))
        yield rank, (error, names[error.row] if names else NOWHERE)


def row_place(scenario: StackScenario, rank: int, row: int) -> Place:
    """The place of a row of all steps end to end."""
    for i, step in enumerate(scenario.steps):
        if row < len(step.token_ids):
            request = int(np.searchsorted(step.batch.query_start_loc, row, side="right")) - 1
            return Place(rank, step.requests[request], int(step.tokens().positions[row]), i)
        row -= len(step.token_ids)
    return NOWHERE


def wrong_caches(reference: StackReference, caches: Sequence[Layers]) -> Iterator[str]:
    """What is wrong with any rank's caches after the last step, in every place; codes bit for bit."""
    for rank, mine in enumerate(caches):
        for layer, cache in enumerate(mine):
            parts = zip(
                leaves(cache), leaves(reference.exact.caches[layer]), leaves(reference.plain.caches[layer]), strict=True
            )
            for (name, got), (_, exact), (_, plain) in parts:
                text = wrong_part(reference, got, exact, plain)
                if text:
                    yield f"rank {rank}, layer {layer}: {name} {text}"


def wrong_part(reference: StackReference, got: np.ndarray, exact: np.ndarray, plain: np.ndarray) -> str:
    """What is wrong with one array of a cache."""
    if reference.cache == "fp8":
        same = raw(got) == raw(exact)
        if got.dtype.kind == "f":
            same |= np.isnan(got) & np.isnan(exact)  # scales that nobody wrote
        return "" if same.all() else f"has other codes at block {int(np.argwhere(~same)[0][0])}"
    known, due = ~np.isnan(got), ~np.isnan(exact)
    if (known != due).any():
        block = int(np.argwhere(known != due)[0][0])
        return f"{'lacks' if due[block].any() else 'has'} rows at block {block}"
    error = error_against(reference, np.where(known, got, 0), *(np.where(due, part, 0) for part in (exact, plain)))
    if error.share <= 1:
        return ""
    return f"is {error.share:.3g} times the {reference.way.dtype} budget off at block {error.row}"
