"""The launchers of `dsacp_npu._triton_topk` choose exactly what `dsacp_ref.indexer` chooses, by every way there is."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import dsacp_npu.indexer
from dsacp_npu import _triton_topk
from dsacp_npu.kernels.topk import TILES
from dsacp_ref import indexer as ref
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.compare import assert_same
from tests.kernels.harness import interpret
from tests.kernels.topk_cases import GPU_CASES
from tests.laws.test_indexer import choices
from tests.maths_strategies import seeds
from tests.mirror.common import int32, to_torch, untouched
from tests.strategies import fewer

SMALL = {"ROWS": 2, "candidates": {}, "sorted": {}}  # the interpreter takes no launch options
NARROW_CHUNKS = {True: {"CHUNK": 16}, False: {"CHUNK": 16}}
FAMILIES = ("a2", "cuda")
AWKWARD = np.array([0.0, -0.0, 1.0, 1e-42, -1e-42, -1.0, np.nan, np.inf, -np.inf, 3.4028235e38, -3.4028235e38])


@contextmanager
def small_tiles(family: str):
    """This family's way with tiles so small that few columns make many blocks; the interpreter runs all of them."""
    tiles = {**TILES, "cuda": dict.fromkeys((8, 16), SMALL)}
    with (
        mock.patch.object(_triton_topk, "family_of", return_value=family),
        mock.patch.object(_triton_topk, "TILES", tiles),
        mock.patch.object(_triton_topk, "CHUNKS", dict.fromkeys(("a2", "cuda"), NARROW_CHUNKS)),
        mock.patch.object(_triton_topk, "tile_for", lambda table, tensor, what, key: table[family][key]),
    ):
        yield


def assert_chooses(scores: np.ndarray, num_visible: np.ndarray, index_topk: int) -> None:
    """By every way, the reference's choice; whatever lies where nothing may be read."""
    want = ref.selected_entries(scores, num_visible, index_topk)
    hidden = np.arange(scores.shape[1]) >= num_visible[:, None]
    for family, garbage in zip(FAMILIES, (np.nan, np.inf), strict=True):
        unread, visible = to_torch((np.where(hidden, np.float32(garbage), scores), num_visible))
        with small_tiles(family):
            got = untouched(_triton_topk.selected_entries, (unread, visible, index_topk), {})
        assert_same(got, want, family)


@given(choices())
@example((np.full((1, 12), 0.0), int32(12), 5))
@example((np.array([[np.nan, 1, -np.inf, np.nan]]), int32(4), 4))
@example((np.array([[-np.inf, -np.inf, 5.0, 5.0]]), int32(2), 3))
@fewer(12)
def test_selected_entries(choice) -> None:
    scores, num_visible, index_topk = choice
    with np.errstate(over="ignore"):
        assert_chooses(scores.astype(np.float32), num_visible, index_topk)


@given(seeds, st.integers(1, 150), st.integers(1, 20), st.integers(1, len(AWKWARD)))
@fewer(12)
def test_many_entries_of_few_scores(seed, num_entries, index_topk, distinct) -> None:
    """Ties at the edge, infinities, NaN and denormal numbers; more wanted than the widest tile holds."""
    rng = np.random.default_rng(seed)
    scores = rng.choice(rng.permutation(AWKWARD)[:distinct], (2, num_entries)).astype(np.float32)
    assert_chooses(scores, int32(*rng.integers(0, num_entries + 1, 2)), index_topk)


@given(seeds, st.integers(60, 200), st.integers(1, 16))
@fewer(12)
def test_random_scores(seed, num_entries, index_topk) -> None:
    """Few ties, any scale: the bound decides."""
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((2, num_entries)) * 10.0 ** rng.integers(-40, 38) + rng.integers(-2, 3)
    assert_chooses(scores.astype(np.float32), int32(num_entries, num_entries - 7), index_topk)


@pytest.mark.parametrize("name", ["rising", "falling", "one group", "alternating", "two groups of equals"])
def test_rows_that_defeat_a_bound(name) -> None:
    """The groups of a tile of 8 are the columns modulo 16: all that is high lies in one or two of them."""
    columns = np.arange(150)
    rows = {
        "rising": columns,
        "falling": -columns,
        "one group": np.where(columns % 16 == 3, columns, -columns),
        "alternating": columns % 2,
        "two groups of equals": columns % 16 < 2,
    }
    for index_topk in (1, 8):
        assert_chooses(rows[name].astype(np.float32)[None], int32(150), index_topk)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_numbers_are_chosen_by_their_own_ties(dtype) -> None:
    scores = torch.randn(3, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    visible = torch.tensor([70, 9, 0], dtype=torch.int32)
    want = ref.selected_entries(scores.float().numpy(), visible.numpy(), 12)
    for family in FAMILIES:
        with small_tiles(family):
            assert_same(_triton_topk.selected_entries(scores, visible, 12), want, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_slice_is_chosen_from_and_into_wider_rows(family) -> None:
    buffer = torch.randn(5, 90, generator=torch.Generator().manual_seed(1))
    visible = torch.tensor([60, 0, 33], dtype=torch.int32)
    out = torch.full((5, 20), 77, dtype=torch.int32)
    with small_tiles(family):
        _triton_topk.chosen_of_slice(buffer[1:4, 3:63], visible, 9, out[1:4, 4:13])
    assert_same(out[1:4, 4:13], ref.selected_entries(buffer[1:4, 3:63].numpy(), visible.numpy(), 9))
    out[1:4, 4:13] = 77
    assert (out == 77).all()


def test_scratch_is_bounded() -> None:
    """Rows are chosen from some at a time, and alike."""
    scores, visible = torch.randn(7, 40, generator=torch.Generator().manual_seed(2)), torch.full((7,), 40).int()
    with mock.patch.object(_triton_topk, "SCRATCH_NUMBERS", 100), small_tiles("a2"):
        got = _triton_topk.selected_entries(scores, visible, 5)
    assert_same(got, ref.selected_entries(scores.numpy(), visible.numpy(), 5))


def test_the_tiles_of_a_device() -> None:
    scores, visible = torch.randn(2, 5000, generator=torch.Generator().manual_seed(3)), int32(5000, 4100)
    got = _triton_topk.selected_entries(scores, torch.from_numpy(visible.copy()), 512)
    assert_same(got, ref.selected_entries(scores.numpy(), visible, 512))


@pytest.mark.parametrize("name", GPU_CASES)
def test_a_kernel_for_gpus_is_right_in_the_interpreter(name) -> None:
    interpret(GPU_CASES[name]())


X = torch.arange(12.0).reshape(3, 4)
COUNTS = torch.tensor([4, 0, 2], dtype=torch.int32)
REFUSED = {
    "one row": (X[0], COUNTS[:1], 2),
    "no floats": (X > 0, COUNTS, 2),
    "two counts": (X, COUNTS[:2], 2),
    "too many seen": (X, COUNTS + 1, 2),
    "fewer than none": (X, COUNTS - 1, 2),
    "wide counts": (X, COUNTS.long(), 2),
    "nothing wanted": (X, COUNTS, 0),
    "a float wanted": (X, COUNTS, 1.5),
    "an array": (X.numpy(), COUNTS, 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_by_the_mirror(name) -> None:
    with pytest.raises((ContractError, TypeError, ValueError)) as want:
        dsacp_npu.indexer.selected_entries(*REFUSED[name])
    with pytest.raises(type(want.value)) as got:
        _triton_topk.selected_entries(*REFUSED[name])
    assert str(got.value) == str(want.value)


def test_float64_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="float32 scores, not by float64"):
        _triton_topk.selected_entries(X.double(), COUNTS, 2)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_nothing_to_choose_from(shape) -> None:
    got = _triton_topk.selected_entries(torch.zeros(shape), torch.zeros(shape[0], dtype=torch.int32), 3)
    assert_same(got, np.full((shape[0], 3), -1, np.int32))
