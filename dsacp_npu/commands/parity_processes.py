"""`parity --processes`: every rank is a process of its own, and gloo carries the messages.

One pool of processes a number of ranks, started when first asked for. Each process has one thread and does what it is
sent, step after step: `dsacp_npu.distributed` on arrays. A rank that raises, dies or is late fails the step and ends
its pool, whose ranks may be at different calls by then; the next step starts another. Arrays travel in files and pipes
carry signs only: a pipe that is full would make this process wait for one that hangs.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from dsacp_npu.commands.parity_engines import Way, called, operators_of
from dsacp_ref.config import AttentionConfig
from dsacp_ref.layer import LayerBatch, LayerCache, LayerOutput, LayerWeights, RanksOutput
from dsacp_ref.spec import UnsupportedError

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
START, STEP, GRACE = 120.0, 60.0, 2.0  # seconds: to meet, for a step, for the rest once one rank failed
DONE, REFUSED, FAILED = "done", "refused", "failed"
SIGN = b"."  # a message or an answer lies in its file

POOLS: dict[tuple[Way, int], Pool] = {}


class ProcessError(Exception):
    """What the ranks of a failed step said."""


class Processes:
    """The layer of `dsacp_npu.distributed`, a process for every rank."""

    def __init__(self, way: Way) -> None:
        """For a backend."""
        self.way = way

    def over_ranks(
        self,
        inputs: Sequence[np.ndarray],
        weights: LayerWeights,
        caches: Sequence[LayerCache],
        batch: LayerBatch,
        config: AttentionConfig,
        **modes: Any,
    ) -> RanksOutput:
        """One step by tokens."""
        tasks = [("layer_over_ranks", x, cache, batch, config, modes) for x, cache in zip(inputs, caches, strict=True)]
        return step(self.way, weights, tasks)

    def by_heads(
        self,
        x: np.ndarray,
        weights: LayerWeights,
        caches: Sequence[LayerCache],
        batch: LayerBatch,
        config: AttentionConfig,
        **modes: Any,
    ) -> RanksOutput:
        """One step by heads."""
        return step(self.way, weights, [("head_parallel_layer", x, cache, batch, config, modes) for cache in caches])


def step(way: Way, weights: LayerWeights, tasks: Sequence[tuple[Any, ...]]) -> RanksOutput:
    """One step of a V4 layer, a task a rank."""
    made: list[LayerOutput] = outputs(way, weights, tasks)
    return RanksOutput(*map(list, zip(*made, strict=True)))


def outputs(way: Way, weights: Any, tasks: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What each rank makes of its task: the function, this rank's rows and caches, and what all ranks share.

    Raises:
        UnsupportedError: all ranks refuse it, with the text of the first.
        ProcessError: a rank raised, died or was late, or some refuse what others do.
    """
    key = (way, len(tasks))
    if key not in POOLS:
        POOLS[key] = Pool(*key)
    try:
        answers = POOLS[key].step(weights, tasks)
    except BaseException:
        POOLS.pop(key).end(0.0)
        raise
    if answers[0][0] == REFUSED:
        raise UnsupportedError(answers[0][1])
    return [output for _, output in answers]


def close_all() -> None:
    """End every pool."""
    while POOLS:
        POOLS.popitem()[1].end(GRACE)


atexit.register(close_all)


class Pool:
    """The processes of one number of ranks."""

    def __init__(self, way: Way, size: int) -> None:
        """Start them; they meet at a file of their own."""
        # A server that has torch already makes each process by a fork of it: one import, not one a rank.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "dsacp_npu.backend", "dsacp_npu.distributed"])
        self.directory = Path(tempfile.mkdtemp(prefix=f"dsacp-parity-{size}-ranks-"))
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        self.weights: Any = None  # what the processes have
        before = {name: os.environ.get(name) for name in THREADS}
        os.environ.update(dict.fromkeys(THREADS, "1"))  # the server and what it starts inherit this
        try:
            for rank in range(size):
                mine, theirs = context.Pipe()
                args = (theirs, self.directory, way, size, rank)
                process = context.Process(target=work, args=args, daemon=True, name=f"rank {rank} of {size}")
                process.start()
                theirs.close()
                self.pipes.append(mine)
                self.processes.append(process)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        self.met = False

    def step(self, weights: Any, tasks: Sequence[tuple[Any, ...]]) -> list[tuple[str, Any]]:
        """Send every rank its task, and wait for all answers: all done, or all refused."""
        if not self.met:
            self.answers(START)
            self.met = True
        if self.weights is not weights:  # the same for many steps
            self.weights = weights
            self.send([weights] * len(tasks))
            self.answers(STEP)
        self.send(tasks)
        return self.answers(STEP)

    def send(self, messages: Sequence[Any]) -> None:
        """One message a rank; one that has ended says so when its answer is waited for."""
        for rank, (pipe, message) in enumerate(zip(self.pipes, messages, strict=True)):
            (self.directory / f"task{rank}").write_bytes(pickle.dumps(message))
            with suppress(OSError):
                pipe.send_bytes(SIGN)

    def answers(self, seconds: float) -> list[tuple[str, Any]]:
        """Every rank's answer; once one has failed, the others, which may wait for it, get little more time."""
        deadline, found = time.monotonic() + seconds, {}
        while len(found) < len(self.pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in found}
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0.0))
            if not ready:
                failed = any(kind == FAILED for kind, _ in found.values())
                why = "waits for the others" if failed else f"no answer in {seconds:g} s"
                found |= dict.fromkeys(waiting.values(), (FAILED, why))
            found |= {waiting[pipe]: self.received(pipe, waiting[pipe]) for pipe in ready}
            if any(kind == FAILED for kind, _ in found.values()):
                deadline = min(deadline, time.monotonic() + GRACE)
        if len({kind for kind, _ in found.values()}) > 1 or found[0][0] == FAILED:
            told = [f"rank {rank}: {kind if kind == DONE else text}" for rank, (kind, text) in sorted(found.items())]
            raise ProcessError("; ".join(told))
        return [found[rank] for rank in range(len(self.pipes))]

    def received(self, pipe: Connection, rank: int) -> tuple[str, Any]:
        """One answer, or that there will be none."""
        try:
            pipe.recv_bytes()
        except (EOFError, OSError):
            return FAILED, "the process ended"
        answer: tuple[str, Any] = pickle.loads((self.directory / f"answer{rank}").read_bytes())
        return answer

    def end(self, grace: float) -> None:
        """Ask the processes to go, and end those that do not."""
        self.send([None] * len(self.pipes))
        deadline = time.monotonic() + grace
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0.0))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.directory, ignore_errors=True)


# --- in the processes ---


def work(pipe: Connection, directory: Path, way: Way, size: int, rank: int) -> None:
    """Meet the others, then step after step until there is none."""
    import torch

    from dsacp_npu.distributed import connect

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that sends tasks ends this one
    ranks: Any = None
    weights: Any = None

    def meet() -> None:
        nonlocal ranks
        ranks = connect(f"file://{directory}/meeting", size, rank, timeout=START)

    def task() -> Any:
        pipe.recv_bytes()
        return pickle.loads((directory / f"task{rank}").read_bytes())

    def answer(function: Callable[..., Any], *args: Any, **options: Any) -> None:
        (directory / f"answer{rank}").write_bytes(answered(function, *args, **options))
        pipe.send_bytes(SIGN)

    answer(meet)
    with suppress(EOFError), operators_of(way):
        while (message := task()) is not None:
            if hasattr(message, "_fields"):  # a record of weights; a task is a plain tuple
                weights = message
                answer(lambda: None)
            else:
                name, x, cache, batch, config, modes = message
                module, function = f"distributed.{name}".split(".")[-2:]  # a bare name is V4's
                answer(called, way, module, function, x, weights, cache, batch, config, ranks, **modes)
    if ranks is not None:
        ranks.close()


def answered(function: Callable[..., Any], *args: Any, **options: Any) -> bytes:
    """The result, the refusal, or what went wrong."""
    try:
        return pickle.dumps((DONE, function(*args, **options)))
    except UnsupportedError as error:
        return pickle.dumps((REFUSED, str(error)))
    except Exception as error:
        return pickle.dumps((FAILED, f"{type(error).__name__}: {error}"))
