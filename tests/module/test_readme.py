"""The lines of README that put the module into a model do so, on two ranks, from a checkpoint's files."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from dsacp_npu.commands.outside import SIZES, build_model, layer_weights, reference_weights
from dsacp_ref.layer import LayerBatch, attention_layer, empty_cache
from tests.compare import assert_within_budget
from tests.distributed.pool import run

README = Path(__file__).parents[2] / "README.md"

pytestmark = [
    pytest.mark.xdist_group("processes"),
    pytest.mark.skipif(not README.exists(), reason="README.md is missing: the tests run beside an installed wheel"),
]


def lines() -> str:
    """The block under its heading."""
    section = README.read_text().partition("## Put it into a model")[2]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]  # type: ignore[index]  # no block: a failure


def test_there_are_twelve() -> None:
    assert len([line for line in lines().splitlines() if line]) == 12


@pytest.mark.slow
def test_they_put_the_module_into_a_model(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    config = SIZES["tiny"]
    model = build_model(config)
    names = {name: part for name, part in model.state_dict().items() if ".self_attn." in f".{name}"}
    (tmp_path / "checkpoint").mkdir()
    save_file(
        {f"model.{name}": part.contiguous() for name, part in names.items() if "inv_freq" not in name},
        tmp_path / "checkpoint" / "model.safetensors",
    )
    x = np.random.default_rng(0).standard_normal((300, config.hidden_size)).astype(np.float32)
    given = {"config": config, "checkpoint": tmp_path / "checkpoint", "address": f"file://{tmp_path}/meeting", "x": x}
    found = run(2, "tests.module.readme_work:twelve_lines", [(lines(), given)] * 2)

    def whole(rows: np.ndarray) -> np.ndarray:
        for i, ratio in enumerate(config.compress_ratios):
            weights = reference_weights(layer_weights(model, i))
            weights = type(weights)(*(widened(part, rows.dtype) for part in weights))
            cache = empty_cache(
                weights, num_blocks=3, block_size=128, num_cmp_blocks=1, cmp_block_size=128, num_slots=1
            )
            table = np.arange(3, dtype=np.int32)[None]
            one = np.zeros(1, np.int32)
            batch = LayerBatch(
                np.array([0, len(rows)], np.int32), np.array([len(rows)], np.int32), table, table[:, :1], one
            )
            normed = rows / (1 + np.abs(rows))
            rows = rows + attention_layer(normed, weights, cache, batch, config, compress_ratio=ratio).output
            rows = rows + np.sin(rows)
        return rows

    def widened(part: object, dtype: np.dtype) -> object:
        if isinstance(part, np.ndarray):
            return part.astype(dtype)
        return part if part is None else type(part)(*(widened(inner, dtype) for inner in part))

    assert_within_budget(found[0], whole(x.astype(np.float64)), whole(x), "rank 0")
    assert torch.equal(torch.tensor(found[0]), torch.tensor(found[1])), "ranks hold different rows"
