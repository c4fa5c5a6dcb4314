"""The learning rate's part in continuity: every wiring of the main record at five rates, and at other initial scales.

It separates three things that one setting confounds: the activation, how far training moves the weights
(`ratio_spectral`), and the rate that a choice by training loss would take (the least `train_loss`).
"""

from dataclasses import replace
from typing import Any

from depthlab.continuity import recording, toy, training
from depthlab.continuity.batched import Net
from depthlab.continuity.experiments import CONTROLS, LEARNING_RATE, MAIN
from depthlab.continuity.recording import SEEDS
from depthlab.runs import Cell, Experiment, Result, grid

RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
SCALE = 0.32  # of residual networks at all rates; the others keep the scale of their own at which a signal passes
OTHER_SCALES = (0.05, 0.1, 0.577)
LATE = 0.8  # `train_loss` is over the steps from this share of training on, as where the grid chooses by it
KEPT = (
    "weight_v1",
    "weight_v1_no_ones",
    "weight_gram",
    "weight_overlap",
    "weight_gap",
    "grad_v1_init",
    "grad_v1",
    "follows",
    "ratio_spectral",
    "ratio_frobenius",
    "train_loss",
    "test_accuracy",
)


def continuity_rates() -> Experiment:
    """Adam, 3,000 steps, 10 seeds; every rate and scale of a wiring is one cell and one stack."""
    # A small scale at a small rate: there the update outgrows the start although the rate is low.
    others = [(OTHER_SCALES[0], 1e-4), *((scale, LEARNING_RATE) for scale in OTHER_SCALES)]
    config = {
        "seeds": list(SEEDS),
        "steps": 3000,
        "rates": list(RATES),
        "scale": SCALE,
        "others": [list(pair) for pair in others],
        "batch_size": 16,
        "train_size": 8000,
        "gradient_batch": 1024,
        "width": 256,
        "depth": 16,
    }
    cells = grid(network=(*MAIN, *CONTROLS))
    claims = ("GC-1", "GC-2", "GC-3", "GC-4", "GC-5", "GC-6", "GC-9")
    return Experiment("continuity-rates", claims, config, cells, run_cell)


def run_cell(cell: Cell, config: dict[str, Any]) -> list[Result]:
    """End values of one wiring; a variant is NETWORK/g=SCALE/rate=RATE."""
    network = replace(toy.VARIANTS[cell.settings["network"]], width=config["width"], depth=config["depth"])
    own = config["scale"] if network.residual else network.init_scale
    settings = [(own, rate) for rate in config["rates"]]
    settings += [(scale, rate) for scale, rate in config["others"] if network.residual]
    settings.sort(key=lambda pair: pair[1])  # neighbours of equal rate are updated together
    nets = [Net(seed, scale, rate) for scale, rate in settings for seed in config["seeds"]]
    stack = recording.build(network, nets, training.digits(config["train_size"]), config["steps"], config)
    points = [0, round(LATE * config["steps"]), config["steps"]]
    rows = recording.measured_rows(stack, points, config["gradient_batch"])
    closing = recording.evaluated(stack)
    results = []
    for scale, rate in settings:
        at = [i for i, net in enumerate(nets) if (net.init_scale, net.rate) == (scale, rate)]
        variant = f"{cell.settings['network']}/g={scale:.4g}/rate={rate:g}"
        results += recording.to_results(variant, stack, at, rows, closing, keep=KEPT.__contains__)
    return results
