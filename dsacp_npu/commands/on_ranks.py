"""A process for every rank of one machine: what demonstrations and notebooks run over ranks."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

from dsacp_npu import distributed
from dsacp_npu._tensors import torch

Result = TypeVar("Result")
TIMEOUT = 120.0  # seconds that ranks wait for each other


def on_ranks(size: int, work: Callable[..., Result], *args: Any) -> list[Result]:
    """What the work returns on every rank, each in a process of its own with one thread, over gloo.

    Args:
        size: int, the number of ranks.
        work: a function of a module, because processes find it by its name; it takes this rank's Ranks and ``args``.
        args: what can be pickled.

    Returns:
        list by rank.
    """
    context = multiprocessing.get_context("forkserver")
    # Not the caller's module: it would bring in the one that each process runs first, as its __main__.
    context.set_forkserver_preload(["dsacp_npu.module", "transformers"])
    with (
        tempfile.TemporaryDirectory(prefix="dsacp-ranks-") as folder,
        ProcessPoolExecutor(size, context) as pool,
    ):
        # A rank ends only after it has met the others, so each task gets a process of its own.
        tasks = [pool.submit(as_rank, f"file://{folder}/meeting", size, rank, work, args) for rank in range(size)]
        return [task.result() for task in tasks]


def as_rank(meeting: str, size: int, rank: int, work: Callable[..., Result], args: tuple[Any, ...]) -> Result:
    """The work of one rank, once it has met the others."""
    torch.set_num_threads(1)
    ranks = distributed.connect(meeting, size, rank, timeout=TIMEOUT)
    try:
        return work(ranks, *args)
    finally:
        ranks.close()
