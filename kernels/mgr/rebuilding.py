"""How the backward kernel gets the streams of a layer that kept none: from what the layer made, but for exact rows.

Names and numbers are those of `kernels.py` and DERIVATION.md.
"""

import triton
import triton.language as tl

from depthlab.kernels.mgr.equations import odds_of, unmix
from depthlab.kernels.mgr.tiles import load_row, load_tile, store_tile


@triton.jit
def load_slots(ptr, rows, N: tl.constexpr):
    """One index a stream, -1 for none and where padded: [N_PAD]."""
    return tl.load(ptr + rows, mask=rows < N, other=-1)


@triton.jit
def put_exact_rows(tile, ptr, slots, cols, C: tl.constexpr):
    """The tile with row slots[i] of a matrix for its row i, where that is not negative."""
    known = (slots >= 0)[:, None]
    at = ptr + slots.to(tl.int64)[:, None] * C + cols[None, :]
    if tl.max(slots, 0) >= 0:  # most tokens have none
        tile = tl.where(known, tl.load(at, mask=known & (cols < C)[None, :], other=0.0).to(tl.float32), tile)
    return tile


@triton.jit
def rebuild_tile(
    m, f, odds, slots, values_ptr, s_ptr, rows, cols, N: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr
):
    """A tile of s by (18), its exact rows put in, also to memory.

    Rounded to what memory holds before anybody uses it, so that all gradients are those of what is handed on.
    """
    s = unmix(m, f, odds).to(s_ptr.dtype.element_ty).to(tl.float32)
    if EXACT:
        s = put_exact_rows(s, values_ptr, slots, cols, C)
    store_tile(s_ptr, s, rows, cols, N, C)
    return s


@triton.jit
def rebuild_streams(
    m_held,
    f_held,
    beta,
    slots,
    m_ptr,
    f_ptr,
    values_ptr,
    s_ptr,
    rows,
    first,
    N: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HELD: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One token's s to memory, and as tiles if HELD; else they can be loaded from there."""
    odds = odds_of(beta)
    s_held = ()
    if HELD:
        for i in tl.static_range((C + BLOCK_C - 1) // BLOCK_C):
            cols = i * BLOCK_C + first
            s = rebuild_tile(m_held[i], f_held[i], odds, slots, values_ptr, s_ptr, rows, cols, N, C, EXACT)
            s_held = s_held + (s,)
    else:
        for start in range(0, C, BLOCK_C):
            cols = start + first
            m = load_tile(m_ptr, rows, cols, N, C)
            f = load_row(f_ptr, cols, C)
            rebuild_tile(m, f, odds, slots, values_ptr, s_ptr, rows, cols, N, C, EXACT)
        tl.debug_barrier()  # what other threads of the program have stored is seen
    return s_held
