"""What runs the layer in a `parity` cell: the definition, or `dsacp_npu.layer` with a backend, ranks in one process.

Whatever runs, `parity` holds arrays of numpy: what goes in and what comes out is the same, step by step. Rows of
bfloat16 are float32 arrays of values that bfloat16 has, so both ways of the conversion are exact.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from dsacp_ref import block as ref_block
from dsacp_ref import compressor as ref_compressor
from dsacp_ref import fp8 as ref_fp8
from dsacp_ref import indexer as ref_indexer
from dsacp_ref import layer
from dsacp_ref import quant as ref_quant
from dsacp_ref.layer import LayerBatch, LayerCache, LayerOutput, LayerWeights, RanksOutput
from dsacp_ref.mla_layer import MLABatch, MLACache, MLAIndexerWeights, MLAOutput, MLARanksOutput, MLAWeights
from dsacp_ref.mla_stack import MLABlockWeights, StackOutput, StackRanksOutput, StackWeights
from dsacp_ref.spec import UnsupportedError

MODELS = ("v4", "v32")
BACKENDS = ("torch", "cann")
RECORDS = {
    record.__name__: record
    for record in (
        LayerBatch,
        LayerCache,
        LayerOutput,
        LayerWeights,
        RanksOutput,
        ref_compressor.CompressorState,
        ref_compressor.CompressorWeights,
        ref_indexer.IndexerWeights,
        ref_quant.QuantizedVectors,
        ref_block.ExpertWeights,
        ref_fp8.FP8Vectors,
        MLABatch,
        MLACache,
        MLAIndexerWeights,
        MLAOutput,
        MLARanksOutput,
        MLAWeights,
        MLABlockWeights,
        StackOutput,
        StackRanksOutput,
        StackWeights,
    )
}
KEPT = (ref_compressor.CompressorState, ref_fp8.FP8Vectors)  # their float32 is float32 in every way
FP8 = "float8_e4m3fn"


class Way(NamedTuple):
    """What a run of `parity` tries.

    Fields:
        backend: ``"numpy"`` (the definition), ``"torch"`` or ``"cann"``.
        processes: whether every rank is a process of its own.
        model: ``"v4"``, a layer; or ``"v32"``, a stack of V3.2's blocks.
    """

    backend: str = "numpy"
    processes: bool = False
    model: str = "v4"

    @property
    def flags(self) -> str:
        """The options that ask for it."""
        backend = "" if self.backend == "numpy" else f" --backend {self.backend}"
        return " --model v32" * (self.model == "v32") + backend + " --processes" * self.processes

    @property
    def dtype(self) -> str:
        """Of rows, weights and caches."""
        if self.backend == "cann":
            return "bfloat16"
        return "float64" if self.model == "v32" else "float32"

    @property
    def heading(self) -> str:
        """What it is, in words."""
        what = {
            ("v4", "numpy"): "the definition (dsacp_ref.layer, float32)",
            ("v4", "torch"): "torch (dsacp_npu.layer, float32)",
            ("v4", "cann"): f"cann (dsacp_npu.layer, bfloat16, int8 index keys; {operators()})",
            ("v32", "numpy"): "V3.2, the definition (dsacp_ref.mla_stack, float64)",
            ("v32", "torch"): "V3.2, torch (dsacp_npu.mla_stack, float64)",
            ("v32", "cann"): f"V3.2, cann (dsacp_npu.mla_layer, bfloat16; {operators()})",
        }[self.model, self.backend]
        return what + (", every rank a process, over gloo" if self.processes else "")


DEFINITION = Way()


def operators() -> str:
    """Whose operators the cann backend calls here."""
    from dsacp_npu.emulator import real_library

    return f"operators of {real_library()}" if real_library() else "emulated operators, contract only"


class Definition:
    """The layer of `dsacp_ref`."""

    @staticmethod
    def over_ranks(*args: Any, **modes: Any) -> RanksOutput:
        """One step by tokens."""
        return layer.layer_over_ranks(*args, **modes)

    @staticmethod
    def by_heads(*args: Any, **modes: Any) -> RanksOutput:
        """One step by heads."""
        return layer.head_parallel_layer(*args, **modes)


class OneProcess:
    """The layer of `dsacp_npu`, all ranks in this process."""

    def __init__(self, way: Way) -> None:
        """For a backend."""
        self.way = way

    def over_ranks(self, *args: Any, **modes: Any) -> RanksOutput:
        """One step by tokens."""
        made: RanksOutput = called(self.way, "layer", "layer_over_ranks", *args, **modes)
        return made

    def by_heads(self, *args: Any, **modes: Any) -> RanksOutput:
        """One step by heads."""
        made: RanksOutput = called(self.way, "layer", "head_parallel_layer", *args, **modes)
        return made


def engine(way: Way) -> Any:
    """What runs a layer in this way."""
    if way.processes:
        from dsacp_npu.commands.parity_processes import Processes

        return Processes(way)
    return Definition if way.backend == "numpy" else OneProcess(way)


def one_device_layer(way: Way, *args: Any, **options: Any) -> LayerOutput:
    """One step of the mirror on one device, in the way's dtype, without a backend."""
    made: LayerOutput = called(
        way._replace(backend="torch"), "layer", "attention_layer", *args, dtype=way.dtype, **options
    )
    return made


def called(way: Way, module: str, function: str, *args: Any, dtype: str | None = None, **options: Any) -> Any:
    """A function of `dsacp_npu` on arrays, with the way's backend unless another is given."""
    from dsacp_npu import backend

    chosen = options.pop("backend") if "backend" in options else backend.get(way.backend)
    with operators_of(way):
        run = getattr(import_module(f"dsacp_npu.{module}"), function)
        to, device = dtype or way.dtype, device_of(way)
        # Over ranks, lengths are planned with on the host.
        planned = (LayerBatch, MLABatch) if function.endswith("_over_ranks") else ()
        made_args = (tensors(arg, to, "cpu" if isinstance(arg, planned) else device) for arg in args)
        options = {name: tensors(value, to, device) for name, value in options.items()}
        return arrays(run(*made_args, backend=chosen, **options))


def operators_of(way: Way) -> AbstractContextManager[object]:
    """The operators that the backend calls: a real library's, else emulated for the length of a block."""
    if way.backend != "cann":
        return nullcontext()
    from dsacp_npu.emulator import installed

    return installed()


def device_of(way: Way) -> str:
    """Where the layer runs: on an NPU where real operators are called (not run here), else on the CPU.

    Raises:
        UnsupportedError: processes on an NPU, whose tensors gloo does not take.
    """
    if way.backend != "cann":
        return "cpu"
    from dsacp_npu.emulator import real_library

    if real_library() and way.processes:
        raise UnsupportedError(f"--processes runs over gloo, on the CPU; {real_library()} has the operators of an NPU")
    return "npu" if real_library() else "cpu"


# --- numpy to torch, and back ---


def tensors(value: Any, dtype: str, device: str = "cpu") -> Any:
    """What the mirror takes in the place of these arrays and records; float32 becomes this dtype, but where KEPT."""
    import torch

    if isinstance(value, np.ndarray):
        if value.dtype.name == FP8:  # torch takes numpy's own dtypes only
            return torch.from_numpy(value.view(np.uint8).copy()).view(getattr(torch, FP8)).to(device)
        made = torch.from_numpy(np.array(value))
        return made.to(device, getattr(torch, dtype) if made.dtype == torch.float32 else made.dtype)
    if hasattr(value, "_fields"):
        inner = "float32" if isinstance(value, KEPT) else dtype
        return mirror_record(type(value))(*(tensors(part, inner, device) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(tensors(part, dtype, device) for part in value)
    return value


def arrays(value: Any) -> Any:
    """The arrays and records of `dsacp_ref` that hold the same numbers."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.dtype == getattr(torch, FP8):
            return value.cpu().view(torch.uint8).numpy().view(ref_fp8.narrow_floats().float8_e4m3fn)
        return (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()
    if hasattr(value, "_fields"):
        return RECORDS[type(value).__name__](*map(arrays, value))
    if isinstance(value, (list, tuple)):
        return type(value)(arrays(part) for part in value)
    return value


def mirror_record(record: type) -> Any:
    """The mirror's record of the same name."""
    return getattr(import_module(record.__module__.replace("dsacp_ref.", "dsacp_npu.")), record.__name__)


def rounded(value: Any, dtype: str) -> Any:
    """The arrays in float32, with values that this dtype has."""
    import torch

    if isinstance(value, np.ndarray):
        if value.dtype.kind != "f":
            return value
        return torch.from_numpy(np.array(value)).to(getattr(torch, dtype)).float().numpy()
    return type(value)(*(rounded(part, dtype) for part in value)) if hasattr(value, "_fields") else value
