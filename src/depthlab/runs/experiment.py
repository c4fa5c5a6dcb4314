"""What an experiment is: a config, a grid of cells, and a function that runs one of them."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from depthlab.runs.record import (
    CLAIM_ID,
    MAX_CURVE_POINTS,
    METRIC_NAME,
    RECORD_ID,
    VARIANT_NAME,
    config_faults,
    config_hash,
    number_fault,
)


@dataclass(frozen=True)
class Cell:
    """The smallest piece of an experiment that is finished or not: a name for people, settings for the code."""

    name: str
    settings: dict[str, Any]


def grid(**axes: Any) -> list[Cell]:
    """The product of the axes, the last one fastest: grid(variant=["a"], seed=[0, 1]) -> "variant=a,seed=0", ...

    Raises ValueError for an axis that is text (its letters would become values) or holds nothing.
    """
    for axis, values in axes.items():
        if isinstance(values, str) or not list(values):
            raise ValueError(f"grid got {axis}={values!r}; give a list with at least one value.")
    settings = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [Cell(",".join(f"{k}={v}" for k, v in s.items()), s) for s in settings]


@dataclass(frozen=True)
class Curve:
    """y over x, at most 200 points, y to 6 significant digits. NaN and inf in y only where the Result diverged."""

    x: list[float]
    y: list[float]

    def __post_init__(self) -> None:
        x, y = list(self.x), list(self.y)
        if len(x) != len(y) or not 1 <= len(x) <= MAX_CURVE_POINTS:
            raise ValueError(
                f"Curve got {len(x)} x and {len(y)} y values; give 1 to {MAX_CURVE_POINTS} of each, equally many "
                f"(keep every k-th point of a longer one)."
            )
        for fault in filter(None, map(number_fault, x)):
            raise ValueError(f"Curve got an x that {fault}; give finite numbers.")
        object.__setattr__(self, "x", [float(v) for v in x])
        object.__setattr__(self, "y", [_six_digits(_plain("Curve", "y", v)) for v in y])


@dataclass(frozen=True)
class Result:
    """What one variant gave with one seed.

    Attributes:
        metrics: plain numbers. They must be finite unless `diverged` says in a sentence why they are not; then NaN and
            inf are recorded as null, and no rule of the ledger can hold for them.
    Raises ValueError naming the variant and the metric, TypeError for what is not a number.
    """

    variant: str
    seed: int
    metrics: dict[str, float]
    curves: dict[str, Curve] = field(default_factory=dict)
    diverged: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.variant, str) or not VARIANT_NAME.fullmatch(self.variant):
            raise ValueError(f"Result got the variant {self.variant!r}; use ASCII letters, digits and _.,=+*@/()-.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ValueError(f"Result {self.variant} got the seed {self.seed!r}; give a whole number from 0 on.")
        if not self.metrics:
            raise ValueError(f"Result {self.variant}, seed {self.seed}, has no metrics; give at least one.")
        for name in [*self.metrics, *self.curves]:
            if not isinstance(name, str) or not METRIC_NAME.fullmatch(name):
                raise ValueError(f"Result {self.variant} got the name {name!r}; use ASCII letters, digits and _,=+@/-.")
        where = f"Result {self.variant}, seed {self.seed},"
        if not all(isinstance(curve, Curve) for curve in self.curves.values()) or not isinstance(self.diverged, str):
            raise TypeError(f"{where} needs curves of type Curve, and text in diverged (empty when it did not).")
        metrics = {name: _plain(where, name, value) for name, value in self.metrics.items()}
        object.__setattr__(self, "metrics", metrics)
        if not self.diverged:
            bad = [n for n, v in metrics.items() if not math.isfinite(v)]
            bad += [n for n, c in self.curves.items() if not all(map(math.isfinite, c.y))]
            if bad:
                raise ValueError(f"{where} has {bad[0]} not finite; if the run diverged, pass diverged='why'.")


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a record's numbers.

    Attributes:
        id: the record's name. claims: ids of the claims it bears on.
        config: JSON-able settings shared by all cells; hashed together with the cells' settings.
        run_cell: a function at the top of a module: run_cell(cell, config) -> list[Result]. Cells must not depend on
            each other or on their order; each starts with freshly seeded global generators and one torch thread.
    """

    id: str
    claims: tuple[str, ...]
    config: dict[str, Any]
    cells: list[Cell]
    run_cell: Callable[[Cell, dict[str, Any]], list[Result]]

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not RECORD_ID.fullmatch(self.id):
            raise ValueError(f"Experiment id {self.id!r} is unusable; give lower-case letters, digits and '-'.")
        for claim in [self.claims] if isinstance(self.claims, str) else self.claims:
            if not isinstance(claim, str) or not CLAIM_ID.fullmatch(claim):
                raise ValueError(f"Experiment {self.id} got the claim {claim!r}; give a tuple of ids like 'GC-1'.")
        if isinstance(self.claims, str) or len(set(self.claims)) != len(self.claims):
            raise ValueError(f"Experiment {self.id} got claims={self.claims!r}; give a tuple of different ids.")
        if not self.cells:
            raise ValueError(f"Experiment {self.id} has no cells; give at least one.")
        if not isinstance(self.config, dict) or "cells" in self.config:
            raise ValueError(f"Experiment {self.id} needs a config dict without the key 'cells', which is added.")
        names = [cell.name for cell in self.cells]
        twice = max(names, key=names.count)
        if len(set(names)) != len(names):
            raise ValueError(f"Experiment {self.id} has two cells named {twice!r}; names must differ.")
        found = config_faults(self.full_config)
        if found:
            raise ValueError(f"Experiment {self.id}: {found[0]}")
        if "<" in getattr(self.run_cell, "__qualname__", "<"):
            raise ValueError(f"Experiment {self.id} needs a run_cell at the top of a module, where workers find it.")

    @property
    def full_config(self) -> dict[str, Any]:
        """The config as recorded: with the settings of all cells under "cells"."""
        return {**self.config, "cells": [cell.settings for cell in self.cells]}

    @property
    def config_hash(self) -> str:
        """sha256 of the full config; a record with another one is stale."""
        return config_hash(self.full_config)


def _plain(where: str, name: str, value: Any) -> float:
    fault = number_fault(value)
    if fault is None or fault.endswith("not finite"):
        return float(value)
    error = TypeError if "not a number" in fault else ValueError
    raise error(f"{where} has {name} that {fault}; give a plain float (tensors: .item() or .tolist()).")


def _six_digits(value: float) -> float:
    return float(f"{float(value):.6g}")
