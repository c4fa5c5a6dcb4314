"""The main record: every wiring at one stated setting, ten seeds.

The settings were chosen, before these runs, among 17 settings of the residual network without activation as one where
its leading-direction continuity first forms and then falls; they are not a random draw, and a write-up must say so.
What other learning rates and initial scales give is recorded by `rates_experiments` and `grid_experiments`.
"""

from dataclasses import replace
from typing import Any

import torch

from depthlab.continuity import measuring, recording, toy, training
from depthlab.continuity.batched import Net, Stack
from depthlab.continuity.recording import SEEDS
from depthlab.runs import Cell, Experiment, Result

STEPS, LONG_STEPS = 3000, 8000
LEARNING_RATE, NO_RESIDUAL_LEARNING_RATE = 1e-3, 3e-4
MAIN = ("res-relu", "res-gelu", "res-silu", "res-none", "res-radial", "no-res-tanh", "no-res-relu")
CONTROLS = (
    "res-radial-unit",  # rotations commute, bounded increment
    "res-none-rms",  # rotations commute, every layer reads a vector of fixed length
    "res-tanh",  # elementwise, bounded, odd
    "res-clip",  # rotations commute, bounded increment, linear below the bound
    "res-none-clip",  # rotations commute, bounded input, linear below the bound
    "res-shrink",  # elementwise, unbounded, odd: no positive mean
    "res-none-ln",
    "res-relu-ln",
)
CURVES = (
    "weight_v1",
    "weight_v1_no_ones",
    "weight_gram",
    "weight_overlap",
    "weight_v1_in_span",
    "weight_gap",
    "grad_v1",
    "grad_v1_no_ones",
    "cumulative_v1",
    "follows",
    "ratio_spectral",
    "ratio_frobenius",
    "train_loss",
    "val_loss",
)


def continuity_mnist() -> Experiment:
    """The main variants and the controls, 10 seeds and 3,000 steps each, and the linear residual network for longer."""
    chosen = [("res-none-long", "res-none", LONG_STEPS), *((name, name, STEPS) for name in (*MAIN, *CONTROLS))]
    cells = [_cell(name, network, steps) for name, network, steps in chosen]
    config = {
        "seeds": list(SEEDS),
        "batch_size": 16,
        "train_size": 8000,
        "points": 24,
        "gradient_batch": 1024,
        "width": 256,
        "depth": 16,
    }
    claims = ("GC-1", "GC-2", "GC-3", "GC-4", "GC-7", "GC-8")
    return Experiment("continuity-mnist", claims, config, cells, run_cell)


def _cell(name: str, network: str, steps: int) -> Cell:
    wiring = toy.VARIANTS[network]
    rate = LEARNING_RATE if wiring.residual else NO_RESIDUAL_LEARNING_RATE
    settings = {"variant": name, "network": network, "steps": steps, "learning_rate": rate}
    return Cell(f"variant={name}", settings | {"init_scale": wiring.init_scale})


def run_cell(cell: Cell, config: dict[str, Any]) -> list[Result]:
    """Train all seeds of one network as one stack and measure them on log-spaced steps."""
    setting, images = cell.settings, training.digits(config["train_size"])
    network = replace(toy.VARIANTS[setting["network"]], width=config["width"], depth=config["depth"])
    nets = [Net(seed, setting["init_scale"], setting["learning_rate"]) for seed in config["seeds"]]
    points = training.log_steps(min(setting["steps"], STEPS), config["points"])
    points += range(STEPS + 500, setting["steps"] + 1, 500)
    stack = recording.build(network, nets, images, setting["steps"], config)
    closing = activation_numbers(stack, "init")
    rows = recording.measured_rows(stack, points, config["gradient_batch"])
    closing |= activation_numbers(stack, "end") | recording.closing_scores(stack)
    return recording.to_results(setting["variant"], stack, range(len(nets)), rows, closing, CURVES)


def activation_numbers(stack: Stack, when: str) -> dict[str, list[float]]:
    """The mean length that activations meet on the validation digits and, for radial ones, tanh of that length.

    That factor (mean and first percentile over layers and digits) is what x tanh(|x|) multiplies x by: 1 is x.
    One number a network.
    """
    params, alive = measuring.finite(stack)
    norms = training.preactivation_norms(params, stack.config, stack.images.val_x).flatten(1)
    numbers = {f"preactivation_norm_{when}": norms.mean(1)}
    if stack.config.activation == "radial":
        factor = torch.tanh(norms)
        numbers[f"radial_factor_{when}"] = factor.mean(1)
        numbers[f"radial_factor_p01_{when}"] = factor.quantile(0.01, dim=1)
    return {name: measuring.only(alive, values).tolist() for name, values in numbers.items()}
