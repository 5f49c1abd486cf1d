"""The bridge to transformers: it agrees with the slow oracle, and it feeds the model the way the model feeds itself."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace

import numpy as np
import pytest

from dsacp_npu.commands import outside
from dsacp_ref.config import AttentionConfig
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.oracles import layer as oracle
from tests.oracles import rope

# float32 noise at an output scale of 4 to 7 is below 1e-5; the weakest wrong detail that we know of moves 2e-3.
NOISE = 2e-5


def random_rows(num_tokens: int, config: AttentionConfig) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((num_tokens, config.hidden_size), dtype=np.float32)


def as_sets(selections: np.ndarray) -> list[set[int]]:
    return [set(row) - {-1} for row in selections.tolist()]


def oracle_config(config: AttentionConfig, ratio: int) -> dict[str, object]:
    yarn = {
        "factor": config.rope_factor,
        "beta_fast": config.rope_beta_fast,
        "beta_slow": config.rope_beta_slow,
        "original": config.rope_original_max_position,
    }
    theta = config.rope_theta if ratio == 1 else config.compress_rope_theta
    freqs = rope.frequencies(theta, config.rope_head_dim, None if ratio == 1 else yarn)
    return asdict(config) | {"eps": config.rms_norm_eps, "freqs": freqs}


@pytest.mark.parametrize(
    "size, layer_idx, num_tokens", [("tiny", 0, 60), ("tiny", 1, 60), ("tiny", 2, 140), ("big", 1, 40)]
)
def test_block_agrees_with_the_oracle(size: str, layer_idx: int, num_tokens: int) -> None:
    # few keys and a short window, so that both edges and the choice of entries are passed many times
    config = replace(outside.SIZES[size], window_size=9, index_topk=3)
    ratio = config.compress_ratio(layer_idx)
    model = outside.build_model(config, seed=3)
    run = outside.block_output(model, layer_idx, random_rows(num_tokens, config))
    weights = outside.layer_weights(model, layer_idx)
    outputs, selections = oracle.layer(run.inputs, weights, oracle_config(config, ratio), ratio)
    assert np.abs(run.outputs - np.array(outputs)).max() < NOISE
    if ratio == 4:
        assert run.selections is not None
        assert as_sets(run.selections) == selections
        assert run.selections.shape == (num_tokens, config.index_topk)
    else:
        assert run.selections is None


@pytest.mark.parametrize("plan", list(outside.CHUNK_PLANS))
def test_block_alone_is_the_block_in_the_model_and_chunks_change_nothing(plan: str) -> None:
    config = outside.SIZES["tiny"]
    model = outside.build_model(config, seed=4)
    chunks = outside.chunk_lengths(plan, 530)
    for layer_idx, inside in enumerate(outside.model_blocks(model, random_rows(530, config), chunks)):
        alone = outside.block_output(model, layer_idx, inside.inputs, chunks)
        assert np.array_equal(alone.inputs, inside.inputs)
        assert np.array_equal(alone.outputs, inside.outputs)
        one_shot = outside.block_output(model, layer_idx, inside.inputs)
        assert np.abs(one_shot.outputs - inside.outputs).max() < NOISE
        if inside.selections is not None:
            assert np.array_equal(alone.selections, inside.selections)
            assert as_sets(one_shot.selections) == as_sets(inside.selections)


def test_ours_and_theirs_read_the_same_config() -> None:
    for config in outside.SIZES.values():
        assert AttentionConfig.from_json(outside.build_model(config).config.to_dict()) == config


def test_their_frequencies_are_ours_but_for_the_last_bits() -> None:
    for config in outside.SIZES.values():
        rotary = outside.build_model(config).rotary_emb
        for theirs, ratio in ((rotary.main_inv_freq, 1), (rotary.compress_inv_freq, 4)):
            ours = np.array(oracle_config(config, ratio)["freqs"])
            # theirs are computed in float32 throughout, ours in float64 and rounded once
            assert (np.abs(theirs.numpy() - ours) <= 2 * np.spacing(ours)).all()


def test_weights_follow_from_the_seed_and_leave_the_generator_alone() -> None:
    import torch

    state = torch.random.get_rng_state()
    first, again, other = (
        outside.layer_weights(outside.build_model(outside.SIZES["tiny"], seed=s), 1) for s in (5, 5, 6)
    )
    assert torch.equal(state, torch.random.get_rng_state())
    assert len(first) == len(outside.WEIGHTS)
    for name, weight in first.items():
        assert weight.dtype == np.float32
        assert np.array_equal(weight, again[name])
        assert not np.array_equal(weight, other[name])


@pytest.mark.parametrize("plan", list(outside.CHUNK_PLANS))
def test_chunk_lengths_cover_any_request(plan: str) -> None:
    for num_tokens in (1, 2, 8, 9, 10, 200, 464, 465, 700):
        lengths = outside.chunk_lengths(plan, num_tokens)
        assert sum(lengths) == num_tokens
        assert min(lengths) >= 1


def test_what_the_model_cannot_take_is_refused() -> None:
    tiny = outside.SIZES["tiny"]
    for refused in (
        replace(tiny, compress_ratios=(1, 4, 16)),
        replace(tiny, window_size=1),
        replace(tiny, head_dim=49, rope_head_dim=8),  # 8 / 49 * 49 < 8
    ):
        with pytest.raises(UnsupportedError, match="transformers"):
            outside.build_model(refused)
    model = outside.build_model(tiny)
    for chunks in ((3, 4), (8, 0), (9, -1)):
        with pytest.raises(ContractError, match="chunks must"):
            outside.block_output(model, 0, random_rows(8, tiny), chunks)
    with pytest.raises(ContractError, match="the number of rows must be an int >= 1"):
        outside.model_blocks(model, random_rows(0, tiny))
    with pytest.raises(ContractError, match="layer_idx must"):
        outside.layer_weights(model, 3)


def test_missing_or_old_transformers_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", "5.9.1")
    with pytest.raises(ImportError, match=r"got 5\.9\.1; pip install transformers==5\.24\.0"):
        outside.build_model(outside.SIZES["tiny"])
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install transformers==5\.24\.0"):
        outside.build_model(outside.SIZES["tiny"])
