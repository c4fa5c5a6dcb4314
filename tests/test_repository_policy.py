"""What may be committed: text without anybody's machine in it, small files, one way to import the kernels."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_BYTES = 3_000_000
MOST_LINES = 400

# The names are put together here, so that this file keeps its own rules.
_FOLDERS = "|".join(["work", "root", "tmp", "home", "Users", "mnt", "private"])
_MACHINE_PATH = re.compile(rf"(?<![A-Za-z0-9_.~$}}/-])/(?:{_FOLDERS})/[A-Za-z0-9_.]|\b[A-Z]:\\\\?Users")
_REGISTRY = re.compile(r"https?://[^\s\"')]*(?:py" + r"pi\.|npm" + r"js\.|deb" + r"ian\.|conda\.anaconda\.)")
_KERNELS = re.compile(r"^\s*(?:import kernels\b|from kernels\b)", re.MULTILINE)
_BLOB = re.compile(r"data:[\w/+.-]+;base64,|[A-Za-z0-9+/]{200,}")


def names_a_machine(path: str, text: str) -> str | None:
    found = _MACHINE_PATH.search(text)
    return f"names a path of somebody's machine: {found[0]}" if found else None


def names_a_registry(path: str, text: str) -> str | None:
    found = _REGISTRY.search(text)
    return f"names a package registry: {found[0]}" if found else None


def imports_bare_kernels(path: str, text: str) -> str | None:
    code = text.replace('"', "") if path.endswith(".ipynb") else text
    ours = path.endswith((".py", ".ipynb", ".md"))
    return "imports `kernels`; its name is depthlab.kernels" if ours and _KERNELS.search(code) else None


def holds_a_blob(path: str, text: str) -> str | None:
    return "holds base64 in text" if path.endswith(".md") and _BLOB.search(text) else None


def is_a_long_module(path: str, text: str) -> str | None:
    lines = text.count("\n")
    ours = path.startswith(("src/", "kernels/")) and path.endswith(".py")
    return f"has {lines} lines; under {MOST_LINES}, or two modules" if ours and lines >= MOST_LINES else None


RULES: list[Callable[[str, str], str | None]] = [
    names_a_machine,
    names_a_registry,
    imports_bare_kernels,
    holds_a_blob,
    is_a_long_module,
]


def tracked() -> list[Path]:
    """The committed files; outside a git checkout there is nothing to hold to these rules."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git checkout here")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def text_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def test_tracked_text_keeps_every_rule():
    found = []
    for path in tracked():
        name, text = path.relative_to(ROOT).as_posix(), text_of(path)
        if text is not None:
            found += [f"{name} {complaint}" for rule in RULES if (complaint := rule(name, text))]
    assert not found, "\n".join(found)


def test_no_large_file_is_tracked():
    assert [path.name for path in tracked() if path.stat().st_size > MOST_BYTES] == []


def test_nothing_that_a_run_leaves_behind_is_tracked():
    left = re.compile(r"(^|/)(build|\.venv|__pycache__|\.ipynb_checkpoints|[^/]*\.egg-info)/|\.tmp$|\.pyc$")
    assert [path.name for path in tracked() if left.search(path.relative_to(ROOT).as_posix())] == []


BAD = [
    (names_a_machine, "a.md", "see /" + "home/ada/x"),
    (names_a_machine, "a.py", "open('/" + "tmp/x.json')"),
    (names_a_machine, "a.ipynb", '"text": "/' + 'work/main/notebooks"'),
    (names_a_machine, "a.md", "C:" + "\\Users\\ada"),
    (names_a_registry, "a.txt", "--index-url https://" + "pypi." + "org/simple"),
    (names_a_registry, "a.txt", "http://mirror.local/" + "debian." + "org"),
    (imports_bare_kernels, "a.py", "import kernels.mgr"),
    (imports_bare_kernels, "a.py", "    from kernels import mgr"),
    (imports_bare_kernels, "a.ipynb", '   "from kernels.mgr import x\\n"'),
    (holds_a_blob, "a.md", "![x](data:image/png;base64,iVBO)"),
    (holds_a_blob, "a.md", "A" * 200),
    (is_a_long_module, "src/depthlab/a.py", "x = 1\n" * 400),
    (is_a_long_module, "kernels/mgr/a.py", "x = 1\n" * 400),
]
GOOD = [
    ("a.md", "either/or, https://example.org/home/page, ~/work/x, $TMPDIR/tmp/x, 3/tmp"),
    ("a.py", "from depthlab.kernels import mgr\nimport depthlab.kernels"),
    ("tests/a.py", "x = 1\n" * 900),
    ("src/depthlab/a.py", "x = 1\n" * 399),
]


@pytest.mark.parametrize(("rule", "name", "text"), BAD)
def test_bad_example_is_rejected_by_its_rule_alone(rule, name, text):
    assert [other for other in RULES if other(name, text)] == [rule]


@pytest.mark.parametrize(("name", "text"), GOOD)
def test_good_example_passes(name, text):
    assert [rule.__name__ for rule in RULES if rule(name, text)] == []


def test_every_rule_has_a_bad_example():
    assert {rule for rule, _, _ in BAD} == set(RULES)
