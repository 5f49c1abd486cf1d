"""Blocks and in-place layers on the kernels: the same stories as on the operators, with bfloat16 index keys."""

from __future__ import annotations

import pytest

from dsacp_npu import backend
from tests.cann import test_block as blocks
from tests.cann import test_layer as layers
from tests.cann.test_layer import KINDS, by_ratio
from tests.kernels.test_layer import on_kernels
from tests.layer_strategies import Kind


@pytest.fixture(autouse=True)
def kernels_for_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where those stories ask for the operators they get the kernels."""
    monkeypatch.setattr(backend, "get", lambda name, get=backend.get: get("triton" if name == "cann" else name))
    for module in (blocks, layers):
        monkeypatch.setattr(module, "on_operators", on_kernels)


@by_ratio
def test_decoder_block_on_the_kernels(kind: Kind) -> None:
    blocks.test_decoder_block_on_the_emulator(kind)


@pytest.mark.parametrize("experts", ["whole", "split"])
def test_block_over_ranks_on_the_kernels(experts: str) -> None:
    blocks.test_block_over_ranks_on_the_emulator(KINDS[1], experts)


@by_ratio
def test_in_place_blocks_on_the_kernels(kind: Kind) -> None:
    blocks.test_in_place_blocks_on_the_emulator(kind)


@by_ratio
def test_in_place_layers_on_the_kernels(kind: Kind) -> None:
    layers.test_in_place_layers_on_the_emulator(kind)
