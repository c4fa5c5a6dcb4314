"""The first cell of a notebook: what it needs and what it costs; the README's table and the Colab link made from it."""

import importlib.util
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from depthlab.nbtools.document import Notebook, find, read, write
from depthlab.runs import write_atomic

NEEDS = re.compile(
    r"^\*\*Needs\*\* (?P<device>.+?) · \*\*Time\*\* (?P<time>[\d.]+ (?:s|min))"
    r"(?: \((?:full mode (?P<full>[\d.]+ (?:s|min|h)[^()]*)|no full mode)\))?"
    r" · \*\*Memory\*\* (?P<memory>[\d.]+ GB) · \*\*Download\*\* (?P<download>.+?)"
    r" · \*\*Read first\*\* (?P<before>.+)$",
    re.MULTILINE,
)
_TABLE = ("<!-- generated: notebooks -->", "<!-- end: notebooks -->")
_COLAB = re.compile(r"^\[Open in Colab\]\((?P<url>[^)]*)\)\n?", re.MULTILINE)


class Header(NamedTuple):
    """What the first markdown cell promises; times are measured on 2 cores with one thread."""

    number: str
    title: str
    question: str
    device: str
    time: str
    full_time: str | None
    memory: str
    download: str
    before: str

    @property
    def seconds(self) -> float:
        value, unit = self.time.split()
        return float(value) * {"s": 1, "min": 60}[unit]


def header(path: str | Path, notebook: Notebook | None = None) -> Header:
    """Read a notebook's first cell; give `notebook` when it is already read.

    Raises:
        ValueError: a part is missing; the sentence says which and shows the form it must have.
    """
    text = _first_cell(read(path) if notebook is None else notebook, path)
    title = re.search(r"^# (\d\d) · (.+)$", text, re.MULTILINE)
    question = re.search(r"^\*([^*].*\?)\*$", text, re.MULTILINE)
    needs = NEEDS.search(text)
    for found, form in (
        (title, "# NN · Title"),
        (question, "*one question?* in italics on a line of its own"),
        (needs, "**Needs** CPU · **Time** 41 s (full mode 12 min) · **Memory** 0.6 GB · **Download** none · "
                "**Read first** ..."),
    ):  # fmt: skip
        if not found:
            raise ValueError(f"{path}: the first cell lacks the line `{form}`.")
    return Header(
        title[1],
        title[2],
        question[1],
        needs["device"],
        needs["time"],
        needs["full"],
        needs["memory"],
        needs["download"],
        needs["before"],
    )


def cannot_run(path: str | Path, notebook: Notebook | None = None) -> str | None:
    """One sentence when the Needs line names triton and it is not installed here; None when the notebook can run.

    A notebook without a complete first cell can run: the policy judges it.
    """
    try:
        needs = header(path, notebook).device
    except ValueError:
        return None
    if "triton" not in needs or importlib.util.find_spec("triton") is not None:
        return None
    return f"{Path(path).name} needs triton, which is not installed here (it exists for Linux only)"


def readme_table(folder: str | Path | None = None) -> str:
    """A markdown table, one row a notebook of `folder`: number, title with link, question, time, memory."""
    rows = ["| | notebook | the question | time | memory |", "|---|---|---|---|---|"]
    for path in find(folder):
        head = header(path)
        time = f"{head.time} (full: {head.full_time})" if head.full_time else head.time
        rows.append(
            f"| {head.number} | [{head.title}](notebooks/{path.name}) | {head.question} | {time} | {head.memory} |"
        )
    return "\n".join(rows)


def write_readme_table(readme: str | Path = "README.md", check: bool = False) -> bool:
    """Fill the README's table from the notebooks beside it; True when it was already right. `check` writes nothing.

    Raises:
        ValueError: the README lacks the two marker lines.
    """
    readme = Path(readme)
    text = readme.read_text(encoding="utf-8")
    begin, end = _TABLE
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{readme} must hold one line `{begin}` and one line `{end}`; add them where the table goes.")
    table = readme_table(readme.parent / "notebooks")
    filled = text[: text.index(begin) + len(begin)] + f"\n{table}\n" + text[text.index(end) :]
    if filled != text and not check:
        write_atomic(readme, filled)
    return filled == text


def repository_address(root: str | Path = ".") -> str:
    """The published address that pyproject.toml configures; empty while there is none."""
    settings = tomllib.loads((Path(root) / "pyproject.toml").read_text(encoding="utf-8"))
    return settings.get("tool", {}).get("depthlab", {}).get("repository", "").rstrip("/")


def colab_link(path: str | Path, address: str) -> str:
    """The text link of one notebook, or "" while no address is configured."""
    if not address:
        return ""
    where = address.removeprefix("https://github.com/")
    return f"[Open in Colab](https://colab.research.google.com/github/{where}/blob/main/notebooks/{Path(path).name})"


def colab_problem(notebook: Notebook, path: str | Path, address: str) -> str | None:
    """What is wrong with the Colab link of the first cell: missing, not this file's, or there without an address."""
    found = _COLAB.search(_first_cell(notebook, path))
    wanted = colab_link(path, address)
    if (found[0].strip() if found else "") == wanted:
        return None
    return f"the Colab link is {found[0].strip() if found else 'missing'}, expected {wanted or 'none'}"


def sync_colab(paths: Sequence[str | Path] | None = None, address: str | None = None) -> None:
    """Write, mend or remove Colab links so that they match the configured address and the files' paths."""
    address = repository_address() if address is None else address
    for path in find() if paths is None else paths:
        notebook = read(path)
        if colab_problem(notebook, path, address) is None:
            continue
        text = _COLAB.sub("", notebook["cells"][0]["source"]).rstrip()
        link = colab_link(path, address)
        notebook["cells"][0]["source"] = f"{text}\n\n{link}" if link else text
        write(notebook, path)


def _first_cell(notebook: Notebook, path: str | Path) -> str:
    if not notebook["cells"] or notebook["cells"][0]["cell_type"] != "markdown":
        raise ValueError(f"{path}: the first cell must be text, beginning with `# NN · Title`.")
    return notebook["cells"][0]["source"]
