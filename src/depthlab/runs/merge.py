"""Results of single runs -> the seed-by-seed tables of a record."""

import math
from typing import Any

from depthlab.runs.experiment import Result
from depthlab.runs.worker import RunError


def merge(results: list[Result]) -> dict[str, Any]:
    """{seeds, metrics, curves, diverged} of a record; seeds ascend, variants keep the order of first appearance.

    A curve of a diverged run may end early: it is filled up with null. RunError when a (variant, seed) comes twice or
    is missing, or when two seeds of a variant differ in metrics, curves or a curve's x.
    """
    table: dict[str, dict[int, Result]] = {}
    for result in results:
        runs = table.setdefault(result.variant, {})
        if result.seed in runs:
            raise RunError(f"Variant {result.variant}, seed {result.seed}, came from two cells; each belongs to one.")
        runs[result.seed] = result
    seeds = sorted({result.seed for result in results})
    for variant, runs in table.items():
        missing = [seed for seed in seeds if seed not in runs]
        if missing:
            raise RunError(f"Variant {variant} has no result for seed {missing[0]}; each variant needs seeds {seeds}.")
    merged = {variant: _one_variant(variant, [runs[seed] for seed in seeds]) for variant, runs in table.items()}
    explained = {v: {str(s): runs[s].diverged for s in seeds if runs[s].diverged} for v, runs in table.items()}
    return {
        "seeds": seeds,
        "metrics": {variant: metrics for variant, (metrics, _) in merged.items()},
        "curves": {variant: curves for variant, (_, curves) in merged.items() if curves},
        "diverged": {variant: seeds for variant, seeds in explained.items() if seeds},
    }


def _one_variant(variant: str, runs: list[Result]) -> tuple[dict[str, list], dict[str, dict[str, list]]]:
    for run in runs[1:]:
        if set(run.metrics) != set(runs[0].metrics) or set(run.curves) != set(runs[0].curves):
            differ = sorted(set(run.metrics) ^ set(runs[0].metrics) or set(run.curves) ^ set(runs[0].curves))
            raise RunError(
                f"Variant {variant} has {differ[0]} for only one of the seeds {runs[0].seed} and {run.seed}; give the "
                f"same metrics and curves for every seed (nan where the run diverged)."
            )
    metrics = {name: [_null(run.metrics[name]) for run in runs] for name in runs[0].metrics}
    return metrics, {name: _one_curve(variant, name, runs) for name in runs[0].curves}


def _one_curve(variant: str, name: str, runs: list[Result]) -> dict[str, list]:
    x = max((run.curves[name].x for run in runs), key=len)
    rows = []
    for run in runs:
        curve = run.curves[name]
        if curve.x != x[: len(curve.x)] or (len(curve.x) < len(x) and not run.diverged):
            raise RunError(f"Curve {variant}.{name} has another x for seed {run.seed}; all seeds share one x.")
        rows.append([_null(v) for v in curve.y] + [None] * (len(x) - len(curve.x)))
    return {"x": x, "y": rows}


def _null(value: float) -> float | None:
    return value if math.isfinite(value) else None
