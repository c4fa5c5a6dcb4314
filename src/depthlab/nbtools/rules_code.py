"""Rules for the code cells: plain Python, one seeded start, show cells followed by check cells, records that exist."""

import ast
import builtins
import io
import itertools
import re
import tokenize
from importlib.resources import files
from pathlib import Path

from depthlab.nbtools.document import (
    EXERCISE_CHECK,
    SHOW,
    SOLUTION,
    Cell,
    Notebook,
    calls,
    code_cells,
    name_of,
    nodes,
    pngs,
    printed,
    prose,
    tags,
)
from depthlab.nbtools.headers import header

_NBVAL_COMMENT = re.compile(r"^\s*#+\s*(NBVAL|PYTEST_VALIDATE)_", re.MULTILINE)
KNOWN_TAGS = {SHOW, SOLUTION, EXERCISE_CHECK}
SHELLS = ("get_ipython", "os.system")
WORKERS_AT = 5  # the place of num_workers among DataLoader's positional arguments


def code_is_plain_python(notebook: Notebook, path: Path) -> list[str]:
    found = []
    for cell in code_cells(notebook):
        if re.search(r"pip\s+install|conda\s+install", cell["source"]):
            found.append(f"{cell['id']} installs packages; the environment does that")
        elif not nodes(cell) or any(ast.unparse(call.func) in SHELLS for call in calls(cell)):
            found.append(f"{cell['id']} is no plain Python: no magics, no shell")
    return found


def first_cell_starts_the_session(notebook: Notebook, path: Path) -> list[str]:
    code = code_cells(notebook)
    starts = [(i, call) for i, cell in enumerate(code) for call in calls(cell) if name_of(call) == "start"]
    right = len(starts) == 1 and starts[0][0] == 0 and [k.arg for k in starts[0][1].keywords] == ["seed"]
    return [] if right else ["the first code cell, and only it, calls dl.start(seed=...)"]


def full_mode_is_declared(notebook: Notebook, path: Path) -> list[str]:
    code = [node for cell in code_cells(notebook) for node in nodes(cell)]
    reads = any(isinstance(node, ast.Attribute) and node.attr == "full" for node in code)
    try:
        head = header(path, notebook)
    except ValueError:
        return []  # header_is_complete says so
    if reads and head.full_time:
        return []
    if not reads and not head.full_time:
        says = "(no full mode)" in notebook["cells"][0]["source"]
        return [] if says else ["the header must say `(no full mode)` after the time"]
    if reads:
        return ["reads session.full, and the header gives no full mode's time"]
    return [f"the header gives a full mode of {head.full_time}, and no cell reads session.full"]


def no_trailing_semicolon(notebook: Notebook, path: Path) -> list[str]:
    return [
        f"{cell['id']} has a trailing `;`, which hides nothing under nbval; end with plt.show()"
        for cell in code_cells(notebook)
        if _ends_a_line_in_a_semicolon(cell["source"])
    ]


def _ends_a_line_in_a_semicolon(source: str) -> bool:
    """Also before a comment; inside a string or a comment it is text."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, IndentationError):
        return False  # code_is_plain_python says so
    ends = (tokenize.NEWLINE, tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER)
    return any(token.string == ";" and after.type in ends for token, after in itertools.pairwise(tokens))


def plots_end_with_show(notebook: Notebook, path: Path) -> list[str]:
    drawn = [cell for cell in code_cells(notebook) if any(True for _ in pngs(cell))]
    return [f"{cell['id']} draws; end it with plt.show()" for cell in drawn if not _ends_with_show(cell)]


def _ends_with_show(cell: Cell) -> bool:
    body = nodes(cell)[0].body if nodes(cell) else []
    return bool(body) and ast.unparse(body[-1]) == "plt.show()"


def no_workers_with_cell_classes(notebook: Notebook, path: Path) -> list[str]:
    code = [node for cell in code_cells(notebook) for node in nodes(cell)]
    workers = [
        node
        for node in code
        if isinstance(node, ast.keyword)
        and node.arg == "num_workers"
        and not (isinstance(node.value, ast.Constant) and node.value.value == 0)
    ]
    workers += [
        node
        for node in code
        if isinstance(node, ast.Call)
        and name_of(node) == "DataLoader"
        and (len(node.args) > WORKERS_AT or any(keyword.arg is None for keyword in node.keywords))
    ]
    if workers and any(isinstance(node, ast.ClassDef | ast.FunctionDef | ast.Lambda) for node in code):
        return ["num_workers > 0 with a class or function defined in a cell: a worker process cannot find it"]
    return []


def tags_are_known(notebook: Notebook, path: Path) -> list[str]:
    found = []
    for cell in notebook["cells"]:
        unknown = sorted(set(tags(cell)) - KNOWN_TAGS)
        if unknown:
            found.append(f"{cell['id']} has the tag {', '.join(unknown)}; known are {', '.join(sorted(KNOWN_TAGS))}")
        if cell["cell_type"] == "code" and _NBVAL_COMMENT.search(cell["source"]):
            found.append(f"{cell['id']} steers nbval by a comment; use a tag")
    return found


def shown_is_checked(notebook: Notebook, path: Path) -> list[str]:
    code = code_cells(notebook)
    return [
        f"{cell['id']} is shown and not compared; an untagged check(...) cell must follow"
        for cell, after in zip(code, [*code[1:], None], strict=False)
        if SHOW in tags(cell) and (after is None or SHOW in tags(after) or not _checks(after))
    ]


def _checks(cell: Cell) -> bool:
    """Whether it calls `check` and a verdict came out: one that is never reached proves nothing."""
    verdict = re.search(r"^PASS  ", printed(cell), re.MULTILINE)
    return bool(verdict) and any(name_of(call) == "check" for call in calls(cell))


def exercises_stand_alone(notebook: Notebook, path: Path) -> list[str]:
    """So a student can begin with them, and a test can run them in seconds."""
    code = code_cells(notebook)
    found, known = [], set(dir(builtins)) | (_bound(code[0]) if code else set())
    for cell in code:
        if {SOLUTION, EXERCISE_CHECK} & set(tags(cell)):
            known |= _bound(cell)
            used = {node.id for node in nodes(cell) if isinstance(node, ast.Name)} - known
            if used:
                found.append(f"{cell['id']} uses {', '.join(sorted(used))}; an exercise needs the first code cell only")
    return found


def _bound(cell: Cell) -> set[str]:
    """Every name that a cell gives a meaning to, at any depth."""
    names = {node.id for node in nodes(cell) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {node.name for node in nodes(cell) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {node.arg for node in nodes(cell) if isinstance(node, ast.arg)}
    imported = [node for node in nodes(cell) if isinstance(node, ast.Import | ast.ImportFrom)]
    return names | {(alias.asname or alias.name).split(".")[0] for node in imported for alias in node.names}


def records_exist(notebook: Notebook, path: Path) -> list[str]:
    loads = [
        call for cell in code_cells(notebook) for call in calls(cell) if ast.unparse(call.func).endswith("runs.load")
    ]
    names = {call.args[0].value for call in loads if call.args and isinstance(call.args[0], ast.Constant)}
    names |= set(re.findall(r"(?:(?<=data/results/)|(?<=depthlab runs make ))[\w-]+", prose(notebook)))
    results = files("depthlab.bundles") / "results"
    return [
        f"names the record {name}, which does not exist"
        for name in sorted(names)
        if not (results / f"{name}.json").is_file()
    ]
