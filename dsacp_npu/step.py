"""One forward's metadata, made once and shared by all attention layers of a model.

::

    new tokens -> Caches.batches -> StepMetadata: by ratio   lengths, global and local      (all layers of the ratio)
                                                             block tables, slots
                                                             RoPE rows
                                                             operator metadata
    StepMetadata -> every DSAttention.forward

A draft step makes its own and shares no tensor with any other step. For a captured graph, `StepMetadata.fill_` writes
another step's metadata into tensors that stay where they are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from dsacp_npu._geometry import Geometry, Sizes, rows_of, whole_geometry, with_tensors
from dsacp_npu._layer_checks import check_batch_slots, check_batch_tables, check_reads
from dsacp_npu._layer_records import LayerBatch, LayerCache
from dsacp_npu._rank_layer import RankStep, planned_partition, rank_step, step_plan_over_ranks
from dsacp_npu._tensors import Int32, check_host, torch
from dsacp_npu.caches import Caches
from dsacp_npu.extents import check_batch, token_positions
from dsacp_npu.layer import uses_context_parallel
from dsacp_npu.partition import Partition, counted
from dsacp_ref.spec import check_int, check_record, contract_error

if TYPE_CHECKING:
    from dsacp_npu.module import DSAttention

Layer = TypeVar("Layer")

__all__ = ["RowLayout", "StepMetadata", "metadata_of_batches", "step_metadata"]


class RowLayout:
    """Which tokens of a step this rank's rows hold, whatever the model.

    Fields:
        splits: bool, whether this step splits tokens over the CP ranks; if not, each rank runs all of them.
        requests: names of the batch's requests; empty where an engine keeps its own.
        plan: the number of the plan that made room for it in its caches; None where an engine does so itself.
        partition: Partition of the tokens over the CP ranks; None in a step that does not split.
        query_start_loc: int32[num_reqs + 1], on the host, global.
        token_indices: int32[num_rows], on the host: the token of the step that each row of hidden states holds on this
            rank, -1 in pad rows.
        positions: int32[num_rows], on the host: its position in its request, -1 in pad rows.
    """

    splits: bool
    requests: tuple[Hashable, ...]
    plan: int | None
    partition: Partition | None
    query_start_loc: Int32
    token_indices: Int32
    positions: Int32

    def __init__(
        self,
        query_start_loc: Int32,
        seq_lens: Int32,
        requests: tuple[Hashable, ...],
        partition: Partition | None,
        token_indices: Int32,
        plan: int | None,
    ) -> None:
        """Of a step with these lengths on the host; rows beyond its tokens are pad rows."""
        self.query_start_loc, self.requests, self.partition, self.plan = query_start_loc, requests, partition, plan
        self.splits = partition is not None
        self.token_indices = token_indices.masked_fill(token_indices >= int(query_start_loc[-1]), -1)
        self.positions = token_positions(self.token_indices, query_start_loc, seq_lens)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step on all ranks."""
        return int(self.query_start_loc[-1])

    @property
    def num_rows(self) -> int:
        """Rows of hidden states that this rank hands to a layer."""
        return len(self.token_indices)


class StepMetadata(RowLayout):
    """What the layers of a model need to know of one forward.

    Fields:
        batches: LayerBatch by compress ratio, on the host, global.
        (others): as `RowLayout`; a step that does not split tokens runs by heads.
    """

    batches: dict[int, LayerBatch]

    def __init__(
        self,
        batches: dict[int, LayerBatch],
        requests: tuple[Hashable, ...],
        partition: Partition | None,
        token_indices: Int32,
        by_ratio: dict[int, Geometry | RankStep],
        shapes: dict[int, tuple[torch.Size, ...]],
        plan: int | None,
    ) -> None:
        """Made by `step_metadata` and `metadata_of_batches`."""
        first = next(iter(batches.values()))
        super().__init__(first.query_start_loc, first.seq_lens, requests, partition, token_indices, plan)
        self.batches = batches
        self._by_ratio, self._shapes = by_ratio, shapes

    def geometry(self, compress_ratio: int) -> Geometry:
        """Where this rank's rows lie in layers of a ratio; of a step by heads."""
        found = self._of(compress_ratio)
        assert isinstance(found, Geometry)  # callers look at `splits`
        return found

    def rank_step(self, compress_ratio: int) -> RankStep:
        """This rank's part in layers of a ratio; of a step that splits tokens."""
        found = self._of(compress_ratio)
        assert isinstance(found, RankStep)  # callers look at `splits`
        return found

    def check_cache(self, compress_ratio: int, cache: LayerCache) -> None:
        """Refuse a cache of other sizes than the step was made for: its slots would lead elsewhere.

        Args:
            compress_ratio: int, the layer's.
            cache: LayerCache.

        Raises:
            ContractError: no layer of that ratio in the step, or other sizes.
        """
        self._of(compress_ratio)
        if shapes_of(cache) != self._shapes[compress_ratio]:
            wanted, got = (
                [tuple(shape) for shape in shapes] for shapes in (self._shapes[compress_ratio], shapes_of(cache))
            )
            hint = "make the step with the caches that it will run on"
            raise contract_error("cache", f"have blocks and state slots {wanted}, as the step's", got, hint)

    def fill_(self, other: StepMetadata) -> None:
        """Write another step's metadata into this one's tensors, which stay where they are, for a graph to replay.

        While capturing, hand layers ``caches[layer_idx].tensors``: what a graph does, a `PagedCache` cannot see. After
        each replay `Caches.advance` tells it.

        Args:
            other: StepMetadata of as many slots and rows (`step_metadata` with ``num_slots`` and
                ``num_input_tokens``), from the same layers.

        Raises:
            ContractError: a step of other shapes. Nothing was written then.
        """
        check_record("other", other, StepMetadata)
        mine, theirs = (tensors_in(step._by_ratio) for step in (self, other))
        shapes = [[(list(tensor.shape), tensor.dtype) for tensor in part] for part in (mine, theirs)]
        same = shapes[0] == shapes[1] and self.num_rows == other.num_rows and self._shapes == other._shapes
        if self.splits or other.splits or not same:
            rows = [(step.num_rows, len(next(iter(step.batches.values())).seq_lens)) for step in (self, other)]
            raise contract_error(
                "other",
                f"be a step by heads of {rows[0][0]} rows and {rows[0][1]} slots with this one's tables and caches",
                f"{rows[1][0]} rows and {rows[1][1]} slots",
                "make both with the same caches, num_slots, num_input_tokens and max_seq_len",
            )
        for mine_, theirs_ in zip(mine, theirs, strict=True):
            mine_.copy_(theirs_)
        self.batches, self.requests, self.plan = other.batches, other.requests, other.plan
        self.query_start_loc = other.query_start_loc
        self.token_indices, self.positions = other.token_indices, other.positions

    def _of(self, compress_ratio: int) -> Geometry | RankStep:
        if compress_ratio not in self._by_ratio:
            raise contract_error(
                "step",
                f"be made for layers of compress_ratio {compress_ratio}",
                f"ratios {sorted(self._by_ratio)}",
                "hand all layers of the model to step_metadata",
            )
        return self._by_ratio[compress_ratio]


def step_metadata(
    layers: Iterable[DSAttention],
    caches: Caches,
    new_tokens: Mapping[Any, int],
    *,
    num_input_tokens: int | None = None,
    decode_query_len: int = 1,
    num_slots: int | None = None,
    max_seq_len: int | None = None,
) -> StepMetadata:
    """The metadata of a step over requests of `Caches`, with room made for its tokens.

    Args:
        layers: all attention layers that will run the step, built alike.
        caches: Caches of these layers.
        new_tokens: for each request of the step, in the order of its rows, an int >= 0.
        num_input_tokens: int or None, rows of hidden states that an engine pads to, at least the new tokens.
        decode_query_len: int >= 1, tokens; a request with cached tokens and at most this many new ones decodes. A
            verify step has 1 and the number of drafts.
        num_slots, max_seq_len: fixed sizes for a captured graph (`Caches.batches`); the step then runs by heads.

    Returns:
        StepMetadata, the same step on every rank.

    Raises:
        ContractError: layers that were not built alike, a request, a count or a size that does not hold, or fixed sizes
            for a step that splits tokens.
    """
    layers = check_layers(layers)
    check_record("caches", caches, Caches)
    batches = caches.batches(new_tokens, num_slots=num_slots, max_seq_len=max_seq_len)
    by_layer = {layer.layer_idx: caches[layer.layer_idx].tensors for layer in layers}
    return metadata_of_batches(
        layers,
        by_layer,
        batches,
        num_input_tokens=num_input_tokens,
        decode_query_len=decode_query_len,
        fixed=num_slots is not None,
        requests=tuple(new_tokens),
        plan=caches.plan,
    )


def metadata_of_batches(
    layers: Iterable[DSAttention],
    caches: Mapping[int, LayerCache],
    batches: Mapping[int, LayerBatch],
    *,
    num_input_tokens: int | None = None,
    decode_query_len: int = 1,
    fixed: bool = False,
    requests: tuple[Hashable, ...] = (),
    plan: int | None = None,
) -> StepMetadata:
    """The metadata of a step over an engine's own block tables and state slots.

    Args:
        layers: all attention layers that will run the step, built alike.
        caches: LayerCache by layer index.
        batches: LayerBatch by compress ratio, on the host, the same lengths in each.
        num_input_tokens, decode_query_len: as `step_metadata`.
        fixed: bool, whether shapes must not depend on the lengths, for a captured graph.
        requests: names for error texts.
        plan: int or None, `Caches.plan` where `Caches.batches` made room.

    Returns:
        StepMetadata.

    Raises:
        ContractError: layers that were not built alike, batches that do not fit the caches, tables that do not lead to
            what the step reads, or fixed shapes for a step that splits tokens.
        UnsupportedError: a batch on a device.
    """
    layers = check_layers(layers)
    first = layers[0]
    by_ratio = {layer.compress_ratio: layer for layer in layers}
    for ratio in by_ratio:
        if ratio not in batches:
            raise contract_error("batches", f"hold compress_ratio {ratio}", sorted(batches), "one LayerBatch a ratio")
    batches = {ratio: batches[ratio] for ratio in sorted(by_ratio)}
    for layer in by_ratio.values():
        if layer.layer_idx not in caches:
            raise contract_error("caches", f"hold layer {layer.layer_idx}", sorted(caches), "one LayerCache a layer")
    tensors = {ratio: caches[layer.layer_idx] for ratio, layer in by_ratio.items()}
    for ratio, batch in batches.items():
        check_planned(batch, batches[min(batches)], by_ratio[ratio], tensors[ratio])
    # An engine may write its next step into the same tensors.
    batches = {ratio: with_tensors(batch, torch.clone) for ratio, batch in batches.items()}
    batch = next(iter(batches.values()))
    options, count = first.parallel.options, int(batch.query_start_loc[-1])
    num_rows = check_int("num_input_tokens", count if num_input_tokens is None else num_input_tokens, count)
    check_int("decode_query_len", decode_query_len, 1)
    splits = first.parallel.cp_active and uses_context_parallel(
        batch.query_start_loc, batch.seq_lens, mixed=options.dsa_cp_mixed, decode_query_len=decode_query_len
    )
    if splits and fixed:
        raise contract_error(
            "num_slots",
            "be None in a step that splits tokens",
            "fixed sizes",
            "a captured graph is for decode and verify steps; see decode_query_len",
        )
    shapes = {ratio: shapes_of(cache) for ratio, cache in tensors.items()}
    sizes = {ratio: Sizes(shape[0][1], shape[1][1]) for ratio, shape in shapes.items()}
    device = tensors[next(iter(tensors))].swa_cache.device
    if not splits:
        tokens = counted(num_rows, batch.seq_lens)
        geometries: dict[int, Geometry | RankStep] = {
            ratio: whole_geometry(
                with_tensors(batches[ratio], lambda tensor: tensor.to(device, copy=True)),  # `fill_` writes into it
                num_rows,
                sizes[ratio],
                layer.whole_kind,
                fixed=fixed,
            )
            for ratio, layer in by_ratio.items()
        }
        return StepMetadata(batches, requests, None, tokens, geometries, shapes, plan)
    modes = first.modes._replace(num_input_tokens=num_input_tokens)
    cp_size, cp_rank = first.parallel.cp_size, first.parallel.cp_rank
    partition = planned_partition(batch, cp_size, modes)
    rank_steps: dict[int, Geometry | RankStep] = {}
    for ratio, layer in by_ratio.items():
        ring_rows = tensors[ratio].cmp_state.kv.shape[1]
        shared = step_plan_over_ranks(batches[ratio], partition, modes, layer.split_kind, ring_rows)
        rank_steps[ratio] = rank_step(shared, modes, cp_rank, sizes[ratio], layer.split_kind, device)
    tokens = partition.token_indices[cp_rank] if modes.rows == "scattered" else counted(num_rows, batch.seq_lens)
    return StepMetadata(batches, requests, partition, tokens, rank_steps, shapes, plan)


def check_layers(layers: Iterable[DSAttention]) -> list[DSAttention]:
    """The layers, once all are found to have been built alike."""
    from dsacp_npu.module import DSAttention  # which imports this module

    return layers_alike(layers, DSAttention)


def layers_alike(layers: Iterable[Layer], kind: type[Layer]) -> list[Layer]:
    """The layers of one kind, once all are found to have been built alike."""
    found: list[Any] = list(layers) if isinstance(layers, Iterable) else []
    if not found:
        got = "none" if isinstance(layers, Iterable) else type(layers).__name__
        raise contract_error("layers", "hold at least one attention layer", got, "all layers that run the step")
    for layer in found:
        check_record("layers", layer, kind)
        for name in ("config", "parallel", "backend"):
            if getattr(layer, name) != getattr(found[0], name):
                got = f"two, in layer {layer.layer_idx} and layer {found[0].layer_idx}"
                raise contract_error("layers", f"share one {name}", got, "build all layers alike")
    return found


def check_planned(batch: LayerBatch, same: LayerBatch, layer: DSAttention, cache: LayerCache) -> None:
    """Refuse a batch that does not fit the caches of its ratio, or that leads nowhere."""
    check_record("batch", batch, LayerBatch)
    for name, tensor in batch._asdict().items():
        check_host(f"batch.{name}", tensor)
    check_batch(batch.query_start_loc, batch.seq_lens)
    for name in ("query_start_loc", "seq_lens"):
        if not torch.equal(getattr(batch, name), getattr(same, name)):
            hint = "all layers of a step run the same tokens"
            raise contract_error("batches", f"have the same {name} in every ratio", "several", hint)
    check_batch_tables(batch)
    check_batch_slots(batch, len(cache.cmp_state.num_tokens))
    positions = rows_of(counted(int(batch.query_start_loc[-1]), batch.seq_lens), batch).positions
    check_reads(positions, batch, cache, None, layer.compress_ratio, layer.config)


def shapes_of(cache: LayerCache) -> tuple[torch.Size, ...]:
    """Blocks and block sizes of raw keys and of entries, and the number of state slots."""
    return cache.swa_cache.shape[:2], cache.cmp_cache.shape[:2], cache.cmp_state.num_tokens.shape


def tensors_in(value: object) -> list[torch.Tensor]:
    """All tensors of a nest of records and mappings, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in tensors_in(part)]
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in tensors_in(part)]
    return []
