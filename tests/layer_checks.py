"""What the laws of the layer compare: runs, caches, ranks against one device."""

from __future__ import annotations

import numpy as np

from dsacp_ref.layer import LayerCache
from tests.compare import assert_double, assert_same
from tests.layer_strategies import Cut, Run, World, cached_rows, over_ranks, run


def whole(world: World) -> list[list[int]]:
    """Everything in one step."""
    return [world.lengths]


def assert_close_runs(actual: Run, expected: Run) -> None:
    """Outputs to float64 rounding, selections exactly."""
    for request, (mine, due) in enumerate(zip(actual.outputs, expected.outputs, strict=True)):
        assert_double(mine, due, f"request {request}")
    assert_same(actual.topk, expected.topk)


def arrays_of(cache: LayerCache) -> list[np.ndarray]:
    """Every array of a cache."""
    return [*cache[:3], *cache.cmp_state, *cache.index_state]


def assert_ranks_equal_one_device(world: World, steps: list[list[int]], cut: Cut, idle: tuple[int, ...] = ()) -> None:
    due = run(world, steps, idle=idle)
    got = run(world, steps, over_ranks(world, cut), idle=idle)
    for request, rows in enumerate(due.outputs):
        assert_double(got.outputs[request], rows, f"request {request}")
    assert_same(got.topk, due.topk)
    caches = [world.cache] * cut.cp_size if got.cache is world.cache else got.cache
    for rank, cache in enumerate(caches):
        assert_same_cache(world, cut, cache, due.cache, f"rank {rank}")


def assert_same_cache(world: World, cut: Cut, cache: LayerCache, due: LayerCache, name: str) -> None:
    """Entries, index keys and state as on one device, and nothing else written."""
    for part in ("cmp_cache", "index_cache"):
        assert_double(getattr(cache, part), getattr(due, part), f"{name} {part}")
    for part in ("cmp_state", "index_state"):
        mine, theirs = getattr(cache, part), getattr(due, part)
        assert_same(mine.num_tokens, theirs.num_tokens, f"{name} {part}")
        assert_same(mine.held_start, theirs.held_start, f"{name} {part}")
        assert_double(mine.kv, theirs.kv, f"{name} {part}.kv")
        assert_double(mine.score, theirs.score, f"{name} {part}.score")
    if cut.key_mode != "gather_compressed":
        assert_double(cache.swa_cache, due.swa_cache, f"{name} swa_cache")
        return
    for request, length in enumerate(world.lengths):
        first = max(0, length - world.config.window_size + 1)
        table = world.swa_table[request]
        mine, theirs = (cached_rows(each.swa_cache, table, first, length) for each in (cache, due))
        assert_double(mine, theirs, f"{name} window of request {request}")
    known = np.isfinite(cache.swa_cache)
    assert_double(np.where(known, cache.swa_cache, 0), np.where(known, due.swa_cache, 0), f"{name} known raw keys")
