"""What worker processes do for the tests of drafts; each function gets this rank's `Ranks` first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from dsacp_npu.caches import Caches
from dsacp_npu.distributed import Ranks
from dsacp_npu.drafts import draft_steps, handed_rows, rows_everywhere
from dsacp_npu.module import DSAttention
from dsacp_npu.parallel import parallel_of
from dsacp_npu.rows import own_rows
from dsacp_npu.step import StepMetadata, step_metadata
from dsacp_ref.spec import ContractError
from tests.module.draft_worlds import Story, Toy, speak
from tests.module.worlds import FOUR_GROUPS

Options = Mapping[str, Any]


def spoken(
    ranks: Ranks, toy: Toy, arrivals: Mapping[str, int], num_new: int, cases: list[tuple[Options, int]]
) -> list[Story]:
    """A story for each case: (parallel options, drafts a step)."""
    return [
        speak(toy, arrivals, parallel_of(options, tp=ranks), num_drafts=num_drafts, num_new=num_new)
        for options, num_drafts in cases
    ]


def drafting(
    options: Options, ranks: Ranks | None, held: Mapping[str, int], spare_rows: int = 0
) -> tuple[DSAttention, Caches]:
    """A draft layer without weights, and its caches as if they held so many tokens of each request."""
    layer_idx = FOUR_GROUPS.num_hidden_layers
    layer = DSAttention(FOUR_GROUPS, layer_idx, parallel_of(options, tp=ranks), dtype="float64")
    sizes: dict[str, Any] = {"num_tokens": 64, "max_requests": 4, "block_size": 4, "spare_rows": spare_rows}
    caches = Caches(FOUR_GROUPS, [layer_idx], dtype="float64", **sizes)
    for request in held:
        caches.open(request)
    caches.advance(caches.batches(held)[1])
    return layer, caches


class Local(NamedTuple):
    """One rank's lengths in one draft step."""

    splits: bool
    cu_seqlens_q: list[int]
    seqused_kv: list[int]
    num_rows: int
    positions: list[int]


def local_lengths(
    ranks: Ranks, options: Options, held: Mapping[str, int], new_tokens: Mapping[str, int], num_steps: int
) -> list[Local]:
    """The lengths that the operators get in every draft step."""
    layer, caches = drafting(options, ranks, held)
    return [local_of(step) for step in draft_steps([layer], caches, new_tokens, num_steps)]


def local_of(step: StepMetadata) -> Local:
    """This rank's lengths in a step."""
    queries = (step.rank_step(1).geometry if step.splits else step.geometry(1)).queries
    cu_seqlens_q, seqused_kv = queries.extents.cu_seqlens_q.tolist(), queries.extents.seqused_kv.tolist()
    return Local(step.splits, cu_seqlens_q, seqused_kv, step.num_rows, step.positions.tolist())


class Handed(NamedTuple):
    """Rows of a step, each the number of its token, and what another step was handed of them."""

    unmoved: bool
    tokens: list[int]
    rows: list[list[float]]
    everywhere: list[list[float]]


def handed(
    ranks: Ranks,
    pair: tuple[Options, Options],
    new_tokens: tuple[Mapping[str, int], Mapping[str, int]],
    tokens: list[int] | None,
    asked: list[int],
    padding: int = 0,
) -> Handed:
    """Hand the rows of a step by layers with one set of options to a step by layers with another."""
    steps = []
    for options, counts in zip(pair, new_tokens, strict=True):
        layer, caches = drafting(options, ranks, dict.fromkeys(counts, 2))
        num_rows = sum(counts.values()) + padding
        steps.append(step_metadata([layer], caches, counts, num_input_tokens=num_rows if padding else None))
    whole = torch.arange(steps[0].num_tokens, dtype=torch.float64)[:, None].expand(-1, 2) + 1
    mine, parallel = own_rows(whole, steps[0]), parallel_of(pair[0], tp=ranks)
    given = None if tokens is None else torch.tensor(tokens, dtype=torch.int32)
    found = handed_rows(mine, *steps, parallel, tokens=given)
    everywhere = rows_everywhere(mine, steps[0], parallel, torch.tensor(asked, dtype=torch.int32))
    return Handed(found is mine, steps[1].token_indices.tolist(), found.tolist(), everywhere.tolist())


def refused_groups(ranks: Ranks, options: Options, sizes: list[int]) -> list[str]:
    """What asking for rows says with groups of other sizes than that which they are split over."""
    layer, caches = drafting(options, ranks, {"a": 0})
    step = step_metadata([layer], caches, {"a": 8})
    rows, told = torch.zeros(step.num_rows, 2), []
    for size in sizes:
        other = parallel_of(options, tp=Ranks(None, size, 0))
        try:
            rows_everywhere(rows, step, other, torch.tensor([0], dtype=torch.int32))
        except ContractError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told
