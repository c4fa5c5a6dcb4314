"""Rules for the story: its frame, its pictures and links, the balance of text and code, its exercises, its numbers."""

import re
import statistics
from pathlib import Path

from depthlab.nbtools.document import (
    EXERCISE_CHECK,
    NUMBER,
    SOLUTION,
    STUB_MARK,
    Notebook,
    code_cells,
    images,
    lines,
    printed,
    prose,
    section,
    tags,
)
from depthlab.nbtools.headers import colab_problem, header, repository_address

SECTIONS = ("idea", "notation", "experiment", "what the papers? says?", "summary", "exercises", "references")
WORDS_A_LINE = (6, 12)
CELL_LINES, MEDIAN_LINES = 30, 8
NOTEBOOK_SECONDS = 60

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s#]+)")
# Decimals (also .5 and 1,234.5), and integers with a unit of comparison behind them.
_MEASURED = re.compile(
    r"(?<![A-Za-z0-9.,])((?:\d{1,3}(?:,\d{3})+|\d*)\.\d+(?:e[+-]?\d+)?(?!x\b)(?![A-Za-z0-9]|\.\d)"
    r"|\d*\.?\d+(?=\s?(?:%|×|percent\b|per cent\b)|[- ]fold|x\b))",
    re.IGNORECASE,
)
_MEDIA = re.compile(r"<(?:iframe|video|audio|source|embed|object|script|svg)\b|!\[[^\]]*\]\[", re.IGNORECASE)
_NOT_MEASURED = (
    re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL),
    re.compile(r"\$\$.*?\$\$", re.DOTALL),
    re.compile(r"`[^`\n]*`"),
    re.compile(r"\$[^$\n]*\$"),
    re.compile(r"^#.*$", re.MULTILINE),
    re.compile(r"^\*\*Needs\*\*.*$", re.MULTILINE),
    re.compile(r"arXiv[: ]\d+\.\d+"),
    re.compile(r"(?<=\])\([^)]*\)"),
)


def header_is_complete(notebook: Notebook, path: Path) -> list[str]:
    try:
        head = header(path, notebook)
    except ValueError as error:
        return [str(error)]
    found = []
    if head.number != path.name[:2]:
        found.append(f"the title's number is {head.number}, the file's is {path.name[:2]}")
    if head.seconds > NOTEBOOK_SECONDS:
        found.append(f"takes {head.time}; a quick run has {NOTEBOOK_SECONDS} s, longer ones belong into a record")
    return found


def colab_link_matches(notebook: Notebook, path: Path) -> list[str]:
    root = next((folder for folder in path.resolve().parents if (folder / "pyproject.toml").exists()), None)
    problem = colab_problem(notebook, path, repository_address(root)) if root else None
    return [f"{problem}; call depthlab.nbtools.sync_colab()"] if problem else []


def sections_in_order(notebook: Notebook, path: Path) -> list[str]:
    headings = re.findall(r"^## +(.+)$", prose(notebook), re.MULTILINE)
    at, found = -1, []
    for wanted in SECTIONS:
        where = [i for i, heading in enumerate(headings) if re.search(rf"\b{wanted}\b", heading, re.IGNORECASE)]
        later = [i for i in where if i > at]
        if not later:
            found.append(f"the section `## {wanted.replace('?', '')}` is {'out of order' if where else 'missing'}")
        else:
            at = later[0]
    return found


def notation_is_a_table(notebook: Notebook, path: Path) -> list[str]:
    notation = section(prose(notebook), "notation")
    rows = [line for line in notation.splitlines() if line.lstrip().startswith("|")]
    return [] if not notation or len(rows) >= 3 else ["the notation is no table of symbol, name in code and shape"]


def picture_near_the_top(notebook: Notebook, path: Path) -> list[str]:
    top = re.split(r"^## .*notation", prose(notebook), maxsplit=1, flags=re.IGNORECASE | re.MULTILINE)[0]
    pictures = [image for image in images(top) if image.startswith("figures/") and image.endswith(".png")]
    if not pictures:
        return ["no picture figures/*.png before the notation"]
    drawn_by = [(path.parent / picture).with_suffix(".py") for picture in pictures]
    return [f"{file.name} is missing: a picture is drawn by code of ours" for file in drawn_by if not file.exists()]


def images_are_local(notebook: Notebook, path: Path) -> list[str]:
    text = prose(notebook)
    found = [f"{media[0]} in the text; a picture is ![..](figures/..)" for media in _MEDIA.finditer(text)]
    elsewhere = [image for image in images(text) if re.match(r"[\w+.-]+:|//", image) and ";base64" not in image]
    return found + [f"the image {image[:40]} is no file of ours" for image in elsewhere]


def cells_are_text_or_code(notebook: Notebook, path: Path) -> list[str]:
    cells = notebook["cells"]
    found = [f"{cell['id']} is a raw cell, which no rule reads" for cell in cells if cell["cell_type"] == "raw"]
    return found + [
        f"{cell['id']} has an attachment; put it into figures/" for cell in cells if cell.get("attachments")
    ]


def text_has_no_base64(notebook: Notebook, path: Path) -> list[str]:
    blob = re.search(r"data:\w+/[\w.+-]+;base64|[A-Za-z0-9+/]{120,}", prose(notebook))
    return [f"base64 in text: {blob[0][:40]}..."] if blob else []


def links_resolve(notebook: Notebook, path: Path) -> list[str]:
    targets = [*_LINK.findall(prose(notebook)), *images(prose(notebook))]
    local = {target for target in targets if not re.match(r"\w+:|//", target)}
    return [
        f"links to {target}, which does not exist" for target in sorted(local) if not (path.parent / target).exists()
    ]


def text_and_code_in_proportion(notebook: Notebook, path: Path) -> list[str]:
    words, code = len(re.findall(r"\S*\w\S*", prose(notebook))), sum(map(lines, code_cells(notebook)))
    low, high = WORDS_A_LINE
    if code and not low <= words / code <= high:
        return [f"{words} words for {code} lines of code, {words / code:.1f} a line; {low} to {high} are readable"]
    return []


def cells_are_short(notebook: Notebook, path: Path) -> list[str]:
    code = code_cells(notebook)
    found = [f"{cell['id']} has {lines(cell)} lines; at most {CELL_LINES}" for cell in code if lines(cell) > CELL_LINES]
    median = statistics.median(map(lines, code)) if code else 0
    return found + ([f"the median cell has {median:g} lines; at most {MEDIAN_LINES}"] if median > MEDIAN_LINES else [])


def exercises_are_complete(notebook: Notebook, path: Path) -> list[str]:
    found, cells = [], notebook["cells"]
    count = 0
    for before, cell, after in zip([None, *cells], cells, [*cells[1:], None], strict=False):
        if SOLUTION not in tags(cell):
            continue
        count += 1
        if before is None or not re.search(rf"^### Exercise {count}\b", before["source"], re.MULTILINE):
            found.append(f"{cell['id']}: the text before a solution begins with `### Exercise {count}`")
        if not re.search(rf"^ +{STUB_MARK}\s*$", cell["source"], re.MULTILINE):
            found.append(f"{cell['id']}: a solution is a function with the line `{STUB_MARK}` indented in its body")
        if after is None or EXERCISE_CHECK not in tags(after):
            found.append(f"{cell['id']}: the cell after a solution is tagged {EXERCISE_CHECK}")
    return found if count in (2, 3) else [*found, f"{count} exercises; 2 or 3 belong at the end"]


def measured_numbers_are_printed(notebook: Notebook, path: Path) -> list[str]:
    """A number in the text is printed when one in an output rounds to it, as itself or as a percentage."""
    shown = [float(number) for cell in code_cells(notebook) for number in NUMBER.findall(printed(cell))]
    return [f"the text says {n}, and no output does" for n in measured_numbers(notebook) if not _is_among(n, shown)]


def measured_numbers(notebook: Notebook) -> list[str]:
    """Decimals, percentages, "n-fold" and "n×" in plain prose; settings stand in code spans or formulas: not counted.

    Nor do headings, the Needs line, links, arXiv numbers, the table of the notation, and the references.
    """
    text = prose(notebook)
    text = text.replace(section(text, "references"), "")
    notation = section(text, "notation")
    text = text.replace(notation, re.sub(r"^\s*\|.*$", "", notation, flags=re.MULTILINE)) if notation else text
    for hidden in _NOT_MEASURED:
        text = hidden.sub(" ", text)
    return _MEASURED.findall(text)


def _is_among(number: str, shown: list[float]) -> bool:
    number = number.replace(",", "")
    if "e" in number.lower():
        return any(f"{x:.1e}" == f"{float(number):.1e}" for x in shown)
    decimals = len(number.partition(".")[2])
    return any(round(x * scale, decimals) == float(number) for x in shown for scale in (1, 100))
