"""Meeting, being refused on every rank, and the workers that the tests of processes run in."""

from __future__ import annotations

import re
import socket
import time
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dsacp_npu.distributed import Ranks, connect, ranks_of
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.distributed.pool import WorkerError, run

pytestmark = pytest.mark.xdist_group("processes")
WORK = "tests.distributed.work"


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def place_of(kind: str, directory: Path) -> str:
    """An address where nobody has met."""
    return f"file://{directory}/meeting" if kind == "file" else f"tcp://127.0.0.1:{free_port()}"


both_kinds = pytest.mark.parametrize("kind", ["file", "tcp"])


def met(place: str, said: list[tuple[int, int]], timeout: float = 30.0) -> list[str]:
    """What comes of ranks that say (cp_size, cp_rank), one a process; later ones come later."""
    args = [(place, size, rank, timeout, 0.2 * i) for i, (size, rank) in enumerate(said)]
    return run(len(said), f"{WORK}:meeting", args)


@both_kinds
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_ranks_meet_in_any_order(kind: str, cp_size: int, tmp_path: Path) -> None:
    order = [(cp_size, rank) for rank in reversed(range(cp_size))]
    assert met(place_of(kind, tmp_path), order) == [""] * cp_size


@both_kinds
def test_ranks_that_disagree_on_the_size_are_all_refused(kind: str, tmp_path: Path) -> None:
    began = time.monotonic()
    texts = met(place_of(kind, tmp_path), [(2, 0), (3, 1)])
    rule = "ContractError: cp_size must be the same on every rank, got"
    hint = "; all meet with one cp_size"
    assert texts == [f"{rule} 2 on rank 0 and 3 on rank 1{hint}", f"{rule} 3 on rank 1 and 2 on rank 0{hint}"]
    assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("file", [(2, 0), (2, 0)]),
        ("tcp", [(2, 0), (2, 0)]),
        ("file", [(2, 1), (2, 1)]),  # over tcp nobody would keep the store: a rank that does not come
        ("file", [(2, 0), (2, 0), (2, 1)]),
    ],
)
def test_two_ranks_that_are_the_same_are_refused(kind: str, said: list[tuple[int, int]], tmp_path: Path) -> None:
    place = place_of(kind, tmp_path)
    texts = met(place, said)
    rank = said[0][1]
    assert len(texts) == len(said)
    for text in texts:
        assert text.startswith(f"ContractError: cp_rank must differ on the 2 ranks at {place}, got {rank} twice"), text


def test_one_rank_too_many_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    """The first of the two ranks 1 is in the group; where both came before rank 0, there is none."""
    first, *rest = met(place_of("file", tmp_path), [(2, 0), (2, 1), (2, 1)])
    assert sorted(rest).count("") == (first == "")
    for text in (first, *rest):
        assert not text or text.startswith("ContractError: cp_rank must differ on the 2 ranks at"), text


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    place = place_of("file", tmp_path)
    with pytest.raises(TimeoutError, match=rf"^cp_size 2 ranks must meet at {place}, got \[1\] in time; start"):
        connect(place, 2, 1, timeout=0.3)


def test_a_store_that_nobody_keeps() -> None:
    port = free_port()
    text = rf"^rank 0 must keep the store at tcp://127.0.0.1:{port}, got no answer in 0.3 s; start rank 0"
    with pytest.raises(TimeoutError, match=text):
        connect(f"tcp://127.0.0.1:{port}", 2, 1, timeout=0.3)


def test_a_place_that_others_met_at(tmp_path: Path) -> None:
    """A group of one is there at once; the next one at its file is no stranger to it."""
    place = place_of("file", tmp_path)
    first = connect(place, 1, 0, timeout=5)
    with pytest.raises(ContractError, match=r"got 0 twice; one meeting a place: take a new one$"):
        connect(place, 1, 0, timeout=5)
    first.close()


@pytest.mark.parametrize(
    "place", ["", "/a/plain/path", "file://", "file://host/x", "tcp://host", "tcp://:1", "tcp://h:x", "env://", None, 5]
)
def test_places_that_are_none(place: object) -> None:
    text = f"init_method must be file:///path or tcp://host:port, got {place!r}"
    with pytest.raises(ContractError, match=f"^{re.escape(text)}$"):
        connect(place, 1, 0)  # type: ignore[arg-type]


def test_a_file_in_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="init_method must name a file in a directory that exists"):
        connect(f"file://{tmp_path}/none/meeting", 1, 0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cp_size": 0}, "cp_size must be an int in"),
        ({"cp_rank": 1}, "cp_rank must be an int in"),
        ({"cp_rank": -1}, "cp_rank must be an int in"),
        ({"timeout": 0}, "timeout must be a finite number > 0.0, got 0"),
        ({"transport": "pigeon"}, "transport must be one of 'gloo', 'hccl', 'nccl', got 'pigeon'"),
    ],
)
def test_other_arguments(options: dict[str, object], text: str) -> None:
    with pytest.raises(ContractError, match=text):
        connect("file:///nowhere/x", **{"cp_size": 1, "cp_rank": 0, **options})


@pytest.mark.parametrize("transport", ["hccl", "nccl"])
def test_a_transport_that_this_torch_lacks(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsacp_npu._ranks.find_spec", lambda name: None)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    text = f"^transport '{transport}' is not in torch {re.escape(torch.__version__)}; .*install.*, or use another$"
    with pytest.raises(UnsupportedError, match=text):
        connect("file:///nowhere/x", 1, 0, transport=transport)


@pytest.mark.parametrize("cp_size", [2, 3])
def test_an_engines_group(cp_size: int, tmp_path: Path) -> None:
    """Its default group survives a second group and the closing of both; another order or size is refused by all."""
    own, used, kept, order, size, sizes, other = zip(
        *run(cp_size, f"{WORK}:beside_an_engine", [(str(tmp_path),)] * cp_size), strict=True
    )
    assert own == used == kept == ("",) * cp_size
    places = list(range(cp_size))
    turned = f"cp_rank must be {places} along the group, got {places[::-1]}; a rank's place in the group is its cp_rank"
    assert order == (f"ContractError: {turned}",) * cp_size
    rule = f"ContractError: cp_size must be {cp_size} on each of the group's {cp_size} members, got"
    hint = "on them; split the tokens over the group that exchanges them"
    assert size == (f"{rule} {[cp_size + 1] * cp_size} {hint}",) * cp_size
    assert sizes == (f"{rule} {[cp_size + rank for rank in places]} {hint}",) * cp_size
    if not dist.is_nccl_available():
        assert all(text.startswith("UnsupportedError: transport 'nccl' is not in torch") for text in other)


def test_another_default_group_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(UnsupportedError, match=r"got one that exists; make a group with .* and hand it to ranks_of$"):
        connect("file:///nowhere/x", 1, 0, transport="nccl")


def test_what_is_no_group() -> None:
    with pytest.raises(ContractError, match="group must be a torch process group, got NoneType"):
        ranks_of(None, 1, 0)


def test_ranks_are_frozen_and_a_gloo_group_is_not_the_default(tmp_path: Path) -> None:
    ranks = connect(place_of("file", tmp_path), np.int64(1), 0, timeout=5)  # type: ignore[arg-type]
    assert (type(ranks), ranks.cp_size, ranks.cp_rank) == (Ranks, 1, 0)
    assert not dist.is_initialized()
    with pytest.raises(FrozenInstanceError):
        ranks.cp_rank = 1  # type: ignore[misc]
    ranks.close()
    ranks.close()


# --- the pool ---


def test_workers_stay() -> None:
    first, second = (run(3, f"{WORK}:place", [(10 * rank,) for rank in range(3)]) for _ in range(2))
    assert first == second
    assert [place[:2] for place in first] == [(3, 0), (3, 11), (3, 22)]
    assert len({process for *_, process in first}) == 3
    assert run(3, f"{WORK}:threads") == [(1, "1")] * 3


@pytest.mark.parametrize(
    ("function", "args", "text"),
    [
        ("failing", (1,), "rank 0: no answer in time\nrank 1: Traceback"),
        ("dying", (0,), "rank 0: the process ended"),
        ("sleeping", (30,), "rank 0: no answer in time\nrank 1: no answer in time"),
        ("nothing", (), "has no attribute 'nothing'"),
    ],
)
def test_a_failure_is_told_and_the_next_run_has_new_workers(function: str, args: tuple, text: str) -> None:
    before = run(2, f"{WORK}:place")
    with pytest.raises(WorkerError, match=text):
        run(2, f"{WORK}:{function}", [args] * 2, timeout=1.0)
    after = run(2, f"{WORK}:place")
    assert [place[:2] for place in after] == [(2, 0), (2, 1)]
    assert not {place[2] for place in before} & {place[2] for place in after}
