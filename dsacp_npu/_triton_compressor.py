"""The compressor over Triton kernels: pooling, the rings after a step, and the norm.

Products are torch's, and so are the plan of a step and the cosines of its entries' positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from dsacp_npu import compressor as mirror
from dsacp_npu._tensors import Float, Int32, check_floats, dtype_name, torch, traced
from dsacp_npu._triton_launch import programs_for, tile_for
from dsacp_npu.compressor import (
    CompressedEntries,
    Compression,
    CompressorState,
    CompressorWeights,
    ProjectedRows,
    emitted_entries,
    projected_rows,
)
from dsacp_npu.kernels import compressor as entry
from dsacp_npu.kernels import compressor_state as ring
from dsacp_npu.kernels import norm
from dsacp_npu.rope import apply_rope, rope_table
from dsacp_ref.spec import UnsupportedError, check_int, check_number

__all__ = [
    "compress",
    "compress_",
    "compressed_entries",
    "pooled_entries",
    "projected_rows",
    "rms_norm",
    "updated_state",
    "updated_state_",
]


def pooled_entries(
    rows: ProjectedRows,
    entry_requests: Int32,
    entry_indices: Int32,
    query_start_loc: Int32,
    num_computed_tokens: Int32,
    state: CompressorState,
    norm_weight: Float,
    frequencies: Sequence[float],
    *,
    compress_ratio: int,
    eps: float,
) -> Float:
    """`dsacp_ref.compressor.pooled_entries` by a kernel.

    Limits: float32 rows; entries of a power of two of channels, at most 512.
    """
    entries = (entry_requests, entry_indices)
    after = (query_start_loc, num_computed_tokens, state, norm_weight, frequencies, compress_ratio, eps)
    return pooled(rows, *entries, *after, dtype=None)


def pooled(
    rows: ProjectedRows,
    entry_requests: Int32,
    entry_indices: Int32,
    query_start_loc: Int32,
    num_computed_tokens: Int32,
    state: CompressorState,
    norm_weight: Float,
    frequencies: Sequence[float],
    compress_ratio: int,
    eps: float,
    *,
    dtype: torch.dtype | None,
) -> Float:
    """The entries, rounded once to a dtype; None for that of the rows."""
    lengths = query_start_loc, num_computed_tokens
    compress_ratio, eps, overlap = mirror.checked_pooling(
        rows, entry_requests, entry_indices, *lengths, state, norm_weight, compress_ratio, eps
    )
    num_entries, d = len(entry_requests), len(norm_weight)
    if 0 in (num_entries, len(rows.kv), len(num_computed_tokens)):  # nothing to pool from
        return rows.kv.new_zeros(num_entries, d, dtype=dtype)
    positions = entry_indices.masked_fill(entry_requests < 0, 0) * compress_ratio
    cos, sin = rope_table(positions, frequencies_beside(positions, frequencies))
    apply_rope(rows.kv.new_zeros(0, d), cos[:0], sin[:0])  # refuses a table wider than an entry
    check_wide("rows.kv", rows.kv)
    if d & (d - 1):
        raise UnsupportedError(f"backend 'triton' pools entries of 2**n channels, got {d}; use backend 'torch'")
    tile = tile_for(entry.TILES, rows.kv, "pooled entries", entry.entry_key(d, compress_ratio))
    out = rows.kv.new_empty(num_entries, d, dtype=dtype)
    entry.pooled_entries_kernel[grid(rows.kv, tile, num_entries)](
        rows.kv.contiguous(),
        rows.score.contiguous(),
        state.kv.contiguous(),
        state.score.contiguous(),
        entry_requests.contiguous(),
        entry_indices.contiguous(),
        query_start_loc.contiguous(),
        num_computed_tokens.contiguous(),
        weights_of(norm_weight),
        cos.repeat_interleave(2, dim=1),
        torch.stack([-sin, sin], dim=-1).flatten(1),
        out,
        num_entries,
        state.kv.shape[1],
        compress_ratio,
        eps,
        **entry.entry_constants(d, cos.shape[1], 2 if overlap else 1, tile),
        **tile.options,
    )
    return out


def frequencies_beside(positions: Int32, frequencies: Sequence[float]) -> Sequence[float]:
    """The frequencies as a tensor on a device, made there once: a table of plain numbers takes an operator for each.

    Nothing is kept of what is traced, nor while a graph is captured, for then the memory is the graph's.
    """
    device = positions.device
    if device.type == "cpu" or not isinstance(frequencies, tuple):
        return frequencies
    capturing = getattr(getattr(torch, device.type), "is_current_stream_capturing", bool)
    passing = traced(positions) or capturing()
    return filled(frequencies, device) if passing else kept_frequencies(frequencies, device)


def filled(frequencies: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """The numbers on a device, without a copy from the host that would wait for it."""
    return torch.stack([torch.full((), number, dtype=torch.float32, device=device) for number in frequencies])


kept_frequencies = cache(filled)


def check_wide(name: str, rows: Float) -> None:
    """Refuse what no kernel computes in."""
    if rows.dtype != torch.float32:
        raise UnsupportedError(
            f"backend 'triton' takes {name} in float32, got {dtype_name(rows)}; use backend 'torch' for float64"
        )


def weights_of(weight: Float) -> Float:
    """The weights of a norm as a kernel reads them, which knows no float64."""
    return (weight.float() if weight.dtype == torch.float64 else weight).contiguous()


def grid(tensor: torch.Tensor, tile: Any, tasks: int) -> tuple[int]:
    """As many programs as fill the device, if there are as many tasks."""
    return (min(tasks, programs_for(tensor, cube=False, waves=tile.waves)),)


def updated_state(
    rows: ProjectedRows, query_start_loc: Int32, num_computed_tokens: Int32, state: CompressorState
) -> CompressorState:
    """`dsacp_ref.compressor.updated_state` by a kernel. Limits: float32 rows of at most 1024 columns."""
    check_update(rows, query_start_loc, num_computed_tokens, state)
    after = CompressorState(*(field.clone(memory_format=torch.contiguous_format) for field in state))
    return with_rows(rows, query_start_loc, num_computed_tokens, after)


def updated_state_(
    rows: ProjectedRows, query_start_loc: Int32, num_computed_tokens: Int32, state: CompressorState
) -> CompressorState:
    """`updated_state`, written into the state, which is returned. Limits: as there; the state is contiguous."""
    check_update(rows, query_start_loc, num_computed_tokens, state)
    for name, field in zip(CompressorState._fields, state, strict=True):
        if not field.is_contiguous():
            raise UnsupportedError(
                f"backend 'triton' writes into a contiguous state.{name}, got strides {field.stride()}; use "
                "updated_state, or backend 'torch'"
            )
    return with_rows(rows, query_start_loc, num_computed_tokens, state)


def check_update(
    rows: ProjectedRows, query_start_loc: Int32, num_computed_tokens: Int32, state: CompressorState
) -> None:
    """Refuse what the mirror refuses, and what is no float32."""
    num_tokens = mirror.check_projected(rows)
    mirror.check_rings(state, rows)
    mirror.checked_lengths(query_start_loc, num_computed_tokens, num_tokens)
    mirror.check_continues(state, query_start_loc, num_computed_tokens, 1, False)
    check_wide("rows.kv", rows.kv)


def with_rows(
    rows: ProjectedRows, query_start_loc: Int32, num_computed_tokens: Int32, state: CompressorState
) -> CompressorState:
    """The state, once the rows are written into it."""
    (num_reqs, ring_rows, width), num_tokens = state.kv.shape, len(rows.kv)
    if 0 in (num_reqs, num_tokens, width):
        return state
    tile = tile_for(ring.TILES, rows.kv, "a compressor state", ring.state_key(width))
    ring.updated_state_kernel[grid(rows.kv, tile, num_reqs)](
        rows.kv.contiguous(),
        rows.score.contiguous(),
        query_start_loc.contiguous(),
        num_computed_tokens.clone(memory_format=torch.contiguous_format),  # they may be the counts written to
        *state,
        num_reqs,
        ring_rows,
        **ring.state_constants(width, tile),
        **tile.options,
    )
    return state


def compressed_entries(
    rows: ProjectedRows,
    query_start_loc: Int32,
    num_computed_tokens: Int32,
    state: CompressorState,
    norm_weight: Float,
    frequencies: Sequence[float],
    *,
    compress_ratio: int,
    eps: float,
) -> CompressedEntries:
    """`dsacp_ref.compressor.compressed_entries` by a kernel. Limits: as `pooled_entries`."""
    lengths = (query_start_loc, num_computed_tokens)
    return entries_of(rows, *lengths, state, norm_weight, frequencies, compress_ratio, eps, dtype=None)


def entries_of(
    rows: ProjectedRows,
    query_start_loc: Int32,
    num_computed_tokens: Int32,
    state: CompressorState,
    norm_weight: Float,
    frequencies: Sequence[float],
    compress_ratio: int,
    eps: float,
    *,
    dtype: torch.dtype | None,
) -> CompressedEntries:
    """The entries that the rows complete, in a dtype; None for that of the rows."""
    num_rows = mirror.check_projected(rows)
    plan = emitted_entries(query_start_loc, num_computed_tokens, compress_ratio, num_rows=num_rows)
    after = (query_start_loc, num_computed_tokens, state, norm_weight, frequencies, compress_ratio, eps)
    return CompressedEntries(pooled(rows, *plan[:2], *after, dtype=dtype), *plan)


def compress(
    x: Float,
    weights: CompressorWeights,
    query_start_loc: Int32,
    num_computed_tokens: Int32,
    state: CompressorState,
    frequencies: Sequence[float],
    *,
    eps: float,
) -> Compression:
    """`dsacp_ref.compressor.compress` over kernels. Limits: as `pooled_entries`; the state is float32."""
    lengths = (query_start_loc, num_computed_tokens)
    rows, compressed = projected_and_pooled(x, weights, *lengths, state, frequencies, eps)
    return Compression(compressed, updated_state(rows, *lengths, state))


def compress_(
    x: Float,
    weights: CompressorWeights,
    query_start_loc: Int32,
    num_computed_tokens: Int32,
    state: CompressorState,
    frequencies: Sequence[float],
    *,
    eps: float,
) -> Compression:
    """`compress`, with the state written into its argument, which is returned beside the entries."""
    lengths = (query_start_loc, num_computed_tokens)
    rows, compressed = projected_and_pooled(x, weights, *lengths, state, frequencies, eps)
    return Compression(compressed, updated_state_(rows, *lengths, state))


def projected_and_pooled(
    x: Float,
    weights: CompressorWeights,
    query_start_loc: Int32,
    num_computed_tokens: Int32,
    state: CompressorState,
    frequencies: Sequence[float],
    eps: float,
) -> tuple[ProjectedRows, CompressedEntries]:
    """The projections of a step's rows, and the entries that they complete, in the dtype of the rows."""
    check_floats("x", x, ("num_tokens", "hidden"))
    lengths = (query_start_loc, num_computed_tokens)
    rows = projected_rows(x, mirror.row_positions(*lengths, len(x)), weights)
    after = (state, weights.norm_weight, frequencies, weights.ape.shape[0], eps)
    return rows, entries_of(rows, *lengths, *after, dtype=x.dtype)


def rms_norm(x: Float, weight: Float | None, eps: float) -> Float:
    """`dsacp_ref.compressor.rms_norm` by a kernel. Limits: no float64; at most 8192 channels."""
    check_floats("x", x, (*getattr(x, "shape", ())[:-1], "d"))
    d = check_int("d", x.shape[-1], 1)
    eps = check_number("eps", eps, at_least=0.0)
    if weight is not None:
        check_floats("weight", weight, (d,), "one weight a channel")
    if x.dtype == torch.float64:
        raise UnsupportedError("backend 'triton' has no norm in float64; use backend 'torch'")
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_rows = x.numel() // d
    if num_rows == 0:
        return out
    tile = tile_for(norm.TILES, x, "rms_norm", norm.norm_key(d))
    norm.rms_norm_kernel[grid(x, tile, -(-num_rows // tile.rows))](
        x.contiguous(),
        x if weight is None else weights_of(weight),
        out,
        num_rows,
        eps,
        **norm.norm_constants(d, weight is not None, tile),
        **tile.options,
    )
    return out
