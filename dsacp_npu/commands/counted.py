"""What each rank of a layer's step has to do and receives, counted instead of timed.

Work follows from the plan alone. Bytes are those of the real calls: the rank's own program runs at the model's real
sizes on tensors without values, and notes what the transport is told to bring. So neither needs a machine of that size,
and neither knows a formula that it could be compared with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from dsacp_npu import distributed, distributed_mla
from dsacp_npu._layer_parts import Torch
from dsacp_npu._tensors import Float, Int32, torch
from dsacp_npu.attention import AttentionOutput
from dsacp_npu.block import ExpertWeights
from dsacp_npu.compressor import CompressorWeights
from dsacp_npu.distributed import Ranks
from dsacp_npu.extents import local_extents, query_positions
from dsacp_npu.fp8 import encoded_latents, quantized_fp8
from dsacp_npu.indexer import IndexerWeights
from dsacp_npu.layer import LayerBatch, LayerCache, LayerWeights, empty_cache
from dsacp_npu.mla_layer import MLABatch, MLACache, MLAIndexerWeights, MLAWeights
from dsacp_npu.mla_stack import MLABlockWeights, StackWeights
from dsacp_npu.partition import partition_tokens
from dsacp_npu.visibility import visible_entries, window_starts
from dsacp_ref.config import AttentionConfig
from dsacp_ref.mla_config import MLAConfig

BLOCK = 128  # rows a block of every cache


class Work(NamedTuple):
    """What every rank computes in one step of a layer.

    Fields:
        keys: ints, raw keys and entries that its queries attend to, together.
        scores: ints, entries that its queries are scored against; 0 without an indexer.
    """

    keys: list[int]
    scores: list[int]


class Received(NamedTuple):
    """One call of the transport on one rank.

    Fields:
        name: str, the function of torch.distributed.
        num_bytes: int, what comes from other ranks. A sum over ranks counts as the shares that a ring brings: each
            rank's share of the sum from every other rank, and for an all-reduce also all other shares of the result.
    """

    name: str
    num_bytes: int


def imbalance(work: Sequence[int]) -> float:
    """The busiest rank's work over the mean of all.

    Args:
        work: ints, one a rank.

    Returns:
        float >= 1.

    >>> imbalance([3, 1])
    1.5
    """
    return max(work) * len(work) / sum(work)


def work_of_ranks(
    query_start_loc: Int32, seq_lens: Int32, cp_size: int, config: AttentionConfig, *, split: str, compress_ratio: int
) -> Work:
    """The work of every rank in one step of a layer, from where the plan puts its queries.

    Args:
        query_start_loc: int32[num_reqs + 1], global.
        seq_lens: int32[num_reqs], global.
        cp_size: int, the number of ranks.
        config: AttentionConfig.
        split: str, the rule.
        compress_ratio: int; 4 has an indexer, 1 no entries.

    Returns:
        Work.

    >>> from dsacp_ref.config import v4_flash
    >>> lengths = torch.tensor([0, 8], dtype=torch.int32), torch.tensor([8], dtype=torch.int32)
    >>> work_of_ranks(*lengths, 2, v4_flash(), split="contiguous", compress_ratio=4)
    Work(keys=[11, 31], scores=[1, 5])
    """
    work = Work([], [])
    for rank, tokens in enumerate(partition_tokens(query_start_loc, cp_size, split=split).token_indices):
        extents = local_extents(query_start_loc, seq_lens, cp_size, rank, split=split)
        num_rows = int((tokens >= 0).sum())
        positions = query_positions(extents.cu_seqlens_q, extents.seqused_kv, num_rows=num_rows)
        window = positions + 1 - window_starts(positions, config.window_size)
        entries = visible_entries(positions, compress_ratio) if compress_ratio > 1 else torch.zeros_like(positions)
        scored = entries if compress_ratio == 4 else torch.zeros_like(entries)
        attended = entries.clamp(max=config.index_topk) if compress_ratio == 4 else entries
        work.keys.append(int(window.sum()) + int(attended.sum()))
        work.scores.append(int(scored.sum()))
    return work


def mla_work_of_ranks(query_start_loc: Int32, seq_lens: Int32, cp_size: int, config: MLAConfig, *, split: str) -> Work:
    """The work of every rank in one step of a V3.2 layer, from where the plan puts its queries.

    A query at position p is scored against the p + 1 tokens up to its own and attends to at most K = index_topk of
    them: the first K - 1 queries miss K - 1, K - 2, .. 1. What follows for one request of T tokens without a prefix
    over P ranks, B = T / 2P tokens a zigzag block, busiest rank over mean::

        all queries attend to       T K - K (K - 1) / 2
        contiguous                  K / (K - K (K - 1) / 2T)              if the last rank misses none: T - 2B >= K - 1
        zigzag                      (K - d / 2B) / (K - K (K - 1) / 2T)   if no second block does: T / 2 >= K - 1

    There d is what the last rank's first block misses, less than any other's. It starts at (P - 1) B, so its first
    query misses n = max(K - 1 - (P - 1) B, 0), the next one less: d = m n - m (m - 1) / 2 for m = min(n, B). With
    (P - 1) B >= K - 1 it misses nothing, and zigzag is no better than contiguous.

    Args:
        query_start_loc: int32[num_reqs + 1], global.
        seq_lens: int32[num_reqs], global.
        cp_size: int, the number of ranks.
        config: MLAConfig.
        split: str, the rule.

    Returns:
        Work: keys are latents, scores are of index keys.

    >>> from dsacp_ref.mla_config import v32
    >>> lengths = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([3000], dtype=torch.int32)
    >>> mla_work_of_ranks(*lengths, 2, v32(), split="contiguous")
    Work(keys=[4096, 4096], scores=[5995, 5999])
    """
    work = Work([], [])
    for rank in range(cp_size):
        extents = local_extents(query_start_loc, seq_lens, cp_size, rank, split=split)
        num_rows = int(extents.cu_seqlens_q[-1])
        visible = visible_entries(query_positions(extents.cu_seqlens_q, extents.seqused_kv, num_rows=num_rows), 1)
        work.keys.append(int(visible.clamp(max=config.index_topk).sum()))
        work.scores.append(int(visible.sum()))
    return work


# --- bytes ---


class CountedTransport:
    """The functions of torch.distributed that a layer uses; they note what this rank receives."""

    def __init__(self, transport: Any | None) -> None:
        """``transport`` moves the rows; None moves nothing, for tensors without values."""
        self.transport = transport
        self.received: list[Received] = []

    def note(self, name: str, num_bytes: int, *args: Any, **options: Any) -> None:
        """Note one call, and make it."""
        self.received.append(Received(name, num_bytes))
        if self.transport is not None:
            getattr(self.transport, name)(*args, **options)

    def all_gather(self, gathered: list[torch.Tensor], own: torch.Tensor, group: Any) -> None:
        """Every other rank's rows arrive, padded as they are sent."""
        self.note("all_gather", (len(gathered) - 1) * own.nbytes, gathered, own, group=group)

    def all_to_all_single(
        self, received: torch.Tensor, sent: torch.Tensor, received_sizes: list[int], sent_sizes: list[int], group: Any
    ) -> None:
        """Every other rank's block for this one arrives."""
        own = sent_sizes[self.rank(group)]
        num_bytes = (sum(received_sizes) - own) * received.element_size()
        self.note("all_to_all_single", num_bytes, received, sent, received_sizes, sent_sizes, group=group)

    def all_reduce(self, total: torch.Tensor, group: Any) -> None:
        """A share of every other rank's summands arrives, and the other shares of the sum."""
        size = self.size(group)
        self.note("all_reduce", 2 * (size - 1) * total.nbytes // size, total, group=group)

    def reduce_scatter(self, own: torch.Tensor, summands: list[torch.Tensor], group: Any) -> None:
        """Every other rank's summand of this rank's rows arrives."""
        self.note("reduce_scatter", (len(summands) - 1) * own.nbytes, own, summands, group=group)

    def rank(self, group: Any) -> int:
        """This rank."""
        return int(group.rank())

    def size(self, group: Any) -> int:
        """The number of ranks."""
        return int(group.size())


class NoGroup(NamedTuple):
    """A place in a group that does not exist, for a transport that moves nothing."""

    cp_size: int
    cp_rank: int

    def size(self) -> int:
        """The number of ranks."""
        return self.cp_size

    def rank(self) -> int:
        """This rank."""
        return self.cp_rank


@contextmanager
def counted_transport(transport: Any | None) -> Iterator[list[Received]]:
    """All that this process receives in `dsacp_npu.distributed` from here on, noted in the list."""
    before, counting = distributed.dist, CountedTransport(transport)
    distributed.dist = counting  # type: ignore[assignment]
    try:
        yield counting.received
    finally:
        distributed.dist = before


class Shapes(Torch):
    """Torch's functions, but attention and indexer, which no exchange is part of, give no more than a shape."""

    @staticmethod
    def attended(q: Float, *args: Any, **options: Any) -> AttentionOutput:
        """An output like the queries."""
        return AttentionOutput(torch.empty_like(q), q.new_empty(q.shape[:2]))

    window_attention = all_entries_attention = selected_attention = latent_attention = attended

    @staticmethod
    def lightning_indexer(index_q: Float, *args: Any, index_topk: int, **options: Any) -> Int32:
        """As many entries as would be chosen."""
        return index_q.new_empty(len(index_q), index_topk, dtype=torch.int32)


def received_bytes(
    num_tokens: int,
    cp_size: int,
    cp_rank: int,
    config: AttentionConfig,
    *,
    compress_ratio: int,
    dtype: torch.dtype,
    split: str,
    rows: str,
    key_mode: str,
    output_mode: str,
) -> list[Received]:
    """What one rank receives in one step of a layer, call by call, at these sizes.

    Args:
        num_tokens: int, of one prompt without a prefix.
        cp_size, cp_rank: ints, the number of ranks, and which.
        config: AttentionConfig, the sizes.
        compress_ratio, split, rows, key_mode, output_mode: as `dsacp_npu.layer.layer_over_ranks`.
        dtype: of rows, weights and caches.

    Returns:
        list of Received, in the order of the calls.

    Raises:
        UnsupportedError: a combination that cannot work, by name.

    >>> from dsacp_ref.config import v4_flash
    >>> modes = {"split": "zigzag", "rows": "scattered", "key_mode": "gather_hidden", "output_mode": "gather_weight"}
    >>> calls = received_bytes(1024, 8, 0, v4_flash(), compress_ratio=1, dtype=torch.bfloat16, **modes)
    >>> [call.num_bytes // 2**20 for call in calls]  # hidden rows, wo_a, wo_b
    [7, 56, 56]
    """
    weights = empty_weights(config, compress_ratio, dtype)
    cache, batch = one_prompt(num_tokens, weights, compress_ratio)
    local = len(partition_tokens(batch.query_start_loc, cp_size, split=split).token_indices[cp_rank])
    x = weights.wkv.new_empty(num_tokens if rows == "full" else local, config.hidden_size)
    ranks = Ranks(NoGroup(cp_size, cp_rank), cp_size, cp_rank)
    backend: Any = Shapes
    with counted_transport(None) as received:
        distributed.layer_over_ranks_(
            x,
            weights,
            cache,
            batch,
            config,
            ranks,
            compress_ratio=compress_ratio,
            split=split,
            rows=rows,
            key_mode=key_mode,
            output_mode=output_mode,
            backend=backend,
        )
    return received


def mla_received_bytes(
    query_start_loc: Int32,
    cp_size: int,
    cp_rank: int,
    config: MLAConfig,
    *,
    dtype: torch.dtype,
    split: str,
    experts: str,
    fp8: bool = False,
) -> list[Received]:
    """What one rank receives in one step of a stack of one V3.2 layer, call by call, at these sizes.

    Args:
        query_start_loc: int32[num_reqs + 1], global, of prompts without prefixes.
        cp_size, cp_rank: ints, the number of ranks, and which.
        config: MLAConfig, the sizes.
        dtype: of rows, weights and caches.
        split, experts: as `dsacp_npu.mla_stack.mla_stack_over_ranks`.
        fp8: bool; True for caches in FP8.

    Returns:
        list of Received, in the order of the calls: keys, what experts need, each request's last row.

    Raises:
        UnsupportedError: ranks that cannot share the experts.

    >>> from dsacp_ref.mla_config import v32
    >>> lengths, modes = torch.tensor([0, 1024], dtype=torch.int32), {"split": "zigzag", "experts": "split"}
    >>> calls = mla_received_bytes(lengths, 8, 0, v32(), dtype=torch.bfloat16, **modes)
    >>> [call.num_bytes / 2**10 for call in calls]
    [1232.0, 12544.0, 12544.0, 98.0]
    """

    def matrix(*shape: int) -> Float:
        return torch.empty(shape, dtype=dtype, device="meta")

    weights = one_layer_stack(config, cp_size, matrix)
    num_tokens = int(query_start_loc[-1])
    lengths = query_start_loc[1:] - query_start_loc[:-1]
    blocks = -(-num_tokens // BLOCK)  # enough for each request: which rows of the cache are written does not matter
    table = torch.arange(blocks, dtype=torch.int32).repeat(len(lengths), 1)
    token_ids = torch.empty(num_tokens, dtype=torch.int32, device="meta")
    backend: Any = Shapes
    with counted_transport(None) as received:
        distributed_mla.mla_stack_over_ranks_(
            token_ids,
            weights,
            [mla_cache(config, blocks, matrix, fp8)],
            MLABatch(query_start_loc, lengths, table),
            config,
            Ranks(NoGroup(cp_size, cp_rank), cp_size, cp_rank),
            split=split,
            experts=experts,
            backend=backend,
        )
    return received


def one_layer_stack(config: MLAConfig, cp_size: int, matrix: Any) -> StackWeights:
    """Weights of a stack of one layer, ``matrix(*shape)`` each; what does not travel is as narrow as it can be."""
    hidden, heads, lora, latent = config.hidden_size, config.num_heads, config.q_lora_rank, config.kv_lora_rank
    width = config.index_head_dim
    indexer = MLAIndexerWeights(
        matrix(config.index_n_heads * width, lora),
        matrix(width, hidden),
        matrix(width),
        matrix(width),
        matrix(config.index_n_heads, hidden),
    )
    attention = MLAWeights(
        matrix(lora, hidden),
        matrix(lora),
        matrix(heads * (config.nope_head_dim + config.rope_head_dim), lora),
        matrix(latent + config.rope_head_dim, hidden),
        matrix(latent),
        matrix(heads, config.nope_head_dim, latent),
        matrix(heads, config.v_head_dim, latent),
        matrix(hidden, heads * config.v_head_dim),
        indexer,
    )
    experts = ExpertWeights(matrix(cp_size, hidden), matrix(cp_size, hidden), matrix(hidden, cp_size))
    block = MLABlockWeights(matrix(hidden), attention, matrix(hidden), experts)
    return StackWeights(matrix(1, hidden), (block,), matrix(hidden), matrix(1, hidden))


def mla_cache(config: MLAConfig, blocks: int, matrix: Any, fp8: bool) -> MLACache:
    """A cache of so many blocks, ``matrix(*shape)`` each."""
    widths = config.kv_lora_rank, config.rope_head_dim, config.index_head_dim
    latents, rope_keys, index_keys = (matrix(blocks, BLOCK, width) for width in widths)
    if fp8:
        return MLACache(encoded_latents(latents, rope_keys), None, quantized_fp8(index_keys))
    return MLACache(latents, rope_keys, index_keys)


def empty_weights(config: AttentionConfig, compress_ratio: int, dtype: torch.dtype) -> LayerWeights:
    """Weights of a layer, shapes only."""
    return layer_weights(config, compress_ratio, lambda *shape: torch.empty(shape, dtype=dtype, device="meta"))


def layer_weights(config: AttentionConfig, compress_ratio: int, matrix: Any) -> LayerWeights:
    """Weights of a layer of this ratio, ``matrix(*shape)`` each."""
    hidden, heads, lora = config.hidden_size, config.num_heads, config.q_lora_rank

    def compressor(width: int) -> CompressorWeights:
        columns = 2 * width if compress_ratio == 4 else width  # windows of ratio 4 overlap
        return CompressorWeights(
            matrix(columns, hidden), matrix(columns, hidden), matrix(compress_ratio, columns), matrix(width)
        )

    def indexer() -> IndexerWeights:
        width = config.index_n_heads * config.index_head_dim
        return IndexerWeights(
            matrix(width, lora), matrix(config.index_n_heads, hidden), compressor(config.index_head_dim)
        )

    return LayerWeights(
        matrix(lora, hidden),
        matrix(lora),
        matrix(heads * config.head_dim, lora),
        matrix(config.head_dim, hidden),
        matrix(config.head_dim),
        matrix(heads),
        matrix(config.o_groups, config.o_lora_rank, heads // config.o_groups * config.head_dim),
        matrix(hidden, config.o_groups * config.o_lora_rank),
        compressor(config.head_dim) if compress_ratio > 1 else None,
        indexer() if compress_ratio == 4 else None,
    )


def one_prompt(num_tokens: int, weights: LayerWeights, compress_ratio: int) -> tuple[LayerCache, LayerBatch]:
    """An empty cache and the host's batch of one prompt without a prefix."""
    blocks, cmp_blocks = -(-num_tokens // BLOCK), -(-(num_tokens // compress_ratio) // BLOCK)
    cache = empty_cache(
        weights, num_blocks=blocks, block_size=BLOCK, num_cmp_blocks=cmp_blocks, cmp_block_size=BLOCK, num_slots=1
    )
    offsets, lengths, slots = (
        torch.tensor(values, dtype=torch.int32) for values in ([0, num_tokens], [num_tokens], [0])
    )
    swa_table, cmp_table = (torch.arange(count, dtype=torch.int32)[None] for count in (blocks, cmp_blocks))
    return cache, LayerBatch(offsets, lengths, swa_table, cmp_table, slots)
