"""Blocks that stay in a CPU's caches, and products in which every number is the same wherever it stands.

Equal keys must score equally and a query must score the same in any slice, or a choice depends on its neighbours. A
matrix product adds up in another order at its ragged edges, so it only gets whole tiles, filled up with zeros. Both
sizes are multiples of what the CPU libraries of torch take at once; the tests check it on the machine they run on.
"""

from __future__ import annotations

from collections.abc import Callable

from dsacp_npu._tensors import Float, torch, values_known

__all__ = ["KEY_BLOCK", "KEY_TILE", "head_hits", "head_sums", "in_blocks", "whole_tiles"]

KEY_TILE = 96  # 48, 32, 24 and 16 divide it: what float32 and float64 kernels take at once
ROW_TILE = 32
KEY_BLOCK = 12 * KEY_TILE  # keys scored at a time: all heads of a block of queries and keys stay in the cache
BLOCK_NUMBERS = 1 << 18  # of an array that is worked through several times


def in_blocks(function: Callable[..., Float], x: Float, *row_aligned: torch.Tensor) -> Float:
    """``function(x, *row_aligned)``, like x and row by row, a few rows at a time where memory is a CPU's."""
    if x.numel() <= BLOCK_NUMBERS or not values_known(x):
        return function(x, *row_aligned)
    step = max(1, BLOCK_NUMBERS // (x.numel() // len(x)))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for start in range(0, len(x), step):
        rows = slice(start, start + step)
        out[rows] = function(x[rows], *(part[rows] for part in row_aligned))
    return out


def whole_tiles(rows: torch.Tensor, dim: int, tile: int) -> torch.Tensor:
    """The rows, followed by zeros up to a multiple of the tile."""
    missing = -rows.shape[dim] % tile
    if missing == 0:
        return rows
    return torch.cat([rows, rows.new_zeros(*rows.shape[:dim], missing, *rows.shape[dim + 1 :])], dim)


def head_hits(q: Float, keys: Float) -> Float:
    """``relu(q . k)`` [tokens, heads, keys] of q [tokens, heads, d] and whole tiles of keys, [(tokens,) keys, d]."""
    num_tokens, num_heads, d = q.shape
    if keys.ndim == 2:
        rows = whole_tiles(q.reshape(num_tokens * num_heads, d), 0, ROW_TILE)
        dots = (rows @ keys.T.contiguous())[: num_tokens * num_heads].reshape(num_tokens, num_heads, len(keys))
    else:
        dots = torch.bmm(whole_tiles(q, 1, ROW_TILE), keys.transpose(1, 2))[:, :num_heads]
    return dots.relu_()


def head_sums(weights: Float, hits: Float) -> Float:
    """The weighted sum over heads [tokens, keys] of whole tiles of hits."""
    return torch.bmm(weights[:, None], hits)[:, 0]
