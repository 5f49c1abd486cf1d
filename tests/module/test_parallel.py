"""Options and groups of one rank: what belongs together, and every refusal, without a process for the other ranks."""

from __future__ import annotations

import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsacp_npu import backend, layer, parallel
from dsacp_npu.distributed import Ranks, connect
from dsacp_npu.parallel import Parallel, check_model, parallel_of
from dsacp_ref.config import AttentionConfig, ParallelConfig, Topology, check_combination, topology, v4_flash, v4_pro
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.layer_strategies import CSA, Cut, World, world_of
from tests.mirror.common import to_torch

ON, ON_FLAG = ParallelConfig(enable_dsa_cp=True), {"enable_dsa_cp": True}
HCA_ONLY = replace(v4_flash(), num_hidden_layers=3, compress_ratios=(1, 128, 128))


def ranks(cp_size: int, cp_rank: int = 0) -> Ranks:
    """A group that is nobody else's."""
    return Ranks(object(), cp_size, cp_rank)


def refused(kind: type[Exception], text: str) -> Any:
    """Expect an error of this kind and exactly this text."""
    return pytest.raises(kind, match=f"^{re.escape(text)}$")


def place(one: Parallel) -> tuple[int, int, int, int, bool]:
    return one.cp_size, one.cp_rank, one.tp_size, one.tp_rank, one.cp_active


@pytest.fixture
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not warned yet."""
    monkeypatch.setattr(parallel, "said", threading.Lock())


# --- options ---


@pytest.mark.parametrize(
    "options",
    [
        ParallelConfig(enable_dsa_cp=True, prefill_cp_mode="zigzag"),
        {"enable_dsa_cp": True, "model": "v4", "prefill_cp_mode": "in-seq-split", "dp_size": 2},
        ["--port", "80", "--enable-dsa-cp", "--prefill_cp_mode=zigzag", "positional"],
        ("--enable_dsa_cp=1", "--prefill_cp_mode", "zigzag", "--", "--enable_dsa_cp=false"),
    ],
)
def test_options_in_every_form(options: Any) -> None:
    assert parallel_of(options, tp=ranks(2)).options == ParallelConfig(enable_dsa_cp=True, prefill_cp_mode="zigzag")


def test_no_options_are_the_switch_off() -> None:
    assert parallel_of().options == ParallelConfig() == parallel_of({}).options == parallel_of([]).options
    assert parallel_of() == Parallel(ParallelConfig(), topology(1, rank=0), None, None)


@pytest.mark.parametrize("options", [True, 3, "--enable_dsa_cp", {1}, ParallelConfig])
def test_options_that_are_none(options: Any) -> None:
    rule = "options must be ParallelConfig, a JSON object, a list of command-line words or None, got"
    with refused(ContractError, f"{rule} {type(options).__name__} {options!r}"):
        parallel_of(options)


def test_bad_options_are_refused_in_their_own_words() -> None:
    with refused(ContractError, "enable_dsa_cp must be true or false, got str 'true'"):
        parallel_of({"enable_dsa_cp": "true"})
    with refused(ContractError, "flags must be a list of str, got [1]; one entry per word"):
        parallel_of([1])  # type: ignore[list-item]
    with pytest.raises(UnsupportedError, match=r"^key_mode must not be 'replicate' when rows is 'scattered'"):
        parallel_of(["--dsa_cp_rows=scattered"])


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        parallel_of().cp = ranks(2)  # type: ignore[misc]


# --- the grid ---


def made_of(grid: Topology, shared: bool, lone: bool) -> tuple[Ranks | None, Ranks | None]:
    """The groups that an engine has at this place; groups of one rank are there or not."""

    def group(members: tuple[int, ...], size: int, rank: int) -> Ranks | None:
        return Ranks(members, size, rank) if lone or size > 1 else None

    cp = None if shared else group(grid.cp_group, grid.cp_size, grid.cp_rank)
    return cp, group(grid.tp_group, grid.tp_size, grid.tp_rank)


sizes = st.integers(1, 16)


@given(dp=sizes, cp=sizes, tp=sizes, shared=st.booleans(), lone=st.booleans(), configured=st.booleans())
def test_groups_agree_with_the_topology(dp: int, cp: int, tp: int, shared: bool, lone: bool, configured: bool) -> None:
    """Up to 16 ranks: every rank stands in its groups where the grid says, with the grid given or derived."""
    tp = min(tp, 16)
    cp = 1 if shared else min(cp, 16 // tp)
    dp = min(dp, 16 // (tp * cp))
    options = ParallelConfig(enable_dsa_cp=shared, cp_size=tp if shared and configured else cp)
    for rank in range(dp * cp * tp):
        grid = topology(dp * cp * tp, rank=rank, dp_size=dp, cp_size=options.cp_size, tp_size=tp, enable_dsa_cp=shared)
        own_cp, own_tp = made_of(grid, shared, lone)
        given_grid = parallel_of(options, cp=own_cp, tp=own_tp, topology=grid)
        derived = parallel_of(options, cp=own_cp, tp=own_tp)
        static = (1, 0) if shared else (grid.tp_size, grid.tp_rank)
        for one in (given_grid, derived):
            assert place(one) == (grid.cp_size, grid.cp_rank, *static, grid.cp_active)
            assert one.topology.cp_active == one.cp_active
            assert one.cp is None or one.cp.group == grid.cp_group
            assert one.tp is None or one.tp.group == grid.tp_group
        assert given_grid.topology is grid
        # One data-parallel copy is the world of a derived grid: the same groups, counted from its first rank.
        first = grid.dp_rank * cp * tp
        for axis in ("cp", "tp"):
            members = getattr(derived.topology, f"{axis}_group")
            assert tuple(first + member for member in members) == getattr(grid, f"{axis}_group")
        assert derived.topology.dp_size == 1


def test_with_the_switch_cp_is_tp() -> None:
    group = ranks(4, 3)
    for cp in (None, group):
        one = parallel_of(ON, cp=cp, tp=group)
        assert (one.cp, one.tp) == (group, None)
        assert (one.topology.tp_size, one.topology.cp_group) == (4, (0, 1, 2, 3))


def test_an_engines_groups_of_one_rank_may_be_two() -> None:
    for tp in (None, ranks(1)):
        assert place(parallel_of(ON, cp=ranks(1), tp=tp)) == (1, 0, 1, 0, False)


# --- groups that do not belong together ---


@pytest.mark.parametrize(
    ("cp", "tp", "got"),
    [
        (ranks(2), ranks(4), "a group of 2 beside a TP group of 4"),
        (ranks(1), ranks(4), "a group of 1 beside a TP group of 4"),  # A06, turned round: split over 4, told of 1
        (ranks(4), None, "a group of 4 beside a TP group of 1"),  # A06: the split group is not the gather group
        (ranks(4), ranks(1), "a group of 4 beside a TP group of 1"),
        (ranks(4), ranks(4), "another group of 4 beside a TP group of 4"),
    ],
)
def test_a_cp_group_beside_the_tp_group(cp: Ranks, tp: Ranks | None, got: str) -> None:
    hint = "leave cp out, and hand the TP group in as tp"
    with refused(ContractError, f"cp must be the TP group with enable_dsa_cp, got {got}; {hint}"):
        parallel_of(ON, cp=cp, tp=tp)


@pytest.mark.parametrize("tp", [None, ranks(1), ranks(4)])
def test_a_size_of_its_own_with_the_switch(tp: Ranks | None) -> None:
    """A07: tokens cut by 2, gathered over all 4."""
    size = tp.cp_size if tp else 1
    text = (
        f"cp_size must be 1 or the TP size {size} with enable_dsa_cp, got 2; "
        f"the CP group is the TP group, and an independent cp_size 2 mismatches a group of {size}"
    )
    with refused(ContractError, text):
        parallel_of({**ON_FLAG, "cp_size": 2}, tp=tp)


@pytest.mark.parametrize(
    ("flag", "cp", "hint"),
    [
        (2, None, "hand the CP group in as cp"),
        (1, ranks(2), "tokens are cut by the size of the group that gathers"),
        (2, ranks(4), "tokens are cut by the size of the group that gathers"),  # A07 with the switch off
        (2, ranks(1), "tokens are cut by the size of the group that gathers"),
    ],
)
def test_a_size_that_is_not_the_groups(flag: int, cp: Ranks | None, hint: str) -> None:
    size = cp.cp_size if cp else 1
    rule = f"cp_size must be {size}, the size of the CP group, while enable_dsa_cp is off, got {flag}"
    for tp in (None, ranks(4)):
        with refused(ContractError, f"{rule}; {hint}, or set enable_dsa_cp to split over TP"):
            parallel_of({"cp_size": flag}, cp=cp, tp=tp)


@pytest.mark.parametrize("name", ["cp", "tp"])
def test_groups_must_be_ranks(name: str) -> None:
    with refused(ContractError, f"{name} must be of type Ranks, got int"):
        parallel_of(**{name: 2})
    with refused(ContractError, "cp_rank must be an int in [0, 1], got 2; ranks count from 0 within cp_size 2"):
        parallel_of({"cp_size": 2 if name == "cp" else 1}, **{name: ranks(2, 2)})


def test_groups_whose_size_was_made_up(tmp_path: Path) -> None:
    """A07: a group of other members than its record says, whoever made the record."""
    met = connect(f"file://{tmp_path}/meeting", 1, 0, timeout=5)
    try:
        assert parallel_of(tp=met).tp_size == 1
        for name in ("cp", "tp"):
            rule = f"{name} must be rank 0 of 1, as in its process group, got rank 1 of 2; make it by ranks_of"
            with refused(ContractError, rule):
                parallel_of({"cp_size": 2}, **{name: Ranks(met.group, 2, 1)})
    finally:
        met.close()


GRID_HINT = "build the topology with the sizes and the enable_dsa_cp that the groups were made with"


@pytest.mark.parametrize(
    ("options", "cp", "tp", "grid", "name", "ours", "got"),
    [
        ({"cp_size": 2}, ranks(2, 1), ranks(2), topology(4, rank=2, cp_size=4), "cp_size", 2, 4),
        ({"cp_size": 2}, ranks(2, 1), ranks(2), topology(4, rank=0, cp_size=2), "cp_rank", 1, 0),
        ({"cp_size": 2}, ranks(2, 1), None, topology(4, rank=2, cp_size=2), "tp_size", 1, 2),
        ({"cp_size": 2}, ranks(2, 1), ranks(2), topology(4, rank=3, cp_size=2), "tp_rank", 0, 1),
        # The groups exchanged: seen wherever the two coordinates differ.
        ({"cp_size": 2}, ranks(2, 1), ranks(2, 0), topology(4, rank=1, cp_size=2), "cp_rank", 1, 0),
        # The switch known to one of the two only.
        (ON_FLAG, None, ranks(4), topology(4, rank=0), "cp_size", 4, 1),
        ({}, None, ranks(4), topology(4, rank=0, enable_dsa_cp=True), "cp_size", 1, 4),
        # A group of the whole world, which the grid cuts into data-parallel copies.
        (ON_FLAG, None, ranks(4), topology(4, rank=0, dp_size=2, enable_dsa_cp=True), "cp_size", 4, 2),
        ({}, None, None, topology(4, rank=0), "tp_size", 1, 4),
    ],
)
def test_a_topology_that_says_otherwise(
    options: Any, cp: Ranks | None, tp: Ranks | None, grid: Topology, name: str, ours: int, got: int
) -> None:
    with refused(ContractError, f"topology.{name} must be {ours}, as in the groups handed in, got {got}; {GRID_HINT}"):
        parallel_of(options, cp=cp, tp=tp, topology=grid)


def test_a_topology_that_is_none() -> None:
    with refused(ContractError, "topology must be of type Topology, got dict"):
        parallel_of(topology={})  # type: ignore[arg-type]


# --- one rank with the switch on ---


def test_one_rank_is_said_once(unsaid: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert not parallel_of(tp=ranks(1)).cp_active
        assert parallel_of(ON, tp=ranks(2)).cp_active
        assert not caplog.records
        for tp in (None, ranks(1), None):
            one = parallel_of(ON, tp=tp)
            assert (one.cp, one.tp, place(one)) == (None, None, (1, 0, 1, 0, False))
    said = "enable_dsa_cp is on, but the TP group has one rank: tokens are not split"
    assert caplog.record_tuples == [("dsacp_npu", logging.WARNING, said)]


def test_threads_say_it_once(unsaid: None, caplog: pytest.LogCaptureFixture) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: parallel_of(ON), range(32)))
    assert len(caplog.records) == 1


def test_a_refused_rank_says_nothing(unsaid: None, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ContractError):
        parallel_of(ON, topology=topology(2, rank=0, enable_dsa_cp=True))
    assert not caplog.records


# --- the model ---


def every_way(cp: int, tp: int = 1, **options: Any) -> list[Parallel]:
    """The ways to have so many ranks that split tokens, beside so many that split heads."""
    groups = {"cp": ranks(cp) if cp > 1 else None, "tp": ranks(tp) if tp > 1 else None}
    ways = [parallel_of({"cp_size": cp, **options}, **groups)] if cp > 1 else []
    return [*ways, parallel_of({**ON_FLAG, **options}, tp=ranks(cp))] if tp == 1 else ways


@pytest.mark.parametrize(("config", "legal"), [(v4_flash(), {1, 2, 4, 8}), (v4_pro(), {1, 2, 4, 8, 16})])
def test_ranks_that_split_heads(config: AttentionConfig, legal: set[int]) -> None:
    for size in (*range(1, 18), 32, 64):
        one = parallel_of(tp=ranks(size))
        if size in legal:
            check_model(one, config)
            continue
        rule = f"tp_size must divide num_heads {config.num_heads} and o_groups {config.o_groups}"
        with refused(UnsupportedError, f"{rule}, got {size}; a rank keeps whole groups of heads"):
            check_model(one, config)


@given(cp=st.integers(1, 16), tp=st.sampled_from([1, 2, 4, 8]), config=st.sampled_from([v4_flash(), v4_pro()]))
def test_ranks_that_split_tokens_divide_what_is_left(cp: int, tp: int, config: AttentionConfig) -> None:
    left = {"num_heads": config.num_heads // tp, "o_groups": config.o_groups // tp}
    for one in every_way(cp, tp):
        if left["o_groups"] % cp == 0:
            check_model(one, config)
            continue
        switch = "true" if one.options.enable_dsa_cp else "false"
        flags = f"--enable_dsa_cp={switch} --prefill_cp_mode=contiguous --dsa_cp_rows=full"
        text = (
            f"{flags} --dsa_cp_key_mode=replicate --dsa_cp_output_mode=all_to_all: cp_size must divide num_heads "
            f"{left['num_heads']} and o_groups {left['o_groups']} when output_mode is 'all_to_all', got {cp}; "
            "use output_mode='gather_weight' or 'replicated_weight'"
        )
        with refused(UnsupportedError, text):
            check_model(one, config)
        for output_mode in ("gather_weight", "replicated_weight"):
            for other in every_way(cp, tp, dsa_cp_output_mode=output_mode):
                check_model(other, config)


PAGES = "round_robin_page(4)"


@pytest.mark.parametrize("split", ["contiguous", "zigzag", "round_robin", PAGES, "round_robin_page(128)"])
@pytest.mark.parametrize("key_mode", ["replicate", "gather_kv", "gather_compressed"])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_splits_and_keys_of_every_ratio(split: str, key_mode: str, cp_size: int) -> None:
    """Refused as `check_combination` refuses any layer of the model, at one rank too."""
    config = v4_flash()
    words = {"split": split, "rows": "full", "key_mode": key_mode, "output_mode": "all_to_all"}
    texts = []
    for ratio in (1, 4, 128):
        try:
            check_combination(
                **words, compress_ratio=ratio, cp_size=cp_size, num_heads=config.num_heads, o_groups=config.o_groups
            )
        except UnsupportedError as error:
            texts.append(str(error))
    for one in every_way(cp_size, prefill_cp_mode=split, dsa_cp_key_mode=key_mode):
        if not texts:
            check_model(one, config)
            continue
        switch = "true" if one.options.enable_dsa_cp else "false"
        flags = f"--enable_dsa_cp={switch} --prefill_cp_mode={split} --dsa_cp_rows=full"
        with refused(
            UnsupportedError, f"{flags} --dsa_cp_key_mode={key_mode} --dsa_cp_output_mode=all_to_all: {texts[0]}"
        ):
            check_model(one, config)
    assert bool(texts) == (key_mode == "gather_compressed" and split in ("round_robin", PAGES))


@pytest.mark.parametrize("config", [HCA_ONLY, replace(HCA_ONLY, compress_ratios=(0, 1, 1))])
def test_a_model_without_an_indexer(config: AttentionConfig) -> None:
    """A37: the flag on a model that is not sparse is an error when the model is built, not garbage."""
    found = sorted({ratio or 1 for ratio in config.compress_ratios})
    rest = f"must be used with a model that has an indexer, a layer of compress_ratio 4, got {found}"
    for options, groups, switch in (
        (ON_FLAG, {"tp": ranks(2)}, "enable_dsa_cp"),
        (ON_FLAG, {}, "enable_dsa_cp"),
        ({"cp_size": 2}, {"cp": ranks(2)}, "cp_size 2"),
    ):
        with refused(UnsupportedError, f"{switch} {rest}; turn it off for this model"):
            check_model(parallel_of(options, **groups), config)
    check_model(parallel_of(tp=ranks(4)), config)


@pytest.mark.parametrize(
    ("rows", "key_mode", "instead"),
    [
        ("full", "gather_kv", "replicate"),
        ("full", "gather_compressed", "replicate"),
        ("scattered", "gather_kv", "gather_hidden"),
        ("scattered", "gather_compressed", "gather_hidden"),
    ],
)
@pytest.mark.parametrize("cp_size", [1, 2])
def test_a_backend_without_what_the_key_mode_calls(rows: str, key_mode: str, instead: str, cp_size: int) -> None:
    less = {name: function for name, function in backend.get("torch").functions.items() if name != "pooled_entries"}
    needed = "projected_rows, pooled_entries, updated_state_"
    for one in every_way(cp_size, dsa_cp_rows=rows, dsa_cp_key_mode=key_mode):
        for name, functions, missing in (("none", {}, needed), ("less", less, "pooled_entries")):
            got = f"got backend '{name}' without {missing}; use dsa_cp_key_mode='{instead}'"
            with refused(UnsupportedError, f"dsa_cp_key_mode '{key_mode}' needs {needed} of a backend, {got}"):
                check_model(one, v4_flash(), backend.Backend(name, functions))
        for whole in (None, backend.get("torch")):
            check_model(one, v4_flash(), whole)
    for other in every_way(cp_size, dsa_cp_rows=rows, dsa_cp_key_mode=instead):
        check_model(other, v4_flash(), backend.get("cann"))


def called(world: World, cut: Cut) -> set[str]:
    """The functions of a backend that a step over ranks calls."""
    names: set[str] = set()

    def noting(name: str, function: Any) -> Any:
        return lambda *args, **options: names.add(name) or function(*args, **options)

    right = backend.get("torch").functions
    noted = backend.Backend("noted", {name: noting(name, function) for name, function in right.items()})
    x, batch = world.step([0, 0], world.lengths)
    inputs = [x] * cut.cp_size
    if cut.rows == "scattered":
        half = len(x) // 2
        inputs = [x[:half], x[half:]]
    shared = to_torch((inputs, world.weights, [world.cache] * cut.cp_size, batch, world.config))
    layer.layer_over_ranks(*shared, compress_ratio=world.kind.ratio, **cut.modes, backend=noted)
    return names


def test_the_functions_that_are_asked_of_a_backend_are_those_that_are_called() -> None:
    """Beyond those of a step that replicates, which every backend has."""
    world = world_of(np.random.default_rng(0), [9, 7], kind=CSA)
    for rows, plain in (("full", "replicate"), ("scattered", "gather_hidden")):
        every_step = called(world, Cut(2, rows=rows, key_mode=plain)) - {"hadamard", "rms_norm"}  # or the mirror's
        assert every_step <= set(backend.get("cann").functions)
        for key_mode in ("gather_kv", "gather_compressed"):
            more = called(world, Cut(2, rows=rows, key_mode=key_mode)) - every_step - {"hadamard", "rms_norm"}
            assert more == set(parallel.OWN_ROWS_FUNCTIONS)


@pytest.mark.parametrize("config", [v4_flash(), HCA_ONLY])
def test_where_nobody_asks_for_it_its_options_are_not_looked_at(config: AttentionConfig) -> None:
    options = ParallelConfig(prefill_cp_mode="round_robin", dsa_cp_key_mode="gather_compressed")
    for tp in (None, ranks(8)):
        check_model(parallel_of(options, tp=tp), config, backend.get("cann"))


def test_arguments_of_another_type() -> None:
    one = parallel_of()
    for arguments, name, kind in (
        ((None, v4_flash()), "parallel", "Parallel"),
        ((one, None), "config", "AttentionConfig"),
        ((one, v4_flash(), None.__class__), "backend", "Backend"),
    ):
        got = "type" if name == "backend" else "NoneType"
        with refused(ContractError, f"{name} must be of type {kind}, got {got}"):
            check_model(*arguments)
