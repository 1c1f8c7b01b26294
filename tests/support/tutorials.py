"""The notebooks of docs/tutorials, run as they are; `make tutorials` writes them with what came out."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import nbformat
from nbclient import NotebookClient

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
IN_CLUSTER = TUTORIALS / "7_your_own_cluster.ipynb"
CELL_SECONDS = 240
EXECUTED = "executed_sources"
"""The key of a notebook's metadata that has the digest of the cells that its outputs are of."""
NO_WIDGETS = "ignore:IProgress not found"
"""tqdm would draw its bars by Jupyter's widgets, which no test needs."""


def notebooks() -> list[Path]:
    """Return the notebooks in the order of their numbers."""
    return sorted(TUTORIALS.glob("*.ipynb"))


def sources_digest(notebook: nbformat.NotebookNode) -> str:
    """Return the digest of the code cells; text may change without a new run."""
    code = (cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256("\0".join(code).encode()).hexdigest()


def executed(notebook: Path, folder: Path, variables: Mapping[str, str]) -> nbformat.NotebookNode:
    """Run the notebook in a folder. Raises nbclient's CellExecutionError with the cell's output."""
    outcome = read(notebook)
    client = NotebookClient(
        outcome,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
    )
    common = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONWARNINGS": NO_WIDGETS,
        "COLUMNS": "110",
    }
    client.execute(env={**common, **variables})
    return outcome


def stored_notebook(notebook: Path, outcome: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return the content of the notebook's file; `make tutorials` writes the outcome there.

    It omits what differs between machines and does not help readers: names of kernels, versions of Python.
    """
    if os.environ.get("TINSMITH_TUTORIALS") == "write":
        outcome.metadata = {
            EXECUTED: sources_digest(outcome),
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
        nbformat.write(outcome, notebook)
    return read(notebook)


def read(notebook: Path) -> nbformat.NotebookNode:
    found: nbformat.NotebookNode = nbformat.read(notebook, as_version=4)
    return found


def pictures(notebook: nbformat.NotebookNode) -> list[int]:
    """Return the number of pictures of each cell."""
    outputs = [cell.get("outputs", []) for cell in notebook.cells]
    return [sum("image/png" in output.get("data", {}) for output in each) for each in outputs]
