"""How the five variants differ: what enters a block, and what its query is read from.

The same L blocks are applied K times. e is the embedding of the tokens, x = norm(e), z the state that enters a block,
h the previous loop's output (normed). Every loop starts with z = x, and the first is the same for all variants.

Source: arXiv 2605.18797 (Fully Looped Transformers) and its code.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from depthlab.kernels.mgr import rms_normalize

VARIANTS = ("lt", "lt-input", "lt-attn", "flt-res", "flt")

# What enters a block, by its formula in z, h and e, each [B, T, C].
ENTERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "z": lambda z, h, e: z,
    "h": lambda z, h, e: h,
    "norm(e + h)": lambda z, h, e: rms_normalize(e + h),
    "norm(z + h)": lambda z, h, e: rms_normalize(z + h),
}


class Wiring(NamedTuple):
    """One block in one loop. enters: a key of `ENTERS`. query: "z" or "h"; keys and values are always read from z."""

    enters: str = "z"
    query: str = "z"


def wiring(variant: str, loop: int, block: int) -> Wiring:
    """The table of variants: `loop` and `block` count from 1."""
    if loop == 1:
        return Wiring()
    first = block == 1
    match variant:
        case "lt":
            return Wiring(enters="h") if first else Wiring()
        case "lt-input":  # input injection
            return Wiring(enters="norm(e + h)") if first else Wiring()
        case "lt-attn":  # attention injection (AI) in the first block
            return Wiring(query="h") if first else Wiring()
        case "flt-res":  # the fully looped architecture (FLA), without AI
            return Wiring(enters="norm(z + h)")
        case "flt":  # FLA and AI
            return Wiring(query="h")
    raise ValueError(f"variant={variant!r} is unknown; use one of {', '.join(VARIANTS)}.")
