"""Recorded runs of the toy networks.

The settings were chosen, before these runs, among 17 settings of the residual network without activation as one where
its leading-direction continuity first forms and then falls; they are not a random draw, and a write-up must say so.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from depthlab.continuity import metrics, toy, training
from depthlab.runs import Cell, Curve, Experiment, Result

STEPS, LONG_STEPS, SEEDS = 3000, 8000, (0, 1, 2)
LEARNING_RATE, NO_RESIDUAL_LEARNING_RATE = 1e-3, 3e-4
RECORDED = ("res-relu", "res-gelu", "res-silu", "res-none", "res-radial", "no-res-tanh", "no-res-relu")


def continuity_mnist() -> Experiment:
    """The main variants, 3 seeds and 3,000 steps each, and the linear residual network for longer."""
    chosen = [(name, name, STEPS) for name in RECORDED] + [("res-none-long", "res-none", LONG_STEPS)]
    cells = [_cell(name, network, seed, steps) for seed in SEEDS for name, network, steps in chosen]
    config = {"batch_size": 16, "train_size": 8000, "points": 24, "gradient_batch": 1024}
    claims = ("GC-1", "GC-2", "GC-3", "GC-4", "GC-7", "GC-8")
    return Experiment("continuity-mnist", claims, config, cells, run_cell)


def _cell(name: str, network: str, seed: int, steps: int) -> Cell:
    rate = LEARNING_RATE if toy.VARIANTS[network].residual else NO_RESIDUAL_LEARNING_RATE
    settings = {"variant": name, "network": network, "seed": seed, "steps": steps, "learning_rate": rate}
    return Cell(f"variant={name},seed={seed}", settings)


def run_cell(cell: Cell, config: dict[str, Any]) -> list[Result]:
    """Train one network and measure it on log-spaced steps (see `training.measure` and `closing_metrics`)."""
    setting, images = cell.settings, training.digits(config["train_size"])
    network = toy.VARIANTS[setting["network"]]
    steps = training.log_steps(STEPS, config["points"])
    if setting["steps"] > STEPS:
        steps += list(range(STEPS + 500, setting["steps"] + 1, 500))
    rows, first, last, diverged = [], None, None, ""
    run = training.train(
        network,
        images,
        seed=setting["seed"],
        steps=setting["steps"],
        learning_rate=setting["learning_rate"],
        batch_size=config["batch_size"],
        snapshots=steps,
    )
    try:
        for last in run:
            first = first or last
            rows.append({"step": last.step} | training.measure(last, network, images, config["gradient_batch"]))
    except FloatingPointError as error:
        diverged = str(error)
    names = [name for name in rows[-1] if name != "step"]
    curves = {n: Curve(*zip(*((r["step"], r[n]) for r in rows if n in r), strict=True)) for n in names}
    numbers = closing_metrics(rows, network) | _networks_numbers(first, last, network, images)
    if diverged:  # what holds at the end of training is unknown then
        numbers = dict.fromkeys(numbers, math.nan)
    return [Result(setting["variant"], setting["seed"], numbers, curves, diverged)]


def closing_metrics(rows: Sequence[dict[str, float]], network: toy.ToyConfig) -> dict[str, float]:
    """One run's numbers from its measured rows.

    Everything of the last row; `grad_v1_init` and `grad_v1_no_ones_init`; where `weight_v1` peaked and the other scores
    there (`*_at_peak`); for residual networks the moment at which `weight_v1` first is half-way from chance to its peak
    (`onset_step`), and the size of the update then (`onset_ratio_spectral`, `.._frobenius`).
    """
    end = {name: value for name, value in rows[-1].items() if name != "step"}
    peak = max(rows, key=lambda row: row["weight_v1"])
    numbers = end | {"grad_v1_init": rows[0]["grad_v1"], "grad_v1_no_ones_init": rows[0]["grad_v1_no_ones"]}
    numbers |= {f"{name}_at_peak": peak[f"weight_{name}"] for name in ("v1", "gram", "overlap", "gap")}
    numbers["step_at_peak"] = peak["step"]
    if network.residual:
        numbers |= onset(rows, metrics.chance_level(network.width))
    return numbers


def onset(rows: Sequence[dict[str, float]], chance: float) -> dict[str, float]:
    """Where `weight_v1` first is half-way from `chance` to its peak: linear between the two measured rows around it.

    Where it starts above that, the first row; where even the peak is below chance, the peak.
    """
    names = ("step", "ratio_spectral", "ratio_frobenius")
    peak = max(row["weight_v1"] for row in rows)
    half = min((chance + peak) / 2, peak)
    reached = next(i for i, row in enumerate(rows) if row["weight_v1"] >= half)
    before, after = rows[max(reached - 1, 0)], rows[reached]
    rise = after["weight_v1"] - before["weight_v1"]
    share = (half - before["weight_v1"]) / rise if rise else 1.0
    return {f"onset_{name}": before[name] + share * (after[name] - before[name]) for name in names}


def _networks_numbers(
    first: training.Snapshot, last: training.Snapshot, network: toy.ToyConfig, images: training.Digits
) -> dict[str, float]:
    """Test loss and accuracy at the end, the lengths that activations meet and, for radial ones, tanh of them.

    That factor (mean and first percentile over layers and digits) is what x tanh(|x|) multiplies x by: 1 is x.
    """
    loss, accuracy = training.evaluate(last.params, network, images.test_x, images.test_y)
    numbers = {"test_loss": loss, "test_accuracy": accuracy}
    for when, snapshot in (("init", first), ("end", last)):
        norms = training.preactivation_norms(snapshot.params, network, images.val_x)
        numbers[f"preactivation_norm_{when}"] = float(norms.mean())
        if network.activation == "radial":
            numbers[f"radial_factor_{when}"] = float(torch.tanh(norms).mean())
            numbers[f"radial_factor_p01_{when}"] = float(torch.tanh(norms).flatten().quantile(0.01))
    return numbers
