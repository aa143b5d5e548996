"""The tutorial: the notebook is run, and its cells and what they print become a page."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient


def page(path: Path) -> str:
    """Run a notebook and return it as Markdown."""
    parts = [_cell(cell) for cell in executed(path).cells]
    return "\n\n".join([*parts, "The notebook: `docs/tutorial.ipynb` of the repository."]) + "\n"


def executed(path: Path) -> Any:
    """Return a notebook with the outputs of a run in an empty folder."""
    notebook = nbformat.read(path, as_version=4)
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook, timeout=300, extra_arguments=["--log-level=ERROR"], resources={"metadata": {"path": folder}}
        )
        client.execute()
    return notebook


def _cell(cell: Any) -> str:
    if cell.cell_type == "markdown":
        return str(cell.source)
    return "\n\n".join([f"```python\n{cell.source}\n```", *(_output(output) for output in cell.outputs)])


def _output(output: Any) -> str:
    if output.output_type == "stream":
        return _framed(f"```text\n{output.text.rstrip()}\n```") if output.name == "stdout" else ""
    data = output.get("data", {})
    if "image/svg+xml" in data:
        return f'<div class="picture">{data["image/svg+xml"]}</div>'
    if "text/html" in data:
        return f'<div class="output frame">\n{data["text/html"]}\n</div>'
    return _framed(f"```text\n{data['text/plain']}\n```") if "text/plain" in data else ""


def _framed(text: str) -> str:
    return f'<div class="output" markdown>\n\n{text}\n\n</div>'
