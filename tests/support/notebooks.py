"""Notebooks run in place, with their outputs kept: `make notebooks`."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def run(path: Path) -> None:
    """Execute the cells, and keep what readers need: neither times, nor warnings, nor facts of this machine."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(path.parent)}}).execute()
    strip(notebook)
    nbformat.write(notebook, path)


def strip(notebook: nbformat.NotebookNode) -> None:
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook["metadata"] = nbformat.from_dict({"kernelspec": kernel})
    for cell in notebook["cells"]:
        cell["metadata"] = nbformat.from_dict({})
        if cell["cell_type"] == "code":
            cell["outputs"] = [each for each in cell["outputs"] if each.get("name") != "stderr"]
            for output in cell["outputs"]:
                output.pop("transient", None)
                if "metadata" in output:
                    output["metadata"] = nbformat.from_dict({})


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(map(str, NOTEBOOKS.glob("*.ipynb"))):
        run(Path(name).resolve())
