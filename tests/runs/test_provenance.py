"""Provenance says which commit, machine and versions, and never a host name or a path."""

import importlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

module = importlib.import_module("depthlab.runs.provenance")  # the name in the package is the function
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEPTHLAB_COMMIT", raising=False)
    monkeypatch.delenv("DEPTHLAB_CLEAN", raising=False)


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small repository laid out like ours, which the module believes to lie in."""
    for name in (
        "src/depthlab/runs/provenance.py",
        "data/mnist/digits.bin",
        "notebooks/a.ipynb",
        "data/results/a.json",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("first")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "first")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "src/depthlab/runs/provenance.py"))
    return tmp_path


def test_a_checkout_gives_its_commit(checkout: Path) -> None:
    found = module.provenance()
    assert (found["commit"], found["clean"]) == (git(checkout, "rev-parse", "HEAD"), True)


@pytest.mark.parametrize(
    "name", ["src/depthlab/runs/provenance.py", "data/mnist/digits.bin", "src/new.py", "kernels/k.py"]
)
def test_a_changed_or_new_source_file_is_not_clean(checkout: Path, name: str) -> None:
    (checkout / name).parent.mkdir(parents=True, exist_ok=True)
    (checkout / name).write_text("second")
    assert module.provenance()["clean"] is False


def test_a_new_source_file_is_not_clean_where_git_is_told_to_hide_them(checkout: Path) -> None:
    git(checkout, "config", "status.showUntrackedFiles", "no")
    (checkout / "src/new.py").write_text("second")
    assert module.provenance()["clean"] is False


@pytest.mark.parametrize("name", ["notebooks/a.ipynb", "data/results/a.json", "data/results/new.json"])
def test_notebooks_and_records_do_not_make_the_code_unclean(checkout: Path, name: str) -> None:
    (checkout / name).write_text("second")
    assert module.provenance()["clean"] is True


def test_an_installed_copy_inside_somebody_elses_repository_is_not_theirs(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = checkout / ".venv/depthlab/runs/provenance.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("")
    monkeypatch.setattr(module, "__file__", str(installed))
    assert (module.provenance()["commit"], module.provenance()["clean"]) == ("unknown", False)


def test_without_git_the_variables_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert (module.provenance()["commit"], module.provenance()["clean"]) == ("unknown", False)
    monkeypatch.setenv("DEPTHLAB_COMMIT", COMMIT)
    assert (module.provenance()["commit"], module.provenance()["clean"]) == (COMMIT, False)
    monkeypatch.setenv("DEPTHLAB_CLEAN", "1")
    assert module.provenance()["clean"] is True


def test_a_checkout_below_any_folder_name_gives_its_commit_in_any_locale(checkout: Path) -> None:
    moved = checkout.with_name("a folder \u00c1 \u4e2d")
    checkout.rename(moved)
    code = (
        "import importlib, sys; m = importlib.import_module('depthlab.runs.provenance')\n"
        "m.__file__ = sys.argv[1]; found = m.provenance(); print(found['commit'], found['clean'])"
    )
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", code, str(moved / "src/depthlab/runs/provenance.py")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **plain})
    assert (done.stdout, done.stderr) == (f"{git(moved, 'rev-parse', 'HEAD')} True\n", "")


@pytest.mark.parametrize(("name", "value"), [("DEPTHLAB_COMMIT", "main"), ("DEPTHLAB_CLEAN", "maybe")])
def test_variables_that_say_nothing_are_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEPTHLAB_COMMIT", COMMIT)
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name):
        module.provenance()


def test_hardware_and_versions_name_the_machine_but_not_the_host() -> None:
    found = module.provenance()
    assert found["hardware"]["cpu"].strip()
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["threads"] == torch.get_num_threads()
    assert found["versions"]["torch"] == str(torch.__version__)
    assert found["versions"]["python"] == platform.python_version()
    text = json.dumps(found)
    assert str(Path.home()) not in text or str(Path.home()) == "/"
    assert platform.node() not in text or len(platform.node()) < 4
