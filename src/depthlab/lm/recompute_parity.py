"""Whether training goes alike with stored and with rebuilt streams: the record recompute-parity.

As in lm-parity both start from the same weights and read the same batches, so that only rounding tells them apart.
"""

import dataclasses
from typing import Any

from depthlab.lm.parity import train_once
from depthlab.residuals import Recompute
from depthlab.runs import Cell, Experiment, Result, grid

ID = "recompute-parity"
WAYS: dict[str, Recompute | None] = {"stored": None, "rebuilt": Recompute()}


def recompute_parity() -> Experiment:
    """GPT of 36 sublayers and width 128 on the bundled text, 500 steps in bfloat16, both gates, three seeds."""
    config = {
        "device": "cuda",
        "backend": "triton",
        "preset": "toy",
        "changes": {"n_layers": 18},
        "data": "sotu",
        "precision": "bfloat16",
        "steps": 500,
        "warm_up": 50,
        "batch_size": 32,
        "lr": 1e-3,
        "last": 20,
        "validation_tokens": 65_536,
    }
    cells = grid(residual=["mgr-competitive", "mgr-independent"], seed=[0, 1, 2])
    return Experiment(ID, ("MGR-10",), config, cells, run_cell)


def run_cell(cell: Cell, config: dict[str, Any]) -> list[Result]:
    """One gate and seed both ways; a variant is RESIDUAL/stored or RESIDUAL/rebuilt."""
    residual, seed = cell.settings["residual"], cell.settings["seed"]
    results = []
    for way, recompute in WAYS.items():
        changes = config["changes"] | {"recompute": recompute}
        result = train_once(residual, config["backend"], seed, config | {"changes": changes})
        results.append(dataclasses.replace(result, variant=f"{residual}/{way}"))
    return results
