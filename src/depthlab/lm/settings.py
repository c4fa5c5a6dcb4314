"""Checks of model configs: each error names the field, its value and what is allowed."""

import math
from numbers import Integral, Real
from typing import Any

import torch

from depthlab import residuals
from depthlab.kernels.mgr import BACKENDS


def check_count(name: str, value: Any, least: int = 1) -> None:
    """`value` is an integer of at least `least`: TypeError or ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r} is {type(value).__name__}; use an integer of at least {least}.")
    if value < least:
        raise ValueError(f"{name}={value} is not allowed; use at least {least}.")


def check_counts(config: Any, *names: str) -> None:
    """Every named field of `config` is an integer of at least 1: TypeError or ValueError otherwise."""
    for name in names:
        check_count(name, getattr(config, name))


def check_share(name: str, value: float) -> None:
    """`value` is a number in 0 <= value < 1, as a dropout must be: TypeError or ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} is {type(value).__name__}; use a number from 0 to below 1.")
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value} is not allowed; use a number from 0 to below 1.")


def check_positive(name: str, value: float) -> None:
    """`value` is a finite number above 0: TypeError or ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} is {type(value).__name__}; use a positive number.")
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value} is not allowed; use a positive number.")


def check_seed(name: str, value: int) -> None:
    """`value` is a seed that NumPy and torch both take: TypeError or ValueError otherwise."""
    check_count(name, value, 0)
    if value >= 2**32:
        raise ValueError(f"{name}={value} is not allowed; use 0 to 2**32 - 1.")


def check_choice(name: str, value: str, known: Any) -> None:
    """`value` is one of `known`: ValueError otherwise."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(known)}.")


def check_residual(residual: str, n_streams: int, n_layers: int, backend: str) -> None:
    """The scheme exists and can carry `n_streams` through `n_layers` blocks: ValueError otherwise."""
    check_choice("residual", residual, residuals.SCHEMES)
    check_choice("backend", backend, BACKENDS)
    if _fits(residual, n_streams, n_layers):
        return
    most = next((n for n in range(min(n_streams, 64), 0, -1) if _fits(residual, n, n_layers)), None)
    advice = "use more blocks" if most is None else f"use n_streams of at most {most}"
    deeper = next((n for n in range(n_layers + 1, n_layers + 65) if _fits(residual, n_streams, n)), None)
    if deeper is not None and most is not None:
        advice += f", or n_layers of at least {deeper}"
    raise ValueError(
        f"n_streams={n_streams} is too many for residual={residual!r} with n_layers={n_layers} "
        f"({2 * n_layers} sublayers); {advice}."
    )


def check_recompute(recompute: residuals.Recompute | None, residual: str, n_streams: int, n_layers: int) -> None:
    """The scheme can rebuild its streams, where it is asked to: TypeError or ValueError otherwise."""
    if recompute is not None:
        with torch.device("meta"):
            residuals.build(residual, 1, 2 * n_layers, n_streams=n_streams, recompute=recompute)


def _fits(residual: str, n_streams: int, n_layers: int) -> bool:
    try:
        with torch.device("meta"):
            residuals.build(residual, 1, 2 * n_layers, n_streams=n_streams)
    except ValueError:
        return False
    return True
