"""`doctor`: what is installed, which devices there are, and which backend and operator is usable here; if not, why.

Everything is looked up now, nothing is guessed: an operator counts as found when torch has it. It needs no package.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from types import ModuleType
from typing import Any

from dsacp_npu.commands.progress import waiting

# Package -> what it is needed for.
PACKAGES = {
    "dsacp": "this",
    "numpy": "the reference, dsacp_ref",
    "torch": "the mirror, dsacp_npu, and all its backends",
    "torch_npu": "the cann backend on an NPU",
    "triton": "the triton backend on an NVIDIA GPU",
    "triton-ascend": "the triton backend on an NPU, in its interpreter, and compile-check (make ascend)",
    "ascendnpu-ir": "compile-check: the Ascend compiler",
    "transformers": "parity's comparison with a model that others wrote",
    "rich": "the tables of parity; elsewhere it makes them nicer",
}

EXAMPLES = """\
examples:
  %(prog)s                    tables to read
  %(prog)s --json             the same, to attach to a report
  %(prog)s --emulator         what the cann backend could do with the emulated operators
"""
EMULATOR = (
    "the emulator can be installed here (doctor --emulator; dsacp_npu.emulator.install()): CPU operators of the same "
    "names that refuse what the real ones refuse; they show that a call is right, not that it is fast"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.epilog = EXAMPLES
    parser.add_argument("--emulator", action="store_true", help="install the emulated operators first, and show those")
    parser.add_argument("--json", action="store_true", help="print it for a program")


def run(args: argparse.Namespace) -> int:
    """Look, and print; what is missing is an answer, not a failure."""
    with waiting("looking at packages and devices"):
        found = examined(emulator=args.emulator)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)
    return 0


def examined(*, emulator: bool = False) -> dict[str, Any]:
    """All that can be said about this machine, as plain values."""
    torch, torch_error = imported("torch")
    device_package, device_error = imported("torch_npu") if torch else (None, torch_error)
    emulated, note = emulator_state(install=emulator) if torch else (False, "")
    cann, cann_error = imported("dsacp_npu.cann") if torch else (None, "")
    devices = devices_of(torch, torch_error, device_package, device_error)
    operators = operators_of(cann, emulated)
    reasons = [device_error if not emulated else "", cann_error, *operator_words(operators), note]
    usable = [device["name"] for device in devices if device["count"]]
    backends = [
        {"name": "torch", "usable": bool(usable), "note": f"on {', '.join(usable)}" if usable else torch_error},
        {"name": "cann", "usable": any(row["found_in"] for row in operators), "note": "; ".join(filter(None, reasons))},
        triton_backend(devices) if torch else {"name": "triton", "usable": False, "note": torch_error},
    ]
    return {
        "versions": versions(),
        "devices": devices,
        "backends": backends,
        "operators": operators,
        "emulated": emulated,
    }


def triton_backend(devices: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether Triton is here, and something that its kernels run on."""
    try:
        import_module("dsacp_npu.kernels._language")
    except ImportError as error:
        return {"name": "triton", "usable": False, "note": str(error)}
    kinds = [device["name"] for device in devices if device["count"] and device["name"] != "cpu"]
    if not kinds and os.environ.get("TRITON_INTERPRET") != "1":
        return {"name": "triton", "usable": False, "note": "no GPU or NPU; TRITON_INTERPRET=1 interprets it on the CPU"}
    return {"name": "triton", "usable": True, "note": f"on {', '.join(kinds) or 'the CPU, interpreted'}"}


def imported(name: str) -> tuple[ModuleType | None, str]:
    """A module, or why there is none: the whole text of what its import raised."""
    # torch would load the device package by itself, and fail with it; it is loaded apart, so that both can be told.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        if importlib.util.find_spec(name) is None:
            return None, f"{name} is not installed"
        return import_module(name), ""
    except Exception as error:  # a driver or library that is missing shows in many ways
        return None, f"importing {name} failed: {type(error).__name__}: {error}"


def versions() -> list[dict[str, Any]]:
    """Installed versions, None where a package is not installed."""
    rows = [{"name": "Python", "version": python_version(), "needed_for": "everything"}]
    for name, purpose in PACKAGES.items():
        try:
            installed: str | None = version(name)
        except PackageNotFoundError:
            installed = None
        rows.append({"name": name, "version": installed, "needed_for": purpose})
    return rows


def devices_of(
    torch: Any, torch_error: str, device_package: ModuleType | None, device_error: str
) -> list[dict[str, Any]]:
    """How many devices of each kind torch sees, or why none."""
    if torch is None:
        return [{"name": name, "count": 0, "note": torch_error} for name in ("cpu", "cuda", "npu")]
    no_cuda = "no device found" if torch.version.cuda else "this torch is built without CUDA"
    return [
        {"name": "cpu", "count": 1, "note": f"{torch.get_num_threads()} threads"},
        counted("cuda", torch.cuda, no_cuda),
        counted("npu", torch.npu, "no device found") if device_package else absent("npu", device_error),
    ]


def counted(name: str, kind: Any, otherwise: str) -> dict[str, Any]:
    """The devices of a kind that can be used now."""
    try:
        count = kind.device_count() if kind.is_available() else 0
        names = ", ".join(sorted({kind.get_device_name(index) for index in range(count)}))
    except Exception as error:  # as above: to be told, not to be stopped by
        return absent(name, f"{type(error).__name__}: {error}")
    return {"name": name, "count": count, "note": names or otherwise}


def absent(name: str, reason: str) -> dict[str, Any]:
    """No device, and why."""
    return {"name": name, "count": 0, "note": reason}


def emulator_state(*, install: bool) -> tuple[bool, str]:
    """Whether the emulated operators are in place, and what can be said about them."""
    emulator = import_module("dsacp_npu.emulator.install")
    real = emulator.real_library()
    if real is not None:
        return False, f"the emulator stays away from the real operators: {real}"
    if install:
        emulator.install()
    emulated = emulator.Registration.form is not None
    return emulated, "by the emulator: on the CPU, no NPU is used" if emulated else EMULATOR


def operators_of(cann: Any, emulated: bool) -> list[dict[str, Any]]:
    """Every operator that cann calls: where it was found, and which functions are refused without it."""
    if cann is None:
        return []
    rows = []
    for operator in dict.fromkeys(name for names in cann.OPERATORS.values() for name in names):
        functions = [function for function, names in cann.OPERATORS.items() if operator in names]
        namespace, name = found_operator(operator)
        found = {"found_in": namespace, "found_as": name, "emulated": emulated and bool(namespace)}
        rows.append({"name": operator, **found, "functions": functions, "refused": [] if namespace else functions})
    return rows


def found_operator(name: str) -> tuple[str, str]:
    """Namespace and name by which cann would call this operator now; two empty words if it would be refused."""
    indexer = import_module("dsacp_npu._cann_indexer")
    names = next((names for names in (indexer.OPERATORS, indexer.METADATA) if name in names), (name,))
    needing = indexer.NEEDED if names == indexer.OPERATORS else ""
    namespace, found = import_module("dsacp_npu._operators").find_operator(*names, needing=needing)
    return namespace, found


def operator_words(operators: list[dict[str, Any]]) -> list[str]:
    """What the operators mean for the backend."""
    refused = sorted({function for row in operators for function in row["refused"]})
    if not any(row["found_in"] for row in operators):
        return ["no operator found"]
    return [f"refused, for want of operators: {', '.join(refused)}" if refused else "every operator found"]


# --- tables ---


def show(found: dict[str, Any]) -> None:
    """The same as tables."""
    yes = {True: "yes", False: "no"}
    table(
        "versions",
        ("package", "version", "needed for"),
        [(row["name"], row["version"] or "not installed", row["needed_for"]) for row in found["versions"]],
    )
    table(
        "devices",
        ("device", "count", ""),
        [(row["name"], str(row["count"]), row["note"]) for row in found["devices"]],
    )
    table(
        "backends",
        ("backend", "usable", ""),
        [(row["name"], yes[row["usable"]], row["note"]) for row in found["backends"]],
    )
    table(
        f"operators of cann{' (emulated)' if found['emulated'] else ''}",
        ("operator", "found in", "needed by"),
        [(row["name"], place(row), ", ".join(row["functions"])) for row in found["operators"]],
    )


def table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """One table: by rich where it is installed, else in plain columns, because here nothing that is missing stops."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (columns, *rows)]
        print("\n".join([title, "", *lines, ""]))
        return
    shown = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        shown.add_column(column, overflow="fold", no_wrap=i == 0)  # a name in two lines cannot be copied
    for row in rows:
        shown.add_row(*row)
    Console(highlight=False, markup=False).print(shown)


def place(row: dict[str, Any]) -> str:
    """Where an operator was found, and under which name if that is another."""
    if not row["found_in"]:
        return "missing"
    other = f", as {row['found_as']}" if row["found_as"] != row["name"] else ""
    return row["found_in"] + other
