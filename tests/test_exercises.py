"""Student copies come from the solved notebooks, hold no solution, and fail helpfully until they are filled in."""

import html
import os
import re
from pathlib import Path
from unittest import mock

import pytest

from depthlab import CheckFailed, nbtools
from depthlab.nbtools.document import EXERCISE_CHECK, SOLUTION, code_cells, tags
from depthlab.nbtools.execute import execute
from depthlab.nbtools.exercises import STUB, solution_lines

ROOT = Path(__file__).parents[1]
SOLVED = [p for p in nbtools.find(ROOT / "notebooks") if any(SOLUTION in tags(c) for c in code_cells(nbtools.read(p)))]
each_solved = pytest.mark.parametrize("path", SOLVED, ids=lambda path: path.name)


@pytest.fixture(autouse=True)
def own_environment():
    """What a notebook's first cell sets (Triton's interpreter, say) ends with its test."""
    with mock.patch.dict(os.environ):
        yield


def student(path: Path) -> Path:
    return path.parent / "exercises" / path.name


def secrets(path: Path) -> list[str]:
    """The lines of the solutions that stand nowhere else in the notebook and are long enough to be recognised."""
    notebook = nbtools.read(path)
    hidden = [line.strip() for c in code_cells(notebook) if SOLUTION in tags(c) for line in solution_lines(c)]
    elsewhere = "\n".join(c["source"] for c in notebook["cells"] if SOLUTION not in tags(c))
    return [line for line in hidden if len(line) >= 10 and line not in elsewhere]


def run_cells(notebook: dict, replace: dict[int, str] | None = None) -> None:
    """The first code cell, then the exercises, in one fresh namespace; `replace` swaps the k-th solution."""
    space, k = {"__name__": "__main__"}, 0
    code = code_cells(notebook)
    for cell in [code[0], *(c for c in code if {SOLUTION, STUB, EXERCISE_CHECK} & set(tags(c)))]:
        source = cell["source"]
        if {SOLUTION, STUB} & set(tags(cell)):
            source, k = (replace or {}).get(k, source), k + 1
        exec(compile(source, cell["id"], "exec"), space)


def test_copies_are_what_the_solved_notebooks_give():
    assert nbtools.write_exercises(SOLVED, check=True) == 0
    copies = sorted(path.name for path in (ROOT / "notebooks" / "exercises").glob("*.ipynb"))
    assert copies == [path.name for path in SOLVED]


@each_solved
def test_solutions_pass_their_own_checks(path, monkeypatch, capsys):
    monkeypatch.chdir(path.parent)
    run_cells(nbtools.read(path))
    assert capsys.readouterr().out.count("PASS  ") >= 2


@each_solved
def test_each_stub_fails_its_check_and_says_what_to_do(path, monkeypatch):
    monkeypatch.chdir(student(path).parent)
    solutions = [c["source"] for c in code_cells(nbtools.read(path)) if SOLUTION in tags(c)]
    for left_out in range(len(solutions)):
        others = {k: source for k, source in enumerate(solutions) if k != left_out}
        with pytest.raises(NotImplementedError, match=f"not attempted: .*exercise {left_out + 1}; replace this line"):
            run_cells(nbtools.read(student(path)), others)


@each_solved
def test_copies_and_their_exports_hold_no_solution(path):
    exporter = pytest.importorskip("nbconvert").HTMLExporter(template_name="classic", embed_images=False)
    page, _ = exporter.from_filename(str(student(path)))
    page_text = html.unescape(re.sub(r"<[^>]+>", "", page))
    source = student(path).read_text(encoding="utf-8")
    assert secrets(path), "nothing to look for"
    for line in secrets(path):
        assert line not in page_text and line not in source, line
    for mark in ("# --- solution", "celltag_solution", '"solution"'):
        assert mark not in page and mark not in source


@each_solved
def test_links_of_copies_resolve(path):
    from depthlab.nbtools.rules_text import links_resolve

    assert links_resolve(nbtools.read(student(path)), student(path)) == []


# ---- on an example, so that the tests above are known to be able to fail --------------------------------------------

SOLUTION_CELL = '''def twice(x):
    """2 x."""
    # --- solution
    doubled_secretly = x + x
    return doubled_secretly'''


@pytest.fixture
def example(tmp_path: Path) -> Path:
    links = "See [00](00_x.ipynb#a), [web](https://e.org), ![p](figures/p.png)"
    cells = [
        ("markdown", f"# 05 · T\n\n[Open in Colab](https://x/y)\n\n{links}", []),
        ("code", "import depthlab as dl", []),
        ("markdown", "### Exercise 1", []),
        ("code", SOLUTION_CELL, ["solution"]),
        ("code", "dl.check('twice two', twice(2), '==', 4)", ["exercise-check"]),
    ]
    made = [{"cell_type": kind, "source": source, "metadata": {"tags": t}, "outputs": []} for kind, source, t in cells]
    path = tmp_path / "05_t.ipynb"
    nbtools.write(nbtools.normalise({"cells": made, "metadata": {}}), path)
    return path


def test_a_copy_keeps_what_stands_above_the_mark_and_rewrites_links(example):
    assert nbtools.write_exercises([example], check=True) == 1
    assert nbtools.write_exercises([example]) == 0
    assert nbtools.write_exercises([example], check=True) == 0
    copy = nbtools.read(example.parent / "exercises" / "05_t.ipynb")
    stub = copy["cells"][3]["source"]
    assert stub.startswith(
        'def twice(x):\n    """2 x."""\n    raise NotImplementedError("not attempted: twice() of exercise 1'
    )
    assert "secretly" not in stub and "--- solution" not in stub
    first = copy["cells"][0]["source"]
    assert "(../00_x.ipynb#a)" in first and "(https://e.org)" in first and "(../figures/p.png)" in first
    assert "Colab" not in first and "Student copy" in first


def test_a_changed_solution_or_copy_is_noticed(example):
    nbtools.write_exercises([example])
    notebook = nbtools.read(example)
    notebook["cells"][3]["source"] = notebook["cells"][3]["source"].replace("2 x.", "Two x.")
    nbtools.write(notebook, example)
    assert nbtools.write_exercises([example], check=True) == 1


def test_a_wrong_answer_fails_the_check(example):
    nbtools.write_exercises([example])
    copy = nbtools.read(example.parent / "exercises" / "05_t.ipynb")
    run_cells(copy, {0: "def twice(x):\n    return x + x"})
    with pytest.raises(CheckFailed, match="twice two: expected == 4, got 3"):
        run_cells(copy, {0: "def twice(x):\n    return x + 1"})


def test_a_copy_stops_in_jupyter_at_the_check_with_the_helpful_sentence(example):
    nbtools.write_exercises([example])
    outcome = execute(example.parent / "exercises" / "05_t.ipynb")
    assert outcome.problem == (
        "05_t.ipynb, cell c05: NotImplementedError: not attempted: twice() of exercise 1; "
        "replace this line by your own code"
    )


def test_a_solution_without_its_mark_is_refused(example):
    notebook = nbtools.read(example)
    notebook["cells"][3]["source"] = "def twice(x):\n    return x + x"
    with pytest.raises(ValueError, match="exercise 1 has no line `# --- solution`"):
        nbtools.student_copy(notebook)
