"""transformers' `DeepseekV4ForCausalLM` or `DeepseekV32ForCausalLM` with this attention in it.

::

    session = enable(model)                                              # caches for 4096 tokens of 8 requests
    with torch.no_grad(), session.step({"a": 100, "b": 7}) as step:      # 107 new tokens of two requests, end to end
        logits = model(input_ids=stream, position_ids=step.position_ids).logits
    model.generate(prompt, do_sample=False)                              # one sequence needs no step
    disable(model)                                                       # the model is what it was

`enable` keeps the model's modules and weights. It gives each attention block another `forward`, which reads the block's
own weights through views, and the model a hook, which finds out which requests a call is about. So the model is saved,
loaded and moved as before. Refused while it is enabled: copying it, and, at the next call, that it was moved or cast.

Over ranks every process holds the whole model and runs it on the whole stream; the attention alone is split.
`python -m dsacp_npu.integrations.transformers --help` shows it on a text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

from dsacp_npu._tensors import torch
from dsacp_npu.backend import Backend
from dsacp_npu.caches import Caches, PagedCache
from dsacp_npu.integrations import _transformers_weights as weights
from dsacp_npu.mla_caches import MLACaches, PagedMLACache
from dsacp_npu.mla_module import MLAttention
from dsacp_npu.mla_step import MLAStep, mla_step_metadata
from dsacp_npu.module import DSAttention
from dsacp_npu.parallel import Parallel, parallel_of
from dsacp_npu.step import StepMetadata, step_metadata
from dsacp_ref.config import AttentionConfig
from dsacp_ref.mla_config import MLAConfig
from dsacp_ref.spec import UnsupportedError, check_record, contract_error

__all__ = ["Session", "Step", "disable", "enable"]

INSTALL = "pip install transformers==5.24.0"
# The name under which transformers knows that it need not build masks; and the keyword that carries a step to a block.
ATTENTION = "dsacp"
STEP = "dsacp_step"
# What the model's forward takes by place.
PLACES = ("input_ids", "attention_mask", "position_ids", "cache", "inputs_embeds", "use_cache")


class Step(NamedTuple):
    """One packed row of new tokens.

    Fields:
        position_ids: int64[1, num_tokens], on the model's device.
        rows: request -> slice of its tokens in the row.
        metadata: StepMetadata or MLAStep for all layers.
    """

    position_ids: torch.Tensor
    rows: dict[Hashable, slice]
    metadata: StepMetadata | MLAStep


class Family(NamedTuple):
    """What differs between the models that can be enabled; ``config`` is a function of the model inside."""

    config: Callable[[Any], Any]
    attention: type[DSAttention] | type[MLAttention]
    caches: type[Caches] | type[MLACaches]
    step_metadata: Callable[..., StepMetadata | MLAStep]


def v4_config(inner: Any) -> AttentionConfig:
    """The constants of its attention."""
    return AttentionConfig.from_json(inner.config.to_dict())


def v32_config(inner: Any) -> MLAConfig:
    """The constants of its attention, whose norms have an eps of their own, whatever the model's is."""
    eps = inner.layers[0].self_attn.q_a_layernorm.variance_epsilon
    return replace(MLAConfig.from_json(inner.config.to_dict()), rms_norm_eps=eps)


FAMILIES = {
    "deepseek_v4": Family(v4_config, DSAttention, Caches, step_metadata),
    "deepseek_v32": Family(v32_config, MLAttention, MLACaches, mla_step_metadata),
}


class Swapped(NamedTuple):
    """What `disable` needs to give a model back."""

    session: Session
    attention_before: str
    hook: Any


ENABLED: WeakKeyDictionary[Any, Swapped] = WeakKeyDictionary()


class NotCopied:
    """A part of an enabled model, which goes with its caches and ranks and with no other."""

    def __reduce__(self) -> NoReturn:
        """What copy and pickle ask for."""
        raise UnsupportedError(
            "model must not be enabled when it is copied or pickled, got one that is; disable(model) first, and enable "
            "the copy too, or use save_pretrained, which needs neither"
        )


class Session(NotCopied):
    """The requests of an enabled model.

    Fields:
        caches: Caches, or MLACaches of a V3.2 model, to fork, roll back, reset and measure requests.
        attentions: DSAttention or MLAttention of every layer.
    """

    def __init__(self, caches: Any, attentions: list[Any], family: Family) -> None:
        """Made by `enable`."""
        self.caches, self.attentions, self.family = caches, attentions, family
        self.places: list[weights.Place] = []
        self.current: Step | None = None
        self.numbers = count(1)
        self.device = caches[0].tensors[0].device

    @contextmanager
    def step(self, new_tokens: Mapping[Any, int]) -> Iterator[Step]:
        """The requests that the next call of the model is about. One call a step; a new request is opened.

        Args:
            new_tokens: request -> number of its new tokens; their tokens stand in the row in this order.

        Returns:
            a context, in which the model takes the row ``[1, num_tokens]``; it gives the Step.

        Raises:
            ContractError: a step within a step, or what `Caches` refuses.
        """
        if self.current is not None:
            hint = "leave the with block first"
            raise contract_error("step", "follow the one before it", f"a step of {list(self.current.rows)}", hint)
        opened = [request for request in new_tokens if request not in self.caches.requests]
        for request in opened:
            self.caches.open(request)
        try:
            self.current = self.planned(new_tokens)
        except BaseException:
            for request in opened:
                self.caches.close(request)
            raise
        try:
            yield self.current
        finally:
            self.current = None

    def close(self, request: Hashable) -> None:
        """Give a request's blocks back.

        Args:
            request: as in `step`.

        Raises:
            ContractError: no such request.
        """
        self.caches.close(request)

    def planned(self, new_tokens: Mapping[Any, int]) -> Step:
        """The step of requests that are open."""
        metadata = self.family.step_metadata(self.attentions, self.caches, new_tokens)
        positions, rows, start = [], {}, 0
        for request, num_new in new_tokens.items():
            before = self.caches.num_computed_tokens(request)
            positions.append(torch.arange(before, before + num_new))
            rows[request] = slice(start, start + num_new)
            start += num_new
        return Step(torch.cat(positions)[None].to(self.device), rows, metadata)

    def before_model(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """The hook before every call of the model: hand each block its step, or refuse the call."""
        given = dict(zip(PLACES, args, strict=False)) | kwargs
        check_mode(model, given)
        weights.check_kept(self.places)
        stream = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
        if stream.shape[0] != 1:
            hint = "pack requests one after the other into one row, with session.step; there is no beam search"
            raise UnsupportedError(f"input_ids must be one row [1, num_tokens], got {stream.shape[0]} rows; {hint}")
        cache = given.get("cache", given.get("past_key_values"))
        step = self.current
        if step is None:
            step = self.step_of_cache(cache, stream.shape[1], len(model.layers))
        else:
            if cache is not None or given.get("use_cache"):
                raise contract_error(
                    "use_cache and cache", "be left out in a step", "one of them", "the session has the keys"
                )
            given["use_cache"] = False
        check_stream(given, step, stream.shape[1])
        return (), given | {STEP: step}

    def step_of_cache(self, cache: Any, num_tokens: int, num_layers: int) -> Step:
        """The step of the one request that a cache object stands for, as generate() calls the model."""
        from dsacp_npu.integrations._transformers_cache import adopt, request_layer

        if cache is None:
            raise contract_error(
                "model",
                "be called in a step or with a cache",
                "neither",
                "write `with session.step({request: num_tokens}) as step:` around the call, or let generate() call it "
                "with use_cache=True",
            )
        layer = request_layer(cache, self.caches) or adopt(cache, self.caches, num_layers, next(self.numbers))
        return self.planned({layer.request: num_tokens})


def enable(
    model: Any,
    *,
    num_tokens: int = 4096,
    max_requests: int = 8,
    parallel: Parallel | None = None,
    backend: Backend | None = None,
    **cache_options: Any,
) -> Session:
    """Put this attention into a model, until `disable`.

    Args:
        model: DeepseekV4ForCausalLM or DeepseekV32ForCausalLM, or the model inside; in eval mode when it is called.
        num_tokens, max_requests: of the caches: a step that does not fit is refused, and says so.
        parallel: how the attention is split; None is one rank.
        backend: other functions than torch's, see `dsacp_npu.backend`.
        cache_options: what else `Caches` takes, or `MLACaches` for V3.2, such as ``block_size``.

    Returns:
        Session.

    Raises:
        ContractError: no such model, or one that is enabled; a weight of another shape or dtype.
        UnsupportedError: rows that stay scattered, adapters or quantized weights, a block that others have changed.
        ImportError: transformers is missing or too old.
    """
    inner = inner_model(model)
    if inner in ENABLED:
        raise contract_error("model", "not be enabled", "one that is", "disable(model) first")
    parallel = parallel_of() if parallel is None else parallel
    check_record("parallel", parallel, Parallel)
    if parallel.options.dsa_cp_rows != "full":
        raise UnsupportedError(
            f"dsa_cp_rows must be full here, got {parallel.options.dsa_cp_rows}; each rank runs the whole stream "
            "outside of the attention"
        )
    family = FAMILIES[inner.config.model_type]
    config = family.config(inner)
    blocks = [layer.self_attn for layer in inner.layers]
    attentions = [attention_of(block, i, config, family, parallel, backend) for i, block in enumerate(blocks)]
    like = blocks[0].q_a_proj.weight
    caches: Any = family.caches(
        config,
        range(len(blocks)),
        num_tokens=num_tokens,
        max_requests=max_requests,
        dtype=str(like.dtype).removeprefix("torch."),
        device=like.device,
        **cache_options,
    )
    session = Session(caches, attentions, family)
    # From here on the model changes, and nothing can fail any more.
    for block, attention, cache in zip(blocks, attentions, caches, strict=True):
        session.places += weights.places_of(block)
        block.forward = Attended(attention, cache)
    before = inner.config._attn_implementation
    library().AttentionInterface.register(ATTENTION, unswapped)
    inner.set_attn_implementation(ATTENTION)
    hook = inner.register_forward_pre_hook(session.before_model, with_kwargs=True)
    ENABLED[inner] = Swapped(session, before, hook)
    return session


def disable(model: Any) -> None:
    """Give the model back as `enable` found it. The session's requests are lost.

    Args:
        model: as given to `enable`.

    Raises:
        ContractError: no such model, one that is not enabled, or one in the middle of a step.
    """
    inner = inner_model(model)
    if inner not in ENABLED:
        raise contract_error("model", "be enabled", "one that is not", "enable(model, num_tokens=...) first")
    session, attention_before, hook = ENABLED[inner]
    if session.current is not None:
        raise contract_error("disable", "come after the step", f"a step of {list(session.current.rows)}")
    del ENABLED[inner]
    hook.remove()
    for layer in inner.layers:
        del layer.self_attn.forward
    if inner.config._attn_implementation == ATTENTION:  # else somebody chose another one since
        inner.set_attn_implementation(attention_before)


def attention_of(
    block: Any, layer_idx: int, config: Any, family: Family, parallel: Parallel, backend: Backend | None
) -> DSAttention | MLAttention:
    """Our module for one of their blocks, on the block's own memory."""
    if "forward" in vars(block):
        raise UnsupportedError(
            f"model: layer {layer_idx} must have the forward of its class, got one that somebody put there; "
            "take off what hooks into it, such as accelerate's offloading"
        )
    full = weights.block_weights(block, layer_idx)
    like = full["wq_a"]
    dtype = str(like.dtype).removeprefix("torch.")
    # The module starts without memory, and is then given views.
    attention = family.attention(config, layer_idx, parallel, backend=backend, dtype=dtype, device="meta")
    weights.fill_(attention, full, weights.NAMES[block.config.model_type])
    return attention


class Attended(NotCopied):
    """The forward of an enabled model's attention block."""

    def __init__(self, attention: DSAttention | MLAttention, paged: PagedCache | PagedMLACache) -> None:
        """Of one layer."""
        self.attention, self.paged = attention, paged

    def __call__(self, hidden_states: torch.Tensor, **given: Any) -> tuple[torch.Tensor, None]:
        """The block's output, and no attention weights."""
        step = given.get(STEP)
        if step is None:
            hint = "call the model; it hands its blocks the step"
            raise contract_error("self_attn", "be called by the enabled model", "a call of the block alone", hint)
        return self.attention(hidden_states[0], step.metadata, self.paged)[None], None


def unswapped(*args: Any, **kwargs: Any) -> NoReturn:
    """What transformers finds under our name where no block was swapped."""
    hint = "attn_implementation='dsacp' is set by enable(model); load the model with 'eager'"
    raise contract_error("model", "be enabled", "one that is not", hint)


def check_mode(model: Any, given: Mapping[str, Any]) -> None:
    """Refuse what only transformers' own attention does."""
    if model.training:
        raise UnsupportedError("model must be in eval mode, got training mode; there is no backward pass; model.eval()")
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in model.parameters()):
        raise UnsupportedError(
            "model must be called without gradients, got weights that require them; there is no backward pass; "
            "call it under torch.no_grad(), or model.requires_grad_(False)"
        )
    if given.get("output_attentions", model.config.output_attentions):
        raise UnsupportedError("output_attentions must be False, got True; attention weights are never whole anywhere")


def check_stream(given: Mapping[str, Any], step: Step, num_tokens: int) -> None:
    """Refuse tokens, positions or a mask that are not the step's."""
    due = step.position_ids.shape[1]
    if num_tokens != due:
        raise contract_error("input_ids", f"hold the {due} tokens of the step", num_tokens, f"{step.rows}")
    mask = given.get("attention_mask")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2 or bool((mask != 1).any())):
        raise UnsupportedError(
            "attention_mask must be all ones, or left out, got one that hides tokens; there is no padding: "
            "pack requests with session.step"
        )
    positions = given.get("position_ids")
    if positions is None or positions is step.position_ids:
        return
    if positions.shape != step.position_ids.shape or not torch.equal(positions, step.position_ids.to(positions)):
        due_text, got = (summary(ids) for ids in (step.position_ids, positions))
        raise contract_error("position_ids", f"be the step's, {due_text}", got, "give step.position_ids")


def summary(positions: torch.Tensor) -> str:
    """The shape and the ends of some positions."""
    flat = positions.flatten().tolist()
    return f"{list(positions.shape)} from {flat[0]} to {flat[-1]}"


def inner_model(model: Any) -> Any:
    """The decoder inside the model, which has the layers."""
    inner = getattr(model, "base_model", model)
    if not isinstance(inner, (library().DeepseekV4Model, library().DeepseekV32Model)):
        rule = "be a DeepseekV4ForCausalLM or DeepseekV32ForCausalLM of transformers, or the model inside"
        raise contract_error("model", rule, type(model).__name__)
    return inner


def library() -> Any:
    """transformers, or what to do to have it."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"dsacp_npu.integrations.transformers needs transformers; {INSTALL}") from error
    version = transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < (5, 24):  # older ones were never compared with
        raise ImportError(f"dsacp_npu.integrations.transformers needs transformers >= 5.24, got {version}; {INSTALL}")
    return transformers


if __name__ == "__main__":
    from dsacp_npu.commands.transformers_demo import main

    sys.exit(main())
