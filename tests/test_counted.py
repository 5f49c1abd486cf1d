"""Work and bytes of ranks, counted from plans and from the real calls, against what one can derive on paper.

No attention is computed. The derived figures are the leading terms of sums over positions, so they hold to 1 %.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from dsacp_npu import distributed
from dsacp_npu.commands.counted import Received, Work, counted_transport, imbalance, received_bytes, work_of_ranks
from dsacp_ref.config import AttentionConfig, v4_flash, v4_pro
from dsacp_ref.spec import UnsupportedError
from tests.oracles.splits import owned_tokens

FLASH, PRO = v4_flash(), v4_pro()
LENGTHS, RANKS = (8192, 32768, 131072), (2, 8, 16)
BF16 = 2  # bytes

each_length = pytest.mark.parametrize("tokens", LENGTHS)
each_size = pytest.mark.parametrize("cp_size", RANKS)
each_model = pytest.mark.parametrize("config", [FLASH, PRO], ids=["flash", "pro"])


@lru_cache
def work(tokens: int, cp_size: int, config: AttentionConfig, split: str, ratio: int) -> Work:
    """The work of one prompt without a prefix."""
    lengths = torch.tensor([0, tokens]).int(), torch.tensor([tokens]).int()
    return work_of_ranks(*lengths, cp_size, config, split=split, compress_ratio=ratio)


def keys(*args: Any) -> float:
    """The busiest rank's attended keys over the mean."""
    return imbalance(work(*args).keys)


def scores(*args: Any) -> float:
    """The busiest rank's index scores over the mean."""
    return imbalance(work(*args, 4).scores)


def one_percent(value: float) -> Any:
    """Within 1 % of it."""
    return pytest.approx(value, rel=0.01)


# --- what is counted ---


@pytest.mark.parametrize("split", ["contiguous", "zigzag", "zigzag_padded", "round_robin", "round_robin_page(2)"])
@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_work_is_that_of_counting_query_by_query(split: str, ratio: int) -> None:
    """Two requests behind cached tokens, more entries than are chosen, over three ranks."""
    new, computed = [7, 530], [0, 3000]
    loc = torch.tensor([0, 7, 537]).int()
    got = work_of_ranks(loc, torch.tensor([7, 3530]).int(), 3, FLASH, split=split, compress_ratio=ratio)
    positions = [before + offset for count, before in zip(new, computed, strict=True) for offset in range(count)]
    want = Work([], [])
    for tokens in owned_tokens(new, 3, split):
        own = [positions[token] for token in tokens if token >= 0]
        entries = [(position + 1) // ratio if ratio > 1 else 0 for position in own]
        attended = [min(count, 512) for count in entries] if ratio == 4 else entries
        want.keys.append(sum(min(position + 1, 128) for position in own) + sum(attended))
        want.scores.append(sum(entries) if ratio == 4 else 0)
    assert got == want


@each_length
@each_model
def test_all_ranks_together_do_what_one_device_does(tokens: int, config: AttentionConfig) -> None:
    """The sums over positions: a window that grows at first, entries until K are visible, all entries, all scores."""
    window, top = 128 * tokens - 128 * 127 // 2, config.index_topk
    for split in ("contiguous", "zigzag", "round_robin", "round_robin_page(128)"):
        assert sum(work(tokens, 8, config, split, 1).keys) == window
        assert sum(work(tokens, 8, config, split, 4).keys) - window == one_percent(tokens * top - 2 * top**2)
        entries = sum(work(tokens, 8, config, split, 128).keys) - window
        assert entries == 128 * sum(range(tokens // 128)) + tokens // 128
        assert sum(work(tokens, 8, config, split, 4).scores) == one_percent(tokens**2 / 8)


# --- balance ---


@each_length
@each_size
def test_balance_of_windows(tokens: int, cp_size: int) -> None:
    """Only the rank with the first tokens has less to do; dealt out token by token it has not."""
    for split in ("contiguous", "zigzag"):
        assert keys(tokens, cp_size, FLASH, split, 1) == one_percent(1 / (1 - 64 / tokens))
    for split in ("round_robin", "round_robin_page(128)"):
        assert keys(tokens, cp_size, FLASH, split, 1) == one_percent(1)


@each_length
@each_size
@each_model
def test_balance_of_chosen_entries(tokens: int, cp_size: int, config: AttentionConfig) -> None:
    """The last rank attends to K entries everywhere, the first ones to fewer at their start."""
    top = config.index_topk
    uneven = (128 + top) / (128 + top - 2 * top**2 / tokens)
    assert keys(tokens, cp_size, config, "contiguous", 4) == one_percent(uneven)
    zigzag = keys(tokens, cp_size, config, "zigzag", 4)
    if tokens * (cp_size - 1) / (2 * cp_size) >= 4 * top:  # the first block of the last rank sees K entries throughout
        assert zigzag == one_percent(uneven)
    else:
        assert 1 < zigzag < uneven
    assert keys(tokens, cp_size, config, "round_robin", 4) == one_percent(1)
    assert keys(tokens, cp_size, config, "round_robin_page(128)", 4) < 1 + cp_size * 128 / tokens


def test_balance_of_chosen_entries_of_pro_at_8k() -> None:
    """A short prompt for K of 1024: zigzag helps a little, as no rank's first block sees K entries."""
    found = [round(keys(8192, cp_size, PRO, "zigzag", 4), 2) for cp_size in RANKS]
    assert found == [1.14, 1.25, 1.27]


@each_length
@each_size
def test_balance_of_all_entries(tokens: int, cp_size: int) -> None:
    """Entries grow with the position: the last contiguous share has the most, head and tail together the mean."""
    last = 128 + tokens / 128 * (1 - 1 / (2 * cp_size))
    assert keys(tokens, cp_size, FLASH, "contiguous", 128) == one_percent(last / (128 + tokens / 256))
    assert keys(tokens, cp_size, FLASH, "zigzag", 128) == one_percent(1)
    assert keys(tokens, cp_size, FLASH, "round_robin", 128) == one_percent(1)
    assert keys(tokens, cp_size, FLASH, "round_robin_page(128)", 128) <= 1 + (cp_size - 1) * 128 / tokens


@each_length
@each_size
def test_balance_of_index_scores(tokens: int, cp_size: int) -> None:
    """Nearly twice the mean for the last contiguous share; exactly even by zigzag."""
    assert scores(tokens, cp_size, FLASH, "contiguous") == one_percent(2 - 1 / cp_size)
    assert scores(tokens, cp_size, FLASH, "zigzag") == pytest.approx(1, abs=1e-12)
    assert scores(tokens, cp_size, FLASH, "round_robin") == one_percent(1)
    assert scores(tokens, cp_size, FLASH, "round_robin_page(128)") == one_percent(1 + (cp_size - 1) * 128 / tokens)


# --- bytes ---


def calls(tokens: int, cp_size: int, config: AttentionConfig, ratio: int, **modes: Any) -> list[Received]:
    """What an inner rank receives, call by call; zigzag, bfloat16."""
    rank = cp_size // 2
    defaults = {"split": "zigzag", "rows": "scattered", "output_mode": "replicated_weight", "dtype": torch.bfloat16}
    return received_bytes(tokens, cp_size, rank, config, compress_ratio=ratio, **{**defaults, **modes})


def sizes(*args: Any, **modes: Any) -> list[int]:
    """Bytes of every call."""
    return [call.num_bytes for call in calls(*args, **modes)]


each_shape = pytest.mark.parametrize("tokens, cp_size", [(8192, 2), (8192, 8), (131072, 8)])
each_ratio = pytest.mark.parametrize("ratio", [1, 4, 128])


@each_shape
@each_model
@each_ratio
def test_bytes_of_hidden_rows(tokens: int, cp_size: int, config: AttentionConfig, ratio: int) -> None:
    others = (cp_size - 1) / cp_size
    [hidden] = sizes(tokens, cp_size, config, ratio, key_mode="gather_hidden")
    assert hidden == one_percent(others * tokens * config.hidden_size * BF16)


@each_shape
@each_model
def test_bytes_of_heads_for_tokens(tokens: int, cp_size: int, config: AttentionConfig) -> None:
    """And of the sum that follows, of which every rank keeps all rows, or its own."""
    others, hidden = (cp_size - 1) / cp_size, tokens * config.hidden_size * BF16
    heads = tokens / cp_size * config.num_heads * config.head_dim * BF16
    modes = {"rows": "full", "key_mode": "replicate", "output_mode": "all_to_all"}
    found = sizes(tokens, cp_size, config, 1, **modes)
    assert found == [one_percent(others * heads), one_percent(2 * others * hidden)]
    modes = {"rows": "scattered", "key_mode": "gather_hidden", "output_mode": "all_to_all"}
    found = sizes(tokens, cp_size, config, 1, **modes)
    assert found == [one_percent(others * hidden), one_percent(others * heads), one_percent(others * hidden)]


@each_shape
@each_model
def test_bytes_of_gathered_output_weights(tokens: int, cp_size: int, config: AttentionConfig) -> None:
    others, columns = (cp_size - 1) / cp_size, config.o_groups * config.o_lora_rank
    weights = config.num_heads * config.head_dim * config.o_lora_rank + columns * config.hidden_size
    modes = {"key_mode": "gather_compressed", "output_mode": "gather_weight"}
    _, *found = sizes(tokens, cp_size, config, 1, **modes)
    assert sum(found) == one_percent(others * weights * BF16)
    _, *found, rows = sizes(tokens, cp_size, config, 1, rows="full", **modes)
    assert sum(found) == one_percent(others * weights * BF16)
    assert rows == one_percent(others * tokens * config.hidden_size * BF16)


@each_shape
@pytest.mark.parametrize("ratio, projected", [(1, 0), (4, 4 * 4 * (512 + 128)), (128, 4 * 2 * 512)])
def test_bytes_of_raw_keys(tokens: int, cp_size: int, ratio: int, projected: int) -> None:
    """Keys of 1 KB; in layers with a compressor its projected rows in float32 come with them, and are most of it."""
    [rows] = sizes(tokens, cp_size, FLASH, ratio, key_mode="gather_kv")
    assert rows == one_percent((cp_size - 1) / cp_size * tokens * (1024 + projected))


@each_shape
@pytest.mark.parametrize("ratio, width", [(4, 320), (128, 8)])
def test_bytes_of_entries(tokens: int, cp_size: int, ratio: int, width: int) -> None:
    """Entries and index keys travel as the caches hold them."""
    _, _, *entries = sizes(tokens, cp_size, FLASH, ratio, key_mode="gather_compressed")
    assert sum(entries) == one_percent((cp_size - 1) / cp_size * tokens * width)


@pytest.mark.parametrize("split, rank, runs", [("zigzag", 0, 1), ("zigzag", 3, 2), ("contiguous", 3, 1)])
def test_bytes_of_halo_and_carried_window(split: str, rank: int, runs: int) -> None:
    """127 raw keys in front of each of a rank's runs, and the last 127 of the prompt: the next chunk starts from them.

    The first run of the prompt has nothing before it, and the rank with the prompt's end has the latter already.
    """
    modes = {"rows": "scattered", "key_mode": "gather_compressed", "output_mode": "replicated_weight"}
    [halo] = received_bytes(131072, 8, rank, FLASH, compress_ratio=1, dtype=torch.bfloat16, split=split, **modes)
    carried = 0 if split == "zigzag" and rank == 0 else 127
    assert halo.num_bytes == (127 * runs + carried) * 1024


def test_bytes_of_the_rows_that_entries_reach_back_to() -> None:
    """Raw keys as in a window-only layer; of projections, 10 KB a row at ratio 4, only what entries reach back to."""
    keys, pooled, *_ = sizes(131072, 8, FLASH, 4, key_mode="gather_compressed")
    [alone] = sizes(131072, 8, FLASH, 1, key_mode="gather_compressed")
    assert keys == alone
    row = 4 * 4 * (512 + 128)
    assert pooled <= (2 * 7 + 8) * row  # two runs; the ring that the next step goes on from
    _, pooled, *_ = sizes(131072, 8, FLASH, 128, key_mode="gather_compressed")
    assert pooled <= (2 * 127 + 128) * 4 * 2 * 512


def test_no_bytes_are_counted_for_what_cannot_work() -> None:
    """The layer refuses it, and the transport is the real one again."""
    with pytest.raises(UnsupportedError, match=r"^key_mode must not be 'replicate' when rows is 'scattered'"):
        calls(1024, 2, FLASH, 1, key_mode="replicate")
    assert distributed.dist is torch.distributed


def test_a_transport_that_moves_nothing_notes_what_it_was_told() -> None:
    with counted_transport(None) as received:
        group: Any = type("Group", (), {"size": lambda self: 4, "rank": lambda self: 1})()
        total = torch.zeros(6, 2)
        distributed.dist.all_reduce(total, group=group)
        distributed.dist.all_to_all_single(torch.zeros(9), torch.zeros(6), [2, 1, 3, 3], [1, 1, 2, 2], group=group)
    assert received == [Received("all_reduce", 72), Received("all_to_all_single", 32)]
    assert not total.any()
