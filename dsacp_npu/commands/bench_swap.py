"""Benchmarks of the attention blocks inside transformers' own model: as they are, and swapped by `enable`.

Every run has a fresh process, which builds the model, warms up on a short prompt and then reads one. A block's time is
that between hooks around it: what the model does outside of its blocks does not count, but for the making of our step,
which does. Memory is the resident peak while the model reads, caches and all, beyond what was resident before. Needs
torch, transformers, and Linux.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from dsacp_npu._tensors import torch
from dsacp_npu.commands import bench_ranks, outside
from dsacp_npu.commands.bench_ranks import fresh_peak, memory
from dsacp_npu.integrations.transformers import disable, enable, library
from dsacp_ref.config import AttentionConfig, v4_flash
from dsacp_ref.extents import Float

# The head sizes, window, indexer and top-k of V4-Flash, a layer of every kind; what is around them is cut down.
CONFIG = replace(
    v4_flash(),
    hidden_size=1024,
    num_heads=8,
    q_lora_rank=512,
    o_groups=4,
    o_lora_rank=256,
    num_hidden_layers=3,
    compress_ratios=(1, 4, 128),
)
MOST = 4096  # tokens: the untouched model holds several numbers for every head and every two of them
WARM_UP = 512  # tokens
WIDTHS = (12, 12, 22, 6, 20, 15, 13, 7, 16)  # of the table's columns behind the first


class Task(NamedTuple):
    """One prompt, read by the model as it is or by the swapped one."""

    num_tokens: int
    swapped: bool
    config: AttentionConfig = CONFIG


class Took(NamedTuple):
    """Wall time and processor time, in seconds; or the moment that both count from."""

    seconds: float
    busy: float

    @classmethod
    def now(cls) -> Took:
        """This moment."""
        return cls(time.perf_counter(), time.process_time())

    def until(self, end: Took) -> Took:
        """What lies between two moments."""
        return Took(end.seconds - self.seconds, end.busy - self.busy)


class Run(NamedTuple):
    """What one process measured.

    Fields:
        planning: Took, to make the step; 0 where there is none.
        blocks: list of Took, one an attention block.
        peak_bytes: int, most resident memory beyond what was resident before.
        outputs: float32[layers, tokens, hidden] of the blocks.
    """

    planning: Took
    blocks: list[Took]
    peak_bytes: int
    outputs: Float

    @property
    def seconds(self) -> float:
        """All that attention takes."""
        return self.planning.seconds + sum(block.seconds for block in self.blocks)

    @property
    def busy(self) -> float:
        """The same in processor time, which neighbours change less."""
        return self.planning.busy + sum(block.busy for block in self.blocks)


# --- the table ---


def swap(tokens: int, repeats: int) -> None:
    """Both models at this length and half of it."""
    if not bench_ranks.CLEAR.exists():
        print("torch-swap is left out: it measures memory in /proc, which only Linux has")
        return
    try:
        library()
    except ImportError as error:
        print(f"torch-swap is left out: {error}")
        return
    rounds, tokens = min(repeats, 3), min(tokens, MOST)
    sizes = f"hidden {CONFIG.hidden_size}, {CONFIG.num_heads} heads of {CONFIG.head_dim}, q_lora {CONFIG.q_lora_rank}"
    output = f"{CONFIG.o_groups} x {CONFIG.o_lora_rank} o_lora"
    index = f"{CONFIG.index_n_heads} index heads of {CONFIG.index_head_dim}, top-k {CONFIG.index_topk}"
    print(f"attention blocks of transformers' eager model, untouched and swapped; ratios {CONFIG.compress_ratios}")
    print(f"  {sizes}, {output}, {index}; float32, one prompt, one process")
    print(
        f"  {rounds} runs of each in turns, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f} of "
        f"{os.cpu_count()} cores before the first; torch {torch.__version__}"
    )
    print("  seconds: in all blocks, of ours also to make the step; busy: speed-up by processor time")
    print("  by ratio: speed-up of each block; MB: peak while the model reads, of ours with its caches")
    print("  apart: difference of the outputs over the largest, in the median row and in the farthest")
    names = (
        "untouched, s",
        "swapped, s",
        "speed-up",
        "busy",
        "by ratio",
        "untouched, MB",
        "swapped, MB",
        "ratio",
        "apart",
    )
    print(f"  tokens  {''.join(f'{name:>{width}s}' for name, width in zip(names, WIDTHS, strict=True))}")
    for num_tokens in (tokens // 2, tokens):
        pairs = [(run_of(Task(num_tokens, False)), run_of(Task(num_tokens, True))) for _ in range(rounds)]
        print(f"  {num_tokens:6d}  {line(pairs)}", flush=True)


def line(pairs: list[tuple[Run, Run]]) -> str:
    """What the runs of one length give, round by round."""
    ratios = [one.seconds / other.seconds for one, other in pairs]
    blocks = [
        median(one.blocks[i].seconds / other.blocks[i].seconds for one, other in pairs)
        for i in range(len(pairs[0][0].blocks))
    ]
    slow, fast = (median(pair[swapped].seconds for pair in pairs) for swapped in (False, True))
    much, little = (median(pair[swapped].peak_bytes for pair in pairs) / 1e6 for swapped in (False, True))
    apart = [rows_apart(one.outputs, other.outputs) for one, other in pairs]
    words = (
        f"{slow:.2f}",
        f"{fast:.2f}",
        f"{median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})",
        f"{median(one.busy / other.busy for one, other in pairs):.1f}",
        " / ".join(f"{ratio:.1f}" for ratio in blocks),
        f"{much:.0f}",
        f"{little:.0f}",
        f"{little / much:.2f}",
        f"{max(typical for typical, _ in apart):.0e}, {max(far for _, far in apart):.0e}",
    )
    return "".join(f"{word:>{width}s}" for word, width in zip(words, WIDTHS, strict=True))


def rows_apart(one: Float, other: Float) -> tuple[float, float]:
    """The difference of the outputs in the median row and in the farthest, over the largest output."""
    rows = abs(one - other).max(axis=-1).flatten() / abs(one).max()
    return float(median(rows.tolist())), float(rows.max())


# --- one run ---


def run_of(task: Task) -> Run:
    """One prompt in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measured, task).result()


def measured(task: Task) -> Run:
    """Build, warm up, read."""
    model, rows = outside.build_model(task.config), rows_of(task)
    outputs = torch.zeros(len(model.layers), *rows.shape[1:]).fill_(1)  # all of it resident
    read(model, rows[:, :WARM_UP], task.swapped)
    blocks = watched(model, outputs)
    before = fresh_peak()
    planning = read(model, rows, task.swapped)
    return Run(planning, blocks, memory("VmHWM") - before, outputs.numpy())


def rows_of(task: Task) -> torch.Tensor:
    """What stands for the embeddings of the prompt."""
    return torch.randn(1, task.num_tokens, task.config.hidden_size, generator=torch.Generator().manual_seed(0))


def read(model: Any, rows: torch.Tensor, swapped: bool) -> Took:
    """The model reads a prompt; the time to make its step."""
    if not swapped:
        model(inputs_embeds=rows, use_cache=False)
        return Took(0.0, 0.0)
    session = enable(model, num_tokens=rows.shape[1], max_requests=1)
    start = Took.now()
    with session.step({"prompt": rows.shape[1]}) as step:
        planning = start.until(Took.now())
        model(inputs_embeds=rows, position_ids=step.position_ids)
    disable(model)
    return planning


def watched(model: Any, outputs: torch.Tensor) -> list[Took]:
    """A list that gets the time of each block from now on; their outputs are copied into the tensor."""
    blocks: list[Took] = []
    start = Took.now()

    def before(*_: Any) -> None:
        nonlocal start
        start = Took.now()

    def after(block: Any, args: Any, output: Any) -> None:
        blocks.append(start.until(Took.now()))
        outputs[len(blocks) - 1].copy_(output[0][0])

    for layer in model.layers:
        layer.self_attn.register_forward_pre_hook(before)
        layer.self_attn.register_forward_hook(after)
    return blocks
