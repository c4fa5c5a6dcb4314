"""What every recorded experiment on stacks shares: where a stack trains, what is measured on it, what is written."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from depthlab.continuity import measuring, metrics, toy, training
from depthlab.continuity.batched import Net, Stack
from depthlab.runs import Curve, Result

SEEDS = tuple(range(10))


def device() -> str:
    """Where the networks train: the GPU where there is one. A record's `hardware` says which."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def build(
    network: toy.ToyConfig,
    nets: Sequence[Net],
    images: training.Digits,
    steps: int,
    config: dict[str, Any],
    optimizer: str = "adam",
    gradient_sum: bool = True,
) -> Stack:
    """A stack on `device` with the batches of `config`."""
    return Stack(
        network,
        nets,
        images,
        steps=steps,
        optimizer=optimizer,
        batch_size=config["batch_size"],
        device=device(),
        gradient_sum=gradient_sum,
    )


def measured_rows(stack: Stack, points: Sequence[int], gradient_batch: int) -> list[list[dict[str, float]]]:
    """Train through `points` and measure at each: rows[network][point], with the names of `measuring.measure`.

    Beside them `train_loss`, the mean over the batches since the point before; at step 0 that of the first batch.
    """
    rows: list[list[dict[str, float]]] = [[] for _ in stack.nets]
    before = 0
    for point in stack.at_points(points):
        scores = {name: values.tolist() for name, values in measuring.measure(stack, gradient_batch).items()}
        recent = stack.losses[:, before:point].double().mean(1).tolist()
        scores["train_loss"] = recent
        for i, own in enumerate(rows):
            own.append({"step": point} | {name: values[i] for name, values in scores.items()})
        before = point
    for own, first in zip(rows, stack.losses[:, 0].tolist(), strict=True):
        if own[0]["step"] == 0:  # no step lies before it; the first batch's loss was not known then
            own[0]["train_loss"] = first
    return rows


def closing_scores(stack: Stack) -> dict[str, list[float]]:
    """Index-matched alignment, test loss and accuracy: what is measured at the end only, one number a network."""
    return {"weight_index_matched": measuring.index_matched(stack, threads=4).tolist()} | evaluated(stack)


def evaluated(stack: Stack) -> dict[str, list[float]]:
    """Test loss and accuracy, one number a network."""
    params, alive = measuring.finite(stack)
    loss, accuracy = training.evaluate_each(params, stack.config, stack.images.test_x, stack.images.test_y)
    scores = {"test_loss": loss, "test_accuracy": accuracy}
    return {name: measuring.only(alive, values).tolist() for name, values in scores.items()}


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


def to_results(
    variant: str,
    stack: Stack,
    at: Sequence[int],
    rows: Sequence[Sequence[dict[str, float]]],
    closing: dict[str, list[float]],
    curves: Sequence[str] = (),
    extra: dict[str, float] | None = None,
    keep: Callable[[str], bool] = lambda name: True,
) -> list[Result]:
    """One Result for each network `at`: `closing_metrics` of its rows and `closing`, NaN where it diverged; `extra`.

    `closing` has one number a network; of all metrics those are written whose name `keep` accepts.
    """
    results = []
    for i in at:
        last = {name: values[i] for name, values in closing.items()}
        why = divergence(stack, i, [*rows[i], last])
        # A diverged run has the same metrics, none of which is known: the zeros only stand in to name them.
        known = [dict.fromkeys(row, 0.0) for row in rows[i]] if why else rows[i]
        numbers = closing_metrics(known, stack.config) | last
        numbers = {name: math.nan if why else short(value) for name, value in numbers.items()} | (extra or {})
        numbers = {name: value for name, value in numbers.items() if keep(name)}
        drawn = {name: curve(rows[i], name) for name in curves}
        results.append(Result(variant, stack.nets[i].seed, numbers, drawn, why))
    return results


def divergence(stack: Stack, i: int, measured: Sequence[dict[str, float]] = ()) -> str:
    """One sentence where network i, or a number measured on it, is not finite, else ""."""
    step = stack.diverged_at()[i]
    if step:
        return f"The loss was not finite from step {step} on, at rate {stack.nets[i].rate:g}."
    if not stack.alive()[i]:
        return f"The parameters were not finite after step {stack.step}, at rate {stack.nets[i].rate:g}."
    bad = [name for numbers in measured for name, value in numbers.items() if not math.isfinite(value)]
    return f"Its {bad[0]} was not finite, at rate {stack.nets[i].rate:g}." if bad else ""


def curve(rows: Sequence[dict[str, float]], name: str) -> Curve:
    """One score over the steps at which it was measured."""
    measured = [row for row in rows if name in row]
    return Curve([row["step"] for row in measured], [short(row[name]) for row in measured])


def short(value: float) -> float:
    """Four significant digits: more than the seeds' spread needs, and a record of half the size."""
    return float(f"{value:.4g}")
