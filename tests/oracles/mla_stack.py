"""A DeepSeek-V3.2 stack on one request from position 0, from token ids to logits, token by token in float64.

Also what ends it where logits are spread over ranks: the first of the highest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from tests.oracles import block, compressor, mla


class Stack(NamedTuple):
    """Of every token the normed hidden row and the logits; of every layer each token's choice and keys."""

    hidden: list[list[float]]
    logits: list[list[float]]
    chosen: list[list[list[int]]]
    keys: list[list[mla.Keys]]


def stack(
    token_ids: Sequence[int],
    embed: ArrayLike,
    blocks: Sequence[Mapping[str, Any]],
    norm: Sequence[float],
    head: ArrayLike,
    config: Mapping[str, Any],
) -> Stack:
    """The whole model on one request.

    embed, head: [vocab, hidden]. A block has attn_norm [hidden]; attention, as `mla.layer` takes it; ffn_norm [hidden];
    expert, the arguments of `block.expert` after the row. config: as `mla.layer` takes it.
    """
    table, back, eps = np.asarray(embed, np.float64), np.asarray(head, np.float64), config["eps"]
    rows = [[float(value) for value in table[token]] for token in token_ids]
    done = Stack([], [], [], [])
    for weights in blocks:
        normed = [compressor.rms_norm(row, weights["attn_norm"], eps) for row in rows]
        attended = mla.layer(normed, 0, weights["attention"], config)
        rows = [block.added(row, output) for row, output in zip(rows, attended.outputs, strict=True)]
        normed = [compressor.rms_norm(row, weights["ffn_norm"], eps) for row in rows]
        rows = [block.added(row, block.expert(own, *weights["expert"])) for row, own in zip(rows, normed, strict=True)]
        done.chosen.append(attended.chosen)
        done.keys.append(attended.keys)
    for row in rows:
        last = compressor.rms_norm(row, norm, eps)
        done.hidden.append(last)
        done.logits.append([mla.dot(last, weights) for weights in back])
    return done


def first_highest(logits: Sequence[float]) -> int:
    """The lowest token that no other beats; NaN beats nothing and is beaten by any number above -inf."""
    best, highest = 0, -math.inf
    for token, value in enumerate(logits):
        if float(value) > highest:
            best, highest = token, float(value)
    return best
