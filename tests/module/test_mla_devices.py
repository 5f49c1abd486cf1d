"""The V3.2 module on devices that are not the CPU: a story, no waiting, ranks that meet over NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsacp_npu.distributed import Ranks, connect
from dsacp_npu.mla_step import mla_step_metadata
from dsacp_npu.parallel import parallel_of
from tests.distributed.pool import run
from tests.mirror.test_devices import no_waiting
from tests.module.mla_worlds import Model, Told, assert_told, caches_of, layers_of, model_of, tell

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch sees no CUDA device")

LENGTHS = {"a": 37, "b": 11, "c": 22}
STEPS = [{"a": 20, "b": 8}, {"a": 12, "c": 21, "b": 2}, {"b": 1, "c": 1}, {"a": 5}]
MODES = {"enable_dsa_cp": True, "dsa_cp_key_mode": "gather_kv", "dsa_cp_output_mode": "replicated_weight"}
WAYS = [
    {**MODES, "prefill_cp_mode": split, "dsa_cp_rows": rows}
    for split in ("in-seq-split", "round-robin-split")
    for rows in ("full", "scattered")
]


def test_a_story_on_the_device() -> None:
    model = model_of(0, LENGTHS)
    assert_told([tell(model, layers_of(model, device="cuda"), caches_of(model, device="cuda"), STEPS)], model)


def test_a_forward_does_not_wait_for_the_device() -> None:
    """Making the step copies lengths and tables to the device; the layers then only launch."""
    model = model_of(1, LENGTHS)
    layers, caches = layers_of(model, device="cuda"), caches_of(model, device="cuda")
    caches.open("a")
    for count in (20, 1):
        step = mla_step_metadata(layers, caches, {"a": count})
        x = torch.randn(count, model.config.hidden_size, dtype=torch.float64, device="cuda")
        with no_waiting():
            for layer in layers:
                layer(x, step, caches[layer.layer_idx])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has fewer than two CUDA devices")
def test_two_ranks_over_nccl(tmp_path: Path) -> None:
    model = model_of(4, LENGTHS)
    found = run(2, "tests.module.test_mla_devices:over_nccl", [(model, f"file://{tmp_path}/nccl")] * 2, timeout=500)
    for i, way in enumerate(WAYS):
        assert_told([rank[i] for rank in found], model, str(way))


def over_nccl(ranks: Ranks, model: Model, meeting: str) -> list[list[Told]]:
    """The story in each way, every rank on a device of its own."""
    torch.cuda.set_device(ranks.cp_rank)
    device = f"cuda:{ranks.cp_rank}"
    group = connect(meeting, ranks.cp_size, ranks.cp_rank, transport="nccl")
    try:
        made = [layers_of(model, parallel_of(way, tp=group), device=device) for way in WAYS]
        return [tell(model, layers, caches_of(model, device=device), STEPS) for layers in made]
    finally:
        group.close()
