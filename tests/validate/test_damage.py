"""Any damage to any tensor is reported, never thrown; and what a check reads, it sees change."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsacp_npu.validation.reading import Dump, Item
from dsacp_npu.validation.report import Report, examined
from dsacp_npu.validation.schema import TENSORS
from dsacp_ref.spec import ContractError
from tests.layer_strategies import CSA, HCA, WINDOW, Cut
from tests.strategies import fewer
from tests.validate.dumps import dump_of
from tests.validate.test_number_faults import HEADS, RANKS, ROBIN, right

WORLDS = ((CSA, RANKS), (CSA, ROBIN), (WINDOW, HEADS), (HCA, HEADS), (CSA, Cut(1)))
_read: dict[int, Dump] = {}


def world(index: int) -> Dump:
    """A right dump, read once."""
    if index not in _read:
        with TemporaryDirectory() as folder:
            _read[index] = dump_of(Path(folder), right(*WORLDS[index]))
    return deepcopy(_read[index])


@st.composite
def damages(draw: st.DrawFn) -> tuple[int, int, str, str, int]:
    """A world, a rank, a tensor, what is done to it, and where."""
    index = draw(st.integers(0, len(WORLDS) - 1))
    dump = world(index)
    rank = draw(st.sampled_from(sorted(dump.ranks)))
    name = draw(st.sampled_from(sorted(dump.ranks[rank])))
    kinds = ["up", "down", "huge", "negative", "short", "long", "empty", "gone", "nan", "reversed", "zeros"]
    return index, rank, name, draw(st.sampled_from(kinds)), draw(st.integers(0, 10**6))


def damaged(array: np.ndarray, how: str, at: int) -> np.ndarray:
    """A changed copy."""
    array = array.copy()
    if how in ("up", "down", "huge", "negative", "nan") and array.size:
        change = {"up": 1, "down": -1, "huge": 10**6, "negative": -7, "nan": np.nan}[how]
        if array.dtype.kind == "i" and how == "nan":
            change = 2**31 - 1
        flat = array.reshape(-1)
        with np.errstate(over="ignore"):
            flat[at % array.size] = change if how in ("nan", "huge", "negative") else flat[at % array.size] + change
    if how == "short":
        array = array[: len(array) // 2]
    if how == "long":
        array = np.concatenate([array, array[:1]])
    if how == "empty":
        array = array[:0]
    if how == "reversed":
        array = array[::-1].copy()
    return np.zeros_like(array) if how == "zeros" else array


@pytest.mark.slow
@fewer(2)
@given(damages())
def test_damage_is_reported_never_thrown(case: tuple[int, int, str, str, int]) -> None:
    index, rank, name, how, at = case
    dump = world(index)
    if how == "gone":
        del dump.ranks[rank][name]
    else:
        item = dump.ranks[rank][name]
        dump.ranks[rank][name] = Item(damaged(item.array, how, at), item.dtype, item.word, item.place)
    try:
        report = examined(dump)
    except ContractError:  # lengths that the settings cannot cut
        assert name in ("query_start_loc", "seq_lens")
        return
    assert isinstance(report.as_dict(), dict)


def findings_of(report: Report) -> set[str]:
    """The tensors that differ."""
    return {finding.tensor for finding in report.findings}


EXACT = [tensor.name for tensor in TENSORS if tensor.kind == "int32" and tensor.name not in ("topk_length",)]


@pytest.mark.parametrize("name", EXACT)
def test_a_change_of_any_integer_is_seen(name: str) -> None:
    """Of the first element, which everything reads."""
    dump: Any = world(0)
    for tensors in dump.ranks.values():
        item = tensors[name]
        array = item.array.copy()
        array.reshape(-1)[0] += 3
        tensors[name] = Item(array, item.dtype, item.word, item.place)
    if name in ("swa_block_table", "cmp_block_table"):  # what others are measured by
        assert examined(dump).findings
    elif name in ("query_start_loc", "seq_lens"):
        with_batch = examined(dump).findings
        assert with_batch
    else:
        assert name in findings_of(examined(dump))


@pytest.mark.parametrize("name", ["cos", "sin", "full_cos", "full_sin", "out", "lse", "output"])
def test_a_change_of_any_number_is_seen(name: str) -> None:
    dump = world(2)  # with tables of all tokens, and summands
    for tensors in dump.ranks.values():
        item = tensors[name]
        array = item.array.copy()
        array.reshape(-1)[0] += 1e-3
        tensors[name] = Item(array, item.dtype, item.word, item.place)
    assert findings_of(examined(dump)) == {name}
