"""Benchmarks of a layer over ranks: two processes of one thread, over gloo, against one process of one thread.

Every run has fresh processes, which warm up on a short prompt, build their inputs, wait for each other and make one
step. A rank's memory is its resident peak during that step beyond what was resident before. Needs torch, and Linux.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from dsacp_npu import distributed, layer
from dsacp_npu._tensors import Float, torch
from dsacp_npu.commands.counted import counted_transport, imbalance, layer_weights, one_prompt, work_of_ranks
from dsacp_npu.distributed import Ranks
from dsacp_npu.layer import LayerBatch, LayerCache, LayerWeights
from dsacp_npu.partition import Partition, partition_tokens, restored_rows, spread_rows
from dsacp_ref.config import AttentionConfig, v4_flash

# The head sizes, window, indexer and top-k of V4-Flash; what is around them is cut down, so that a layer takes seconds.
CONFIG = replace(v4_flash(), hidden_size=1024, num_heads=16, q_lora_rank=512, o_groups=4, o_lora_rank=256)
RATIOS = (1, 4, 128)
RANKS = 2
WARM_UP = 512  # tokens
PATIENCE, GRACE = 1800.0, 10.0  # seconds for a process to get ready or to make its step, and to end
M_MMAP_THRESHOLD, RETURNED_FROM = -3, 1 << 20  # glibc's name for it, and the bytes from which it counts
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Cut(NamedTuple):
    """A way to run the layer over ranks."""

    split: str
    rows: str
    output_mode: str
    key_mode: str = "gather_compressed"

    def __str__(self) -> str:
        return f"{self.split}, {self.rows}, {self.output_mode}"


CUTS = (
    Cut("zigzag", "scattered", "replicated_weight"),
    Cut("zigzag", "full", "gather_weight"),
    Cut("contiguous", "scattered", "replicated_weight"),
)


class Task(NamedTuple):
    """One step of one layer; ``cut`` None is one device."""

    num_tokens: int
    compress_ratio: int
    cut: Cut | None
    config: AttentionConfig = CONFIG
    returned: bool = False  # freed memory goes back to the system at once: slower, but the peak is of what is in use

    @property
    def cp_size(self) -> int:
        """The number of processes."""
        return RANKS if self.cut else 1


class Measured(NamedTuple):
    """What one process measured in its step.

    Fields:
        seconds: float, wall time.
        busy: float, seconds of processor time: what is missing to the wall time went to waiting, or to neighbours.
        peak_bytes: int, most resident memory beyond what was resident before, the output included.
        received_bytes: int, from other ranks.
    """

    seconds: float
    busy: float
    peak_bytes: int
    received_bytes: int


class Run(NamedTuple):
    """One step in all its processes, and the whole output in token order."""

    ranks: list[Measured]
    output: Float

    @property
    def seconds(self) -> float:
        """Until the last rank is done."""
        return max(rank.seconds for rank in self.ranks)

    @property
    def busy(self) -> float:
        """Of the rank that computes longest."""
        return max(rank.busy for rank in self.ranks)

    @property
    def peak_bytes(self) -> int:
        """Of the rank that needs most."""
        return max(rank.peak_bytes for rank in self.ranks)


# --- the tables ---


def ranks(tokens: int, repeats: int) -> None:
    """One process against two, for every ratio and cut, at this length and twice of it."""
    if not CLEAR.exists():
        print("torch-ranks is left out: it measures memory in /proc, which only Linux has")
        return
    rounds = min(repeats, 3)
    sizes = f"hidden {CONFIG.hidden_size}, {CONFIG.num_heads} heads of {CONFIG.head_dim}, q_lora {CONFIG.q_lora_rank}"
    output = f"{CONFIG.o_groups} x {CONFIG.o_lora_rank} o_lora"
    index = f"{CONFIG.index_n_heads} index heads of {CONFIG.index_head_dim}, top-k {CONFIG.index_topk}"
    print(f"a layer in {RANKS} processes against one, one thread each, gloo, gather_compressed; float32, one prompt")
    print(f"  {sizes}, {output}, {index}; {rounds} runs of all in turns; torch {torch.__version__}")
    print(f"  load {os.getloadavg()[0]:.1f} before the first run; {os.cpu_count()} cores")
    print("  busy: speed-up by the processor time of the busiest rank")
    print("  memory: peak in the step of the rank that needs most, over one process; of one more run each, in which")
    print("  freed memory goes back at once")
    print("  MB in: what a rank receives; keys, scores: of the busiest rank over the mean")
    print("  apart: largest difference of the outputs, over the largest output")
    for num_tokens in (tokens, 2 * tokens):
        for ratio in RATIOS:
            table(num_tokens, ratio, rounds)


def table(num_tokens: int, ratio: int, rounds: int) -> None:
    """All cuts of one layer kind at one length."""
    one, cuts = Task(num_tokens, ratio, None), [Task(num_tokens, ratio, cut) for cut in CUTS]
    alone: list[Run] = []
    over: list[list[Run]] = [[] for _ in cuts]
    for _ in range(rounds):
        alone.append(run_of(one))
        for runs, task in zip(over, cuts, strict=True):
            runs.append(run_of(task))
    peak, *peaks = (run_of(task._replace(returned=True)).peak_bytes for task in (one, *cuts))
    seconds = median(run.seconds for run in alone)
    name = f"ratio {ratio}, {num_tokens} tokens; one process: {seconds:.2f} s, {peak / 1e6:.0f} MB"
    print(f"  {name:60s}s{'speed-up':>22s}   busy  memory     MB in    keys  scores    apart")
    for runs, task, most in zip(over, cuts, peaks, strict=True):
        print(f"    {task.cut!s:50s}  {line(alone, runs, task, most / peak)}", flush=True)


def line(alone: Sequence[Run], runs: Sequence[Run], task: Task, memory: float) -> str:
    """What one cut gives beside one process."""
    pairs = list(zip(alone, runs, strict=True))
    ratios = [one.seconds / run.seconds for one, run in pairs]
    busy = median(one.busy / run.busy for one, run in pairs)
    far = max(float((run.output - one.output).abs().max() / one.output.abs().max()) for one, run in pairs)
    received = max(rank.received_bytes for rank in runs[0].ranks)
    keys, scores = evenness(task)
    return (
        f"{median(run.seconds for run in runs):7.2f}  {median(ratios):5.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        f"  {busy:5.2f}  {memory:6.2f}  {received / 1e6:8.2f}  {keys:6.3f}  {scores:6.3f}  {far:7.0e}"
    )


def evenness(task: Task) -> tuple[float, float]:
    """The busiest rank's keys and scores over the mean; 1 where there are none."""
    assert task.cut
    lengths = torch.tensor([0, task.num_tokens]).int(), torch.tensor([task.num_tokens]).int()
    work = work_of_ranks(*lengths, task.cp_size, task.config, split=task.cut.split, compress_ratio=task.compress_ratio)
    return imbalance(work.keys), imbalance(work.scores) if any(work.scores) else 1.0


# --- one run ---


def run_of(task: Task) -> Run:
    """One step in fresh processes.

    Raises:
        RuntimeError: a process ended or was late.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="dsacp-bench-") as directory:
        pipes: list[Connection] = []
        processes: list[Any] = []
        measured: list[Measured] = []
        try:
            for rank in range(task.cp_size):
                mine, theirs = context.Pipe()
                process = context.Process(target=work, args=(theirs, directory, task, rank), daemon=True)
                process.start()
                theirs.close()
                pipes.append(mine)
                processes.append(process)
            answers(pipes)  # all are ready
            for pipe in pipes:
                pipe.send(None)
            measured = answers(pipes)
        finally:
            for process in processes:
                process.join(GRACE if len(measured) == task.cp_size else 0.0)
                process.kill()
                process.join()
        outputs = [torch.load(Path(directory, f"output{rank}")) for rank in range(task.cp_size)]
    return Run(measured, whole_output(outputs, task))


def answers(pipes: Sequence[Connection]) -> list[Any]:
    """One message of every process, in rank order."""
    found: dict[int, Any] = {}
    deadline = time.monotonic() + PATIENCE
    while len(found) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in found}
        ready = wait(list(waiting), max(deadline - time.monotonic(), 0.0))
        if not ready:
            raise RuntimeError(f"rank {min(waiting.values())} of the benchmark gave no answer in {PATIENCE:g} s")
        for pipe in set(waiting).intersection(ready):
            try:
                found[waiting[pipe]] = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {waiting[pipe]} of the benchmark ended; its error is above") from None
    return [found[rank] for rank in range(len(pipes))]


def whole_output(outputs: list[Float], task: Task) -> Float:
    """All rows in token order, from what the ranks hold."""
    if task.cut is None or task.cut.rows == "full":
        return outputs[0]
    return restored_rows(torch.cat(outputs), partition_of(task))


def partition_of(task: Task) -> Partition:
    """The split of the prompt over the processes."""
    assert task.cut
    return partition_tokens(torch.tensor([0, task.num_tokens]).int(), task.cp_size, split=task.cut.split)


# --- in the processes ---


class Inputs(NamedTuple):
    """What the layer is called with on this rank."""

    x: Float
    weights: LayerWeights
    cache: LayerCache
    batch: LayerBatch


def work(pipe: Connection, directory: str, task: Task, rank: int) -> None:
    """Meet the others, warm up, and on a sign make the step."""
    torch.set_num_threads(1)
    if task.returned and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, RETURNED_FROM)
    group = distributed.connect(f"file://{directory}/meeting", task.cp_size, rank, timeout=PATIENCE)
    try:
        step(inputs_of(task._replace(num_tokens=WARM_UP), rank), task, group)
        inputs = inputs_of(task, rank)
        pipe.send(None)
        pipe.recv()
        output, measured = measured_step(inputs, task, group)
        torch.save(output, Path(directory, f"output{rank}"))
        pipe.send(measured)
    finally:
        group.close()


def measured_step(inputs: Inputs, task: Task, group: Ranks) -> tuple[Float, Measured]:
    """The output, and what the step took."""
    before = fresh_peak()
    with counted_transport(torch.distributed) as received:
        start, busy = time.perf_counter(), time.process_time()
        output = step(inputs, task, group)
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
    return output, Measured(seconds, busy, memory("VmHWM") - before, sum(call.num_bytes for call in received))


def step(inputs: Inputs, task: Task, group: Ranks) -> Float:
    """The layer's output on this rank."""
    if task.cut is None:
        return layer.attention_layer_(*inputs, task.config, compress_ratio=task.compress_ratio).output
    modes = {"compress_ratio": task.compress_ratio, **task.cut._asdict()}
    return distributed.layer_over_ranks_(*inputs, task.config, group, **modes).output


def inputs_of(task: Task, rank: int) -> Inputs:
    """This rank's rows, and weights, cache and batch, which are the same on every rank; all resident."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Float:
        return torch.randn(shape, generator=random)

    weights = layer_weights(
        task.config, task.compress_ratio, lambda *shape: normal(*shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 1)
    )
    cache, batch = one_prompt(task.num_tokens, weights, task.compress_ratio)
    for part in (cache.swa_cache, cache.cmp_cache, cache.index_cache):
        assert isinstance(part, torch.Tensor)
        part.fill_(0)  # memory that nobody has written to is not there yet
    x = normal(task.num_tokens, task.config.hidden_size)
    if task.cut and task.cut.rows == "scattered":
        x = spread_rows(x, partition_of(task).token_indices[rank])
    return Inputs(x, weights, cache, batch)


def fresh_peak() -> int:
    """Resident bytes now; the peak counts from here on."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # what was freed before must not serve the step without being counted
    CLEAR.write_text("5")
    return memory("VmRSS")


def memory(name: str) -> int:
    """Bytes of one line of the process's status."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
