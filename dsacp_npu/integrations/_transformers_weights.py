"""One attention block's weights under our names: the same memory, seen in our shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

from dsacp_npu._tensors import dtype_name, torch
from dsacp_npu.loading import KEYS
from dsacp_ref.spec import UnsupportedError, contract_error

# Our parameter -> theirs, inside one attention block; a block without compressor or indexer has fewer.
NAMES = {ours: theirs for ours, (_, theirs) in KEYS.items()}


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
    theirs = dict(block.named_parameters())
    weights = {ours: theirs.pop(name).detach() for ours, name in NAMES.items() if name in theirs}
    if theirs:
        raise UnsupportedError(
            f"model: layer {layer_idx} must have the attention weights of transformers' deepseek_v4 and no others, got "
            f"{', '.join(sorted(theirs))}; merge or take off adapters and quantizers first"
        )
    weights["wo_a"] = weights["wo_a"].unflatten(0, (block.config.o_groups, -1))  # theirs lie group by group
    return weights


def places_of(block: Any) -> list[Place]:
    """Where all of the block's weights lie."""
    found = []
    for name, weight in block.named_parameters():
        owner, _, last = name.rpartition(".")
        found.append(Place(block.get_submodule(owner), last, weight.data_ptr(), weight.dtype))
    return found


def fill_(attention: Any, weights: dict[str, torch.Tensor]) -> None:
    """Give our module, which has no memory yet, this rank's part of every weight as a view.

    Raises:
        ContractError: a shape or a dtype that the module does not have.
    """
    parts = {}
    for name, held in attention.held().items():
        full = weights[name]
        if tuple(full.shape) != tuple(held.shape):
            raise contract_error(f"the model's {NAMES[name]}", f"have shape {list(held.shape)}", list(full.shape))
        own = attention.get_parameter(name).dtype
        if full.dtype != own:
            hint = "load the model with from_pretrained(dtype=...), which keeps norms, sinks and biases in float32"
            raise contract_error(
                f"the model's {NAMES[name]}", f"have dtype {str(own).removeprefix('torch.')}", dtype_name(full), hint
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
