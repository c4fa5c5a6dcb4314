"""`depthlab bench mgr`: the gate, then the parts that were asked for, each into its record."""

import sys
from pathlib import Path

import torch

from depthlab.kernels.bench import gate, mgr, needs, peers, profiling, suite
from depthlab.kernels.bench.gate import GateFailed
from depthlab.runs import Experiment, RunError, make

PARTS = ("tests", "bench", "inverting", "profile")


def run(parts: str, quick: bool, only: str, work_dir: Path, out_dir: Path) -> int:
    """Run some of PARTS (comma-separated) in their order and write a record each; the exit code.

    0: all records are written. 1: the kernels are wrong here (one sentence on stderr; no row is timed).

    Raises:
        BenchUnavailable: no CUDA device or no triton, naming what is missing.
        ValueError: an unknown part, or `only` matches no row.
    """
    chosen = [part.strip() for part in parts.split(",") if part.strip()]
    unknown = [part for part in chosen if part not in PARTS]
    if unknown or not chosen:
        raise ValueError(f"bench got the parts {parts!r}; give some of {', '.join(PARTS)}, comma-separated.")
    needs.require()
    todo = [experiment(part, quick, only) for part in PARTS if part in chosen]
    timed = [name for made in todo for cell in made.cells for name in cell.settings.get("implementations", [])]
    if lacking := peers.missing(timed):
        absent = f"{' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not installed"
        print(f"depthlab: {absent}; their rows stay empty. pip install 'depthlab[peers]' fills them.", file=sys.stderr)
    return make_all(todo, work_dir, out_dir, torch.device("cuda"))


def experiment(part: str, quick: bool = False, only: str = "") -> Experiment:
    """The experiment of one part; `quick` and `only` make the benchmark a trial."""
    if part == "bench":
        return mgr.trial(quick, only) if quick or only else mgr.bench()
    return {"tests": suite.tests, "inverting": mgr.inverting, "profile": profiling.profile}[part]()


def make_all(todo: list[Experiment], work_dir: Path, out_dir: Path, device: torch.device) -> int:
    """Gate first, so that a wrong kernel costs seconds; then each experiment."""
    found = gate.check([case for made in todo for case in mgr.rows_of(made)], device)
    if found:
        more = f" ({len(found)} faults in all)" if len(found) > 1 else ""
        print(f"depthlab: the kernels are wrong here, so nothing is timed: {found[0]}{more}", file=sys.stderr)
        return 1
    for made in todo:
        try:
            record = make(made, work_dir, out_dir)
        except RunError as error:
            if not isinstance(error.__cause__, GateFailed):
                raise
            print(f"depthlab: {error.__cause__}", file=sys.stderr)
            return 1
        if made.id == suite.ID and (failed := suite.failures(record)):
            print(f"depthlab: the kernels' tests fail here, so nothing is timed: {failed[0]}", file=sys.stderr)
            return 1
        print(f"{record.id}: {record.wall_time_s:.0f} s, in {out_dir / record.id}.json", flush=True)
    return 0
