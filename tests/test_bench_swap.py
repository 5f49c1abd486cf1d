"""What the benchmark of swapped attention blocks measures is what it says; no time counts."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dsacp_npu.commands import bench_ranks, bench_swap, outside
from dsacp_npu.commands.bench_swap import Run, Task, Took
from dsacp_npu.commands.outside import build_model
from dsacp_npu.integrations.transformers import enable
from tests.compare import assert_within_budget
from tests.integrations import worlds

SMALL = replace(outside.SIZES["tiny"], index_topk=64)  # all entries: a choice between close scores is another question
needs_proc = pytest.mark.skipif(not bench_ranks.CLEAR.exists(), reason="no /proc/self/clear_refs: not Linux")


@needs_proc
def test_both_models_blocks_are_timed_and_write_the_same() -> None:
    alone, swapped = (bench_swap.run_of(Task(200, flag, SMALL)) for flag in (False, True))
    assert alone.planning == Took(0.0, 0.0)
    assert min(swapped.planning) > 0
    for run in (alone, swapped):
        assert len(run.blocks) == 3
        assert min(took for block in run.blocks for took in block) > 0
        assert run.peak_bytes > 0
    exact = torch.empty(3, 200, SMALL.hidden_size, dtype=torch.float64)
    double = worlds.widened(outside.build_model(SMALL))
    bench_swap.watched(double, exact)
    with worlds.InDouble():
        bench_swap.read(double, bench_swap.rows_of(Task(200, False, SMALL)).double(), False)
    assert_within_budget(swapped.outputs, exact, alone.outputs)


def test_only_what_lies_in_a_block_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(Took, "now", lambda: Took(moment := float(next(clock)), 2 * moment))
    layers = [torch.nn.Linear(2, 2, bias=False) for _ in range(2)]
    blocks = [torch.nn.Sequential(layer) for layer in layers]
    for block in blocks:
        block.forward = lambda x, block=block: (block[0](x), None)
    outputs = torch.zeros(2, 3, 2)
    took = bench_swap.watched(SimpleNamespace(layers=[SimpleNamespace(self_attn=block) for block in blocks]), outputs)
    x = torch.ones(1, 3, 2)
    for block in blocks:
        Took.now()  # what the model does between its blocks
        block(x)
    assert took == [Took(1.0, 2.0)] * 2
    for output, layer in zip(outputs, layers, strict=True):
        assert torch.equal(output, layer(x)[0])


def test_seconds_are_of_all_blocks_and_the_step() -> None:
    run = Run(Took(0.5, 0.25), [Took(1.0, 2.0), Took(4.0, 8.0)], 1, np.ones(1))
    assert (run.seconds, run.busy) == (5.5, 10.25)


def test_a_line_compares_the_runs_of_one_round() -> None:
    output = np.ones((2, 2, 4), np.float32)
    far = output.copy()
    far[1, 0, 2] = 3.0
    none = Took(0.0, 0.0)

    def run(planning: Took, first: float, second: float, num_bytes: int, outputs: np.ndarray) -> Run:
        return Run(planning, [Took(first, 2 * first), Took(second, 2 * second)], num_bytes, outputs)

    pairs = [
        (run(none, 4.0, 8.0, 4_000_000, output), run(Took(1.0, 1.0), 1.0, 1.0, 1_000_000, output)),
        (run(none, 4.0, 4.0, 4_000_000, output), run(Took(0.0, 1.0), 2.0, 2.0, 1_000_000, far)),
    ]
    words = bench_swap.line(pairs).split()
    assert words == "10.00 3.50 3.0 (2.0 to 4.0) 3.3 3.0 / 5.0 4 1 0.25 0e+00, 2e+00".split()


def test_the_table_keeps_to_what_the_untouched_model_can_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[tuple[int, bool]] = []

    def made(task: Task) -> Run:
        order.append((task.num_tokens, task.swapped))
        return Run(Took(0.0, 0.0), [Took(1.0, 1.0)], 10, np.ones((1, 1, 1)))

    monkeypatch.setattr(bench_ranks, "CLEAR", Path(__file__))
    monkeypatch.setattr(bench_swap, "run_of", made)
    bench_swap.swap(8192, 2)
    assert order == [(num_tokens, flag) for num_tokens in (2048, 4096) for _ in range(2) for flag in (False, True)]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-3:]] == ["tokens", "2048", "4096"]


def test_swap_is_left_out_where_memory_cannot_be_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_ranks, "CLEAR", tmp_path / "nothing")
    bench_swap.swap(256, 1)
    assert capsys.readouterr().out == "torch-swap is left out: it measures memory in /proc, which only Linux has\n"


@needs_proc
def test_swap_is_left_out_without_transformers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    bench_swap.swap(256, 1)
    assert capsys.readouterr().out.startswith("torch-swap is left out: dsacp_npu.integrations.transformers needs")


class Counted:
    """The floating-point work of some modules' calls, by torch's own counter."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.total, self.running = 0, []
        self.hooks = [hook for module in modules for hook in self.around(module)]

    def around(self, module: torch.nn.Module) -> list[Any]:
        def before(*_: Any) -> None:
            self.running.append(FlopCounterMode(display=False))
            self.running[-1].__enter__()

        def after(*_: Any) -> None:
            counter = self.running.pop()
            counter.__exit__(None, None, None)
            self.total += counter.get_total_flops()

        return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def end(self) -> int:
        for hook in self.hooks:
            hook.remove()
        return self.total


@pytest.mark.slow
def test_the_work_of_both_bounds_the_speed_up() -> None:
    """transformers 5.24 makes one dense product, and no gather a query: at 2048 tokens 2.6 times our arithmetic.

    So blocks that run at the rate of a matrix product, as both do, cannot be five times as fast.
    """
    model = build_model(bench_swap.CONFIG)
    rows = torch.randn(1, 2048, bench_swap.CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))
    blocks = [layer.self_attn for layer in model.layers]
    counted = Counted(blocks)
    with torch.no_grad():
        model(inputs_embeds=rows, use_cache=True)
    untouched = counted.end()
    session, counted = enable(model, num_tokens=2048, max_requests=1), Counted(blocks)
    with torch.no_grad(), session.step({"a": 2048}) as step:
        model(inputs_embeds=rows, position_ids=step.position_ids)
    assert 2.3 < untouched / counted.end() < 2.8
