"""The seconds, the bytes and the memory of one prefill under a scheme.

Each part of a layer takes the longer of its operations over a rate and its bytes over the memory's; the parts of a
rank follow one another; all ranks wait for the slowest before they exchange; exchanges follow at the link's rate, and
nothing is overlapped. So a layer takes ``max over ranks (sum of parts) + sum of exchanges``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsacp_npu.planning.chips import Chip
from dsacp_npu.planning.flows import Flow, expert_flows, held_rows, layer_flows
from dsacp_npu.planning.models import BF16, FLOAT32, LayerKind, Model
from dsacp_npu.planning.schemes import Scheme
from dsacp_npu.planning.shares import Batch, Shares, shares_of
from dsacp_ref.spec import check_choice

__all__ = [
    "PRECISIONS",
    "Cost",
    "LayerCost",
    "Memory",
    "Planner",
    "Precision",
    "key_side_flop",
    "output_flop",
    "query_flop",
]

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Work = tuple[Any, float, Any]  # operations, operations a second, bytes of memory
LOGIT_ROWS = 1024  # queries that an indexer scores at a time, so that its scores never fill the memory
GB = 1e9


class Precision(NamedTuple):
    """How numbers are held.

    Fields:
        weights: int, bytes of a weight, and of the numbers that products are made of.
        expert_weights: float, bytes of a routed expert's weight in memory; scales are not counted.
        index_key: int, bytes of an index key in its cache, with its scale.
        sent: int, bytes of a number on its way to an expert.
    """

    weights: int
    expert_weights: float
    index_key: int
    sent: int


PRECISIONS = {
    "w4a8": Precision(1, 0.5, 132, 1),  # as V4 is released: routed experts in 4 bits
    "w8a8": Precision(1, 1, 132, 1),
    "bf16": Precision(2, 2, 256, 2),
}


class LayerCost(NamedTuple):
    """One kind of layer, or its experts, under a scheme.

    Fields:
        name: str, the kind, or "experts".
        num_layers: int, layers of it.
        parts: dict from a part's name to float64[cp_size] seconds on a rank of each share of tokens.
        limits: dict from a part's name to "compute" or "memory": what bounds it on its slowest rank.
        flop: int64[cp_size], operations of a rank.
        flows: list of Flow, what is exchanged.
        exchange: float, seconds of all exchanges.
    """

    name: str
    num_layers: int
    parts: dict[str, Float64]
    limits: dict[str, str]
    flop: Int64
    flows: list[Flow]
    exchange: float

    @property
    def compute(self) -> Float64:
        """float64[cp_size] seconds of a rank's own work."""
        return np.sum(list(self.parts.values()), axis=0)

    @property
    def seconds(self) -> float:
        """Of one layer: the slowest rank, then the exchanges."""
        return float(self.compute.max()) + self.exchange

    @property
    def imbalance(self) -> float:
        """The slowest rank's own work over the mean."""
        return float(self.compute.max() / self.compute.mean())

    @property
    def received(self) -> int:
        """Bytes that the rank which receives most gets in one layer."""
        return int(sum(flow.received for flow in self.flows).max()) if self.flows else 0


class Memory(NamedTuple):
    """Bytes of the rank that keeps most, at the peak.

    Fields:
        weights: int, of all layers, embedding and head; what a scheme shares is shared.
        caches: int, of all requests after the step.
        rows: int, residual streams between layers, twice.
        workspace: int, of the layer that needs most.
    """

    weights: int
    caches: int
    rows: int
    workspace: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


@dataclass(frozen=True)
class Cost:
    """A step of a model under a scheme; `seconds` and `memory` are what schemes are chosen by.

    Args:
        scheme: Scheme.
        layers: LayerCost of every kind, and of the experts.
        memory: Memory.
    """

    scheme: Scheme
    layers: tuple[LayerCost, ...]
    memory: Memory

    @property
    def seconds(self) -> float:
        """Of the whole prefill."""
        return sum(layer.num_layers * layer.seconds for layer in self.layers)

    @property
    def received(self) -> int:
        """Bytes of the rank that receives most, in all layers."""
        return sum(layer.num_layers * layer.received for layer in self.layers)

    @property
    def imbalance(self) -> float:
        """The slowest ranks' own work over the mean, layer by layer."""
        slowest = sum(layer.num_layers * float(layer.compute.max()) for layer in self.layers)
        return slowest / sum(layer.num_layers * float(layer.compute.mean()) for layer in self.layers)

    def seconds_by_part(self) -> dict[str, float]:
        """Seconds of every part over all layers, on the rank that is slowest in each layer; exchanges by name.

        Returns:
            dict; it sums to `seconds`.
        """
        found: dict[str, float] = {}
        for layer in self.layers:
            slowest = int(layer.compute.argmax())
            for name, seconds in layer.parts.items():
                found[name] = found.get(name, 0.0) + layer.num_layers * float(seconds[slowest])
            found["exchange"] = found.get("exchange", 0.0) + layer.num_layers * layer.exchange
        return found

    def bound(self) -> str:
        """What takes most of the time, and whether its operations or its bytes do.

        Returns:
            str such as ``"index scores (compute)"``, or ``"exchange (link)"``.
        """
        parts = self.seconds_by_part()
        name = max(parts, key=parts.__getitem__)
        if name == "exchange":
            return "exchange (link)"
        weigh: dict[str, float] = {}
        for layer in self.layers:
            if name in layer.parts:
                limit = layer.limits[name]
                weigh[limit] = weigh.get(limit, 0.0) + layer.num_layers * float(layer.parts[name].max())
        return f"{name} ({max(weigh, key=weigh.__getitem__)})"


def query_flop(kind: LayerKind, scheme: Scheme, shares: Shares) -> Int64:
    """Operations of the query side's projections, on a rank of each share."""
    return 2 * shares.tokens * (kind.query_whole + kind.query_heads // scheme.tp_size)


def key_rows(scheme: Scheme, shares: Shares) -> Int64:
    """Rows whose key side a rank projects: all tokens where it has their hidden rows, else its own."""
    if scheme.key_mode in ("replicate", "gather_hidden"):
        return np.full(scheme.cp_size, shares.batch.num_tokens, np.int64)
    return shares.rows


def key_side_flop(kind: LayerKind, scheme: Scheme, shares: Shares) -> Int64:
    """Operations of the projections of keys and compressors."""
    return 2 * key_rows(scheme, shares) * kind.key_side


def output_flop(kind: LayerKind, scheme: Scheme, shares: Shares) -> Int64:
    """Operations of the output projection."""
    if scheme.output_mode == "all_to_all":
        every = np.full(scheme.cp_size, shares.rows.sum(), np.int64)
        return 2 * every * (kind.output // (scheme.tp_size * scheme.cp_size))
    return 2 * shares.rows * (kind.output // scheme.tp_size)


class Planner:
    """The costs of one model on one kind of chip."""

    def __init__(self, model: Model, chip: Chip, precision: str | None = None) -> None:
        """``precision``: a name of `PRECISIONS`; None as the model is released."""
        self.model, self.chip = model, chip
        self.precision_name = model.released_precision if precision is None else precision
        self.precision = PRECISIONS[check_choice("precision", self.precision_name, tuple(PRECISIONS))]

    def cost(self, batch: Batch, scheme: Scheme, known: dict[tuple[int, str], Shares] | None = None) -> Cost:
        """What a step costs.

        Args:
            batch: Batch.
            scheme: Scheme.
            known: Shares by cp_size and split of this batch, filled as they are needed, so that schemes share them.

        Returns:
            Cost.
        """
        known = {} if known is None else known
        place = (scheme.cp_size, scheme.split)
        if place not in known:
            known[place] = shares_of(batch, *place)
        shares = known[place]
        layers = [self._layer(kind, scheme, shares) for kind in self.model.kinds]
        layers.append(self._experts(scheme, shares))
        return Cost(scheme, tuple(layers), self._memory(scheme, shares))

    # --- time ---

    def _layer(self, kind: LayerKind, scheme: Scheme, shares: Shares) -> LayerCost:
        """One attention layer."""
        weight, rate = self.precision.weights, self.chip.matmul_rate(self.precision.weights)
        queries, outputs = query_flop(kind, scheme, shares), output_flop(kind, scheme, shares)
        keys = key_side_flop(kind, scheme, shares)
        attention = kind.heads // scheme.tp_size * kind.key_flop * shares.keys(kind)
        scores = kind.score_flop * shares.scores(kind)
        shared_output = scheme.tp_size * (scheme.cp_size if scheme.output_mode == "all_to_all" else 1)
        work = {
            "query projections": (queries, rate, (kind.query_whole + kind.query_heads // scheme.tp_size) * weight),
            "key side": (keys, rate, kind.key_side * weight),
            "attention": (attention, self.chip.attention_rate(), self._attention_bytes(kind, scheme, shares)),
            "output projection": (outputs, rate, kind.output // shared_output * weight),
            "residual": (0 * queries, rate, self._residual_bytes(scheme, shares)),
        }
        if kind.indexed:
            index_rate = self.chip.index_rate(1 if self.precision.weights == 1 else 2)
            # Scores are written once and read once by the choice.
            work["index scores"] = (scores, index_rate, 2 * FLOAT32 * shares.scores(kind))
        flows = layer_flows(kind, scheme, shares, self.model.hidden, weight)
        return self._timed(kind.name, kind.num_layers, work, flows)

    def _experts(self, scheme: Scheme, shares: Shares) -> LayerCost:
        """The experts behind one attention layer; dense layers count as their mean with the others."""
        experts, hidden, ranks = self.model.experts, self.model.hidden, scheme.cp_size * scheme.tp_size
        weight, rate = self.precision.weights, self.chip.matmul_rate(self.precision.weights)
        rows, copies = held_rows(scheme, shares)
        own, layers = rows / copies, self.model.num_layers
        sparse = (layers - experts.dense_layers) / layers
        routed = shares.batch.num_tokens * experts.active / ranks
        matrix = 3 * hidden * experts.width
        dense = 3 * hidden * experts.dense_width * (1 - sparse)
        flop = 2 * (sparse * matrix * (routed + experts.shared * own) + dense * own)
        routed_weights = self.precision.expert_weights * experts.routed / ranks
        read = sparse * matrix * (routed_weights + weight * experts.shared) + weight * dense
        flows = expert_flows(experts, scheme, shares, hidden, self.precision.sent)
        flows = [flow._replace(received=(flow.received * sparse).astype(np.int64)) for flow in flows]
        work = {
            "experts": (flop, rate, read),
            "residual": (0 * flop, rate, self._residual_bytes(scheme, shares)),
        }
        return self._timed("experts", layers, work, flows)

    def _timed(self, name: str, num_layers: int, work: dict[str, Work], flows: list[Flow]) -> LayerCost:
        """Seconds of every part: operations over the rate, or bytes over the memory's, whichever is longer."""
        parts, limits, total = {}, {}, 0
        for part, (flop, rate, num_bytes) in work.items():
            compute = np.asarray(flop, np.float64) / rate
            memory = np.broadcast_to(np.asarray(num_bytes, np.float64) / self.chip.memory_rate, compute.shape)
            parts[part] = np.maximum(compute, memory)
            limits[part] = "compute" if compute.max() >= memory.max() else "memory"
            total = total + np.asarray(flop)
        exchange = sum(flow.most / self.chip.link_rate + self.chip.latency * 1e-6 for flow in flows)
        return LayerCost(name, num_layers, parts, limits, np.asarray(total).astype(np.int64), flows, exchange)

    def _attention_bytes(self, kind: LayerKind, scheme: Scheme, shares: Shares) -> Int64:
        """Queries and outputs once; each gathered key from memory, or all keys once where the cache holds them."""
        in_and_out = 2 * shares.tokens * (kind.heads // scheme.tp_size) * max(kind.head_out, kind.key_flop // 4) * BF16
        stored = self._stored_keys(kind, shares.batch) * kind.key_bytes
        if stored <= self.chip.cache * 1e6:
            return in_and_out + stored
        return in_and_out + shares.keys(kind) * kind.key_bytes

    def _stored_keys(self, kind: LayerKind, batch: Batch) -> int:
        """Keys that a layer's attention may read: latents of all tokens, or entries (windows run along)."""
        if kind.is_latent:
            return sum(batch.seq_lens)
        return sum(length // kind.compress_ratio for length in batch.seq_lens) if kind.compress_ratio > 1 else 0

    def _residual_bytes(self, scheme: Scheme, shares: Shares) -> Int64:
        """Residual streams are read and written once around attention, and once around experts."""
        rows, _ = held_rows(scheme, shares)
        return 2 * rows * self.model.streams * self.model.hidden * BF16

    # --- memory ---

    def _memory(self, scheme: Scheme, shares: Shares) -> Memory:
        """Of the rank with most rows."""
        rows, _ = held_rows(scheme, shares)
        kept = int(rows.max()) * self.model.streams * self.model.hidden * BF16
        workspace = max(self._workspace(kind, scheme, shares) for kind in self.model.kinds)
        return Memory(self._weights(scheme), self._caches(shares.batch), 2 * kept, workspace)

    def _weights(self, scheme: Scheme) -> int:
        """Weights that a rank keeps: heads by TP group, outputs whole or by group, experts over all ranks."""
        model, ranks = self.model, scheme.cp_size * scheme.tp_size
        attention = 0
        for kind in model.kinds:
            groups = kind.groups // scheme.tp_size
            if scheme.output_mode != "replicated_weight":
                groups = -(-groups // scheme.cp_size)
            output = kind.output // kind.groups * groups
            attention += kind.num_layers * (
                kind.query_whole + kind.query_heads // scheme.tp_size + kind.key_side + output
            )
        experts, matrix = model.experts, 3 * model.hidden * model.experts.width
        layers = model.num_layers - experts.dense_layers
        routed = int(layers * matrix * -(-experts.routed // ranks) * self.precision.expert_weights)
        dense = 3 * experts.dense_layers * model.hidden * experts.dense_width + layers * matrix * experts.shared
        ends = 2 * -(-model.vocab // ranks) * model.hidden * BF16
        return (attention + dense) * self.precision.weights + routed + ends

    def _caches(self, batch: Batch) -> int:
        """All that later steps need, the same on every rank: windows, entries, index keys, latents."""
        total = 0
        for kind in self.model.kinds:
            for length in batch.seq_lens:
                if kind.is_latent:
                    held = length * (kind.key_bytes + self.precision.index_key)
                else:
                    entries = length // kind.compress_ratio if kind.compress_ratio > 1 else 0
                    held = min(length, kind.window) * kind.key_bytes
                    held += entries * (kind.entry_bytes + self.precision.index_key * kind.indexed)
                total += kind.num_layers * held
        return total

    def _workspace(self, kind: LayerKind, scheme: Scheme, shares: Shares) -> int:
        """What a layer needs while it runs: queries and outputs, raw keys of the step, and what was gathered."""
        heads, hidden = kind.heads // scheme.tp_size, self.model.hidden
        most, tokens = shares.most_rows, shares.batch.num_tokens
        width = max(kind.head_out, kind.key_flop // 4)
        need = 2 * most * heads * width * BF16 + tokens * kind.key_bytes
        if kind.indexed:
            need += min(most, LOGIT_ROWS) * max(shares.batch.seq_lens) // kind.compress_ratio * FLOAT32
        if scheme.key_mode == "gather_hidden":
            need += tokens * hidden * BF16
        if kind.compress_ratio > 1:
            projects = {"replicate": tokens, "gather_hidden": tokens, "gather_kv": tokens}.get(scheme.key_mode, most)
            need += projects * kind.projected_bytes
        if scheme.output_mode == "all_to_all":
            need += int(shares.rows.sum()) * heads // scheme.cp_size * kind.head_out * BF16
        if scheme.output_mode == "gather_weight":
            need += kind.output // scheme.tp_size * self.precision.weights
        return need
