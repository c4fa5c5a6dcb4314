"""Rules for the file and its outputs: executed once in order, small, nothing that differs between machines."""

import re
import struct
from pathlib import Path

from depthlab.nbtools.document import SHOW, Notebook, code_cells, mimes, pngs, printed, tags

MOST_BYTES = 400_000
FIGURE_INCHES = (5.0, 3.5)
SIGNIFICANT_DIGITS = 4

_PATH = re.compile(
    r"(?<![\w./:~<>)\]}$\\-])/[A-Za-z_][\w.-]*/[\w.-]|\b[A-Z]:[\\/]\w|file:///|\b[a-z]:[\\/]users\b"
    r"|(?<![\w./:~<>)\]}$\\-])/(?:home|Users|root|tmp|mnt|opt|srv|usr|var)\b"
)
# Bars of tqdm (with or without the bar itself) and rich, and what moves or colours a terminal.
_BAR = re.compile(r"[\r\x1b]|\d%\||[━█▏▎▍▌▋▊▉]{3}|\d+/\d+ \[\d\d:\d\d|\[[#=> .-]*[#=]{3}[#=> .-]*\]")
_FLOAT = re.compile(r"(?<![\d.])\d+\.\d+(?:e[+-]?\d+)?(?!\.?\d)", re.IGNORECASE)
_OBJECT = re.compile(r"\A[\[(]*(?:<|Text\(|array\(\[)")


def executed_in_order(notebook: Notebook, path: Path) -> list[str]:
    counts = [cell.get("execution_count") for cell in code_cells(notebook)]
    empty = [f"{cell['id']} is empty" for cell in code_cells(notebook) if not cell["source"].strip()]
    wrong = counts != list(range(1, len(counts) + 1))
    return empty + ([f"not executed once, top to bottom (counts {counts[:8]})"] if wrong else [])


def kernel_is_python3(notebook: Notebook, path: Path) -> list[str]:
    name = notebook["metadata"].get("kernelspec", {}).get("name")
    return [] if name == "python3" else [f"the kernel is {name}; it must be python3"]


def ids_and_metadata_are_plain(notebook: Notebook, path: Path) -> list[str]:
    ids = [cell.get("id") for cell in notebook["cells"]]
    extra = sorted({key for cell in notebook["cells"] for key in cell.get("metadata", {})} - {"tags"})
    extra += sorted(set(notebook["metadata"]) - {"kernelspec", "language_info", "widgets"})
    found = [f"metadata {', '.join(extra)}"] if extra else []
    if ids != [f"c{number:02d}" for number in range(1, len(ids) + 1)]:
        found.append("cell ids are not c01, c02, ...")
    return [f"{complaint}; run depthlab notebooks run --in-place" for complaint in found]


def no_widgets(notebook: Notebook, path: Path) -> list[str]:
    found = ["widget state in the metadata"] if "widgets" in notebook["metadata"] else []
    return found + [f"{cell['id']} shows a widget" for cell, mime in mimes(notebook) if "widget" in mime]


def outputs_are_text_or_png(notebook: Notebook, path: Path) -> list[str]:
    """HTML is not compared by nbval, so it may only repeat, as a table, what stands there as text."""
    found = []
    for cell in code_cells(notebook):
        for data in (output["data"] for output in cell["outputs"] if "data" in output):
            other = sorted(mime for mime in data if not re.match(r"text/(plain|html)$|image/|.*widget", mime))
            if other:
                found.append(f"{cell['id']} holds {', '.join(other)}; print text or draw")
            html, text = data.get("text/html"), data.get("text/plain", "<")
            if html and ("<table" not in html or text.startswith("<") or re.search(r"<(img|script|svg)\b", html)):
                found.append(f"{cell['id']} shows HTML that is no table with its text beside it")
    return found


def pictures_are_png(notebook: Notebook, path: Path) -> list[str]:
    found = []
    for cell, mime in mimes(notebook):
        if mime.startswith("image/") and mime != "image/png":
            found.append(f"{cell['id']} holds {mime}; only PNG is kept")
        elif mime == "image/png" and SHOW not in tags(cell):
            found.append(f"{cell['id']} draws without the tag {SHOW}")
    return found


def figures_are_small(notebook: Notebook, path: Path) -> list[str]:
    found = []
    for cell in code_cells(notebook):
        for png in pngs(cell):
            width, height = _inches(png)
            if width > FIGURE_INCHES[0] + 0.05 or height > FIGURE_INCHES[1] + 0.05:
                found.append(f"{cell['id']} draws {width:.1f} x {height:.1f} inches; at most {FIGURE_INCHES}")
    return found


def no_tracebacks(notebook: Notebook, path: Path) -> list[str]:
    return [
        f"{cell['id']} holds a traceback"
        for cell in code_cells(notebook)
        if any(output["output_type"] == "error" for output in cell["outputs"]) or "Traceback (most" in printed(cell)
    ]


def no_stderr(notebook: Notebook, path: Path) -> list[str]:
    return [
        f"{cell['id']} wrote to stderr"
        for cell in code_cells(notebook)
        if any(output.get("name") == "stderr" for output in cell["outputs"])
    ]


def no_progress_bars(notebook: Notebook, path: Path) -> list[str]:
    return [
        f"{cell['id']} holds a progress bar or terminal codes"
        for cell in code_cells(notebook)
        if _BAR.search(printed(cell))
    ]


def no_addresses(notebook: Notebook, path: Path) -> list[str]:
    address = re.compile(r"\b0x[0-9a-f]{6,}", re.IGNORECASE)
    return [f"{cell['id']} prints an address" for cell in code_cells(notebook) if address.search(printed(cell))]


def no_absolute_paths(notebook: Notebook, path: Path) -> list[str]:
    found = []
    for cell in notebook["cells"]:
        hit = _PATH.search(cell["source"]) or _PATH.search(printed(cell))
        if hit:
            found.append(f"{cell['id']} holds an absolute path ({hit[0]}...)")
    return found


def no_bare_objects(notebook: Notebook, path: Path) -> list[str]:
    return [
        f"{cell['id']} ends in an expression that prints an object ({output['data']['text/plain'][:30]})"
        for cell in code_cells(notebook)
        for output in cell["outputs"]
        if "html" not in "".join(output.get("data", {})) and _OBJECT.match(output.get("data", {}).get("text/plain", ""))
    ]


def floats_are_short(notebook: Notebook, path: Path) -> list[str]:
    found = []
    for cell in code_cells(notebook):
        if SHOW in tags(cell):
            continue
        for number in _FLOAT.findall(re.sub(r"arXiv[: ]\d+\.\d+", "", printed(cell))):
            digits = re.sub(r"e.*", "", number, flags=re.IGNORECASE).replace(".", "").lstrip("0")
            if "." in number and len(digits) > SIGNIFICANT_DIGITS:
                found.append(f"{cell['id']} prints {number}; at most {SIGNIFICANT_DIGITS} significant digits")
    return found


def file_is_small(notebook: Notebook, path: Path) -> list[str]:
    size = path.stat().st_size if path.exists() else 0
    return [f"{size // 1000} kB; under {MOST_BYTES // 1000} kB"] if size >= MOST_BYTES else []


def _inches(png: bytes) -> tuple[float, float]:
    """Width and height by the resolution that the file itself states, 100 dots an inch when it states none."""
    width, height = struct.unpack(">II", png[16:24])
    at = png.find(b"pHYs")
    dots_a_metre = struct.unpack(">II", png[at + 4 : at + 12]) if at > 0 else (3937, 3937)
    return width / dots_a_metre[0] / 0.0254, height / dots_a_metre[1] / 0.0254
