"""An experiment that could not be recorded or resumed is refused when it is built, not after it has run."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from depthlab.runs import Cell, Curve, Experiment, Result, grid


def run_cell(cell: Cell, config: dict[str, Any]) -> list[Result]:
    return [Result("a", 0, {"loss": 1.0})]


HOME = "/" + "home/me"  # in two pieces, since no committed file may name such a folder
GOOD = {"id": "some-run", "claims": ("GC-1",), "config": {"n": 1}, "cells": grid(seed=[0]), "run_cell": run_cell}


def test_a_grid_is_the_product_of_its_axes() -> None:
    cells = grid(variant=["a", "b"], seed=[0, 1])
    assert [c.name for c in cells] == ["variant=a,seed=0", "variant=a,seed=1", "variant=b,seed=0", "variant=b,seed=1"]
    assert cells[2].settings == {"variant": "b", "seed": 0}


@pytest.mark.parametrize("axes", [{"variant": "relu"}, {"seed": []}])
def test_an_axis_that_is_text_or_empty_is_refused(axes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give a list with at least one value"):
        grid(**axes)


def test_every_setting_of_every_cell_is_part_of_the_hash() -> None:
    base = Experiment(**GOOD)
    assert base.config_hash == Experiment(**GOOD).config_hash
    assert base.config_hash != Experiment(**GOOD | {"config": {"n": 2}}).config_hash
    assert base.config_hash != Experiment(**GOOD | {"cells": grid(seed=[0, 1])}).config_hash
    assert base.config_hash != Experiment(**GOOD | {"cells": grid(seed=[1])}).config_hash


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"id": "../x"}, "unusable"),
        ({"id": "Ünicode"}, "unusable"),
        ({"claims": "GC-1"}, "claim"),
        ({"claims": ("GC-1", "GC-1")}, "different"),
        ({"claims": ("claim 1",)}, "claim 1"),
        ({"config": {"cells": 1}}, "cells"),
        ({"config": {"path": f"{HOME}/x"}}, "path on one machine"),
        ({"config": {"n": (1, 2)}}, "tuple"),
        ({"config": {"n": {1: 2}}}, "keys must be text"),
        ({"config": {"n": math.inf}}, "config.n"),
        ({"config": {"n": torch.tensor(1.0)}}, "Tensor"),
        ({"config": None}, "config dict"),
        ({"cells": []}, "no cells"),
        ({"cells": [Cell("a", {}), Cell("a", {"x": 1})]}, "two cells named 'a'"),
        ({"cells": [Cell("a", {"x": np.float32(1)})]}, "float32"),
        ({"run_cell": lambda cell, config: []}, "top of a module"),
    ],
)
def test_an_experiment_that_cannot_be_recorded_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Experiment(**GOOD | change)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (("", 0, {"loss": 1.0}), ValueError, "variant"),
        (("löss", 0, {"loss": 1.0}), ValueError, "variant"),
        (("a", -1, {"loss": 1.0}), ValueError, "seed"),
        (("a", True, {"loss": 1.0}), ValueError, "seed"),
        (("a", 0, {}), ValueError, "no metrics"),
        (("a", 0, {"a.b": 1.0}), ValueError, "a.b"),
        (("a", 0, {"loss": math.nan}), ValueError, "diverged="),
        (("a", 0, {"loss": -math.inf}), ValueError, "diverged="),
        (("a", 0, {"loss": True}), TypeError, "loss"),
        (("a", 0, {"loss": "1"}), TypeError, "loss"),
        (("a", 0, {"loss": torch.tensor(1.0)}), TypeError, r"\.item\(\)"),
        (("a", 0, {"loss": 10**400}), ValueError, "too large"),
        (("a", 0, {"loss": 1.0}, {"c": Curve([0], [math.nan])}), ValueError, "c not finite"),
        (("a", 0, {"loss": 1.0}, {"c": [0.0]}), TypeError, "Curve"),
        (("a", 0, {"loss": 1.0}, {}, True), TypeError, "diverged"),
    ],
)
def test_a_result_that_is_no_plain_finite_number_is_refused(arguments: tuple, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        Result(*arguments)


def test_numpy_scalars_become_plain_floats() -> None:
    result = Result("a", 0, {"loss": np.float32(0.5), "n": np.int64(3)})
    assert result.metrics == {"loss": 0.5, "n": 3.0}
    assert all(type(v) is float for v in result.metrics.values())


def test_a_curve_keeps_six_digits_of_y_and_at_most_200_points() -> None:
    curve = Curve([1, 12345678], np.array([1 / 3, 1e-7]))
    assert (curve.x, curve.y) == ([1.0, 12345678.0], [0.333333, 1e-7])
    Curve(range(200), range(200))
    for x, y in [(range(201), range(201)), ([], []), ([1], [1, 2])]:
        with pytest.raises(ValueError, match="1 to 200"):
            Curve(x, y)
    with pytest.raises(ValueError, match="not finite"):
        Curve([math.nan], [1.0])
