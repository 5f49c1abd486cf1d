"""The operators that work row by row: numbers against loops, refusals, slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsacp_npu.emulator import OperatorError, OutOfRangeError
from tests.compare import assert_same, assert_within_budget
from tests.emulator.common import int32, normal, ops
from tests.oracles import rope
from tests.oracles.compressor import rms_norm
from tests.oracles.quant import encode, encode_row, quant_product

GENERATOR = torch.Generator().manual_seed(4)
FREQUENCIES = rope.frequencies(10000.0, 64)


def tables(positions: list[int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """cos and sin [rows, 1, 1, 64] of positions, every angle twice."""
    rows = [[rope.cos_sin(p, frequency) for frequency in FREQUENCIES] for p in positions]
    return [
        torch.tensor([[pair[half] for pair in row] for row in rows])
        .repeat_interleave(2, dim=1)[:, None, None]
        .to(dtype)
        for half in (0, 1)
    ]


def rotary(x: torch.Tensor, *args: Any) -> None:
    ops().inplace_partial_rotary_mul(x, *args)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [512, 128])
def test_rotary_numbers(dtype: torch.dtype, width: int) -> None:
    positions = [0, 5, 70000]
    x = normal(GENERATOR, 3, 1, 2, width, dtype=dtype)
    want = torch.tensor(
        [[rope.rotate(x[t, 0, h].tolist(), p, FREQUENCIES) for h in range(2)] for t, p in enumerate(positions)]
    ).double()[:, None]
    cos, sin = tables(positions)
    got = x.clone()
    rotary(got, cos, sin, "interleave", [width - 64, width])
    assert_within_budget(got, want, want.to(dtype))
    assert_same(got[..., :-64], x[..., :-64])
    rotary(got, cos, -sin, "interleave", [width - 64, width])
    assert torch.allclose(got.float(), x.float(), atol=0.05)


def test_rotary_turns_a_view_in_place() -> None:
    q = normal(GENERATOR, 2, 4, 512)
    before = q.clone()
    rotary(q.unsqueeze(1), *tables([3, 4]), "interleave", [448, 512])
    assert not torch.equal(q, before)


def test_an_unknown_rotary_mode_does_nothing() -> None:
    """It returns without a word, whatever else is wrong."""
    x = normal(GENERATOR, 2, 1, 4, 512)
    before = x.clone()
    rotary(x, torch.ones(1), torch.ones(1), "interleaved", [0, 7])
    assert_same(x, before)


@pytest.mark.parametrize("mode", ["half", "quarter", "interleave-half"])
def test_rotary_modes_of_other_chips_are_refused(mode: str) -> None:
    with pytest.raises(OperatorError, match="rotary_mode must be one of interleave"):
        rotary(normal(GENERATOR, 1, 1, 4, 512), *tables([3]), mode, [448, 512])


@pytest.mark.parametrize(
    ("pattern", "x", "r1", "r2", "part"),
    [
        ("x must have shape", (2, 4, 512), (2, 1, 1, 64), (2, 1, 1, 64), [448, 512]),
        ("r1 must have shape", (2, 1, 4, 512), (2, 64), (2, 64), [448, 512]),
        ("r1 must have shape", (2, 1, 4, 512), (1, 1, 1, 64), (1, 1, 1, 64), [448, 512]),
        ("r1 must have shape", (2, 1, 4, 512), (2, 1, 4, 64), (2, 1, 4, 64), [448, 512]),
        ("r1 must have shape", (2, 1, 4, 512), (2, 1, 1, 32), (2, 1, 1, 32), [448, 512]),
        ("r2 must have shape", (2, 1, 4, 512), (2, 1, 1, 64), (1, 1, 1, 64), [448, 512]),
        ("r1 must have 1 or 2 rows along axis 1", (2, 2, 4, 512), (2, 3, 1, 64), (2, 3, 1, 64), [448, 512]),
        ("partial_slice must be", (2, 1, 4, 512), (2, 1, 1, 64), (2, 1, 1, 64), [480, 544]),
        ("partial_slice must be", (2, 1, 4, 512), (2, 1, 1, 64), (2, 1, 1, 64), [512, 448]),
        ("partial_slice must span", (2, 1, 4, 512), (2, 1, 1, 63), (2, 1, 1, 63), [449, 512]),
    ],
)
def test_rotary_refusals(pattern: str, x: Any, r1: Any, r2: Any, part: list[int]) -> None:
    with pytest.raises(OperatorError, match=pattern):
        rotary(torch.zeros(x), torch.ones(r1), torch.ones(r2), "interleave", part)


def test_rotary_refuses_other_dtypes_and_strides() -> None:
    cos, sin = tables([1])
    x = torch.zeros(1, 1, 4, 512)
    with pytest.raises(OperatorError, match="x must have dtype"):
        rotary(x.double(), cos, sin, "interleave", [448, 512])
    with pytest.raises(OperatorError, match="r1 must have dtype"):
        rotary(x, cos.half(), sin.half(), "interleave", [448, 512])
    with pytest.raises(OperatorError, match="r2 must have dtype"):
        rotary(x.half(), cos, sin.half(), "interleave", [448, 512])
    rotary(x.half(), cos.half(), sin.half(), "interleave", [448, 512])
    with pytest.raises(OperatorError, match="x must be contiguous"):
        rotary(torch.zeros(1, 1, 512, 4).transpose(2, 3), cos, sin, "interleave", [448, 512])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms(dtype: torch.dtype) -> None:
    x, gamma = normal(GENERATOR, 2, 3, 96, dtype=dtype), normal(GENERATOR, 96, dtype=dtype)
    want = torch.tensor([[rms_norm(row.tolist(), gamma.tolist(), 1e-6) for row in rows] for rows in x]).double()
    got, reciprocal = ops("npu").npu_rms_norm(x, gamma, 1e-6)
    assert_within_budget(got, want, want.to(dtype))
    assert torch.allclose(reciprocal[..., 0], (x.float().square().mean(-1) + 1e-6).rsqrt())
    codes, scales = ops().npu_rms_norm_dynamic_quant(x, gamma, epsilon=1e-6)
    assert (codes.dtype, scales.dtype, scales.shape) == (torch.int8, torch.float32, (2, 3))
    assert torch.allclose(scales.double(), want.abs().amax(-1) / 127, rtol=1e-5)
    assert ((codes * scales[..., None]).double() - want).abs().le(scales[..., None] * 0.501).all()


def test_norm_extras_and_refusals() -> None:
    x, gamma = normal(GENERATOR, 2, 8), torch.ones(8).bfloat16()
    quant = ops().npu_rms_norm_dynamic_quant
    normed = ops("npu").npu_rms_norm(x.float(), gamma.float())[0]
    codes, scales = quant(x, gamma, smooth_scale=torch.full((8,), 2.0), beta=torch.ones(8))
    assert torch.allclose(codes * scales[:, None], (normed + 1) * 2, atol=float(scales.max()))
    zero, scale = quant(torch.zeros(1, 8).half(), gamma)
    assert not zero.any()
    assert scale.tolist() == [0]
    for pattern, call in (
        ("no empty axis.*skip the call", (x[:0], gamma)),
        ("x dtype must be", (x.float(), gamma)),
        (r"gamma must have shape \[8\]", (x, gamma[:4])),
        ("beta must have shape", (x, gamma, None, torch.ones(4))),
    ):
        with pytest.raises(OperatorError, match=pattern):
            quant(*call)
    with pytest.raises(OperatorError, match="epsilon must be > 0"):
        quant(x, gamma, epsilon=0.0)


def test_int8_codes() -> None:
    x = normal(GENERATOR, 4, 128)
    x[2] = 0
    codes, scales = ops("npu").npu_dynamic_quant(x, dst_type=torch.int8)
    for row in range(4):
        values, scale = encode(x[row].float().tolist())
        assert codes[row].tolist() == values
        assert scales[row].half().item() == float(scale)
        assert scales[row].item() == encode_row(x[row].float().tolist())[1]


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        ("smooth_scales must be one of None.*not emulated", {"smooth_scales": torch.ones(8)}),
        ("group_index", {"group_index": int32(1)}),
        ("dst_type", {"dst_type": torch.float16}),
        ("quant_mode", {"quant_mode": "pertensor"}),
        ("dst_type_max", {"dst_type_max": 1.0}),
        ("input dtype", {"input": torch.ones(2, 8)}),
        ("input must have no empty axis", {"input": torch.ones(0, 8).half()}),
    ],
)
def test_int8_refusals(pattern: str, changes: dict[str, Any]) -> None:
    with pytest.raises(OperatorError, match=pattern):
        ops("npu").npu_dynamic_quant(**{"input": torch.ones(2, 8).half(), **changes})


SCATTERS = ["npu_scatter_nd_update_v2", "npu_scatter_nd_update_"]


def scatter(name: str, var: torch.Tensor, indices: list[Any], update: torch.Tensor, dtype: Any = torch.int32) -> None:
    namespace = "npu" if name.endswith("_") else "_C_ascend"
    width = len(indices[0]) if indices else 1
    getattr(ops(namespace), name)(var, torch.tensor(indices, dtype=dtype).reshape(len(indices), width), update)


@pytest.mark.parametrize("name", SCATTERS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_scatter(name: str, dtype: torch.dtype) -> None:
    """By flat slot, or by block and place; -1 in either spelling writes nothing; trailing axes may be flat."""
    update = normal(GENERATOR, 4, 8)
    paged, flat = torch.zeros(3, 2, 1, 8).bfloat16(), torch.zeros(6, 8).bfloat16()
    scatter(name, paged, [[2, 1], [-1, 1], [0, 0], [1, 0]], update, dtype)
    scatter(name, flat, [[5], [-1], [0], [2]], update, dtype)
    assert_same(paged.reshape(6, 8), flat)
    assert_same(flat[[5, 0, 2]], update[[0, 2, 3]])
    assert not flat[[1, 3, 4]].any()
    before = flat.clone()
    scatter(name, flat, [], update[:0], dtype)
    scatter(name, flat, [[-1], [-1]], update[:2], dtype)
    assert_same(flat, before)


@pytest.mark.parametrize("name", SCATTERS)
@pytest.mark.parametrize("slot", [[3, 0], [0, 2], [-1, 0], [-2, 1], [-1, -1]])
def test_scatter_out_of_range(name: str, slot: list[int]) -> None:
    """(0, 2) would be a row of the next block. Nothing is written before all slots are known to be good."""
    cache = torch.zeros(3, 2, 8)
    with pytest.raises(OutOfRangeError, match=rf"indices, row 1: slot \[{slot[0]}, {slot[1]}\] is outside of \[3, 2\]"):
        scatter(name, cache, [[0, 0], slot], torch.ones(2, 8))
    assert not cache.any()


@pytest.mark.parametrize("name", SCATTERS)
def test_a_slot_that_gets_two_rows_is_undefined(name: str) -> None:
    cache, codes = torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.int8)
    scatter(name, cache, [[1], [1], [2], [2]], torch.tensor([[1.0, 1], [2, 2], [3, 3], [3, 3]]))
    assert cache[1].isnan().all()
    assert cache[2].tolist() == [3, 3]
    scatter(name, codes, [[1], [1]], torch.tensor([[1, 1], [2, 2]], dtype=torch.int8))
    assert codes[1].tolist() == [-128, -128]


def test_scatter_refusals() -> None:
    var = torch.zeros(4, 8)
    for pattern, call in (
        ("indices must have dtype", (var, torch.zeros(1, 1), torch.zeros(1, 8))),
        (r"indices must have shape \[rows, k\]", (var, int32(1, 2), torch.zeros(2, 8))),
        ("indices must name 1 to 2 axes", (var, torch.zeros(1, 3).int(), torch.zeros(1))),
        ("update must be", (var, torch.zeros(1, 1).int(), torch.zeros(1, 8).half())),
        ("update must be", (var, torch.zeros(2, 1).int(), torch.zeros(1, 8))),
        ("update must be", (var, torch.zeros(2, 1).int(), torch.zeros(1, 16))),
    ):
        with pytest.raises(OperatorError, match=pattern):
            ops().npu_scatter_nd_update_v2(*call)


def test_scatter_returns_its_argument() -> None:
    var = torch.zeros(4, 8)
    assert ops("npu").npu_scatter_nd_update_(var, torch.zeros(1, 1).int(), torch.ones(1, 8)) is var


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_grouped_product(dtype: torch.dtype) -> None:
    x, weight = normal(GENERATOR, 3, 2, 16, dtype=dtype), normal(GENERATOR, 2, 16, 5, dtype=dtype)
    want = torch.einsum("tgk,gkn->tgn", x.double(), weight.double())
    product = ops("npu").npu_transpose_batchmatmul
    got = product(x, weight, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2])
    assert_within_budget(got, want, torch.einsum("tgk,gkn->tgn", x.float(), weight.float()).to(dtype))
    assert_same(product(x, weight), got)
    assert_same(product(x.transpose(0, 1), weight, perm_x1=[0, 1, 2]), got)


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        ("bias must be one of None.*not emulated", {"bias": torch.ones(5)}),
        ("scale must be one of None", {"scale": torch.ones(5)}),
        ("batch_split_factor", {"batch_split_factor": 2}),
        ("perm_x1 must be", {"perm_x1": [2, 1, 0]}),
        ("perm_x2 must be", {"perm_x2": [0, 2, 1]}),
        ("perm_y must be", {"perm_y": [0, 1, 2]}),
        (r"weight must have shape \[2, 16, N\]", {"weight": torch.ones(3, 16, 5)}),
        (r"weight must have shape \[3, 16, N\]", {"perm_x1": [0, 1, 2]}),
        ("weight must have dtype", {"weight": torch.ones(2, 16, 5).half()}),
        ("input must have shape", {"input": torch.ones(3, 32)}),
    ],
)
def test_grouped_product_refusals(pattern: str, changes: dict[str, Any]) -> None:
    with pytest.raises(OperatorError, match=pattern):
        ops("npu").npu_transpose_batchmatmul(
            **{"input": torch.ones(3, 2, 16), "weight": torch.ones(2, 16, 5), **changes}
        )


def coded_product(**changes: Any) -> dict[str, Any]:
    """Arguments of a legal product of int8 matrices, 3 by 8 and 8 by 5, the second one transposed."""
    generator = torch.Generator().manual_seed(5)
    x1, weight = (torch.randint(-128, 128, (rows, 8), generator=generator, dtype=torch.int8) for rows in (3, 5))
    scales = [torch.rand(rows, generator=generator) for rows in (3, 5)]
    legal = {"x1": x1, "x2": weight.T, "scale": scales[1], "pertoken_scale": scales[0], "output_dtype": torch.bfloat16}
    return {**legal, **changes}


def multiply(**changes: Any) -> torch.Tensor:
    return ops("npu").npu_quant_matmul(**coded_product(**changes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_coded_product(dtype: torch.dtype) -> None:
    """Number by number; a matrix in rows and one in columns are the same."""
    case = coded_product()
    want = torch.empty(3, 5)
    for t in range(3):
        for n in range(5):
            row = case["x1"][t].tolist(), case["pertoken_scale"][t].numpy()
            want[t, n] = float(quant_product(*row, case["x2"][:, n].tolist(), case["scale"][n].numpy()))
    assert_same(multiply(output_dtype=dtype), want.to(dtype))
    assert_same(multiply(output_dtype=dtype, x2=case["x2"].contiguous()), want.to(dtype))


def test_coded_product_with_other_scales() -> None:
    """One scale for all channels; bfloat16 scales where the output is bfloat16."""
    assert_same(multiply(scale=torch.full((1,), 0.5)), multiply(scale=torch.full((5,), 0.5)))
    scale = coded_product()["scale"].bfloat16()
    assert_same(multiply(scale=scale), multiply(scale=scale.float()))


@pytest.mark.parametrize("width", [1, 65535])
def test_coded_product_of_the_widest_factors(width: int) -> None:
    """Extreme codes: the sum is of 31 bits, and exact before it is rounded."""
    ones = torch.full((1, width), -128, dtype=torch.int8)
    got = multiply(x1=ones, x2=ones.T, scale=torch.full((1,), 2.0**-14), pertoken_scale=torch.ones(1))
    assert got.item() == torch.tensor(float(width)).bfloat16().item()
    wide = multiply(x1=ones[:, :1], x2=ones, scale=torch.full((width,), 2.0**-14), pertoken_scale=torch.ones(1))
    assert_same(wide, torch.ones(1, width).bfloat16())


BROAD = torch.ones(8, 65536, dtype=torch.int8)
COLUMNS = torch.ones(65536, 8, dtype=torch.int8)


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        (r"x1 must have dtype torch\.int8", {"x1": torch.ones(3, 8)}),
        (r"x1 must have shape \[M, K\]", {"x1": torch.ones(1, 3, 8, dtype=torch.int8)}),
        (r"x2 must have dtype torch\.int8", {"x2": torch.ones(8, 5).int()}),
        (r"x2 must have shape \[8, N\]", {"x2": torch.ones(5, 8, dtype=torch.int8)}),
        ("x1 must have no empty axis.*skip the call", {"x1": torch.ones(0, 8, dtype=torch.int8)}),
        ("x2 must have no empty axis.*skip the call", {"x2": torch.ones(8, 0, dtype=torch.int8)}),
        ("x2 must have at most 65535 columns, got 65536; call it in chunks", {"x2": BROAD}),
        ("x2 must have at most 65535 columns, got 65536; call it in chunks", {"x2": COLUMNS.T}),
        ("x1 must have at most 65535 columns, got 65536", {"x1": BROAD, "x2": COLUMNS}),
        ("x1 must be contiguous", {"x1": torch.ones(8, 3, dtype=torch.int8).T}),
        ("x2 must be contiguous, or the transpose", {"x2": torch.ones(8, 10, dtype=torch.int8)[:, ::2]}),
        (r"scale must have dtype torch\.float32 or torch\.bfloat16", {"scale": torch.ones(5).half()}),
        (r"scale must have dtype torch\.float32,", {"scale": torch.ones(5).bfloat16(), "output_dtype": torch.float16}),
        (r"scale must have shape \[N or 1\]", {"scale": torch.ones(5, 1)}),
        (r"scale must have shape \[5\] or \[1\], got \[3\]", {"scale": torch.ones(3)}),
        ("pertoken_scale must be given, got None; one scale for all rows", {"pertoken_scale": None}),
        (r"pertoken_scale must have dtype torch\.float32", {"pertoken_scale": torch.ones(3).bfloat16()}),
        (r"pertoken_scale must have shape \[3\]", {"pertoken_scale": torch.ones(5)}),
        ("output_dtype must be .*got None; None is int8", {"output_dtype": None}),
        ("output_dtype must be torch.float16 or torch.bfloat16", {"output_dtype": torch.float32}),
        ("offset must be one of None.*not emulated", {"offset": torch.ones(5)}),
        ("bias must be one of None.*not emulated", {"bias": torch.ones(5).int()}),
        ("x1_dtype must be one of None", {"x1_dtype": 1}),
        ("x2_dtype must be one of None", {"x2_dtype": 1}),
        ("pertoken_scale_dtype must be one of None", {"pertoken_scale_dtype": 6}),
        ("scale_dtype must be one of None", {"scale_dtype": 6}),
        ("group_sizes must be one of None", {"group_sizes": [1, 1, 32]}),
        ("y_scale must be one of None", {"y_scale": torch.ones(5)}),
    ],
)
def test_coded_product_refusals(pattern: str, changes: dict[str, Any]) -> None:
    with pytest.raises(OperatorError, match=f"npu_quant_matmul: .*{pattern}"):
        multiply(**changes)
