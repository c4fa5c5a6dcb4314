"""A check prints one fixed line when its relation holds, and raises with the value when it does not."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import depthlab
from depthlab.checks import CheckFailed, check, holds

TRUE = [
    (1.0, "<", 2.0),
    (2, "<=", 2),
    (3.0, ">", 2.0),
    (2, ">=", 2),
    (2, "==", 2.0),
    (0.0, "==", -0.0),
    (1.0, "in", (1.0, 2.0)),
    (2.0, "in", [1.0, 2.0]),
    (5.0, "<", math.inf),
    (torch.tensor(1.0), "<", torch.tensor(2.0)),
    (np.float32(1), "<", np.array([2.0])),
    (2**60 + 1, ">", 2**60),  # exact where float64 is not
    (True, "==", True),
]
FALSE = [
    (2.0, "<", 2.0),
    (2.1, "<=", 2.0),
    (2.0, ">", 2.0),
    (1.9, ">=", 2.0),
    (2.0, "==", 2.0000001),
    (0.999, "in", (1.0, 2.0)),
    (2.001, "in", (1.0, 2.0)),
    (2**60 + 1, "==", 2**60),
    *[(math.nan, relation, 1.0) for relation in ("<", "<=", ">", ">=", "==")],
    (math.nan, "in", (-math.inf, math.inf)),
    (torch.tensor(math.nan), "<", 1.0),
    (math.inf, "<", math.inf),
]


@pytest.mark.parametrize(("value", "relation", "bound"), TRUE)
def test_a_true_relation_prints_its_name_and_nothing_else(
    value: Any, relation: str, bound: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check("the gradients align", value, relation, bound) is None
    assert capsys.readouterr() == ("PASS  the gradients align\n", "")
    assert holds("the gradients align", value, relation, bound) is True
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("value", "relation", "bound"), FALSE)
def test_a_false_relation_raises_and_nan_never_passes(
    value: Any, relation: str, bound: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckFailed, match="the gradients align: expected"):
        check("the gradients align", value, relation, bound)
    assert capsys.readouterr().out == ""
    assert holds("the gradients align", value, relation, bound) is False


def test_the_failure_shows_value_relation_and_bound() -> None:
    with pytest.raises(CheckFailed, match=r"^loss: expected in \[0, 0.5\], got 0.75.$"):
        check("loss", 0.75, "in", (0, 0.5))
    with pytest.raises(CheckFailed, match=r"^count: expected == 3, got 4.$"):
        check("count", 4, "==", 3)
    with pytest.raises(CheckFailed, match="more than 40 digits"):
        check("count", 10**5000, "==", 3)


@pytest.mark.parametrize(
    ("value", "relation", "bound", "says"),
    [
        (0.50000001, "<=", 0.5, "expected <= 0.5, got 0.50000001."),
        (1.0, "==", 1.0000001, "expected == 1.0000001, got 1.0."),
        (2.0000001, "in", (1.0, 2.0), "expected in [1.0, 2.0], got 2.0000001."),
        (10**20 + 1, "==", 10**20, "expected == 100000000000000000000, got 100000000000000000001."),
    ],
)
def test_a_near_miss_shows_the_digits_that_decide(value: Any, relation: str, bound: Any, says: str) -> None:
    with pytest.raises(CheckFailed) as caught:
        check("x", value, relation, bound)
    assert str(caught.value) == f"x: {says}"


@pytest.mark.parametrize(
    ("value", "relation", "bound", "error"),
    [
        (1.0, "!=", 2.0, ValueError),
        (1.0, "=", 2.0, ValueError),
        (1.0, ["<"], 2.0, ValueError),
        (torch.ones(0), "<", 1.0, TypeError),
        (1.0, "<", math.nan, ValueError),
        (1.0, "in", (2.0, 1.0), ValueError),
        (1.0, "in", (math.nan, 1.0), ValueError),
        (1.0, "in", 1.0, ValueError),
        (1.0, "in", (1.0, 2.0, 3.0), ValueError),
        (1.0, "<", (1.0, 2.0), TypeError),
        ("1", "<", 2.0, TypeError),
        (None, "<", 2.0, TypeError),
        (1j, "==", 1j, TypeError),
        (torch.ones(2), "==", 1.0, TypeError),
        (np.ones(2), "==", 1.0, TypeError),
        (1.0, "<", torch.ones(2), TypeError),
    ],
)
def test_a_question_without_an_answer_is_refused_not_failed(value: Any, relation: str, bound: Any, error: type) -> None:
    with pytest.raises(error, match="the name") as caught:
        check("the name", value, relation, bound)
    assert not isinstance(caught.value, CheckFailed)


def test_check_is_what_the_package_exports() -> None:
    assert depthlab.check is check
    assert depthlab.CheckFailed is CheckFailed
    assert issubclass(CheckFailed, AssertionError)
