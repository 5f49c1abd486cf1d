"""Right dumps: our own layer over ranks, recorded, in small sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsacp_npu import record
from dsacp_npu._geometry import with_tensors
from dsacp_npu._layer_parts import copied as copied_cache
from dsacp_npu._layer_records import LayerCache
from dsacp_npu.layer import layer_over_ranks
from dsacp_npu.validation.reading import Dump, read_dump
from dsacp_npu.validation.report import Report, examined
from dsacp_ref.config import AttentionConfig
from dsacp_ref.partition import partition_tokens
from tests.layer_strategies import CSA, SMALL, Cut, Kind, World, weights_of, world_of
from tests.mirror.common import to_torch

# Small, with heads for up to 8 ranks.
TWO_RANKS = Cut(2)
MANY_HEADS = replace(SMALL, num_heads=8, o_groups=8)


def recorded(
    lengths: Sequence[int] = (37, 11, 22),
    computed: Sequence[int] = (5, 0, 8),
    *,
    cut: Cut = TWO_RANKS,
    kind: Kind = CSA,
    config: AttentionConfig = MANY_HEADS,
    seed: int = 0,
    idle: Sequence[int] = (),
    dtype: str = "float64",
) -> list[dict[str, Any]]:
    """A dump of every rank: requests of these lengths, so many of each computed by a step before."""
    rng = np.random.default_rng(seed)
    world = world_of(rng, lengths, config=config, kind=kind, weights=weights_of(rng, config, kind))
    x, batch = world.step([0] * len(lengths), computed)
    caches: Any = [to_torch(world.cache)] * cut.cp_size
    if sum(computed):
        caches = run(world, cut._replace(padding=0), x, batch, caches).caches
    x, batch = world.step(computed, lengths, idle=idle)
    weights, batch, config = to_torch(world.weights), to_torch(batch), world.config
    inputs = inputs_of(x, cut, batch)
    if dtype != "float64":
        weights, caches, inputs = (cast(part, dtype) for part in (weights, caches, inputs))
    padded = len(x) + cut.padding if cut.padding else None
    options = {**cut.modes, "compress_ratio": kind.ratio, "num_input_tokens": padded}
    return record.recorded_ranks(inputs, weights, copied(caches), batch, config, **options)[1]


def run(world: World, cut: Cut, x: np.ndarray, batch: Any, caches: Any) -> Any:
    """A step that is not recorded."""
    batch = to_torch(batch)
    options = {**cut.modes, "compress_ratio": world.kind.ratio}
    return layer_over_ranks(inputs_of(x, cut, batch), to_torch(world.weights), caches, batch, world.config, **options)


def inputs_of(x: np.ndarray, cut: Cut, batch: Any) -> list[torch.Tensor]:
    """What each rank is handed; NaN where nobody may look."""
    padded = np.concatenate([x, np.full((cut.padding + 1, x.shape[1]), np.nan, x.dtype)])
    if cut.rows == "full":
        return [torch.tensor(padded[:-1])] * cut.cp_size
    count = len(x) + cut.padding if cut.padding else None
    partition = partition_tokens(batch.query_start_loc.numpy(), cut.cp_size, split=cut.split, num_input_tokens=count)
    return [torch.tensor(padded[tokens]) for tokens in partition.token_indices]


def cast(value: Any, dtype: str) -> Any:
    """Floats of a nest in another dtype; compressor states are float32 below that."""
    kind = getattr(torch, dtype)

    def with_kind(part: Any, to: torch.dtype) -> Any:
        return with_tensors(part, lambda tensor: tensor.to(to) if tensor.is_floating_point() else tensor)

    found = with_kind(value, kind)
    if isinstance(value, list) and isinstance(value[0], LayerCache):
        states = [[with_kind(part, torch.float32) for part in (each.cmp_state, each.index_state)] for each in value]
        found = [
            each._replace(cmp_state=cmp, index_state=index) for each, (cmp, index) in zip(found, states, strict=True)
        ]
    return found


def copied(caches: Sequence[Any]) -> list[Any]:
    """Caches to write into."""
    return [copied_cache(cache) for cache in caches]


def written(folder: Path, dumps: Sequence[Mapping[str, Any]], suffix: str = ".npz") -> list[Path]:
    """A file a rank."""
    paths = [folder / f"rank{dump.get('cp_rank', i)}{suffix}" for i, dump in enumerate(dumps)]
    for path, dump in zip(paths, dumps, strict=True):
        if suffix == ".pt":
            torch.save({k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in dump.items()}, path)
        else:
            record.write_dump(path, dump)
    return paths


def dump_of(folder: Path, dumps: Sequence[Mapping[str, Any]], suffix: str = ".npz", **options: Any) -> Dump:
    """The dump, by way of files."""
    return read_dump(written(folder, dumps, suffix), options)


def report_of(folder: Path, dumps: Sequence[Mapping[str, Any]], suffix: str = ".npz", **options: Any) -> Report:
    """What `validate` says of the dump."""
    return examined(dump_of(folder, dumps, suffix, **options))
