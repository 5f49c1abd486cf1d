"""Worker processes that stay: one pool a group size, started when first asked for, shared by all tests of a process.

`run` is all that a test needs::

    def rows_everywhere(ranks, shard, counts):  # in tests/distributed/work.py
        return distributed.all_gather(shard, ranks, counts)

    results = run(2, "tests.distributed.work:rows_everywhere", [(shards[0], [3, 1]), (shards[1], [3, 1])])

Every pool meets at a file of its own, so pools of several test processes never meet each other. A worker that raises,
dies or is late ends its pool, whose ranks may now be at different calls; the next `run` starts another. Let a function
return what it caught where a refusal is the expected result.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import pickle
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from dsacp_npu.distributed import connect

__all__ = ["close_all", "run"]

# A server that has torch already makes each worker by a fork of it: one import of torch, not one a worker.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch"])
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
START, TASK, GRACE = 120.0, 60.0, 2.0  # seconds: for a pool to meet, for a task, for the rest once one rank failed

POOLS: dict[int, Pool] = {}


class WorkerError(AssertionError):
    """What the ranks of a failed run said."""


def run(
    size: int, function: str, per_rank_args: Sequence[tuple[Any, ...]] | None = None, *, timeout: float = TASK
) -> list[Any]:
    """Call ``function(ranks, *args)`` on every rank, and give every rank's result.

    Args:
        size: the number of processes.
        function: ``"module:function"``, importable in the workers.
        per_rank_args: one tuple of picklable arguments a rank; None for none.
        timeout: seconds until a rank counts as hanging.

    Returns:
        the results in rank order.

    Raises:
        WorkerError: a rank raised, died or was late; with the tracebacks.
    """
    args = [()] * size if per_rank_args is None else list(per_rank_args)
    assert len(args) == size, f"{len(args)} tuples of arguments for {size} ranks"
    if size not in POOLS:
        POOLS[size] = Pool(size)
    try:
        return POOLS[size].run(function, args, timeout)
    except BaseException:
        POOLS.pop(size).end(0.0)
        raise


def close_all() -> None:
    """End every pool."""
    while POOLS:
        POOLS.popitem()[1].end(GRACE)


atexit.register(close_all)


class Pool:
    """The processes of one group size."""

    def __init__(self, size: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=f"dsacp-{size}-ranks-"))
        self.pipes, self.processes = [], []
        before = {name: os.environ.get(name) for name in THREADS}
        os.environ.update(dict.fromkeys(THREADS, "1"))  # the server and what it starts inherit this
        try:
            for rank in range(size):
                mine, theirs = CONTEXT.Pipe()
                args = (theirs, f"file://{self.directory}/meeting", size, rank)
                process = CONTEXT.Process(target=work, args=args, daemon=True, name=f"rank {rank} of {size}")
                process.start()
                theirs.close()
                self.pipes.append(mine)
                self.processes.append(process)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        self.started = False

    def run(self, function: str, args: Sequence[tuple[Any, ...]], timeout: float) -> list[Any]:
        """Send every rank its task, and wait for all results."""
        if not self.started:
            self.answers(START)
            self.started = True
        for pipe, mine in zip(self.pipes, args, strict=True):
            pipe.send_bytes(pickle.dumps((function, mine)))
        return self.answers(timeout)

    def answers(self, timeout: float) -> list[Any]:
        """Every rank's result; once one has failed, the others, which may wait for it, get little more time."""
        deadline, found, failed = time.monotonic() + timeout, {}, {}
        while len(found) + len(failed) < len(self.pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in found and rank not in failed}
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0.0))
            if not ready:
                failed |= dict.fromkeys(waiting.values(), "no answer in time")
            for pipe in ready:
                well, result = received(pipe)
                (found if well else failed)[waiting[pipe]] = result
            if failed:
                deadline = min(deadline, time.monotonic() + GRACE)
        if failed:
            raise WorkerError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failed.items())))
        return [found[rank] for rank in range(len(self.pipes))]

    def end(self, grace: float) -> None:
        """Ask the workers to go, and end those that do not."""
        for pipe in self.pipes:
            with suppress(OSError):
                pipe.send_bytes(pickle.dumps(None))
        deadline = time.monotonic() + grace
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0.0))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def received(pipe: Connection) -> tuple[bool, Any]:
    """One answer, or that there will be none."""
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return False, "the process ended"


def work(pipe: Connection, init_method: str, size: int, rank: int) -> None:
    """What a worker does: meet the others, then task after task until there is none."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("error")  # as in the tests
    ranks = None

    def met() -> None:
        nonlocal ranks
        ranks = connect(init_method, size, rank, timeout=START)

    answer(pipe, met)
    with suppress(EOFError):
        while task := pickle.loads(pipe.recv_bytes()):
            answer(pipe, called, task, ranks)
    if ranks is not None:
        ranks.close()


def called(task: tuple[str, tuple[Any, ...]], ranks: Any) -> Any:
    """The result of a named function."""
    module, function = task[0].split(":")
    return getattr(importlib.import_module(module), function)(ranks, *task[1])


def answer(pipe: Connection, function: Callable[..., Any], *args: Any) -> None:
    """Send back the result, or the traceback."""
    try:
        message = pickle.dumps((True, function(*args)))
    except Exception:
        message = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(message)
