"""The strategies of the arithmetic modules reach the corners they promise, and poison what must not be read."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings

from tests.maths_strategies import calls, chunkings, compressors, index_calls, operator_tokens

SEARCH = settings(max_examples=300, phases=[Phase.generate], database=None)  # found early, or not reached

CALL_CORNERS = {
    "no row": lambda call: len(call.seqused_kv) == 0,
    "a row without queries but with keys": lambda call: any(
        n == 0 < used for n, used in zip(np.diff(call.cu_seqlens_q), call.seqused_kv, strict=True)
    ),
    "a padded graph slot": lambda call: any(
        used == 0 < n for n, used in zip(np.diff(call.cu_seqlens_q), call.seqused_kv, strict=True)
    ),
    "queries beyond the last row": lambda call: len(call.q) > call.cu_seqlens_q[-1],
    "a query before the first entry": lambda call: any(place and place[1] + 1 < call.ratio for place in call.places),
    "a query that closes a window": lambda call: any(
        place and call.ratio > 1 and (place[1] + 1) % call.ratio == 0 for place in call.places
    ),
    "-1 before an entry": lambda call: (np.diff((call.topk >= 0).astype(int), axis=1) > 0).any(),
    "blocks of other sizes": lambda call: call.swa.cache.shape[1] != call.cmp.cache.shape[1],
    "blocks out of order": lambda call: any(slots != sorted(slots) for slots in call.swa.slots),
}


@pytest.mark.parametrize("corner", CALL_CORNERS)
def test_attention_calls_reach(corner):
    find(calls(), CALL_CORNERS[corner], settings=SEARCH)


INDEX_CORNERS = {
    "more room than entries": lambda call: any(
        place and 0 < (place[1] + 1) // call.ratio < call.index_topk for place in call.places
    ),
    "a real choice": lambda call: any(
        place and (place[1] + 1) // call.ratio > call.index_topk for place in call.places
    ),
    "equal keys": lambda call: any(len(np.unique(keys, axis=0)) < len(keys) - 2 for keys in call.keys),
    "keys that no query sees": lambda call: any(np.isnan(keys).any() for keys in call.keys),
}


@pytest.mark.parametrize("corner", INDEX_CORNERS)
def test_indexer_calls_reach(corner):
    find(index_calls(), INDEX_CORNERS[corner], settings=SEARCH)


STEP_CORNERS = {
    "a step without tokens": lambda steps: any(sum(step) == 0 for step in steps),
    "a request without tokens beside one with": lambda steps: any(0 in step and sum(step) for step in steps),
    "exactly a window": lambda steps: any(4 in step for step in steps),
    "one token after another": lambda steps: any(a == b == [1] for a, b in pairwise(steps)),
    "several windows in one step": lambda steps: any(max(step) >= 8 for step in steps),
}


@pytest.mark.parametrize("corner", STEP_CORNERS)
def test_chunkings_reach(corner):
    find(chunkings(4), STEP_CORNERS[corner], settings=SEARCH)


@pytest.mark.parametrize(("ratio", "overlap"), [(1, False), (1, True), (4, True), (8, False)])
def test_compressors_reach(ratio, overlap):
    find(compressors(), lambda made: made.ratio == ratio and made.overlap == overlap and made.freqs, settings=SEARCH)


@given(calls())
def test_every_slot_without_a_row_is_poisoned(call):
    for side, rows in ((call.swa, call.raw), (call.cmp, call.entries)):
        flat = side.cache.reshape(-1, side.cache.shape[2])
        used = [slot for slots in side.slots for slot in slots]
        assert np.isnan(np.delete(flat, used, axis=0)).all()
        for slots, mine in zip(side.slots, rows, strict=True):
            assert np.array_equal(flat[slots].reshape(mine.shape), mine)


@given(calls())
def test_inputs_refuse_writes(call):
    for array in (call.q, call.swa.cache, call.topk, call.seqused_kv, call.sink):
        assert array.size == 0 or not array.flags.writeable


def test_pad_rows_stay_only_behind_the_last_real_row():
    assert operator_tokens(np.array([3, 4, -1])).tolist() == [3, 4, -1]
    assert operator_tokens(np.array([3, -1, 4, -1])).tolist() == [3, 4]
    assert operator_tokens(np.array([-1])).tolist() == [-1]
