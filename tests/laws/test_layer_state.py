"""What a layer carries from step to step: hit by another request, reused, missing, taken back; and what caches hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsacp_ref.compressor import CompressorState
from dsacp_ref.layer import empty_cache
from dsacp_ref.spec import ContractError
from tests.compare import assert_double, assert_same
from tests.layer_checks import arrays_of, whole
from tests.layer_strategies import (
    CSA,
    EVERY_KIND,
    SMALL,
    Kind,
    World,
    cached_rows,
    frozen,
    rolled_back,
    run,
    world_of,
    worlds,
)
from tests.maths_strategies import seeds
from tests.strategies import fewer, read_only


@given(st.sampled_from(EVERY_KIND), st.integers(1, 20), st.integers(0, 6), st.integers(1, 9), seeds)
@fewer(2)
def test_a_prefix_hit_goes_on_from_a_snapshot(kind: Kind, prefix: int, rest: int, own: int, seed: int) -> None:
    """Full blocks are shared, the open one and the state are copied when the first request passes the prefix."""
    rng = np.random.default_rng(seed)
    world = world_of(rng, [prefix + rest, prefix + own], kind=kind)
    first, second = (rows.copy() for rows in world.x)
    second[:prefix] = first[:prefix]
    world = world._replace(x=frozen([first, second]))
    alone = run(world, [[0, prefix + own]])

    at_prefix = run(world, [[prefix, 0]])
    cache = run(world, [[rest, 0]], starts=[prefix, 0], cache=at_prefix.cache).cache
    tables = {}
    for name, part, rows in (("swa_table", "swa_cache", prefix), ("cmp_table", "cmp_cache", prefix // kind.ratio)):
        size = getattr(cache, part).shape[1]
        table = getattr(world, name).copy()
        if name == "swa_table" or kind.ratio > 1:
            shared, taken = divmod(rows, size)
            if taken:
                names = [part, "index_cache"] if kind.indexer and name == "cmp_table" else [part]
                for copied in names:
                    blocks = getattr(cache, copied).copy()
                    blocks[table[1, shared]] = getattr(at_prefix.cache, copied)[table[0, shared]]
                    cache = cache._replace(**{copied: blocks})
            table[1, :shared] = table[0, :shared]
        tables[name] = read_only(table)
    cache = frozen(
        cache._replace(
            cmp_state=with_slot(cache.cmp_state, at_prefix.cache.cmp_state, world.state_slots),
            index_state=with_slot(cache.index_state, at_prefix.cache.index_state, world.state_slots),
        )
    )
    hit = run(world._replace(**tables), [[0, own]], starts=[prefix + rest, prefix], cache=cache)
    assert_double(hit.outputs[1], alone.outputs[1][prefix:])
    assert_same(hit.topk[1], alone.topk[1][prefix:])


def with_slot(state: CompressorState, snapshot: CompressorState, slots: np.ndarray) -> CompressorState:
    """The second request's slot filled from the first one's in a snapshot."""
    parts = []
    for part, old in zip(state, snapshot, strict=True):
        new = part.copy()
        new[slots[1]] = old[slots[0]]
        parts.append(new)
    return CompressorState(*parts)


@given(st.sampled_from(EVERY_KIND), st.integers(1, 20), st.integers(1, 20), seeds)
@fewer(3)
def test_a_reused_slot_is_as_good_as_new(kind: Kind, old: int, new: int, seed: int) -> None:
    """The next request takes over blocks, tables and state slot of a finished one."""
    rng = np.random.default_rng(seed)
    world = world_of(rng, [max(old, new)], kind=kind)
    finished = run(world._replace(x=[world.x[0][:old]]), [[old]])
    following = world._replace(x=[read_only(rng.standard_normal((new, SMALL.hidden_size)))])
    fresh, reused = run(following, [[new]]), run(following, [[new]], cache=finished.cache)
    assert_same(reused.outputs, fresh.outputs)
    assert_same(reused.topk, fresh.topk)


@given(st.sampled_from([kind for kind in EVERY_KIND if kind.ratio > 1]), st.integers(1, 20), st.integers(0, 19), seeds)
@fewer(3)
def test_missing_state_is_refused(kind: Kind, start: int, held: int, seed: int) -> None:
    """Zeros would pass for tokens. A slot that never saw the prefix, or saw another number of tokens, is an error."""
    held = held if held != start else 0
    world = world_of(np.random.default_rng(seed), [max(start, held) + 2], kind=kind)
    cache = run(world, [[held]]).cache
    before = [part.tobytes() for part in arrays_of(cache)]
    first = start // kind.ratio * kind.ratio
    first = max(first - kind.ratio, 0) if kind.overlap else first
    with pytest.raises(
        ContractError, match=rf"^state must hold rows {first} to {start} of request 0, got rows"
    ) as error:
        run(world, [[2]], starts=[start], cache=cache)
    assert str(error.value).endswith("; keep the state with the prefix, or restart the request at 0")
    assert [part.tobytes() for part in arrays_of(cache)] == before


@given(st.sampled_from(EVERY_KIND), st.integers(0, 20), st.integers(1, 6), st.data())
def test_rejected_tokens_were_never_there(kind: Kind, start: int, verified: int, data: st.DataObject) -> None:
    """Speculative tokens are verified in one step, some are rejected, the state is taken back, others follow."""
    accepted, rest = data.draw(st.integers(0, verified)), data.draw(st.integers(1, 9))
    rng = np.random.default_rng(data.draw(seeds))
    length = start + max(verified, accepted + rest)
    world = world_of(rng, [length, 3], kind=kind, spare_rows=verified)
    expected = run(world, [[length, 3]])

    draft = world.x[0].copy()
    draft[start + accepted :] = rng.standard_normal(draft[start + accepted :].shape)
    proposed = world._replace(x=[read_only(draft), world.x[1]])
    got = run(proposed, [[start, 3], [verified, 0]])
    assert_double(got.outputs[0][: start + accepted], expected.outputs[0][: start + accepted])
    keep = {int(world.state_slots[0]): start + accepted, int(world.state_slots[1]): 3}
    cache = rolled_back(got.cache, keep, kind)
    after = run(world, [[length - start - accepted, 0]], starts=[start + accepted, 3], cache=cache)
    assert_double(after.outputs[0], expected.outputs[0][start + accepted :])
    assert_same(after.topk[0], expected.topk[0][start + accepted :])


def test_a_ring_without_spare_rows_refuses_the_rollback() -> None:
    """9 tokens at ratio 4: taking back one opens the window 4..7 again, whose predecessor 0..3 is gone."""
    world = world_of(np.random.default_rng(5), [9], kind=CSA)
    cache = run(world, [[9]]).cache
    text = "state must still hold rows 0 to 7 of request"
    with pytest.raises(ContractError, match=f"^{text}"):
        rolled_back(cache, {int(world.state_slots[0]): 7}, CSA)
    rolled_back(cache, {int(world.state_slots[0]): 8}, CSA)


# --- what the cache holds ---


@given(worlds(kinds=EVERY_KIND))
@fewer(3)
def test_the_cache_holds_the_same_rows_however_they_came(case: tuple[World, list[list[int]]]) -> None:
    world, steps = case
    cut, at_once = run(world, steps).cache, run(world, whole(world)).cache
    for request, length in enumerate(world.lengths):
        tables = [(world.swa_table, "swa_cache", length)]
        if world.kind.ratio > 1:
            tables.append((world.cmp_table, "cmp_cache", length // world.kind.ratio))
        if world.kind.indexer:
            tables.append((world.cmp_table, "index_cache", length // world.kind.ratio))
        for table, part, count in tables:
            mine, due = (cached_rows(getattr(cache, part), table[request], 0, count) for cache in (cut, at_once))
            assert np.isfinite(due).all()
            assert_double(mine, due, f"{part} of request {request}")
    if world.kind.ratio > 1:
        slots = world.state_slots[: len(world.x)]
        assert cut.cmp_state.num_tokens[slots].tolist() == world.lengths
        assert cut.cmp_state.held_start.tolist() == at_once.cmp_state.held_start.tolist()


@pytest.mark.parametrize("kind", EVERY_KIND, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_empty_cache_fits_the_layer(kind: Kind, dtype: type) -> None:
    world = world_of(np.random.default_rng(9), [5], kind=kind, dtype=dtype)
    sizes = {"num_blocks": 7, "block_size": 3, "num_cmp_blocks": 5, "cmp_block_size": 2, "num_slots": 4}
    cache = empty_cache(world.weights, **sizes, spare_rows=6)
    rows = (2 if kind.overlap else 1) * kind.ratio + 6
    assert cache.swa_cache.shape == (7, 3, SMALL.head_dim)
    if kind.ratio > 1:
        assert cache.cmp_cache.shape == (5, 2, SMALL.head_dim)
        assert cache.cmp_state.kv.shape == (4, rows, (2 if kind.overlap else 1) * SMALL.head_dim)
    if kind.indexer:
        assert cache.index_cache.shape == (5, 2, SMALL.index_head_dim)
        assert cache.index_state.kv.shape == (4, rows, (2 if kind.overlap else 1) * SMALL.index_head_dim)
    assert len(cache.cmp_state.num_tokens) == len(cache.index_state.num_tokens) == 4
    assert {part.dtype for part in arrays_of(cache)} == {np.dtype(dtype), np.dtype(np.int32)}
    assert not any(part.any() for part in arrays_of(cache))
