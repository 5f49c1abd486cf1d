"""What worker processes do for the tests here: each function gets this rank's `Ranks` first."""

from __future__ import annotations

import torch

from dsacp_npu._ranks import Ranks
from dsacp_npu.integrations.transformers import enable
from dsacp_npu.parallel import parallel_of
from dsacp_ref.config import ParallelConfig
from tests.integrations import worlds


def packed_logits(
    ranks: Ranks, size: str, options: dict[str, object], steps: list[dict[str, int]], prompts: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Every request's logits, its tokens fed step after step."""
    parallel = parallel_of(ParallelConfig(**options), tp=ranks)
    return worlds.packed_logits(worlds.fresh_model(size), parallel, steps, prompts)


def generated(ranks: Ranks, size: str, options: dict[str, object], ids: torch.Tensor, num_new: int) -> torch.Tensor:
    """The tokens of greedy generate()."""
    model = worlds.fresh_model(size)
    enable(model, num_tokens=ids.shape[1] + num_new, parallel=parallel_of(ParallelConfig(**options), tp=ranks))
    return model.generate(ids, max_new_tokens=num_new, do_sample=False)


def executed(ranks: Ranks, code: str, ids: torch.Tensor) -> tuple[torch.Tensor, str]:
    """What README's lines make of a model and tokens: their logits, and the model's attention afterwards."""
    model = worlds.fresh_model("tiny")
    place = parallel_of({"enable_dsa_cp": True, "prefill_cp_mode": "zigzag"}, tp=ranks)
    names = {"model": model, "ids": ids, "place": place}
    exec(code, names)
    return names["logits"], model.config._attn_implementation
