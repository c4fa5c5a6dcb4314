"""Runs of one experiment that are killed, for test_kill.py; executed as a script in a process of its own.

killed_runs.py storm WORK OUT SEED     fork runs and SIGKILL them, at planted and at random moments, until one ends
killed_runs.py make WORK OUT PROCESSES one run that is left alone (or killed from outside)
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from depthlab.runs import Cell, Curve, Experiment, Result, grid, make, worker


def run_cell(cell: Cell, config: dict) -> list[Result]:
    """Numbers that depend on both random streams, so a cell that ran after another state would show."""
    generator = torch.Generator().manual_seed(cell.settings["seed"])
    time.sleep(config["pause"])
    walk = torch.randn(50, generator=generator).cumsum(0) + random.random() + torch.rand(()).item()
    if pids := os.environ.get("KILLED_RUNS_PIDS"):
        (Path(pids) / str(os.getpid())).touch()
    curve = Curve(list(range(50)), walk.tolist())
    if cell.name == os.environ.get("KILLED_RUNS_VICTIM"):
        os.kill(os.getpid(), signal.SIGKILL)
    return [Result(cell.settings["variant"], cell.settings["seed"], {"last": walk[-1].item()}, {"walk": curve})]


def experiment(pause: float) -> Experiment:
    cells = grid(variant=["a", "b"], seed=[0, 1, 2, 3])
    return Experiment("killed", ("GC-1",), {"pause": pause}, cells, run_cell)


def die_at(step: str, count: int) -> None:
    """SIGKILL this process at the count-th call of os.fsync or os.replace, before or after it."""
    when, name = step.split()
    real, calls = getattr(os, name), 0

    def bomb(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls == count and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        real(*arguments)
        if calls == count and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(worker.os, name, bomb)


def attempt(folder: Path, name: str, bomb: tuple[str, int] | None = None, kill_after: float | None = None) -> bool:
    """Fork one run into FOLDER/NAME; True when it was killed, False when it finished."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if bomb:
                die_at(*bomb)
            make(experiment(pause=0.005), folder / f"work-{name}", folder / name)
            code = 0
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit("a run failed by itself")
    return os.WIFSIGNALED(status)


def storm(folder: Path) -> None:
    steps = ["before fsync", "after fsync", "before replace", "after replace"]
    kills = sum(attempt(folder, "stormy", bomb=(step, count)) for step in steps for count in (1, 2))
    draw = random.Random(1)
    while kills < 12 and attempt(folder, "stormy", kill_after=draw.uniform(0.0, 0.05)):
        kills += 1
    while attempt(folder, "stormy", bomb=("before replace", 3)):  # at last it dies over the record itself
        kills += 1
    attempt(folder, "calm")
    print(f"{kills} kills")


if __name__ == "__main__":
    place = Path(sys.argv[2])
    if sys.argv[1] == "storm":
        storm(place)
    else:
        make(experiment(0.3), place / f"work-{sys.argv[3]}", place / sys.argv[3], processes=int(sys.argv[4]))
