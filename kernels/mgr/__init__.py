"""Mixing and pooling of Multi-Gate Residuals (arXiv 2605.23259).

The three functions are all that is needed from outside; `reference` states each equation, DERIVATION.md derives them.
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
from depthlab.kernels.mgr.reference import rms_normalize

__all__ = [
    "BACKENDS",
    "MAX_STREAMS",
    "BackendUnavailable",
    "append_and_pool",
    "attn_pool",
    "check_tensor",
    "mix_and_pool",
    "resolve_backend",
    "rms_normalize",
]
