"""The module on the operators' call path, emulated: whole stories, metadata once a step, released blocks, two ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dsacp_npu import backend
from dsacp_npu.backend import Backend
from dsacp_npu.caches import Caches
from dsacp_npu.distributed import Ranks
from dsacp_npu.emulator import installed
from dsacp_npu.module import DSAttention
from dsacp_npu.parallel import Parallel, parallel_of
from dsacp_npu.quant import QuantizedVectors
from dsacp_npu.step import step_metadata
from dsacp_ref import layer as ref
from tests.cann.test_layer import KINDS, LEGAL
from tests.compare import assert_within_budget
from tests.distributed.pool import run
from tests.layer_strategies import weights_of
from tests.maths_strategies import int32
from tests.mirror.common import to_numpy
from tests.module.worlds import Model, Steps, layers_of

# Two layers of each ratio that the operators know.
CONFIG = replace(LEGAL, num_hidden_layers=6, compress_ratios=(1, 4, 128) * 2)
# A prefill beyond window and ratio 128, a chunk beside a second request, decode of both and of one.
STEPS: Steps = [{"a": 130}, {"b": 9, "a": 5}, {"a": 1, "b": 1}, {"b": 1}]
# What one rank told of a step: the tokens of its rows, and every layer's rows.
Story = list[tuple[np.ndarray, list[torch.Tensor]]]


@pytest.fixture(scope="module", autouse=True)
def emulated() -> Iterator[None]:
    """Operators of an Ascend library, emulated."""
    with installed() as done:
        if not done:
            pytest.skip("the real library is here: these tests compare against the emulator")
        yield


def model_of(seed: int, num_layers: int = 3) -> Model:
    """Random weights, and rows for the story."""
    rng = np.random.default_rng(seed)
    weights = [weights_of(rng, CONFIG, KINDS[i % 3]) for i in range(num_layers)]
    return Model(CONFIG, weights, {name: rng.standard_normal((n, CONFIG.hidden_size)) for name, n in lengths().items()})


def lengths() -> dict[str, int]:
    """Tokens of every request of the story."""
    return {name: sum(step.get(name, 0) for step in STEPS) for name in "ab"}


def caches_of(num_layers: int) -> Caches:
    """Blocks as the operators want them; raw keys behind the window are given back."""
    return Caches(
        CONFIG,
        range(num_layers),
        num_tokens=sum(lengths().values()),
        max_requests=3,
        block_size=16,
        cmp_block_size=16,
        int8_index_cache=True,
    )


def tell(
    model: Model,
    layers: Sequence[DSAttention],
    caches: Caches,
    each: Callable[[Mapping[str, int]], None] = lambda new_tokens: None,
) -> Story:
    """Every step of the story, through every layer."""
    story = []
    for new_tokens in STEPS:
        for name in new_tokens.keys() - set(caches.requests):
            caches.open(name)
        done = {name: caches.num_computed_tokens(name) for name in new_tokens}
        step = step_metadata(layers, caches, new_tokens)
        rows = [model.x[name][done[name] : done[name] + count] for name, count in new_tokens.items()]
        stream = torch.tensor(np.concatenate([*rows, np.zeros((1, CONFIG.hidden_size))])).bfloat16()
        mine = stream[step.token_indices]  # -1, a pad row, takes the last one
        story.append((step.token_indices.numpy(), [layer(mine, step, caches[i]) for i, layer in enumerate(layers)]))
        each(new_tokens)
    return story


def exact_rows(model: Model) -> list[list[np.ndarray]]:
    """Every step's rows by every layer's float64 definition, of the rounded numbers; every entry is chosen."""
    whole = []
    for layer in layers_of(model, dtype="bfloat16"):
        weights, found = to_numpy(layer.kept_weights(), "float64"), {}
        for name, x in model.x.items():
            n = len(x)
            sizes = {"num_blocks": 1, "block_size": n, "num_cmp_blocks": 1, "cmp_block_size": n, "num_slots": 1}
            batch = ref.LayerBatch(int32([0, n]), int32([n]), int32([[0]]), int32([[0]]), int32([0]))
            rows, cache = to_numpy(torch.tensor(x).bfloat16(), "float64"), ref.empty_cache(weights, **sizes)
            options = {"compress_ratio": layer.compress_ratio}
            found[name] = ref.attention_layer(rows, weights, cache, batch, CONFIG, **options).output
        whole.append(found)
    done, steps = dict.fromkeys(model.x, 0), []
    for new_tokens in STEPS:
        parts = [[layer[name][done[name] : done[name] + n] for name, n in new_tokens.items()] for layer in whole]
        steps.append([np.concatenate(part) for part in parts])
        for name, count in new_tokens.items():
            done[name] += count
    return steps


def assert_near(story: Story, exact: list[list[np.ndarray]], plain: Story, name: str = "") -> None:
    """Every step's rows within the error of the same module on torch, which has all of them."""
    for i, ((tokens, outputs), wanted, (_, measures)) in enumerate(zip(story, exact, plain, strict=True)):
        real = tokens >= 0
        for layer, (mine, due, measure) in enumerate(zip(outputs, wanted, measures, strict=True)):
            rows = torch.tensor(tokens[real])
            assert_within_budget(mine[real], due[tokens[real]], measure[rows], f"{name} step {i} layer {layer}")


@pytest.mark.parametrize("w8a8", [False, True])
def test_prefill_chunk_and_decode_on_the_operators(w8a8: bool) -> None:
    """Against the float64 definition; the measure is the module on torch, with int8 weights where these are."""
    model = model_of(0)
    stories = {}
    for name in ("torch", "cann"):
        layers = layers_of(model, dtype="bfloat16", backend=backend.get(name), w8a8=w8a8)
        caches = caches_of(3)
        stories[name] = tell(model, layers, caches)
        assert isinstance(caches[1].tensors.index_cache, QuantizedVectors)
    assert_near(stories["cann"], exact_rows(model), stories["torch"])


def test_blocks_behind_the_window_are_given_back() -> None:
    """The tables of the later steps begin with -1, which no operator reads; another request may take those blocks."""
    model, seen = model_of(1), []
    layers, caches = layers_of(model, dtype="bfloat16", backend=backend.get("cann")), caches_of(3)

    def note(new_tokens: Mapping[str, int]) -> None:
        tables = [batch.swa_block_table for batch in caches.batches(dict.fromkeys(new_tokens, 0)).values()]
        seen.append([(table[list(new_tokens).index("a")] < 0).sum() for table in tables if "a" in new_tokens])

    tell(model, layers, caches, note)
    assert [set(map(int, counts)) for counts in seen] == [{5}, {6}, {6}, set()]


def test_operator_metadata_is_made_once_a_step_for_all_layers_of_a_ratio() -> None:
    """Six layers, two of each ratio: three calls for attention and one for the indexer, and none by a layer."""
    calls, functions = Counter[str](), dict(backend.get("cann").functions)

    def counted(name: str) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return functions[name](*args, **kwargs)

        return counting

    names = ("attention_metadata", "indexer_metadata")
    counting = Backend("cann", {**functions, **{name: counted(name) for name in names}})
    model, counts = model_of(2, num_layers=6), []
    layers, caches = layers_of(model, dtype="bfloat16", backend=counting), caches_of(6)

    def note(new_tokens: Mapping[str, int]) -> None:
        counts.append(dict(calls))
        calls.clear()

    tell(model, layers, caches, note)
    assert counts == [{"attention_metadata": 3, "indexer_metadata": 1}] * len(STEPS)


# --- two ranks ---


def told(ranks: Ranks, model: Model, ways: Sequence[Mapping[str, Any]], w8a8: bool) -> list[Story]:
    """In a worker: the story on the operators, way by way."""
    stories = []
    with installed():
        for options in ways:
            parallel: Parallel = parallel_of(options, tp=ranks)
            layers = layers_of(model, parallel, dtype="bfloat16", backend=backend.get("cann"), w8a8=w8a8)
            stories.append(tell(model, layers, caches_of(3)))
    return stories


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("w8a8", [False, True])
def test_two_ranks_on_the_operators(w8a8: bool) -> None:
    """Heads go to their tokens and back, weights are gathered or whole, decode runs by heads, and the switch is off."""
    model = model_of(3)
    ways = [
        {"enable_dsa_cp": True, "dsa_cp_output_mode": "all_to_all", "prefill_cp_mode": "zigzag"},
        {"enable_dsa_cp": True, "dsa_cp_rows": "scattered", "dsa_cp_key_mode": "gather_hidden"},
        {"enable_dsa_cp": True, "dsa_cp_output_mode": "replicated_weight"},
        {},
    ]
    plain = tell(model, layers_of(model, dtype="bfloat16", w8a8=w8a8), caches_of(3))
    exact = exact_rows(model)
    for rank in run(2, "tests.module.test_cann:told", [(model, ways, w8a8)] * 2, timeout=300):
        for way, story in zip(ways, rank, strict=True):
            assert_near(story, exact, plain, str(way))
