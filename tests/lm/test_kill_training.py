"""A training run that is killed and started again ends bit for bit where a run that was left alone ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("killed_training.py")
PATIENCE = 240.0  # seconds; on a busy machine an interpreter takes most of a minute to import torch
Starter = Callable[..., subprocess.Popen]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")


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


def wait_for(condition: Any, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def lines(out: Path) -> list[dict[str, Any]]:
    """The log without what may differ between two runs: how fast they were."""
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("tokens_per_s", "ms_per_step")} for line in log]


def assert_same(stormy: Path, calm: Path) -> None:
    """Equal weights, optimizers, generators, positions and logs, and nothing that a kill left."""
    assert lines(stormy) == lines(calm)
    assert [line["step"] for line in lines(calm)] == [0, *range(2, 37, 2)]
    for name in ("step-000034", "step-000036"):
        for file in ("model.safetensors", "optimizer.safetensors", "state.json"):
            assert (stormy / name / file).read_bytes() == (calm / name / file).read_bytes(), f"{name}/{file}"
    expected = ["lock", "log.jsonl", "run.json", "step-000034", "step-000036"]
    assert sorted(p.name for p in stormy.iterdir()) == expected == sorted(p.name for p in calm.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_kills_at_any_moment_leave_the_weights_and_the_log_of_an_undisturbed_run(start, tmp_path, seed):
    planted, at_random = map(int, finish(start("storm", tmp_path, seed)).split())
    assert planted == 8 and at_random >= 4  # otherwise this test tested nothing
    assert_same(tmp_path / "planted", tmp_path / "calm")
    assert_same(tmp_path / "random", tmp_path / "calm")


@pytest.mark.slow
def test_ctrl_c_saves_the_step_and_the_run_goes_on_from_there(start, tmp_path):
    out, calm = tmp_path / "out", tmp_path / "calm"
    process = start("train", out, 0.1)
    wait_for(lambda: (out / "log.jsonl").exists() and len(lines(out)) > 2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    saved = sorted(out.glob("step-*"))
    assert saved and not list(out.glob(".*"))
    finish(start("train", out, 0))
    finish(start("train", calm, 0))
    assert_same(out, calm)


@pytest.mark.slow
def test_two_runs_in_one_folder_are_refused(start, tmp_path):
    start("train", tmp_path / "out", 60)
    wait_for(lambda: (tmp_path / "out" / "log.jsonl").exists())
    _, errors = start("train", tmp_path / "out", 0).communicate(timeout=PATIENCE)
    assert "Another run of out works in" in errors
