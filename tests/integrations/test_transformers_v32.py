"""transformers' DeepSeek-V3.2 with our attention: the same logits, the same tokens, the same model afterwards.

All comparisons stand on there being no tie among index scores at the border of a choice: with 64 index heads no score
is exactly 0. Where scores tie, transformers takes what `topk` gives, and we the earliest token.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dsacp_npu.commands import transformers_demo as demo
from dsacp_npu.integrations.transformers import disable, enable
from dsacp_npu.mla_caches import MLACaches
from dsacp_npu.mla_module import MLAttention
from dsacp_npu.parallel import parallel_of
from dsacp_ref.config import ParallelConfig
from dsacp_ref.mla_config import MLAConfig
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.compare import assert_same_array, assert_within_budget
from tests.distributed.pool import run
from tests.integrations import worlds
from tests.integrations.v32_work import CONFIGS, EVENT, fresh_model, packed_logits, reloaded, untouched

PROMPTS = {"a": worlds.prompt(300, 1), "b": worlds.prompt(7, 2), "c": worlds.prompt(131, 3)}
# Prefill of several requests, chunks, a decode among prefills, and decodes alone.
STEPS: list[EVENT] = [
    {"a": 150, "b": 3},
    {"c": 1, "a": 148, "b": 1},
    {"b": 1, "c": 128},
    {"a": 1, "b": 1, "c": 1},
    {"a": 1, "b": 1, "c": 1},
]
ON: dict[str, object] = {"enable_dsa_cp": True, "dsa_cp_key_mode": "gather_kv"}
ON |= {"dsa_cp_output_mode": "replicated_weight"}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def tiny() -> Any:
    return fresh_model("tiny")


def assert_as_untouched(logits: dict[str, torch.Tensor], prompts: dict[str, torch.Tensor] = PROMPTS) -> None:
    """Within the error that transformers' own float32 makes, in one go or in chunks."""
    model = untouched("tiny")
    for name, ids in prompts.items():
        plain = [worlds.logits_of(model, ids, chunks) for chunks in (None, [1, 2, ids.shape[1] - 3])]
        assert_within_budget(logits[name], worlds.exact_logits_of(model, ids), plain, f"logits of {name}")


def refusal(call: Any, *args: Any, **kwargs: Any) -> str:
    """The text of a refusal, with its type."""
    with pytest.raises((ContractError, UnsupportedError)) as caught:
        call(*args, **kwargs)
    return f"{caught.type.__name__}: {caught.value}"


# --- the same logits ---


def test_the_oracle_is_float64_throughout() -> None:
    model = worlds.widened(untouched("tiny"))
    with worlds.InDouble():
        whole, chunked = (worlds.logits_of(model, PROMPTS["c"], chunks) for chunks in (None, [5, 126]))
    assert whole.dtype == torch.float64
    assert (whole - chunked).abs().max() < 1e-11


def test_our_config_is_read_from_theirs() -> None:
    for size, config in CONFIGS.items():
        assert MLAConfig.from_json(untouched(size).config.to_dict()) == config


def test_choices_are_real_here(tiny: Any) -> None:
    """Of 300 tokens 24 are chosen; with all of them the logits are others."""
    every = fresh_model("tiny")
    for layer in every.model.layers:
        layer.self_attn.indexer.index_topk = 300
    few, all_tokens = (worlds.logits_of(model, PROMPTS["a"]) for model in (tiny, every))
    assert (few - all_tokens)[:24].abs().max() < 1e-3 < 0.1 < (few - all_tokens).abs().max()


def test_packed_requests_have_the_logits_of_each_alone(tiny: Any) -> None:
    assert_as_untouched(packed_logits(tiny, None, STEPS, PROMPTS))


def test_a_request_in_one_step_and_in_chunks(tiny: Any) -> None:
    ids = {"c": PROMPTS["c"]}
    for chunks in ([131], [100, 1, 30], [1] * 3 + [128]):
        assert_as_untouched(packed_logits(tiny, None, [{"c": chunk} for chunk in chunks], ids), ids)


def test_forks_and_tokens_taken_back(tiny: Any) -> None:
    """At any length: in the middle of a block and at its end."""
    prompts = {name: worlds.prompt(60, seed) for name, seed in (("a", 11), ("b", 12), ("c", 13))}
    prompts["b"][:, :37], prompts["c"][:, :32] = prompts["a"][:, :37], prompts["a"][:, :32]
    events: list[EVENT] = [{"a": 50}, ("fork", "b", "a", 37), ("fork", "c", "a", 32), {"b": 20, "c": 1}]
    events += [("roll_back", "a", 41), ("roll_back", "b", 40), {"c": 27, "a": 19, "b": 20}]
    options = {"num_tokens": 200}
    assert_as_untouched(packed_logits(tiny, None, events, prompts, **options), prompts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_short_model_is_within_its_own_error(dtype: torch.dtype) -> None:
    """Its norms are short too; in float16 transformers keeps what weighs the index heads in float32."""
    model = fresh_model("tiny", dtype)
    block = model.model.layers[0].self_attn
    assert block.q_a_layernorm.weight.dtype == dtype
    wide = torch.float32 if dtype == torch.float16 else dtype
    assert block.indexer.weights_proj.weight.dtype == wide
    block.indexer.weights_proj.float()  # either is taken
    ids = worlds.prompt(20, 4)  # fewer tokens than index_topk: a choice in short floats is another choice
    plain = [worlds.logits_of(model, ids, chunks) for chunks in (None, [1, 2, 17])]
    exact = worlds.exact_logits_of(model, ids)
    assert_within_budget(packed_logits(model, None, [{"x": 20}], {"x": ids})["x"], exact, plain)


def test_norms_of_the_attention_have_an_eps_of_their_own() -> None:
    """transformers gives them 1e-6 whatever the config says, which counts around the attention alone."""
    model = demo.build_mla_causal_model(replace(CONFIGS["wide"], rms_norm_eps=0.1), vocab_size=worlds.VOCAB, seed=1)
    ids = worlds.prompt(40, 5)
    plain = [worlds.logits_of(model, ids, chunks) for chunks in (None, [1, 39])]
    exact = worlds.exact_logits_of(model, ids)
    assert_within_budget(packed_logits(model, None, [{"x": 40}], {"x": ids})["x"], exact, plain)


@pytest.mark.parametrize("codes", [{"fp8": True}, {"int8_index_cache": True}], ids=str)
def test_coded_caches_run(codes: dict[str, bool]) -> None:
    """What they lose is theirs; a request in chunks says what it says in one go, and a code is not nothing."""
    ids = {"c": PROMPTS["c"]}
    whole, chunked = (
        packed_logits(fresh_model("wide"), None, steps, ids, **codes)["c"]
        for steps in ([{"c": 131}], [{"c": 60}, {"c": 1}, {"c": 70}])
    )
    plain = worlds.logits_of(untouched("wide"), ids["c"])
    scale = float(plain.norm())
    assert float((whole - chunked).norm()) < 1e-3 * scale
    few = 24  # tokens that need no choice
    apart = float((whole[:few] - plain[:few]).norm() / plain[:few].norm())
    assert (1e-4 < apart < 0.1) if "fp8" in codes else apart < 1e-5
    assert 1e-3 < float((whole - plain).norm()) / scale < 0.5


# --- over processes ---


@pytest.mark.parametrize(
    "size, options",
    [
        (2, ON | {"prefill_cp_mode": "zigzag"}),
        (2, ON | {"prefill_cp_mode": "round_robin", "dsa_cp_mixed": "off"}),
        (4, ON | {"prefill_cp_mode": "round_robin"}),
    ],
    ids=["zigzag", "round_robin mixed off", "round_robin of four"],
)
def test_ranks_have_the_logits_of_one(size: int, options: dict[str, object]) -> None:
    work = "tiny", options, STEPS, PROMPTS, {}
    results = run(size, "tests.integrations.v32_work:packed", [work] * size, timeout=300)
    assert_as_untouched(results[0])
    for rank, logits in enumerate(results[1:], start=1):
        for name in PROMPTS:
            assert_same_array(logits[name], results[0][name], f"rank {rank}'s logits of {name}")


def test_ranks_keep_fp8_alike() -> None:
    """Codes travel as they are kept: what two ranks say is what one says, to rounding."""
    ids = {"b": PROMPTS["b"], "c": PROMPTS["c"]}
    events: list[EVENT] = [{"c": 100, "b": 3}, {"b": 4, "c": 31}]
    work = "wide", ON | {"prefill_cp_mode": "zigzag"}, events, ids, {"fp8": True}
    one = packed_logits(fresh_model("wide"), None, events, ids, fp8=True)
    for logits in run(2, "tests.integrations.v32_work:packed", [work] * 2, timeout=300):
        for name, due in one.items():
            assert float((logits[name] - due).norm()) < 1e-3 * float(due.norm())


def test_ranks_generate_the_same_tokens() -> None:
    ids = worlds.prompt(150, 5)
    due = untouched("tiny").generate(ids, max_new_tokens=16, do_sample=False)
    work = "tiny", ON | {"prefill_cp_mode": "zigzag"}, ids, 16
    for found in run(2, "tests.integrations.v32_work:generated", [work] * 2, timeout=300):
        assert_same_array(found, due, "tokens")


def test_options_that_a_model_cannot_do_name_the_flags() -> None:
    text = (
        "dsa_cp_key_mode must be 'gather_kv' for a V3.2 model, got 'replicate'; every rank projects the keys of its "
        "own rows"
    )
    assert run(2, "tests.integrations.v32_work:refused", [({"enable_dsa_cp": True},)] * 2) == [text] * 2


# --- generate ---


@pytest.mark.parametrize("num_tokens, num_new, prefill_chunk_size", [(1, 8, None), (130, 8, 64), (300, 16, None)])
def test_greedy_tokens_are_the_untouched_models(
    tiny: Any, num_tokens: int, num_new: int, prefill_chunk_size: int | None
) -> None:
    ids = worlds.prompt(num_tokens, 5)
    due = untouched("tiny").generate(ids, max_new_tokens=num_new, do_sample=False)
    session = enable(tiny, num_tokens=num_tokens + num_new)
    found = tiny.generate(ids, max_new_tokens=num_new, do_sample=False, prefill_chunk_size=prefill_chunk_size)
    assert_same_array(found, due, "tokens")
    assert not session.caches.requests


def test_a_cache_goes_on_where_it_stopped(tiny: Any) -> None:
    ids = worlds.prompt(40, 6)
    due = untouched("tiny").generate(ids, max_new_tokens=20, do_sample=False)
    enable(tiny, num_tokens=60)
    first = tiny.generate(ids, max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
    assert first.cache.get_seq_length() == 48  # the last token was not fed
    again = tiny.generate(first.sequences, cache=first.cache, max_new_tokens=11, do_sample=False)
    assert_same_array(again, due, "tokens")


def test_generate_runs_beside_packed_requests(tiny: Any) -> None:
    ids = PROMPTS["b"]
    due = untouched("tiny").generate(ids, max_new_tokens=3, do_sample=False)
    session = enable(tiny, num_tokens=40, max_requests=2)
    logits = []
    for part in (ids[:, :5], ids[:, 5:]):
        with session.step({"b": part.shape[1]}):
            logits.append(tiny(part).logits[0])
        assert_same_array(tiny.generate(ids, max_new_tokens=3, do_sample=False), due, "tokens")
    assert_as_untouched({"b": torch.cat(logits)}, {"b": ids})


# --- the model is what it was ---


def test_disable_gives_the_model_back(tiny: Any) -> None:
    def state() -> dict[str, Any]:
        modules = dict(tiny.named_modules())
        return {
            "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
            "hooks": {name: list(module._forward_pre_hooks) for name, module in modules.items()},
            "weights": {name: (weight.data_ptr(), id(weight)) for name, weight in tiny.named_parameters()},
            "config": dict(vars(tiny.config)),
        }

    before, logits = state(), tiny(PROMPTS["c"]).logits
    session = enable(tiny, num_tokens=140)
    assert tiny.config._attn_implementation == "dsacp"
    assert isinstance(session.caches, MLACaches)
    assert all(isinstance(attention, MLAttention) for attention in session.attentions)
    tiny.generate(PROMPTS["b"], max_new_tokens=2, do_sample=False)
    disable(tiny)
    assert state() == before
    assert_same_array(tiny(PROMPTS["c"]).logits, logits, "logits")


def test_weights_are_not_doubled(tiny: Any) -> None:
    theirs = {weight.untyped_storage().data_ptr() for weight in tiny.parameters()}
    session = enable(tiny, num_tokens=8)
    ours = [weight for attention in session.attentions for weight in attention.parameters()]
    assert len(ours) == sum(1 for name, _ in tiny.named_parameters() if ".self_attn." in name)
    assert {weight.untyped_storage().data_ptr() for weight in ours} <= theirs


def test_no_mask_is_made(tiny: Any) -> None:
    masks = []
    layer = tiny.model.layers[0]
    layer.register_forward_pre_hook(lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True)
    tiny(PROMPTS["b"])
    enable(tiny, num_tokens=8)
    tiny.generate(PROMPTS["b"], max_new_tokens=1, do_sample=False)
    assert masks[0].shape == (1, 1, 7, 7)
    assert masks[1:] == [None]


def test_an_enabled_model_is_saved_as_it_was(tiny: Any, tmp_path: Path) -> None:
    logits = tiny(PROMPTS["b"]).logits
    enable(tiny, num_tokens=8)
    loaded = reloaded(tiny, torch.float32, str(tmp_path))
    assert "dsacp" not in (tmp_path / "config.json").read_text()
    assert_same_array(loaded(PROMPTS["b"]).logits, logits, "logits")
    assert_as_untouched(packed_logits(loaded, None, [{"b": 7}], {"b": PROMPTS["b"]}), {"b": PROMPTS["b"]})


def test_weights_changed_in_place_are_seen(tiny: Any) -> None:
    session = enable(tiny, num_tokens=14, max_requests=2)
    with session.step({1: 7}):
        before = tiny(PROMPTS["b"]).logits
    tiny.load_state_dict({name: value * 0.5 for name, value in tiny.state_dict().items()})
    with session.step({2: 7}):
        after = tiny(PROMPTS["b"]).logits
    disable(tiny)
    assert (before - after).abs().max() > 0.1
    plain = tiny(PROMPTS["b"]).logits[0]
    assert_within_budget(after[0], worlds.exact_logits_of(tiny, PROMPTS["b"]), plain, "logits")


# --- refusals ---


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_an_enabled_model_is_not_copied(tiny: Any, copied: Any) -> None:
    enable(tiny, num_tokens=14)
    due = (
        "UnsupportedError: model must not be enabled when it is copied or pickled, got one that is; disable(model) "
        "first, and enable the copy too, or use save_pretrained, which needs neither"
    )
    assert refusal(copied, tiny) == due
    assert refusal(copied, tiny.model.layers[0]) == due
    disable(tiny)
    copied(tiny)


@pytest.mark.parametrize("name", ["kv_b_proj", "indexer.wk", "indexer.k_norm", "kv_a_layernorm"])
def test_weights_that_were_moved(tiny: Any, name: str) -> None:
    session = enable(tiny, num_tokens=64)
    owner = tiny.model.layers[2].self_attn.get_submodule(name)
    owner.weight = torch.nn.Parameter(owner.weight.clone(), requires_grad=False)
    with session.step({"a": 7}):
        assert refusal(tiny, PROMPTS["b"]) == (
            "ContractError: the model's attention weights must lie where they lay when enable() took them over, got "
            f"another {type(owner).__name__}.weight; disable(model) before you move, cast or replace them, and enable "
            "it again"
        )


def test_a_model_that_was_cast(tiny: Any) -> None:
    """A norm of any float is taken, matrices of two dtypes are not; a cast while it is enabled is found."""
    session = enable(tiny, num_tokens=8)
    tiny.bfloat16()
    with session.step({"a": 7}):
        assert "must lie where they lay when enable() took them over" in refusal(tiny, PROMPTS["b"])
    disable(tiny)
    tiny.float()
    tiny.model.layers[1].self_attn.o_proj.bfloat16()
    assert refusal(enable, tiny, num_tokens=8) == (
        "ContractError: the model's o_proj.weight must have dtype float32, got bfloat16; load the model with "
        "from_pretrained(dtype=...), which keeps norms, sinks and biases in float32"
    )


def test_adapters_and_hooks(tiny: Any) -> None:
    block = tiny.model.layers[1].self_attn
    block.lora = torch.nn.Linear(2, 2, bias=False)
    assert refusal(enable, tiny, num_tokens=8) == (
        "UnsupportedError: model: layer 1 must have the attention weights of transformers' deepseek_v32 and no others, "
        "got lora.weight; merge or take off adapters and quantizers first"
    )
    del block.lora
    block.forward = block.forward
    assert "model: layer 1 must have the forward of its class" in refusal(enable, tiny, num_tokens=8)


def test_models_and_options_that_are_not_taken(tiny: Any) -> None:
    rule = "model must be a DeepseekV4ForCausalLM or DeepseekV32ForCausalLM of transformers, or the model inside"
    other = transformers.LlamaModel(
        transformers.LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    assert refusal(enable, other, num_tokens=8) == f"ContractError: {rule}, got LlamaModel"
    with pytest.raises(TypeError, match="cmp_block_size"):
        enable(tiny, num_tokens=8, cmp_block_size=8)  # of V4's caches
    assert refusal(enable, tiny, num_tokens=8, fp8=True).startswith("ContractError: ")  # 32 channels are no group
    scattered = ParallelConfig(dsa_cp_rows="scattered", dsa_cp_key_mode="gather_kv")
    assert "dsa_cp_rows must be full here" in refusal(enable, tiny, num_tokens=8, parallel=parallel_of(scattered))
    assert tiny.config._attn_implementation == "eager"
    session = enable(tiny, num_tokens=8)
    assert refusal(enable, tiny.model, num_tokens=8).startswith("ContractError: model must not be enabled")
    assert "got neither" in refusal(tiny, PROMPTS["b"])
    with session.step({"a": 7}):
        assert "got 2 rows" in refusal(tiny, PROMPTS["b"].expand(2, -1))
        assert refusal(disable, tiny) == "ContractError: disable must come after the step, got a step of ['a']"


def test_our_cache_elsewhere(tiny: Any) -> None:
    enable(tiny, num_tokens=64)
    past = transformers.DynamicCache(config=tiny.config)
    tiny(PROMPTS["b"], cache=past)
    due = "UnsupportedError: cache: the sequence of cache object 1 lies in dsacp's caches"
    assert refusal(past.crop, 1).startswith(due)
    disable(tiny)
    assert refusal(tiny, PROMPTS["b"][:, :1], cache=past, position_ids=torch.tensor([[7]])).startswith(due)


# --- the command ---


@pytest.mark.parametrize("split", ["zigzag", "round_robin"])
def test_the_command_reads_a_text(split: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks share the tokens and receive the other one's keys and rows of every layer, and nothing else.

    A gather moves as many rows of each rank as the longest has.
    """
    text = tmp_path / "text"
    text.write_bytes(bytes(range(131)))
    words = ["--model", "v32", "--prompt-file", str(text), "--processes", "2", "--split", split]
    assert demo.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"131 tokens, {demo.MLA_LAYERS} layers" in lines[0]
    rows = [line.split() for line in lines if line.split()[:1] in (["0"], ["1"])]
    config = demo.MLA_CONFIG
    width = config.kv_lora_rank + config.rope_head_dim + config.index_head_dim + config.hidden_size
    held = MLACaches(config, range(demo.MLA_LAYERS), num_tokens=131, max_requests=1, dtype="float32")
    shares = [int(row[1]) for row in rows]
    assert sum(shares) == 131
    assert abs(shares[0] - shares[1]) <= 2
    for row in rows:
        assert row[2] == f"{sum(held.memory().values()) / 1e6:.3f}"
        assert row[3] == f"{demo.MLA_LAYERS * max(shares) * width * 4 / 1e6:.3f}"
        typical, most, largest, same = map(float, row[4:])
        assert 0 < typical <= most < 1e-3 * largest
        assert same == 131


def test_the_command_refuses_another_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(["--model", "v3", "--prompt-file", "x"])
    assert "invalid choice: 'v3'" in capsys.readouterr().err
