"""Runs the notebooks beside this file and keeps what they show: python notebooks/execute.py, or make notebooks."""

import base64
import io
import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

HERE = Path(__file__).parent
METADATA = {  # the same on every machine
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def executed(path: Path, **environment: str) -> nbformat.NotebookNode:
    """The notebook at ``path`` after a run in a fresh kernel, in its own folder, with tnvp from beside that folder.

    ``environment`` adds to the environment variables. Raises nbclient's CellExecutionError if a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute(env={**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1", **environment})
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = with_fewer_colours(output.data["image/png"])
    return notebook


def with_fewer_colours(png: str) -> str:
    """A picture of 256 colours, both in base64: half the size, which stays in the history with each new version."""
    picture, smaller = Image.open(io.BytesIO(base64.b64decode(png))), io.BytesIO()
    picture.convert("RGB").quantize(256).save(smaller, "png", optimize=True)
    return base64.b64encode(smaller.getvalue()).decode()


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(HERE.glob("*.ipynb")):
        print(path.name, flush=True)
        nbformat.write(executed(path), path)
