"""`bench` runs the sections it is asked for, and what the one of ranks measures is what it says; no time counts."""

from __future__ import annotations

import sys
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from dsacp_npu.__main__ import main
from dsacp_npu.commands import bench, bench_ranks
from dsacp_npu.commands.bench_ranks import CUTS, Cut, Measured, Run, Task, answers, run_of
from dsacp_npu.commands.counted import received_bytes
from dsacp_npu.layer import attention_layer
from tests.compare import assert_within_budget
from tests.mirror.common import mapped

SMALL = replace(
    bench_ranks.CONFIG,
    hidden_size=32,
    num_heads=4,
    head_dim=32,
    rope_head_dim=8,
    q_lora_rank=16,
    o_lora_rank=8,
    index_n_heads=2,
    index_head_dim=16,
    index_topk=64,  # all entries: a choice between close scores is not the question here
)
needs_proc = pytest.mark.skipif(not bench_ranks.CLEAR.exists(), reason="no /proc/self/clear_refs: not Linux")


def test_only_the_sections_asked_for_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, int, int]] = []
    for name in bench.SECTIONS:
        monkeypatch.setitem(bench.SECTIONS, name, lambda *sizes, name=name: ran.append((name, *sizes)))
    assert main("bench --only torch-ranks --only core --tokens 256 --repeats 2".split()) == 0
    assert ran == [("torch-ranks", 256, 2), ("core", 256, 2)]


def test_a_section_without_its_library_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "dsacp_npu.commands.bench_ranks", None)
    assert main("bench --only torch-ranks".split()) == 0
    assert "torch-ranks is left out: import of dsacp_npu.commands.bench_ranks" in capsys.readouterr().out


def test_ranks_are_left_out_where_memory_cannot_be_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_ranks, "CLEAR", tmp_path / "nothing")
    bench_ranks.ranks(256, 1)
    assert capsys.readouterr().out == "torch-ranks is left out: it measures memory in /proc, which only Linux has\n"


@needs_proc
def test_processes_give_one_devices_rows_and_receive_what_was_counted() -> None:
    """A ratio-4 layer, whose rows two processes share by zigzag, and put together in token order."""
    one, two = Task(256, 4, None, SMALL), Task(256, 4, CUTS[0], SMALL)
    alone, over = run_of(one), run_of(two)
    assert [len(run.ranks) for run in (alone, over)] == [1, 2]
    inputs = mapped(tuple(bench_ranks.inputs_of(one, 0)), lambda t: t.double() if t.is_floating_point() else t)
    exact = attention_layer(*inputs, SMALL, compress_ratio=4).output
    assert_within_budget(over.output, exact, alone.output)
    assert alone.ranks[0].received_bytes == 0
    modes = {"compress_ratio": 4, "dtype": torch.float32, **CUTS[0]._asdict()}
    counted = [received_bytes(256, 2, rank, SMALL, **modes) for rank in range(2)]
    assert [rank.received_bytes for rank in over.ranks] == [sum(call.num_bytes for call in each) for each in counted]
    assert all(min(rank.seconds, rank.busy, rank.peak_bytes) > 0 for run in (alone, over) for rank in run.ranks)


def test_a_line_compares_the_runs_of_one_round() -> None:
    """Time to the last rank, the farthest output."""
    output = torch.ones(4, 2)
    alone = [Run([Measured(8.0, 7.0, 1000, 0)], output), Run([Measured(6.0, 6.0, 1000, 0)], output)]
    runs = [
        Run([Measured(4.0, 3.0, 500, 10_000), Measured(2.0, 3.5, 600, 20_000)], output + 0.5),
        Run([Measured(2.0, 2.0, 500, 10_000), Measured(1.0, 1.0, 600, 20_000)], output),
    ]
    task = Task(8192, 4, Cut("zigzag", "scattered", "replicated_weight"))
    words = bench_ranks.line(alone, runs, task, 0.6).split()
    assert words == "3.00 2.50 (2.00 to 3.00) 2.50 0.60 0.02 1.113 1.000 5e-01".split()


def test_a_table_puts_every_cut_beside_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[tuple[Cut | None, bool]] = []

    def made(task: Task) -> Run:
        order.append((task.cut, task.returned))
        peaks = [1000] if task.cut is None else [300, 420]
        return Run([Measured(1.0, 1.0, peak, 0) for peak in peaks], torch.ones(2, 2))

    monkeypatch.setattr(bench_ranks, "run_of", made)
    bench_ranks.table(8192, 1, 2)
    round_ = [None, *CUTS]
    assert order == [(cut, False) for cut in [*round_, *round_]] + [(cut, True) for cut in round_]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(CUTS)
    assert "one process: 1.00 s" in lines[0]
    assert all(" 0.42 " in line for line in lines[1:])


def test_a_process_that_ends_is_named() -> None:
    mine, theirs = Pipe()
    theirs.close()
    with pytest.raises(RuntimeError, match=r"^rank 0 of the benchmark ended"):
        answers([mine])


def test_a_process_that_is_late_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_ranks, "PATIENCE", 0.0)
    first, second = (Pipe() for _ in range(2))
    first[1].send("ready")
    with pytest.raises(RuntimeError, match=r"^rank 1 of the benchmark gave no answer in 0 s"):
        answers([first[0], second[0]])
