"""What transformers' cache object holds for a swapped model: the name of a request, whose keys lie in our caches.

A `Cache` is a list of layers that it asks for everything. `adopt` fills an empty one with `RequestLayer`, so the object
that generate() made, or that a caller holds, stays the same and tells the true length.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NoReturn

from transformers.cache_utils import CacheLayerMixin, DynamicCache

from dsacp_npu._request_book import RequestBook
from dsacp_ref.spec import UnsupportedError, contract_error


@dataclass(frozen=True)
class Generated:
    """The name of a request that a cache object stands for."""

    number: int

    def __str__(self) -> str:
        return f"the sequence of cache object {self.number}"


class RequestLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One request in our caches, in the place of every layer of a cache object. It ends with the object."""

    supports_early_init = False

    def __init__(self, caches: RequestBook[Any], request: Generated) -> None:
        """Open the request."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.caches, self.request = caches, request
        caches.open(request)
        weakref.finalize(self, close_if_open, caches, request).atexit = False

    def get_seq_length(self) -> int:
        """Tokens that our caches hold."""
        return self.caches.num_computed_tokens(self.request)

    def get_max_length(self) -> int:
        """-1: no bound of its own, requests share the blocks."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """What a mask would have to cover; the swapped attention takes none."""
        return self.get_seq_length() + query_length, 0

    def reset(self) -> None:
        """Forget the tokens, keep the request."""
        self.caches.reset(self.request)

    def refused(self, *args: Any, **kwargs: Any) -> NoReturn:
        """What our caches cannot do for a cache object."""
        raise UnsupportedError(
            f"cache: {self.request} lies in dsacp's caches, which have no batch rows and no tensors of transformers' "
            "layout; no beam search, no cropping, no other model; use session.step and session.caches"
        )

    lazy_initialization = update = crop = reorder_cache = refused
    batch_repeat_interleave = batch_select_indices = offload = prefetch = refused


def close_if_open(caches: RequestBook[Any], request: Generated) -> None:
    """End a request, unless somebody has closed it by hand."""
    if request in caches.requests:
        caches.close(request)


def adopt(cache: Any, caches: RequestBook[Any], num_layers: int, number: int) -> RequestLayer:
    """Make an empty cache object stand for a new request.

    Raises:
        ContractError: no DynamicCache, or one that holds tokens already.
    """
    if type(cache) is not DynamicCache or cache.offloading:
        got = "an offloading one" if type(cache) is DynamicCache else type(cache).__name__
        hint = "leave cache_implementation out; the keys lie in dsacp's own paged caches"
        raise contract_error("cache", "be a plain DynamicCache", got, hint)
    if cache.get_seq_length():
        got = f"one with {cache.get_seq_length()} tokens"
        raise contract_error("cache", "be empty or of this session", got, "start with an empty cache after enable()")
    layer = RequestLayer(caches, Generated(number))
    cache.layers = [layer] * num_layers
    return layer


def request_layer(cache: Any, caches: RequestBook[Any]) -> RequestLayer | None:
    """The request that a cache object stands for in these caches; None when it stands for none yet."""
    layers = getattr(cache, "layers", None)
    if layers and isinstance(layers[0], RequestLayer) and layers[0].caches is caches:
        return layers[0]
    return None
