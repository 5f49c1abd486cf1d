"""One attention block's weights under our names: the same memory, seen in our shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dsacp_npu._tensors import dtype_name, torch
from dsacp_npu.loading import KEYS, MLA_KEYS
from dsacp_ref.spec import UnsupportedError, contract_error

# Our parameter -> theirs, inside one attention block, by model type; not every V4 block has compressor and indexer.
NAMES = {"deepseek_v4": {ours: theirs for ours, (_, theirs) in KEYS.items()}, "deepseek_v32": MLA_KEYS}
# What we see with an axis more than they: theirs lies group by group, or head by head.
STACKED = {"deepseek_v4": ("wo_a", "o_groups"), "deepseek_v32": ("wkv_b", "num_attention_heads")}


class Place(NamedTuple):
    """Where one of their weights lay when it was taken over."""

    module: Any
    name: str
    pointer: int
    dtype: torch.dtype

    @property
    def kept(self) -> bool:
        """Whether it still lies there."""
        weight = getattr(self.module, self.name)
        return bool(weight.data_ptr() == self.pointer and weight.dtype == self.dtype)


def block_weights(block: Any, layer_idx: int) -> dict[str, torch.Tensor]:
    """The block's weights in our shapes, all heads: views, nothing is copied.

    Raises:
        UnsupportedError: a block that has other weights than transformers' own, such as an adapter's or a quantizer's.
    """
    theirs, kind = dict(block.named_parameters()), block.config.model_type
    weights = {ours: theirs.pop(name).detach() for ours, name in NAMES[kind].items() if name in theirs}
    if theirs:
        raise UnsupportedError(
            f"model: layer {layer_idx} must have the attention weights of transformers' {kind} and no others, got "
            f"{', '.join(sorted(theirs))}; merge or take off adapters and quantizers first"
        )
    name, count = STACKED[kind]
    weights[name] = weights[name].unflatten(0, (getattr(block.config, count), -1))
    return weights


def places_of(block: Any) -> list[Place]:
    """Where all of the block's weights lie."""
    found = []
    for name, weight in block.named_parameters():
        owner, _, last = name.rpartition(".")
        found.append(Place(block.get_submodule(owner), last, weight.data_ptr(), weight.dtype))
    return found


def fill_(attention: Any, weights: dict[str, torch.Tensor], names: Mapping[str, str]) -> None:
    """Give our module, which has no memory yet, this rank's part of every weight as a view; ``names`` are theirs.

    Raises:
        ContractError: a shape or a dtype that the module does not have.
    """
    parts = {}
    for name, held in attention.held().items():
        full = weights[name]
        if tuple(full.shape) != tuple(held.shape):
            raise contract_error(f"the model's {names[name]}", f"have shape {list(held.shape)}", list(full.shape))
        own = attention.get_parameter(name).dtype
        if full.dtype != own and name not in attention.any_float:
            hint = "load the model with from_pretrained(dtype=...), which keeps norms, sinks and biases in float32"
            raise contract_error(
                f"the model's {names[name]}", f"have dtype {str(own).removeprefix('torch.')}", dtype_name(full), hint
            )
        parts[name] = full[held.index]
    attention.load_state_dict(parts, assign=True)  # its own `assign` copies


def check_kept(places: list[Place]) -> None:
    """Refuse weights that somebody moved, cast or replaced: ours would go on with the old ones."""
    for place in places:
        if not place.kept:
            raise contract_error(
                "the model's attention weights",
                "lie where they lay when enable() took them over",
                f"another {type(place.module).__name__}.{place.name}",
                "disable(model) before you move, cast or replace them, and enable it again",
            )
