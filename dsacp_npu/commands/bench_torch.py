"""Benchmarks of the torch mirror: a step's metadata against plain torch operations, a layer against the reference.

Both sides of a ratio run in turns in one process, so that what else the machine does meets them alike. Needs torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np

import dsacp_npu.attention
import dsacp_npu.compressor
import dsacp_npu.extents
import dsacp_npu.indexer
import dsacp_npu.layer
import dsacp_ref.attention
import dsacp_ref.indexer
import dsacp_ref.layer
from dsacp_npu._tensors import Float, Int32, torch
from dsacp_npu.commands.bench import BLOCK, core_call, core_flops, core_inputs, lengths, normal, ragged_batch, seconds
from dsacp_ref.compressor import CompressorWeights
from dsacp_ref.config import v4_flash
from dsacp_ref.indexer import IndexerWeights
from dsacp_ref.layer import LayerBatch, LayerWeights

GROUPS = 3  # cache groups of a model: window only, ratio 4, ratio 128
RANKS, RANK, ROPE = 8, 3, 64
TOKENS = 4096  # of the layer; more would take long and show the same
Times = list[tuple[float, float]]


def in_turns(first: Callable[[], object], second: Callable[[], object], rounds: int, calls: int = 1) -> Times:
    """Seconds a call of both, one after the other in every round."""
    sides = [lambda call=call: [call() for _ in range(calls)] for call in (first, second)]
    return [(seconds(sides[0]) / calls, seconds(sides[1]) / calls) for _ in range(rounds)]


def compared(times: Times, unit: float, digits: int) -> str:
    """Both medians, and how many times as long the first takes."""
    ratios = [first / second for first, second in times]
    medians = [f"{median(side) / unit:8.{digits}f}" for side in zip(*times, strict=True)]
    return f"{'  '.join(medians)}  {median(ratios):5.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


# --- metadata ---


def plain_lengths(query_start_loc: Int32, seq_lens: Int32, start: int, end: int) -> tuple[Int32, Int32, Int32]:
    """Local query offsets, right-aligned lengths and their offsets, as one writes them; nothing is checked."""
    num_reqs = len(seq_lens)
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    lower, upper = starts.clamp(start, end), ends.clamp(start, end)
    query_lens = upper - lower
    local_query_start_loc = query_start_loc.new_zeros(num_reqs + 1)
    local_query_start_loc[1:] = query_lens.cumsum(0)
    present = (query_lens > 0) & (seq_lens > 0)
    local_seq_lens = torch.where(present, seq_lens - (ends - upper), 0).clamp(min=0)
    local_kv_start_loc = query_start_loc.new_zeros(num_reqs + 1)
    local_kv_start_loc[1:] = local_seq_lens.cumsum(0)
    return local_query_start_loc, local_seq_lens, local_kv_start_loc


def plain_build(
    query_start_loc: Int32, seq_lens: Int32, num_tokens: int, cos: Float | None, sin: Float | None
) -> tuple[Any, ...]:
    """All that `build_cp_local_metadata` gives, for one cache group."""
    per_rank = -(-num_tokens // RANKS)
    start, end = per_rank * RANK, per_rank * (RANK + 1)
    numbers = (*plain_lengths(query_start_loc, seq_lens, start, end), start, end, per_rank, per_rank * RANKS)
    if cos is None or sin is None:
        return numbers
    padding = (0, 0, 0, per_rank * RANKS - num_tokens)
    padded = torch.nn.functional.pad(cos, padding, value=1), torch.nn.functional.pad(sin, padding)
    return (*numbers, *(table[start:end] for table in padded))


def metadata(tokens: int, repeats: int) -> None:
    """One step's metadata: the plain chain for each cache group apart, against one build that they share."""
    del tokens, repeats  # short calls have their own sizes and counts
    print(f"metadata of one step for {GROUPS} cache groups, rank {RANK} of {RANKS}, us; torch {torch.__version__}")
    print("  plain: the chain for each group apart, nothing checked; build: build_cp_local_metadata once, checked")
    print("  requests  RoPE rows     plain     build  plain / build")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for num_reqs in (1, 7, 32, 128, 1024):
        loc, lens = map(torch.from_numpy, ragged_batch(num_reqs))
        num_tokens = int(loc[-1])
        table = torch.from_numpy(normal(num_tokens, ROPE))
        for tables in ((None, None), (table, table)):
            plain = partial(plain_build, loc, lens, num_tokens, *tables)
            build = partial(dsacp_npu.extents.build_cp_local_metadata, loc, lens, RANKS, RANK, *tables)
            check_same(plain(), build())
            times = in_turns(lambda call=plain: [call() for _ in range(GROUPS)], build, rounds=51, calls=5)
            print(f"  {num_reqs:8d}  {'no' if tables[0] is None else 'yes':9s}  {compared(times, 1e-6, 1)}")
    torch.set_num_threads(threads)


def check_same(plain: tuple[Any, ...], build: tuple[Any, ...]) -> None:
    """Both sides must give the same before their times mean anything."""
    for mine, due in zip(build, plain, strict=False):  # without tables the chain gives no rows
        if not (torch.equal(mine, due) if isinstance(due, torch.Tensor) else mine == due):
            raise AssertionError(f"the plain chain gives {due}, build_cp_local_metadata {mine}")


# --- a layer ---


def layer_weights() -> LayerWeights:
    """Random float32 weights of a ratio-4 layer of V4-Flash."""
    config = v4_flash()
    hidden, heads = config.hidden_size, config.num_heads

    def matrix(*shape: int) -> Any:
        return normal(*shape) * np.float32(shape[-1] ** -0.5)

    def compressor(width: int) -> CompressorWeights:
        rows = 2 * width  # windows overlap
        return CompressorWeights(
            matrix(rows, hidden), matrix(rows, hidden), normal(4, rows), np.ones(width, np.float32)
        )

    return LayerWeights(
        matrix(config.q_lora_rank, hidden),
        np.ones(config.q_lora_rank, np.float32),
        matrix(heads * config.head_dim, config.q_lora_rank),
        matrix(config.head_dim, hidden),
        np.ones(config.head_dim, np.float32),
        normal(heads),
        matrix(config.o_groups, config.o_lora_rank, heads // config.o_groups * config.head_dim),
        matrix(hidden, config.o_groups * config.o_lora_rank),
        compressor(config.head_dim),
        IndexerWeights(
            matrix(config.index_n_heads * config.index_head_dim, config.q_lora_rank),
            matrix(config.index_n_heads, hidden),
            compressor(config.index_head_dim),
        ),
    )


def layer_inputs(tokens: int) -> tuple[Any, ...]:
    """Rows, weights, empty cache and batch of one prompt without a prefix."""
    weights, num_entries = layer_weights(), tokens // 4
    blocks, cmp_blocks = -(-tokens // BLOCK), -(-num_entries // BLOCK)
    cache = dsacp_ref.layer.empty_cache(
        weights, num_blocks=blocks, block_size=BLOCK, num_cmp_blocks=cmp_blocks, cmp_block_size=BLOCK, num_slots=1
    )
    tables = (np.arange(count, dtype=np.int32)[None] for count in (blocks, cmp_blocks))
    batch = LayerBatch(*lengths(tokens), *tables, np.zeros(1, np.int32))
    return normal(tokens, v4_flash().hidden_size), weights, cache, batch


def twin(value: Any) -> Any:
    """Arrays as tensors of the same memory, the reference's records as the mirror's."""
    if hasattr(value, "_fields"):
        modules = (dsacp_npu.layer, dsacp_npu.indexer, dsacp_npu.compressor)
        kind = next(getattr(module, type(value).__name__) for module in modules if type(value).__name__ in vars(module))
        return kind(*map(twin, value))
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def layer(tokens: int, repeats: int) -> None:
    """A ratio-4 layer, its core apart and whole: numpy against torch."""
    tokens, repeats = min(tokens, TOKENS), min(repeats, 3)
    print(f"ratio-4 layer of V4-Flash, {tokens} tokens, float32, s; {repeats} runs of both in turns")
    print(f"  torch {torch.__version__}, {torch.get_num_threads()} threads; numpy's threads are set in the environment")
    print(
        f"  load {os.getloadavg()[0]:.1f} before the first run: threads that wait for each other suffer from neighbours"
    )
    print("                                     numpy     torch  numpy / torch")
    inputs = core_inputs(tokens)
    ref = core_call(dsacp_ref.indexer, dsacp_ref.attention, inputs)
    npu = core_call(dsacp_npu.indexer, dsacp_npu.attention, tuple(map(twin, inputs)))
    name = f"attention, indexer, top-k ({core_flops(tokens) / 1e12:.2f} TFLOP)"
    print_layer(name, lambda: ref().out, lambda: npu().out, repeats)
    del inputs, ref, npu
    inputs = layer_inputs(tokens)
    words = {"config": v4_flash(), "compress_ratio": 4}
    ref = partial(dsacp_ref.layer.attention_layer, *inputs, **words)
    npu = partial(dsacp_npu.layer.attention_layer, *map(twin, inputs), **words)
    print_layer("attention_layer", lambda: ref().output, lambda: npu().output, repeats)


def print_layer(name: str, ref: Callable[[], Any], npu: Callable[[], Any], repeats: int) -> None:
    """One line of the table, and how far the two results are apart."""
    want, got = ref(), npu().numpy()
    far = np.linalg.norm(got - want) / np.linalg.norm(want)
    del want, got
    print(f"  {name:32s}  {compared(in_turns(ref, npu, repeats), 1, 2)}; {far:.0e} apart", flush=True)
