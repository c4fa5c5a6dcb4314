"""Every committed notebook keeps every rule, and every rule rejects a notebook that no other rule would stop."""

import copy
import struct
import zlib
from base64 import b64encode
from pathlib import Path

import pytest

from depthlab.nbtools import find, header, policy, read, write_readme_table
from depthlab.nbtools.rules_text import measured_numbers

ROOT = Path(__file__).parents[1]
NOTEBOOKS = find(ROOT / "notebooks")
ALL_SECONDS = 480


def png(width: int, height: int, dots_per_inch: int = 100) -> str:
    """A black picture of that many pixels, as a notebook stores it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    dots_a_metre = round(dots_per_inch / 0.0254)
    size = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    dots = chunk(b"pHYs", struct.pack(">IIB", dots_a_metre, dots_a_metre, 1))
    pixels = chunk(b"IDAT", zlib.compress((b"\0" * (1 + (width + 7) // 8)) * height))
    return b64encode(b"\x89PNG\r\n\x1a\n" + size + dots + pixels + chunk(b"IEND", b"")).decode()


def text(source: str) -> dict:
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def code(source: str, *outputs: dict, tags: tuple[str, ...] = ()) -> dict:
    metadata = {"tags": list(tags)} if tags else {}
    return {"cell_type": "code", "metadata": metadata, "source": source, "outputs": list(outputs), "execution_count": 0}


def stream(printed: str, name: str = "stdout") -> dict:
    return {"output_type": "stream", "name": name, "text": printed}


def display(**data: str) -> dict:
    return {"output_type": "display_data", "metadata": {}, "data": {k.replace("_", "/"): v for k, v in data.items()}}


def result(shown: str) -> dict:
    return {"output_type": "execute_result", "metadata": {}, "data": {"text/plain": shown}, "execution_count": 1}


def numbered(notebook: dict) -> dict:
    """The same notebook with the ids and counts that a run in place gives it."""
    for i, cell in enumerate(notebook["cells"], start=1):
        cell["id"] = f"c{i:02d}"
    for i, cell in enumerate((c for c in notebook["cells"] if c["cell_type"] == "code"), start=1):
        cell["execution_count"] = i
    return notebook


HEADER = """# 03 · A norm that cannot grow

*Does a convex mixture ever exceed its largest part?*

**Needs** CPU · **Time** 4 s (no full mode) · **Memory** 0.4 GB · **Download** none · **Read first** nothing

## The idea

A mixture with weights that add up to one lies between its parts, so its norm cannot exceed the largest of them.
We draw one, look at the norms, and then say what must hold of them on every machine.

![Two vectors and the segment between them](figures/03_mixture.png)"""

STUB = "def mix(a, b, gate):\n    # --- solution\n    step = b - a\n    move = gate * step\n    return a + move"
EXERCISE = "### Exercise {}\n\nWrite the interpolation so that it returns both of its end points exactly."


def good() -> dict:
    cells = [
        text(HEADER),
        text(
            "## Notation\n\n| symbol | name in code | shape |\n|---|---|---|\n| $a$ | `a` | [C], about 0.77 long |\n\n"
            "All vectors have `64` entries, and the gate is a number between zero and one."
        ),
        code(
            "import depthlab as dl\nimport matplotlib.pyplot as plt\n\nsession = dl.start(seed=0)",
            stream("depthlab 0.1.0 | Python 3.12.9 | torch 2.14.1 | cpu, 1 thread | quick mode\n"),
        ),
        text(
            "## Experiment\n\nThe first cell shows what we measured here: the mixture is 0.87 of the longer part. "
            "The digits will be others on another machine, so the next cell compares none of them."
        ),
        code(
            "a, b = 1.0, 0.5\nx = [0, 1]\ny = [a, b]\nprint('ratio', 0.8654321)\nplt.plot([1, 2])\nplt.show()",
            stream("ratio 0.8654321\n"),
            display(image_png=png(480, 320)),
            tags=("nbval-ignore-output",),
        ),
        code("dl.check('the ratio is below one', 0.8654321, '<', 1)", stream("PASS  the ratio is below one\n")),
        text("## What the paper says, what we saw\n\nThe paper proves it; we saw 87 % at a gate of $g = 0.25$."),
        text("## Summary\n\nA convex mixture is never longer than its longest part, whatever the gate is."),
        text("## Exercises\n\n" + EXERCISE.format(1)),
        code(STUB, tags=("solution",)),
        code("dl.check('ends', 1, '==', 1)", stream("PASS  ends\n"), tags=("exercise-check",)),
        text(EXERCISE.format(2)),
        code(STUB, tags=("solution",)),
        code("dl.check('ends', 1, '==', 1)", stream("PASS  ends\n"), tags=("exercise-check",)),
        text("## References\n\nMulti-Gate Residuals, arXiv 2605.23259, table 4.82."),
    ]
    metadata = {"kernelspec": {"name": "python3"}, "language_info": {"name": "python"}}
    return numbered({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where the good notebook would lie, with its picture and without a configured address."""
    folder = tmp_path / "notebooks"
    (folder / "figures").mkdir(parents=True)
    for ending in ("png", "py"):
        (folder / f"figures/03_mixture.{ending}").touch()
    (tmp_path / "pyproject.toml").write_text('[tool.depthlab]\nrepository = ""\n')
    return folder / "03_norm.ipynb"


def verdicts(notebook: dict, path: Path) -> dict[str, list[str]]:
    found = {rule.__name__: rule(notebook, path) for rule in policy.RULES}
    return {name: complaints for name, complaints in found.items() if complaints}


def replaced(index: int, old: str, new: str):
    """A change: `old` becomes `new` in the source of one cell."""

    def change(notebook: dict, path: Path) -> None:
        assert old in notebook["cells"][index]["source"]
        notebook["cells"][index]["source"] = notebook["cells"][index]["source"].replace(old, new)

    return change


def printed(index: int, *outputs: dict):
    """A change: one cell leaves these outputs behind as well."""
    return lambda notebook, path: notebook["cells"][index]["outputs"].extend(copy.deepcopy(outputs))


def both(*changes):
    return lambda notebook, path: [change(notebook, path) for change in changes]


def _set(target: str, value):
    """A change to the notebook's metadata."""
    return lambda notebook, path: notebook["metadata"].__setitem__(target, value)


def _drop(index: int):
    def change(notebook: dict, path: Path) -> None:
        del notebook["cells"][index]
        numbered(notebook)

    return change


def _swap_sections(notebook: dict, path: Path) -> None:
    cells = notebook["cells"]
    cells[6], cells[7] = cells[7], cells[6]
    numbered(notebook)


def _empty_cell(notebook: dict, path: Path) -> None:
    notebook["cells"].insert(3, code(" "))
    numbered(notebook)


def _raw_cell(notebook: dict, path: Path) -> None:
    notebook["cells"].insert(6, {"cell_type": "raw", "metadata": {}, "source": "no rule reads this"})
    numbered(notebook)


def _many_words(notebook: dict, path: Path) -> None:
    notebook["cells"][7]["source"] += "\n\n" + "and so on, for ever, " * 60


def _remove_drawing_code(notebook: dict, path: Path) -> None:
    (path.parent / "figures/03_mixture.py").unlink()


def _configure_address(notebook: dict, path: Path) -> None:
    (path.parents[1] / "pyproject.toml").write_text('[tool.depthlab]\nrepository = "https://github.com/owner/name"\n')


def _large_file(notebook: dict, path: Path) -> None:
    path.write_text("x" * 400_001)


def _workers(notebook: dict, path: Path) -> None:
    notebook["cells"][5]["source"] += "\nclass Digits: ...\nloader = DataLoader(Digits(), num_workers=2)"


def _untagged_plot(notebook: dict, path: Path) -> None:
    notebook["cells"][5]["source"] += "\nplt.show()"
    notebook["cells"][5]["outputs"].append(display(image_png=png(10, 10)))


def _tagged(index: int, *tags: str):
    return lambda notebook, path: notebook["cells"][index]["metadata"].__setitem__("tags", list(tags))


SHORT = "x = 0\n" * 25
LONG = "\n".join(f"x{i} = {i}" for i in range(31))
WORDS = "These words keep text and code in proportion. " * 25

# rule -> changes to the good notebook, each of which that rule alone rejects
BAD = {
    "header_is_complete": [
        replaced(0, "**Memory** 0.4 GB · ", ""),
        replaced(0, "# 03 ·", "# 04 ·"),
        replaced(0, "**Time** 4 s", "**Time** 2 min"),
        replaced(0, "part?*", "part.*"),
    ],
    "colab_link_matches": [
        _configure_address,
        replaced(0, "## The idea", "[Open in Colab](https://colab.research.google.com/github/x/y)\n\n## The idea"),
    ],
    "sections_in_order": [replaced(7, "## Summary", "## In short"), _swap_sections, _drop(-1)],
    "notation_is_a_table": [replaced(1, "| $a$ | `a` | [C], about 0.77 long |", "")],
    "picture_near_the_top": [replaced(0, "![", "["), _remove_drawing_code],
    "images_are_local": [
        replaced(6, "The paper", f"{picture} The paper")
        for picture in (
            "![it](https://example.org/it.png)",
            "![it](attachment:it.png)",
            "![it](data:image/svg+xml;utf8,<g/>)",
            "![it][far]",
            '<IMG SRC="https://example.org/it.png">',
            "<img src=https://example.org/it.png>",
            '<iframe src="https://example.org"></iframe>',
        )
    ],
    "cells_are_text_or_code": [
        lambda n, p: n["cells"][6].__setitem__("attachments", {"it.png": {"image/png": "iVBORw0KGgo="}}),
        _raw_cell,
    ],
    "text_has_no_base64": [replaced(6, "The paper", "![it](data:image/png;base64,iVBORw0KGgo=) The paper")],
    "links_resolve": [replaced(6, "The paper", "The [paper](papers/none.md)")],
    "text_and_code_in_proportion": [_many_words, replaced(5, "dl.check", SHORT + "dl.check")],
    "cells_are_short": [
        both(replaced(5, "dl.check", LONG + "\ndl.check"), replaced(7, "A convex", WORDS + "A convex")),
    ],
    "exercises_are_complete": [
        replaced(9, "    # --- solution\n", ""),
        replaced(9, "    # --- solution", "# --- solution"),
        replaced(11, "### Exercise 2", "### Exercise 3"),
        _tagged(10),
        _tagged(9),
    ],
    "code_is_plain_python": [
        replaced(10, "dl.check", "%time dl.check"),
        replaced(5, "dl.check", "'pip install x', dl.check"),
        replaced(5, "dl.check", "get_ipython().run_cell('1'), dl.check"),
    ],
    "first_cell_starts_the_session": [replaced(2, "seed=0", ""), replaced(5, "dl.check", "dl.start(seed=1); dl.check")],
    "full_mode_is_declared": [
        replaced(0, "(no full mode)", "(full mode 12 min)"),
        replaced(0, "(no full mode) ", ""),
        replaced(5, "0.8654321,", "0.8654321 if session.full else 0,"),
    ],
    "no_trailing_semicolon": [
        replaced(4, "plt.plot([1, 2])", "plt.plot([1, 2]);"),
        replaced(4, "plt.plot([1, 2])", "plt.plot([1, 2]);  # the curve"),
        replaced(4, "plt.plot([1, 2])", "plt.plot([1, 2], label='#1');"),
    ],
    "plots_end_with_show": [
        replaced(4, "plt.show()", "plt.draw()"),
        replaced(4, "plt.show()", "plt.show()\nplt.plot([1, 2])"),
    ],
    "no_workers_with_cell_classes": [
        _workers,
        replaced(5, "dl.check", "pick = lambda x: x\nDataLoader(y, num_workers=2, collate_fn=pick)\ndl.check"),
        replaced(5, "dl.check", "def pick(x): ...\nDataLoader(y, 8, True, None, None, 4)\ndl.check"),
        replaced(5, "dl.check", "class Digits: ...\nDataLoader(y, **{'num_workers': 4})\ndl.check"),
    ],
    "tags_are_known": [
        _tagged(5, "nbval-skip"),
        _tagged(5, "hide-input"),
        replaced(5, "dl.check", "# NBVAL_IGNORE_OUTPUT\ndl.check"),
    ],
    "shown_is_checked": [
        _tagged(5, "nbval-ignore-output"),
        replaced(5, "dl.check(", "print("),
        lambda n, p: n["cells"][5].__setitem__("outputs", []),  # the check stands in a branch that never runs
    ],
    "exercises_stand_alone": [replaced(9, "gate * step", "gate * step * a_scale"), replaced(10, "1,", "ratio,")],
    "records_exist": [
        replaced(5, "dl.check", "dl.runs.load('no-such-record'); dl.check"),
        replaced(6, "The paper", "See `data/results/no-such-record.json`. The paper"),
    ],
    "executed_in_order": [
        lambda n, p: n["cells"][4].__setitem__("execution_count", 7),
        lambda n, p: n["cells"][4].__setitem__("execution_count", None),
    ],
    "kernel_is_python3": [_set("kernelspec", {"name": "my-conda-env"}), _set("kernelspec", {})],
    "ids_and_metadata_are_plain": [
        lambda n, p: n["cells"][4].__setitem__("id", "a1b2c3"),
        lambda n, p: n["cells"][4]["metadata"].__setitem__("execution", {"iopub.status.busy": "2026"}),
        _set("vscode", {}),
    ],
    "no_widgets": [
        _set("widgets", {"state": {}}),
        printed(4, display(**{"application/vnd.jupyter.widget-view+json": "{}"})),
    ],
    "outputs_are_text_or_png": [
        printed(5, display(**{"text/html": "<b>loss 0.123</b>", "text/plain": "loss"})),
        printed(5, display(**{"text/html": "<table><img src='data:image/png;base64,AA'></table>", "text/plain": "x"})),
        printed(5, display(**{"text/html": "<table></table>"})),
        printed(5, display(**{"text/markdown": "**0.1234567**", "text/plain": "x"})),
        printed(5, display(**{"application/json": "{}"})),
    ],
    "pictures_are_png": [printed(4, display(**{"image_svg+xml": "<svg/>"})), _untagged_plot],
    "figures_are_small": [
        printed(4, display(image_png=png(520, 300))),
        printed(4, display(image_png=png(480, 360))),
        printed(4, display(image_png=png(300, 300, dots_per_inch=72))),
    ],
    "no_tracebacks": [printed(5, {"output_type": "error", "ename": "E", "evalue": "", "traceback": []})],
    "no_stderr": [printed(4, stream("UserWarning: old", name="stderr"))],
    "no_progress_bars": [
        printed(4, stream(bar))
        for bar in (
            "50%|#####     | 1/2",
            "step 1\rstep 2\n",
            "50/100 [00:12<00:12, 4it/s]",
            "[####      ] 2 of 5",
            "━━━━━━━━ 0:00:01",
            "\x1b[31mred\x1b[0m",
        )
    ],
    "no_addresses": [printed(4, stream("made Net at 0x7f3a2c1d90\n")), printed(4, stream("at 0X7F3A2C1D90\n"))],
    "no_absolute_paths": [
        printed(4, stream("read /srv/data/mnist\n")),
        replaced(5, "dl.check", "open('/srv/data/mnist'); dl.check"),
        *(printed(4, stream(f"read {path}\n")) for path in ("C:\\data", "C:/data", "c:\\users", "file:///a", "/tmp")),
    ],
    "no_bare_objects": [
        printed(5, result("[<matplotlib.lines.Line2D>]")),
        printed(5, result("Text(0.5, 0, 'depth')")),
        printed(5, display(**{"text/plain": "<__main__.Net object>"})),
    ],
    "floats_are_short": [
        printed(5, stream("0.30000000000000004\n")),
        printed(5, stream("12.345\n")),
        printed(5, stream("took 0.1234567s\n")),
    ],
    "measured_numbers_are_printed": [
        replaced(6, "87 %", "88 %"),
        replaced(6, "The paper", "It is 3.2 times longer. The paper"),
        *(
            replaced(6, "The paper", f"The error is {number} as we saw. The paper")
            for number in ("3-fold", "3×", "3.5x", "93 percent", ".931", "1,234.5", "1/0.931", "_0.931_", "−0.931")
        ),
    ],
    "file_is_small": [_large_file],
}  # fmt: skip


def test_good_notebook_passes_every_rule(place):
    assert verdicts(good(), place) == {}


def test_every_rule_has_a_bad_example():
    assert set(BAD) == {rule.__name__ for rule in policy.RULES}


@pytest.mark.parametrize(
    ("rule", "change"), [pytest.param(r, c, id=f"{r}-{i}") for r, cs in BAD.items() for i, c in enumerate(cs)]
)
def test_bad_notebook_is_rejected_by_its_rule_alone(rule, change, place):
    notebook = good()
    change(notebook, place)
    assert list(verdicts(notebook, place)) == [rule]


def test_an_empty_cell_is_not_executed(place):
    notebook = good()
    _empty_cell(notebook, place)
    assert any("empty" in complaint for complaint in verdicts(notebook, place)["executed_in_order"])


def test_median_cell_is_short(place):
    notebook = good()
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["source"] = "\n".join(["x = 1"] * 9) + "\n" + cell["source"]
    assert any("median" in complaint for complaint in verdicts(notebook, place)["cells_are_short"])


def test_measured_numbers_leave_out_settings_formulas_and_citations():
    assert measured_numbers(good()) == ["0.87", "87"]


def test_versions_paths_in_links_and_settings_are_no_faults(place):
    notebook = good()
    notebook["cells"][5]["outputs"].append(stream("torch 2.14.1, 0.1235, 0x10, a/b/c, [1.0, 0.5], 3/4\n"))
    notebook["cells"][7]["source"] += " See [it](figures/03_mixture.png); `lr=0.0123` for 30 steps of 1,000 and $2.5x$."
    notebook["cells"][5]["source"] += "\ntext = 'a;'\n# b;\na = 1; b = 2"
    assert verdicts(notebook, place) == {}


def test_right_colab_link_is_accepted(place):
    notebook = good()
    _configure_address(notebook, place)
    link = "https://colab.research.google.com/github/owner/name/blob/main/notebooks/03_norm.ipynb"
    notebook["cells"][0]["source"] += f"\n\n[Open in Colab]({link})"
    assert verdicts(notebook, place) == {}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_committed_notebook_keeps_every_rule(path):
    assert policy.problems(path) == []


def test_all_notebooks_fit_their_time():
    assert sum(header(path).seconds for path in NOTEBOOKS) <= ALL_SECONDS


def test_read_first_names_earlier_notebooks_only():
    for path in NOTEBOOKS:
        for other in NOTEBOOKS:
            if other.name in header(path).before:
                assert other.name < path.name, f"{path.name} asks to read {other.name} first"


def test_readme_table_is_what_the_headers_say():
    assert write_readme_table(ROOT / "README.md", check=True), "run: depthlab notebooks table"


def test_map_and_verdicts_of_the_first_notebook_are_current():
    """So that an added notebook or record is missed in a second and not after minutes of nbval."""
    from depthlab import claims
    from depthlab.nbtools.document import code_cells, printed

    shown = "\n".join(map(printed, code_cells(read(NOTEBOOKS[0]))))
    lines = [line.split("  ") for line in shown.splitlines()]
    for path in NOTEBOOKS:
        head = header(path)
        listed = any(
            [word.strip() for word in line if word] == [head.number, head.title, head.time, head.memory]
            for line in lines
        )
        assert listed, f"{path.name} is not in the map; run: depthlab notebooks run --in-place {NOTEBOOKS[0].name}"
    assert claims.summary() in shown, (
        f"the verdicts changed; run: depthlab notebooks run --in-place {NOTEBOOKS[0].name}"
    )


def test_committed_notebooks_are_written_as_jupyter_writes_them():
    nbformat = pytest.importorskip("nbformat")
    for path in NOTEBOOKS:
        assert path.read_text(encoding="utf-8") == nbformat.writes(nbformat.from_dict(read(path))) + "\n"
