"""The layer on a device that is not the CPU, and that nothing waits for it. Runs where there is a CUDA device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import dsacp_npu.layer
from dsacp_ref import layer as ref
from tests.layer_strategies import EVERY_KIND, SMALL, Kind, World, legal_cut, run, world_of
from tests.mirror.common import compare_floats, mapped, to_torch
from tests.mirror.test_layer import step_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch sees no CUDA device")

each_kind = pytest.mark.parametrize("kind", EVERY_KIND, ids=str)
STEPS = [[16, 8, 0], [1, 0, 2], [4, 1, 1]]


def world(kind: Kind) -> World:
    """Three requests, heads for 1, 2 and 4 ranks."""
    return world_of(np.random.default_rng(kind.ratio), [21, 9, 3], config=replace(SMALL, o_groups=4), kind=kind)


def on_cuda(value: Any) -> Any:
    """The same on the device."""
    return mapped(to_torch(value), lambda tensor: tensor.cuda())


def assert_equals(got: Any, want: Any) -> None:
    """A device's result against the reference's, in float64."""
    compare_floats(mapped(got, lambda tensor: tensor.cpu()), want, want, "on the device")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Every call that would wait for the device raises."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"):  # it says that it is a prototype, once a process
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_kind
@pytest.mark.parametrize("name", ["attention_layer", "attention_layer_"])
def test_one_device_without_waiting(kind: Kind, name: str) -> None:
    layer = getattr(dsacp_npu.layer, name)

    def forward(x: np.ndarray, batch: ref.LayerBatch, cache: ref.LayerCache) -> tuple[Any, ...]:
        args = (x, here.weights, cache, batch, here.config)
        want = ref.attention_layer(*args, compress_ratio=kind.ratio)
        args = on_cuda(args)
        with no_waiting():
            got = layer(*args, compress_ratio=kind.ratio)
        assert_equals(got, want)
        return want.output, want.topk_indices, want.cache

    here = world(kind)
    run(here, STEPS, forward, idle=(1,), beyond=2)


@each_kind
def test_by_heads_without_waiting(kind: Kind) -> None:
    here = world(kind)
    x, batch = here.step([0] * 3, here.lengths, idle=(1,))
    args = (x, here.weights, [here.cache] * 2, batch, here.config)
    want = ref.head_parallel_layer(*args, compress_ratio=kind.ratio)
    args = on_cuda(args)
    with no_waiting():
        got = dsacp_npu.layer.head_parallel_layer(*args, compress_ratio=kind.ratio)
    assert_equals(got, want)


@each_kind
def test_over_ranks_with_lengths_on_the_host(kind: Kind) -> None:
    here, rng = world(kind), np.random.default_rng(1)
    for _ in range(12):
        cut = legal_cut(rng, kind.ratio)._replace(cp_size=int(rng.choice([1, 2, 4])))
        caches, done = [here.cache] * cut.cp_size, [0] * 3
        for new in STEPS[:2]:
            ends = [a + b for a, b in zip(done, new, strict=True)]
            args, options = step_of(here, cut, *here.step(done, ends), caches)
            want = ref.layer_over_ranks(*args, **options)
            inputs, weights, caches, batch, config = args
            got = dsacp_npu.layer.layer_over_ranks(
                *on_cuda((inputs, weights, caches)), to_torch(batch), config, **options
            )
            assert_equals(got, want)
            caches, done = want.caches, ends
