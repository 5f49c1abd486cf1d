"""The rows that ranks fetch from each other before they pool: enough, and no more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from dsacp_ref import layer as layer_module
from dsacp_ref.partition import partition_tokens
from tests.layer_checks import assert_ranks_equal_one_device
from tests.layer_strategies import (
    CSA,
    EVERY_KIND,
    HCA,
    POOLING_SPLITS,
    SMALL,
    WINDOW,
    Cut,
    Kind,
    World,
    world_of,
    worlds_over_ranks,
)
from tests.maths_strategies import int32
from tests.strategies import fewer


@pytest.mark.parametrize("kind", EVERY_KIND, ids=str)
@pytest.mark.parametrize("split", POOLING_SPLITS)
def test_what_a_rank_does_not_know_is_never_read(kind: Kind, split: str) -> None:
    """Every row outside a rank's own and its halo is NaN there, and no result is."""
    config = replace(SMALL, num_heads=6, o_groups=3)
    world = world_of(np.random.default_rng(12), [45, 9, 30], kind=kind, config=config)
    unknown = []
    right = layer_module.known_keys

    def watched(*args):
        known = right(*args)
        unknown.extend(int(np.isnan(keys.kv).any(axis=1).sum()) for keys, _ in known)
        return known

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_module, "known_keys", watched)
        assert_ranks_equal_one_device(world, [[40, 5, 3], [5, 4, 27]], Cut(3, split, key_mode="gather_compressed"))
    assert max(unknown) > 20


HALO_CASES = {
    "window": (WINDOW, "window_starts"),
    "window beside entries": (HCA, "window_starts"),
    "overlap": (CSA, "pool_row_starts"),
    "no overlap": (HCA, "pool_row_starts"),
}


@pytest.mark.parametrize("case", HALO_CASES)
def test_a_halo_one_row_short_is_seen(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks meet inside a window, whose rows the entry's owner must fetch."""
    kind, name = HALO_CASES[case]
    config = replace(SMALL, window_size=2 if name == "pool_row_starts" else 9)
    world = world_of(np.random.default_rng(13), [27], kind=kind, config=config)
    cut = Cut(2, key_mode="gather_compressed")
    assert_ranks_equal_one_device(world, [[27]], cut)
    right = getattr(layer_module, name)

    def one_short(positions, *args, **options):
        return np.minimum(right(positions, *args, **options) + np.int32(1), positions)

    monkeypatch.setattr(layer_module, name, one_short)
    with pytest.raises(AssertionError):
        assert_ranks_equal_one_device(world, [[27]], cut)


@pytest.mark.parametrize("kind", EVERY_KIND, ids=str)
def test_a_carried_window_one_row_short_is_seen_in_the_next_step(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 owns none of the last rows of the chunk, and the first of the next one."""
    config = replace(SMALL, window_size=20)
    world = world_of(np.random.default_rng(14), [64], kind=kind, config=config)
    cut, steps = Cut(2, key_mode="gather_compressed"), [[60], [4]]
    assert_ranks_equal_one_device(world, steps, cut)
    right = layer_module.window_tokens

    def one_short(place, batch, *args):
        halo = right(place, batch, *args)
        return halo[halo != int(batch.query_start_loc[-1]) - (config.window_size - 1)]

    monkeypatch.setattr(layer_module, "window_tokens", one_short)
    with pytest.raises(AssertionError):
        assert_ranks_equal_one_device(world, steps, cut)


@given(worlds_over_ranks(max_steps=2))
@fewer(2)
def test_a_rank_asks_for_what_it_reads_and_hands_on_and_no_more(
    cases: list[tuple[World, list[list[int]], Cut]],
) -> None:
    """Token by token: windows of own queries, rows of own entries, what the next step goes on from; new rows only."""
    for world, steps, cut in cases:
        done = [sum(new[request] for new in steps[:-1]) for request in range(len(world.x))]
        _, batch = world.step(done, world.lengths, idle=(2,))
        compressor, window = world.weights.compressor, world.config.window_size
        ratio, pooled_rows = world.kind.ratio, (2 if world.kind.overlap else 1) * world.kind.ratio
        ring = pooled_rows + 3 if compressor else 3
        first = batch.query_start_loc.tolist()
        where = [(b, done[b] + j) for b in range(len(done)) for j in range(steps[-1][b])] + [None, None]
        for tokens in partition_tokens(batch.query_start_loc, cut.cp_size, split=cut.split).token_indices:
            seen, pooled = set(), set()
            for b, p in (where[token] for token in tokens.tolist() if token >= 0 and where[token]):
                seen |= {(b, q) for q in range(p - window + 1, p + 1)}
                if compressor and (p + 1) % ratio == 0:
                    pooled |= {(b, q) for q in range(p + 1 - pooled_rows, p + 1)}
            for b, length in enumerate(world.lengths):
                seen |= {(b, q) for q in range(length - (window - 1 + 3), length)}
                pooled |= {(b, q) for q in range(length - ring, length) if compressor}
            place = layer_module.rows_of(tokens, batch)
            for wanted, halo in (
                (seen, layer_module.window_tokens(place, batch, compressor, window, ring)),
                (pooled, layer_module.pooled_tokens(place, batch, compressor, ring)),
            ):
                new = {first[b] + q - done[b] for b, q in wanted if done[b] <= q < world.lengths[b]}
                assert halo.tolist() == sorted(new - set(tokens.tolist()))


def halos(kind: Kind, num_tokens: int, ring_rows: int, *, pooled: bool) -> list[tuple[int, int]]:
    """(rows before the own ones, rows after them) that each of four ranks of a contiguous split asks for."""
    loc = int32([0, num_tokens])
    world = world_of(np.random.default_rng(15), [1], kind=kind)
    batch = world.step([0], [1])[1]._replace(query_start_loc=loc, seq_lens=int32([num_tokens]))
    counts = []
    for tokens in partition_tokens(loc, 4).token_indices:
        place, compressor = layer_module.rows_of(tokens, batch), world.weights.compressor
        if pooled:
            halo = layer_module.pooled_tokens(place, batch, compressor, ring_rows)
        else:
            halo = layer_module.window_tokens(place, batch, compressor, 128, ring_rows)
        first, last = tokens[0], tokens.max()
        before, after = halo[halo < first], halo[halo > last]
        assert before.tolist() == list(range(first - len(before), first))
        assert after.tolist() == list(range(num_tokens - len(after), num_tokens))
        assert len(before) + len(after) == len(halo)
        counts.append((len(before), len(after)))
    return counts


def test_the_halo_at_the_released_sizes() -> None:
    """127 window rows; for pooling 7 rows at ratio 4 and 127 at ratio 128; and what the next step goes on from."""
    four, many = Kind(4, True, True), Kind(128, False, False)
    for kind, ring in ((WINDOW, 0), (four, 8), (many, 128)):
        assert halos(kind, 4096, ring, pooled=False) == [(0, 127), (127, 127), (127, 127), (127, 0)]
    # The first entry that a rank closes reaches back to the rank before: into one more window at ratio 4.
    assert halos(four, 4096, 8, pooled=True) == [(0, 8), (4, 8), (4, 8), (4, 0)]
    assert halos(many, 4096, 128, pooled=True) == [(0, 128), (0, 128), (0, 128), (0, 0)]
    # Ranks start at 1023, 2046 and 3069.
    assert [before for before, _ in halos(four, 4090, 8, pooled=True)] == [0, 7, 6, 5]
    assert [before for before, _ in halos(many, 4090, 128, pooled=True)] == [0, 127, 126, 125]
    assert halos(WINDOW, 4096, 0, pooled=True) == [(0, 0)] * 4
    # Six spare ring rows: so many tokens may be taken back, with their windows.
    assert [after for _, after in halos(four, 4096, 8 + 6, pooled=False)] == [133, 133, 133, 0]
    assert [after for _, after in halos(four, 4096, 8 + 6, pooled=True)] == [14, 14, 14, 0]
    assert [after for _, after in halos(WINDOW, 4096, 6, pooled=False)] == [133, 133, 133, 0]
