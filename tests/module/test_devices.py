"""The module on devices that are not the CPU: nothing waits, a captured graph replays, ranks meet over NCCL."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dsacp_npu.step import metadata_of_batches, step_metadata
from tests.compare import assert_double
from tests.distributed.pool import run
from tests.mirror.test_devices import no_waiting
from tests.module.test_ranks import KEYS, OUTPUTS, STEPS, modes
from tests.module.worlds import assert_told, caches_of, due, layers_of, model_of, tell

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch sees no CUDA device")

LENGTHS = {"a": 37, "b": 11, "c": 22}
DECODE = [{"a": 1, "b": 1}, {"a": 1}, {"c": 1, "a": 1}, {"b": 1, "c": 1}]


def test_a_story_on_the_device() -> None:
    model = model_of(0, LENGTHS)
    story = tell(model, layers_of(model, device="cuda"), caches_of(model, device="cuda"), STEPS)
    assert_told([story], model, STEPS)


def test_a_forward_does_not_wait_for_the_device() -> None:
    """Making the step copies lengths and tables to the device; the layers then only launch."""
    model = model_of(1, LENGTHS)
    layers, caches = layers_of(model, device="cuda"), caches_of(model, device="cuda")
    caches.open("a")
    for count in (20, 1):
        step = step_metadata(layers, caches, {"a": count})
        x = torch.randn(count, model.config.hidden_size, dtype=torch.float64, device="cuda")
        with no_waiting():
            for layer in layers:
                layer(x, step, caches[layer.layer_idx])


def test_a_captured_graph_replays_over_steps() -> None:
    """Capture once, then fill in each step's metadata and replay: requests come and go in fixed slots."""
    model, slots = model_of(2, LENGTHS), 3
    layers, caches = layers_of(model, device="cuda"), caches_of(model, device="cuda")
    prefill = [{"a": 17, "b": 8}, {"c": 19}]
    tell(model, layers, caches, prefill)
    sizes = {"num_slots": slots, "num_input_tokens": slots, "decode_query_len": 1}
    static = step_metadata(layers, caches, {}, **sizes)
    x = torch.zeros(slots, model.config.hidden_size, dtype=torch.float64, device="cuda")

    def forward() -> list[torch.Tensor]:
        # An engine's own caches: what a graph writes, its Python does not see.
        return [layer(x, static, caches[layer.layer_idx].tensors) for layer in layers]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        forward()  # a step of idle slots: it writes nothing, and makes what must not be made while capturing
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = forward()
    exact = due(model, [*prefill, *DECODE])[len(prefill) :]
    for new_tokens, rows in zip(DECODE, exact, strict=True):
        done = {request: caches.num_computed_tokens(request) for request in new_tokens}
        static.fill_(step_metadata(layers, caches, new_tokens, **sizes))
        x.zero_()
        x[: len(new_tokens)] = torch.tensor(np.stack([model.x[name][done[name]] for name in new_tokens]))
        graph.replay()
        caches.advance(static.batches[1])
        for layer, (got, want) in enumerate(zip(outputs, rows, strict=True)):
            assert_double(got[: len(new_tokens)].cpu().numpy(), want, f"{new_tokens} layer {layer}")


def test_an_engines_tables_on_the_host() -> None:
    """Batches come from the host, caches lie on the device."""
    model = model_of(3, {"a": 9})
    layers, caches = layers_of(model, device="cuda"), caches_of(model, device="cuda")
    caches.open("a")
    batches = caches.batches({"a": 9})
    step = metadata_of_batches(layers, {cache.layer_idx: cache.tensors for cache in caches}, batches)
    x = torch.tensor(model.x["a"], device="cuda")
    for layer, want in zip(layers, due(model, [{"a": 9}])[0], strict=True):
        assert_double(layer(x, step, caches[layer.layer_idx].tensors).cpu().numpy(), want, f"layer {layer.layer_idx}")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has fewer than two CUDA devices")
def test_two_ranks_over_nccl(tmp_path: Path) -> None:
    model = model_of(4, LENGTHS)
    ways = [modes(rows, keys, output, "zigzag") for rows in KEYS for keys in KEYS[rows] for output in OUTPUTS]
    found = run(2, "tests.module.work:over_nccl", [(model, ways, STEPS, f"file://{tmp_path}/nccl")] * 2, timeout=500)
    for i, way in enumerate(ways):
        assert_told([rank[i] for rank in found], model, STEPS, str(way))
