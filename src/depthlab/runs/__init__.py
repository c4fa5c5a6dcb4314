"""Run records: a committed JSON file for every measured number, and the resumable runner that makes them.

    def run_cell(cell, config):                     # at the top of a module
        loss = train(cell.settings["variant"], cell.settings["seed"], config["steps"])
        return [Result(cell.settings["variant"], cell.settings["seed"], {"loss": loss})]

    experiment = Experiment("my-run", ("GC-4",), {"steps": 100}, grid(variant=["relu"], seed=[0, 1, 2]), run_cell)
    record = make(experiment, processes=2)          # kill it and call it again: finished cells are kept
    record.values("relu.loss")                      # [one per seed]

A record is stale when its `config_hash` is no longer its experiment's. A run that diverged is recorded, not hidden:
`Result(..., diverged="loss not finite at step 40")` stores its non-finite numbers as null.
"""

from depthlab.runs.effects import Effect, paired, rank_correlation
from depthlab.runs.experiment import Cell, Curve, Experiment, Result, grid
from depthlab.runs.progress import in_ci
from depthlab.runs.provenance import provenance
from depthlab.runs.record import Record, RecordError, load, record_ids
from depthlab.runs.runner import make
from depthlab.runs.seeds import seed_everything
from depthlab.runs.worker import RunError, write_atomic

__all__ = [
    "Cell",
    "Curve",
    "Effect",
    "Experiment",
    "Record",
    "RecordError",
    "Result",
    "RunError",
    "grid",
    "in_ci",
    "load",
    "make",
    "paired",
    "provenance",
    "rank_correlation",
    "record_ids",
    "seed_everything",
    "write_atomic",
]
