"""Mixing and pooling of Multi-Gate Residuals (arXiv 2605.23259).

Three functions are a layer; `inverting` is one whose backward needs no input streams. `reference` states each equation,
DERIVATION.md derives them.
"""

from depthlab.kernels.mgr.function import (
    BACKENDS,
    MAX_STREAMS,
    BackendUnavailable,
    append_and_pool,
    attn_pool,
    check_tensor,
    mix_and_pool,
    resolve_backend,
)
from depthlab.kernels.mgr.inverting import (
    ExactRows,
    mix_and_pool_backward,
    mix_and_pool_forward,
    mix_and_pool_gradients,
    unmix,
)
from depthlab.kernels.mgr.reference import rms_normalize
from depthlab.kernels.mgr.rounding import Carried, carry_rounding

__all__ = [
    "BACKENDS",
    "MAX_STREAMS",
    "BackendUnavailable",
    "Carried",
    "ExactRows",
    "append_and_pool",
    "attn_pool",
    "carry_rounding",
    "check_tensor",
    "mix_and_pool",
    "mix_and_pool_backward",
    "mix_and_pool_forward",
    "mix_and_pool_gradients",
    "resolve_backend",
    "rms_normalize",
    "unmix",
]
