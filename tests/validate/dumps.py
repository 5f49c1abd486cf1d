"""Right dumps: our own layer over ranks, recorded, in small sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsacp_npu import record
from dsacp_npu.layer import layer_over_ranks
from dsacp_npu.validation.reading import Dump, read_dump
from dsacp_npu.validation.report import Report, examined
from dsacp_ref.config import AttentionConfig
from tests.layer_strategies import CSA, SMALL, Cut, Kind, World, weights_of, world_of
from tests.mirror.common import to_torch

# Small, with heads for up to 8 ranks.
MANY_HEADS = replace(SMALL, num_heads=8, o_groups=8)


def recorded(
    lengths: Sequence[int] = (37, 11, 22),
    computed: Sequence[int] = (5, 0, 8),
    *,
    cut: Cut = Cut(2),
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
    from dsacp_ref.partition import partition_tokens

    padded = np.concatenate([x, np.full((cut.padding + 1, x.shape[1]), np.nan, x.dtype)])
    if cut.rows == "full":
        return [torch.tensor(padded[:-1])] * cut.cp_size
    count = len(x) + cut.padding if cut.padding else None
    partition = partition_tokens(
        batch.query_start_loc.numpy(), cut.cp_size, split=cut.split, num_input_tokens=count
    )
    return [torch.tensor(padded[tokens]) for tokens in partition.token_indices]


def cast(value: Any, dtype: str) -> Any:
    """Floats of a nest in another dtype, but for compressor states, which stay wide."""
    from dsacp_npu._geometry import with_tensors

    kind = getattr(torch, dtype)
    return with_tensors(value, lambda tensor: tensor.to(kind) if tensor.is_floating_point() else tensor)


def copied(caches: Sequence[Any]) -> list[Any]:
    """Caches to write into."""
    from dsacp_npu._layer_parts import copied as copy

    return [copy(cache) for cache in caches]


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
