"""A drop-in DeepSeek-V3.2 attention layer with context parallelism, for model code.

::

    rank r:   x of own tokens --> latents, rope keys, index keys -- gather --> caches, in full -.
              x of own tokens --> queries, all heads -> picks of own tokens -------------------+-> attention -> wo

Every rank has all weights and ends a step with all keys. So a step that is not split (decode, and prefill of too few
tokens) needs nobody: each rank runs it whole, and the switch changes nothing in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dsacp_npu import backend as backends
from dsacp_npu import distributed
from dsacp_npu._mla_parts import MLACall, mla_program, whole_step
from dsacp_npu._mla_records import MLACache, MLAIndexerWeights, MLAOutput, MLAWeights
from dsacp_npu._rank_layer import run_alone
from dsacp_npu._tensors import Float, Int32, check_tensor, torch, values_known
from dsacp_npu.attention import TOKENS, check_topk
from dsacp_npu.caches import DTYPES
from dsacp_npu.extents import token_positions
from dsacp_npu.loading import Held
from dsacp_npu.mla_caches import PagedMLACache
from dsacp_npu.mla_layer import check_given, check_mla_step
from dsacp_npu.mla_step import MLAStep
from dsacp_npu.parallel import Parallel, check_mla_model, parallel_of
from dsacp_npu.partition import counted, spread_rows
from dsacp_ref.mla_config import MLAConfig
from dsacp_ref.spec import UnsupportedError, check_choice, check_int, check_record, contract_error

if TYPE_CHECKING:
    from dsacp_npu.backend import Backend

__all__ = ["MLAttention"]

nn = torch.nn

# Kept in float32 in short models: norms, and what weighs the index heads.
FLOAT32_WEIGHTS = ("q_norm", "kv_norm", "indexer.k_norm", "indexer.k_norm_bias", "indexer.weights_proj")


class Indexer(nn.Module):
    """The indexer's weights under their names."""


class MLAttention(nn.Module):
    """One attention layer of a V3.2 model, on this rank.

    Args:
        config: MLAConfig of the whole model.
        layer_idx: int >= 0.
        parallel: Parallel of this rank (`parallel_of`); None is a single device.
        backend: the functions to use, from `dsacp_npu.backend.get`; None is torch.
        dtype: ``"bfloat16"``, ``"float16"``, ``"float32"`` or ``"float64"``, of matrices, hidden states and caches.
        device: where the weights lie.
        kept_keys: ``"all"``. The reference can also keep a rank's own keys only; a model cannot: decode needs all.

    Raises:
        ContractError: a value does not hold.
        UnsupportedError: what cannot work together, naming the flag (`check_mla_model`), or ``kept_keys`` ``"own"``.

    Source: SGLang's DeepSeek-V3.2 under prefill context parallelism (#12065, #13959).

    >>> from dsacp_ref.mla_config import v32
    >>> layer = MLAttention(v32(), 0, device="meta")
    >>> layer.held()["wkv_b"].shape
    (128, 256, 512)
    """

    any_float = FLOAT32_WEIGHTS  # weights that another model's module may hold in a dtype of its own

    def __init__(
        self,
        config: MLAConfig,
        layer_idx: int,
        parallel: Parallel | None = None,
        *,
        backend: Backend | None = None,
        dtype: str = "bfloat16",
        device: str | torch.device = "cpu",
        kept_keys: str = "all",
    ) -> None:
        super().__init__()
        check_record("config", config, MLAConfig)
        parallel = parallel_of() if parallel is None else parallel
        check_record("parallel", parallel, Parallel)
        check_mla_model(parallel, config, backend)
        if check_choice("kept_keys", kept_keys, ("all", "own")) == "own":
            raise UnsupportedError(
                "kept_keys must be 'all' in a model, got 'own'; the next chunk and decode attend to all keys, and a "
                "rank that dropped the others' would have nowhere to take them from"
            )
        self.config, self.parallel = config, parallel
        self.backend = backends.get("torch") if backend is None else backend
        self.layer_idx = check_int("layer_idx", layer_idx, 0)
        self.dtype_name = check_choice("dtype", dtype, DTYPES)
        self.w8a8 = False
        self._missing = set(self.held())
        self.indexer = Indexer()
        for name, held in self.held().items():
            owner: nn.Module = self.indexer if name.startswith("indexer.") else self
            kind = "float32" if name in FLOAT32_WEIGHTS and dtype != "float64" else dtype
            unset = torch.full(held.shape, float("nan"), dtype=getattr(torch, kind), device=device)
            owner.register_parameter(name.removeprefix("indexer."), nn.Parameter(unset, requires_grad=False))
        self.register_load_state_dict_pre_hook(note_loaded)

    # --- weights ---

    def held(self) -> dict[str, Held]:
        """Each of the layer's weights, all of which every rank keeps.

        Returns:
            dict from our name of a weight (`dsacp_npu.mla_layer.MLAWeights`, with ``wkv_b`` for w_uk and w_uv of each
            head one after the other) to Held.
        """
        config, hidden, heads, lora = (
            self.config,
            self.config.hidden_size,
            self.config.num_heads,
            self.config.q_lora_rank,
        )
        d, index_heads = config.index_head_dim, config.index_n_heads
        shapes: dict[str, tuple[int, ...]] = {
            "wq_a": (lora, hidden),
            "q_norm": (lora,),
            "wq_b": (heads * (config.nope_head_dim + config.rope_head_dim), lora),
            "wkv_a": (config.kv_lora_rank + config.rope_head_dim, hidden),
            "kv_norm": (config.kv_lora_rank,),
            "wkv_b": (heads, config.nope_head_dim + config.v_head_dim, config.kv_lora_rank),
            "wo": (hidden, heads * config.v_head_dim),
            "indexer.wq_b": (index_heads * d, lora),
            "indexer.wk": (d, hidden),
            "indexer.k_norm": (d,),
            "indexer.k_norm_bias": (d,),
            "indexer.weights_proj": (index_heads, hidden),
        }
        return {name: Held(shape, (slice(None),) * len(shape)) for name, shape in shapes.items()}

    def assign(self, name: str, tensor: Float) -> None:
        """Take a weight.

        Args:
            name: a name of `held`.
            tensor: of its shape, any float dtype.

        Raises:
            ContractError: no such weight, or another shape.
        """
        held = self.held()
        check_choice("name", name, tuple(held))
        check_tensor(name, tensor, DTYPES, held[name].shape, "the whole weight")
        self.get_parameter(name).data.copy_(tensor)
        self._missing.discard(name)

    def weights(self) -> MLAWeights:
        """The weights as a record of views.

        Returns:
            MLAWeights.
        """
        nope = self.config.nope_head_dim
        index = MLAIndexerWeights(*(self.get_parameter(f"indexer.{name}") for name in MLAIndexerWeights._fields))
        return MLAWeights(
            self.wq_a, self.q_norm, self.wq_b, self.wkv_a, self.kv_norm,
            self.wkv_b[:, :nope], self.wkv_b[:, nope:], self.wo, index,
        )  # fmt: skip

    # --- a step ---

    def forward(
        self, hidden_states: Float, step: MLAStep, cache: PagedMLACache | MLACache, *, given_topk: Int32 | None = None
    ) -> Float:
        """The layer's output for this rank's rows.

        Args:
            hidden_states: float [step.num_rows, hidden], the block input after its norm, in the layer's dtype.
            step: MLAStep of this forward.
            cache: this layer's PagedMLACache, or an engine's own MLACache; written into.
            given_topk: int32[num_tokens, index_topk] by token of the step, a selection to use instead of the
                indexer's; or None.

        Returns:
            float [step.num_rows, hidden]; zero in pad rows.

        Raises:
            ContractError: rows, a step or a cache that do not belong together, weights that were not loaded, or a
                request that goes on from keys that are not there. The cache is as it was then.
        """
        return self.attend(hidden_states, step, cache, given_topk=given_topk).output

    def attend(
        self, hidden_states: Float, step: MLAStep, cache: PagedMLACache | MLACache, *, given_topk: Int32 | None = None
    ) -> MLAOutput:
        """`forward`, with what the indexer chose.

        Args:
            hidden_states, step, cache, given_topk: as there.

        Returns:
            MLAOutput: output; topk_indices of this rank's own rows; the cache.

        Raises:
            ContractError: as there.
        """
        tensors = self._tensors_of(cache)
        self._check(hidden_states, step, tensors, given_topk)
        if isinstance(cache, PagedMLACache):
            cache.check_progress(step.progress, step.requests, step.plan)
        call = MLACall(self.config, self.weights(), self.backend)
        run = self._by_tokens if step.splits else self._whole
        result = run(hidden_states, step, tensors, call, given_topk)
        if isinstance(cache, PagedMLACache):
            cache.advance_to(step.progress)
        return result

    def _by_tokens(
        self, x: Float, step: MLAStep, cache: MLACache, call: MLACall, given_topk: Int32 | None
    ) -> MLAOutput:
        """Own tokens, all heads."""
        ranks, part = self.parallel.cp, step.rank_step()
        assert ranks is not None  # of a step that splits tokens
        full = self.parallel.options.dsa_cp_rows == "full"
        own = spread_rows(x, part.local.tokens) if full else x
        program = mla_program(own, cache, part, call, given_topk)
        result: MLAOutput = run_alone(program, lambda wish: distributed.answered(wish, ranks))
        if not full:
            return result
        output = distributed.gathered_in_order(result.output, ranks, part.partition)
        pads = output.new_zeros(len(x) - len(output), output.shape[1])
        return result._replace(output=torch.cat([output, pads]))

    def _whole(self, x: Float, step: MLAStep, cache: MLACache, call: MLACall, given_topk: Int32 | None) -> MLAOutput:
        """All tokens on every rank: what a layer built with the switch off computes."""
        if given_topk is not None:  # by token; the stream may have pad rows after them
            no_choice = given_topk.new_full((len(x) - len(given_topk), given_topk.shape[1]), -1)
            given_topk = torch.cat([given_topk, no_choice])
        return whole_step(x, cache, step.geometry(), call, given_topk)

    def _check(self, x: Float, step: MLAStep, cache: MLACache, given_topk: Int32 | None) -> None:
        """Refuse what does not belong together, before anything is sent or written."""
        if self._missing:
            raise contract_error(
                f"weights of layer {self.layer_idx}",
                "be loaded before the first step",
                f"none for {', '.join(sorted(self._missing))}",
                "use dsacp_npu.loading.load_attention",
            )
        check_record("step", step, MLAStep)
        shape = (step.num_rows, self.config.hidden_size)
        check_tensor("hidden_states", x, (self.dtype_name,), shape, "the rows that the step was made for")
        check_mla_step(self.dtype_name, step.num_tokens, step.batch, cache, self.config)
        step.check_cache(cache)
        if given_topk is not None:
            check_given(given_topk, step.num_tokens, self.config)
            if values_known(given_topk):
                batch, tokens = step.batch, counted(step.num_tokens, step.batch.seq_lens)
                check_topk(given_topk, token_positions(tokens, batch.query_start_loc, batch.seq_lens) + 1, TOKENS)

    def _tensors_of(self, cache: PagedMLACache | MLACache) -> MLACache:
        """The tensors to write into; another layer's cache may have the same sizes, and is refused by its number."""
        if not isinstance(cache, PagedMLACache):
            return cache
        if cache.layer_idx != self.layer_idx:
            hint = f"take caches[{self.layer_idx}]"
            raise contract_error("cache", f"be of layer {self.layer_idx}", f"that of layer {cache.layer_idx}", hint)
        return cache.tensors


def note_loaded(layer: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Before `load_state_dict`, of this layer or of a model around it: what is there is no longer missing."""
    assert isinstance(layer, MLAttention)
    for name, held in layer.held().items():
        if getattr(state_dict.get(prefix + name), "shape", None) == held.shape:
            layer._missing.discard(name)
