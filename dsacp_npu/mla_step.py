"""What the V3.2 layers of a model need to know of one forward: made once, read by each.

As `dsacp_npu.step`. Whether a step is split is `dsacp_ref.prefill.step_split`'s to say; one that is not runs whole on
every rank, because every rank has all weights and all keys.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dsacp_npu._cache_book import Progress
from dsacp_npu._geometry import with_tensors
from dsacp_npu._mla_parts import MLAGeometry, MLARankStep, mla_rank_step, whole_mla_geometry
from dsacp_npu._mla_records import MLABatch, MLACache
from dsacp_npu._tensors import Int32, check_host, check_tensor, torch
from dsacp_npu.extents import check_batch
from dsacp_npu.mla import mla_frequencies
from dsacp_npu.mla_caches import MLACaches
from dsacp_npu.mla_layer import check_mla_reads
from dsacp_npu.partition import Partition, counted, partition_tokens
from dsacp_npu.step import RowLayout, layers_alike
from dsacp_ref.prefill import step_split
from dsacp_ref.spec import check_int, check_record, contract_error

if TYPE_CHECKING:
    from dsacp_npu.mla_module import MLAttention

__all__ = ["MLAStep", "mla_metadata_of_batch", "mla_step_metadata"]


class MLAStep(RowLayout):
    """What V3.2 layers need to know of one forward.

    Fields:
        batch: MLABatch, on the host, global.
        progress: for each request the slot, and its tokens before and after; empty where an engine keeps its own.
        (others): as `RowLayout`; a step that does not split tokens runs whole on every rank.
    """

    batch: MLABatch
    progress: tuple[Progress, ...]

    def __init__(
        self,
        batch: MLABatch,
        requests: tuple[Hashable, ...],
        progress: tuple[Progress, ...],
        partition: Partition | None,
        token_indices: Int32,
        geometry: MLAGeometry | MLARankStep,
        blocks: torch.Size,
        plan: int | None,
    ) -> None:
        """Made by `mla_step_metadata` and `mla_metadata_of_batch`."""
        super().__init__(batch.query_start_loc, batch.seq_lens, requests, partition, token_indices, plan)
        self.batch, self.progress = batch, progress
        self._geometry, self._blocks = geometry, blocks

    def geometry(self) -> MLAGeometry:
        """Where the rows lie in a step that runs whole."""
        assert isinstance(self._geometry, MLAGeometry)  # callers look at `splits`
        return self._geometry

    def rank_step(self) -> MLARankStep:
        """This rank's part in a step that splits tokens."""
        assert isinstance(self._geometry, MLARankStep)  # callers look at `splits`
        return self._geometry

    def check_cache(self, cache: MLACache) -> None:
        """Refuse a cache of other blocks than the step was made for: its slots would lead elsewhere.

        Args:
            cache: MLACache.

        Raises:
            ContractError: other sizes.
        """
        if cache.latent_cache.shape[:2] != self._blocks:
            wanted, got = tuple(self._blocks), tuple(cache.latent_cache.shape[:2])
            hint = "make the step with the caches that it will run on"
            raise contract_error("cache", f"have blocks {wanted}, as the step's", got, hint)


def mla_step_metadata(
    layers: Iterable[MLAttention],
    caches: MLACaches,
    new_tokens: Mapping[Any, int],
    *,
    num_input_tokens: int | None = None,
    decode_query_len: int = 1,
) -> MLAStep:
    """The metadata of a step over requests of `MLACaches`, with room made for its tokens.

    Args:
        layers: all attention layers that will run the step, built alike.
        caches: MLACaches of these layers.
        new_tokens: for each request of the step, in the order of its rows, an int >= 0.
        num_input_tokens: int or None, rows of hidden states that an engine pads to, at least the new tokens.
        decode_query_len: int >= 1, tokens; a request with cached tokens and at most this many new ones decodes.

    Returns:
        MLAStep, the same step on every rank.

    Raises:
        ContractError: layers that were not built alike, a request or a count that does not hold.
        UnsupportedError: a cache that the options' profile excludes.
    """
    layers = check_mla_layers(layers)
    check_record("caches", caches, MLACaches)
    planned = caches.planned(new_tokens)
    return mla_metadata_of_batch(
        layers,
        {layer.layer_idx: caches[layer.layer_idx].tensors for layer in layers},
        planned.batch,
        num_input_tokens=num_input_tokens,
        decode_query_len=decode_query_len,
        requests=planned.requests,
        progress=planned.progress,
        plan=planned.plan,
    )


def mla_metadata_of_batch(
    layers: Iterable[MLAttention],
    caches: Mapping[int, MLACache],
    batch: MLABatch,
    *,
    num_input_tokens: int | None = None,
    decode_query_len: int = 1,
    requests: tuple[Hashable, ...] = (),
    progress: tuple[Progress, ...] = (),
    plan: int | None = None,
) -> MLAStep:
    """The metadata of a step over an engine's own block table.

    Args:
        layers: all attention layers that will run the step, built alike.
        caches: MLACache by layer index, of equal blocks.
        batch: MLABatch, on the host.
        num_input_tokens, decode_query_len: as `mla_step_metadata`.
        requests: names for error texts.
        progress, plan: of `MLACaches.planned`, where it made room.

    Returns:
        MLAStep.

    Raises:
        ContractError: layers that were not built alike, or a table that does not lead to what the step reads.
        UnsupportedError: a batch on a device, or a cache that the options' profile excludes.
    """
    layers = check_mla_layers(layers)
    first = layers[0]
    for layer in layers:
        if layer.layer_idx not in caches:
            raise contract_error("caches", f"hold layer {layer.layer_idx}", sorted(caches), "one MLACache a layer")
    cache = caches[first.layer_idx]
    check_record("cache", cache, MLACache)
    check_planned(batch, cache)
    # The first prefill mode kept bfloat16 keys alone; who asks for its profile is held to it.
    kept = "float8_e4m3fn" if cache.rope_cache is None else str(cache.rope_cache.dtype).removeprefix("torch.")
    first.parallel.options.check_settings({"kv_cache_dtype": kept})
    batch = with_tensors(batch, torch.clone)  # an engine may write its next step into the same tensors
    count = int(batch.query_start_loc[-1])
    num_rows = check_int("num_input_tokens", count if num_input_tokens is None else num_input_tokens, count)
    check_int("decode_query_len", decode_query_len, 1)
    query_lens = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
    split = None
    if first.parallel.cp_active:
        split = step_split(
            query_lens.tolist(),
            (batch.seq_lens - query_lens).tolist(),
            first.parallel.cp_size,
            first.parallel.options,
            decode_query_len=decode_query_len,
        )
    blocks, device = cache.latent_cache.shape[:2], cache.latent_cache.device
    frequencies = mla_frequencies(first.config)
    where = (requests, progress)
    if split is None:
        tokens = counted(num_rows, batch.seq_lens)
        there = with_tensors(batch, lambda tensor: tensor.to(device))
        geometry = whole_mla_geometry(there, num_rows, blocks[1], frequencies)
        return MLAStep(batch, *where, None, tokens, geometry, blocks, plan)
    cp_rank = first.parallel.cp_rank
    partition = partition_tokens(
        batch.query_start_loc, first.parallel.cp_size, split=split, num_input_tokens=num_input_tokens
    )
    step = mla_rank_step(batch, partition, cp_rank, split, num_input_tokens, blocks[1], frequencies, device)
    scattered = first.parallel.options.dsa_cp_rows == "scattered"
    tokens = partition.token_indices[cp_rank] if scattered else counted(num_rows, batch.seq_lens)
    return MLAStep(batch, *where, partition, tokens, step, blocks, plan)


def check_mla_layers(layers: Iterable[MLAttention]) -> list[MLAttention]:
    """The layers, once all are found to have been built alike."""
    from dsacp_npu.mla_module import MLAttention  # which imports this module

    return layers_alike(layers, MLAttention)


def check_planned(batch: MLABatch, cache: MLACache) -> None:
    """Refuse a batch that leads nowhere in the caches."""
    check_record("batch", batch, MLABatch)
    for name, tensor in batch._asdict().items():
        check_host(f"batch.{name}", tensor)
    check_batch(batch.query_start_loc, batch.seq_lens)
    shape = (len(batch.seq_lens), "max_blocks")
    check_tensor("batch.block_table", batch.block_table, ("int32",), shape, "one row a request")
    check_mla_reads(int(batch.query_start_loc[-1]), batch, cache, None)
