"""The module on the kernels: whole stories, lists of slots once a step, the bound of logits, two ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from dsacp_npu import backend
from dsacp_npu.ascend.interpreter import repair
from dsacp_npu.backend import Backend
from dsacp_npu.distributed import Ranks
from dsacp_npu.module import DSAttention
from dsacp_npu.parallel import parallel_of
from dsacp_npu.triton_ops import LOGIT_LIMIT
from dsacp_ref.spec import UnsupportedError
from tests.distributed.pool import run
from tests.module import test_cann as on_operators
from tests.module.test_cann import CONFIG, STEPS, Story, assert_near, exact_rows, model_of, tell
from tests.module.worlds import Model, filled, layers_of


def caches_of(num_layers: int) -> Any:
    """The operators' pages; index keys in bfloat16."""
    sizes = {"num_tokens": sum(on_operators.lengths().values()), "max_requests": 3}
    return on_operators.Caches(CONFIG, range(num_layers), **sizes, block_size=16, cmp_block_size=16)


class Listening:
    """The kernels, and how often each function is called with which keywords."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.keywords: list[dict[str, Any]] = []
        functions = dict(backend.get("triton").functions)
        heard = [name for name in functions if name.endswith("_attention") or name == "attention_lists"]
        self.backend = Backend("triton", {**functions, **{name: self.heard(name, functions[name]) for name in heard}})

    def heard(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, listened to."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            self.keywords.append(kwargs)
            return function(*args, **kwargs)

        return call


def test_prefill_chunk_and_decode_on_the_kernels() -> None:
    """Against the float64 definition; the measure is the module on torch. Lists are made once for a ratio and step."""
    model, listening, counts = model_of(0, num_layers=6), Listening(), []
    plain = tell(model, layers_of(model, dtype="bfloat16"), caches_of(6))
    layers = layers_of(model, dtype="bfloat16", backend=listening.backend)

    def note(new_tokens: Mapping[str, int]) -> None:
        counts.append((listening.calls["attention_lists"], sum(listening.calls.values())))
        listening.calls.clear()

    assert_near(tell(model, layers, caches_of(6), note), exact_rows(model), plain)
    assert counts == [(3, 9)] * len(STEPS)
    assert all("slots" in given for given in listening.keywords if "softmax_scale" in given)


def layer_with(largest: float, how: str) -> tuple[DSAttention, Listening]:
    """A window-only layer whose norm of keys has this largest weight, loaded in one of two ways."""
    model, listening = model_of(1, num_layers=1), Listening()
    weights = model.weights[0]
    scaled = weights._replace(kv_norm=weights.kv_norm / abs(weights.kv_norm).max() * largest)
    layer = filled(DSAttention(CONFIG, 0, backend=listening.backend), scaled)
    if how == "assign":
        return layer, listening
    loaded = DSAttention(CONFIG, 0, backend=listening.backend)
    loaded.load_state_dict(layer.state_dict())
    return loaded, listening


@pytest.mark.parametrize("how", ["assign", "load_state_dict"])
@pytest.mark.parametrize(("largest", "bounded"), [(0.5, True), (3.0, True), (3.1, False)])
def test_a_layer_knows_its_bound_of_logits(largest: float, bounded: bool, how: str) -> None:
    """V4's norms bound every logit; beyond the limit of float32 sums the running maximum stays."""
    layer, listening = layer_with(largest, how)
    caches = caches_of(1)
    caches.open("a")
    step = on_operators.step_metadata([layer], caches, {"a": 3})
    layer(torch.randn(3, CONFIG.hidden_size).bfloat16(), step, caches[0])
    (given,) = (kwargs for kwargs in listening.keywords if "softmax_scale" in kwargs)
    if not bounded:
        assert "logit_bound" not in given
        return
    norm = float(layer.kv_norm.abs().max())
    assert math.sqrt(CONFIG.head_dim) * norm < given["logit_bound"] <= LOGIT_LIMIT


def test_int8_weights_are_refused() -> None:
    model = model_of(2, num_layers=1)
    layers = layers_of(model, dtype="bfloat16", backend=backend.get("triton"), w8a8=True)
    with pytest.raises(UnsupportedError, match="backend 'triton' has no quantized_rows"):
        tell(model, layers, caches_of(1))


def told(ranks: Ranks, model: Model, ways: Sequence[Mapping[str, Any]]) -> list[Story]:
    """In a worker: the story on the kernels, way by way."""
    repair()
    stories = []
    for options in ways:
        parallel = parallel_of(options, tp=ranks)
        layers = layers_of(model, parallel, dtype="bfloat16", backend=backend.get("triton"))
        stories.append(tell(model, layers, caches_of(3)))
    return stories


@pytest.mark.xdist_group("processes")
def test_two_ranks_on_the_kernels() -> None:
    """Heads go to their tokens and back, pooled entries are gathered, decode runs by heads."""
    model = model_of(3)
    ways = [
        {"enable_dsa_cp": True, "dsa_cp_output_mode": "all_to_all", "prefill_cp_mode": "zigzag"},
        {"enable_dsa_cp": True, "dsa_cp_rows": "scattered", "dsa_cp_key_mode": "gather_compressed"},
    ]
    plain = tell(model, layers_of(model, dtype="bfloat16"), caches_of(3))
    exact = exact_rows(model)
    for rank in run(2, "tests.kernels.test_module:told", [(model, ways)] * 2, timeout=300):
        for way, story in zip(ways, rank, strict=True):
            assert_near(story, exact, plain, str(way))
