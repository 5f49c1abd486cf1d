"""`mirror`: which function of the reference has a twin, where that twin was tested, and where nothing has run.

Prints `docs/mirror.md`. Everything is found by looking at the public names of the modules, so nothing can be claimed
for a function that is not there; that what is claimed has its test is a test too.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
from collections.abc import Iterator, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from dsacp_npu.commands.progress import waiting

EXAMPLES = """\
examples:
  %(prog)s                         print it
  %(prog)s > docs/mirror.md        bring the page up to date
"""
TESTED, CONTRACT, NOT_RUN, NONE = "*tested here*", "*contract only*", "*not run here*", "-"
COMPILED, ONCE = "*tested and compiled here*", "*run once*"
# The modules of arithmetic, in the order in which they build on one another.
MODULES = (
    "partition",
    "extents",
    "visibility",
    "paging",
    "rope",
    "quant",
    "fp8",
    "compressor",
    "indexer",
    "attention",
    "mla",
    "exchange",
    "layer",
    "block",
    "mla_layer",
    "mla_stack",
)

DISTRIBUTED = ("distributed", "distributed_block", "distributed_mla")

INTRODUCTION = f"""\
# The mirror

`python -m dsacp_npu mirror` prints this page; a test fails when it is stale. What each public name of `dsacp_ref` has
in `dsacp_npu`, and what was done with it:

* {TESTED}: property tests compare it with the reference, on a machine like the one of the tests: CPU only.
* {CONTRACT}: the operator was called here, with the emulator's operators in the place of the real ones. It has never
  run on an NPU.
* {COMPILED}: the Triton kernels behind it compute the right thing in Triton's interpreter, and on a
  CPU as what the Ascend adapter makes of them (and HFusion, where that can be executed); the Ascend compiler takes them
  for A2, A3 and A5 within on-chip memory. Projections are torch's matrix products, without a kernel.
* {ONCE}: on one NVIDIA H200, by `tests/kernels/test_cuda.py`, which is skipped where there is no GPU, or by
  `python -m dsacp_npu bench --device cuda`, which compares before it times.
* {NOT_RUN}: nothing of it has run on such a device.

`{NONE}`: there is none. A layer reaches cann and triton by its keyword `backend`. A name that ends in `_` writes into
its cache argument, and returns what its twin without `_` returns."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no flags."""
    parser.epilog = EXAMPLES


def run(args: argparse.Namespace) -> int:
    """Print the page."""
    with waiting("looking at every module"):
        print(page(), end="")
    return 0


def page() -> str:
    """The text of docs/mirror.md."""
    cann = module_if_there("cann")
    kernels = module_if_there("triton_ops")
    parts = [INTRODUCTION]
    for module in MODULES:
        parts.append(table_of(module, module_if_there(module), cann, kernels))
    parts += [cann_table(cann), *(distributed_table(name) for name in DISTRIBUTED)]
    return "\n\n".join(part for part in parts if part) + "\n"


def module_if_there(name: str) -> ModuleType | None:
    """A module of `dsacp_npu`; None where it is not written. One that is there must import."""
    if importlib.util.find_spec(f"dsacp_npu.{name}") is None:
        return None
    return import_module(f"dsacp_npu.{name}")


def public(module: ModuleType | None) -> list[str]:
    """The public names of a module."""
    return list(module.__all__) if module else []


def with_in_place(names: Sequence[str], *modules: ModuleType | None) -> Iterator[str]:
    """The names, each followed by the in-place twin that one of the modules has."""
    for name in names:
        yield name
        if any(f"{name}_" in public(module) for module in modules):
            yield f"{name}_"


def table_of(module: str, torch_module: ModuleType | None, cann: ModuleType | None, kernels: ModuleType | None) -> str:
    """One module of the reference: what its names have in torch, in cann, in triton and on an NPU."""
    reference = import_module(f"dsacp_ref.{module}")
    rows = []
    for name in with_in_place(reference.__all__, torch_module, cann):
        value = getattr(reference, name.removesuffix("_"))
        in_torch = TESTED if name in public(torch_module) else NONE
        if inspect.isfunction(value):
            takes = takes_backend(torch_module, name)
            in_cann = CONTRACT if name in public(cann) or takes else NONE
            in_triton = kernels is not None and (name in kernels.FUNCTIONS or takes)
            on_npu = NOT_RUN if in_triton or {in_torch, in_cann} != {NONE} else NONE
            products = in_triton and kernels.KERNEL_FILES.get(name) == ()  # torch's alone
            on_gpu = ONCE if in_triton and name in kernels.RUN_ON_GPU else NOT_RUN
            triton = (TESTED if products else COMPILED, on_gpu) if in_triton else (NONE, NONE)
            rows.append((f"`{name}`", in_torch, in_cann, *triton, on_npu))
        else:
            rows.append((described(name, value), in_torch, *[NONE] * 4))
    columns = (f"`dsacp_ref.{module}`", "torch", "cann", "triton", "NVIDIA", "NPU")
    return markdown(f"## {module}", columns, rows)


def takes_backend(module: ModuleType | None, name: str) -> bool:
    """Whether a function can be told to run on operators."""
    return module is not None and "backend" in inspect.signature(getattr(module, name)).parameters


def described(name: str, value: Any) -> str:
    """A record with its fields, or any other value by its name."""
    fields = getattr(value, "_fields", None) or tuple(getattr(value, "__dataclass_fields__", ()))
    return f"`{name}`: {', '.join(fields)}" if fields else f"`{name}`"


def cann_table(cann: ModuleType | None) -> str:
    """What only the operators have."""
    theirs = {name for module in MODULES for name in import_module(f"dsacp_ref.{module}").__all__}
    own = [name for name in public(cann) if name not in theirs and name.removesuffix("_") not in theirs]
    rows = []
    for name in own:
        value = getattr(cann, name)
        if inspect.isfunction(value):
            rows.append((f"`{name}`", sentence(value), CONTRACT, NOT_RUN))
        elif inspect.isclass(value):
            rows.append((described(name, value), sentence(value), NONE, NONE))
    return markdown("## Only in cann", ("`dsacp_npu.cann`", "what it is", "emulator", "NPU"), rows) if rows else ""


def distributed_table(name: str) -> str:
    """What a module runs over process groups, by the library that carries the messages."""
    module = module_if_there(name)
    names = [each for each in public(module) if inspect.isfunction(getattr(module, each))]
    rows = [(f"`{each}`", TESTED, NOT_RUN, NOT_RUN) for each in names]
    return markdown(f"## Over processes: {name}", (f"`dsacp_npu.{name}`", "gloo", "nccl", "hccl"), rows) if rows else ""


def sentence(value: Any) -> str:
    """The first sentence of what is written about it."""
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    return text.split(". ")[0].rstrip(".")


def markdown(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A heading and its table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return title + "\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
