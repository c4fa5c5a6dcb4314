"""The bias formulas against the gates they invert, as torch computes them."""

import math

import mpmath  # torch needs sympy, which needs it
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthlab.theory import (
    additive_increment,
    carry_weight,
    gate_bias,
    initial_gate,
    smallest_valid_depth,
    stream_variance,
)

G_BASE = 1 / (1 + math.exp(3))


def torch_gate(gate: str, n: int, bias: float) -> float:
    """The gate at zero weights by its definition in mgr.md, computed by torch in float64."""
    bias_tensor = torch.tensor([bias], dtype=torch.float64)
    if gate == "independent":
        return torch.sigmoid(bias_tensor).item()
    return torch.softmax(torch.cat([bias_tensor, torch.zeros(n, dtype=torch.float64)]), 0)[1].item()


@pytest.mark.parametrize("gate", ["independent", "competitive"])
@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("layers", [13, 21, 45, 69, 381, 100_000])
def test_gate_at_zero_weights_is_base_gate_over_root_depth(gate, n, layers):
    wanted = G_BASE * math.sqrt(21 / layers)
    bias = gate_bias(gate, n, layers)
    assert torch_gate(gate, n, bias) == pytest.approx(wanted, rel=1e-12)
    assert initial_gate(gate, n, bias) == pytest.approx(wanted, rel=1e-12)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    gate=st.sampled_from(["independent", "competitive"]),
    n=st.integers(1, 16),
    beyond=st.integers(0, 10_000),
    base=st.floats(-12, 6),
    base_layers=st.integers(1, 500),
)
def test_gate_inverts_for_any_valid_setting(gate, n, beyond, base, base_layers):
    layers = smallest_valid_depth(gate, n, base, base_layers) + beyond
    wanted = math.sqrt(base_layers / layers) / (1 + math.exp(-base))
    bias = gate_bias(gate, n, layers, base, base_layers)
    assert math.isfinite(bias)
    assert torch_gate(gate, n, bias) == pytest.approx(wanted, rel=1e-12)


def test_known_values():
    assert gate_bias("independent", 4, 21) == pytest.approx(-3.0, abs=1e-14)  # the base depth gives the base bias back
    assert gate_bias("competitive", 4, 21) == pytest.approx(math.log(math.exp(3) + 1 - 4), abs=1e-14)
    assert gate_bias("competitive", 1, 21) == pytest.approx(
        3.0, abs=1e-14
    )  # one stream: a sigmoid with the sign turned
    assert gate_bias("independent", 1, 84) == pytest.approx(-math.log(2 * math.exp(3) + 1), abs=1e-14)


def test_competitive_gates_and_forget_share_sum_to_one():
    bias = gate_bias("competitive", 4, 21)
    shares = torch.softmax(torch.tensor([bias, 0, 0, 0, 0], dtype=torch.float64), 0)
    assert shares.sum().item() == pytest.approx(1, abs=1e-15)
    assert shares[1:].sum().item() == pytest.approx(4 * G_BASE, rel=1e-12)


@pytest.mark.parametrize("gate,other", [("independent", "competitive"), ("competitive", "independent")])
def test_form_of_the_other_gate_is_rejected(gate, other):
    wrong = torch_gate(gate, 4, gate_bias(other, 4, 21))
    assert abs(wrong / G_BASE - 1) > 3


def test_independent_gate_ignores_the_stream_count():
    assert len({gate_bias("independent", n, 50) for n in range(1, 17)}) == 1


def test_saturated_base_bias_keeps_its_digits():
    assert gate_bias("independent", 1, 21, base_bias=40.0) == pytest.approx(40.0, rel=1e-14)
    assert gate_bias("independent", 1, 21, base_bias=-600.0) == pytest.approx(-600.0, rel=1e-14)


@pytest.mark.parametrize("n", range(1, 17))
@pytest.mark.parametrize("gate", ["independent", "competitive"])
def test_smallest_valid_depth_is_the_first_that_works(gate, n):
    smallest = smallest_valid_depth(gate, n)
    ceiling = 1.0 if gate == "independent" else 1 / n
    valid = [layers for layers in range(1, 60) if G_BASE * math.sqrt(21 / layers) < ceiling]
    assert smallest == valid[0]
    for layers in range(1, smallest):
        with pytest.raises(ValueError, match=f"at least {smallest} mixing layers"):
            gate_bias(gate, n, layers)
    assert math.isfinite(gate_bias(gate, n, smallest))


def exact_excess(gate: str, n: int, layers: int, base: float, base_layers: int) -> mpmath.mpf:
    """1/g_L less the part that is no exponential, with 340 digits: enough for e^-700 beside 1."""
    with mpmath.workdps(340):
        return mpmath.sqrt(mpmath.mpf(layers) / base_layers) * (mpmath.exp(-mpmath.mpf(base)) + 1) - (
            1 if gate == "independent" else n
        )


# Bases that make the terms of 1/g cancel at a whole depth, where float64 finds a wrong bias, or none where one exists.
@pytest.mark.parametrize("base", [0.0, math.log(2), -math.log(3), -1.5, 5.0, 40.0, 700.0])
@pytest.mark.parametrize("gate,n", [("independent", 4), ("competitive", 2), ("competitive", 8), ("competitive", 48)])
@pytest.mark.parametrize("base_layers", [1, 21, 657, 1030])
def test_bias_and_smallest_depth_are_exact_at_the_boundary(gate, n, base, base_layers):
    smallest = smallest_valid_depth(gate, n, base, base_layers)
    assert exact_excess(gate, n, smallest, base, base_layers) > 0
    if smallest > 1:
        assert exact_excess(gate, n, smallest - 1, base, base_layers) <= 0
        with pytest.raises(ValueError, match=f"at least {smallest} mixing layers"):
            gate_bias(gate, n, smallest - 1, base, base_layers)
    for layers in (smallest, smallest + 1, 3 * smallest):
        with mpmath.workdps(340):
            wanted = float(mpmath.log(exact_excess(gate, n, layers, base, base_layers)))
        wanted = -wanted if gate == "independent" else wanted
        assert gate_bias(gate, n, layers, base, base_layers) == pytest.approx(wanted, rel=4e-16, abs=4e-16)


def test_open_base_gate_has_a_smallest_depth_too():
    assert smallest_valid_depth("independent", 2, base_bias=3.0) == 20
    with pytest.raises(ValueError, match="at least 20 mixing layers"):
        gate_bias("independent", 2, 19, base_bias=3.0)


@pytest.mark.parametrize(
    "change,error,says",
    [
        ({"gate": "softmax"}, ValueError, "use 'independent' or 'competitive'"),
        ({"gate": None}, ValueError, "use 'independent' or 'competitive'"),
        ({"gate": ["independent"]}, ValueError, "use 'independent' or 'competitive'"),
        ({"n_streams": 0}, ValueError, "n_streams must be at least 1"),
        ({"n_streams": True}, TypeError, "n_streams must be an integer"),
        ({"n_streams": 4.0}, TypeError, "n_streams must be an integer"),
        ({"n_streams": np.bool_(True)}, TypeError, "n_streams must be an integer"),
        ({"n_mixing_layers": -3}, ValueError, "n_mixing_layers must be at least 1"),
        ({"n_mixing_layers": "21"}, TypeError, "n_mixing_layers must be an integer"),
        ({"n_mixing_layers": float("nan")}, TypeError, "n_mixing_layers must be an integer"),
        ({"base_layers": 0}, ValueError, "base_layers must be at least 1"),
        ({"n_streams": 2**53 + 1}, ValueError, r"n_streams must be at most 2\*\*53"),
        ({"n_mixing_layers": 10**5000}, ValueError, r"n_mixing_layers must be at most 2\*\*53"),
        ({"base_bias": float("nan")}, ValueError, "finite"),
        ({"base_bias": float("inf")}, ValueError, "finite"),
        ({"base_bias": -1000.0}, ValueError, "within"),
        ({"base_bias": "-3"}, TypeError, "real number"),
        ({"base_bias": True}, TypeError, "real number"),
    ],
)
def test_bad_input_gets_one_sentence(change, error, says):
    arguments = {"gate": "independent", "n_streams": 4, "n_mixing_layers": 21} | change
    with pytest.raises(error, match=says) as caught:
        gate_bias(**arguments)
    message = str(caught.value)
    assert message.count("\n") == 0 and message.endswith(".")


def test_integer_like_counts_are_accepted():
    assert gate_bias("competitive", np.int64(4), torch.tensor(21)) == gate_bias("competitive", 4, 21)


@pytest.mark.parametrize("layers", [1, 6, 21, 381])
def test_moments_of_a_mixed_stream_match_the_written_out_weights(layers):
    g = G_BASE * math.sqrt(21 / layers)
    weights = np.array([1.0])  # weight of x_0, F_1, .. in the stream
    for _ in range(layers):
        weights = np.append((1 - g) * weights, g)
    assert weights.sum() == pytest.approx(1, rel=1e-12)
    assert carry_weight(g, layers) == pytest.approx(weights[0], rel=1e-11)
    assert stream_variance(g, layers) == pytest.approx((weights**2).sum(), rel=1e-11)
    assert additive_increment(g, layers) == pytest.approx(sum(g * g for _ in range(layers)), rel=1e-12)


def test_moments_at_the_two_ends_of_the_gate():
    assert carry_weight(0.0, 9) == stream_variance(0.0, 9) == 1.0  # a closed gate keeps x_0
    assert carry_weight(1.0, 9) == 0.0 and stream_variance(1.0, 9) == 1.0  # an open one holds the last update


@pytest.mark.parametrize("moment", [additive_increment, carry_weight, stream_variance])
@pytest.mark.parametrize(
    "g,layers,error,says",
    [
        (1.5, 3, ValueError, r"in \[0, 1\], got 1.5"),
        (-0.1, 3, ValueError, r"in \[0, 1\]"),
        (math.nan, 3, ValueError, r"in \[0, 1\], got nan"),
        ("0.5", 3, TypeError, "real number"),
        (0.5, -1, ValueError, "n_layers must be at least 0"),
        (0.5, 2.5, TypeError, "n_layers must be an integer"),
    ],
)
def test_moments_refuse_what_is_no_gate_or_depth(moment, g, layers, error, says):
    with pytest.raises(error, match=says):
        moment(g, layers)


def test_no_layer_leaves_the_stream_as_it_was():
    assert (additive_increment(0.3, 0), carry_weight(0.3, 0), stream_variance(0.3, 0)) == (0.0, 1.0, 1.0)
