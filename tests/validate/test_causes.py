"""Whatever the step: a fault that all ranks have in common is among the causes, and a right dump has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsacp_npu.validation import entries, lengths, positions, slots
from dsacp_npu.validation.core import Check
from dsacp_npu.validation.reading import Dump, Item
from dsacp_npu.validation.report import examined, view_of
from dsacp_npu.validation.view import Skipped
from dsacp_ref.extents import local_extents, token_positions
from dsacp_ref.partition import local_token_indices
from dsacp_ref.spec import ContractError
from tests.strategies import Step, each, fewer
from tests.strategies import cuts as cuts_of

CHECKS = (*lengths.CHECKS, *positions.CHECKS, *slots.CHECKS, *entries.CHECKS)


def item(values: Any) -> Item:
    """A tensor of a dump."""
    return Item(np.asarray(values, np.int32), "int32", "", "")


def dump_of(step: Step, rng: np.random.Generator) -> Dump:
    """A right dump of the integers of a step, tables and slots by loops."""
    batch, ratio, size, cmp_size = step.batch, 4, int(rng.integers(1, 5)), int(rng.integers(1, 4))
    loc, lens = batch.query_start_loc, batch.key_lens
    computed = lens - np.diff(loc)
    settings = {"cp_size": step.cp_size, "split": step.split, "causal": True, "empty_extent": "zero"}
    settings |= {"compress_ratio": ratio, "block_size": size, "cmp_block_size": cmp_size}
    if step.num_input_tokens is not None:
        settings["num_input_tokens"] = step.num_input_tokens

    def table(counts: list[int]) -> np.ndarray:
        rows = np.full((len(counts), max(counts, default=0) + 1), -1, np.int32)
        blocks = rng.permutation(sum(counts)).tolist()
        for row, count in zip(rows, counts, strict=True):
            row[:count] = [blocks.pop() for _ in range(count)]
        return rows

    tables = table([-(-int(n) // size) for n in lens]), table([-(-(int(n) // ratio) // cmp_size) for n in lens])
    written, requests, numbers, places = [], [], [], []
    for request, (start, end) in enumerate(zip(computed.tolist(), lens.tolist(), strict=True)):
        count = int(loc[request + 1] - loc[request])
        places_here = range(start, end) if end else [-1] * count
        written += [tables[0][request, p // size] * size + p % size if p >= 0 else -1 for p in places_here]
        for entry in range(max(start, 0) // ratio, end // ratio):
            requests.append(request)
            numbers.append(entry)
            places.append(tables[1][request, entry // cmp_size] * cmp_size + entry % cmp_size)
    count_of = [requests.count(request) for request in range(len(lens))]
    shared = {
        "query_start_loc": loc,
        "seq_lens": lens,
        "num_computed_tokens": computed,
        "compress_cu_seqlens": loc,
        "swa_block_table": tables[0],
        "cmp_block_table": tables[1],
        "slot_mapping": written,
        "entry_start_loc": [0, *np.cumsum(count_of)],
        "entry_requests": [*requests, -1],
        "entry_indices": [*numbers, -1],
        "entry_slots": [*places, -1],
    }
    ranks = {}
    for rank in range(step.cp_size):
        extents = local_extents(loc, lens, step.cp_size, rank, **step.cut)
        tokens = local_token_indices(loc, step.cp_size, rank, **step.cut)
        own = {
            "token_indices": tokens,
            "cu_seqlens_q": extents.cu_seqlens_q,
            "seqused_kv": extents.seqused_kv,
            "request_indices": extents.request_indices,
            "positions": token_positions(tokens, loc, lens),
            "swa_block_table_rows": tables[0][extents.request_indices],
            "cmp_block_table_rows": tables[1][extents.request_indices],
        }
        ranks[rank] = {name: item(values) for name, values in (shared | own).items()}
    return Dump(settings, ranks)


@pytest.mark.slow
@fewer(10)
@given(cuts_of(), st.integers(0, 2**32 - 1))
def test_right_integers_have_no_finding(every: list[Step], seed: int) -> None:
    for step in each(every):
        if len(step.batch.query_lens):
            report = examined(dump_of(step, np.random.default_rng(seed)))
            assert not report.findings, report.findings[0]


def with_fault(dump: Dump, check: Check, made: Any) -> Dump | None:
    """The dump of an implementation with this fault on all ranks; None where it would have failed."""
    ranks = {}
    batch = dump.ranks[0]["query_start_loc"].array, dump.ranks[0]["seq_lens"].array
    for rank, tensors in dump.ranks.items():
        got = tensors[check.tensor].array
        try:
            wrong = made(view_of(dump, rank, batch), got)
        except (ContractError, IndexError, Skipped, ValueError):
            return None
        if wrong is None or isinstance(wrong, list):
            return None
        ranks[rank] = tensors | {check.tensor: item(wrong)}
    return Dump(dump.settings, ranks)


@pytest.mark.slow
@fewer(10)
@given(cuts_of(), st.integers(0, 2**32 - 1), st.data())
def test_a_fault_of_all_ranks_is_among_the_causes(every: list[Step], seed: int, data: st.DataObject) -> None:
    """Told by the faults' own functions; `test_length_faults` has them by hand."""
    for step in each(every):
        if not len(step.batch.query_lens):
            continue
        dump = dump_of(step, np.random.default_rng(seed))
        check = data.draw(st.sampled_from(CHECKS))
        if not check.faults:
            continue
        fault = data.draw(st.sampled_from(check.faults))
        wrong = with_fault(dump, check, fault.made)
        if wrong is None:
            continue
        for finding in examined(wrong).findings:
            assert finding.check == check.name
            assert fault.kind in [cause.kind for cause in finding.causes], (fault.kind, finding)
