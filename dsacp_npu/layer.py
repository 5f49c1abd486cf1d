"""Mirror of `dsacp_ref.layer` over torch.

`attention_layer` and `head_parallel_layer` run on the device of their arguments and never wait for it.
`layer_over_ranks` plans on the host: the batch must be CPU tensors, all else may lie on a device. Here one process
plays all ranks; in `dsacp_npu.distributed` each process is one, and runs the same program (`_rank_layer`).

With bfloat16 or float16 rows the matrix products are made in that dtype, pooling and softmax in float32; the compressor
states of a cache are float32. ``backend`` puts other functions in the place of torch's, see `dsacp_npu.backend`: what
it does not have is refused, never computed by torch instead.

A function whose name ends in ``_`` writes into its caches. What can be refused is refused before the first write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dsacp_npu._geometry import Kind, kind_of, rows_of, sizes_of, whole_geometry
from dsacp_npu._layer_checks import check_given, check_inputs, check_reads, check_step, check_weights
from dsacp_npu._layer_parts import Call, Torch, copied, one_device, with_groups, with_heads
from dsacp_npu._layer_records import KeyRows, LayerBatch, LayerCache, LayerOutput, LayerWeights, RanksOutput
from dsacp_npu._rank_layer import (
    Modes,
    Program,
    StepPlan,
    groups_per_rank,
    planned_partition,
    rank_program,
    rank_step,
    run_together,
    step_plan_over_ranks,
)
from dsacp_npu._tensors import Float, Int32, check_floats, check_host, computing_dtype, torch, values_known
from dsacp_npu.compressor import CompressorState, CompressorWeights, checked_weights, empty_state
from dsacp_npu.exchange import all_reduce, check_sequence
from dsacp_npu.extents import CPLocalMetadata, build_cp_local_metadata, check_batch, token_positions
from dsacp_npu.partition import counted
from dsacp_npu.quant import QuantizedVectors
from dsacp_npu.rope import rope_frequencies, rope_table, yarn_frequencies
from dsacp_ref.config import AttentionConfig, check_combination
from dsacp_ref.spec import INT32_MAX, check_bool, check_choice, check_int, check_record, contract_error

if TYPE_CHECKING:
    from dsacp_npu.backend import Backend

__all__ = [
    "KeyRows",
    "LayerBatch",
    "LayerCache",
    "LayerOutput",
    "LayerWeights",
    "RanksOutput",
    "attention_layer",
    "draft_batches",
    "draft_metadata",
    "empty_cache",
    "head_parallel_layer",
    "layer_frequencies",
    "layer_over_ranks",
    "projected_output",
    "uses_context_parallel",
    "attention_layer_",
    "head_parallel_layer_",
    "layer_over_ranks_",
]


# Plain Python on constants: a compiler takes the results instead of tracing the arithmetic.
constant_rope_frequencies = torch.compiler.assume_constant_result(rope_frequencies)  # type: ignore[no-untyped-call]
constant_yarn_frequencies = torch.compiler.assume_constant_result(yarn_frequencies)  # type: ignore[no-untyped-call]


def layer_frequencies(config: AttentionConfig, compress_ratio: int) -> tuple[float, ...]:
    """Mirror of `dsacp_ref.layer.layer_frequencies`."""
    check_record("config", config, AttentionConfig)
    compress_ratio = check_int("compress_ratio", compress_ratio, 1)
    if compress_ratio == 1:
        return constant_rope_frequencies(config.rope_theta, config.rope_head_dim)
    if config.rope_factor == 1:
        return constant_rope_frequencies(config.compress_rope_theta, config.rope_head_dim)
    return constant_yarn_frequencies(
        config.compress_rope_theta,
        config.rope_head_dim,
        factor=config.rope_factor,
        beta_fast=config.rope_beta_fast,
        beta_slow=config.rope_beta_slow,
        original_max_position=config.rope_original_max_position,
    )


def projected_output(out: Float, wo_a: Float, wo_b: Float) -> Float:
    """Mirror of `dsacp_ref.layer.projected_output`."""
    return Torch.projected_output(out, wo_a, wo_b)


def empty_cache(
    weights: LayerWeights,
    *,
    num_blocks: int,
    block_size: int,
    num_cmp_blocks: int,
    cmp_block_size: int,
    num_slots: int,
    spare_rows: int = 0,
    int8_index_cache: bool = False,
) -> LayerCache:
    """Mirror of `dsacp_ref.layer.empty_cache`. States are float32 where the weights are shorter."""
    check_record("weights", weights, LayerWeights)
    num_blocks, num_cmp_blocks = check_int("num_blocks", num_blocks, 0), check_int("num_cmp_blocks", num_cmp_blocks, 0)
    block_size, cmp_block_size = check_int("block_size", block_size, 1), check_int("cmp_block_size", cmp_block_size, 1)
    num_slots, spare_rows = check_int("num_slots", num_slots, 0), check_int("spare_rows", spare_rows, 0)
    check_bool("int8_index_cache", int8_index_cache)
    check_floats("weights.wkv", weights.wkv, ("head_dim", "hidden"))
    like = weights.wkv

    def parts(compressor: CompressorWeights | None) -> tuple[Float, CompressorState]:
        if compressor is None:
            ring = like.new_zeros(num_slots, spare_rows, 0, dtype=computing_dtype(like.dtype))
            count = like.new_zeros(num_slots, dtype=torch.int32)
            state = CompressorState(ring, ring.clone(), count, count.clone())
            return like.new_zeros(0, cmp_block_size, 0), state
        width, ratio = checked_weights(compressor)
        d = len(compressor.norm_weight)
        state = empty_state(compressor, num_slots, num_rows=width // d * ratio + spare_rows)
        return like.new_zeros(num_cmp_blocks, cmp_block_size, d), state

    cmp_cache, cmp_state = parts(weights.compressor)
    index_cache, index_state = parts(weights.indexer.compressor if weights.indexer else None)
    if int8_index_cache:
        scales = index_cache.new_zeros(index_cache.shape[:2], dtype=torch.float16)
        index_cache = QuantizedVectors(index_cache.to(torch.int8), scales)
    swa_cache = like.new_zeros(num_blocks, block_size, like.shape[0])
    return LayerCache(swa_cache, cmp_cache, index_cache, cmp_state, index_state)


# --- one device ---


def attention_layer(
    x: Float,
    weights: LayerWeights,
    cache: LayerCache,
    batch: LayerBatch,
    config: AttentionConfig,
    *,
    compress_ratio: int,
    given_topk: Int32 | None = None,
    backend: Backend | None = None,
) -> LayerOutput:
    """Mirror of `dsacp_ref.layer.attention_layer`."""
    check_attention_layer(x, weights, cache, batch, config, compress_ratio, given_topk)
    return whole_step(x, copied(cache), batch, call_of(weights, config, compress_ratio, backend), given_topk)


def attention_layer_(
    x: Float,
    weights: LayerWeights,
    cache: LayerCache,
    batch: LayerBatch,
    config: AttentionConfig,
    *,
    compress_ratio: int,
    given_topk: Int32 | None = None,
    backend: Backend | None = None,
) -> LayerOutput:
    """`attention_layer`, written into the cache, which is returned in the output."""
    check_attention_layer(x, weights, cache, batch, config, compress_ratio, given_topk)
    positions = rows_of(counted(len(x), batch.seq_lens), batch).positions
    check_reads(positions, batch, cache, given_topk, compress_ratio, config)
    return whole_step(x, cache, batch, call_of(weights, config, compress_ratio, backend), given_topk)


def check_attention_layer(
    x: Float,
    weights: LayerWeights,
    cache: LayerCache,
    batch: LayerBatch,
    config: AttentionConfig,
    compress_ratio: int,
    given_topk: Int32 | None,
) -> None:
    """Refuse arguments that do not belong together."""
    check_weights(weights, config, compress_ratio)
    check_step(x, batch, cache, weights, config)
    check_given(given_topk, len(x), weights, config)


def call_of(weights: LayerWeights, config: AttentionConfig, compress_ratio: int, backend: Backend | None) -> Call:
    """A layer with all its heads and groups."""
    ops: Any = Torch if backend is None else backend
    return Call(kind_of(weights, config, layer_frequencies(config, compress_ratio), ops), weights)


def whole_step(x: Float, cache: LayerCache, batch: LayerBatch, call: Call, given_topk: Int32 | None) -> LayerOutput:
    """One step, written into the cache."""
    geometry = whole_geometry(batch, len(x), sizes_of(cache), call.kind)
    return LayerOutput(*one_device(x, geometry, cache, call, given_topk), cache)


# --- over ranks ---


def uses_context_parallel(
    query_start_loc: Int32, seq_lens: Int32, *, mixed: str = "cp", decode_query_len: int = 1
) -> bool:
    """Mirror of `dsacp_ref.layer.uses_context_parallel`.

    Limits: decides on the host, so CPU tensors only and not while compiling.
    """
    check_batch(query_start_loc, seq_lens)
    check_choice("mixed", mixed, ("cp", "off"))
    decode_query_len = check_int("decode_query_len", decode_query_len, 1)
    check_host("query_start_loc", query_start_loc)
    check_host("seq_lens", seq_lens)
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    real = (query_lens > 0) & (seq_lens > 0)
    decodes = real & (seq_lens > query_lens) & (query_lens <= decode_query_len)
    prefills = bool((real & ~decodes).any())
    return prefills and not (mixed == "off" and bool(decodes.any()))


def head_parallel_layer(
    x: Float,
    weights: LayerWeights,
    caches: Sequence[LayerCache],
    batch: LayerBatch,
    config: AttentionConfig,
    *,
    compress_ratio: int,
    backend: Backend | None = None,
) -> RanksOutput:
    """Mirror of `dsacp_ref.layer.head_parallel_layer`."""
    check_head_parallel_layer(x, weights, caches, batch, config, compress_ratio)
    call = call_of(weights, config, compress_ratio, backend)
    return all_by_heads(x, [copied(cache) for cache in caches], batch, call)


def head_parallel_layer_(
    x: Float,
    weights: LayerWeights,
    caches: Sequence[LayerCache],
    batch: LayerBatch,
    config: AttentionConfig,
    *,
    compress_ratio: int,
    backend: Backend | None = None,
) -> RanksOutput:
    """`head_parallel_layer`, written into the caches, which are returned in the output."""
    check_head_parallel_layer(x, weights, caches, batch, config, compress_ratio)
    positions = rows_of(counted(len(x), batch.seq_lens), batch).positions
    for cache in caches:
        check_reads(positions, batch, cache, None, compress_ratio, config)
    return all_by_heads(x, list(caches), batch, call_of(weights, config, compress_ratio, backend))


def check_head_parallel_layer(
    x: Float,
    weights: LayerWeights,
    caches: Sequence[LayerCache],
    batch: LayerBatch,
    config: AttentionConfig,
    compress_ratio: int,
) -> None:
    """Refuse arguments that do not belong together, or ranks that do not divide the heads."""
    check_sequence("caches", caches)
    cp_size = check_int("cp_size", len(caches), 1, hint="one cache a rank")
    check_heads_divide(cp_size, config, compress_ratio)
    check_weights(weights, config, compress_ratio)
    for cache in caches:
        check_step(x, batch, cache, weights, config)


def check_heads_divide(cp_size: int, config: AttentionConfig, compress_ratio: int) -> None:
    """Refuse ranks that do not divide heads and groups."""
    check_record("config", config, AttentionConfig)
    check_combination(
        split="contiguous",
        rows="full",
        key_mode="replicate",
        output_mode="all_to_all",
        compress_ratio=compress_ratio,
        cp_size=cp_size,
        num_heads=config.num_heads,
        o_groups=config.o_groups,
    )


def all_by_heads(x: Float, caches: list[LayerCache], batch: LayerBatch, call: Call) -> RanksOutput:
    """Every rank's step by heads, written into the caches."""
    steps = [by_heads(x, cache, rank, len(caches), batch, call) for rank, cache in enumerate(caches)]
    partials, topks = zip(*steps, strict=True)
    return RanksOutput(all_reduce(list(partials)), list(topks), caches)


def by_heads(
    x: Float, cache: LayerCache, cp_rank: int, cp_size: int, batch: LayerBatch, call: Call
) -> tuple[Float, Int32]:
    """One rank's step by heads, written into its cache: its summand of the output, and the chosen entries."""
    kind = shared_kind(call.kind, cp_size)
    geometry = whole_geometry(batch, len(x), sizes_of(cache), kind)
    weights = with_groups(with_heads(call.weights, cp_rank, cp_size), cp_rank, cp_size)
    return one_device(x, geometry, cache, Call(kind, weights), None)


def shared_kind(kind: Kind, cp_size: int) -> Kind:
    """The kind with one rank's share of the heads and groups."""
    config = kind.config
    return kind._replace(
        config=replace(config, num_heads=config.num_heads // cp_size, o_groups=config.o_groups // cp_size)
    )


def layer_over_ranks(
    inputs: Sequence[Float],
    weights: LayerWeights,
    caches: Sequence[LayerCache],
    batch: LayerBatch,
    config: AttentionConfig,
    *,
    compress_ratio: int,
    split: str = "contiguous",
    rows: str = "full",
    key_mode: str = "replicate",
    output_mode: str = "all_to_all",
    num_input_tokens: int | None = None,
    given_topk: Int32 | None = None,
    backend: Backend | None = None,
) -> RanksOutput:
    """Mirror of `dsacp_ref.layer.layer_over_ranks`.

    Limits: plans on the host, so the batch must be CPU tensors; inputs, weights and caches may lie on a device.
    """
    modes = Modes(split, rows, key_mode, output_mode, num_input_tokens)
    check_lists(inputs, caches)
    own = [copied(cache) if isinstance(cache, LayerCache) else cache for cache in caches]
    return all_ranks(inputs, weights, own, batch, config, compress_ratio, modes, given_topk, backend)


def layer_over_ranks_(
    inputs: Sequence[Float],
    weights: LayerWeights,
    caches: Sequence[LayerCache],
    batch: LayerBatch,
    config: AttentionConfig,
    *,
    compress_ratio: int,
    split: str = "contiguous",
    rows: str = "full",
    key_mode: str = "replicate",
    output_mode: str = "all_to_all",
    num_input_tokens: int | None = None,
    given_topk: Int32 | None = None,
    backend: Backend | None = None,
) -> RanksOutput:
    """`layer_over_ranks`, written into the caches, which are returned in the output."""
    modes = Modes(split, rows, key_mode, output_mode, num_input_tokens)
    check_lists(inputs, caches)
    return all_ranks(inputs, weights, list(caches), batch, config, compress_ratio, modes, given_topk, backend)


def check_lists(inputs: Sequence[Float], caches: Sequence[LayerCache]) -> None:
    """Refuse anything but one input and one cache a rank."""
    check_sequence("inputs", inputs)
    check_sequence("caches", caches)
    cp_size = check_int("cp_size", len(inputs), 1, hint="one input a rank")
    if len(caches) != cp_size:
        raise contract_error("caches", f"hold one cache for each of {cp_size} ranks", len(caches))


def all_ranks(
    inputs: Sequence[Float],
    weights: LayerWeights,
    caches: list[LayerCache],
    batch: LayerBatch,
    config: AttentionConfig,
    compress_ratio: int,
    modes: Modes,
    given_topk: Int32 | None,
    backend: Backend | None,
) -> RanksOutput:
    """Every rank's step, written into the caches."""
    members = dict(enumerate(zip(inputs, caches, strict=True)))
    plan, call = planned_step(members, len(inputs), weights, batch, config, compress_ratio, modes, given_topk, backend)
    programs = [program_of(x, cache, rank, plan, modes, call, given_topk) for rank, (x, cache) in members.items()]
    return RanksOutput(*map(list, zip(*run_together(programs), strict=True)))


def program_of(
    x: Float, cache: LayerCache, cp_rank: int, plan: StepPlan, modes: Modes, call: Call, given_topk: Int32 | None
) -> Program:
    """One rank's program of a planned step, with the weights that its modes let it use."""
    step = rank_step(plan, modes, cp_rank, sizes_of(cache), call.kind, x.device)
    kept = call._replace(weights=kept_weights(call.weights, cp_rank, len(plan.rows_per_rank), modes.output_mode))
    return rank_program(x, cache, step, kept, given_topk)


def kept_weights(weights: LayerWeights, cp_rank: int, cp_size: int, output_mode: str) -> LayerWeights:
    """The weights with the groups that a rank keeps."""
    if output_mode == "replicated_weight":
        return weights
    groups = groups_per_rank(len(weights.wo_a), cp_size)
    kept = slice(sum(groups[:cp_rank]), sum(groups[: cp_rank + 1]))
    lora = weights.wo_a.shape[1]
    return weights._replace(wo_a=weights.wo_a[kept], wo_b=weights.wo_b[:, kept.start * lora : kept.stop * lora])


def planned_step(
    members: dict[int, tuple[Float, LayerCache]],
    cp_size: int,
    weights: LayerWeights,
    batch: LayerBatch,
    config: AttentionConfig,
    compress_ratio: int,
    modes: Modes,
    given_topk: Int32 | None,
    backend: Backend | None,
) -> tuple[StepPlan, Call]:
    """The plan of a step, and what all rows share, once everything that the ranks here hold is found legal.

    ``members`` are the ranks that this process plays, with the input and the cache of each.
    """
    check_record("config", config, AttentionConfig)
    check_combination(
        split=modes.split,
        rows=modes.rows,
        key_mode=modes.key_mode,
        output_mode=modes.output_mode,
        compress_ratio=compress_ratio,
        cp_size=cp_size,
        num_heads=config.num_heads,
        o_groups=config.o_groups,
    )
    check_weights(weights, config, compress_ratio)
    check_record("batch", batch, LayerBatch)
    check_batch(batch.query_start_loc, batch.seq_lens)
    partition = planned_partition(batch, cp_size, modes)
    num_tokens = len(partition.restore_indices)
    check_inputs({rank: x for rank, (x, _) in members.items()}, partition, modes.rows)
    for x, cache in members.values():
        check_step(x.new_empty(num_tokens, x.shape[1]), batch, cache, weights, config)
    first = next(iter(members.values()))[0]
    check_given(given_topk, len(first) if modes.rows == "full" else num_tokens, weights, config)
    positions = rows_of(counted(num_tokens, batch.seq_lens), batch).positions
    for _, cache in members.values():
        check_reads(positions, batch, cache, given_topk, compress_ratio, config)
    call = call_of(weights, config, compress_ratio, backend)
    ring_rows = max(cache.cmp_state.kv.shape[1] for _, cache in members.values())
    return step_plan_over_ranks(batch, partition, modes, call.kind, ring_rows), call


# --- draft layers ---


def draft_batches(query_start_loc: Int32, seq_lens: Int32, num_steps: int) -> tuple[tuple[Int32, Int32], ...]:
    """Mirror of `dsacp_ref.layer.draft_batches`."""
    check_batch(query_start_loc, seq_lens)
    num_steps = check_int("num_steps", num_steps, 1)
    active = query_start_loc[1:] > query_start_loc[:-1]
    if values_known(query_start_loc, seq_lens) and len(seq_lens):
        longest = int((seq_lens * active).max())
        if longest + num_steps - 1 > INT32_MAX:
            raise contract_error("num_steps", "keep seq_lens below 2**31", num_steps, f"a request has {longest} keys")
    steps = [(query_start_loc.clone(), seq_lens.clone())]
    for step in range(1, num_steps):
        one_each = torch.cat([query_start_loc.new_zeros(1), active.cumsum(0, dtype=torch.int32)])
        steps.append((one_each, seq_lens + step * (active & (seq_lens > 0)).int()))
    return tuple(steps)


def draft_metadata(
    query_start_loc: Int32,
    seq_lens: Int32,
    cp_size: int,
    cp_rank: int,
    num_steps: int,
    frequencies: Sequence[float],
    *,
    causal: bool = True,
) -> tuple[CPLocalMetadata, ...]:
    """Mirror of `dsacp_ref.layer.draft_metadata`.

    Limits: the rows of a step are counted on the host, so CPU tensors only and not while compiling.
    """
    steps = []
    for loc, lens in draft_batches(query_start_loc, seq_lens, num_steps):
        check_host("query_start_loc", loc)
        positions = token_positions(counted(int(loc[-1]), loc), loc, lens)
        table = rope_table(positions, frequencies)
        steps.append(build_cp_local_metadata(loc, lens, cp_size, cp_rank, *table, causal=causal))
    return tuple(steps)
