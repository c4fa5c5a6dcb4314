"""Theory of convex residual streams: the norm bound and the gate's bias (Multi-Gate Residuals, arXiv 2605.23259)."""

from depthlab.theory.gate_bias import (
    GATES,
    additive_increment,
    carry_weight,
    gate_bias,
    initial_gate,
    smallest_valid_depth,
    stream_variance,
)
from depthlab.theory.norm_bound import carry, interpolate, norm_ratio, rounding_term, row_weight, unit_roundoff

__all__ = [
    "GATES",
    "additive_increment",
    "carry",
    "carry_weight",
    "gate_bias",
    "initial_gate",
    "interpolate",
    "norm_ratio",
    "rounding_term",
    "row_weight",
    "smallest_valid_depth",
    "stream_variance",
    "unit_roundoff",
]
