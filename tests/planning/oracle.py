"""Seconds and memory of a scheme told rank by rank and token by token, without closed forms, for one V4 layer mix."""

from __future__ import annotations

import itertools
from typing import Any

from dsacp_npu.planning.chips import Chip
from dsacp_ref.config import AttentionConfig, check_combination
from dsacp_ref.spec import UnsupportedError
from tests.oracles.splits import owned_tokens

SPLITS = (
    *("contiguous", "contiguous_request", "zigzag", "zigzag_ceil", "zigzag_padded"),
    *("round_robin", "round_robin_page(128)"),
)
BYTES = {"w4a8": (1, 0.5, 132, 1), "w8a8": (1, 1, 132, 1), "bf16": (2, 2, 256, 2)}


def words(ranks: int, config: AttentionConfig) -> list[tuple[Any, ...]]:
    """(cp, tp, split, rows, keys, output) of everything that a model's layers can do on so many ranks."""
    found: list[tuple[Any, ...]] = []
    for cp in range(1, ranks + 1):
        if ranks % cp or config.num_heads % (ranks // cp) or config.o_groups % (ranks // cp):
            continue
        if cp == 1:
            found.append((1, ranks, "contiguous", "full", "replicate", "replicated_weight"))
            continue
        for split, rows, keys, output in itertools.product(
            SPLITS,
            ("full", "scattered"),
            ("replicate", "gather_hidden", "gather_kv", "gather_compressed"),
            ("all_to_all", "gather_weight", "replicated_weight"),
        ):
            tp = ranks // cp
            try:
                for ratio in set(config.compress_ratios[: config.num_hidden_layers]):
                    check_combination(
                        split=split,
                        rows=rows,
                        key_mode=keys,
                        output_mode=output,
                        compress_ratio=ratio,
                        cp_size=cp,
                        num_heads=config.num_heads // tp,
                        o_groups=config.o_groups // tp,
                    )
            except UnsupportedError:
                continue
            found.append((cp, tp, split, rows, keys, output))
    return found


class Rank:
    """What one rank owns of a step."""

    def __init__(self, tokens: list[int], lengths: list[int], computed: list[int]) -> None:
        self.rows, self.own = len(tokens), {token for token in tokens if token >= 0}
        self.positions = []
        start = 0
        for length, before in zip(lengths, computed, strict=True):
            self.positions += [before + token - start for token in self.own if start <= token < start + length]
            start += length


def wanted(own: set[int], lengths: list[int], computed: list[int], reach: int, carried: int, ratio: int) -> int:
    """Tokens of others in reach of own tokens (of those that close an entry, for a ratio), or carried on."""
    need, start = set(), 0
    for length, before in zip(lengths, computed, strict=True):
        for token in range(start, start + length):
            if token in own and (before + token - start + 1) % ratio == 0:
                need |= set(range(max(start, token - reach + 1), token + 1))
        need |= set(range(max(start, start + length - carried), start + length))
        start += length
    return len(need - own)


def seconds(
    scheme: tuple[Any, ...],
    lengths: list[int],
    computed: list[int],
    config: AttentionConfig,
    chip: Chip,
    precision: str,
    experts: tuple[int, int, int, int],
    streams: int,
) -> float:
    """Of the whole prefill."""
    cp, tp, split, rows, keys, output = scheme
    weight, expert_weight, _, sent = BYTES[precision]
    ranks_of_all, total = cp * tp, sum(lengths)
    ranks = [Rank(tokens, lengths, computed) for tokens in owned_tokens(lengths, cp, split)]
    most = max(rank.rows for rank in ranks)
    hidden, width, lora = config.hidden_size, config.head_dim, config.q_lora_rank
    heads, groups = config.num_heads // tp, config.o_groups // tp
    group_in, group_out = config.num_heads // config.o_groups * width, config.o_lora_rank
    dense_rate = (chip.matmul_8 if weight == 1 else chip.matmul_16) * 1e12 * chip.matmul_efficiency
    index_rate = (chip.matmul_8 if weight == 1 else chip.matmul_16) * 1e12 * chip.index_efficiency
    attention_rate = chip.matmul_16 * 1e12 * chip.attention_efficiency
    memory = chip.memory_bandwidth * 1e12 * chip.memory_efficiency
    link = chip.link * 1e9 * chip.link_efficiency
    held = [total if rows == "full" else rank.rows for rank in ranks]
    copies = ranks_of_all if rows == "full" else tp
    residual = [2 * count * streams * hidden * 2 / memory for count in held]
    answer = 0.0

    def exchanged(received: list[float]) -> float:
        return max(received) / link + chip.latency / 1e6 if max(received) >= 1 else 0.0

    def same(num_bytes: float) -> list[float]:
        return [num_bytes] * cp

    for ratio in config.compress_ratios[: config.num_hidden_layers]:
        pooled = {1: 0, 4: 2 * 2 * (width + config.index_head_dim)}.get(ratio, 2 * width)
        work = []
        for rank, waits in zip(ranks, residual, strict=True):
            count, projects = len(rank.own), total if keys in ("replicate", "gather_hidden") else rank.rows
            query = lora * hidden + lora * heads * width
            if ratio == 4:
                query += config.index_n_heads * (lora * config.index_head_dim + hidden)
            side = hidden * (width + pooled)
            out = groups * (group_in * group_out + group_out * hidden)
            made = rank.rows
            if output == "all_to_all":
                out, made = out // cp, sum(each.rows for each in ranks)
            attended = scored = 0
            for position in rank.positions:
                entries = (position + 1) // ratio if ratio > 1 else 0
                attended += min(position + 1, config.window_size)
                attended += min(entries, config.index_topk) if ratio == 4 else entries
                scored += entries if ratio == 4 else 0
            stored = sum((b + n) // ratio for n, b in zip(lengths, computed, strict=True)) if ratio > 1 else 0
            in_and_out, read = 2 * count * heads * width * 2, stored * width * 2
            if read > chip.cache * 1e6:
                read = attended * width * 2
            work.append(
                waits
                + max(2 * count * query / dense_rate, query * weight / memory)
                + max(2 * projects * side / dense_rate, side * weight / memory)
                + max(2 * made * out / dense_rate, out * weight / memory)
                + max(4 * heads * width * attended / attention_rate, (in_and_out + read) / memory)
                + max(config.index_n_heads * (2 * config.index_head_dim + 2) * scored / index_rate, 8 * scored / memory)
            )
        calls = []
        if keys == "gather_hidden":
            calls.append(same((cp - 1) * most * hidden * 2))
        elif keys == "gather_kv":
            calls.append(same((cp - 1) * most * (2 * width + 4 * pooled)))
        elif keys == "gather_compressed":
            reach = config.window_size
            calls.append([wanted(r.own, lengths, computed, reach, reach - 1, 1) * width * 2 for r in ranks])
            if ratio > 1:
                span = 2 * ratio if ratio == 4 else ratio
                calls.append([wanted(r.own, lengths, computed, span, span, ratio) * pooled * 4 for r in ranks])
                closed = max(sum((position + 1) % ratio == 0 for position in rank.positions) for rank in ranks)
                calls.append(same((cp - 1) * closed * width * 2))
                if ratio == 4:
                    calls.append(same((cp - 1) * closed * config.index_head_dim * 2))
        if output == "all_to_all":
            every = sum(rank.rows for rank in ranks)
            calls.append([(every - rank.rows) * (heads // cp) * width * 2 for rank in ranks])
            calls.append(
                same(2 * (cp - 1) * (total * hidden * 2) // cp if rows == "full" else (cp - 1) * most * hidden * 2)
            )
        else:
            if output == "gather_weight":
                kept = -(-groups // cp)
                calls.append(same((cp - 1) * kept * group_in * group_out * weight))
                calls.append(same((cp - 1) * kept * group_out * hidden * weight))
            if rows == "full":
                calls.append(same((cp - 1) * most * hidden * 2))
        if tp > 1:
            calls.append([2 * (tp - 1) * ((total if rows == "full" else r.rows) * hidden * 2) // tp for r in ranks])
        answer += max(work) + sum(exchanged(call) for call in calls)

        routed, active, shared, inner = experts
        matrix, away = 3 * hidden * inner, (ranks_of_all - 1) / ranks_of_all
        work = []
        for count, waits in zip(held, residual, strict=True):
            flop = 2 * matrix * (total * active / ranks_of_all + shared * count / copies)
            read = matrix * (expert_weight * routed / ranks_of_all + weight * shared)
            work.append(waits + max(flop / dense_rate, read / memory))
        own = [-(-count // copies) for count in held]
        calls = [
            same(int(total * active / ranks_of_all * away * hidden * sent)),
            [int(count * active * away * hidden * 2) for count in own],
            [(copies - 1) * count * hidden * 2 for count in own],
        ]
        answer += max(work) + sum(exchanged(call) for call in calls)
    return answer
