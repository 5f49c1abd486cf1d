"""What worker processes do for the tests here: each function gets this rank's `Ranks` first."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from dsacp_npu import distributed
from dsacp_npu.distributed import Ranks, connect, ranks_of


def exchanges(ranks: Ranks, calls: list[tuple[str, tuple[Any, ...], tuple[Any, ...]]]) -> list[Any]:
    """One collective after the other: (function, this rank's part, what all ranks know)."""
    return [getattr(distributed, name)(*own, ranks, *known) for name, own, known in calls]


def unwritten(ranks: Ranks, name: str, shard: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """The result of a call that leaves its input as it was and shares no memory with it."""
    before = shard.clone()
    result = getattr(distributed, name)(shard, ranks, counts)
    result_place, place = result.untyped_storage().data_ptr(), shard.untyped_storage().data_ptr()
    assert result_place != place or not place
    assert torch.equal(shard, before)
    return result


def numbers_sent(ranks: Ranks, *args: Any) -> int:
    """How many numbers `requested_rows` hands to the transport, for itself and others."""
    sent = []
    right = dist.all_to_all_single

    def counting(received: torch.Tensor, flat: torch.Tensor, *more: Any, **options: Any) -> None:
        sent.append(flat.numel())
        right(received, flat, *more, **options)

    with patch.object(dist, "all_to_all_single", counting):
        distributed.requested_rows(args[0], ranks, *args[1:])
    return sum(sent)


def told(call: Any) -> str:
    """The type and text of an error; empty for none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def sum_over(ranks: Ranks, cp_size: int) -> str:
    """Shows that a group works."""
    total = distributed.all_reduce(torch.ones(2), ranks)
    return "" if total.tolist() == [cp_size, cp_size] else f"{total.tolist()}"


def meeting(ranks: Ranks, init_method: str, cp_size: int, cp_rank: int, timeout: float, delay: float = 0.0) -> str:
    """Another group between these processes; what went wrong."""
    time.sleep(delay)
    made: list[Ranks] = []
    text = told(lambda: made.append(connect(init_method, cp_size, cp_rank, timeout=timeout)))
    if not made:
        return text
    text = sum_over(made[0], cp_size)
    made[0].close()
    made[0].close()
    return text


def beside_an_engine(ranks: Ranks, directory: str) -> list[str]:
    """A group while torch has a default group; the default group goes on, and is one for `ranks_of` itself."""
    size, rank = ranks.cp_size, ranks.cp_rank
    dist.init_process_group("gloo", init_method=f"file://{directory}/engine", world_size=size, rank=rank)
    try:
        found = [meeting(ranks, f"file://{directory}/other", size, rank, 30.0)]
        engine = ranks_of(dist.group.WORLD, size, rank)
        found.append(sum_over(engine, size))
        engine.close()
        found.append(sum_over(engine, size))
        turned = dist.new_group(list(range(size)))
        found.append(told(lambda: ranks_of(turned, size, size - 1 - rank)))
        found.append(told(lambda: ranks_of(turned, size + 1, rank)))
        found.append(told(lambda: ranks_of(turned, size + rank, rank)))
        found.append(told(lambda: connect(f"file://{directory}/third", size, rank, transport="nccl")))
        return found
    finally:
        dist.destroy_process_group()


def place(ranks: Ranks, add: int = 0) -> tuple[int, int, int]:
    """Size, rank and process."""
    return ranks.cp_size, ranks.cp_rank + add, os.getpid()


def threads(ranks: Ranks) -> tuple[int, str | None]:
    """How many threads torch uses here, and what the environment says."""
    return torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")


def failing(ranks: Ranks, who: int) -> None:
    """One rank raises, the rest wait for it."""
    if ranks.cp_rank == who:
        raise ValueError("this one")
    distributed.all_reduce(torch.ones(1), ranks)


def dying(ranks: Ranks, who: int) -> None:
    """One rank's process ends."""
    if ranks.cp_rank == who:
        os._exit(3)


def sleeping(ranks: Ranks, seconds: float) -> None:
    """Nobody answers."""
    time.sleep(seconds)


def layers(ranks: Ranks, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
    """One step of a layer after the other, each (function, arguments without the group, options); or its refusal."""
    found: list[Any] = []
    for name, args, options in calls:
        try:
            found.append(getattr(distributed, name)(*args, ranks, **options))
        except NotImplementedError as error:
            found.append(str(error))
    return found
