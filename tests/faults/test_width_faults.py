"""Public faults of width: a matrix that one operator call cannot take is multiplied in chunks, with the same result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from dsacp_npu import cann
from dsacp_npu import quant as mirror
from dsacp_npu._cann_vectors import MATMUL_WIDTH
from dsacp_npu.emulator import OperatorError, installed
from dsacp_ref.spec import UnsupportedError
from tests.compare import assert_same


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    """The operators, emulated; one of them refuses what is too wide."""
    with installed() as done:
        if not done:
            pytest.skip("the real library is here: these tests compare against the emulator")
        yield


def factors(num_channels: int, width: int = 8) -> tuple[mirror.QuantizedRows, mirror.QuantizedWeight]:
    """Two coded rows and a coded matrix, any int8 and any scales."""
    rng = np.random.default_rng(num_channels)

    def coded(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = rng.integers(-128, 128, (count, width), dtype=np.int8)
        return torch.tensor(values), torch.tensor(rng.random(count, dtype=np.float32))

    return mirror.QuantizedRows(*coded(2)), mirror.QuantizedWeight(*coded(num_channels))


def widths_of_calls(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, list[int]]:
    """The product by the operator, and how many output channels each call of it had."""
    widths = []

    def watched(name: str) -> Any:
        def called(x1: torch.Tensor, x2: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
            widths.append(x2.shape[1])
            return getattr(torch.ops.npu, name)(x1, x2, *others, **options)

        return called

    with mock.patch("dsacp_npu._cann_vectors.operator", watched):
        return cann.quant_matmul(*args, **kwargs), widths


@pytest.mark.parametrize(("num_channels", "chunks"), [(65535, 1), (65536, 2), (131072, 3)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_wide_projection_is_its_chunks(num_channels: int, chunks: int, dtype: str) -> None:
    """vllm-project/vllm-ascend#9780: the replicated query weight of 128 heads of 512 channels is 65536 wide."""
    rows, weight = factors(num_channels)
    got, widths = widths_of_calls(rows, weight, dtype=dtype)
    assert len(widths) == chunks
    assert sum(widths) == num_channels
    assert max(widths) <= MATMUL_WIDTH < 65536
    assert_same(got, mirror.quant_matmul(rows, weight, dtype=dtype))


def test_the_operator_alone_refuses_the_width() -> None:
    """vllm-project/vllm-ascend#9780: without chunks this is the error."""
    rows, weight = factors(65536)
    with pytest.raises(OperatorError, match="x2 must have at most 65535 columns, got 65536; call it in chunks"):
        torch.ops.npu.npu_quant_matmul(
            rows.values, weight.values.T, weight.scales, pertoken_scale=rows.scales, output_dtype=torch.bfloat16
        )


def test_rows_that_are_too_wide_are_refused() -> None:
    """The kind: chunks of the inner axis would round between one another, so there are none."""
    rows, weight = factors(1, width=65536)
    with pytest.raises(UnsupportedError) as caught:
        cann.quant_matmul(rows, weight, dtype="bfloat16")
    assert str(caught.value) == (
        "quant_matmul on cann: rows.values must have at most 65535 channels, got 65536; use the torch backend for it"
    )
    assert_same(
        cann.quant_matmul(*factors(1, width=65535), dtype="bfloat16"),
        mirror.quant_matmul(*factors(1, width=65535), dtype="bfloat16"),
    )
