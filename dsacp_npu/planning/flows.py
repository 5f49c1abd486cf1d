"""What every rank receives in a layer, call by call: bytes of rows, keys, entries and weights.

These are formulas. Tests hold each to what `dsacp_npu.commands.counted` counts in the real calls, byte for byte, in
bfloat16.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsacp_npu.planning.models import BF16, Experts, LayerKind
from dsacp_npu.planning.schemes import Scheme
from dsacp_npu.planning.shares import Shares

__all__ = ["Flow", "expert_flows", "layer_flows"]


class Flow(NamedTuple):
    """One collective of a layer.

    Fields:
        name: str, what travels.
        received: int64[cp_size] bytes that come from other ranks, for a rank of each share of tokens.
    """

    name: str
    received: NDArray[np.int64]

    @property
    def most(self) -> int:
        """Bytes of the rank that receives most."""
        return int(self.received.max())


def layer_flows(kind: LayerKind, scheme: Scheme, shares: Shares, hidden: int, weight_bytes: int) -> list[Flow]:
    """The collectives of one attention layer, in their order.

    Args:
        kind: LayerKind.
        scheme: Scheme.
        shares: Shares of its split over its cp_size.
        hidden: int, channels of a row.
        weight_bytes: int, of a number of the output weights.

    Returns:
        list of Flow; calls that bring nothing on any rank are left out.
    """
    flows = key_flows(kind, scheme, shares, hidden) + output_flows(kind, scheme, shares, hidden, weight_bytes)
    if scheme.tp_size > 1:
        rows = shares.batch.num_tokens if scheme.rows == "full" else shares.rows
        flows.append(Flow("sum over heads", summed(rows * hidden * BF16, scheme.tp_size) + 0 * shares.rows))
    return [flow for flow in flows if flow.most]


def key_flows(kind: LayerKind, scheme: Scheme, shares: Shares, hidden: int) -> list[Flow]:
    """What the key side takes from other ranks."""
    others = scheme.cp_size - 1
    whole = np.ones(scheme.cp_size, np.int64)
    if scheme.key_mode == "gather_hidden":
        return [Flow("hidden rows", whole * others * shares.most_rows * hidden * BF16)]
    if scheme.key_mode == "gather_kv":
        row = kind.key_bytes + kind.projected_bytes + kind.index_bytes * kind.is_latent
        return [Flow("keys", whole * others * shares.most_rows * row)]
    if scheme.key_mode == "replicate":
        return []
    flows = [Flow("keys before runs", shares.window_halo(kind) * kind.key_bytes)]
    if kind.compress_ratio > 1:
        most = int(shares.entries(kind).max())
        flows += [
            Flow("rows before entries", shares.pool_halo(kind) * kind.projected_bytes),
            Flow("entries", whole * others * most * kind.entry_bytes),
            Flow("index keys", whole * others * most * kind.index_bytes),
        ]
    return flows


def output_flows(kind: LayerKind, scheme: Scheme, shares: Shares, hidden: int, weight_bytes: int) -> list[Flow]:
    """What the output side takes from the other ranks that split the tokens."""
    cp_size, others, most = scheme.cp_size, scheme.cp_size - 1, shares.most_rows
    whole = np.ones(cp_size, np.int64)
    heads, groups = kind.heads // scheme.tp_size, kind.groups // scheme.tp_size
    flows = []
    if scheme.output_mode == "all_to_all":
        row = heads // cp_size * kind.head_out * BF16
        flows.append(Flow("heads for tokens", (shares.rows.sum() - shares.rows) * row))
        if scheme.rows == "full":
            return [*flows, Flow("sum of outputs", whole * summed(shares.batch.num_tokens * hidden * BF16, cp_size))]
        return [*flows, Flow("sum of outputs", whole * others * most * hidden * BF16)]
    if scheme.output_mode == "gather_weight":
        kept = -(-groups // cp_size)  # of the rank with most; others pad to it
        flows += [Flow("output weights", whole * others * kept * part * weight_bytes) for part in kind.group_parts]
    if scheme.rows == "full":
        flows.append(Flow("output rows", whole * others * most * hidden * BF16))
    return flows


def summed(num_bytes: int, ranks: int) -> int:
    """Bytes of an all-reduce: the shares of the others' summands, and the others' shares of the sum."""
    return 2 * (ranks - 1) * num_bytes // ranks


def held_rows(scheme: Scheme, shares: Shares) -> tuple[NDArray[np.int64], int]:
    """Rows that a rank of each share holds between layers, and how many ranks hold the same."""
    if scheme.rows == "full":
        return np.full(scheme.cp_size, shares.batch.num_tokens, np.int64), scheme.cp_size * scheme.tp_size
    return shares.rows, scheme.tp_size


def expert_flows(
    experts: Experts, scheme: Scheme, shares: Shares, hidden: int, sent_bytes: int
) -> list[Flow]:
    """The collectives of one layer of experts that are spread over all ranks, each token to its own.

    Ranks that hold the same rows each send a part of them; what comes back is gathered among them. Tokens are taken to
    go to all experts alike.

    Args:
        experts: Experts.
        scheme: Scheme.
        shares: Shares of its split.
        hidden: int, channels of a row.
        sent_bytes: int, of a number on its way to an expert; results come back in bfloat16.

    Returns:
        list of Flow.
    """
    ranks = scheme.cp_size * scheme.tp_size
    rows, copies = held_rows(scheme, shares)
    away = (ranks - 1) / ranks
    whole = np.ones(scheme.cp_size, np.int64)
    routed = shares.batch.num_tokens * experts.active / ranks
    own = -(-rows // copies)
    flows = [
        Flow("rows to experts", whole * int(routed * away * hidden * sent_bytes)),
        Flow("rows from experts", (own * experts.active * away * hidden * BF16).astype(np.int64)),
        Flow("rows of experts shared", (copies - 1) * own * hidden * BF16),
    ]
    return [flow for flow in flows if flow.most]
