"""The Makefile installs once, believes no failed installation, and fails where a part fails.

A shell script plays Python: it logs what it is asked to do and fails where a test tells it to.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
echo "$*" >> calls
case "$*" in
    *"version_info"*) exec "$REAL" -c "import sys; sys.version_info = (3, ${MINOR:-12}, 0); exec(sys.argv[1])" "$2";;
    *"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python; touch .venv/pip;;
    *"-m pip --version"*) test -e .venv/pip;;
    *within.py*) shift 3; exec "$@";;
    *"-e ."*) exit ${INSTALL:-0};;
    *"notebooks run"*) exit ${NOTEBOOKS:-0};;
    *"depthlab claims"*) exit ${CLAIMS:-0};;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "a checkout"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return folder


def make(checkout: Path, target: str, **variables: str) -> tuple[subprocess.CompletedProcess, list[str]]:
    """What make gave, and what Python was asked for meanwhile."""
    (checkout / "calls").unlink(missing_ok=True)
    command = ["make", target, f"PYTHON={checkout.parent / 'python'}"]
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    environment |= {"REAL": sys.executable, **variables}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    calls = checkout / "calls"
    return done, calls.read_text().splitlines() if calls.exists() else []


def installs(calls: list[str]) -> int:
    return sum("-m pip install" in call and "-e ." in call and "within.py" not in call for call in calls)


def test_a_second_make_installs_nothing_until_pyproject_changes(checkout: Path) -> None:
    done, calls = make(checkout, "install")
    assert (done.returncode, installs(calls)) == (0, 1)
    assert make(checkout, "install")[1] == []
    changed = (checkout / ".venv/.installed").stat().st_mtime + 2
    os.utime(checkout / "pyproject.toml", (changed, changed))
    _, calls = make(checkout, "install")
    assert installs(calls) == 1
    assert not any("-m venv" in call for call in calls)


def test_a_failed_installation_is_tried_again(checkout: Path) -> None:
    done, _ = make(checkout, "install", INSTALL="1")
    assert done.returncode != 0
    assert not (checkout / ".venv/.installed").exists()
    done, calls = make(checkout, "install")
    assert (done.returncode, installs(calls)) == (0, 1)


def test_an_environment_without_pip_is_made_anew(checkout: Path) -> None:
    make(checkout, "install", INSTALL="1")
    (checkout / ".venv/pip").unlink()  # as when the first make was stopped while it made the environment
    done, calls = make(checkout, "install")
    assert done.returncode == 0
    assert any("-m venv" in call for call in calls)


def test_an_old_python_is_named_before_anything_is_made(checkout: Path) -> None:
    done, _ = make(checkout, "install", MINOR="10")
    assert done.returncode != 0
    assert "depthlab needs Python 3.11 or newer, this is 3.10; set PYTHON=python3.12, say." in done.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("failing", ["NOTEBOOKS", "CLAIMS"])
def test_run_fails_where_a_part_fails_and_still_prints_the_claims(checkout: Path, failing: str) -> None:
    assert make(checkout, "run")[0].returncode == 0
    done, calls = make(checkout, "run", **{failing: "1"})
    assert done.returncode != 0
    assert calls == ["-m depthlab notebooks run", "-m depthlab claims"]
