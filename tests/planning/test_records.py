"""Models, chips and memory: presets against files, figures against what is known of the models, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsacp_npu.planning.chips import FIGURES, chip_of, chip_of_json, presets
from dsacp_npu.planning.costs import Planner
from dsacp_npu.planning.models import PRESETS, model_of, model_of_json
from dsacp_npu.planning.schemes import Scheme
from dsacp_npu.planning.shares import batch_of
from dsacp_ref.config import v4_flash, v4_pro
from dsacp_ref.mla_config import v32
from dsacp_ref.spec import ContractError, UnsupportedError

V4_EXPERTS = {"n_shared_experts": 1, "num_experts_per_tok": 6, "vocab_size": 129280, "hc_mult": 4}
V32_EXPERTS = {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048}
V32_EXPERTS |= {"vocab_size": 129280, "first_k_dense_replace": 3, "intermediate_size": 18432}
FILES = {
    "v4-flash": v4_flash().to_json() | V4_EXPERTS | {"n_routed_experts": 256, "moe_intermediate_size": 2048},
    "v4-pro": v4_pro().to_json() | V4_EXPERTS | {"n_routed_experts": 384, "moe_intermediate_size": 3072},
    "v3.2": v32().to_json() | V32_EXPERTS,
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_its_config_json_gives(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FILES[name]))
    assert model_of(str(path))._replace(name=name) == model_of(name)


@pytest.mark.parametrize("name", ["v4-flash", "v3.2"])
def test_a_key_that_planning_needs_is_asked_for_by_name(name: str) -> None:
    for key in ("n_routed_experts", "moe_intermediate_size", "vocab_size"):
        mapping = {other: value for other, value in FILES[name].items() if other != key}
        with pytest.raises(ContractError, match=rf"^{key} must be in config\.json, got no such key"):
            model_of_json(mapping)
    with pytest.raises(ContractError, match=r"^n_routed_experts must be an int"):
        model_of_json(FILES[name] | {"n_routed_experts": 0})


def test_another_design_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"this is a V4\.1 checkpoint"):
        model_of_json({"kv_source_layer_ids": [1]})
    with pytest.raises(ContractError, match=r"^--model must be v4-flash, v4-pro, v3.2, or a config.json, got 'v5'"):
        model_of("v5")
    with pytest.raises(ContractError, match=r"^first_k_dense_replace must be at most 61 layers, got 62"):
        model_of_json(FILES["v3.2"] | {"first_k_dense_replace": 62})


def test_sizes_are_those_of_the_released_models() -> None:
    """Billions of weights: 284 and 1600 by name for V4, 671 for V3.2 without its draft layer."""
    totals = {}
    for name in PRESETS:
        model = model_of(name)
        attention = sum(k.num_layers * (k.query_whole + k.query_heads + k.key_side + k.output) for k in model.kinds)
        experts = model.experts
        layers = model.num_layers - experts.dense_layers
        mlp = (
            3
            * model.hidden
            * (layers * (experts.routed + experts.shared) * experts.width + experts.dense_layers * experts.dense_width)
        )
        totals[name] = (attention + mlp + 2 * model.vocab * model.hidden) / 1e9
    assert totals["v4-flash"] == pytest.approx(284, rel=0.02)
    assert totals["v4-pro"] == pytest.approx(1600, rel=0.02)
    assert totals["v3.2"] == pytest.approx(671, rel=0.02)


# --- memory ---

WHOLE = Scheme(16, 1, "zigzag", "scattered", "gather_compressed", "replicated_weight")


def memory(name: str, tokens: int, scheme: Scheme = WHOLE) -> Any:
    """Of a prompt without a prefix."""
    return Planner(model_of(name), chip_of("910c"), "w8a8").cost(batch_of([tokens]), scheme).memory


@pytest.mark.parametrize(
    "name, tokens, gigabytes",
    [
        *[("v4-flash", 1 << 17, 0.82), ("v4-flash", 1 << 19, 3.3), ("v4-flash", 1 << 20, 6.5)],
        *[("v4-pro", 1 << 17, 1.2), ("v4-pro", 1 << 19, 4.7), ("v4-pro", 1 << 20, 9.4)],
    ],
)
def test_caches_are_as_large_as_was_worked_out(name: str, tokens: int, gigabytes: float) -> None:
    """bfloat16 entries and 8-bit index keys, the whole on every rank."""
    assert memory(name, tokens).caches / 1e9 == pytest.approx(gigabytes, rel=0.03)


def test_rows_and_workspace_are_as_large_as_was_worked_out() -> None:
    """At 1M tokens over 16 ranks: 2.1 GB of residual streams, 8.6 of queries and outputs, 8.6 more of gathered rows."""
    found = memory("v4-flash", 1 << 20)
    assert found.rows / 2e9 == pytest.approx(2.1, rel=0.03)
    hidden = memory("v4-flash", 1 << 20, WHOLE._replace(key_mode="gather_hidden"))
    raw_keys, scores, states = 1 << 30, 1024 * (1 << 18) * 4, (1 << 20) // 16 * 10240
    assert found.workspace == pytest.approx(8.6e9 + raw_keys + scores + states, rel=0.02)
    gathered = hidden.workspace - found.workspace
    assert gathered == (1 << 20) * 4096 * 2 + (1 << 20) * 15 // 16 * 10240  # all rows, and their projections


def test_output_weights_are_most_of_what_attention_keeps() -> None:
    """2.9 G of 8-bit weights in Flash, 11.3 in Pro; a 16th of them where ranks gather them (an 8th of 8 groups)."""
    for name, billions, ranks in (("v4-flash", 2.9, 8), ("v4-pro", 11.3, 16)):
        whole = WHOLE._replace(cp_size=ranks)
        kept = [
            memory(name, 4096, whole._replace(output_mode=mode)).weights
            for mode in ("replicated_weight", "gather_weight")
        ]
        assert (kept[0] - kept[1]) / 1e9 == pytest.approx(billions * (ranks - 1) / ranks, rel=0.02)


# --- chips ---


def test_every_figure_of_a_preset_has_a_source() -> None:
    for chip in presets().values():
        assert [name for name, _ in chip.sources] == list(FIGURES)
        assert all(len(source) > 3 for _, source in chip.sources)


def test_a_chip_of_a_file_is_that_of_its_figures(tmp_path: Path) -> None:
    figures = {name: [getattr(chip_of("h200"), name), source] for name, source in chip_of("h200").sources}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(figures))
    assert chip_of(str(path)) == replace(chip_of("h200"), name="mine")


@pytest.mark.parametrize(
    "change, text",
    [
        ({"link": None}, "^chip mine: link must be a pair of a number and its source, got None"),
        ({"link": [450]}, "^chip mine: link must be a pair of a number and its source"),
        ({"link": [450, " "]}, "^chip mine: link must be a pair of a number and its source"),
        ({"link": [-1, "a sheet"]}, "^link must be"),
        ({"link": ["fast", "a sheet"]}, "^link must be"),
        ({"link_efficiency": [1.5, "a hope"]}, "^link_efficiency must be at most 1, got 1.5"),
        (
            {"speed": [1, "a sheet"]},
            "^chip mine: speed must be a figure of a chip, got an unknown name; one of",
        ),
    ],
)
def test_a_figure_that_cannot_be_is_refused_by_name(change: dict[str, Any], text: str) -> None:
    figures = {name: [getattr(chip_of("h200"), name), source] for name, source in chip_of("h200").sources}
    with pytest.raises(ContractError, match=text):
        chip_of_json("mine", figures | change)


def test_a_missing_figure_is_asked_for_by_name(tmp_path: Path) -> None:
    figures = {name: [getattr(chip_of("h200"), name), source] for name, source in chip_of("h200").sources}
    del figures["cache"]
    with pytest.raises(ContractError, match=r"^chip mine: cache must be given, got no such key"):
        chip_of_json("mine", figures)
    with pytest.raises(ContractError, match=r"^chip mine must be a JSON object, got list"):
        chip_of_json("mine", [])
    with pytest.raises(ContractError, match=r"^--chip must be 910b3, .*, or a JSON file, got 'b200'; no such file"):
        chip_of("b200")


def test_a_batch_that_cannot_be_is_refused() -> None:
    for lengths, computed, text in (
        ([], None, "^query_lens must hold at least one request, got none"),
        ([0], None, "^query_lens must be an int in"),
        ([1, 2], [3], "^computed must have 2 entries, got 1"),
        ([5], [-1], "^computed must be an int in"),
        ([2**31 - 1, 1], None, "^tokens of the batch must be"),
        ([2**30], [2**31 - 1], "^seq_lens must be"),
    ):
        with pytest.raises(ContractError, match=text):
            batch_of(lengths, computed)
