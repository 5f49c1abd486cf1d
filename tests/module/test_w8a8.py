"""The module with int8 projections: the numbers of a plain W8A8 layer, one code of a row for all that share it, ranks.

Codes and products are exact, whatever summed the floats before them: float64 sums that differ in their last bits would
have to fall on two sides of a rounding to float32 to make another code, one time in 10**8. So the module in float64
equals the plain layer to rounding. Where ranks project their own groups, each codes those alone, by their own largest
value, as the operators do: another result than that of whole rows, and compared with its own plain layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dsacp_npu import backend
from dsacp_npu.backend import Backend
from dsacp_npu.distributed import Ranks
from dsacp_npu.parallel import parallel_of
from dsacp_npu.quant import QuantizedWeight, quantized_weight
from dsacp_npu.step import step_metadata
from dsacp_ref import compressor, quant, rope
from dsacp_ref.layer import LayerWeights, layer_frequencies
from tests import plain
from tests.compare import assert_double, assert_same
from tests.distributed.pool import run
from tests.layer_strategies import SMALL
from tests.maths_strategies import int32
from tests.module.worlds import (
    KINDS,
    Model,
    Told,
    caches_of,
    due,
    layers_of,
    model_of,
    tell,
)
from tests.plain_layer import normed

WIDE = replace(SMALL, o_groups=4, hidden_size=24, q_lora_rank=16, head_dim=12, o_lora_rank=8)
LENGTHS = {"a": 30, "b": 12, "c": 12}
# No pad row with two ranks: every split step has an even number of tokens.
STEPS = [{"a": 16, "b": 4}, {"c": 10, "a": 2, "b": 8}, {"a": 11, "c": 1}, {"a": 1, "c": 1}]
Modes = Mapping[str, Any]


def coded_product(rows: quant.QuantizedRows, weight: np.ndarray) -> np.ndarray:
    """Codes times a matrix that is coded here."""
    return quant.quant_matmul(rows, quant.quantized_weight(weight), dtype="float64")


def entries_of(x: np.ndarray, part: compressor.CompressorWeights, frequencies: Sequence[float]) -> np.ndarray:
    """All entries of one request that begins at 0."""
    loc, nothing, state = int32([0, len(x)]), int32([0]), compressor.empty_state(part, 1)
    done = compressor.compress(x, part, loc, nothing, state, frequencies, eps=WIDE.rms_norm_eps)
    return done.compressed.entries[: len(x) // len(part.ape)]


def w8a8_layer(x: np.ndarray, weights: LayerWeights, model: Model, layer: int, shares: int) -> np.ndarray:
    """[tokens, hidden] of one request: textbook code around the reference's codec, pooling and rotation.

    ``shares``: ranks that project their own groups, each coding no others; 1 codes whole rows.
    """
    ratio, config, eps = KINDS[layer].ratio, model.config, model.config.rms_norm_eps
    frequencies = layer_frequencies(config, ratio)
    table = rope.rope_table(np.arange(len(x), dtype=np.int32), frequencies)
    rows = quant.quantized_rows(x)
    latent = quant.rms_norm_quantized(coded_product(rows, weights.wq_a), weights.q_norm, eps)
    heads = coded_product(latent, weights.wq_b).reshape(len(x), config.num_heads, config.head_dim)
    q = rope.apply_rope(normed(heads, eps), *table)
    kv = rope.apply_rope(normed(coded_product(rows, weights.wkv), eps) * weights.kv_norm, *table)
    entries = entries_of(x, weights.compressor, frequencies) if weights.compressor else kv[:0]
    chosen = [np.arange(min((p + 1) // ratio, len(entries))) for p in range(len(x))]
    if weights.indexer:
        index_q = coded_product(latent, weights.indexer.wq_b).reshape(len(x), config.index_n_heads, -1)
        gains = x @ weights.indexer.weights_proj.T  # a factor that all share changes no choice
        keys = entries_of(x, weights.indexer.compressor, frequencies)
        scores = plain.index_scores(rope.apply_rope(index_q, *table), gains, keys)
        best = [np.argsort(-row[: len(seen)], kind="stable") for row, seen in zip(scores, chosen, strict=True)]
        chosen = [np.sort(order[: config.index_topk]) for order in best]
    out = np.zeros_like(q)
    for p, query in enumerate(q):
        seen = np.concatenate([kv[max(0, p - config.window_size + 1) : p + 1], entries[chosen[p]]])
        out[p], _ = plain.attention(query, seen, weights.attn_sink, 1 / np.sqrt(config.head_dim))
    groups = rope.apply_inverse_rope(out, *table).reshape(len(x), config.o_groups, -1)
    low = np.einsum("tgw,glw->tgl", groups, weights.wo_a).reshape(len(x), -1)
    coded = quant.quantized_weight(weights.wo_b)
    output = np.zeros((len(x), len(weights.wo_b)))
    for columns in np.split(np.arange(low.shape[1]), shares):
        part = quant.QuantizedWeight(np.ascontiguousarray(coded.values[:, columns]), coded.scales)
        output += quant.quant_matmul(quant.quantized_rows(low[:, columns]), part, dtype="float64")
    return output


def plain_rows(model: Model, shares: int) -> list[list[np.ndarray]]:
    """Every step's rows by every layer, as `tests.module.worlds.due`, of the plain W8A8 layer."""
    whole = [
        {name: w8a8_layer(x, weights, model, i, shares) for name, x in model.x.items()}
        for i, weights in enumerate(model.weights)
    ]
    done, rows = dict.fromkeys(model.x, 0), []
    for new_tokens in STEPS:
        parts = [[layer[name][done[name] : done[name] + n] for name, n in new_tokens.items()] for layer in whole]
        rows.append([np.concatenate(part) for part in parts])
        for name, count in new_tokens.items():
            done[name] += count
    return rows


def assert_rows(story: Sequence[Told], wanted: Sequence[list[list[np.ndarray]]], name: str = "") -> None:
    """Every step's rows are those of the plain layer that it is compared with; ``wanted`` has one for each step."""
    for i, (step, rows) in enumerate(zip(story, wanted, strict=True)):
        assert len(step.tokens), name
        for layer, (mine, exact) in enumerate(zip(step.outputs, rows[i], strict=True)):
            assert_double(mine, exact[step.tokens], f"{name} step {i} layer {layer}")


def model_for_codes(seed: int = 0) -> Model:
    """Wide enough rows that codes round."""
    return model_of(seed, LENGTHS, WIDE)


def test_one_device_equals_the_plain_layer() -> None:
    model = model_for_codes()
    story = tell(model, layers_of(model, w8a8=True), caches_of(model), STEPS)
    assert_rows(story, [plain_rows(model, 1)] * len(STEPS))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_error_of_int8_is_that_of_the_plain_layer(dtype: str) -> None:
    """Against the float definition, of window-only and all-entries layers: no choice of entries that could flip.

    Twice the plain layer's own error, and the rounding of what a short float cannot hold, measured without int8.
    """
    model = model_for_codes(1)
    exact, coded = due(model, STEPS), plain_rows(model, 1)
    short = tell(model, layers_of(model, dtype=dtype), caches_of(model, dtype=dtype), STEPS)
    story = tell(model, layers_of(model, dtype=dtype, w8a8=True), caches_of(model, dtype=dtype), STEPS)
    for layer in (0, 2):
        wrong, int8, rounding = (
            np.linalg.norm(np.concatenate([rows[layer] - want[layer] for rows, want in zip(found, exact, strict=True)]))
            for found in ([step.outputs for step in story], coded, [step.outputs for step in short])
        )
        assert 0 < wrong <= 2 * (int8 + rounding), f"layer {layer}: {wrong}, int8 {int8}, {dtype} {rounding}"


# --- one code of a row for all that share it ---


@pytest.mark.parametrize("padding", [0, 3])
def test_a_row_is_coded_once(padding: int) -> None:
    """x for wq_a and wkv, the latent (with its norm) for wq_b and the indexer, and what wo_b projects: no more."""
    model, calls = model_for_codes(2), Counter[str]()
    functions = dict(backend.get("torch").functions)

    def counted(name: str) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return functions[name](*args, **kwargs)

        return counting

    names = ("quantized_rows", "rms_norm_quantized", "quant_matmul")
    counting = Backend("torch", {**functions, **{name: counted(name) for name in names}})
    layers, caches = layers_of(model, backend=counting, w8a8=True), caches_of(model)
    for new_tokens in STEPS:
        for name in new_tokens.keys() - set(caches.requests):
            caches.open(name)
        count = sum(new_tokens.values()) + padding
        step = step_metadata(layers, caches, new_tokens, num_input_tokens=count)
        for i, products in enumerate((4, 5, 4)):
            calls.clear()
            layers[i](torch.randn(count, model.config.hidden_size, dtype=torch.float64), step, caches[i])
            assert calls == {"quantized_rows": 2, "rms_norm_quantized": 1, "quant_matmul": products}, i


# --- over ranks ---


ON = {"enable_dsa_cp": True}
# What each output mode codes in a step that splits tokens; a step by heads always codes a rank's own groups.
WHOLE_ROWS = {"all_to_all": False, "gather_weight": True, "replicated_weight": True}


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_over_ranks_each_mode_equals_its_plain_layer() -> None:
    """Split steps and decode by heads: rows that carry all groups are coded whole, others by the rank's own groups."""
    model = model_for_codes(3)
    rows = {shares: plain_rows(model, shares) for shares in (1, 2)}
    assert np.abs(rows[1][0][0] - rows[2][0][0]).max() > 1e-4, "coding own groups alone makes a difference"
    ways = [
        {**ON, "dsa_cp_output_mode": output, "dsa_cp_rows": kept, "dsa_cp_key_mode": keys, "prefill_cp_mode": split}
        for output in WHOLE_ROWS
        for kept, keys, split in (
            ("full", "replicate", "zigzag"),
            ("scattered", "gather_hidden", "contiguous"),
            ("scattered", "gather_compressed", "contiguous"),
        )
    ]
    for way, ranks in zip(ways, told_by(model, ways, {"w8a8": True}), strict=True):
        wanted = [rows[1 if WHOLE_ROWS[way["dsa_cp_output_mode"]] else 2]] * 3 + [rows[2]]
        for story in ranks:
            assert [step.splits for step in story] == [True, True, True, False], way
            assert_rows(story, wanted, str(way))


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_pad_rows_may_hold_anything() -> None:
    """They are NaN here, which has no code: a CPU refused them, on one rank while the others waited for it."""
    model = model_for_codes(6)
    padded = {"padding": 3}
    story = tell(model, layers_of(model, w8a8=True), caches_of(model), STEPS, **padded)
    rows = plain_rows(model, 1)
    for step, wanted in zip(story, rows, strict=True):
        for mine, exact in zip(step.outputs, wanted, strict=True):
            assert_double(mine[: len(exact)], exact)
            assert not mine[len(exact) :].any()
    ways = [
        {**ON, "dsa_cp_output_mode": "gather_weight", "dsa_cp_rows": "scattered", "dsa_cp_key_mode": keys}
        for keys in ("gather_hidden", "gather_kv")
    ]
    for way, ranks in zip(ways, told_by(model, ways, {"w8a8": True}, padded), strict=True):
        for split, wanted in zip(zip(*ranks, strict=True), rows[:3], strict=False):
            for step in split:
                assert step.splits
                real = (step.tokens >= 0) & (step.tokens < len(wanted[0]))
                for mine, exact in zip(step.outputs, wanted, strict=True):
                    assert_double(mine[real], exact[step.tokens[real]], str(way))
                    assert not mine[~real].any()


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_steps_by_heads_are_bitwise_what_a_module_with_the_switch_off_gives() -> None:
    model = model_for_codes(4)
    by_heads = {"decode_query_len": 100}  # so that even chunks count as decode
    for output in WHOLE_ROWS:
        ways = [{**ON, "dsa_cp_output_mode": output, "dsa_cp_mixed": "off"}, {}]
        for dtype in ("float64", "bfloat16"):
            switched, off = told_by(model, ways, {"w8a8": True, "dtype": dtype}, by_heads)
            for mine, theirs in zip(switched, off, strict=True):
                assert [step.splits for step in mine] == [True, False, False, False]
                for got, want in zip(mine[1:], theirs[1:], strict=True):
                    assert_same(got.outputs, want.outputs, f"{output} {dtype}")


def told_by(model: Model, ways: Sequence[Modes], built: Modes, telling: Modes | None = None) -> list[list[list[Told]]]:
    """What two ranks told, way by way."""
    stories = [(way, STEPS, built, telling or {}) for way in ways]
    found = run(2, "tests.module.work:told", [(model, stories)] * 2, timeout=300)
    return [[rank[i] for rank in found] for i in range(len(stories))]


@pytest.mark.parametrize("output", sorted(WHOLE_ROWS))
def test_what_a_rank_keeps_of_int8_weights(output: str) -> None:
    """With the switch on codes and scales of all heads on every rank; of wo_b its columns, with every channel's scale
    as the whole matrix has it."""
    model = model_for_codes(5)
    wq_b, wo_b = (quantized_weight(torch.tensor(getattr(model.weights[0], name))) for name in ("wq_b", "wo_b"))
    heads, columns = (size // 2 for size in (len(wq_b.values), wo_b.values.shape[1]))
    for rank in range(2):
        own_heads, own = (slice(rank * size, (rank + 1) * size) for size in (heads, columns))
        on, off = (
            layers_of(model, parallel_of(options, tp=Ranks(None, 2, rank)), w8a8=True)[0].kept_weights()
            for options in ({**ON, "dsa_cp_output_mode": output}, {})
        )
        assert_same(on.wq_b, wq_b)
        assert_same(off.wq_b, QuantizedWeight(wq_b.values[own_heads], wq_b.scales[own_heads]))
        kept = slice(None) if output == "replicated_weight" else own
        assert_same(on.wo_b, QuantizedWeight(wo_b.values[:, kept], wo_b.scales))
        assert_same(off.wo_b, QuantizedWeight(wo_b.values[:, own], wo_b.scales))
