"""The recorded runs behind the question of `drift`: how the leading directions move, and what a held gap changes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from depthlab.continuity import drift, measuring, toy, training
from depthlab.continuity.batched import Net, Stack
from depthlab.continuity.recording import SEEDS, curve, device, divergence, short
from depthlab.runs import Cell, Experiment, Result

STEPS = (0, 20, 50, 100, 150, 200, 300, 450, 650, 900, 1200, 1600, 2000, 2500, 3000)
LONG_STEPS = (*STEPS, 4000, 5000, 6000, 7000, 8000, 9000, 10000, 11000, 12000)


def continuity_drift() -> Experiment:
    """Adam at rate 1e-3 and g = 0.32, the settings in which continuity was seen to form and to fall."""
    config = {
        "seeds": list(SEEDS),
        "rate": 1e-3,
        "init_scale": 0.32,
        "start": 100,  # where the interventions begin: continuity has formed by then
        "lag": 20,
        "batch_size": 16,
        "train_size": 8000,
        "width": 256,
        "depth": 16,
    }
    cells = [
        _cell("res-none", "res-none", STEPS, ("plain", "raise", "raise-control", "shrink", "shrink-control")),
        _cell("res-relu", "res-relu", STEPS, ("plain", "close", "close-control")),
        _cell("res-radial-unit", "res-radial-unit", STEPS, ("plain", "close", "close-control")),
        _cell("res-none-rms", "res-none-rms", STEPS, ("plain",)),
        _cell("res-none-long", "res-none", LONG_STEPS, ("plain",)),
        _cell("res-relu-long", "res-relu", LONG_STEPS, ("plain",)),
    ]
    return Experiment("continuity-drift", ("GC-2", "GC-3", "GC-4"), config, cells, run_cell)


def _cell(name: str, network: str, points: Sequence[int], arms: Sequence[str]) -> Cell:
    return Cell(name, {"name": name, "network": network, "points": list(points), "arms": list(arms)})


def run_cell(cell: Cell, config: dict[str, Any]) -> list[Result]:
    """All arms and seeds of one network as one stack; a variant is NAME/ARM."""
    settings = cell.settings
    network = replace(toy.VARIANTS[settings["network"]], width=config["width"], depth=config["depth"])
    arms = [arm for arm in settings["arms"] for _ in config["seeds"]]
    nets = [Net(seed, config["init_scale"], config["rate"]) for _ in settings["arms"] for seed in config["seeds"]]
    stack = Stack(
        network,
        nets,
        training.digits(config["train_size"]),
        steps=settings["points"][-1] + config["lag"],
        batch_size=config["batch_size"],
        device=device(),
        gradient_sum=False,
    )
    rows = followed_rows(stack, arms, settings["points"], config["start"], config["lag"])
    results = []
    for i, (arm, net) in enumerate(zip(arms, nets, strict=True)):
        names = [name for name in rows[i][-1] if name != "step"]
        curves = {name: curve(rows[i], name) for name in names}
        why = divergence(stack, i, rows[i])
        numbers = {name: float("nan") if why else short(v) for name, v in moments(rows[i], config["start"]).items()}
        results.append(Result(f"{settings['name']}/{arm}", net.seed, numbers, curves, why))
    return results


def followed_rows(
    stack: Stack, arms: Sequence[str], points: Sequence[int], start: int, lag: int
) -> list[list[dict[str, float]]]:
    """Train through `points`, intervening from step `start` on; rows[network][point].

    Each row has `drift.neighbour_scores`, `drift.own_scores` between this step and `lag` steps later, from `start` on
    those between `start` and this step (`since_start_*`), and the validation loss and accuracy.
    """
    rows: list[list[dict[str, float]]] = [[] for _ in stack.nets]
    reference = None
    for point in points:
        stack.advance(point)
        found, alive = drift.directions(stack)
        scores = drift.neighbour_scores(found)
        if point == start:
            reference = found
            if set(arms) != {"plain"}:
                stack.intervene(drift.GapControl(stack, arms))
        if reference is not None:
            since = drift.own_scores(reference, found)
            scores |= {name.replace("own", "since_start"): value for name, value in since.items()}
        params, _ = measuring.finite(stack)
        validation = training.evaluate_each(params, stack.config, stack.images.val_x, stack.images.val_y)
        scores["val_loss"], scores["val_accuracy"] = validation
        stack.advance(point + lag)
        later, alive_later = drift.directions(stack)
        scores |= drift.own_scores(found, later)
        numbers = {name: measuring.only(alive & alive_later, value).tolist() for name, value in scores.items()}
        for i, own in enumerate(rows):
            own.append({"step": point} | {name: values[i] for name, values in numbers.items()})
    return rows


def moments(rows: Sequence[dict[str, float]], start: int) -> dict[str, float]:
    """One run's numbers: at the end; at `start` (`*_at_start`); at the row of the largest `weight_v1` (`*_at_peak`);

    and, of the scores over one lag, means over the rows from `start` on (`*_mean`).
    """
    neighbours = [name for name in rows[0] if name.startswith(("weight_", "overlap_", "gap_"))]
    at_start = next(row for row in rows if row["step"] == start)
    peak = max(rows, key=lambda row: row["weight_v1"])
    numbers = {name: value for name, value in rows[-1].items() if name != "step"}
    numbers |= {f"{name}_at_start": at_start[name] for name in neighbours}
    numbers |= {f"{name}_at_peak": peak[name] for name in neighbours} | {"step_at_peak": peak["step"]}
    late = [row for row in rows if row["step"] >= start]
    lagged = [name for name in rows[0] if name.startswith("own_")]
    return numbers | {f"{name}_mean": sum(row[name] for row in late) / len(late) for name in lagged}
