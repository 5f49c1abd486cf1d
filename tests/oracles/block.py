"""A stack of decoder blocks on one request from position 0, row by row in float64; and who owns the last rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tests.oracles import compressor, layer


def expert(
    row: Sequence[float], w1: ArrayLike, w3: ArrayLike, w2: ArrayLike, limit: float | None = None
) -> list[float]:
    """One row through a gated MLP, one inner channel after the other: w1 gates w3, w2 [hidden, inter] leads back."""
    gate_rows, up_rows, back = (np.asarray(weight, np.float64) for weight in (w1, w3, w2))
    output = [0.0] * len(back)
    for channel in range(len(gate_rows)):
        gate = sum(float(a) * float(b) for a, b in zip(gate_rows[channel], row, strict=True))
        up = sum(float(a) * float(b) for a, b in zip(up_rows[channel], row, strict=True))
        if limit is not None:
            gate, up = min(gate, limit), max(min(up, limit), -limit)
        inner = gate * logistic(gate) * up
        for place in range(len(output)):
            output[place] += float(back[place, channel]) * inner
    return output


def logistic(value: float) -> float:
    """1 / (1 + exp(-value)), for any value."""
    return 1 / (1 + math.exp(-value)) if value > -700 else 0.0


def stack(x: ArrayLike, blocks: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """The residual stream [L][hidden] after these blocks.

    A block has: attn_norm [hidden]; attention, config and ratio as `layer.layer` takes them; ffn_norm [hidden]; expert,
    the arguments of `expert` after the row.
    """
    rows = [[float(value) for value in row] for row in np.asarray(x, np.float64)]
    for block in blocks:
        eps = block["config"]["eps"]
        normed = [compressor.rms_norm(row, block["attn_norm"], eps) for row in rows]
        attended, _ = layer.layer(normed, block["attention"], block["config"], block["ratio"])
        rows = [added(row, output) for row, output in zip(rows, attended, strict=True)]
        normed = [compressor.rms_norm(row, block["ffn_norm"], eps) for row in rows]
        rows = [added(row, expert(own, *block["expert"])) for row, own in zip(rows, normed, strict=True)]
    return rows


def added(row: Sequence[float], output: Sequence[float]) -> list[float]:
    """The sum, channel by channel."""
    return [a + b for a, b in zip(row, output, strict=True)]


def last_rows(q_lens: Sequence[int], owned: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """For every rank, the (request, local row) of each request's last new token that it owns; ascending requests."""
    found: list[list[tuple[int, int]]] = [[] for _ in owned]
    last_token = -1
    for request, q_len in enumerate(q_lens):
        last_token += q_len
        if q_len == 0:
            continue
        for rank, tokens in enumerate(owned):
            for row, token in enumerate(tokens):
                if token == last_token:
                    found[rank].append((request, row))
    return found
