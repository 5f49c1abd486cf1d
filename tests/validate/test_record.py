"""Dumps of the module itself: what a forward leaves is right by the definition, and changes nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsacp_npu import backend, record
from dsacp_npu.distributed import Ranks
from dsacp_npu.emulator import installed
from dsacp_npu.parallel import parallel_of
from dsacp_npu.step import step_metadata
from dsacp_npu.validation.report import Report
from dsacp_ref.spec import ContractError
from tests.distributed.pool import run
from tests.module.test_cann import CONFIG
from tests.module.test_cann import caches_of as legal_caches
from tests.module.test_cann import model_of as legal_model
from tests.module.worlds import Model, Steps, caches_of, layers_of, model_of
from tests.validate.dumps import report_of

LENGTHS = {"a": 37, "b": 11, "c": 22}
STEPS: Steps = [{"a": 16, "b": 3}, {"c": 20, "a": 1, "b": 8}, {"a": 1, "c": 1}]


def told(model: Model, layers: Any, caches: Any, steps: Steps, **options: Any) -> list[list[dict[str, Any]]]:
    """Every step's dump of every layer."""
    story = []
    for new_tokens in steps:
        for request in new_tokens.keys() - set(caches.requests):
            caches.open(request)
        done = {request: caches.num_computed_tokens(request) for request in new_tokens}
        step = step_metadata(layers, caches, new_tokens, **options)
        rows = np.concatenate([model.x[name][done[name] : done[name] + n] for name, n in new_tokens.items()])
        padded = np.concatenate([rows, np.full((1, rows.shape[1]), np.nan)])
        mine = torch.tensor(padded)[step.token_indices].to(getattr(torch, layers[0].dtype_name))
        dumps = []
        for layer in layers:
            with record.recording(layer) as tensors:
                layer(mine, step, caches[layer.layer_idx])
            dumps.append(tensors)
        story.append(dumps)
    return story


def assert_right(report: Report) -> None:
    """Nothing differs, and attention was compared."""
    assert not report.findings, report.findings[0]
    assert any(result.check == "attention" and result.status == "right" for result in report.results)


@pytest.mark.parametrize("padding", [0, 3])
def test_one_device(tmp_path: Path, padding: int) -> None:
    """Prefill, a mixed step, decode; with graph padding, and requests without queries."""
    model = model_of(0, LENGTHS)
    steps = [*STEPS, {"a": 0, "b": 0, "c": 1}]
    options = {"num_input_tokens": 29 + padding} if padding else {}
    for dumps in told(model, layers_of(model), caches_of(model), steps, **options):
        for dump in dumps:
            assert_right(report_of(tmp_path, [dump]))


def test_a_recorded_layer_computes_the_same_bits_and_is_itself_afterwards() -> None:
    model = model_of(1, LENGTHS)
    layer = layers_of(model)[1]
    kinds = layer.split_kind, layer.whole_kind
    outputs = []
    for recorded in (False, True):
        caches = caches_of(model)
        caches.open("a")
        step = step_metadata([layer], caches, {"a": 37})
        x = torch.tensor(model.x["a"])
        if recorded:
            with record.recording(layer) as tensors:
                outputs.append(layer(x, step, caches[1]))
            assert np.array_equal(tensors["output"], outputs[-1].numpy())
        else:
            outputs.append(layer(x, step, caches[1]))
    assert torch.equal(*outputs)
    assert layer.split_kind is kinds[0]
    assert layer.whole_kind is kinds[1]
    assert not layer._forward_hooks


def test_a_forward_that_fails_leaves_the_layer_as_it_was() -> None:
    layer = layers_of(model_of(1, LENGTHS))[1]
    kinds = layer.split_kind, layer.whole_kind
    with pytest.raises(RuntimeError), record.recording(layer):
        raise RuntimeError
    assert (layer.split_kind, layer.whole_kind) == kinds
    with pytest.raises(ContractError, match="layer must be of type DSAttention"), record.recording(None):  # type: ignore[arg-type]
        pass


def of_rank(ranks: Ranks, model: Model, options: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """What a process of a group tells."""
    layers = layers_of(model, parallel_of(options, tp=ranks))
    return told(model, layers, caches_of(model), STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"enable_dsa_cp": True},
        {"enable_dsa_cp": True, "prefill_cp_mode": "zigzag", "dsa_cp_output_mode": "gather_weight"},
        {
            "enable_dsa_cp": True,
            "prefill_cp_mode": "zigzag",
            "dsa_cp_rows": "scattered",
            "dsa_cp_key_mode": "gather_kv",
            "dsa_cp_output_mode": "replicated_weight",
        },
    ],
    ids=["all_to_all", "gather_weight", "scattered"],
)
def test_two_processes(tmp_path: Path, options: dict[str, Any]) -> None:
    """Each rank's dump, put together: splits a prefill, runs decode by heads."""
    stories = run(2, "tests.validate.test_record:of_rank", [(model_of(2, LENGTHS), options)] * 2)
    for dumps_of_step in zip(*stories, strict=True):
        for dumps in zip(*dumps_of_step, strict=True):
            if dumps[0]["cp_size"] == 2:
                assert_right(report_of(tmp_path, dumps))
            else:  # by heads: each rank is one of one
                for dump in dumps:
                    assert_right(report_of(tmp_path, [dump]))


@pytest.mark.slow
def test_operators_on_the_emulator(tmp_path: Path) -> None:
    """bfloat16, int8 index keys, released blocks: what CANN's operators are handed is right too."""
    with installed() as done:
        if not done:
            pytest.skip("the real library is here: this test compares with the emulator")
        model = legal_model(0)
        layers = layers_of(model, dtype="bfloat16", backend=backend.get("cann"))
        assert CONFIG.compress_ratios[:3] == (1, 4, 128)
        steps = [{"a": 130}, {"b": 9, "a": 5}, {"a": 1, "b": 1}]
        for dumps in told(model, layers, legal_caches(len(layers)), steps):
            for dump in dumps:
                assert dump["dtype"] == "bfloat16"
                assert_right(report_of(tmp_path, [dump], ".safetensors"))
