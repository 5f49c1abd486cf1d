"""A drop-in DeepSeek-V4 attention layer with context parallelism, for model code.

::

    rank r:   x --> q of own tokens, all heads ----------------------.
              x --> keys, entries, index keys of all tokens -> cache -+-> attention --> heads <-> tokens --> o_proj

One `DSAttention` a layer holds the weights that its rank needs; one `StepMetadata` a forward tells all layers what to
do with its tokens; one `PagedCache` a layer holds the keys. In a step that splits tokens (prefill), queries are made
of this rank's tokens for all its heads; in any other (decode), of all tokens for this rank's share of them, exactly as
a layer computes that was built with the switch off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dsacp_npu import backend as backends
from dsacp_npu import distributed
from dsacp_npu._geometry import Kind, rows_of
from dsacp_npu._layer_checks import check_cache, check_given
from dsacp_npu._layer_parts import Call, one_device, with_groups, with_heads
from dsacp_npu._layer_records import LayerCache, LayerOutput, LayerWeights
from dsacp_npu._rank_layer import Modes, gathered_weights, groups_per_rank, rank_program, run_alone
from dsacp_npu._tensors import Float, Int32, check_tensor, torch, values_known
from dsacp_npu.attention import check_topk
from dsacp_npu.caches import DTYPES, OVERLAP_RATIO, PagedCache
from dsacp_npu.compressor import CompressorWeights
from dsacp_npu.indexer import IndexerWeights
from dsacp_npu.layer import layer_frequencies
from dsacp_npu.loading import INT8_WEIGHTS, Held
from dsacp_npu.parallel import Parallel, check_model, parallel_of
from dsacp_npu.partition import counted
from dsacp_npu.quant import QuantizedWeight
from dsacp_npu.step import StepMetadata
from dsacp_npu.triton_ops import LOGIT_LIMIT
from dsacp_npu.visibility import visible_entries
from dsacp_ref.config import AttentionConfig
from dsacp_ref.spec import check_bool, check_choice, check_int, check_record, contract_error

if TYPE_CHECKING:
    from dsacp_npu.backend import Backend

__all__ = ["DSAttention"]

nn = torch.nn

FLOAT32_WEIGHTS = ("q_norm", "kv_norm", "attn_sink", "ape", "norm_weight")
WHOLE = slice(None)
ROUNDED_LOGITS = 1.02  # queries and keys are rounded to the layer's dtype after their norms


class Coded(nn.Module):
    """An int8 weight with its scales."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        """Zero codes, and scales that no result survives until the weight is loaded."""
        super().__init__()
        self.register_buffer("values", torch.zeros(shape, dtype=torch.int8, device=device))
        self.register_buffer("scales", torch.full(shape[:1], float("nan"), device=device))


class Parts(nn.Module):
    """Weights that stand together under a name."""


class DSAttention(nn.Module):
    """One attention layer of a model, on this rank.

    Args:
        config: AttentionConfig of the whole model.
        layer_idx: int >= 0; from ``config.num_hidden_layers`` on a draft (MTP) layer, which is window only.
        parallel: Parallel of this rank (`parallel_of`); None is a single device.
        backend: the functions to use, from `dsacp_npu.backend.get`; None is torch.
        dtype: ``"bfloat16"``, ``"float16"``, ``"float32"`` or ``"float64"``, of matrices, hidden states and caches.
        device: where the weights lie.
        w8a8: bool; wq_a, wkv, wq_b, wo_b and the indexer's wq_b are int8 with a scale a channel, and what they project
            is coded in int8 with a scale a token, once for all that share it.

    Raises:
        ContractError: a value does not hold.
        UnsupportedError: what cannot work together, naming the flag (`check_model`).

    Source: xLLM pull request 1997; vllm-ascend dsa_cp.

    >>> from dsacp_ref.config import v4_flash
    >>> layer = DSAttention(v4_flash(), 0, device="meta")
    >>> layer.compress_ratio, layer.held()["wq_b"].shape
    (1, (32768, 1024))
    """

    any_float: tuple[str, ...] = ()  # weights that another model's module may hold in a dtype of its own

    def __init__(
        self,
        config: AttentionConfig,
        layer_idx: int,
        parallel: Parallel | None = None,
        *,
        backend: Backend | None = None,
        dtype: str = "bfloat16",
        device: str | torch.device = "cpu",
        w8a8: bool = False,
    ) -> None:
        super().__init__()
        check_record("config", config, AttentionConfig)
        parallel = parallel_of() if parallel is None else parallel
        check_record("parallel", parallel, Parallel)
        check_model(parallel, config, backend)
        self.config, self.parallel = config, parallel
        self.backend = backends.get("torch") if backend is None else backend
        self.layer_idx = check_int("layer_idx", layer_idx, 0)
        self.compress_ratio = config.compress_ratio(layer_idx)
        self.dtype_name = check_choice("dtype", dtype, DTYPES)
        self.w8a8 = check_bool("w8a8", w8a8)
        options = parallel.options
        self.modes = Modes(
            options.prefill_cp_mode, options.dsa_cp_rows, options.dsa_cp_key_mode, options.dsa_cp_output_mode, None
        )
        tp_size, cp_size = parallel.tp_size, parallel.cp_size
        own = replace(config, num_heads=config.num_heads // tp_size, o_groups=config.o_groups // tp_size)
        # Ranks that do not divide the heads each run all of them in a step that does not split tokens.
        self.divides = own.num_heads % cp_size == 0 and own.o_groups % cp_size == 0
        shared = cp_size if self.divides else 1
        self.split_kind = kind_of_layer(own, self.compress_ratio, self.backend)
        self.whole_kind = self.split_kind._replace(
            config=replace(own, num_heads=own.num_heads // shared, o_groups=own.o_groups // shared)
        )
        self._missing = set(self.held())
        self._logit_bound: float | None = None  # known once the norm of the keys is
        self._build(torch.device(device))
        self.register_load_state_dict_pre_hook(note_loaded)
        self.register_load_state_dict_post_hook(note_logit_bound)

    # --- weights ---

    def held(self) -> dict[str, Held]:
        """Which part of each of the layer's weights this rank keeps.

        Returns:
            dict from our name of a weight (`dsacp_npu.layer.LayerWeights`, parts joined by dots) to Held: its whole
            shape, and the slices of it that are kept.
        """
        config, heads, groups = self.config, self._kept_heads(), self._kept_groups()
        lora, width, hidden = config.q_lora_rank, config.head_dim, config.hidden_size
        group_width = config.num_heads // config.o_groups * width
        found = {
            "wq_a": Held((lora, hidden), (WHOLE, WHOLE)),
            "q_norm": Held((lora,), (WHOLE,)),
            "wq_b": Held((config.num_heads * width, lora), (slice(heads.start * width, heads.stop * width), WHOLE)),
            "wkv": Held((width, hidden), (WHOLE, WHOLE)),
            "kv_norm": Held((width,), (WHOLE,)),
            "attn_sink": Held((config.num_heads,), (heads,)),
            "wo_a": Held((config.o_groups, config.o_lora_rank, group_width), (groups, WHOLE, WHOLE)),
            "wo_b": Held(
                (hidden, config.o_groups * config.o_lora_rank),
                (WHOLE, slice(groups.start * config.o_lora_rank, groups.stop * config.o_lora_rank)),
            ),
        }
        if self.compress_ratio > 1:
            found |= self._compressor_held("compressor.", width)
        if self.split_kind.indexed:
            index = config.index_n_heads * config.index_head_dim
            found["indexer.wq_b"] = Held((index, lora), (WHOLE, WHOLE))
            found["indexer.weights_proj"] = Held((config.index_n_heads, hidden), (WHOLE, WHOLE))
            found |= self._compressor_held("indexer.compressor.", config.index_head_dim)
        return found

    def _compressor_held(self, prefix: str, d: int) -> dict[str, Held]:
        width = 2 * d if self.split_kind.overlap else d
        hidden = self.config.hidden_size
        return {
            f"{prefix}wkv": Held((width, hidden), (WHOLE, WHOLE)),
            f"{prefix}wgate": Held((width, hidden), (WHOLE, WHOLE)),
            f"{prefix}ape": Held((self.compress_ratio, width), (WHOLE, WHOLE)),
            f"{prefix}norm_weight": Held((d,), (WHOLE,)),
        }

    def _kept_heads(self) -> slice:
        """The heads whose wq_b and sink are kept: all that any step here makes queries of."""
        return part_of(self.config.num_heads, self.parallel.tp_size, self.parallel.tp_rank)

    def _kept_groups(self) -> slice:
        """The groups whose wo_a and wo_b are kept."""
        own = part_of(self.config.o_groups, self.parallel.tp_size, self.parallel.tp_rank)
        if not self.parallel.cp_active or self.modes.output_mode == "replicated_weight":
            return own
        counts = groups_per_rank(own.stop - own.start, self.parallel.cp_size)
        start = own.start + sum(counts[: self.parallel.cp_rank])
        return slice(start, start + counts[self.parallel.cp_rank])

    def _build(self, device: torch.device) -> None:
        """Room for every weight that is kept."""
        for name, held in self.held().items():
            *parents, leaf = name.split(".")
            owner: nn.Module = self
            for parent in parents:
                if not hasattr(owner, parent):
                    owner.add_module(parent, Parts())
                owner = getattr(owner, parent)
            shape = held.kept_shape
            if self.w8a8 and name in INT8_WEIGHTS:
                owner.add_module(leaf, Coded(shape, device))
                continue
            dtype = torch.float32 if leaf in FLOAT32_WEIGHTS else getattr(torch, self.dtype_name)
            if leaf in FLOAT32_WEIGHTS and self.dtype_name == "float64":
                dtype = torch.float64
            unset = torch.full(shape, float("nan"), dtype=dtype, device=device)
            owner.register_parameter(leaf, nn.Parameter(unset, requires_grad=False))

    def assign(self, name: str, tensor: Float | QuantizedWeight) -> None:
        """Take this rank's part of a weight.

        Args:
            name: a name of `held`.
            tensor: of the shape that is kept, any float dtype; QuantizedWeight where the layer's weight is int8.

        Raises:
            ContractError: no such weight, another shape, or floats where codes are due or the reverse.
        """
        held = self.held()
        check_choice("name", name, tuple(held))
        shape, place = held[name].kept_shape, self._place(name)
        coded = isinstance(place, Coded)
        if coded != isinstance(tensor, QuantizedWeight):
            rule = "be a QuantizedWeight" if coded else "be a float tensor"
            hint = "use dsacp_npu.quant.quantized_weight" if coded else "build the layer with w8a8=True"
            raise contract_error(name, rule, type(tensor).__name__, hint)
        if isinstance(tensor, QuantizedWeight):
            check_tensor(f"{name}.values", tensor.values, ("int8",), shape, "this rank's part")
            check_tensor(f"{name}.scales", tensor.scales, ("float32",), shape[:1], "one scale a channel")
            place.values.copy_(tensor.values)
            place.scales.copy_(tensor.scales)
        else:
            check_tensor(name, tensor, DTYPES, shape, "this rank's part")
            place.data.copy_(tensor)
        self._missing.discard(name)
        if name == "kv_norm":
            note_logit_bound(self)

    def _place(self, name: str) -> Any:
        owner: Any = self
        for part in name.split("."):
            owner = getattr(owner, part)
        return owner

    def kept_weights(self) -> LayerWeights:
        """The weights of this rank as a record; int8 ones as QuantizedWeight.

        Returns:
            LayerWeights.
        """

        def weight(name: str) -> Any:
            place = self._place(name)
            return QuantizedWeight(place.values, place.scales) if isinstance(place, Coded) else place

        def compressor(prefix: str) -> CompressorWeights:
            return CompressorWeights(*(weight(f"{prefix}.{field}") for field in CompressorWeights._fields))

        indexer = None
        if self.split_kind.indexed:
            index = weight("indexer.wq_b"), weight("indexer.weights_proj"), compressor("indexer.compressor")
            indexer = IndexerWeights(*index)
        matrices = (weight(name) for name in LayerWeights._fields[:8])
        return LayerWeights(*matrices, compressor("compressor") if self.compress_ratio > 1 else None, indexer)

    # --- a step ---

    def forward(
        self,
        hidden_states: Float,
        step: StepMetadata,
        cache: PagedCache | LayerCache,
        *,
        given_topk: Int32 | None = None,
    ) -> Float:
        """The layer's output for this rank's rows.

        Args:
            hidden_states: float [step.num_rows, hidden], the block input after its norm, in the layer's dtype.
            step: StepMetadata of this forward.
            cache: this layer's PagedCache, or an engine's own LayerCache; written into.
            given_topk: int32[num_tokens, index_topk] by token of the step, a selection to use instead of the
                indexer's; or None.

        Returns:
            float [step.num_rows, hidden]; zero in pad rows.

        Raises:
            ContractError: rows, a step or a cache that do not belong together, weights that were not loaded, or a
                request that goes on from state that is not there. The cache is as it was then.
        """
        return self.attend(hidden_states, step, cache, given_topk=given_topk).output

    def attend(
        self,
        hidden_states: Float,
        step: StepMetadata,
        cache: PagedCache | LayerCache,
        *,
        given_topk: Int32 | None = None,
    ) -> LayerOutput:
        """`forward`, with what the indexer chose.

        Args:
            hidden_states, step, cache, given_topk: as there.

        Returns:
            LayerOutput: output; topk_indices of this rank's own rows; the cache.

        Raises:
            ContractError: as there.
        """
        tensors = self._tensors_of(cache)
        weights = self.kept_weights()
        self._check(hidden_states, step, tensors, weights, given_topk)
        batch = step.batches[self.compress_ratio]
        if isinstance(cache, PagedCache):
            cache.check_continues(batch, step.requests, step.plan)
        if self.w8a8 and values_known(hidden_states):
            # Pad rows hold anything, and where values can be read, what has no code is refused.
            hidden_states = hidden_states.masked_fill((step.positions < 0)[:, None], 0)
        run = self._by_tokens if step.splits else self._by_heads
        result = run(hidden_states, step, tensors, weights, given_topk)
        if self.parallel.tp is not None:
            result = result._replace(output=distributed.all_reduce(result.output, self.parallel.tp))
        if isinstance(cache, PagedCache):
            cache.advance(batch)
        return result

    def _by_tokens(
        self, x: Float, step: StepMetadata, cache: LayerCache, weights: LayerWeights, given_topk: Int32 | None
    ) -> LayerOutput:
        """Own tokens, all heads that this rank holds."""
        ranks = self.parallel.cp
        assert ranks is not None  # of a step that splits tokens
        program = rank_program(
            x, cache, step.rank_step(self.compress_ratio), self._call(self.split_kind, weights), given_topk
        )
        output: LayerOutput = run_alone(program, lambda wish: distributed.answered(wish, ranks))
        return output

    def _by_heads(
        self, x: Float, step: StepMetadata, cache: LayerCache, weights: LayerWeights, given_topk: Int32 | None
    ) -> LayerOutput:
        """All tokens, this rank's share of the heads: what a layer built with the switch off computes."""
        cp, kind, output_mode = self.parallel.cp, self.whole_kind, self.modes.output_mode
        if cp is not None and self.divides:
            weights = with_heads(weights, cp.cp_rank, cp.cp_size)
            if output_mode == "replicated_weight":  # in other modes a rank keeps no other groups
                weights = with_groups(weights, cp.cp_rank, cp.cp_size)
        elif cp is not None and output_mode == "gather_weight":
            program = gathered_weights(weights.wo_a, weights.wo_b, cp.cp_size, kind)
            wo_a, wo_b = run_alone(program, lambda wish: distributed.answered(wish, cp))
            weights = weights._replace(wo_a=wo_a, wo_b=wo_b)
        geometry = step.geometry(self.compress_ratio)
        if given_topk is not None:  # by token; the stream may have pad rows after them
            no_choice = given_topk.new_full((len(x) - len(given_topk), given_topk.shape[1]), -1)
            given_topk = torch.cat([given_topk, no_choice])
        output, chosen = one_device(x, geometry, cache, self._call(kind, weights), given_topk)
        if cp is not None and self.divides:
            output = distributed.all_reduce(output, cp)
        return LayerOutput(output, chosen, cache)

    def _call(self, kind: Kind, weights: LayerWeights) -> Call:
        """This layer with these weights; with its bound of logits where the backend has a form of attention for it."""
        return Call(kind, weights, self._logit_bound if self.backend.name == "triton" else None)

    def _check(
        self, x: Float, step: StepMetadata, cache: LayerCache, weights: LayerWeights, given_topk: Int32 | None
    ) -> None:
        """Refuse what does not belong together, before anything is sent or written."""
        if self._missing:
            raise contract_error(
                f"weights of layer {self.layer_idx}",
                "be loaded before the first step",
                f"none for {', '.join(sorted(self._missing))}",
                "use dsacp_npu.loading.load_attention",
            )
        check_record("step", step, StepMetadata)
        shape = (step.num_rows, self.config.hidden_size)
        check_tensor("hidden_states", x, (self.dtype_name,), shape, "the rows that the step was made for")
        check_record("cache", cache, LayerCache)
        check_cache(cache, x, weights, self.config)
        step.check_cache(self.compress_ratio, cache)
        if given_topk is not None:
            self._check_given(given_topk, step, weights)

    def _check_given(self, given_topk: Int32, step: StepMetadata, weights: LayerWeights) -> None:
        """Refuse a handed-in selection of another shape, and one of entries that its token does not see."""
        check_given(given_topk, step.num_tokens, weights, self.config)
        if values_known(given_topk):
            batch = step.batches[self.compress_ratio]
            positions = rows_of(counted(step.num_tokens, batch.seq_lens), batch).positions
            check_topk(given_topk, visible_entries(positions, self.compress_ratio))

    def _tensors_of(self, cache: PagedCache | LayerCache) -> LayerCache:
        """The tensors to write into; another layer's cache may have the same sizes, and is refused by its number."""
        if not isinstance(cache, PagedCache):
            return cache
        if cache.layer_idx != self.layer_idx:
            hint = f"take caches[{self.layer_idx}]"
            raise contract_error("cache", f"be of layer {self.layer_idx}", f"that of layer {cache.layer_idx}", hint)
        return cache.tensors


def kind_of_layer(config: AttentionConfig, compress_ratio: int, ops: Any) -> Kind:
    """The kind of a V4 layer with this ratio."""
    indexed = compress_ratio == OVERLAP_RATIO
    return Kind(config, compress_ratio, indexed, indexed, layer_frequencies(config, compress_ratio), ops)


def part_of(count: int, size: int, rank: int) -> slice:
    """One rank's equal part of so many."""
    each = count // size
    return slice(rank * each, (rank + 1) * each)


def note_logit_bound(layer: nn.Module, *_: Any) -> None:
    """Once the norm of the keys is loaded: how large a logit can be, read from the device this one time.

    A query's heads are normed to length sqrt(head_dim) without a weight and a key has at most max|kv_norm| times that,
    RoPE turns both without a change of length, and logits are scaled by 1 / sqrt(head_dim).
    """
    assert isinstance(layer, DSAttention)
    if layer.backend.name != "triton" or "kv_norm" in layer._missing:
        return
    largest = math.sqrt(layer.config.head_dim) * float(layer.kv_norm.abs().max())
    bound = largest * ROUNDED_LOGITS
    layer._logit_bound = bound if bound <= LOGIT_LIMIT else None


def note_loaded(layer: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Before `load_state_dict`, of this layer or of a model around it: what is all there is no longer missing."""
    assert isinstance(layer, DSAttention)
    for name in layer.held():
        place = layer._place(name)
        parts = {name: place}
        if isinstance(place, Coded):
            parts = {f"{name}.{part}": tensor for part, tensor in place.named_buffers()}
        if all(getattr(state_dict.get(prefix + key), "shape", None) == part.shape for key, part in parts.items()):
            layer._missing.discard(name)
