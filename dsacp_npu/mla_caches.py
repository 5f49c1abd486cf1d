"""What V3.2's attention keeps between steps: one paged cache a layer, and one book of requests for all layers.

As `dsacp_npu.caches`, with less to keep: every token's latent, rope key and index key stay, and there is no state
between them. So a request can be taken back to any length, and a prefix of any length be held in common.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from dsacp_npu._cache_book import Blocks, Progress, blocks_for
from dsacp_npu._geometry import with_tensors
from dsacp_npu._mla_parts import cache_parts
from dsacp_npu._mla_records import MLABatch, MLACache
from dsacp_npu._request_book import RAW, LayerPages, RequestBook
from dsacp_npu._tensors import torch
from dsacp_npu.caches import DTYPES, checked_layers, num_bytes
from dsacp_npu.mla_layer import empty_mla_cache
from dsacp_ref.mla_config import MLAConfig
from dsacp_ref.spec import INT32_MAX, check_bool, check_choice, check_int, check_record

__all__ = ["MLACaches", "PagedMLACache", "PlannedBatch"]


class PlannedBatch(NamedTuple):
    """A step that `MLACaches` has made room for.

    Fields:
        batch: MLABatch, on the host.
        requests: its requests, in order.
        progress: for each of them the slot, and the tokens that it has before and after.
        plan: int, the number of the plan.
    """

    batch: MLABatch
    requests: tuple[Hashable, ...]
    progress: tuple[Progress, ...]
    plan: int


class PagedMLACache(LayerPages):
    """What one layer keeps, and how far each request came in it.

    Fields:
        layer_idx: which layer.
        tensors: the MLACache that the layer writes into; its tensors stay where they are.
        lengths: tokens that the layer holds of the request in each slot. On the host.
        plan: the number of the last plan over these caches.
    """

    planner = "MLACaches.planned"

    def __init__(self, layer_idx: int, tensors: MLACache, num_slots: int) -> None:
        super().__init__(layer_idx, num_slots)
        self.tensors = tensors

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(num_bytes(part) for part in self.parts())

    def parts(self) -> list[torch.Tensor]:
        """The tensors, all by block."""
        return cache_parts(self.tensors)

    def copy_block(self, kind: int, source: int, target: int) -> None:
        """Copy a block of every part."""
        for part in self.parts():
            part[target] = part[source]


class MLACaches(RequestBook[PagedMLACache]):
    """The caches of some layers, and the book of the requests that they hold.

    Args:
        config: MLAConfig.
        layers: the layers' indices, distinct. All of them run in every step.
        num_tokens: int >= 1, tokens that all requests together may hold; also the longest request.
        max_requests: int >= 1, open requests.
        block_size: int >= 1, tokens per block.
        dtype: ``"bfloat16"``, ``"float16"``, ``"float32"`` or ``"float64"``, of the layers' rows.
        device: where the tensors lie, as torch names it.
        fp8: bool; latents as `encoded_latents` writes them, index keys as FP8Vectors.
        int8_index_cache: bool; index keys as QuantizedVectors.

    Raises:
        ContractError: a value does not hold.

    >>> from dsacp_ref.mla_config import v32
    >>> caches = MLACaches(v32(), [0, 1], num_tokens=512, max_requests=2)
    >>> caches.open("a")
    >>> planned = caches.planned({"a": 200})
    >>> planned.batch.seq_lens.tolist(), planned.batch.block_table.tolist(), len(caches)
    ([200], [[0, 1, 2, 3]], 2)
    """

    def __init__(
        self,
        config: MLAConfig,
        layers: Sequence[int],
        *,
        num_tokens: int,
        max_requests: int,
        block_size: int = 64,
        dtype: str = "bfloat16",
        device: str | torch.device = "cpu",
        fp8: bool = False,
        int8_index_cache: bool = False,
    ) -> None:
        check_record("config", config, MLAConfig)
        indices = checked_layers(layers)
        num_tokens = check_int("num_tokens", num_tokens, 1, INT32_MAX)
        max_requests = check_int("max_requests", max_requests, 1)
        block_size = check_int("block_size", block_size, 1)
        check_choice("dtype", dtype, DTYPES)
        codes = {"fp8": check_bool("fp8", fp8), "int8_index_cache": check_bool("int8_index_cache", int8_index_cache)}
        wide = "float64" if dtype == "float64" else "float32"
        blocks = Blocks(
            "keys",
            blocks_for(num_tokens, max_requests, block_size=block_size, compress_ratio=1),
            block_size=block_size,
            compress_ratio=1,
            num_slots=max_requests,
            num_tokens=num_tokens,
        )
        like = empty_mla_cache(config, num_blocks=0, block_size=block_size, dtype=wide, **codes)
        place: Any = {"device": torch.device(device)}

        def part(empty: torch.Tensor) -> torch.Tensor:
            """Zeros for all blocks: rows in the layers' dtype, codes and scales in their own."""
            kind = getattr(torch, dtype) if empty.dtype == rows and not fp8 else empty.dtype
            return torch.zeros(len(blocks.num_holders), *empty.shape[1:], dtype=kind, **place)

        rows = getattr(torch, wide)
        caches = {index: PagedMLACache(index, with_tensors(like, part), max_requests) for index in indices}
        super().__init__(num_tokens, max_requests, {RAW: blocks}, caches)

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds, by field of MLACache: the same on all ranks, so each holds all of them.

        Returns:
            dict.
        """
        parts = dict.fromkeys(MLACache._fields, 0)
        for cache in self:
            for name, part in cache.tensors._asdict().items():
                parts[name] += 0 if part is None else num_bytes(part)
        return parts

    def planned(self, new_tokens: Mapping[Any, int]) -> PlannedBatch:
        """Room for a step, and where its tokens and those before them lie.

        What an earlier call made room for is given up unless its tokens were run.

        Args:
            new_tokens: for each request of the step, in the order of its rows, an int >= 0.

        Returns:
            PlannedBatch.

        Raises:
            ContractError: a request that is not open or whose layers do not agree, a count that does not hold, or no
                room. Nothing was changed then.
        """
        steps = self._planned(new_tokens, None, None)
        batch = MLABatch(steps.query_start_loc, steps.seq_lens, steps.tables[RAW])
        return PlannedBatch(batch, tuple(new_tokens), tuple(steps.steps), self.plan)
