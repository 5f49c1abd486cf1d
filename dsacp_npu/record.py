"""Dumps of our own layers, as `python -m dsacp_npu validate` reads them.

::

    with record.recording(layer) as tensors:        a `DSAttention` on this rank: its next forward
        x = layer(x, step, caches[layer.layer_idx])
    record.write_dump("rank0.npz", tensors)

A recorded layer calls the same functions through a backend that keeps what goes in and what comes out; a layer that is
not recorded knows nothing of it. Caches are copied when attention reads them, so record small ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dsacp_npu import backend as backends
from dsacp_npu._geometry import Geometry, Kind, Queries, sizes_of
from dsacp_npu._layer_records import LayerBatch, LayerCache, LayerWeights, RanksOutput
from dsacp_npu._rank_layer import LocalRows, Modes, RankStep, rank_program, rank_step, run_together
from dsacp_npu._tensors import Float, dtype_name, torch
from dsacp_npu.backend import Backend
from dsacp_npu.caches import PagedCache
from dsacp_npu.layer import check_lists, kept_weights, planned_step
from dsacp_npu.module import DSAttention
from dsacp_npu.quant import QuantizedVectors
from dsacp_npu.step import StepMetadata
from dsacp_npu.validation.schema import SETTINGS, TENSORS, rope_settings
from dsacp_ref.config import AttentionConfig
from dsacp_ref.spec import check_record, contract_error

__all__ = ["all_ranks", "recorded_ranks", "recording", "write_dump"]

Tensors = dict[str, Any]
ATTENTION = ("window_attention", "all_entries_attention", "selected_attention")
# Arguments of attention and of the indexer, and the names that they have in a dump.
ATTENTION_NAMES = {
    "q": "q",
    "swa_cache": "swa_cache",
    "cmp_cache": "cmp_cache",
    "swa_block_table": "swa_block_table_rows",
    "cmp_block_table": "cmp_block_table_rows",
    "topk_indices": "topk_indices",
    "cu_seqlens_q": "cu_seqlens_q",
    "seqused_kv": "seqused_kv",
    "attn_sink": "attn_sink",
    "softmax_scale": "softmax_scale",
    "window_size": "window_size",
}
INDEXER_NAMES = {"index_q": "index_q", "index_weights": "index_weights", "index_cache": "index_cache"}
GATHERED = ("replicate", "gather_hidden", "gather_kv")  # key modes in which a rank writes every key, in token order


class Recorder:
    """A backend that keeps the last call of each function of interest.

    Args:
        ops: Backend that computes.
    """

    def __init__(self, ops: Backend) -> None:
        """All functions of ``ops``; those of interest are kept."""
        self.calls: dict[str, tuple[dict[str, Any], Any]] = {}
        kept = (*ATTENTION, "lightning_indexer", "projected_output")
        functions = {name: self.kept(name, f) if name in kept else f for name, f in ops.functions.items()}
        self.backend = Backend(ops.name, functions)

    def kept(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which leaves copies of its arguments and of its result here."""
        signature = inspect.signature(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            # Copied before the call, as the function saw them.
            given = {key: plain(value) for key, value in signature.bind(*args, **kwargs).arguments.items()}
            result = function(*args, **kwargs)
            self.calls[name] = given, plain(result)
            return result

        return call


def plain(value: Any) -> Any:
    """Tensors and records of them as numpy arrays of their own; short floats, which numpy lacks, widened."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return (value.float() if value.dtype == torch.bfloat16 else value).cpu().clone().numpy()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(plain, value))
    return value


@contextmanager
def recording(layer: DSAttention) -> Iterator[Tensors]:
    """What the layer's next forward is given, computes and gives, under the names of a dump.

    Args:
        layer: DSAttention; its own calls go on as they are, and so does it afterwards.

    Yields:
        dict by name, filled by the forward: arrays, numbers and words; the last forward's, if there are several.

    Raises:
        ContractError: no such layer.
    """
    check_record("layer", layer, DSAttention)
    tensors: Tensors = {}
    recorder = Recorder(layer.backend)
    kinds = layer.split_kind, layer.whole_kind

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Float) -> None:
        step, cache = (kwargs[name] if name in kwargs else args[i] for i, name in ((1, "step"), (2, "cache")))
        tensors.clear()
        tensors.update(forward_tensors(layer, step, cache, recorder))
        tensors["output"] = plain(output)

    hook = layer.register_forward_hook(note, with_kwargs=True)
    layer.split_kind, layer.whole_kind = (kind._replace(ops=recorder.backend) for kind in kinds)
    try:
        yield tensors
    finally:
        layer.split_kind, layer.whole_kind = kinds
        hook.remove()


def forward_tensors(
    layer: DSAttention, step: StepMetadata, cache: PagedCache | LayerCache, recorder: Recorder
) -> Tensors:
    """What a forward left, without its output."""
    place, ratio = layer.parallel, layer.compress_ratio
    sizes = sizes_of(cache.tensors if isinstance(cache, PagedCache) else cache)
    if step.splits:
        part = step.rank_step(ratio)
        modes = part.modes if place.tp is None else None
        found = rank_tensors(part, layer.split_kind, recorder, modes, layer.dtype_name)
    else:
        alone = place.tp is None and place.cp is None
        found = whole_tensors(step.geometry(ratio), layer.whole_kind, recorder, layer.dtype_name, alone=alone)
    return found | {"block_size": sizes.block_size, "cmp_block_size": sizes.cmp_block_size}


def recorded_ranks(
    inputs: Sequence[Float],
    weights: LayerWeights,
    caches: Sequence[LayerCache],
    batch: LayerBatch,
    config: AttentionConfig,
    *,
    compress_ratio: int,
    split: str = "contiguous",
    rows: str = "full",
    key_mode: str = "replicate",
    output_mode: str = "all_to_all",
    num_input_tokens: int | None = None,
    backend: Backend | None = None,
) -> tuple[RanksOutput, list[Tensors]]:
    """`dsacp_npu.layer.layer_over_ranks_`, every rank played in this process, and a dump of each.

    Args:
        inputs, weights, caches, batch, config: as there; written into the caches.
        compress_ratio, split, rows, key_mode, output_mode, num_input_tokens, backend: as there.

    Returns:
        RanksOutput, and one dict by name a rank.

    Raises:
        ContractError: as there.
    """
    modes = Modes(split, rows, key_mode, output_mode, num_input_tokens)
    check_lists(inputs, caches)
    members = dict(enumerate(zip(inputs, caches, strict=True)))
    ops = backends.get("torch") if backend is None else backend
    plan, call = planned_step(members, len(inputs), weights, batch, config, compress_ratio, modes, None, ops)
    programs, parts = [], []
    for rank, (x, cache) in members.items():
        recorder = Recorder(ops)
        step = rank_step(plan, modes, rank, sizes_of(cache), call.kind, x.device)
        own = kept_weights(call.weights, rank, len(inputs), output_mode)
        kind = call.kind._replace(ops=recorder.backend)
        programs.append(rank_program(x, cache, step, call._replace(kind=kind, weights=own), None))
        parts.append((step, kind, recorder, cache))
    outputs = RanksOutput(*map(list, zip(*run_together(programs), strict=True)))
    dumps = []
    for (step, kind, recorder, cache), output in zip(parts, outputs.outputs, strict=True):
        found = rank_tensors(step, kind, recorder, modes, dtype_name(output))
        sizes = sizes_of(cache)
        found |= {"block_size": sizes.block_size, "cmp_block_size": sizes.cmp_block_size, "output": plain(output)}
        dumps.append(found)
    return outputs, dumps


# --- what is in a dump ---


def rank_tensors(step: RankStep, kind: Kind, recorder: Recorder, modes: Modes | None, dtype: str) -> Tensors:
    """A rank's part of a step that splits tokens; without ``modes``, nothing of its output."""
    geometry, cut = step.geometry, step.modes
    settings: Tensors = {
        "cp_size": len(step.plan.rows_per_rank),
        "cp_rank": step.cp_rank,
        "split": cut.split,
        "rows": cut.rows,
    }
    if cut.num_input_tokens is not None:
        settings["num_input_tokens"] = cut.num_input_tokens
    found = settings | common_tensors(geometry, kind, recorder, dtype) | local_tensors(geometry.queries, step.local)
    if cut.key_mode in GATHERED:
        found["slot_mapping"] = plain(geometry.swa_slots)
    if cut.key_mode in ("replicate", "gather_hidden"):
        found |= dict(zip(("full_cos", "full_sin"), map(plain, geometry.table), strict=True))
    if modes is not None and "projected_output" in recorder.calls:
        name = "partial_output" if modes.output_mode == "all_to_all" else "local_output"
        found[name] = recorder.calls["projected_output"][1]
    return found


def whole_tensors(geometry: Geometry, kind: Kind, recorder: Recorder, dtype: str, *, alone: bool) -> Tensors:
    """A step that does not split tokens: as one rank of one. ``alone`` says that no other rank has part of its rows."""
    positions = plain(geometry.queries.rows.positions)
    loc = plain(geometry.batch.query_start_loc)
    tokens = np.arange(len(positions), dtype=np.int32)
    found: Tensors = {
        "cp_size": 1,
        "cp_rank": 0,
        "split": "contiguous",
        "rows": "full",
        "num_input_tokens": len(positions),
        "empty_extent": "prefix",  # a request without queries has all its keys
    }
    found |= common_tensors(geometry, kind, recorder, dtype)
    table = dict(zip(("cos", "sin"), map(plain, geometry.queries.table), strict=True))
    found |= {"token_indices": np.where(tokens < loc[-1], tokens, np.int32(-1)), "positions": positions, **table}
    found["slot_mapping"] = plain(geometry.swa_slots)
    if alone and "projected_output" in recorder.calls:
        found["local_output"] = recorder.calls["projected_output"][1]
    return found


def local_tensors(queries: Queries, local: LocalRows) -> Tensors:
    """What a rank knows of each of its rows, pad rows among them."""
    real, count = plain(local.real), len(local.tokens)

    def spread(values: Any, fill: float) -> Any:
        rows = np.full((count, *values.shape[1:]), fill, values.dtype)
        rows[real] = values
        return rows

    cos, sin = map(plain, queries.table)
    return {
        "token_indices": plain(local.tokens),
        "positions": spread(plain(queries.rows.positions), -1),
        "cos": spread(cos, 1),
        "sin": spread(sin, 0),
    }


def common_tensors(geometry: Geometry, kind: Kind, recorder: Recorder, dtype: str) -> Tensors:
    """Lengths, tables, entries and constants, and what the operators were given and gave."""
    batch, config = geometry.batch, kind.config
    loc, lens = plain(batch.query_start_loc), plain(batch.seq_lens)
    found: Tensors = {
        "compress_ratio": kind.ratio,
        "dtype": dtype,
        **rope_settings(config),
        "query_start_loc": loc,
        "seq_lens": lens,
        "num_computed_tokens": lens - np.diff(loc),
        "request_indices": plain(geometry.queries.extents.request_indices),
        "swa_block_table": plain(batch.swa_block_table),
    }
    if geometry.entries is not None:
        requests, indices, starts = map(plain, geometry.entries.plan)
        found |= {"entry_requests": requests, "entry_indices": indices, "entry_start_loc": starts}
        found |= {"entry_slots": plain(geometry.entries.slots), "compress_cu_seqlens": loc}
        found["cmp_block_table"] = plain(batch.cmp_block_table)
    if kind.indexed:
        found["index_topk"] = config.index_topk
    return found | operator_tensors(recorder)


def operator_tensors(recorder: Recorder) -> Tensors:
    """Arguments and results of the operators that ran."""
    found: Tensors = {}
    if "lightning_indexer" in recorder.calls:
        given, chosen = recorder.calls["lightning_indexer"]
        found |= {name: given[key] for key, name in INDEXER_NAMES.items()}
        found["topk_indices"] = chosen
        if isinstance(found["index_cache"], QuantizedVectors):
            values, scales = found.pop("index_cache")
            found |= {"index_cache.values": values, "index_cache.scales": scales}
    for name in ATTENTION:
        if name in recorder.calls:
            given, result = recorder.calls[name]
            found |= {ours: given[key] for key, ours in ATTENTION_NAMES.items() if key in given}
            found["out"] = result.out
            if result.lse is not None:
                found["lse"] = result.lse
    return found


# --- files ---


def all_ranks(dumps: Sequence[Mapping[str, Any]]) -> Tensors:
    """The dumps of all ranks as one, for one file.

    Args:
        dumps: one a rank, each with its ``cp_rank``.

    Returns:
        dict by name: ``rank3/seqused_kv`` for a rank's own, a bare name for what belongs to the step.
    """
    ranked = {tensor.name for tensor in TENSORS if tensor.scope == "rank"}
    found: Tensors = {}
    for dump in dumps:
        for name, value in dump.items():
            if name != "cp_rank":
                found[f"rank{dump['cp_rank']}/{name}" if name in ranked else name] = value
    return found


def write_dump(path: str | Path, tensors: Mapping[str, Any]) -> None:
    """A dump as a file.

    Args:
        path: ends in ``.npz`` or ``.safetensors``.
        tensors: by name, as `recording` and `recorded_ranks` give them.

    Raises:
        ContractError: another kind of file.
        ImportError: safetensors is not installed.
    """
    path = Path(path)
    if path.suffix == ".npz":
        np.savez(path, **{name: np.asarray(value) for name, value in tensors.items()})
    elif path.suffix == ".safetensors":
        try:
            from safetensors.numpy import save_file
        except ImportError as error:
            raise ImportError("a .safetensors dump is written with safetensors; pip install 'dsacp[torch]'") from error
        words = {setting.name for setting in SETTINGS}
        arrays = {name: np.ascontiguousarray(value) for name, value in tensors.items() if name not in words}
        save_file(arrays, path, metadata={name: str(tensors[name]) for name in tensors if name in words})
    else:
        raise contract_error("path", "end in .npz or .safetensors", path.name, "validate reads both")
