"""The fused kernels of Multi-Gate Residuals: one layer, forward and backward.

A layer makes its streams (KIND: "independent" or "competitive" gates mix the update into them, "append" makes the update
one more stream, "read" takes them as they are) and pools what the next sublayer reads. Numbers (1) to (17) are
DERIVATION.md's stages.

A program walks over tokens. A token's streams are a tile [n, C], padded to powers of two, loaded once, cast to float32
and held in registers from the first sum to the last store. A tile too large for that is visited BLOCK_C columns at a
time: each `for start` loop below is one visit. With one block the compiler unrolls these loops and merges their equal
loads, so both cases are one source.

Legend: s, f streams and update; m the streams after mixing or appending; g, big_g the gradients of the read and of m;
r inverse RMS; z, beta gate scores and gates; a, alpha pool scores and weights; d_x the gradient of x. Upper case is
fixed when the kernel is compiled.
"""

from typing import NamedTuple

import triton
import triton.language as tl

MAX_TILE_FORWARD = 16384
MAX_TILE_BACKWARD = 8192


@triton.jit
def load_tile(ptr, rows, cols, N: tl.constexpr, C: tl.constexpr):
    """One token's streams in float32, zero where padded: [N_PAD, BLOCK_C]."""
    mask = (rows < N)[:, None] & (cols < C)[None, :]
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_row(ptr, cols, C: tl.constexpr):
    """One vector in float32, zero where padded: [BLOCK_C]."""
    return tl.load(ptr + cols, mask=cols < C, other=0.0).to(tl.float32)


@triton.jit
def store_tile(ptr, tile, rows, cols, N: tl.constexpr, C: tl.constexpr):
    mask = (rows < N)[:, None] & (cols < C)[None, :]
    tl.store(ptr + rows[:, None] * C + cols[None, :], tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_row(ptr, row, cols, C: tl.constexpr):
    tl.store(ptr + cols, row.to(ptr.dtype.element_ty), mask=cols < C)


@triton.jit
def weight_row(held, ptr, cols, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """A weight's columns: from the registers that hold all of it, or from memory where they cannot."""
    if BLOCK_C >= C:
        return held
    else:
        return load_row(ptr, cols, C)


@triton.jit
def inverse_rms(squares, eps, C: tl.constexpr):
    """Equation (1) from the sum of squares."""
    return tl.rsqrt(squares / C + eps)


@triton.jit
def softmax(x, rows, N: tl.constexpr):
    """Over the first N values; zero where padded."""
    x = tl.where(rows < N, x, -float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    return e / tl.sum(e, 0)


@triton.jit
def gates(z, bias, rows, N: tl.constexpr, KIND: tl.constexpr):
    """Equations (3i) and (3c): beta [N_PAD], zero where padded, and beta_0, the share that no stream takes."""
    if KIND == "competitive":
        z = tl.where(rows < N, z, -float("inf"))
        forget = tl.max(bias, 0)  # one value, N_PAD times
        top = tl.maximum(tl.max(z, 0), forget)
        e = tl.exp(z - top)
        e_0 = tl.exp(forget - top)
        total = tl.sum(e, 0) + e_0
        return e / total, e_0 / total
    else:
        return tl.where(rows < N, tl.sigmoid(z + bias), 0.0), 0.0


@triton.jit
def interpolate(s, f, beta):
    """Equation (4), stepped from whichever end is nearer, so that both end points are exact."""
    near = beta < 0.5
    return tl.where(near, s, f) + tl.where(near, beta, beta - 1.0) * (f - s)


@triton.jit
def layer_tile(s_ptr, f_ptr, beta, rows, cols, N: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr):
    """The streams that are stored and read, m, in float32: [N_PAD, BLOCK_C]."""
    if KIND == "read":
        return load_tile(s_ptr, rows, cols, N, C)
    elif KIND == "append":
        s = load_tile(s_ptr, rows, cols, N - 1, C)
        return tl.where((rows == N - 1)[:, None], load_row(f_ptr, cols, C)[None, :], s)
    else:
        return interpolate(load_tile(s_ptr, rows, cols, N, C), load_row(f_ptr, cols, C)[None, :], beta[:, None])


@triton.jit
def layer_fwd_kernel(
    streams_ptr,  # [tokens, N, C]; "append": [tokens, N - 1, C]
    update_ptr,  # [tokens, C]; not used by "read"
    w_gate_ptr,  # [C]; gates only, like the bias and beta
    bias_ptr,  # [N], "competitive": [1]
    w_pool_ptr,  # [C]
    mixed_ptr,  # [tokens, N, C]; not used by "read"
    pooled_ptr,  # [tokens, C]
    beta_ptr,  # [tokens, N]
    n_tokens,
    eps,
    KIND: tl.constexpr,
    NORMALIZE: tl.constexpr,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    MIXES: tl.constexpr = KIND == "independent" or KIND == "competitive"
    N_IN: tl.constexpr = N - 1 if KIND == "append" else N
    scale = C**-0.5
    rows = tl.arange(0, N_PAD)
    first = tl.arange(0, BLOCK_C)
    w_pool = load_row(w_pool_ptr, first, C)
    w_gate = w_pool
    bias = tl.zeros([N_PAD], tl.float32)
    if MIXES:
        w_gate = load_row(w_gate_ptr, first, C)
        which = rows * 0 if KIND == "competitive" else rows
        bias = tl.load(bias_ptr + which, mask=rows < N, other=-float("inf")).to(tl.float32)

    for token in tl.range(tl.program_id(0), n_tokens, tl.num_programs(0), num_stages=STAGES):
        at = tl.cast(token, tl.int64)
        s_ptr = streams_ptr + at * N_IN * C
        f_ptr = update_ptr + at * C

        beta = tl.zeros([N_PAD], tl.float32)
        if MIXES:  # (1), (2), (3)
            squares = tl.zeros([N_PAD], tl.float32)
            along = tl.zeros([N_PAD], tl.float32)
            for start in range(0, C, BLOCK_C):
                cols = start + first
                s = load_tile(s_ptr, rows, cols, N, C)
                squares += tl.sum(s * s, 1)
                along += tl.sum(s * weight_row(w_gate, w_gate_ptr, cols, C, BLOCK_C)[None, :], 1)
            z = along * inverse_rms(squares, eps, C) * scale
            beta, _ = gates(z, bias, rows, N, KIND)
            tl.store(beta_ptr + at * N + rows, beta, mask=rows < N)

        squares = tl.zeros([N_PAD], tl.float32)  # (4), (5), (6)
        along = tl.zeros([N_PAD], tl.float32)
        for start in range(0, C, BLOCK_C):
            cols = start + first
            m = layer_tile(s_ptr, f_ptr, beta, rows, cols, N, C, KIND)
            squares += tl.sum(m * m, 1)
            along += tl.sum(m * weight_row(w_pool, w_pool_ptr, cols, C, BLOCK_C)[None, :], 1)
        alpha = softmax(along * inverse_rms(squares, eps, C) * scale, rows, N)

        rho = 1.0
        if NORMALIZE:  # (8)
            pp = 0.0
            for start in range(0, C, BLOCK_C):
                m = layer_tile(s_ptr, f_ptr, beta, rows, start + first, N, C, KIND)
                p = tl.sum(alpha[:, None] * m, 0)
                pp += tl.sum(p * p, 0)
            rho = inverse_rms(pp, eps, C)

        for start in range(0, C, BLOCK_C):  # (7)
            cols = start + first
            m = layer_tile(s_ptr, f_ptr, beta, rows, cols, N, C, KIND)
            if KIND != "read":
                store_tile(mixed_ptr + at * N * C, m, rows, cols, N, C)
            store_row(pooled_ptr + at * C, rho * tl.sum(alpha[:, None] * m, 0), cols, C)


@triton.jit
def layer_bwd_kernel(
    streams_ptr,
    update_ptr,
    w_gate_ptr,
    bias_ptr,
    w_pool_ptr,
    d_mixed_ptr,  # [tokens, N, C]; used if HAS_D_MIXED
    d_pooled_ptr,  # [tokens, C]
    d_beta_ptr,  # [tokens, N]; used if HAS_D_BETA
    d_streams_ptr,  # as streams
    d_update_ptr,  # as update
    d_weights_ptr,  # [programs, 2 C + N]: of w_gate, w_pool and the bias, summed over this program's tokens
    n_tokens,
    eps,
    HAS_D_MIXED: tl.constexpr,
    HAS_D_BETA: tl.constexpr,
    KIND: tl.constexpr,
    NORMALIZE: tl.constexpr,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    MIXES: tl.constexpr = KIND == "independent" or KIND == "competitive"
    N_IN: tl.constexpr = N - 1 if KIND == "append" else N
    HELD: tl.constexpr = BLOCK_C >= C
    scale = C**-0.5
    rows = tl.arange(0, N_PAD)
    first = tl.arange(0, BLOCK_C)
    w_pool = load_row(w_pool_ptr, first, C)
    w_gate = w_pool
    bias = tl.zeros([N_PAD], tl.float32)
    if MIXES:
        w_gate = load_row(w_gate_ptr, first, C)
        which = rows * 0 if KIND == "competitive" else rows
        bias = tl.load(bias_ptr + which, mask=rows < N, other=-float("inf")).to(tl.float32)
    own_ptr = d_weights_ptr + tl.program_id(0).to(tl.int64) * (2 * C + N)
    d_bias = tl.zeros([N_PAD], tl.float32)
    d_w_gate = tl.zeros([BLOCK_C], tl.float32)
    d_w_pool = tl.zeros([BLOCK_C], tl.float32)

    for token in tl.range(tl.program_id(0), n_tokens, tl.num_programs(0), num_stages=STAGES):
        at = tl.cast(token, tl.int64)
        s_ptr = streams_ptr + at * N_IN * C
        f_ptr = update_ptr + at * C
        g_ptr = d_pooled_ptr + at * C

        beta = tl.zeros([N_PAD], tl.float32)
        beta_0 = 0.0
        if MIXES:  # (1), (2), (3) again
            squares = tl.zeros([N_PAD], tl.float32)
            along = tl.zeros([N_PAD], tl.float32)
            for start in range(0, C, BLOCK_C):
                cols = start + first
                s = load_tile(s_ptr, rows, cols, N, C)
                squares += tl.sum(s * s, 1)
                along += tl.sum(s * weight_row(w_gate, w_gate_ptr, cols, C, BLOCK_C)[None, :], 1)
            r = inverse_rms(squares, eps, C)
            z = along * r * scale
            beta, beta_0 = gates(z, bias, rows, N, KIND)

        squares = tl.zeros([N_PAD], tl.float32)  # (4), (5), (6) again, and g . m
        along = tl.zeros([N_PAD], tl.float32)
        gm = tl.zeros([N_PAD], tl.float32)
        for start in range(0, C, BLOCK_C):
            cols = start + first
            m = layer_tile(s_ptr, f_ptr, beta, rows, cols, N, C, KIND)
            squares += tl.sum(m * m, 1)
            along += tl.sum(m * weight_row(w_pool, w_pool_ptr, cols, C, BLOCK_C)[None, :], 1)
            gm += tl.sum(m * load_row(g_ptr, cols, C)[None, :], 1)
        r_m = inverse_rms(squares, eps, C)
        a = along * r_m * scale
        alpha = softmax(a, rows, N)

        rho = 1.0
        shrink = 0.0
        if NORMALIZE:  # (9): g_p = rho g - shrink p
            pp = 0.0
            pm = tl.zeros([N_PAD], tl.float32)
            for start in range(0, C, BLOCK_C):
                m = layer_tile(s_ptr, f_ptr, beta, rows, start + first, N, C, KIND)
                p = tl.sum(alpha[:, None] * m, 0)
                pp += tl.sum(p * p, 0)
                pm += tl.sum(m * p[None, :], 1)
            rho = inverse_rms(pp, eps, C)
            shrink = rho * rho * rho * tl.sum(alpha * gm, 0) / C
            gm = rho * gm - shrink * pm
        d_a = alpha * (gm - tl.sum(alpha * gm, 0))  # (10)
        to_w_pool = d_a * r_m * scale
        to_m = d_a * a * r_m * r_m / C

        if MIXES:  # (11), (13)
            d_beta = tl.zeros([N_PAD], tl.float32)
            for start in range(0, C, BLOCK_C):
                cols = start + first
                s = load_tile(s_ptr, rows, cols, N, C)
                f = load_row(f_ptr, cols, C)[None, :]
                m = interpolate(s, f, beta[:, None])
                p = tl.sum(alpha[:, None] * m, 0)
                g_p = (rho * load_row(g_ptr, cols, C) - shrink * p)[None, :]
                w = weight_row(w_pool, w_pool_ptr, cols, C, BLOCK_C)[None, :]
                d_m = alpha[:, None] * g_p + to_w_pool[:, None] * w - to_m[:, None] * m
                if HAS_D_MIXED:
                    d_m += load_tile(d_mixed_ptr + at * N * C, rows, cols, N, C)
                d_beta += tl.sum(d_m * (f - s), 1)
            if HAS_D_BETA:
                d_beta += tl.load(d_beta_ptr + at * N + rows, mask=rows < N, other=0.0).to(tl.float32)
            if KIND == "competitive":  # (14c)
                mean = tl.sum(beta * d_beta, 0)
                d_z = beta * (d_beta - mean)
                d_bias -= tl.where(rows == 0, beta_0 * mean, 0.0)
            else:  # (14i)
                d_z = beta * (1.0 - beta) * d_beta
                d_bias += d_z
            to_w_gate = d_z * r * scale
            to_s = d_z * z * r * r / C

        for start in range(0, C, BLOCK_C):  # (11), (12), (15), (16), (17)
            cols = start + first
            m = layer_tile(s_ptr, f_ptr, beta, rows, cols, N, C, KIND)
            p = tl.sum(alpha[:, None] * m, 0)
            g_p = (rho * load_row(g_ptr, cols, C) - shrink * p)[None, :]
            w = weight_row(w_pool, w_pool_ptr, cols, C, BLOCK_C)[None, :]
            d_m = alpha[:, None] * g_p + to_w_pool[:, None] * w - to_m[:, None] * m
            if HAS_D_MIXED:
                d_m += load_tile(d_mixed_ptr + at * N * C, rows, cols, N, C)
            new_w_pool = tl.sum(to_w_pool[:, None] * m, 0)
            new_w_gate = new_w_pool
            if MIXES:
                s = load_tile(s_ptr, rows, cols, N, C)
                w = weight_row(w_gate, w_gate_ptr, cols, C, BLOCK_C)[None, :]
                d_s = (1.0 - beta)[:, None] * d_m + to_w_gate[:, None] * w - to_s[:, None] * s
                store_tile(d_streams_ptr + at * N * C, d_s, rows, cols, N, C)
                store_row(d_update_ptr + at * C, tl.sum(beta[:, None] * d_m, 0), cols, C)
                new_w_gate = tl.sum(to_w_gate[:, None] * s, 0)
            else:
                store_tile(d_streams_ptr + at * N_IN * C, d_m, rows, cols, N_IN, C)
                if KIND == "append":
                    d_f = tl.sum(tl.where((rows == N - 1)[:, None], d_m, 0.0), 0)
                    store_row(d_update_ptr + at * C, d_f, cols, C)
            if HELD:
                d_w_pool += new_w_pool
                d_w_gate += new_w_gate
            else:  # no register can hold them: this program's own row, which starts at zero, takes the sum
                tl.debug_barrier()  # what other threads of the program wrote for the last token is seen from here on
                store_row(own_ptr + C, load_row(own_ptr + C, cols, C) + new_w_pool, cols, C)
                if MIXES:
                    store_row(own_ptr, load_row(own_ptr, cols, C) + new_w_gate, cols, C)

    if HELD:
        store_row(own_ptr + C, d_w_pool, first, C)
    if MIXES:
        if HELD:
            store_row(own_ptr, d_w_gate, first, C)
        tl.store(own_ptr + 2 * C + rows, d_bias, mask=rows < N)


class Launch(NamedTuple):
    """How a kernel is launched: columns a visit, warps a program, pipeline stages, programs a multiprocessor."""

    block_c: int
    warps: int
    stages: int
    programs: int


def launch_choice(n: int, width: int, *, backward: bool) -> Launch:
    """The launch for streams [.., n, C = width]."""
    n_pad, padded = triton.next_power_of_2(n), triton.next_power_of_2(width)
    largest = MAX_TILE_BACKWARD if backward else MAX_TILE_FORWARD
    block_c = min(padded, largest // n_pad)
    tile = n_pad * block_c
    return Launch(block_c, warps=min(16, max(1, tile // 1024)), stages=1, programs=4)
