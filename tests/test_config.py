"""Split rules, model constants, parallel options and the grid of ranks: what is read, and what is refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsacp_ref.config import (
    SPLITS,
    AttentionConfig,
    ParallelConfig,
    SplitRule,
    Topology,
    check_combination,
    model_side_partition,
    split_rule,
    topology,
    v4_flash,
    v4_pro,
)
from dsacp_ref.spec import ContractError, UnsupportedError


def refused(kind: type[Exception], *parts: str) -> Any:
    """Expect an error of exactly this kind whose text holds the parts in this order."""
    return pytest.raises(kind, match="(?s)" + ".*".join(map(re.escape, parts)))


# --- split rules -----------------------------------------------------------------------------------------------------

split_texts = st.one_of(
    st.sampled_from([name for name in SPLITS if name != "round_robin_page"]),
    st.integers(1, 4096).map(lambda size: f"round_robin_page({size})"),
)


@given(split_texts)
def test_split_text_comes_back(text: str) -> None:
    rule = split_rule(text)
    assert str(rule) == text
    assert rule == SplitRule(name=rule.name, page_size=rule.page_size)
    assert (rule.page_size == 1) or rule.name == "round_robin_page"


@pytest.mark.parametrize(("alias", "name"), [("in-seq-split", "zigzag"), ("round-robin-split", "round_robin")])
def test_split_aliases(alias: str, name: str) -> None:
    assert split_rule(alias) == SplitRule(name=name)
    assert str(split_rule(alias)) == name


def test_split_rule_is_cached_frozen_and_hashable() -> None:
    assert split_rule("round_robin_page(16)") is split_rule("round_robin_page(16)")
    assert len({split_rule("zigzag"), split_rule("in-seq-split")}) == 1
    with pytest.raises(FrozenInstanceError):
        split_rule("zigzag").name = "contiguous"  # type: ignore[misc]


@pytest.mark.parametrize(
    "text",
    [
        *("zig", "", "Zigzag", "zigzag ", "zigzag\n", "zigzag(4)", "round-robin-split(4)"),
        *("round_robin_page(-1)", "round_robin_page()", "round_robin_page(1.5)", "round_robin_page(16)x"),
    ],
)
def test_unknown_split_lists_the_choices(text: str) -> None:
    with refused(ContractError, "split must be one of 'contiguous'", *map(repr, SPLITS[1:]), repr(text), "(128)"):
        split_rule(text)


@pytest.mark.parametrize("size", ["0", "99999999999"])
def test_split_page_size_out_of_range(size: str) -> None:
    with refused(ContractError, "split page size must be an int in [1, 2147483647]", size):
        split_rule(f"round_robin_page({size})")


def test_split_without_page_size_gets_the_hint() -> None:
    with refused(ContractError, "split", "page size", "'round_robin_page'", "write round_robin_page(128)"):
        split_rule("round_robin_page")


@pytest.mark.parametrize("value", [None, 3, ["zigzag"], b"zigzag"])
def test_split_of_another_type(value: Any) -> None:
    with refused(ContractError, "split must be a str, got", type(value).__name__, "contiguous"):
        split_rule(value)


def test_split_record_refuses_a_stray_page_size() -> None:
    with refused(ContractError, "split", "only as round_robin_page", "zigzag with 2"):
        SplitRule(name="zigzag", page_size=2)
    with refused(ContractError, "split page size", "bool True"):
        SplitRule(name="round_robin_page", page_size=True)


# --- the model -------------------------------------------------------------------------------------------------------

SHARED: dict[str, Any] = {
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-6,
}
FLASH: dict[str, Any] = SHARED | {
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "index_topk": 512,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}
PRO: dict[str, Any] = SHARED | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
}


@pytest.mark.parametrize(("preset", "checkpoint"), [(v4_flash, FLASH), (v4_pro, PRO)])
def test_presets_are_the_released_checkpoints(preset: Any, checkpoint: dict[str, Any]) -> None:
    assert AttentionConfig.from_json(checkpoint) == preset()
    assert preset().to_json() == checkpoint
    assert hash(preset()) == hash(preset())


def test_flash_layers() -> None:
    config = v4_flash()
    assert len(config.compress_ratios) == 44
    layers = [config.compress_ratio(layer) for layer in range(43)]
    assert Counter(layers) == {1: 2, 4: 21, 128: 20}
    assert layers[:2] == [1, 1]
    assert (set(layers[2::2]), set(layers[3::2])) == ({4}, {128})


def test_pro_layers() -> None:
    config = v4_pro()
    assert len(config.compress_ratios) == 62
    layers = [config.compress_ratio(layer) for layer in range(61)]
    assert Counter(layers) == {4: 30, 128: 31}
    assert layers[0] == layers[1] == 128
    assert (set(layers[2::2]), set(layers[3::2])) == ({4}, {128})


@pytest.mark.parametrize("preset", [v4_flash, v4_pro])
def test_draft_layers_are_window_only_however_many(preset: Any) -> None:
    layers = preset().num_hidden_layers
    assert [preset().compress_ratio(layers + stage) for stage in range(5)] == [1] * 5
    with refused(ContractError, "layer_idx must be an int >= 0, got -1"):
        preset().compress_ratio(-1)


@pytest.mark.parametrize("trailing", [[], [0], [1], [0, 0, 0]])
def test_trailing_entries(trailing: list[int]) -> None:
    config = AttentionConfig.from_json(FLASH | {"compress_ratios": FLASH["compress_ratios"][:43] + trailing})
    assert config.compress_ratios == v4_flash().compress_ratios[:43] + (1,) * len(trailing)


@pytest.mark.parametrize("ratio", [4, 128])
def test_trailing_entry_with_compression_is_refused(ratio: int) -> None:
    with refused(ContractError, f"compress_ratios must be 0 or 1 for draft layers, got [1, {ratio}]", "43"):
        AttentionConfig.from_json(FLASH | {"compress_ratios": [*FLASH["compress_ratios"], ratio]})


def test_ratio_list_too_short() -> None:
    with refused(ContractError, "compress_ratios must have an entry for each of 43 layers, got [1, 1]"):
        AttentionConfig.from_json(FLASH | {"compress_ratios": [0, 0]})


@pytest.mark.parametrize(
    ("ratios", "kind", "text"),
    [
        ([0, 2], UnsupportedError, "ratio 2 is V4.1"),
        ([0, 8], UnsupportedError, "compress_ratios: V4 has 0 (or 1), 4 and 128, got 8"),
        ([0, -4], ContractError, "compress_ratios entry must be an int >= 0, got -4"),
        ([0, "4"], ContractError, "compress_ratios entry must be an int >= 0, got str '4'"),
        ([0, True], ContractError, "compress_ratios entry must be an int >= 0, got bool True"),
        ("04", ContractError, "compress_ratios must be a list"),
        (None, ContractError, "compress_ratios must be a list"),
        (4, ContractError, "compress_ratios must be a list"),
    ],
)
def test_bad_ratio_lists(ratios: Any, kind: type[Exception], text: str) -> None:
    with refused(kind, text):
        AttentionConfig.from_json(FLASH | {"num_hidden_layers": 2, "compress_ratios": ratios})


def test_constructor_leaves_other_ratios_to_the_functions() -> None:
    assert replace(v4_flash(), num_hidden_layers=2, compress_ratios=(0, 2)).compress_ratios == (1, 2)


@pytest.mark.parametrize("key", ["kv_source_layer_ids", "index_source_layer_ids", "candidate_block_size"])
def test_v41_is_recognised(key: str) -> None:
    with refused(UnsupportedError, key, "V4.1"):
        AttentionConfig.from_json(FLASH | {key: [2, 8]})
    assert AttentionConfig.from_json(FLASH | {key: None}) == v4_flash()


@pytest.mark.parametrize("key", sorted(FLASH))
def test_missing_key_is_named(key: str) -> None:
    with refused(ContractError, f"{key} must be in config.json, got no such key"):
        AttentionConfig.from_json({name: value for name, value in FLASH.items() if name != key})


@pytest.mark.parametrize("key", sorted(FLASH["rope_scaling"]))
def test_missing_scaling_key_is_named(key: str) -> None:
    scaling = {name: value for name, value in FLASH["rope_scaling"].items() if name != key}
    with refused(ContractError, f"{key} must be in rope_scaling, got no such key"):
        AttentionConfig.from_json(FLASH | {"rope_scaling": scaling})


def test_other_keys_are_ignored() -> None:
    assert AttentionConfig.from_json(FLASH | {"n_routed_experts": 256, "rows": "odd"}) == v4_flash()


def test_model_without_an_indexer_needs_no_index_keys() -> None:
    bare = {key: value for key, value in FLASH.items() if not key.startswith("index_")}
    config = AttentionConfig.from_json(bare | {"num_hidden_layers": 2, "compress_ratios": [0, 128]})
    assert (config.index_n_heads, config.index_head_dim, config.index_topk) == (0, 0, 0)
    assert AttentionConfig.from_json(config.to_json()) == config
    with refused(ContractError, "index_n_heads must be in config.json"):
        AttentionConfig.from_json(bare | {"num_hidden_layers": 2, "compress_ratios": [0, 4]})


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"num_key_value_heads": 2}, ["num_key_value_heads", "[1, 1]", "2", "shared"]),
        ({"o_groups": 7}, ["o_groups must divide num_heads 64, got 7"]),
        ({"qk_rope_head_dim": 63}, ["rope_head_dim (qk_rope_head_dim) must be even and <= head_dim 512, got 63"]),
        ({"qk_rope_head_dim": 514}, ["rope_head_dim", "<= head_dim 512, got 514"]),
        ({"qk_rope_head_dim": 256}, ["index_head_dim must be a power of two >= rope_head_dim 256, got 128"]),
        ({"index_head_dim": 96}, ["index_head_dim must be a power of two", "got 96", "Hadamard"]),
        ({"index_topk": 0}, ["index_topk must be an int >= 1, got 0"]),
        ({"sliding_window": 0}, ["window_size (sliding_window) must be an int >= 1, got 0"]),
        ({"num_attention_heads": 64.0}, ["num_heads (num_attention_heads) must be an int >= 1, got float 64.0"]),
        ({"q_lora_rank": None}, ["q_lora_rank must be an int >= 1, got NoneType None"]),
        ({"hidden_size": "4096"}, ["hidden_size must be an int >= 1, got str '4096'"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers must be an int >= 1, got bool True"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps must be a finite number > 0.0, got 0"]),
        ({"rope_theta": float("nan")}, ["rope_theta must be a finite number > 0.0, got nan"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling must be a mapping (a JSON object), got str"]),
        ({"rope_scaling": FLASH["rope_scaling"] | {"factor": 0.5}}, ["rope_factor (factor) must be >= 1, got 0.5"]),
        ({"rope_scaling": FLASH["rope_scaling"] | {"beta_fast": 0.5}}, ["rope_beta_fast must be >= rope_beta_slow"]),
    ],
)
def test_values_that_do_not_fit(change: dict[str, Any], parts: list[str]) -> None:
    with refused(ContractError, *parts):
        AttentionConfig.from_json(FLASH | change)


@pytest.mark.parametrize("bad", [None, [], "{}", 3])
def test_config_must_be_a_mapping(bad: Any) -> None:
    for reader in (AttentionConfig.from_json, ParallelConfig.from_json, ParallelConfig().append_json):
        with refused(ContractError, "config must be a mapping (a JSON object), got", type(bad).__name__):
            reader(bad)


def test_scaling_spellings() -> None:
    scaling = {key: value for key, value in FLASH["rope_scaling"].items() if key != "type"}
    renamed = FLASH | {"rope_scaling": scaling | {"rope_type": "yarn", "attention_factor": 1.0}}
    assert AttentionConfig.from_json(renamed) == v4_flash()
    flat = {key: value for key, value in renamed.items() if key != "rope_scaling"}
    assert AttentionConfig.from_json(flat | {"rope_parameters": renamed["rope_scaling"]}) == v4_flash()
    for none in (None, {"type": "default"}):
        assert AttentionConfig.from_json(FLASH | {"rope_scaling": none}).rope_factor == 1.0
    with refused(UnsupportedError, "rope_scaling type", "'yarn'", "got 'linear'"):
        AttentionConfig.from_json(FLASH | {"rope_scaling": scaling | {"type": "linear"}})
    with refused(UnsupportedError, "attention_factor", "got 1.27"):
        AttentionConfig.from_json(FLASH | {"rope_scaling": FLASH["rope_scaling"] | {"attention_factor": 1.27}})


def test_json_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PRO))
    assert AttentionConfig.from_json_file(path) == AttentionConfig.from_json_file(str(path)) == v4_pro()
    path.write_text("{")
    with refused(ContractError, "path must hold JSON, got", "config.json"):
        AttentionConfig.from_json_file(path)
    with pytest.raises(FileNotFoundError):
        AttentionConfig.from_json_file(tmp_path / "absent.json")


@st.composite
def checkpoints(draw: st.DrawFn) -> dict[str, Any]:
    """Small legal checkpoints in DeepSeek's spelling."""
    size = st.integers(1, 64)
    rope = 2 * draw(st.integers(1, 8))
    groups = draw(st.integers(1, 8))
    layers = draw(st.lists(st.sampled_from([0, 4, 128]), min_size=1, max_size=8))
    slow = draw(st.floats(0.5, 4))
    return {
        **{key: draw(size) for key in ("hidden_size", "q_lora_rank", "o_lora_rank", "sliding_window")},
        **{key: draw(size) for key in ("index_n_heads", "index_topk", "max_position_embeddings")},
        "num_hidden_layers": len(layers),
        "num_attention_heads": groups * draw(st.integers(1, 8)),
        "num_key_value_heads": 1,
        "head_dim": rope + draw(st.integers(0, 16)),
        "qk_rope_head_dim": rope,
        "o_groups": groups,
        "index_head_dim": 2 ** draw(st.integers((rope - 1).bit_length(), 7)),
        "rope_theta": draw(st.floats(2, 1e6)),
        "compress_rope_theta": draw(st.floats(2, 1e6)),
        "rope_scaling": {
            "type": "yarn",
            "factor": draw(st.floats(1, 40)),
            "beta_fast": slow * draw(st.floats(1, 40)),
            "beta_slow": slow,
            "original_max_position_embeddings": draw(st.integers(1, 70000)),
        },
        "rms_norm_eps": draw(st.floats(1e-20, 1e-2)),
        "compress_ratios": layers + [0] * draw(st.integers(0, 3)),
    }


@settings(deadline=None)
@given(checkpoints())
def test_checkpoint_comes_back_through_json_text(checkpoint: dict[str, Any]) -> None:
    before = json.dumps(checkpoint)
    config = AttentionConfig.from_json(checkpoint)
    assert json.dumps(checkpoint) == before
    assert config.to_json() == checkpoint
    assert AttentionConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


# transformers writes layer_types, compress_rates and a nested rope_parameters instead.

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 16,
    "q_lora_rank": 8,
    "o_groups": 2,
    "o_lora_rank": 8,
    "sliding_window": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 2,
    "max_position_embeddings": 4096,
}


def transformers_json(folder: Path, **options: Any) -> AttentionConfig:
    reason = "transformers is not installed"
    module = pytest.importorskip("transformers.models.deepseek_v4.configuration_deepseek_v4", reason=reason)
    module.DeepseekV4Config(**options).save_pretrained(folder)
    assert "compress_ratios" not in json.loads((folder / "config.json").read_text())
    return AttentionConfig.from_json_file(folder / "config.json")


def test_transformers_tiny_config(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1}
    scaling["original_max_position_embeddings"] = 1024
    config = transformers_json(
        tmp_path, **TINY, compress_ratios=[0, 4, 128, 4], qk_rope_head_dim=4, rope_parameters=scaling
    )
    named = {"num_attention_heads": "num_heads", "sliding_window": "window_size"}
    assert {key: getattr(config, named.get(key, key)) for key in TINY} == TINY
    assert config.compress_ratios == (1, 4, 128, 4)
    assert config.rope_head_dim == 4
    assert (config.rope_theta, config.compress_rope_theta) == (10000.0, 160000.0)
    assert (config.rope_factor, config.rope_beta_fast, config.rope_beta_slow) == (4.0, 32.0, 1.0)
    assert config.rope_original_max_position == 1024


def test_transformers_config_without_scaling(tmp_path: Path) -> None:
    config = transformers_json(tmp_path, **TINY, compress_ratios=[0, 4, 128, 4], qk_rope_head_dim=4)
    assert config.rope_factor == 1.0
    assert config.rope_original_max_position == config.max_position_embeddings


def test_transformers_nested_thetas_win(tmp_path: Path) -> None:
    nested = {
        "main": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
        "compress": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.25},
    }
    config = transformers_json(tmp_path, **TINY, compress_ratios=[0] * 4, qk_rope_head_dim=4, rope_parameters=nested)
    assert (config.rope_theta, config.compress_rope_theta) == (500.0, 700.0)


@pytest.mark.parametrize("preset", [v4_flash, v4_pro])
def test_transformers_takes_what_we_write(preset: Any, tmp_path: Path) -> None:
    config = transformers_json(tmp_path, **preset().to_json())
    backbone = preset().compress_ratios[: config.num_hidden_layers]  # it drops the draft entries
    assert config == replace(preset(), compress_ratios=backbone)


SAVED = {key: value for key, value in FLASH.items() if key != "compress_ratios"} | {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "compressed_sparse_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
}


def test_layer_types() -> None:
    assert AttentionConfig.from_json(SAVED).compress_ratios == (1, 4)
    with refused(ContractError, "layer_types entry must be one of 'sliding_attention'", "'full_attention'"):
        AttentionConfig.from_json(SAVED | {"layer_types": ["full_attention"] * 2})
    with refused(ContractError, "layer_types must be a list"):
        AttentionConfig.from_json(SAVED | {"layer_types": "sliding_attention"})
    with refused(ContractError, "compress_rates must be in config.json"):
        AttentionConfig.from_json({key: value for key, value in SAVED.items() if key != "compress_rates"})
    with refused(ContractError, "compressed_sparse_attention must be in compress_rates"):
        AttentionConfig.from_json(SAVED | {"compress_rates": {}})
    with refused(UnsupportedError, "compress_rates: V4 has 4 for compressed_sparse_attention, got 128"):
        AttentionConfig.from_json(SAVED | {"compress_rates": {"compressed_sparse_attention": 128}})
    with refused(ContractError, "compress_ratios must have an entry for each of 3 layers, got [1, 4]"):
        AttentionConfig.from_json(SAVED | {"num_hidden_layers": 3})


def test_nested_rope_parameters_refusals() -> None:
    compress = SHARED["rope_scaling"] | {"rope_theta": 160000}
    nested: dict[str, Any] = {"main": {"rope_theta": 10000}, "compress": compress}
    assert AttentionConfig.from_json(FLASH | {"rope_parameters": nested}) == v4_flash()
    with refused(UnsupportedError, "rope_parameters.main", "'default', got 'yarn'"):
        AttentionConfig.from_json(FLASH | {"rope_parameters": nested | {"main": compress | {"rope_type": "yarn"}}})
    with refused(ContractError, "rope_parameters.main must be a mapping"):
        AttentionConfig.from_json(FLASH | {"rope_parameters": {"compress": compress}})
    with refused(ContractError, "rope_theta must be in rope_parameters.main"):
        AttentionConfig.from_json(FLASH | {"rope_parameters": nested | {"main": {}}})
    with refused(ContractError, "rope_theta must be in rope_parameters.compress"):
        AttentionConfig.from_json(FLASH | {"rope_parameters": nested | {"compress": {"rope_type": "default"}}})


# --- parallel options ------------------------------------------------------------------------------------------------

ILLEGAL_ROWS_AND_KEYS = {("scattered", "replicate"), ("full", "gather_hidden")}
KEY_MODES = ("replicate", "gather_hidden", "gather_kv", "gather_compressed")
OUTPUT_MODES = ("all_to_all", "gather_weight", "replicated_weight")
rows_and_keys = st.sampled_from(
    [(rows, keys) for rows in ("full", "scattered") for keys in KEY_MODES if (rows, keys) not in ILLEGAL_ROWS_AND_KEYS]
)


@st.composite
def parallel_configs(draw: st.DrawFn) -> ParallelConfig:
    rows, key_mode = draw(rows_and_keys)
    profile = draw(st.sampled_from(["none", "none", "in_seq_split"]))
    splits = st.one_of(split_texts, st.sampled_from(["in-seq-split", "round-robin-split"]))
    return ParallelConfig(
        enable_dsa_cp=draw(st.booleans()),
        dsa_cp_kv_interleave_size=draw(st.integers(1, 512)),
        prefill_cp_mode=draw(splits if profile == "none" else st.sampled_from(["zigzag", "in-seq-split"])),
        cp_size=draw(st.integers(1, 64)),
        dsa_cp_rows=rows,
        dsa_cp_key_mode=key_mode,
        dsa_cp_output_mode=draw(st.sampled_from(OUTPUT_MODES)),
        dsa_cp_mixed=draw(st.sampled_from(["cp", "off"])),
        dsa_cp_profile=profile,
    )


OWN = set(ParallelConfig().to_json())
foreign_keys = st.text(max_size=8).filter(lambda key: key not in OWN)


def test_default_is_the_proposal() -> None:
    assert ParallelConfig().to_json() == {
        "enable_dsa_cp": False,
        "dsa_cp_kv_interleave_size": 1,
        "prefill_cp_mode": "contiguous",
        "cp_size": 1,
        "dsa_cp_rows": "full",
        "dsa_cp_key_mode": "replicate",
        "dsa_cp_output_mode": "all_to_all",
        "dsa_cp_mixed": "cp",
        "dsa_cp_profile": "none",
    }
    assert ParallelConfig.from_json({}) == ParallelConfig.from_flags([])[0] == ParallelConfig()


@given(parallel_configs(), st.dictionaries(foreign_keys, st.integers(), max_size=3))
def test_options_come_back_through_json(config: ParallelConfig, foreign: dict[str, int]) -> None:
    old = foreign | {"enable_dsa_cp": "to be replaced"}
    kept = dict(old)
    merged = config.append_json(old)
    assert old == kept
    assert {key: value for key, value in merged.items() if key not in OWN} == foreign
    assert ParallelConfig.from_json(json.loads(json.dumps(merged))) == config
    assert list(config.to_json()) == list(ParallelConfig().to_json())


foreign_words = st.sampled_from(["--port=80", "--model", "path", "-x", "--enable_dsa_cpu=1", "rows=full", "--=x", ""])


@given(parallel_configs(), st.lists(foreign_words, max_size=4), st.randoms(use_true_random=False), st.booleans())
def test_options_come_back_through_flags(config: ParallelConfig, foreign: list[str], random: Any, dashes: bool) -> None:
    own = config.to_flags()
    if dashes:
        own = [word.partition("=")[0].replace("_", "-") + "=" + word.partition("=")[2] for word in own]
    random.shuffle(own)
    places = sorted(random.randrange(len(foreign) + 1) for _ in own)
    words = list(foreign)
    for place, word in reversed(list(zip(places, own, strict=True))):
        words.insert(place, word)
    before = list(words)
    assert ParallelConfig.from_flags(words) == (config, foreign)
    assert words == before


@pytest.mark.parametrize(
    ("flags", "expected", "rest"),
    [
        (["--enable_dsa_cp=true"], {"enable_dsa_cp": True}, []),
        (["--enable-dsa-cp"], {"enable_dsa_cp": True}, []),
        (["--enable-dsa_cp", "no", "no"], {}, ["no"]),
        (["--enable_dsa_cp", "model"], {"enable_dsa_cp": True}, ["model"]),
        (["--enable_dsa_cp", "--enable_dsa_cp=0"], {}, []),
        (["--prefill_cp_mode=round-robin-split"], {"prefill_cp_mode": "round_robin"}, []),
        (["--prefill-cp-mode", "round_robin_page(64)"], {"prefill_cp_mode": "round_robin_page(64)"}, []),
        (
            ["--dsa-cp-profile=in_seq_split", "--prefill_cp_mode", "in-seq-split"],
            {"prefill_cp_mode": "zigzag", "dsa_cp_profile": "in_seq_split"},
            [],
        ),
        (["--cp_size=4", "--cp-size", "2"], {"cp_size": 2}, []),
        (["--model", "x", "--cp_size=2", "--", "--cp_size=9"], {"cp_size": 2}, ["--model", "x", "--", "--cp_size=9"]),
    ],
)
def test_flag_spellings(flags: list[str], expected: dict[str, Any], rest: list[str]) -> None:
    assert ParallelConfig.from_flags(flags) == (ParallelConfig(**expected), rest)


@pytest.mark.parametrize("text", ["true", "1", "yes", "TRUE", "false", "0", "no"])
def test_boolean_words(text: str) -> None:
    config, _ = ParallelConfig.from_flags([f"--enable_dsa_cp={text}"])
    assert config.enable_dsa_cp == (text.lower() in ("true", "1", "yes"))


@pytest.mark.parametrize(
    ("flag", "parts"),
    [
        ("--enable_dsa_cp=on", ["--enable_dsa_cp must be one of 'true', '1', 'yes', 'false', '0', 'no', got 'on'"]),
        ("--enable_dsa_cp=", ["--enable_dsa_cp must be one of", "got ''"]),
        ("--cp_size=2.0", ["--cp_size must be an int, got '2.0'"]),
        ("--cp_size=", ["--cp_size must be an int, got ''"]),
        ("--cp_size=0", ["cp_size must be an int >= 1, got 0"]),
        ("--cp_size", ["--cp_size must have a value, got none", "write --cp_size=..."]),
        ("--dsa_cp_rows=some", ["dsa_cp_rows must be one of 'full', 'scattered', got 'some'"]),
        ("--prefill_cp_mode=", ["prefill_cp_mode: split must be one of", "got ''"]),
    ],
)
def test_bad_flags(flag: str, parts: list[str]) -> None:
    for words in ([flag], [flag, "--port=80"]):
        with refused(ContractError, *parts):
            ParallelConfig.from_flags(words)


@pytest.mark.parametrize("flags", ["--enable_dsa_cp", ["--cp_size=2", 3], None])
def test_flags_must_be_words(flags: Any) -> None:
    with refused(ContractError, "flags must be a list of str"):
        ParallelConfig.from_flags(flags)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("enable_dsa_cp", "true", "enable_dsa_cp must be true or false, got str 'true'"),
        ("enable_dsa_cp", 1, "enable_dsa_cp must be true or false, got int 1"),
        ("enable_dsa_cp", None, "enable_dsa_cp must be true or false, got NoneType None"),
        ("dsa_cp_kv_interleave_size", 0, "dsa_cp_kv_interleave_size must be an int >= 1, got 0"),
        ("dsa_cp_kv_interleave_size", True, "dsa_cp_kv_interleave_size must be an int >= 1, got bool True"),
        ("cp_size", "2", "cp_size must be an int >= 1, got str '2'"),
        ("cp_size", 2.0, "cp_size must be an int >= 1, got float 2.0"),
        ("prefill_cp_mode", "head-tail", "prefill_cp_mode: split must be one of 'contiguous'"),
        ("prefill_cp_mode", 3, "prefill_cp_mode: split must be a str, got int 3"),
        ("dsa_cp_rows", "half", "dsa_cp_rows must be one of 'full', 'scattered', got 'half'"),
        ("dsa_cp_key_mode", None, "dsa_cp_key_mode must be one of 'replicate', 'gather_hidden'"),
        ("dsa_cp_output_mode", "a2a", "dsa_cp_output_mode must be one of 'all_to_all'"),
        ("dsa_cp_mixed", True, "dsa_cp_mixed must be one of 'cp', 'off', got True"),
        ("dsa_cp_profile", "in-seq-split", "dsa_cp_profile must be one of 'none', 'in_seq_split', got 'in-seq-split'"),
        ("dsa_cp_profile", None, "dsa_cp_profile must be one of 'none', 'in_seq_split', got None"),
    ],
)
def test_bad_options(key: str, value: Any, text: str) -> None:
    with refused(ContractError, text):
        ParallelConfig.from_json({key: value})


# --- the profile of the first zigzag mode ---------------------------------------------------------------------------

IN_SEQ_SPLIT = ParallelConfig(enable_dsa_cp=True, prefill_cp_mode="in-seq-split", dsa_cp_profile="in_seq_split")
FORCED = {"max_running_requests": 1, "kv_cache_dtype": "bfloat16", "moe_dense_tp_size": 1}


@pytest.mark.parametrize(("word", "name"), [("in-seq-split", "zigzag"), ("round-robin-split", "round_robin")])
def test_modes_as_sglang_writes_them(word: str, name: str) -> None:
    """Its two words, by constructor, file and command line, are stored under our names, and written so."""
    for config in (
        ParallelConfig(prefill_cp_mode=word),
        ParallelConfig.from_json({"prefill_cp_mode": word}),
        ParallelConfig.from_flags(["--prefill-cp-mode", word])[0],
    ):
        assert config == ParallelConfig(prefill_cp_mode=name)
        assert config.to_json()["prefill_cp_mode"] == name
        assert f"--prefill_cp_mode={name}" in config.to_flags()


def test_in_seq_split_forces_one_request_a_bfloat16_cache_and_whole_dense_layers() -> None:
    assert IN_SEQ_SPLIT.forced_settings() == FORCED
    assert replace(IN_SEQ_SPLIT, enable_dsa_cp=False, cp_size=4).forced_settings() == FORCED


@pytest.mark.parametrize("mode", ["in-seq-split", "round-robin-split", "contiguous", "round_robin_page(16)"])
def test_without_the_profile_nothing_is_forced(mode: str) -> None:
    """round-robin-split lifted the limits; here zigzag itself has none either."""
    config = ParallelConfig(enable_dsa_cp=True, prefill_cp_mode=mode)
    assert config.forced_settings() == {}
    config.check_settings({"max_running_requests": 32, "kv_cache_dtype": "fp8_e4m3", "moe_dense_tp_size": 8})


def test_without_context_parallelism_nothing_is_forced() -> None:
    off = replace(IN_SEQ_SPLIT, enable_dsa_cp=False)
    assert off.forced_settings() == {}
    off.check_settings({"max_running_requests": 32, "kv_cache_dtype": "fp8_e4m3", "moe_dense_tp_size": 8})


@pytest.mark.parametrize("backend", ["deepep", "none", None])
def test_the_backend_of_experts_is_left_to_the_engine(backend: str | None) -> None:
    """DeepEP was forced too; it is the one setting of the list that this profile does not have."""
    IN_SEQ_SPLIT.check_settings({"moe_a2a_backend": backend})
    assert not [key for key in IN_SEQ_SPLIT.forced_settings() if "backend" in key]


@pytest.mark.parametrize(
    ("key", "got"),
    [
        ("max_running_requests", 2),
        ("max_running_requests", 32),
        ("max_running_requests", 0),
        ("max_running_requests", True),
        ("max_running_requests", "1"),
        ("kv_cache_dtype", "fp8_e4m3"),
        ("kv_cache_dtype", "auto"),
        ("kv_cache_dtype", 1),
        ("moe_dense_tp_size", 8),
        ("moe_dense_tp_size", False),
    ],
)
def test_a_setting_that_contradicts_the_profile(key: str, got: object) -> None:
    text = (
        f"{key} must be {FORCED[key]!r} when dsa_cp_profile is 'in_seq_split', got {got!r}; "
        "prefill_cp_mode='round_robin' with dsa_cp_profile='none' has no such limits"
    )
    for settings_ in ({key: got}, {**FORCED, "port": 80, key: got}):
        with pytest.raises(UnsupportedError, match=f"^{re.escape(text)}$"):
            IN_SEQ_SPLIT.check_settings(settings_)
    way_out = ParallelConfig(enable_dsa_cp=True, prefill_cp_mode="round_robin", dsa_cp_profile="none")
    way_out.check_settings({key: got})


@pytest.mark.parametrize(
    "legal",
    [
        {},
        FORCED,
        {"port": 80, "chunked_prefill_size": 8192},
        {"kv_cache_dtype": "bf16"},
        {"max_running_requests": None, "moe_dense_tp_size": None, "kv_cache_dtype": None},
    ],
)
def test_settings_that_the_profile_can_live_with(legal: dict[str, Any]) -> None:
    before = dict(legal)
    IN_SEQ_SPLIT.check_settings(legal)
    assert legal == before
    IN_SEQ_SPLIT.check_settings({**legal, **IN_SEQ_SPLIT.forced_settings()})


@given(parallel_configs(), st.dictionaries(st.sampled_from([*FORCED, "port"]), st.integers(0, 40)))
def test_forced_settings_laid_over_any_others_pass(config: ParallelConfig, others: dict[str, Any]) -> None:
    forced = config.forced_settings()
    assert forced == (FORCED if config.dsa_cp_profile == "in_seq_split" and config.asks_for_cp else {})
    config.check_settings({**others, **forced})
    forced["max_running_requests"] = 7
    assert config.forced_settings() != forced, "every call gives a dict of its own"


def test_settings_must_be_a_mapping() -> None:
    for config in (IN_SEQ_SPLIT, ParallelConfig()):
        with refused(ContractError, "config must be a mapping (a JSON object), got list"):
            config.check_settings(["--max-running-requests=1"])  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [*SPLITS[:-1], "round_robin_page(16)", "round-robin-split", "in-seq-split"])
def test_the_profile_is_refused_with_any_other_split(mode: str) -> None:
    own = {"prefill_cp_mode": mode, "dsa_cp_profile": "in_seq_split"}
    name = str(split_rule(mode))
    if name == "zigzag":
        assert ParallelConfig(**own).dsa_cp_profile == "in_seq_split"
        return
    for make in (
        lambda: ParallelConfig(**own),
        lambda: ParallelConfig.from_json(own),
        lambda: ParallelConfig.from_flags([f"--{key}={value}" for key, value in own.items()]),
    ):
        with refused(UnsupportedError, "prefill_cp_mode must be 'zigzag' when dsa_cp_profile is", f"got {name!r};"):
            make()


@pytest.mark.parametrize(
    ("options", "asked"),
    [({}, False), ({"enable_dsa_cp": True}, True), ({"cp_size": 2}, True), ({"cp_size": 1}, False)],
)
def test_who_asks_for_context_parallelism(options: dict[str, Any], asked: bool) -> None:
    assert ParallelConfig(**options).asks_for_cp is asked


# --- what goes together ----------------------------------------------------------------------------------------------

PROPOSAL: dict[str, Any] = {
    "split": "contiguous",
    "rows": "full",
    "key_mode": "replicate",
    "output_mode": "all_to_all",
    "compress_ratio": 4,
    "cp_size": 2,
    "num_heads": 64,
    "o_groups": 8,
}


def legal(split: str, rows: str, key_mode: str, output_mode: str, ratio: int, cp_size: int) -> bool:
    """The tables of the design, one line each."""
    if rows == "scattered" and key_mode == "replicate":
        return False
    if rows == "full" and key_mode == "gather_hidden":
        return False
    if key_mode == "gather_compressed" and split == "round_robin" and ratio > 1:
        return False
    if key_mode == "gather_compressed" and split == "round_robin_page(16)" and ratio == 128:
        return False
    return output_mode != "all_to_all" or cp_size in (1, 2, 4, 8)


@pytest.mark.parametrize("split", [*SPLITS[:-1], "round_robin_page(16)", "round_robin_page(256)", "in-seq-split"])
@pytest.mark.parametrize("key_mode", KEY_MODES)
@pytest.mark.parametrize("rows", ["full", "scattered"])
def test_every_combination(split: str, rows: str, key_mode: str) -> None:
    for output_mode in OUTPUT_MODES:
        for ratio in (1, 4, 128):
            for cp_size in (1, 2, 3, 8, 16):
                own = {"split": split, "rows": rows, "key_mode": key_mode, "output_mode": output_mode}
                options = PROPOSAL | own | {"compress_ratio": ratio, "cp_size": cp_size}
                if legal(split, rows, key_mode, output_mode, ratio, cp_size):
                    check_combination(**options)
                else:
                    with pytest.raises(UnsupportedError):
                        check_combination(**options)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"rows": "scattered"},
            "key_mode must not be 'replicate' when rows is 'scattered', because no rank has all hidden rows, "
            "got 'replicate'; use key_mode='gather_hidden'",
        ),
        (
            {"key_mode": "gather_hidden"},
            "key_mode must not be 'gather_hidden' when rows is 'full', because there is nothing to gather, "
            "got 'gather_hidden'; use key_mode='replicate'",
        ),
        (
            {"key_mode": "gather_compressed", "split": "round-robin-split"},
            "split must be 'round_robin_page(n)' with n a multiple of compress_ratio 4, or contiguous or zigzag, "
            "when key_mode is 'gather_compressed', got 'round_robin'; "
            "use split='round_robin_page(4)' or key_mode='gather_kv'",
        ),
        (
            {"key_mode": "gather_compressed", "split": "round_robin_page(6)"},
            "split must be 'round_robin_page(n)' with n a multiple of compress_ratio 4, or contiguous or zigzag, "
            "when key_mode is 'gather_compressed', got 'round_robin_page(6)'; "
            "use split='round_robin_page(4)' or key_mode='gather_kv'",
        ),
        (
            {"cp_size": 16},
            "cp_size must divide num_heads 64 and o_groups 8 when output_mode is 'all_to_all', got 16; "
            "use output_mode='gather_weight' or 'replicated_weight'",
        ),
    ],
)
def test_combination_texts(change: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{re.escape(text)}$"):
        check_combination(**PROPOSAL | change)


@pytest.mark.parametrize(("config", "sizes"), [(v4_flash(), {1, 2, 4, 8}), (v4_pro(), {1, 2, 4, 8, 16})])
def test_all_to_all_sizes_of_the_models(config: AttentionConfig, sizes: set[int]) -> None:
    for cp_size in range(1, 129):
        options = PROPOSAL | {"cp_size": cp_size, "num_heads": config.num_heads, "o_groups": config.o_groups}
        if cp_size in sizes:
            check_combination(**options)
        else:
            with refused(UnsupportedError, "cp_size must divide", f"got {cp_size};"):
                check_combination(**options)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"split": "zig"}, "split must be one of"),
        ({"rows": "half"}, "rows must be one of 'full', 'scattered', got 'half'"),
        ({"key_mode": "a"}, "key_mode must be one of"),
        ({"output_mode": "b"}, "output_mode must be one of"),
        ({"compress_ratio": 0}, "compress_ratio must be an int >= 1, got 0"),
        ({"cp_size": 0}, "cp_size must be an int >= 1, got 0"),
        ({"num_heads": 0}, "num_heads must be an int >= 1, got 0"),
        ({"o_groups": None}, "o_groups must be an int >= 1, got NoneType None"),
    ],
)
def test_combination_of_bad_values(change: dict[str, Any], text: str) -> None:
    with refused(ContractError, text):
        check_combination(**PROPOSAL | change)


@pytest.mark.parametrize(("rows", "key_mode"), sorted(ILLEGAL_ROWS_AND_KEYS))
def test_options_refuse_rows_and_keys_at_construction(rows: str, key_mode: str) -> None:
    with refused(UnsupportedError, "key_mode must not be", key_mode, rows, "use key_mode="):
        ParallelConfig(dsa_cp_rows=rows, dsa_cp_key_mode=key_mode)


# --- the grid of ranks -----------------------------------------------------------------------------------------------

sizes = st.integers(1, 5)


def whole_grid(world_size: int, **options: Any) -> list[Topology]:
    return [topology(world_size, rank=rank, **options) for rank in range(world_size)]


def check_group_laws(grid: list[Topology]) -> None:
    world = list(range(len(grid)))
    for axis in ("dp", "cp", "tp"):
        groups = [getattr(one, f"{axis}_group") for one in grid]
        # The groups cut the world: put side by side, each rank stands in exactly one of them.
        assert sorted(rank for group in set(groups) for rank in group) == world
        for one, group in zip(grid, groups, strict=True):
            assert list(group) == sorted(group)
            assert len(group) == getattr(one, f"{axis}_size")
            assert group[getattr(one, f"{axis}_rank")] == one.rank
            for other in group:
                assert groups[other] == group


@given(dp=sizes, cp=sizes, tp=sizes, named=st.booleans())
def test_switch_off(dp: int, cp: int, tp: int, named: bool) -> None:
    grid = whole_grid(dp * cp * tp, dp_size=dp, cp_size=cp, tp_size=tp if named else None)
    check_group_laws(grid)
    for one in grid:
        assert one.rank == one.dp_rank * (cp * tp) + one.cp_rank * tp + one.tp_rank
        assert (one.dp_size, one.cp_size, one.tp_size) == (dp, cp, tp)
        assert one.cp_active == (cp > 1)
        for axis, kept in (("cp", ("dp", "tp")), ("tp", ("dp", "cp")), ("dp", ("cp", "tp"))):
            for other in getattr(one, f"{axis}_group"):
                for name in kept:
                    assert getattr(grid[other], f"{name}_rank") == getattr(one, f"{name}_rank")


@given(dp=sizes, tp=sizes, named=st.booleans(), configured=st.booleans())
def test_switch_on_takes_cp_from_tp(dp: int, tp: int, named: bool, configured: bool) -> None:
    options = {"dp_size": dp, "tp_size": tp if named else None, "cp_size": tp if configured else 1}
    grid = whole_grid(dp * tp, enable_dsa_cp=True, **options)
    check_group_laws(grid)
    off = whole_grid(dp * tp, dp_size=dp)
    for one, without in zip(grid, off, strict=True):
        assert (one.cp_size, one.cp_rank, one.cp_group) == (one.tp_size, one.tp_rank, one.tp_group)
        assert one.rank == one.dp_rank * tp + one.tp_rank
        assert one.cp_active == (tp > 1)
        # Turning the switch on moves nobody in the other two axes.
        assert replace(one, cp_size=1, cp_rank=0, cp_group=(one.rank,)) == without


def test_topology_by_hand() -> None:
    one = topology(12, rank=9, dp_size=2, cp_size=3)
    assert (one.dp_rank, one.cp_rank, one.tp_rank, one.tp_size) == (1, 1, 1, 2)
    assert (one.dp_group, one.cp_group, one.tp_group) == ((3, 9), (7, 9, 11), (8, 9))
    one = topology(8, rank=6, dp_size=2, enable_dsa_cp=True)
    assert (one.dp_group, one.cp_group, one.tp_group) == ((2, 6), (4, 5, 6, 7), (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        # Known fault: tokens cut by cp_size 2, gathered over a TP group of 4.
        ({"world_size": 4, "cp_size": 2, "enable_dsa_cp": True}, ["cp_size must be 1 or the TP size 4", "got 2",
                                                                  "independent cp_size 2", "group of 4"]),
        ({"world_size": 8, "cp_size": 2, "tp_size": 4, "enable_dsa_cp": True}, ["cp_size must be 1", "group of 4"]),
        ({"world_size": 16, "cp_size": 4, "tp_size": 4, "enable_dsa_cp": True},
         ["tp_size must be world_size 16 / (dp_size = 1) = 16, got 4", "no ranks of its own"]),
        ({"world_size": 6, "dp_size": 4}, ["world_size must be a multiple of dp_size * cp_size = 4, got 6"]),
        ({"world_size": 6, "cp_size": 4}, ["world_size must be a multiple of dp_size * cp_size = 4, got 6"]),
        ({"world_size": 6, "dp_size": 4, "enable_dsa_cp": True}, ["world_size must be a multiple of dp_size = 4"]),
        ({"world_size": 8, "cp_size": 2, "tp_size": 2}, ["tp_size must be world_size 8 / (dp_size * cp_size = 2) = 4"]),
        ({"world_size": 4, "rank": 4}, ["rank must be below world_size 4, got 4"]),
        ({"world_size": 4, "rank": -1}, ["rank must be an int >= 0, got -1"]),
        ({"world_size": 0}, ["world_size must be an int >= 1, got 0"]),
        ({"world_size": 4, "dp_size": 0}, ["dp_size must be an int >= 1, got 0"]),
        ({"world_size": 4, "cp_size": "2"}, ["cp_size must be an int >= 1, got str '2'"]),
        ({"world_size": 4, "tp_size": 0}, ["tp_size must be an int >= 1, got 0"]),
        ({"world_size": 4, "enable_dsa_cp": 1}, ["enable_dsa_cp must be true or false, got int 1"]),
    ],
)  # fmt: skip
def test_topology_refusals(options: dict[str, Any], parts: list[str]) -> None:
    with refused(ContractError, *parts):
        topology(**{"rank": 0} | options)


# --- the worker's gate -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("supported", [False, True])
@pytest.mark.parametrize("cp_size", [1, 2, 8])
def test_gate_needs_all_three(enabled: bool, supported: bool, cp_size: int) -> None:
    gate = model_side_partition(enable_dsa_cp=enabled, cp_size=cp_size, supports_model_partition=supported)
    assert gate is (enabled and supported and cp_size > 1)


@given(dp=sizes, tp=sizes)
def test_gate_opens_on_the_derived_size(dp: int, tp: int) -> None:
    """The launcher's configured size stays 1, so only the derived one can open the gate."""
    config = ParallelConfig(enable_dsa_cp=True)
    grid = topology(dp * tp, rank=0, dp_size=dp, cp_size=config.cp_size, enable_dsa_cp=config.enable_dsa_cp)
    gates = [
        model_side_partition(enable_dsa_cp=True, cp_size=size, supports_model_partition=True)
        for size in (grid.cp_size, config.cp_size)
    ]
    assert gates == [tp > 1, False]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"enable_dsa_cp": "true"}, "enable_dsa_cp must be true or false, got str 'true'"),
        ({"supports_model_partition": None}, "supports_model_partition must be true or false, got NoneType None"),
        ({"cp_size": 0}, "cp_size must be an int >= 1, got 0"),
        ({"enable_dsa_cp": False, "supports_model_partition": False, "cp_size": 0}, "cp_size must be an int >= 1"),
    ],
)
def test_gate_refusals(change: dict[str, Any], text: str) -> None:
    with refused(ContractError, text):
        model_side_partition(**{"enable_dsa_cp": True, "cp_size": 2, "supports_model_partition": True} | change)
