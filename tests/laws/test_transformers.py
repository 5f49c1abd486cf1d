"""Our layer against an implementation that nobody here wrote: transformers' deepseek_v4, float32, on the CPU.

Both are fed the same rows with the same chunk plan. The mutants show that the comparison sees each detail.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from dsacp_npu.commands import outside
from dsacp_ref.compressor import CompressorWeights
from dsacp_ref.indexer import IndexerWeights
from dsacp_ref.layer import LayerWeights, attention_layer
from tests import plain_layer
from tests.compare import assert_same_selection, scoring_noise
from tests.layer_strategies import (
    Kind,
    World,
    as_sets,
    frozen,
    oracle_config,
    oracle_weights,
    run,
    world_of,
)
from tests.mutants import MUTANTS
from tests.strategies import read_only

# float32 noise at an output scale of 4 to 7 is below 1e-5; the weakest wrong detail that we know of moves 2e-3.
NOISE = 2e-5
SIGNAL = 1e-4  # of the output's largest value
TOKENS = {"tiny": 700, "big": 520}
DTYPES = {"float32": np.float32, "float64": np.float64}


@cache
def model(size: str):
    return outside.build_model(outside.SIZES[size], seed=0)


def drawn_rows(size: str, seed: int = 3) -> np.ndarray:
    """A request in which no two scores tie where a choice ends."""
    return np.random.default_rng(seed).standard_normal((TOKENS[size], outside.SIZES[size].hidden_size), np.float32)


@cache
def theirs(size: str, layer_idx: int, plan: str) -> outside.BlockRun:
    """What transformers makes of one request."""
    chunks = outside.chunk_lengths(plan, TOKENS[size])
    return outside.block_output(model(size), layer_idx, drawn_rows(size), chunks)


def layer_weights(size: str, layer_idx: int, dtype: type) -> LayerWeights:
    """Its weights as ours."""
    named = {name: value.astype(dtype) for name, value in outside.layer_weights(model(size), layer_idx).items()}

    def pool(prefix: str) -> CompressorWeights:
        return CompressorWeights(*(named.pop(prefix + part) for part in ("wkv", "wgate", "ape", "norm")))

    index_pool = pool("idx_cmp_") if "idx_cmp_wkv" in named else None
    main_pool = pool("cmp_") if "cmp_wkv" in named else None
    indexer = IndexerWeights(named.pop("idx_wq_b"), named.pop("idx_weights_proj"), index_pool) if index_pool else None
    return frozen(LayerWeights(**named, compressor=main_pool, indexer=indexer))


@cache
def ours(size: str, layer_idx: int, dtype: str) -> World:
    """The same layer with the same request, in a paged cache full of NaN."""
    config, rows = outside.SIZES[size], drawn_rows(size)
    ratio = config.compress_ratio(layer_idx)
    return world_of(
        np.random.default_rng(2),
        [len(rows)],
        config=config,
        kind=Kind(ratio, ratio == 4, ratio == 4),
        dtype=DTYPES[dtype],
        swa_block=32,
        cmp_block=16,
        weights=layer_weights(size, layer_idx, DTYPES[dtype]),
        x=[read_only(rows.astype(DTYPES[dtype]))],
    )


def given_selection(world: World, selections: np.ndarray):
    """A step that attends to the rows' entries of another's choice."""
    done = 0

    def forward(x, batch, cache):
        nonlocal done
        given, done = selections[done : done + len(x)], done + len(x)
        out = attention_layer(
            x, world.weights, cache, batch, world.config, compress_ratio=world.kind.ratio, given_topk=given
        )
        return out.output, out.topk_indices, frozen(out.cache)

    return forward


def assert_near_ties(world: World, mine: np.ndarray, their: np.ndarray) -> None:
    """Where the choices differ, float64 cannot tell the entries apart."""
    rows, weights = world.x[0], oracle_weights(world.weights)
    constants = oracle_config(world.config, world.kind.ratio)
    exact = plain_layer.index_scores(rows.astype(np.float64), weights, constants)
    low_weights = {name: value.astype(np.float32) for name, value in weights.items()}
    low = plain_layer.index_scores(rows.astype(np.float32), low_weights, constants)
    for p in range(len(rows)):
        exact[p, (p + 1) // world.kind.ratio :] = -np.inf
    assert_same_selection(mine, their, exact, scoring_noise(exact, low))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plan", outside.CHUNK_PLANS)
@pytest.mark.parametrize("layer_idx", [0, 1, 2], ids=["window", "ratio4", "ratio128"])
@pytest.mark.parametrize("size", ["tiny", pytest.param("big", marks=pytest.mark.slow)])
def test_transformers_agrees(size: str, layer_idx: int, plan: str, dtype: str) -> None:
    world, their = ours(size, layer_idx, dtype), theirs(size, layer_idx, plan)
    steps = [[length] for length in outside.chunk_lengths(plan, TOKENS[size])]
    got = run(world, steps)
    if world.kind.indexer and as_sets(got.topk[0]) != as_sets(their.selections):
        assert_near_ties(world, got.topk[0], their.selections)
        got = run(world, steps, given_selection(world, their.selections))
    error = float(np.abs(got.outputs[0] - their.outputs).max())
    assert error < NOISE, f"largest error {error:.2g} at an output scale of {np.abs(their.outputs).max():.2g}"


def test_a_tie_is_theirs_to_break() -> None:
    """Row 576 of this request: relu leaves the fifth and the sixth score at 0. Given their choice, outputs agree."""
    rows = drawn_rows("tiny", seed=1)
    their = outside.block_output(model("tiny"), 1, rows)
    world = ours("tiny", 1, "float64")._replace(x=[read_only(rows.astype(np.float64))])
    steps = [[len(rows)]]
    mine = run(world, steps)
    differ = [
        p for p, (a, b) in enumerate(zip(as_sets(mine.topk[0]), as_sets(their.selections), strict=True)) if a != b
    ]
    assert differ == [576]
    assert_near_ties(world, mine.topk[0], their.selections)
    assert np.abs(mine.outputs[0] - their.outputs).max() > 1e-2
    given = run(world, steps, given_selection(world, their.selections))
    assert np.abs(given.outputs[0] - their.outputs).max() < NOISE

    wrong = their.selections.copy()
    wrong[-1, -1] = next(entry for entry in range(len(rows) // 4) if entry not in wrong[-1])
    with pytest.raises(AssertionError, match="noise"):
        assert_near_ties(world, wrong, their.selections)


# --- each detail broken ---

CASES = [
    pytest.param(name, layer_idx, id=f"{name} at ratio {ratio}")
    for name, (_, known) in MUTANTS.items()
    for layer_idx, ratio in enumerate((1, 4, 128))
    if ratio in known
]


def moved(layer_idx: int) -> float:
    """Largest error over the output's largest value."""
    world, their = ours("tiny", layer_idx, "float64"), theirs("tiny", layer_idx, "one_shot").outputs
    mine = run(world, [world.lengths]).outputs[0]
    return float(np.abs(mine - their).max() / np.abs(their).max())


@pytest.mark.parametrize("layer_idx", [0, 1, 2])
def test_nothing_broken_moves_nothing(layer_idx: int) -> None:
    assert moved(layer_idx) < SIGNAL / 50


@pytest.mark.parametrize(("name", "layer_idx"), CASES)
def test_a_broken_detail_is_seen(name: str, layer_idx: int, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it, known = MUTANTS[name]
    config = outside.SIZES["tiny"]
    ratio = config.compress_ratio(layer_idx)
    break_it(monkeypatch, config, ratio)
    error = moved(layer_idx)
    assert error > SIGNAL, f"{name}: moves {error:.2g} here, {known[ratio]:.2g} at the released head sizes"
