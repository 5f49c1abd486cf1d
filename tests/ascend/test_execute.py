"""Kernels executed as the compiler has them: right where they are right, and their faults are seen."""

from __future__ import annotations

import importlib
import time
from typing import Any

import pytest
import torch

from dsacp_npu.ascend import guard
from dsacp_npu.ascend.cpu_forms import cpu_form
from dsacp_npu.ascend.execute import LEVELS, lowered_function
from dsacp_npu.ascend.guard import MemoryFaultError, in_child
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.ascend.conftest import MISSING

if MISSING:
    pytest.skip(MISSING, allow_module_level=True)

kernels = importlib.import_module("tests.ascend.executed")
both_levels = pytest.mark.parametrize("level", LEVELS)


def numbers(*sizes: int) -> torch.Tensor:
    """Normal numbers, always the same."""
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(0))


def run(kernel: Any, level: str, arguments: dict[str, Any], programs: int = 1, **constexprs: Any) -> None:
    """Lower a kernel and run it on these arguments."""
    types = {torch.float32: "fp32", torch.int32: "i32", torch.bfloat16: "bf16"}
    signature = {
        name: "*" + types[value.dtype]
        if isinstance(value, torch.Tensor)
        else "fp32"
        if isinstance(value, float)
        else "i32"
        for name, value in arguments.items()
    }
    lowered_function(kernel, signature, constexprs, level=level)(list(arguments.values()), programs)


@both_levels
@pytest.mark.parametrize("programs", [1, 3])
def test_programs_share_blocks(level, programs) -> None:
    x, out = numbers(40), torch.full((40,), 7.0)
    run(kernels.double_kernel, level, {"x_ptr": x, "out_ptr": out, "count": 37}, programs, BLOCK=16)
    assert torch.equal(out, torch.cat([2 * x[:37], torch.full((3,), 7.0)]))


@both_levels
def test_scalars_and_bf16(level) -> None:
    x, out = numbers(64).bfloat16(), torch.zeros(64, dtype=torch.bfloat16)
    run(kernels.scaled_kernel, level, {"x_ptr": x, "out_ptr": out, "factor": -2.5, "shift": 3}, BLOCK=64)
    assert torch.equal(out, (-2.5 * x.float() + 3).bfloat16())


@both_levels
def test_a_mask_one_too_long_is_a_wrong_answer_inside(level) -> None:
    x, out = numbers(32), torch.full((32,), 7.0)
    run(kernels.double_one_too_many_kernel, level, {"x_ptr": x, "out_ptr": out, "count": 31}, BLOCK=32)
    assert torch.equal(out[:31], 2 * x[:31])
    assert out[31] == 0.0


@both_levels
def test_a_mask_one_too_long_is_a_fault_at_the_end(level) -> None:
    arguments = {"x_ptr": numbers(31), "out_ptr": torch.zeros(31), "count": 31}
    with pytest.raises(MemoryFaultError, match=r"double_one_too_many_kernel: SIG.*outside of its arguments"):
        run(kernels.double_one_too_many_kernel, level, arguments, BLOCK=32)


@both_levels
def test_a_write_in_front_is_a_fault(level) -> None:
    arguments = {"x_ptr": numbers(32), "out_ptr": torch.zeros(32), "count": 32, "early": 1}
    with pytest.raises(MemoryFaultError, match="wrote in front of tensor 1"):
        run(kernels.double_in_front_kernel, level, arguments, BLOCK=32)


def test_without_a_guard_it_runs_in_this_process() -> None:
    x, out = numbers(16), torch.zeros(16)
    signature = {"x_ptr": "*fp32", "out_ptr": "*fp32", "count": "i32"}
    lowered_function(kernels.double_kernel, signature, {"BLOCK": 16})([x, out, 16], 1, guarded=False)
    assert torch.equal(out, 2 * x)


def test_vector_division_of_large_integers_is_wrong_after_hfusion_only() -> None:
    """The compiler divides int32 in float32: the reason for the rule that kernels shift."""
    x = torch.randint(1 << 30, (1 << 31) - 1, (1024,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    wrong = {}
    for level in LEVELS:
        out = torch.zeros(2, 1024, dtype=torch.int32)
        run(kernels.divided_kernel, level, {"x_ptr": x, "out_ptr": out}, BLOCK=1024)
        wrong[level] = (out != x >> 6).sum(1).tolist()
    assert wrong["adapter"] == [0, 0]
    assert wrong["hfusion"][0] > 100
    assert wrong["hfusion"][1] == 0


@both_levels
def test_rounding_and_complement(level) -> None:
    x = 10 * numbers(64)
    x[3] = float("nan")
    known = torch.nan_to_num(x)
    whole, out = torch.zeros(64, dtype=torch.int32), torch.zeros(2, 64)
    run(kernels.rounded_kernel, level, {"x_ptr": x, "whole_ptr": whole, "out_ptr": out}, BLOCK=64)
    assert torch.equal(out, torch.stack([known.floor(), known.ceil()]))
    assert torch.equal(whole, known.int())


@both_levels
def test_maximum_passes_nan_on_only_if_told_to(level) -> None:
    x, out = numbers(64), torch.zeros(2, 64)
    x[5] = float("nan")
    run(kernels.larger_kernel, level, {"x_ptr": x, "out_ptr": out}, BLOCK=64)
    torch.testing.assert_close(out, torch.stack([x.nan_to_num().relu(), x.relu()]), rtol=0, atol=0, equal_nan=True)


@both_levels
def test_running_sums(level) -> None:
    x, out = torch.arange(4 * 16, dtype=torch.int32).view(4, 16), torch.zeros(2, 4, 16, dtype=torch.int32)
    run(kernels.running_sums_kernel, level, {"x_ptr": x, "out_ptr": out}, ROWS=4, COLUMNS=16)
    assert torch.equal(out, torch.stack([x.cumsum(0), x.flip(1).cumsum(1).flip(1)]).int())


@both_levels
def test_sort(level) -> None:
    x, out = numbers(4, 64).round(decimals=1), torch.zeros(2, 4, 64)  # with ties
    run(kernels.sorted_kernel, level, {"x_ptr": x, "out_ptr": out}, ROWS=4, COLUMNS=64)
    assert torch.equal(out, torch.stack([x.sort().values, x.sort(descending=True).values]))


@both_levels
def test_gather_and_flip(level) -> None:
    x, out = numbers(64), torch.zeros(2, 64)
    index = torch.randint(0, 64, (64,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    run(kernels.gathered_kernel, level, {"x_ptr": x, "index_ptr": index, "out_ptr": out}, BLOCK=64)
    assert torch.equal(out, torch.stack([x[index], x.flip(0)]))


@both_levels
def test_split_and_interleave(level) -> None:
    x, out = numbers(64), torch.zeros(64)
    run(kernels.paired_kernel, level, {"x_ptr": x, "out_ptr": out}, PAIRS=32)
    assert torch.equal(out, x.view(32, 2).flip(1).flatten())


def test_what_has_no_cpu_form_is_refused_by_name() -> None:
    arguments = {"x_ptr": numbers(64), "out_ptr": torch.zeros(1, dtype=torch.int32)}
    run(kernels.largest_kernel, "adapter", arguments, BLOCK=64)
    assert arguments["out_ptr"].item() == arguments["x_ptr"].argmax().item()
    with pytest.raises(UnsupportedError, match=r"hfusion\.reduce_with_index has no CPU form"):
        run(kernels.largest_kernel, "hfusion", arguments, BLOCK=64)


@pytest.mark.parametrize(
    "line, name",
    [
        ("%1 = hfusion.elemwise_unary {fun = #hfusion.unary_fn<lgamma>} ins(%0 : tensor<8xf32>)", "lgamma"),
        ("%1 = hfusion.compare {compare_fn = #hfusion.compare_fn<vult>} ins(%0, %0 : tensor<8xi32>)", "vult"),
        ("%1 = hfusion.histogram %0, 8 : tensor<8xi32>", "histogram"),
        ("func.func private @triton_histogram(tensor<8xi32>) -> tensor<8xi32>\n call @triton_histogram(", "histogram"),
    ],
)
def test_nothing_is_executed_on_trust(line, name) -> None:
    with pytest.raises(UnsupportedError, match=name):
        cpu_form(f"module {{\n{line}\n}}\n")


@pytest.mark.parametrize(
    "arguments, text",
    [
        ([torch.zeros(16), torch.zeros(16)], "arguments must be 3"),
        ([torch.zeros(16), torch.zeros(16, dtype=torch.int32), 16], "out_ptr must be a tensor of fp32"),
        ([torch.zeros(16), torch.zeros(16), torch.zeros(1)], "count must be a number of type i32"),
        ([torch.zeros(16, 2)[:, 0], torch.zeros(16), 16], "x_ptr must be contiguous"),
    ],
)
def test_other_arguments_than_the_signature_says_are_refused(arguments, text) -> None:
    signature = {"x_ptr": "*fp32", "out_ptr": "*fp32", "count": "i32"}
    function = lowered_function(kernels.double_kernel, signature, {"BLOCK": 16})
    with pytest.raises(ContractError, match=text):
        function(arguments, 1)


def test_no_other_level() -> None:
    with pytest.raises(ContractError, match="level"):
        lowered_function(kernels.double_kernel, {}, {}, level="hivm")


def test_a_child_that_does_not_end_is_stopped() -> None:
    def forever() -> None:
        while True:
            pass

    with pytest.raises(MemoryFaultError, match=r"did not end within 0\.2 s"):
        in_child(forever, "endless", limit_s=0.2)


def test_a_child_that_sleeps_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that another thread held at the fork never comes free in the child; one that computes is let be."""
    monkeypatch.setattr(guard, "STUCK_S", 0.3)
    with pytest.raises(guard.StuckError):
        in_child(lambda: time.sleep(60), "asleep")

    def computing() -> None:
        end = time.process_time() + 0.6
        while time.process_time() < end:
            pass

    in_child(computing, "awake")


def test_what_is_stuck_is_run_again_on_fresh_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    function = lowered_function(
        kernels.double_kernel, {"x_ptr": "*fp32", "out_ptr": "*fp32", "count": "i32"}, {"BLOCK": 16}, level="adapter"
    )
    x, out, run, stuck = torch.arange(20.0), torch.zeros(20), guard.in_child, [1, 1]

    def sometimes(work: Any, name: str) -> None:
        run(work, name)
        if stuck:
            stuck.pop()
            raise guard.StuckError("after it wrote")

    monkeypatch.setattr(guard, "in_child", sometimes)
    function([x, out, 20], 2)
    assert not stuck
    assert torch.equal(out, 2 * x)
    stuck += [1] * guard.TRIES
    with pytest.raises(guard.StuckError):
        function([x, out, 20], 2)
