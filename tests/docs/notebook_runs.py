"""Executes notebooks. ``python -m tests.docs.notebook_runs`` does it in place (`make notebooks`); a test compares."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

import dsacp_npu

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
# The goal is a minute on two free cores; a machine may be busy.
TIMEOUT = 300
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def executed(path: Path) -> Any:
    """The notebook run from its first cell in a fresh kernel, with the packages that this process has."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT,
        resources={"metadata": {"path": str(path.parent)}},
        extra_arguments=["--log-level=ERROR"],  # else the kernel warns that it listens on this machine
    )
    packages = os.pathsep.join([str(Path(dsacp_npu.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="dsacp-notebook-") as home:  # nobody's profile, and no history
        client.execute(env=os.environ | {"PYTHONPATH": packages, "IPYTHONDIR": home})
    return normalised(notebook)


def normalised(notebook: Any) -> Any:
    """The notebook without what changes from run to run or from machine to machine."""
    notebook = nbformat.from_dict(notebook)
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    count = 0
    for place, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{place}", nbformat.from_dict({})
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        cell.outputs = joined(cell.outputs)
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = count
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
    return notebook


def joined(outputs: list[Any]) -> list[Any]:
    """What was printed as one text: how it is cut depends on when it came."""
    kept: list[Any] = []
    for output in outputs:
        if kept and output.output_type == "stream" and kept[-1].get("name") == output.name:
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def main() -> int:
    """Execute every notebook in place."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        nbformat.write(executed(path), path)
        print(f"{path.relative_to(ROOT)}: executed, {path.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
