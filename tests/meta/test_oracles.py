"""The oracles against numbers worked out by hand, on paper or from the cited fault reports.

An oracle that is wrong proves nothing, so none of these values comes from running the code under test.
"""

from __future__ import annotations

import ast
import math
from pathlib import Path

import numpy as np
import pytest

from tests.oracles import attention, compressor, extents, indexer, layer, paging, quant, rope, splits

YARN = {"factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "original": 65536.0}
ALL_SPLITS = ("contiguous", "contiguous_request", "zigzag", "zigzag_ceil", "zigzag_padded", "round_robin")
NAN, INF = math.nan, math.inf


def test_oracles_do_not_import_the_packages_they_judge() -> None:
    allowed = {"__future__", "collections.abc", "math", "numpy", "numpy.typing", "tests.oracles", "typing"}
    for path in Path(splits.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert set(names) <= allowed, path


# --- Splits -----------------------------------------------------------------------------------------------------------


def test_remainders_of_the_two_zigzags_differ() -> None:
    assert splits.zigzag_block_sizes(5, 2) == [2, 1, 1, 1]
    assert splits.zigzag_ceil_block_sizes(5, 2) == [2, 2, 1, 0]
    assert splits.owned_tokens([5], 2, "zigzag") == [[0, 1, 4], [2, 3]]
    assert splits.owned_tokens([5], 2, "zigzag_ceil") == [[0, 1], [2, 3, 4]]
    assert splits.owned_tokens([5], 2, "zigzag_padded") == [[0, 1, -1, -1], [2, 3, 4, -1]]
    assert [len(rows) for rows in splits.owned_tokens([6], 2, "zigzag_ceil")] == [2, 4]


@pytest.mark.parametrize(
    ("split", "owned"),
    [
        ("contiguous", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("contiguous_request", [[0, 1, 2, 5, 6], [3, 4, 7]]),
        ("round_robin", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("zigzag", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("round_robin_page(2)", [[0, 1, 4, -1, 5, 6], [2, 3, -1, -1, 7, -1]]),
    ],
)
def test_two_requests_of_five_and_three_on_two_ranks(split: str, owned: list[list[int]]) -> None:
    assert splits.owned_tokens([5, 3], 2, split) == owned


def test_layout_name_decides_the_rows_of_rank_zero() -> None:
    """Fault A41."""
    assert splits.owned_tokens([8], 2, "contiguous")[0] == [0, 1, 2, 3]
    assert splits.owned_tokens([8], 2, "zigzag")[0] == [0, 1, 6, 7]


def test_flat_splits_pad_the_stream_beyond_the_real_count() -> None:
    assert splits.owned_tokens([7], 2, "contiguous", 16) == [[0, 1, 2, 3, 4, 5, 6, -1], [-1] * 8]
    assert splits.owned_tokens([3], 2, "round_robin", 6) == [[0, 2, -1], [1, -1, -1]]
    assert splits.owned_tokens([10], 4, "round_robin") == [[0, 4, 8], [1, 5, 9], [2, 6, -1], [3, 7, -1]]  # A05: 3 3 2 2
    with pytest.raises(ValueError):
        splits.owned_tokens([3], 2, "zigzag", 6)
    with pytest.raises(ValueError):
        splits.owned_tokens([3], 2, "contiguous", 2)


@pytest.mark.parametrize("split", [*ALL_SPLITS, "round_robin_page(1)", "round_robin_page(3)"])
@pytest.mark.parametrize("q_lens", [[], [0], [1], [5, 0, 3], [7, 1, 9]])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 5])
def test_every_token_has_one_owner_and_rows_ascend(split: str, q_lens: list[int], cp_size: int) -> None:
    owned = splits.owned_tokens(q_lens, cp_size, split)
    real = [[token for token in rows if token >= 0] for rows in owned]
    assert sorted(token for rows in real for token in rows) == list(range(sum(q_lens)))
    assert all(rows == sorted(rows) for rows in real)
    if split not in ("contiguous_request", "zigzag", "zigzag_ceil"):
        assert len({len(rows) for rows in owned}) == 1


def test_selected_token_keeps_its_place_in_the_padded_layout() -> None:
    """Fault A38: token 12 stands in row 7 of rank 0; without the pad rows it would be row 5."""
    padded = splits.owned_tokens([5, 8], 2, "zigzag_padded")
    assert padded == [[0, 1, -1, -1, 5, 6, 11, 12], [2, 3, 4, -1, 7, 8, 9, 10]]
    assert padded[0].index(12) == 7
    assert splits.owned_tokens([5, 8], 2, "zigzag_ceil")[0].index(12) == 5


def test_decode_lengths_localise_each_global_bound() -> None:
    """Fault A16."""
    assert [splits.kv_local_length(bound, 2, 1, 1) for bound in (8, 9, 10)] == [4, 4, 5]
    assert [splits.kv_local_length(bound, 2, 0, 1) for bound in (8, 9, 10)] == [4, 5, 5]


def test_decode_selection_keeps_owned_positions_only() -> None:
    """Fault A17."""
    for interleave, owned, local in [(1, [1, 5], [0, 2]), (4, [5], [1])]:
        mine = [x for x in (0, 1, 5, 8) if splits.kv_owner(x, 2, interleave) == 1]
        assert mine == owned
        assert [splits.kv_local_index(x, 2, interleave) for x in mine] == local


def test_decode_slots_are_mapped_once() -> None:
    """Fault A40."""
    mine = [x for x in range(8) if splits.kv_owner(x, 2, 1) == 0]
    assert mine == [0, 2, 4, 6]
    assert [splits.kv_local_index(x, 2, 1) for x in mine] == [0, 1, 2, 3]


@pytest.mark.parametrize("interleave", [1, 2, 3, 16])
@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_decode_ownership_equals_the_closed_form(cp_size: int, interleave: int) -> None:
    for x in range(50):
        base, rest = x // interleave // cp_size * interleave, x % (interleave * cp_size)
        assert splits.kv_owner(x, cp_size, interleave) == x // interleave % cp_size
        assert splits.kv_local_index(x, cp_size, interleave) == base + x % interleave
        for rank in range(cp_size):
            expected = base + min(max(rest - rank * interleave, 0), interleave)
            assert splits.kv_local_length(x, cp_size, rank, interleave) == expected


# --- Extents ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "query_start_loc", "local_seq_lens", "kv_start_loc"),
    [
        (0, [0, 1, 3, 6, 10, 15, 15, 15, 15, 15], [1, 2, 3, 4, 5, 0, 0, 0, 0], [0, 1, 3, 6, 10, 15, 15, 15, 15, 15]),
        (1, [0, 0, 0, 0, 0, 0, 6, 13, 15, 15], [0, 0, 0, 0, 0, 6, 7, 2, 0], [0, 0, 0, 0, 0, 0, 6, 13, 15, 15]),
        (2, [0, 0, 0, 0, 0, 0, 0, 0, 6, 15], [0, 0, 0, 0, 0, 0, 0, 8, 9], [0, 0, 0, 0, 0, 0, 0, 0, 8, 17]),
    ],
)
def test_worked_example_of_nine_requests(
    rank: int, query_start_loc: list[int], local_seq_lens: list[int], kv_start_loc: list[int]
) -> None:
    lengths = list(range(1, 10))
    got = extents.contiguous_local_lengths(lengths, lengths, 3, rank)
    assert got == (query_start_loc, local_seq_lens, kv_start_loc)


def test_padded_graph_slots_across_a_rank_border_have_no_keys() -> None:
    """Fault A01: rank 6 owns tokens 60..69, all of slots without keys."""
    query_start_loc, local_seq_lens, _ = extents.contiguous_local_lengths([4] * 20, [50] * 9 + [0] * 11, 8, 6)
    assert query_start_loc == [0] * 16 + [4, 8, 10, 10, 10]
    assert local_seq_lens == [0] * 20


def test_more_ranks_than_tokens() -> None:
    """Fault A33."""
    assert [extents.contiguous_local_lengths([3], [3], 8, rank)[1] for rank in range(8)] == [
        [1], [2], [3], [0], [0], [0], [0], [0]
    ]  # fmt: skip
    for split in (*ALL_SPLITS, "round_robin_page(4)"):
        owned = splits.owned_tokens([3], 8, split)
        assert len(owned) == 8
        assert sorted(token for rows in owned for token in rows if token >= 0) == [0, 1, 2]


@pytest.mark.parametrize(
    ("q_lens", "seq_lens", "rank", "query_start_loc", "local_seq_lens"),
    [
        ([5, 3], [5, 3], 1, [0, 1, 4], [5, 3]),  # A35: packed documents
        ([4, 4], [9, 6], 0, [0, 4, 4], [9, 0]),  # A10: draft step
        ([4, 4], [9, 6], 1, [0, 0, 4], [0, 6]),
        ([64], [64], 1, [0, 32], [64]),  # A09
        ([145], [145], 0, [0, 73], [73]),  # A08
        ([145], [145], 1, [0, 72], [145]),
    ],
)
def test_two_rank_extents(
    q_lens: list[int], seq_lens: list[int], rank: int, query_start_loc: list[int], local_seq_lens: list[int]
) -> None:
    assert extents.contiguous_local_lengths(q_lens, seq_lens, 2, rank)[:2] == (query_start_loc, local_seq_lens)


def test_global_key_length_would_move_a_local_query() -> None:
    """Fault A08: row 0 of rank 0 stands at 0 and sees no entry; with all 145 keys it would stand at 72 and see 18."""
    assert extents.positions_of_rows([0, 73], [73]) == list(range(73))
    assert extents.positions_of_rows([0, 72], [145]) == list(range(73, 145))
    wrong = extents.positions_of_rows([0, 73], [145])[0]
    assert wrong == 72
    assert len(attention.visible_entries(0, 4)) == 0
    assert len(attention.visible_entries(wrong, 4)) == 18


def test_rows_without_keys_have_no_position() -> None:
    assert extents.positions_of_rows([0, 2, 2, 4], [7, 3, 0]) == [5, 6, None, None]
    with pytest.raises(ValueError):
        extents.positions_of_rows([0, 3], [2])


def test_extent_of_a_request_without_local_queries() -> None:
    """Prefix 4 and 10; the second request is empty everywhere, the third is a padded slot."""
    q_lens, seq_lens = [4, 0, 2], [8, 10, 0]
    for rank, zero, prefix, whole in [
        (0, [6, 0, 0], [6, 10, 0], [8, 0, 0]),
        (1, [8, 0, 0], [8, 10, 0], [8, 0, 0]),
        (2, [0, 0, 0], [8, 10, 0], [0, 0, 0]),
    ]:
        assert extents.contiguous_local_lengths(q_lens, seq_lens, 3, rank)[1] == zero
        assert extents.contiguous_local_lengths(q_lens, seq_lens, 3, rank, empty_extent="prefix")[1] == prefix
        assert extents.contiguous_local_lengths(q_lens, seq_lens, 3, rank, causal=False)[1] == whole
    assert extents.contiguous_local_lengths([1, 4], [5, 8], 5, 0, empty_extent="prefix")[1] == [5, 4]


def test_input_tokens_without_a_request_lengthen_the_ranks_only() -> None:
    assert extents.contiguous_local_lengths([7], [9], 2, 0, 16) == ([0, 7], [9], [0, 9])
    assert extents.contiguous_local_lengths([7], [9], 2, 1, 16) == ([0, 0], [0], [0, 0])


def test_token_places() -> None:
    assert extents.token_place([2, 0, 3], [5, 4, 3], 1) == (0, 4)
    assert extents.token_place([2, 0, 3], [5, 4, 3], 2) == (2, 0)
    assert extents.token_place([2, 2], [5, 0], 3) == (1, None)
    assert extents.token_place([2], [5], -1) == extents.token_place([2], [5], 2) == (None, None)


def test_round_robin_rows_keep_their_true_positions() -> None:
    """Fault A04: extends 5 and 3, prefixes 0 and 6, rank 1 of 4."""
    rows = splits.owned_tokens([5, 3], 4, "round_robin")[1]
    places = [extents.token_place([5, 3], [5, 9], token) for token in rows]
    assert rows == [1, 5]
    assert places == [(0, 1), (1, 6)]
    assert extents.positions_of_rows([0, 1, 2], [2, 7]) == [1, 6]


def test_zigzag_extents_after_a_prefix_of_one() -> None:
    """Fault A02: 3670 new tokens on 4 ranks; both extents of every rank include the cached token."""
    assert splits.zigzag_block_sizes(3670, 4) == [459] * 6 + [458] * 2
    owned = splits.owned_tokens([3670], 4, "zigzag")
    for rows, first_block, expected in zip(
        owned, [459] * 4, [(460, 3671), (919, 3213), (1378, 2755), (1837, 2296)], strict=True
    ):
        # A token's position plus one is the extent that ends with it; the prefix shifts every position by one.
        assert ((rows[first_block - 1] + 1) + 1, (rows[-1] + 1) + 1) == expected


# --- Visibility -------------------------------------------------------------------------------------------------------


def test_window_edges() -> None:
    assert attention.window_positions(0, 128) == [0]
    assert attention.window_positions(5, 128) == [0, 1, 2, 3, 4, 5]
    assert attention.window_positions(127, 128) == list(range(128))
    assert attention.window_positions(128, 128) == list(range(1, 129))
    assert attention.window_positions(3, 1) == [3]


def test_query_does_not_see_its_unfinished_window() -> None:
    """Fault A23."""
    assert [len(attention.visible_entries(p, 4)) for p in range(9)] == [0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_first_query_with_a_real_choice() -> None:
    """With 512 places every visible entry fits up to p = 2050; with 1024 places up to p = 4098."""
    for k, last_without_choice in [(512, 2050), (1024, 4098)]:
        n = len(attention.visible_entries(last_without_choice, 4))
        assert n == k
        assert sorted(indexer.select([1.0] * n, n, k)) == list(range(k))
        assert len(attention.visible_entries(last_without_choice + 1, 4)) == k + 1


def test_entries_closed_in_one_step_of_a_ratio_128_layer() -> None:
    """Fault A32: from 128 to 133 tokens closes nothing, from 125 to 128 closes entry 0."""
    assert len(attention.visible_entries(132, 128)) - len(attention.visible_entries(127, 128)) == 0
    assert len(attention.visible_entries(127, 128)) - len(attention.visible_entries(124, 128)) == 1


# --- Rotary embedding -------------------------------------------------------------------------------------------------


def test_compress_frequencies_at_the_check_values() -> None:
    """The check values are float64; the table holds their fp32 roundings, at most half an ulp away."""
    freqs = rope.frequencies(160000.0, 64, YARN)
    assert len(freqs) == 32
    assert rope.yarn_range(160000.0, 64, YARN) == (15.0, 25.0)
    for i, value in {
        14: 5.286856317e-3,
        15: 3.635538584e-3,
        16: 2.265625e-3,
        20: 2.969777783e-4,
        24: 1.953125e-5,
        25: 5.372312671e-6,
        31: 5.680529037e-7,
    }.items():
        assert freqs[i].dtype == np.float32
        assert abs(float(freqs[i]) - value) <= 0.5 * float(np.spacing(freqs[i])) + 1e-9 * value


def test_yarn_by_hand_at_pair_16_and_20() -> None:
    """f_16 = 1/400 before YaRN, one tenth down the ramp; f_20 = 160000^(-5/8), half way down."""
    freqs = rope.frequencies(160000.0, 64, YARN)
    assert freqs[16] == np.float32((1 / 400) * (0.9 + 0.1 / 16))
    assert freqs[20] == np.float32(160000.0**-0.625 * (0.5 + 0.5 / 16))


def test_plain_frequencies_have_no_yarn() -> None:
    freqs = rope.frequencies(10000.0, 64)
    assert [freqs[i] for i in (0, 8, 16, 24)] == [np.float32(f) for f in (1.0, 0.1, 0.01, 0.001)]
    with_yarn = rope.frequencies(10000.0, 64, YARN)
    drift = max(127 * abs(float(a) - float(b)) for a, b in zip(freqs, with_yarn, strict=True))
    assert drift == pytest.approx(0.0366, abs=5e-5)


def test_table_at_a_million_is_the_fp32_angle() -> None:
    """Fault A36: cos and sin of 10^6 rad; and the fp32 angle differs visibly from the float64 one in other pairs."""
    cos, sin = rope.cos_sin(1_000_000, np.float32(1.0))
    assert (cos, sin) == pytest.approx((0.936752127533, -0.349993502171), abs=6e-8)
    off = []
    for i, frequency in enumerate(rope.frequencies(160000.0, 64, YARN)):
        cos, sin = rope.cos_sin(1_000_000, frequency)
        assert abs(cos * cos + sin * sin - 1.0) < 1e-6
        if i < 15:  # above the ramp YaRN leaves the frequency alone
            off.append(abs(cos - math.cos(1e6 * 160000.0 ** (-i / 32))))
    assert 0.02 < max(off) < 0.06


def test_rotation_of_adjacent_pairs_in_the_last_channels() -> None:
    quarter = np.float32(math.pi / 2)
    turned = rope.rotate([5.0, 6.0, 1.0, 0.0, 0.0, 1.0], 1, [quarter, quarter])
    assert turned == pytest.approx([5.0, 6.0, 0.0, 1.0, -1.0, 0.0], abs=1e-7)
    assert rope.rotate([1.0, 2.0], 0, [quarter]) == [1.0, 2.0]
    vector = [0.3, -1.2, 2.0, 0.7]
    freqs = rope.frequencies(10000.0, 4)
    there_and_back = rope.rotate_back(rope.rotate(vector, 77, freqs), 77, freqs)
    assert there_and_back == pytest.approx(vector, abs=1e-6)
    assert rope.rotate_back(vector, 77, freqs) == rope.rotate(vector, -77, freqs)


# --- Compressor -------------------------------------------------------------------------------------------------------


def test_overlapping_entries_by_hand() -> None:
    """Tokens [t, 2 | t, 1] with weights 1, 2, 3, 4 in channel 0 and equal weights in channel 1.

    Entry 0 pools the second halves of tokens 0..3: (0+2+6+12)/10 = 2 and 1. Entry 1 pools the first halves of tokens
    0..3 and the second halves of 4..7: (20+60)/20 = 4 and (8+4)/8 = 1.5.
    """
    x = [[float(t), 2.0, float(t), 1.0] for t in range(11)]
    ape = [[math.log(j + 1.0), 0.0, math.log(j + 1.0), 0.0] for j in range(4)]
    got = compressor.entries(x, np.eye(4), np.zeros((4, 4)), ape, [1.0, 1.0], 4, True, 0.0, [np.float32(1.0)])
    assert len(got) == 2  # tokens 8..10 are an open window
    assert got[0] == pytest.approx([2 / math.sqrt(2.5), 1 / math.sqrt(2.5)])
    a, b = 4 / math.sqrt(9.125), 1.5 / math.sqrt(9.125)
    # Entry 1 is turned by the position of its first token, 4.
    expected = [a * math.cos(4) - b * math.sin(4), b * math.cos(4) + a * math.sin(4)]
    assert got[1] == pytest.approx(expected, abs=1e-6)


def test_disjoint_entries_by_hand() -> None:
    """Ratio 2, gate = channel 1 of x: weights e^0 and e^ln3, so entry 0 = (1*1 + 3*5)/4 = 4, entry 1 = (2 + 2)/2."""
    x = [[1.0, 0.0], [5.0, math.log(3.0)], [2.0, 1.0], [2.0, 1.0]]
    wkv = [[1.0, 0.0], [0.0, 0.0]]
    wgate = [[0.0, 1.0], [0.0, 1.0]]
    got = compressor.entries(x, wkv, wgate, np.zeros((2, 2)), [2.0, 1.0], 2, False, 8.0, [])
    assert got[0] == pytest.approx([2 * 4 / math.sqrt(8 + 8), 0.0])
    assert got[1] == pytest.approx([2 * 2 / math.sqrt(2 + 8), 0.0])


def test_no_entry_before_a_window_is_complete() -> None:
    """Edge cases 2 and 3: lengths below the ratio give nothing; at the ratio one entry, at position 0."""
    weights = (np.eye(4), np.eye(4), np.zeros((4, 4)), [1.0, 1.0])
    for length, count in [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)]:
        got = compressor.entries(np.ones((length, 4)), *weights, 4, True, 1e-6, [np.float32(1.0)])
        assert len(got) == count
        assert got[:1] in ([], [pytest.approx([1.0, 1.0], abs=1e-6)])


# --- Indexer ----------------------------------------------------------------------------------------------------------


def test_hadamard_signs_count_common_bits() -> None:
    for i in range(8):
        column = indexer.hadamard([1.0 if j == i else 0.0 for j in range(8)])
        assert column == pytest.approx([(-1) ** bin(i & j).count("1") / math.sqrt(8) for j in range(8)])
    assert indexer.hadamard([1.0, 2.0, 3.0, 4.0]) == [5.0, -1.0, -2.0, 0.0]
    assert indexer.hadamard([5.0, -1.0, -2.0, 0.0]) == [1.0, 2.0, 3.0, 4.0]


def test_score_is_signed_and_clips_each_head() -> None:
    assert indexer.score([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [2.0, 5.0, -1.0], [3.0, -4.0]) == 6.0
    assert indexer.score([[1.0]], [-2.0], [3.0]) == -6.0
    assert math.isnan(indexer.score([[NAN]], [1.0], [1.0]))


@pytest.mark.parametrize(
    ("scores", "visible", "k", "selected"),
    [
        ([NAN, 1.0, -INF, NAN], 4, 4, [1, 0, 2, 3]),
        ([0.0] * 12, 12, 5, [0, 1, 2, 3, 4]),  # A14
        ([-3.0, -1.0, -2.0], 3, 2, [1, 2]),  # edge case 22
        ([-3.0, -1.0, 9.0], 2, 4, [1, 0, -1, -1]),  # the best score is not visible
        ([0.0, -0.0, 0.0], 3, 3, [0, 1, 2]),
        ([NAN] * 10, 10, 4, [0, 1, 2, 3]),  # A30
        ([5.0], 0, 2, [-1, -1]),
        ([1.0, 3.0, 2.0], 3, 3, [1, 2, 0]),  # edge case 14: n = k
    ],
)
def test_selection(scores: list[float], visible: int, k: int, selected: list[int]) -> None:
    assert indexer.select(scores, visible, k) == selected


def test_selection_is_causal() -> None:
    """Fault A24: 16 tokens, scores grow with the entry."""
    rows = {p: indexer.select([0.0, 1.0, 2.0, 3.0], len(attention.visible_entries(p, 4)), 4) for p in (2, 3, 7)}
    assert rows == {2: [-1, -1, -1, -1], 3: [0, -1, -1, -1], 7: [1, 0, -1, -1]}


# --- Attention --------------------------------------------------------------------------------------------------------


def test_sink_counts_once() -> None:
    """Fault A34: logits 0, values 1 and 3, sink 0 gives 4/3; a sink on each of two ranks would give 1."""
    out, lse = attention.attend([[0.0]], [[1.0], [3.0]], [0.0], 1.0)
    assert out[0] == pytest.approx([4 / 3])
    assert lse == pytest.approx([math.log(2)])

    parts = [attention.attend([[0.0]], [[value]], None, 1.0) for value in (1.0, 3.0)]
    shares = [math.exp(part_lse[0]) for _, part_lse in parts]
    merged = sum(share * part[0][0] for share, (part, _) in zip(shares, parts, strict=True)) / sum(shares)
    assert merged / (1 + math.exp(0.0 - math.log(sum(shares)))) == pytest.approx(4 / 3)

    with_sink = [attention.attend([[0.0]], [[value]], [0.0], 1.0)[0][0][0] for value in (1.0, 3.0)]
    assert sum(with_sink) / 2 == pytest.approx(1.0)


def test_logits_are_scaled_before_the_sink() -> None:
    """Logit 2 * 3 * 0.5 = 3 against sink 3: half the weight; lse is the logit alone."""
    out, lse = attention.attend([[2.0, 0.0]], [[3.0, 8.0]], [3.0], 0.5)
    assert out[0] == pytest.approx([1.5, 4.0])
    assert lse == pytest.approx([3.0])


def test_extreme_sinks_and_logits() -> None:
    """Edge case 16 and fault A26."""
    rows = [[1.0], [3.0]]
    dominated, lse = attention.attend([[0.0]], rows, [1e4], 1.0)
    assert dominated == [[0.0]]
    assert lse == pytest.approx([math.log(2)])
    assert attention.attend([[0.0]], rows, [-INF], 1.0)[0][0] == pytest.approx([2.0])
    assert attention.attend([[0.0]], rows, None, 1.0)[0][0] == pytest.approx([2.0])
    assert attention.attend([[-1e4]], rows, [0.0], 1.0)[0] == [[0.0]]
    assert attention.attend([[1e4]], rows, [0.0], 1.0)[0] == [[3.0]]
    assert attention.attend([[1.0, 2.0]], [], [0.5], 1.0) == ([[0.0, 0.0]], [-INF])
    assert attention.attend([[1.0, 2.0]], [], None, 1.0) == ([[0.0, 0.0]], [-INF])


def test_padding_row_of_zeros_is_not_neutral() -> None:
    """Edge case 11: a zero key takes weight e^0 from the others."""
    assert attention.attend([[1.0]], [[2.0]], None, 1.0)[0] != attention.attend([[1.0]], [[2.0], [0.0]], None, 1.0)[0]


# --- Quantisation and paging ------------------------------------------------------------------------------------------


def test_int8_codec_by_hand() -> None:
    assert quant.encode([127.0, -1.0, 0.5, 1.5, 2.5, -2.5]) == ([127, -1, 0, 2, 2, -2], np.float16(1.0))
    assert quant.encode([-254.0, 3.0, 0.0]) == ([-127, 2, 0], np.float16(2.0))  # 1.5 rounds to the even 2
    assert quant.encode([0.0, -0.0]) == ([0, 0], np.float16(0.0))
    assert quant.encode_row([-254.0, 3.0, 0.0]) == ([-127, 2, 0], np.float32(2.0))
    values, scale = quant.encode([1.0, 0.3])
    assert (values, scale) == ([127, 38], np.float16(1 / 127))
    assert quant.decode([127, -2], np.float16(0.5)) == [63.5, -1.0]


def test_int8_score_by_hand() -> None:
    half = np.float16(0.5)
    # 64*16 = 1024 gives similarity 1; the second head is negative and clipped.
    assert quant.int8_score([[64, 0], [-1, 0]], [half, half], [16, 5], np.float16(4.0), [half, half]) == 1.0
    # 64*32 + 1 = 2049, over 1024 half way between two fp16 numbers: the even one is 2.
    one = np.float16(1.0)
    assert quant.int8_score([[64, 1]], [one], [32, 1], one, [one]) == 2.0
    # 1.0009765625 squared needs 21 bits: fp16 keeps 1.001953125.
    step = np.float16(1.0009765625)
    assert quant.int8_score([[64, 0]], [step], [16, 0], one, [step]) == np.float32(1.001953125)
    assert quant.int8_score([[127, 127]], [one], [127, 127], one, [-one]) == np.float32(-np.float16(32258 / 1024))


def test_a_coded_product_rounds_its_sum_and_then_each_scale() -> None:
    half, third = np.float32(0.5), np.float32(1 / 3)
    assert quant.quant_product([2, -1], half, [3, 4], np.float32(1.0)) == 1.0  # (6 - 4) / 2
    # An odd sum beyond 2**24 is no float32: it goes to the neighbour whose half is even.
    assert 1041 * 127 * 127 == 16_790_289 > 2**24
    assert quant.quant_product([127] * 1041, half, [127] * 1041, np.float32(2.0)) == 16_790_288.0
    assert quant.quant_product([1], third, [3], np.float32(1.0)) == np.float32(1.0)


def test_only_the_table_defines_order() -> None:
    """Edge cases 23 and 24: pages 5, 2, 9 of two rows; what the table holds beyond the used part is never touched."""
    table = [5, 2, 9, -1, 0]
    assert [paging.slot(table, position, 2) for position in range(6)] == [10, 11, 4, 5, 18, 19]
    cache = {paging.slot(table, position, 2): f"row {position}" for position in range(5)}
    assert paging.read(cache, table, [4, 0, 3], 2) == ["row 4", "row 0", "row 3"]
    with pytest.raises(KeyError):
        paging.read(cache, table, [5], 2)
    with pytest.raises(ValueError):
        paging.slot(table, 6, 2)
    with pytest.raises(ValueError):
        paging.slot(table, -1, 2)


# --- Layer ------------------------------------------------------------------------------------------------------------

HIDDEN, HEADS, DIM, Q_LORA, GROUPS, O_LORA, INDEX_HEADS, INDEX_DIM = 6, 4, 6, 5, 2, 3, 3, 4
CONFIG = {
    "num_heads": HEADS,
    "head_dim": DIM,
    "rope_head_dim": 4,
    "o_groups": GROUPS,
    "window_size": 5,
    "index_n_heads": INDEX_HEADS,
    "index_head_dim": INDEX_DIM,
    "index_topk": 2,
    "eps": 1e-6,
    "freqs": rope.frequencies(160000.0, 4, YARN),
}


def random_weights(ratio: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    c = 2 if ratio == 4 else 1
    shapes = {
        "wq_a": (Q_LORA, HIDDEN),
        "q_norm": (Q_LORA,),
        "wq_b": (HEADS * DIM, Q_LORA),
        "wkv": (DIM, HIDDEN),
        "kv_norm": (DIM,),
        "attn_sink": (HEADS,),
        "wo_a": (GROUPS, O_LORA, HEADS // GROUPS * DIM),
        "wo_b": (HIDDEN, GROUPS * O_LORA),
        "cmp_wkv": (c * DIM, HIDDEN),
        "cmp_wgate": (c * DIM, HIDDEN),
        "cmp_ape": (ratio, c * DIM),
        "cmp_norm": (DIM,),
        "idx_wq_b": (INDEX_HEADS * INDEX_DIM, Q_LORA),
        "idx_weights_proj": (INDEX_HEADS, HIDDEN),
        "idx_cmp_wkv": (2 * INDEX_DIM, HIDDEN),
        "idx_cmp_wgate": (2 * INDEX_DIM, HIDDEN),
        "idx_cmp_ape": (4, 2 * INDEX_DIM),
        "idx_cmp_norm": (INDEX_DIM,),
    }
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def random_hidden(length: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((length, HIDDEN))


def test_layer_on_one_token_is_its_own_value_behind_the_sink() -> None:
    """At position 0 nothing is rotated and only the token itself is seen."""
    w, x = random_weights(1), random_hidden(1)

    def normed(vector: np.ndarray) -> np.ndarray:
        return vector / np.sqrt(np.mean(vector**2) + 1e-6)

    kv = normed(w["wkv"] @ x[0]) * w["kv_norm"]
    heads = (w["wq_b"] @ (normed(w["wq_a"] @ x[0]) * w["q_norm"])).reshape(HEADS, DIM)
    seen = [kv / (1 + math.exp(w["attn_sink"][h] - normed(heads[h]) @ kv / math.sqrt(DIM))) for h in range(HEADS)]
    grouped = [w["wo_a"][0] @ np.concatenate(seen[:2]), w["wo_a"][1] @ np.concatenate(seen[2:])]
    outputs, selections = layer.layer(x, w, CONFIG, 1)
    assert outputs[0] == pytest.approx(list(w["wo_b"] @ np.concatenate(grouped)), rel=1e-12)
    assert selections == [set()]


@pytest.mark.parametrize("ratio", [1, 4, 8])
def test_layer_prefix_does_not_depend_on_later_tokens(ratio: int) -> None:
    w, x = random_weights(ratio), random_hidden(19)
    outputs, selections = layer.layer(x, w, CONFIG, ratio)
    for length in (1, 3, 4, 8, 13):
        shorter, fewer = layer.layer(x[:length], w, CONFIG, ratio)
        assert shorter == outputs[:length]
        assert fewer == selections[:length]


@pytest.mark.parametrize("ratio", [4, 8])
def test_layer_before_the_first_entry_is_window_only(ratio: int) -> None:
    """Edge cases 3 and 15: the same as a window-only layer with the compress table, up to the query that closes one."""
    w, x = random_weights(ratio), random_hidden(ratio)
    outputs, selections = layer.layer(x, w, CONFIG, ratio)
    window_only, _ = layer.layer(x, w, CONFIG, 1)
    assert outputs[:-1] == window_only[:-1]
    assert outputs[-1] != window_only[-1]
    assert selections == [set()] * (ratio - 1) + [{0}]


def test_layer_with_room_for_all_entries_attends_all() -> None:
    """Edge case 13; and a given selection replaces the layer's own."""
    w, x = random_weights(4), random_hidden(17)
    outputs, selections = layer.layer(x, w, {**CONFIG, "index_topk": 4}, 4)
    visible = [attention.visible_entries(p, 4) for p in range(17)]
    assert selections == [set(entries) for entries in visible]
    given = [[*entries, -1] for entries in visible]
    assert layer.layer(x, w, CONFIG, 4, given) == (outputs, selections)
    with pytest.raises(ValueError):
        layer.layer(x[:3], w, CONFIG, 4, [[], [], [0]])


def test_layer_selects_its_best_scores() -> None:
    w, x = random_weights(4), random_hidden(23)
    _, selections = layer.layer(x, w, CONFIG, 4)
    chose_less = 0
    for scores, chosen in zip(layer.index_scores(x, w, CONFIG), selections, strict=True):
        left_out = set(range(len(scores))) - chosen
        assert len(chosen) == min(2, len(scores))
        assert all(scores[a] >= scores[b] for a in chosen for b in left_out)
        chose_less += len(left_out) > 0
    assert chose_less == 12  # from p = 11 on


def test_selection_of_one_query_does_not_leak_to_another() -> None:
    """Fault A25: row 3 picks entry 0, row 7 picks entry 1; the later choice leaves rows 0..6 alone."""
    w, x = random_weights(4), random_hidden(8)
    given = [[], [], [], [0], [0], [0], [0], [1]]
    outputs, _ = layer.layer(x, w, CONFIG, 4, given)
    changed, _ = layer.layer(x, w, CONFIG, 4, [*given[:7], [0]])
    assert changed[:7] == outputs[:7]
    assert changed[7] != outputs[7]


def test_output_depends_on_relative_positions_only() -> None:
    """A query that sees itself alone gives the same output at every position: the last rotation undoes the value's."""
    w, x = random_weights(1), random_hidden(1)
    outputs, _ = layer.layer(np.repeat(x, 6, axis=0), w, {**CONFIG, "window_size": 1}, 1)
    for output in outputs[1:]:
        assert output == pytest.approx(outputs[0], abs=1e-6)


@pytest.mark.parametrize(("ratio", "p", "pooled"), [(4, 12, range(4, 12)), (4, 4, range(4)), (3, 9, range(6, 9))])
def test_tokens_that_reach_an_output_through_one_entry(ratio: int, p: int, pooled: range) -> None:
    """With a window of one, a query depends on itself and on the 8, the first 4, or the 3 tokens of the entry."""
    w, x = random_weights(ratio), random_hidden(p + 1)
    given = [set()] * p + [{p // ratio - 1}]
    config = {**CONFIG, "window_size": 1}
    output = layer.layer(x, w, config, ratio, given)[0][p]
    felt = []
    for token in range(p + 1):
        changed = x.copy()
        changed[token] += 1.0
        if layer.layer(changed, w, config, ratio, given)[0][p] != output:
            felt.append(token)
    assert felt == [*pooled, p]


def test_index_scores_by_matrices_without_hadamard() -> None:
    """The Hadamard rotation of both sides cancels; both scale factors act once."""
    w, x = random_weights(4), random_hidden(11)
    parts = [w[f"idx_cmp_{name}"] for name in ("wkv", "wgate", "ape", "norm")]
    keys = np.array(compressor.entries(x, *parts, 4, True, 1e-6, CONFIG["freqs"]))
    scores = layer.index_scores(x, w, CONFIG)
    assert [len(row) for row in scores] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    for p in range(3, 11):
        low_rank = w["wq_a"] @ x[p]
        flat = w["idx_wq_b"] @ (low_rank / np.sqrt(np.mean(low_rank**2) + 1e-6) * w["q_norm"])
        heads = np.array([rope.rotate(head, p, CONFIG["freqs"]) for head in flat.reshape(INDEX_HEADS, INDEX_DIM)])
        clipped = np.maximum(heads @ keys.T, 0.0)
        expected = (w["idx_weights_proj"] @ x[p]) @ clipped * INDEX_DIM**-0.5 * INDEX_HEADS**-0.5
        assert scores[p] == pytest.approx(list(expected[: len(scores[p])]), rel=1e-9)
