"""A run that is killed and started again ends in the record of a run that was left alone."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Starter = Callable[..., subprocess.Popen]
SCRIPT = Path(__file__).with_name("killed_runs.py")
PATIENCE = 240.0  # seconds; on a busy machine an interpreter takes most of a minute to import torch
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")


@pytest.fixture(autouse=True)
def same_commit_throughout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A commit made while the test runs is not what it is about."""
    monkeypatch.setenv("DEPTHLAB_COMMIT", "0" * 40)
    monkeypatch.setenv("KILLED_RUNS_PIDS", str(tmp_path / "pids"))
    (tmp_path / "pids").mkdir()


@pytest.fixture
def start() -> Iterator[Starter]:
    """Starts the script; whatever is still running when the test ends, however it ends, is killed."""
    started: list[subprocess.Popen] = []

    def run(*arguments: object) -> subprocess.Popen:
        command = [sys.executable, str(SCRIPT), *map(str, arguments)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen) -> str:
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    return output


def numbers(path: Path) -> dict[str, Any]:
    """The record without what may differ between two runs: when, and how long."""
    data = json.loads(path.read_text())
    return {name: value for name, value in data.items() if name not in ("date", "wall_time_s")}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not Path(f"/proc/{pid}/stat").exists() or ") Z " not in Path(f"/proc/{pid}/stat").read_text()


def wait_for(condition: Any, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def test_kills_at_any_moment_leave_the_record_of_an_undisturbed_run(start: Starter, tmp_path: Path) -> None:
    said = finish(start("storm", tmp_path))
    assert int(said.split()[-2]) >= 9, said  # the planted ones; otherwise this test tested nothing
    assert numbers(tmp_path / "stormy/killed.json") == numbers(tmp_path / "calm/killed.json")
    assert [path.name for path in (tmp_path / "work-stormy/killed").iterdir()] == ["lock"]
    assert [path.name for path in (tmp_path / "stormy").iterdir()] == ["killed.json"]  # nothing torn is left


@pytest.mark.slow
def test_a_killed_parent_takes_its_workers_along_and_the_rest_is_done_later(start: Starter, tmp_path: Path) -> None:
    killed = start("make", tmp_path, "a", 2)
    wait_for(lambda: list(tmp_path.glob("work-a/killed/*/*.json")))
    killed.kill()
    killed.communicate()
    workers = [int(path.name) for path in (tmp_path / "pids").iterdir()]
    assert workers
    wait_for(lambda: not any(map(alive, workers)), seconds=20)
    kept = len(list(tmp_path.glob("work-a/killed/*/*.json")))
    assert 1 <= kept < 8
    assert f"{kept} of 8 cells were finished before" in finish(start("make", tmp_path, "a", 2))
    calm = runpy.run_path(str(SCRIPT))  # here, in one process, never killed
    calm["make"](calm["experiment"](0.3), tmp_path / "work-b", tmp_path / "b")
    assert numbers(tmp_path / "a/killed.json") == numbers(tmp_path / "b/killed.json")


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_run_in_one_sentence(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILLED_RUNS_VICTIM", "variant=a,seed=2")
    process = start("make", tmp_path, "a", 2)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert "RunError: A worker process died" in errors
    assert "finished cells are kept" in errors


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished_and_says_how_to_go_on(start: Starter, tmp_path: Path) -> None:
    process = start("make", tmp_path, "a", 2)
    wait_for(lambda: list(tmp_path.glob("work-a/killed/*/*.json")))
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert "interrupted" in output
    assert "Run the same command again" in output
    assert "SpawnProcess" not in errors  # no traceback from the workers
    assert list(tmp_path.glob("work-a/killed/*/*.json"))
    assert not any(alive(int(path.name)) for path in (tmp_path / "pids").iterdir())
