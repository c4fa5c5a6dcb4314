"""The whole grid of toy networks: wiring x optimizer x initial scale, ten seeds each.

Learning rates are chosen by training loss and stability alone (`choose_rates`), in runs of half the length, from one
list for each optimizer, whatever the wiring and the scale; continuity is never looked at. The seeds that choose are
among those that are recorded. The other settings are those of `experiments`, which were picked because in the linear
residual network continuity forms and then falls there.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthlab.continuity import recording, toy, training
from depthlab.continuity.batched import Net
from depthlab.continuity.recording import SEEDS
from depthlab.runs import Cell, Experiment, Result, grid

SCALES = (0.05, 0.1, 0.32, 0.577)
# Without the residual connection a signal passes 16 layers only at scales near 1; below 0.3 nothing is left to train.
NO_RESIDUAL_SCALES = (0.32, 0.577, 1.0, 1.414)
NETWORKS = (
    "res-none",  # linear; the reference of all that follows
    "res-relu",
    "res-radial-unit",  # rotations commute, bounded increment
    "res-none-rms",  # rotations commute, every layer reads a vector of fixed length
    "res-gelu",
    "res-silu",
    "res-tanh",  # elementwise, bounded, odd
    "res-shrink",  # elementwise, unbounded, odd: no positive mean
    "res-radial",  # rotations commute, nearly the identity
    "res-clip",  # rotations commute, bounded increment, linear below the bound
    "res-none-clip",  # rotations commute, bounded input, linear below the bound
    "res-none-ln",
    "res-relu-ln",
    "no-res-tanh",
    "no-res-relu",
)
RATES = {
    "adam": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    "sgd": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    "muon": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    "adam-beta2-0": (3e-5, 1e-4, 3e-4, 1e-3, 3e-3),
}
CURVES_SCALE = 0.32  # the scale whose curves are recorded: all of Adam's, two of the others'
CURVES = (
    "weight_v1",
    "weight_gram",
    "weight_overlap",
    "weight_v1_in_span",
    "weight_gap",
    "grad_v1",
    "cumulative_v1",
    "follows",
    "ratio_spectral",
    "ratio_frobenius",
    "train_loss",
)
# Measured like all the others, but no question of ours needs it, and 2,400 runs make a large record.
LEFT_OUT = ("val_loss", "test_loss", "grad_u1", "weight_gram_no_ones", "gap_at_peak", "onset_step", "choice_loss")


def continuity_grid() -> Experiment:
    """15 wirings x 4 optimizers, each cell with four initial scales and ten seeds in one stack."""
    config = {
        "seeds": list(SEEDS),
        "choosing_seeds": list(SEEDS[:3]),
        "steps": 3000,
        "choosing_steps": 1500,
        "rates": {name: list(rates) for name, rates in RATES.items()},
        "scales": list(SCALES),
        "no_residual_scales": list(NO_RESIDUAL_SCALES),
        "points": {name: 20 if name == "adam" else 12 for name in RATES},
        "batch_size": 16,
        "train_size": 8000,
        "gradient_batch": 1024,
        "width": 256,
        "depth": 16,
    }
    claims = tuple(f"GC-{n}" for n in range(1, 10))
    return Experiment("continuity-grid", claims, config, grid(optimizer=RATES, network=NETWORKS), run_cell)


class Choice(NamedTuple):
    """The learning rate chosen for one initial scale."""

    rate: float
    at_edge: bool  # the first or last of the list: a better one may lie beyond
    loss: float
    stable: int  # how many rates of the list were stable


def run_cell(cell: Cell, config: dict[str, Any]) -> list[Result]:
    """Choose the rates of one wiring and optimizer, train all scales and seeds at them, measure on log-spaced steps."""
    network, optimizer = toy.VARIANTS[cell.settings["network"]], cell.settings["optimizer"]
    network = replace(network, width=config["width"], depth=config["depth"])
    images = training.digits(config["train_size"])
    scales = config["scales" if network.residual else "no_residual_scales"]
    chosen = choose_rates(network, optimizer, scales, images, config)
    nets = [Net(seed, scale, chosen[scale].rate) for scale in scales for seed in config["seeds"]]
    stack = recording.build(network, nets, images, config["steps"], config, optimizer)
    points = training.log_steps(config["steps"], config["points"][optimizer])
    rows = recording.measured_rows(stack, points, config["gradient_batch"])
    closing = recording.closing_scores(stack)
    names = CURVES if optimizer == "adam" else CURVES[:2]
    results = []
    for scale in scales:
        at = [i for i, net in enumerate(nets) if net.init_scale == scale]
        choice = {f"choice_{k}": float(v) for k, v in chosen[scale]._asdict().items()}
        variant = f"{cell.settings['network']}/{optimizer}/g={scale}"
        drawn = names if scale == CURVES_SCALE else ()
        results += recording.to_results(variant, stack, at, rows, closing, drawn, choice, lambda n: n not in LEFT_OUT)
    return results


def choose_rates(
    network: toy.ToyConfig, optimizer: str, scales: Sequence[float], images: training.Digits, config: dict[str, Any]
) -> dict[float, Choice]:
    """For each initial scale the rate of least training loss among the stable ones; see `choose`."""
    rates, seeds = config["rates"][optimizer], config["choosing_seeds"]
    nets = [Net(seed, scale, rate) for scale in scales for rate in rates for seed in seeds]
    stack = recording.build(network, nets, images, config["choosing_steps"], config, optimizer, gradient_sum=False)
    stack.advance(config["choosing_steps"])
    losses = stack.losses.cpu().double().view(len(scales), len(rates), len(seeds), -1)
    return {scale: choose(rates, of_scale) for scale, of_scale in zip(scales, losses, strict=True)}


def choose(rates: Sequence[float], losses: Tensor) -> Choice:
    """The rate with the least mean batch loss over the last fifth of training, [rates, seeds, steps] -> Choice.

    A rate is stable when for every seed all losses are finite and no tenth of training has a mean loss over 1.05 times
    that of the first tenth. Where no rate is stable, the lowest is taken, and `stable` is 0.
    """
    tenths = torch.stack([part.mean(-1) for part in losses.tensor_split(10, dim=-1)], dim=-1)
    stable = (tenths.isfinite().all(-1) & (tenths.amax(-1) <= 1.05 * tenths[..., 0])).all(-1)
    late = tenths[..., -2:].mean((-2, -1))
    order = [i for i in late.argsort().tolist() if stable[i]] or [0]
    best = order[0]
    return Choice(rates[best], best in (0, len(rates) - 1), float(late[best]), int(stable.sum()))
