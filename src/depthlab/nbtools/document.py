"""A notebook as a file: find, read, normalise, write. Cells are plain dictionaries with joined text."""

import ast
import json
import re
from base64 import b64decode
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from depthlab.runs import write_atomic

Notebook = dict[str, Any]
Cell = dict[str, Any]

_IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]*)[^)]*\)|<img\b[^>]*?src=[\"']?([^\"'\s>]*)", re.IGNORECASE)

SHOW, SOLUTION, EXERCISE_CHECK = "nbval-ignore-output", "solution", "exercise-check"
STUB_MARK = "# --- solution"
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w]|\.\d)", re.IGNORECASE)
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}


def find(folder: str | Path | None = None) -> list[Path]:
    """The numbered notebooks of `folder` (this checkout's, unless given), in order; exercises are not among them."""
    if folder is None:
        folder = Path(str(files("depthlab.bundles"))).parent / "notebooks"
    return sorted(Path(folder).glob("[0-9][0-9]_*.ipynb"))


def read(path: str | Path) -> Notebook:
    """The notebook with every multi-line text joined into one string.

    Raises:
        ValueError: the file is missing or is no version 4 notebook.
    """
    path = Path(path)
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"There is no notebook {path}; give the path of an .ipynb file.") from None
    except (json.JSONDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise ValueError(f"{path} is not a readable notebook ({error}); restore it from version control.") from None
    if not isinstance(notebook, dict) or notebook.get("nbformat") != 4 or "cells" not in notebook:
        raise ValueError(f"{path} is not a notebook of format 4; save it again with Jupyter.")
    for number, cell in enumerate(notebook["cells"], start=1):
        if cell.get("cell_type") not in ("markdown", "code", "raw") or "source" not in cell:
            raise ValueError(f"{path}: cell {number} has no type or no source; save it again with Jupyter.")
        cell["source"] = _joined(cell["source"])
        if cell["cell_type"] == "code":
            cell.setdefault("outputs", [])
        for output in cell.get("outputs", ()):
            if "text" in output:
                output["text"] = _joined(output["text"])
            for mime, value in output.get("data", {}).items():
                output["data"][mime] = _joined(value)
    return notebook


def write(notebook: Notebook, path: str | Path) -> None:
    """Write as nbformat does (sorted keys, one space of indent, a newline at the end), whole or not at all."""
    import nbformat

    node = nbformat.from_dict(notebook)
    nbformat.validate(node)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(Path(path), nbformat.writes(node) + "\n")


def normalise(notebook: Notebook) -> Notebook:
    """A copy without anything that differs between two runs or two editors, apart from what the cells print.

    Cell ids count c01, c02, ...; of the metadata only the kernel's name and the tags stay (so no widget state and no
    timing); neighbouring pieces of one stream are joined; a figure keeps its PNG and loses its textual form.
    """
    cells = []
    for number, cell in enumerate(notebook["cells"], start=1):
        tags = cell.get("metadata", {}).get("tags", [])
        clean = {
            "cell_type": cell["cell_type"],
            "id": f"c{number:02d}",
            "metadata": {"tags": list(tags)} if tags else {},
            "source": cell["source"],
        }
        if cell["cell_type"] == "code":
            clean["execution_count"] = cell.get("execution_count")
            clean["outputs"] = _clean_outputs(cell.get("outputs", []))
        cells.append(clean)
    metadata = {"kernelspec": dict(KERNELSPEC), "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _clean_outputs(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    clean: list[dict[str, Any]] = []
    for output in outputs:
        output = dict(output)
        if output["output_type"] == "stream" and clean and clean[-1].get("name") == output["name"]:
            clean[-1]["text"] += output["text"]
            continue
        if "data" in output:
            has_picture = "image/png" in output["data"]
            output["data"] = {m: v for m, v in output["data"].items() if not (has_picture and m == "text/plain")}
            output["metadata"] = {}
        clean.append(output)
    return clean


def code_cells(notebook: Notebook) -> list[Cell]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def tags(cell: Cell) -> list[str]:
    return list(cell.get("metadata", {}).get("tags", []))


def printed(cell: Cell) -> str:
    """Everything textual that a code cell left behind, streams and results, in order."""
    pieces = []
    for output in cell.get("outputs", []):
        pieces.append(output.get("text") or output.get("data", {}).get("text/plain") or "")
    return "\n".join(pieces)


def prose(notebook: Notebook) -> str:
    return "\n\n".join(cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "markdown")


def section(text: str, title: str) -> str:
    """The text from the `## ` heading that contains `title` to the next one; empty when there is none."""
    found = re.search(rf"^## [^\n]*\b{title}\b.*?(?=^## |\Z)", text, re.IGNORECASE | re.MULTILINE | re.DOTALL)
    return found[0] if found else ""


def images(text: str) -> list[str]:
    return [markdown or html for markdown, html in _IMAGE.findall(text)]


def lines(cell: Cell) -> int:
    return sum(bool(line.strip()) for line in cell["source"].splitlines())


def nodes(cell: Cell) -> list[ast.AST]:
    """The nodes of a code cell's syntax tree; none when it is no plain Python."""
    try:
        return list(ast.walk(ast.parse(cell["source"])))
    except SyntaxError:
        return []


def calls(cell: Cell) -> list[ast.Call]:
    return [node for node in nodes(cell) if isinstance(node, ast.Call)]


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def mimes(notebook: Notebook) -> Iterator[tuple[Cell, str]]:
    for cell in code_cells(notebook):
        for output in cell["outputs"]:
            for mime in output.get("data", {}):
                yield cell, mime


def pngs(cell: Cell) -> Iterator[bytes]:
    for output in cell["outputs"]:
        if "image/png" in output.get("data", {}):
            yield b64decode(output["data"]["image/png"])


def _joined(text: Any) -> Any:
    return "".join(text) if isinstance(text, list) and all(isinstance(line, str) for line in text) else text
