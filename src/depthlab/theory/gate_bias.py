"""The gate bias that makes the opening gate fall as 1/sqrt(depth), and what that buys.

Multi-Gate Residuals (arXiv 2605.23259), bias initialisation. With all gate weights at zero a gate is a function of its
bias alone:

    independent   g = sigmoid(b)          1/g = 1 + e^(-b)
    competitive   g = softmax([b, 0..])   1/g = n + e^b       (b is a *forget* logit: a larger b closes the gates)

The wanted gate at L mixing layers is g_L = sigmoid(base_bias) * sqrt(base_layers / L); solving for b gives `gate_bias`.
"""

import math
import numbers
import operator
from decimal import Context, Decimal
from typing import Any

GATES = ("independent", "competitive")
_MOST = 2**53  # of anything counted
# At the smallest valid depth the terms of 1/g cancel: float64 would lose digits of the bias there, even its existence.
_EXACT = Context(prec=60)


def gate_bias(gate: str, n_streams: int, n_mixing_layers: int, base_bias: float = -3.0, base_layers: int = 21) -> float:
    """Bias (independent) or forget logit (competitive) whose gate at zero weights is g_base * sqrt(base_layers / L).

        independent   b = -ln( sqrt(L / L_base) (e^(-b_base) + 1) - 1 )
        competitive   b =  ln( sqrt(L / L_base) (e^(-b_base) + 1) - n )

    Args:
        gate: "independent" or "competitive".
        n_streams: n >= 1. The independent gate does not depend on it.
        n_mixing_layers: L >= 1, the sublayers that interpolate (all L_total - (n - 1) after the accumulation phase).
        base_bias: b_base, the independent gate's bias at the reference depth; finite.
        base_layers: L_base, mixing layers of the reference network (12 blocks and 4 streams: 21).

    Returns:
        b, a finite float.

    Raises:
        ValueError: no bias gives that gate (the network is too shallow; the message names the smallest valid depth), an
            unknown gate, a count outside 1 .. 2**53, or a `base_bias` that is not finite or beyond +-700 (e^b
            overflows).
        TypeError: a count that is no integer, or a `base_bias` that is no number.
    """
    n, layers, base, base_l = _checked(gate, n_streams, n_mixing_layers, base_bias, base_layers)
    excess = _excess(_rest(gate, n), layers, base, base_l)
    if excess <= 0:
        smallest = smallest_valid_depth(gate, n, base, base_l)
        wanted = _sigmoid(base) * math.sqrt(base_l / layers)
        ceiling = "1" if gate == "independent" else f"1/{n}"
        raise ValueError(
            f"No {gate} gate over {n} streams opens to {wanted:.4g} as {layers} mixing layers ask (it stays below "
            f"{ceiling}); use at least {smallest} mixing layers, or a lower base_bias."
        )
    bias = float(excess.ln(_EXACT))
    return -bias if gate == "independent" else bias


def smallest_valid_depth(gate: str, n_streams: int, base_bias: float = -3.0, base_layers: int = 21) -> int:
    """Fewest mixing layers for which `gate_bias` exists: the least L with g_base * sqrt(base_layers / L) < ceiling.

    The ceiling is what the gate reaches in the limit: 1 for "independent", 1/n for "competitive".

    Raises:
        ValueError, TypeError: as `gate_bias`.
    """
    n, _, base, base_l = _checked(gate, n_streams, 1, base_bias, base_layers)
    rest = _rest(gate, n)
    root = _EXACT.divide(rest, _EXACT.add(1, _exp_minus(base)))
    layers = max(1, int(_EXACT.multiply(base_l, _EXACT.multiply(root, root))))
    while _excess(rest, layers, base, base_l) <= 0:  # the root of the equation, rounded down, is at most one below
        layers += 1
    return layers


def initial_gate(gate: str, n_streams: int, bias: float) -> float:
    """The gate at zero weights: sigmoid(bias) for "independent", 1 / (n + e^bias) for "competitive".

    Raises:
        ValueError, TypeError: as `gate_bias`.
    """
    n, _, bias, _ = _checked(gate, n_streams, 1, bias, 1)
    return _sigmoid(bias) if gate == "independent" else 1.0 / (n + math.exp(bias))


def additive_increment(g: float, n_layers: int) -> float:
    """L g^2: variance that L independent unit-variance updates, each times g, would add to a plain sum.

    Raises:
        ValueError: g outside [0, 1] or L < 0. TypeError: g is no number or L no integer.
    """
    g, layers = _gate_and_layers(g, n_layers)
    return layers * g * g


def carry_weight(g: float, n_layers: int) -> float:
    """(1 - g)^L: weight left on x_0 after L mixing layers with the gate g. Raises as `additive_increment`."""
    g, layers = _gate_and_layers(g, n_layers)
    return (1.0 - g) ** layers


def stream_variance(g: float, n_layers: int) -> float:
    """Variance of a mixed stream when x_0 and all L updates are independent with variance 1.

    s_L = (1-g)^L x_0 + sum_l g (1-g)^(L-l) F_l, hence (1-g)^(2L) + g/(2-g) * (1 - (1-g)^(2L)).
    Raises as `additive_increment`.
    """
    g, layers = _gate_and_layers(g, n_layers)
    kept = (1.0 - g) ** (2 * layers)
    return kept + g / (2.0 - g) * (1.0 - kept)


def _rest(gate: str, n: int) -> int:
    """What 1/g has besides the exponential: the 1 of a sigmoid, or n equal streams."""
    return 1 if gate == "independent" else n


def _excess(rest: int, layers: int, base_bias: float, base_layers: int) -> Decimal:
    """1/g_L - rest, with the exponential kept apart so that it is not lost beside the 1."""
    root = _EXACT.sqrt(_EXACT.divide(layers, base_layers))
    return _EXACT.add(_EXACT.subtract(root, rest), _EXACT.multiply(root, _exp_minus(base_bias)))


def _exp_minus(x: float) -> Decimal:
    return _EXACT.exp(Decimal(x).copy_negate())


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def _checked(gate: Any, n: Any, layers: Any, base: Any, base_layers: Any) -> tuple[int, int, float, int]:
    if gate not in GATES:
        raise ValueError(f"Unknown gate {gate!r}; use 'independent' or 'competitive'.")
    if isinstance(base, bool) or not isinstance(base, numbers.Real):
        raise TypeError(f"The bias must be a real number, got {base!r}.")
    if not abs(base) <= 700.0:  # also false for NaN
        raise ValueError(f"The bias must be finite and within +-700, got {base!r}.")
    counts = {"n_streams": n, "n_mixing_layers": layers, "base_layers": base_layers}
    whole = {name: _count(name, value) for name, value in counts.items()}
    return whole["n_streams"], whole["n_mixing_layers"], float(base), whole["base_layers"]


def _gate_and_layers(g: Any, n_layers: Any) -> tuple[float, int]:
    if isinstance(g, bool) or not isinstance(g, numbers.Real):
        raise TypeError(f"A gate must be a real number in [0, 1], got {g!r}.")
    if not 0.0 <= g <= 1.0:  # also false for NaN
        raise ValueError(f"A gate must lie in [0, 1], got {g!r}.")
    return float(g), _count("n_layers", n_layers, least=0)


def _count(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer of at least {least}, got {value!r}.")
    count = operator.index(value)
    if count < least:
        raise ValueError(f"{name} must be at least {least}, got {count}.")
    if count > _MOST:
        raise ValueError(f"{name} must be at most 2**53, got a larger integer.")
    return count
