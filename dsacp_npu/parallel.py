"""What an attention layer knows of the ranks around it: the options as given, the grid, and the groups that are used.

    switch on (CP is TP)                      switch off
    tp  ->  splits tokens in a CP step,       tp  ->  splits heads, in every step
            heads in every other step         cp  ->  splits tokens, independently of tp (merged xLLM)

Data-parallel copies are outside of all this. `parallel_of` refuses options and groups that do not belong together,
`check_model` a model or a backend that cannot do what they ask for; both when a model is built, not at its first step.
Neither sends anything: ranks that are configured alike are refused alike, and nobody waits for one that was refused.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsacp_npu._ranks import Ranks
from dsacp_npu._tensors import torch
from dsacp_npu.backend import Backend
from dsacp_npu.partition import checked_ranks
from dsacp_ref.config import AttentionConfig, ParallelConfig, Topology, check_combination
from dsacp_ref.config import topology as topology_of
from dsacp_ref.mla_config import MLAConfig
from dsacp_ref.spec import UnsupportedError, check_record, contract_error

__all__ = ["Parallel", "check_mla_model", "check_model", "parallel_of"]

dist = torch.distributed
logger = logging.getLogger("dsacp_npu")

# What a backend needs where ranks project their own rows, and pool what others projected.
OWN_ROWS_MODES = ("gather_kv", "gather_compressed")
OWN_ROWS_FUNCTIONS = ("projected_rows", "pooled_entries", "updated_state_")


@dataclass(frozen=True)
class Parallel:
    """One rank's place, for a layer. Built by `parallel_of`.

    Args:
        options: ParallelConfig, as given.
        topology: Topology of all ranks, or of one data-parallel copy where none was given.
        cp: the ranks that split tokens, None for one; the TP group with ``enable_dsa_cp``.
        tp: the ranks that split heads in every step, None for one; always None with ``enable_dsa_cp``.

    >>> rank = parallel_of({"enable_dsa_cp": True}, tp=Ranks(None, 4, 1))
    >>> rank.cp_active, (rank.cp_size, rank.cp_rank), (rank.tp_size, rank.tp_rank)
    (True, (4, 1), (1, 0))
    """

    options: ParallelConfig
    topology: Topology
    cp: Ranks | None
    tp: Ranks | None

    @property
    def cp_size(self) -> int:
        """Ranks that split tokens."""
        return place_of(self.cp)[0]

    @property
    def cp_rank(self) -> int:
        """This rank among them."""
        return place_of(self.cp)[1]

    @property
    def tp_size(self) -> int:
        """Ranks that split heads in every step. With ``enable_dsa_cp`` 1, unlike ``topology.tp_size``."""
        return place_of(self.tp)[0]

    @property
    def tp_rank(self) -> int:
        """This rank among them."""
        return place_of(self.tp)[1]

    @property
    def cp_active(self) -> bool:
        """Whether tokens are split at all."""
        return self.cp is not None


def parallel_of(
    options: ParallelConfig | Mapping[str, Any] | Sequence[str] | None = None,
    *,
    cp: Ranks | None = None,
    tp: Ranks | None = None,
    topology: Topology | None = None,
) -> Parallel:
    """The options and groups of this rank, once they are found to belong together.

    With ``enable_dsa_cp`` and one rank in the TP group nothing is split; that is logged as a warning, once a process.

    Args:
        options: ParallelConfig, a JSON object or command-line words that hold its fields among others, or None for
            its defaults: off.
        cp: the CP group, None for one rank. With ``enable_dsa_cp`` leave it out: it is the TP group.
        tp: the TP group, None for one rank.
        topology: where this rank stands in the whole world; None for a world of one data-parallel copy. Its groups
            are compared with the members of ``cp`` and ``tp`` as torch keeps them; of a group made by `connect` it
            keeps none, so size and rank must do.

    Returns:
        Parallel.

    Raises:
        ContractError: options that are none; a group that is not the one that options, topology or torch say.
        UnsupportedError: options that exclude each other (`ParallelConfig`).

    Source: xLLM pull requests 1997 (switch on) and 2097 (switch off).

    >>> parallel_of().cp_active, parallel_of(["--port=80"]).tp_size
    (False, 1)
    >>> parallel_of(["--enable_dsa_cp"], cp=Ranks(None, 2, 0), tp=Ranks(None, 4, 0))
    Traceback (most recent call last):
    dsacp_ref.spec.ContractError: cp must be the TP group with enable_dsa_cp, got a group of 2 beside a TP group of 4; \
leave cp out, and hand the TP group in as tp
    """
    options = options_of(options)
    check_ranks("cp", cp)
    check_ranks("tp", tp)
    if options.enable_dsa_cp:
        check_shared_group(cp, tp)
        cp, tp = tp, None
        size, rank = place_of(cp)
        copy = topology_of(size, rank=rank, cp_size=options.cp_size, enable_dsa_cp=True)
    else:
        check_separate_groups(options, cp, tp)
        (planes, plane), (size, rank) = place_of(cp), place_of(tp)
        copy = topology_of(planes * size, rank=plane * size + rank, cp_size=planes)
    if topology is not None:
        check_topology(topology, copy, cp, tp)
    cp, tp = several(cp), several(tp)
    if options.enable_dsa_cp and cp is None:
        warn_once()
    return Parallel(options, copy if topology is None else topology, cp, tp)


def check_model(parallel: Parallel, config: AttentionConfig, backend: Backend | None = None) -> None:
    """Refuse a model or a backend that cannot do what the options ask for, naming the flags.

    Context parallelism is asked for by ``enable_dsa_cp`` or by a CP group of several ranks; then it is refused at one
    rank like at many, so that a setting does not start to fail when ranks are added (only what must divide depends on
    their number), and where nobody asks for it none of its options is looked at.

    Args:
        parallel: Parallel.
        config: AttentionConfig of the model.
        backend: the functions that its layers use; None is torch.

    Raises:
        ContractError: an argument of another type.
        UnsupportedError: ranks that do not divide heads and groups; split, rows, keys and output that exclude each
            other in a layer of the model (`check_combination`); a model without an indexer; a backend without what the
            key mode calls.

    >>> from dsacp_ref.config import v4_flash
    >>> check_model(parallel_of({"enable_dsa_cp": True}, tp=Ranks(None, 8, 0)), v4_flash())
    >>> check_model(parallel_of(tp=Ranks(None, 3, 0)), v4_flash())
    Traceback (most recent call last):
    dsacp_ref.spec.UnsupportedError: tp_size must divide num_heads 64 and o_groups 8, got 3; a rank keeps whole groups \
of heads
    """
    check_record("parallel", parallel, Parallel)
    check_record("config", config, AttentionConfig)
    if backend is not None:
        check_record("backend", backend, Backend)
    if config.num_heads % parallel.tp_size or config.o_groups % parallel.tp_size:
        wanted = f"num_heads {config.num_heads} and o_groups {config.o_groups}"
        raise UnsupportedError(
            f"tp_size must divide {wanted}, got {parallel.tp_size}; a rank keeps whole groups of heads"
        )
    if parallel.options.enable_dsa_cp or parallel.cp_active:
        check_indexer(parallel, config)
        check_layers(parallel, config)
        check_backend(parallel.options, backend)


def check_mla_model(parallel: Parallel, config: MLAConfig, backend: Backend | None = None) -> None:
    """Refuse options that a V3.2 model cannot do, naming the flags.

    There is one way to run it over ranks, and any split rule: a rank projects its own rows and gathers the keys
    (``gather_kv``), and has all heads and the whole output weight (``replicated_weight``). Looked at where context
    parallelism is asked for.

    Args:
        parallel: Parallel.
        config: MLAConfig of the model.
        backend: the functions that its layers use; None is torch.

    Raises:
        ContractError: an argument of another type.
        UnsupportedError: ranks that split heads in every step, or another key or output mode.

    >>> from dsacp_ref.mla_config import v32
    >>> flags = ["--enable_dsa_cp", "--dsa_cp_key_mode=gather_kv", "--dsa_cp_output_mode=replicated_weight"]
    >>> check_mla_model(parallel_of(flags, tp=Ranks(None, 8, 0)), v32())
    >>> check_mla_model(parallel_of({"enable_dsa_cp": True}, tp=Ranks(None, 8, 0)), v32())
    Traceback (most recent call last):
    dsacp_ref.spec.UnsupportedError: dsa_cp_key_mode must be 'gather_kv' for a V3.2 model, got 'replicate'; every rank \
projects the keys of its own rows
    """
    check_record("parallel", parallel, Parallel)
    check_record("config", config, MLAConfig)
    if backend is not None:
        check_record("backend", backend, Backend)
    if parallel.tp is not None:
        raise UnsupportedError(
            f"tp_size must be 1 for a V3.2 model, got {parallel.tp_size}; its attention has whole weights on every "
            "rank: set enable_dsa_cp to split tokens over these ranks"
        )
    options = parallel.options
    if not options.asks_for_cp:
        return
    for name, due, why in (
        ("key_mode", "gather_kv", "every rank projects the keys of its own rows"),
        ("output_mode", "replicated_weight", "every rank has the whole output weight"),
    ):
        got = getattr(options, f"dsa_cp_{name}")
        if got != due:
            raise UnsupportedError(f"dsa_cp_{name} must be {due!r} for a V3.2 model, got {got!r}; {why}")


# --- options and groups ---


def options_of(options: object) -> ParallelConfig:
    """The options, however they were given."""
    if options is None:
        return ParallelConfig()
    if isinstance(options, ParallelConfig):
        return options
    if isinstance(options, Mapping):
        return ParallelConfig.from_json(options)
    if isinstance(options, (list, tuple)):
        return ParallelConfig.from_flags(options)[0]
    got = f"{type(options).__name__} {options!r}"
    raise contract_error("options", "be ParallelConfig, a JSON object, a list of command-line words or None", got)


def place_of(ranks: Ranks | None) -> tuple[int, int]:
    """Size of a group and rank in it."""
    return (1, 0) if ranks is None else (ranks.cp_size, ranks.cp_rank)


def several(ranks: Ranks | None) -> Ranks | None:
    """The group, if there is anyone else in it."""
    return None if place_of(ranks)[0] == 1 else ranks


def check_ranks(name: str, ranks: Ranks | None) -> None:
    """Refuse what is no group, and one whose size and rank were not taken from its process group."""
    if ranks is None:
        return
    check_record(name, ranks, Ranks)
    checked_ranks(ranks.cp_size, ranks.cp_rank)
    if isinstance(ranks.group, dist.ProcessGroup):
        size, rank = ranks.group.size(), ranks.group.rank()
        if (size, rank) != place_of(ranks):
            got = f"rank {ranks.cp_rank} of {ranks.cp_size}"
            raise contract_error(name, f"be rank {rank} of {size}, as in its process group", got, "make it by ranks_of")


def check_shared_group(cp: Ranks | None, tp: Ranks | None) -> None:
    """Refuse a CP group of its own: tokens would be cut over one group and heads over another."""
    sizes = place_of(cp)[0], place_of(tp)[0]
    if cp is not None and cp != tp and sizes != (1, 1):
        other = "another group" if sizes[0] == sizes[1] else "a group"
        got = f"{other} of {sizes[0]} beside a TP group of {sizes[1]}"
        hint = "leave cp out, and hand the TP group in as tp"
        raise contract_error("cp", "be the TP group with enable_dsa_cp", got, hint)


def check_separate_groups(options: ParallelConfig, cp: Ranks | None, tp: Ranks | None) -> None:
    """Refuse a CP group of another size than configured, and one that is not independent of TP."""
    size = place_of(cp)[0]
    if options.cp_size != size:
        rule = f"be {size}, the size of the CP group, while enable_dsa_cp is off"
        hint = "hand the CP group in as cp" if cp is None else "tokens are cut by the size of the group that gathers"
        raise contract_error("cp_size", rule, options.cp_size, f"{hint}, or set enable_dsa_cp to split over TP")
    if cp is not None and tp is not None and overlap(cp, tp):
        rule = "share this rank only with tp while enable_dsa_cp is off"
        got = f"{list(members(cp)) or 'the same group'} beside {list(members(tp)) or 'it'}"
        raise contract_error("cp", rule, got, "set enable_dsa_cp to split tokens over the TP group")


def overlap(cp: Ranks, tp: Ranks) -> bool:
    """Whether two groups are known to have more than this rank in common."""
    if isinstance(cp.group, dist.ProcessGroup) and cp.group == tp.group:
        return cp.cp_size > 1
    return len({*members(cp)} & {*members(tp)}) > 1


def members(ranks: Ranks | None) -> tuple[int, ...]:
    """The global ranks of a group, in its order; none where torch does not keep them, as for groups of `connect`."""
    if ranks is None or not isinstance(ranks.group, dist.ProcessGroup):
        return ()
    try:
        return tuple(dist.get_process_group_ranks(ranks.group))
    except KeyError:
        return ()


def check_topology(topology: Topology, copy: Topology, cp: Ranks | None, tp: Ranks | None) -> None:
    """Refuse a grid in which this rank stands elsewhere than in its groups; ``copy`` is the grid that they make."""
    check_record("topology", topology, Topology)
    for name in ("cp_size", "cp_rank", "tp_size", "tp_rank"):
        ours, got = getattr(copy, name), getattr(topology, name)
        if ours != got:
            hint = "build the topology with the sizes and the enable_dsa_cp that the groups were made with"
            raise contract_error(f"topology.{name}", f"be {ours}, as in the groups handed in", got, hint)
    for axis, ranks in {"cp": cp, "tp": tp}.items():
        ours, known = getattr(topology, f"{axis}_group"), members(ranks)
        # Same size and rank, other members: the CP and the TP group of a square grid, exchanged on its diagonal.
        if known and known != ours:
            hint = "one rank's place in the other axis can be the same; leave topology out if torch counts otherwise"
            raise contract_error(axis, f"have the members {list(ours)} of the topology", list(known), hint)


# A warning: who turned the switch on waits for an effect, and nobody sees what is logged as information by default.
said = threading.Lock()  # taken by the first thread that comes, and kept


def warn_once() -> None:
    """Say once a process that the switch has no effect."""
    if said.acquire(blocking=False):
        logger.warning("enable_dsa_cp is on, but the TP group has one rank: tokens are not split")


# --- the model ---


def check_indexer(parallel: Parallel, config: AttentionConfig) -> None:
    """Refuse a model that is not sparse: the flag is there for those alone."""
    if 4 not in config.compress_ratios:
        switch = "enable_dsa_cp" if parallel.options.enable_dsa_cp else f"cp_size {parallel.cp_size}"
        found = sorted(set(config.compress_ratios))
        raise UnsupportedError(
            f"{switch} must be used with a model that has an indexer, a layer of compress_ratio 4, got {found}; "
            "turn it off for this model"
        )


def check_layers(parallel: Parallel, config: AttentionConfig) -> None:
    """Refuse options that some layer of the model cannot run with, in the flags that set them."""
    options = parallel.options
    for ratio in sorted(set(config.compress_ratios)):
        try:
            check_combination(
                split=options.prefill_cp_mode,
                rows=options.dsa_cp_rows,
                key_mode=options.dsa_cp_key_mode,
                output_mode=options.dsa_cp_output_mode,
                compress_ratio=ratio,
                cp_size=parallel.cp_size,
                num_heads=config.num_heads // parallel.tp_size,
                o_groups=config.o_groups // parallel.tp_size,
            )
        except UnsupportedError as error:
            raise UnsupportedError(f"{flags_of(options)}: {error}") from None


def flags_of(options: ParallelConfig) -> str:
    """The flags that decide how a layer runs over ranks, as on a command line."""
    names = ("enable_dsa_cp", "prefill_cp_mode", "dsa_cp_rows", "dsa_cp_key_mode", "dsa_cp_output_mode")
    return " ".join(flag for flag in options.to_flags() if flag.removeprefix("--").partition("=")[0] in names)


def check_backend(options: ParallelConfig, backend: Backend | None) -> None:
    """Refuse a backend without the functions that the key mode calls."""
    if backend is None or options.dsa_cp_key_mode not in OWN_ROWS_MODES:
        return
    missing = [name for name in OWN_ROWS_FUNCTIONS if name not in backend.functions]
    if missing:
        instead = "replicate" if options.dsa_cp_rows == "full" else "gather_hidden"
        raise UnsupportedError(
            f"dsa_cp_key_mode {options.dsa_cp_key_mode!r} needs {', '.join(OWN_ROWS_FUNCTIONS)} of a backend, "
            f"got backend {backend.name!r} without {', '.join(missing)}; use dsa_cp_key_mode={instead!r}"
        )
