"""How the fused kernels move one token's data between memory and registers.

A token's streams [N, C] are BLOCKS tiles [N_PAD, BLOCK_C], rows and the last columns padded. What is padded is never
loaded, reads as zero and is never stored. Loads cast to float32, stores cast to what the memory holds.
"""

import triton
import triton.language as tl


@triton.jit
def columns(BLOCK_C: tl.constexpr, VEC: tl.constexpr):
    """0 .. BLOCK_C - 1; each lane takes VEC of them in a row, so that a warp takes 32 VEC and no two share a column."""
    return tl.max_contiguous(tl.arange(0, BLOCK_C), VEC)


@triton.jit
def load_tile(ptr, rows, cols, N: tl.constexpr, C: tl.constexpr):
    """A block of one token's streams in float32, zero where padded: [N_PAD, BLOCK_C]."""
    mask = (rows < N)[:, None] & (cols < C)[None, :]
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_row(ptr, cols, C: tl.constexpr):
    """A block of one vector in float32, zero where padded: [BLOCK_C]."""
    return tl.load(ptr + cols, mask=cols < C, other=0.0).to(tl.float32)


@triton.jit
def load_bias(ptr, rows, N: tl.constexpr, KIND: tl.constexpr):
    """[N_PAD]: a bias for each stream; the one forget logit of "competitive" gates N times."""
    which = rows * 0 if KIND == "competitive" else rows
    return tl.load(ptr + which, mask=rows < N, other=-float("inf")).to(tl.float32)


@triton.jit
def store_tile(ptr, tile, rows, cols, N: tl.constexpr, C: tl.constexpr):
    mask = (rows < N)[:, None] & (cols < C)[None, :]
    tl.store(ptr + rows[:, None] * C + cols[None, :], tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_row(ptr, row, cols, C: tl.constexpr):
    tl.store(ptr + cols, row.to(ptr.dtype.element_ty), mask=cols < C)


@triton.jit
def store_numbers(ptr, x, rows, N: tl.constexpr):
    """One number a stream, each by itself: every thread holds all N, and a vector would go through shared memory."""
    for i in tl.static_range(N):
        tl.store(ptr + i, tl.sum(tl.where(rows == i, x, 0.0), 0))


@triton.jit
def load_numbers(ptr, rows, N: tl.constexpr):
    """One number a stream, zero where padded: [N_PAD]."""
    return tl.load(ptr + rows, mask=rows < N, other=0.0).to(tl.float32)


@triton.jit
def hold_tiles(
    ptr, rows, N: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, VEC: tl.constexpr, HELD: tl.constexpr
):
    """All of a token's tiles where they fit; nothing where they do not."""
    held = ()
    if HELD:
        for start in tl.static_range(0, C, BLOCK_C):
            held = held + (load_tile(ptr, rows, start + columns(BLOCK_C, VEC), N, C),)
    return held


@triton.jit
def hold_row(ptr, C: tl.constexpr, BLOCK_C: tl.constexpr, VEC: tl.constexpr, HELD: tl.constexpr):
    held = ()
    if HELD:
        for start in tl.static_range(0, C, BLOCK_C):
            held = held + (load_row(ptr, start + columns(BLOCK_C, VEC), C),)
    return held


@triton.jit
def get_tile(held, i: tl.constexpr, ptr, rows, cols, N: tl.constexpr, C: tl.constexpr, HELD: tl.constexpr):
    if HELD:
        return held[i]
    else:
        return load_tile(ptr, rows, cols, N, C)


@triton.jit
def get_row(held, i: tl.constexpr, ptr, cols, C: tl.constexpr, HELD: tl.constexpr):
    if HELD:
        return held[i]
    else:
        return load_row(ptr, cols, C)


@triton.jit
def plus(total, x, i: tl.constexpr):
    """total + x, or x at block 0: adding it to zeros would cost an instruction an element."""
    if i == 0:
        return x
    else:
        return total + x


@triton.jit
def add_row(held, i: tl.constexpr, ptr, row, cols, C: tl.constexpr, BLOCKS: tl.constexpr, HELD: tl.constexpr):
    """Add to block i of a vector that is held, or to the program's own copy of it in memory."""
    if HELD:
        out = ()
        for j in tl.static_range(BLOCKS):
            out = out + (held[j] + row if i == j else held[j],)
        return out
    else:
        store_row(ptr, load_row(ptr, cols, C) + row, cols, C)
        return held
