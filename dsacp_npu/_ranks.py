"""A process group whose size and rank order are known to be those of the context-parallel ranks."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dsacp_npu._tensors import torch
from dsacp_npu.partition import checked_ranks
from dsacp_ref.spec import UnsupportedError, check_choice, check_number, contract_error

__all__ = ["Ranks", "connect", "ranks_of"]

dist = torch.distributed

# The device whose tensors each transport takes, and what gives a torch that lacks it.
TRANSPORTS = {
    "gloo": ("cpu", "install a torch that is built with gloo"),
    "hccl": ("npu", "pip install 'dsacp[npu]' on the NPU's machine"),
    "nccl": ("cuda", "install a torch that is built for CUDA"),
}
FAREWELL = 5.0  # seconds that the rank with the store waits for others to read why they are all refused


@dataclass(frozen=True)
class Ranks:
    """One rank's place in a group whose size and order were checked.

    Args:
        group: a torch process group; its members are the ranks, in order.
        cp_size: the number of ranks.
        cp_rank: this rank.
        release: ends a group that is not an engine's own; call `close`.
    """

    group: Any
    cp_size: int
    cp_rank: int
    release: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    def close(self) -> None:
        """End the group, if `connect` made it; an engine's own goes on. May be called again."""
        if self.release is not None:
            self.release()


def connect(init_method: str, cp_size: int, cp_rank: int, *, transport: str = "gloo", timeout: float = 300.0) -> Ranks:
    """Meet the other ranks and form a group.

    A gloo group stands beside torch's default group, whether there is one or not. The other transports have no public
    way to do so: they become the default group, and are refused where an engine has one already (`ranks_of` is for it).

    Args:
        init_method: ``file:///path`` of a file that does not exist yet, on a disk all ranks see (it stays), or
            ``tcp://host:port`` of rank 0.
        cp_size: the number of ranks.
        cp_rank: this rank.
        transport: gloo (CPU), hccl (NPU) or nccl (CUDA).
        timeout: seconds to wait for the others, here and in each collective.

    Returns:
        Ranks; close them.

    Raises:
        ContractError: ranks that disagree on cp_size, or two that are the same rank; on all of them.
        UnsupportedError: a transport that this torch lacks, or a second default group.
        TimeoutError: a rank that did not come.
    """
    cp_size, cp_rank = checked_ranks(cp_size, cp_rank)
    timeout = check_number("timeout", timeout, above=0.0)
    check_transport(transport)
    deadline = time.monotonic() + timeout
    store, serves = opened_store(init_method, cp_rank, timeout)
    desk = dist.PrefixStore("dsacp", store)
    try:
        meet(desk, cp_size, cp_rank, deadline, init_method)
    except BaseException:
        say_farewell(desk, serves)
        raise
    limit = timedelta(seconds=timeout)
    if transport == "gloo":
        group, release = own_gloo(dist.PrefixStore("gloo", store), cp_size, cp_rank, limit)
    else:
        dist.init_process_group(transport, store=store, rank=cp_rank, world_size=cp_size, timeout=limit)
        group, release = dist.group.WORLD, end_default(dist.group.WORLD)
    check_members(group, cp_size, cp_rank, TRANSPORTS[transport][0])
    return Ranks(group, cp_size, cp_rank, release)


def ranks_of(group: Any, cp_size: int, cp_rank: int) -> Ranks:
    """An engine's own group, once its members say that they are these ranks in this order.

    Every member must call this: it is a collective, of two integers.

    Args:
        group: a torch process group.
        cp_size: the number of ranks that the tokens are split over.
        cp_rank: this rank.

    Returns:
        Ranks; closing them leaves the group alone.

    Raises:
        ContractError: another number of members, or another order; on every member.
    """
    cp_size, cp_rank = checked_ranks(cp_size, cp_rank)
    if not isinstance(group, dist.ProcessGroup):
        raise contract_error("group", "be a torch process group", type(group).__name__, "its members are the ranks")
    check_members(group, cp_size, cp_rank, TRANSPORTS.get(group.name(), ("cpu",))[0])
    return Ranks(group, cp_size, cp_rank)


def check_members(group: Any, cp_size: int, cp_rank: int, device: str) -> None:
    """Refuse, on every member alike, a group that is not the ranks in their order."""
    told = [torch.zeros(2, dtype=torch.int64, device=device) for _ in range(group.size())]
    dist.all_gather(told, torch.tensor([cp_size, cp_rank], device=device), group=group)
    sizes, order = ([int(pair[i]) for pair in told] for i in range(2))
    if set(sizes) != {group.size()}:
        got = f"{sizes} on them"
        hint = "split the tokens over the group that exchanges them"
        raise contract_error("cp_size", f"be {group.size()} on each of the group's {group.size()} members", got, hint)
    if order != list(range(cp_size)):
        hint = "a rank's place in the group is its cp_rank"
        raise contract_error("cp_rank", f"be {list(range(cp_size))} along the group", order, hint)


def check_transport(transport: str) -> None:
    """Refuse a transport that this torch does not have, or that cannot have a group of its own here."""
    check_choice("transport", transport, tuple(TRANSPORTS))
    if transport == "hccl":
        there = find_spec("torch_npu") is not None
        if there:
            import torch_npu  # noqa: F401  # brings hccl into torch
    else:
        there = dist.is_available() and getattr(dist, f"is_{transport}_available")()
    if not there:
        raise UnsupportedError(
            f"transport {transport!r} is not in torch {torch.__version__}; {TRANSPORTS[transport][1]}, or use another"
        )
    if transport != "gloo" and dist.is_initialized():
        raise UnsupportedError(
            f"transport {transport!r} must become torch's default group, got one that exists; "
            f"make a group with torch.distributed.new_group(backend={transport!r}) and hand it to ranks_of"
        )


def opened_store(init_method: str, cp_rank: int, timeout: float) -> tuple[Any, bool]:
    """The store where ranks meet, and whether this rank keeps it for the others."""
    where = urlsplit(init_method) if isinstance(init_method, str) else None
    if where and where.scheme == "file" and not where.netloc and where.path:
        if not Path(where.path).parent.is_dir():
            raise contract_error("init_method", "name a file in a directory that exists", repr(init_method))
        store = dist.FileStore(where.path, -1)  # told a number, it takes the file away from under late ranks
        store.set_timeout(timedelta(seconds=timeout))
        return store, False
    if where and where.scheme == "tcp" and where.hostname and port_of(where):
        return opened_tcp(where.hostname, port_of(where), cp_rank == 0, timeout)
    raise contract_error("init_method", "be file:///path or tcp://host:port", repr(init_method))


def port_of(where: Any) -> int:
    """The port of an address; 0 for none or one that cannot be."""
    with suppress(ValueError):
        return where.port or 0
    return 0


def opened_tcp(host: str, port: int, serves: bool, timeout: float) -> tuple[Any, bool]:
    """The store on rank 0's port. A second rank 0 finds the port taken and goes to the first, to be told so."""
    limit = timedelta(seconds=timeout)
    try:
        return dist.TCPStore(host, port, None, serves, limit, wait_for_workers=False), serves
    except dist.DistNetworkError as error:
        if serves and errno.errorcode[errno.EADDRINUSE] in str(error):
            return opened_tcp(host, port, False, timeout)
        raise TimeoutError(
            f"rank 0 must keep the store at tcp://{host}:{port}, got no answer in {timeout:g} s; "
            "start rank 0, or check host and port"
        ) from error


def meet(desk: Any, cp_size: int, cp_rank: int, deadline: float, init_method: str) -> None:
    """Wait until all ranks have signed in, and compare what they say: a group of ranks that disagree never forms."""
    turn = desk.add("arrivals", 1)
    desk.set(f"arrival {turn}", f"{cp_size} {cp_rank}")
    here = {}
    for arrival in range(1, max(turn, cp_size) + 1):
        try:
            desk.wait([f"arrival {arrival}"], timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
        except RuntimeError as error:
            raise TimeoutError(
                f"cp_size {cp_size} ranks must meet at {init_method}, got {sorted(here)} in time; "
                "start the others, or give more timeout"
            ) from error
        size, rank = map(int, desk.get(f"arrival {arrival}").split())
        if size != cp_size:
            got = f"{cp_size} on rank {cp_rank} and {size} on rank {rank}"
            raise contract_error("cp_size", "be the same on every rank", got, "all meet with one cp_size")
        if rank in here:
            got = f"{rank} twice"
            raise contract_error(
                "cp_rank", f"differ on the {cp_size} ranks at {init_method}", got, "one meeting a place: take a new one"
            )
        here[rank] = arrival


def say_farewell(desk: Any, serves: bool) -> None:
    """Keep the store until the others have read in it that they are refused as well."""
    with suppress(RuntimeError):  # the rank with the store may be gone already
        desk.add("left", 1)
        end = time.monotonic() + FAREWELL
        while serves and time.monotonic() < end and desk.add("left", 0) < desk.add("arrivals", 0):
            time.sleep(0.01)


def own_gloo(store: Any, cp_size: int, cp_rank: int, limit: timedelta) -> tuple[Any, Callable[[], None]]:
    """A gloo group outside of torch's registry, and what ends it: made as torch makes its own."""
    backend = dist.ProcessGroupGloo(store, cp_rank, cp_size, limit)
    group = dist.ProcessGroup(store, cp_rank, cp_size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group, group.shutdown


def end_default(group: Any) -> Callable[[], None]:
    """What ends this default group, and no later one."""

    def end() -> None:
        if dist.is_initialized() and dist.group.WORLD is group:
            dist.destroy_process_group()

    return end
