"""Student copies: the solved notebook is the source, its solutions become stubs that say what is left to do."""

import re
from collections.abc import Sequence
from pathlib import Path

from depthlab.nbtools.document import (
    SOLUTION,
    STUB_MARK,
    Cell,
    Notebook,
    code_cells,
    find,
    normalise,
    read,
    tags,
    write,
)

STUB = "exercise"  # the tag of a stub, so that no export carries the word for the other thing
NOTE = (
    "*Student copy: the exercises at the end are yours to fill in. Run the first code cell, replace a line that raises "
    "`NotImplementedError`, then run the check below it. `depthlab exercises` writes this file anew, so keep your own "
    "copy.*"
)
_LOCAL_LINK = re.compile(r"(!?\[[^\]]*\]\()(?!\w+:|/|#)([^)\s]+)")
_COLAB_LINE = re.compile(r"^\[Open in Colab\].*\n?", re.MULTILINE)


def write_exercises(paths: Sequence[str | Path] | None = None, check: bool = False) -> int:
    """Write the student copy of each notebook that has exercises into the folder ``exercises`` beside it; 0 when done.

    Args:
        paths: solved notebooks; None means all numbered ones in ``notebooks/``.
        check: write nothing; 1 when a copy is missing or is not what its notebook gives.
    """
    stale = 0
    for path in find() if paths is None else map(Path, paths):
        notebook = read(path)
        if not any(SOLUTION in tags(cell) for cell in code_cells(notebook)):
            continue
        target, copy = path.parent / "exercises" / path.name, student_copy(notebook)
        if target.exists() and read(target) == copy:
            continue
        stale += 1
        if check:
            print(f"exercises/{path.name} is not what {path.name} gives; run: depthlab exercises")
        else:
            write(copy, target)
            print(f"exercises/{path.name} written")
    return 1 if check and stale else 0


def student_copy(notebook: Notebook) -> Notebook:
    """Every cell, without outputs; a solution keeps the lines above its mark, then a stub that names the exercise.

    Links are rewritten for a file one folder deeper. A Colab link is left out: it would open the solved notebook.
    """
    copy, exercise = normalise(notebook), 0
    for number, cell in enumerate(copy["cells"]):
        if cell["cell_type"] == "markdown":
            source = _LOCAL_LINK.sub(r"\1../\2", _COLAB_LINE.sub("", cell["source"]).rstrip())
            cell["source"] = source if number else f"{source}\n\n{NOTE}"
            continue
        cell["execution_count"], cell["outputs"] = None, []
        if SOLUTION in tags(cell):
            exercise += 1
            cell["source"] = _stub(cell, exercise)
            cell["metadata"] = {"tags": [STUB]}
    return copy


def solution_lines(cell: Cell) -> list[str]:
    """The lines below the mark, which no student copy and no export of one may hold."""
    return cell["source"].partition(STUB_MARK)[2].splitlines()[1:]


def _stub(cell: Cell, exercise: int) -> str:
    kept, mark, _ = cell["source"].partition(STUB_MARK)
    if not mark:
        raise ValueError(f"The solution of exercise {exercise} has no line `{STUB_MARK}`; put it above what to hide.")
    given = kept.rstrip()
    indent = " " * (len(kept) - len(kept.rstrip(" ")))
    name = re.findall(r"^\s*(?:def|class) (\w+)", given, re.MULTILINE)[-1:]
    what = f"{name[0]}() of exercise {exercise}" if name else f"exercise {exercise}"
    return f'{given}\n{indent}raise NotImplementedError("not attempted: {what}; replace this line by your own code")'
