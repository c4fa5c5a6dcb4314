"""The fused kernels of Multi-Gate Residuals: one layer, forward and backward.

A layer makes its streams (KIND: "independent" or "competitive" gates mix the update into them, "append" makes the
update one more stream, "read" takes them as they are) and pools what the next sublayer reads. Numbers (1) to (18) are
DERIVATION.md's stages.

A program walks over tokens. Each pair of `for start`, `for i` loops below is one visit to a token's tiles. Either they
are loaded once and HELD in registers from the first sum to the last store, and `start` is only 0; or they do not fit,
`i` is only 0, and every visit loads them again, after the first from the cache.

Legend: s, f streams and update; m the streams after mixing or appending; g, d_m the gradients of the read and of m;
r, r_m inverse RMS of s, m; z, beta gate scores and gates; a, alpha pool scores and weights; p the read before its norm,
1 / rho its RMS; d_x the gradient of x. Upper case is fixed when a kernel is compiled.
"""

import triton
import triton.language as tl

from depthlab.kernels.mgr.equations import gates, inverse_rms, make_streams, softmax, through_read
from depthlab.kernels.mgr.rebuilding import load_slots, rebuild_streams
from depthlab.kernels.mgr.tiles import (
    add_row,
    columns,
    get_row,
    get_tile,
    hold_row,
    hold_tiles,
    load_bias,
    load_numbers,
    plus,
    store_numbers,
    store_row,
    store_tile,
)

COUNTS = ["n_tokens", "n_long", "long_tokens"]  # one compiled kernel for all of them


@triton.jit
def own_tokens(n_tokens, n_long, long_tokens):
    """Start, stop and step of this program's tokens.

    The first n_long programs share the first long_tokens tokens. The others take the rest, a few each: they start as
    the first ones finish, so that no multiprocessor waits for a slower one.
    """
    program = tl.program_id(0)
    is_long = program < n_long  # selects, not branches: Triton 3.5 fails on a loop whose bounds come out of an `if`
    start = tl.where(is_long, program, long_tokens + program - n_long)
    stop = tl.where(is_long, long_tokens, n_tokens)
    step = tl.where(is_long, n_long, tl.num_programs(0) - n_long)
    return start, stop, step


@triton.jit(do_not_specialize=COUNTS)
def layer_fwd_kernel(
    streams_ptr,  # [tokens, N, C]; "append": [tokens, N - 1, C]
    update_ptr,  # [tokens, C]; not used by "read"
    w_gate_ptr,  # [C]; gates only, like the bias and beta
    bias_ptr,  # [N], "competitive": [1]
    w_pool_ptr,  # [C]
    mixed_ptr,  # [tokens, N, C]; not used by "read"
    pooled_ptr,  # [tokens, C]
    beta_ptr,  # [tokens, N]
    kept_ptr,  # [tokens, 4 N + 1]: rho, a, r_m and, with gates, z, r, which the backward would sum up again; if KEEP
    n_tokens,
    n_long,
    long_tokens,
    eps,
    KEEP: tl.constexpr,
    KIND: tl.constexpr,
    NORMALIZE: tl.constexpr,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    VEC: tl.constexpr,
    HELD: tl.constexpr,
    HELD_WEIGHTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    MIXES: tl.constexpr = KIND == "independent" or KIND == "competitive"
    N_IN: tl.constexpr = N - 1 if KIND == "append" else N
    BLOCKS: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C if HELD else 1
    SPAN: tl.constexpr = BLOCKS * BLOCK_C
    scale = C**-0.5
    rows = tl.arange(0, N_PAD)
    first = columns(BLOCK_C, VEC)
    w_pool_held = hold_row(w_pool_ptr, C, BLOCK_C, VEC, HELD_WEIGHTS)
    w_gate_held = w_pool_held
    if MIXES:
        w_gate_held = hold_row(w_gate_ptr, C, BLOCK_C, VEC, HELD_WEIGHTS)
        bias = load_bias(bias_ptr, rows, N, KIND)
    nothing = tl.zeros([N_PAD], tl.float32)

    first_token, stop, step = own_tokens(n_tokens, n_long, long_tokens)
    for token in tl.range(first_token, stop, step, num_stages=STAGES):
        at = tl.cast(token, tl.int64)
        s_ptr = streams_ptr + at * N_IN * C
        f_ptr = update_ptr + at * C
        s_held = hold_tiles(s_ptr, rows, N_IN, C, BLOCK_C, VEC, HELD)
        f_held = hold_row(f_ptr, C, BLOCK_C, VEC, HELD and KIND != "read")

        beta = nothing
        if MIXES:  # (1), (2), (3)
            squares = nothing
            along = nothing
            for start in range(0, C, SPAN):
                ss = 0.0
                sw = 0.0
                for i in tl.static_range(BLOCKS):
                    cols = start + i * BLOCK_C + first
                    s = get_tile(s_held, i, s_ptr, rows, cols, N, C, HELD)
                    w = get_row(w_gate_held, i, w_gate_ptr, cols, C, HELD_WEIGHTS)[None, :]
                    ss = plus(ss, s * s, i)
                    sw = plus(sw, s * w, i)
                squares += tl.sum(ss, 1)
                along += tl.sum(sw, 1)
            r = inverse_rms(squares, eps, C)
            z = along * r * scale
            beta, _ = gates(z, bias, rows, N, KIND)

        squares = nothing  # (4), (5), (6)
        along = nothing
        for start in range(0, C, SPAN):
            mm = 0.0
            mw = 0.0
            for i in tl.static_range(BLOCKS):
                cols = start + i * BLOCK_C + first
                s = get_tile(s_held, i, s_ptr, rows, cols, N_IN, C, HELD)
                f = s if KIND == "read" else get_row(f_held, i, f_ptr, cols, C, HELD)
                w = get_row(w_pool_held, i, w_pool_ptr, cols, C, HELD_WEIGHTS)[None, :]
                m = make_streams(s, f, beta, rows, N, KIND)
                mm = plus(mm, m * m, i)
                mw = plus(mw, m * w, i)
            squares += tl.sum(mm, 1)
            along += tl.sum(mw, 1)
        r_m = inverse_rms(squares, eps, C)
        a = along * r_m * scale
        alpha = softmax(a, rows, N)

        rho = 1.0
        if NORMALIZE:  # (8)
            squares = 0.0
            for start in range(0, C, SPAN):
                pp = 0.0
                for i in tl.static_range(BLOCKS):
                    cols = start + i * BLOCK_C + first
                    s = get_tile(s_held, i, s_ptr, rows, cols, N_IN, C, HELD)
                    f = s if KIND == "read" else get_row(f_held, i, f_ptr, cols, C, HELD)
                    p = tl.sum(alpha[:, None] * make_streams(s, f, beta, rows, N, KIND), 0)
                    pp = plus(pp, p * p, i)
                squares += tl.sum(pp, 0)
            rho = inverse_rms(squares, eps, C)

        for start in range(0, C, SPAN):  # (7)
            for i in tl.static_range(BLOCKS):
                cols = start + i * BLOCK_C + first
                s = get_tile(s_held, i, s_ptr, rows, cols, N_IN, C, HELD)
                f = s if KIND == "read" else get_row(f_held, i, f_ptr, cols, C, HELD)
                m = make_streams(s, f, beta, rows, N, KIND)
                if KIND != "read":
                    store_tile(mixed_ptr + at * N * C, m, rows, cols, N, C)
                store_row(pooled_ptr + at * C, rho * tl.sum(alpha[:, None] * m, 0), cols, C)
        if MIXES:
            store_numbers(beta_ptr + at * N, beta, rows, N)
        if KEEP:
            kept = kept_ptr + at * ((4 * N if MIXES else 2 * N) + 1)
            tl.store(kept, rho)
            store_numbers(kept + 1, a, rows, N)
            store_numbers(kept + 1 + N, r_m, rows, N)
            if MIXES:
                store_numbers(kept + 1 + 2 * N, z, rows, N)
                store_numbers(kept + 1 + 3 * N, r, rows, N)


@triton.jit(do_not_specialize=COUNTS)
def layer_bwd_kernel(
    streams_ptr,  # INVERT: m as it was stored, from which s is rebuilt
    update_ptr,
    w_gate_ptr,
    bias_ptr,
    w_pool_ptr,
    kept_ptr,
    d_mixed_ptr,  # [tokens, N, C]; used if HAS_D_MIXED
    d_pooled_ptr,  # [tokens, C]
    d_beta_ptr,  # [tokens, N]; used if HAS_D_BETA
    d_streams_ptr,  # as streams
    d_update_ptr,  # as update
    d_weights_ptr,  # [programs, 2 C + N], zero if not HELD: of w_gate, w_pool, bias, from a program's tokens
    slots_ptr,  # [tokens, N], the row of values that is this stream, -1 where it is rebuilt; used if EXACT
    values_ptr,  # [.., C]; used if EXACT
    rebuilt_ptr,  # [tokens, N, C], gets s; used if INVERT
    n_tokens,
    n_long,
    long_tokens,
    INVERT: tl.constexpr,
    EXACT: tl.constexpr,
    HAS_D_MIXED: tl.constexpr,
    HAS_D_BETA: tl.constexpr,
    KIND: tl.constexpr,
    NORMALIZE: tl.constexpr,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    VEC: tl.constexpr,
    HELD: tl.constexpr,
    HELD_WEIGHTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    MIXES: tl.constexpr = KIND == "independent" or KIND == "competitive"
    N_IN: tl.constexpr = N - 1 if KIND == "append" else N
    BLOCKS: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C if HELD else 1
    SPAN: tl.constexpr = BLOCKS * BLOCK_C
    scale = C**-0.5
    rows = tl.arange(0, N_PAD)
    first = columns(BLOCK_C, VEC)
    w_pool_held = hold_row(w_pool_ptr, C, BLOCK_C, VEC, HELD_WEIGHTS)
    w_gate_held = w_pool_held
    if MIXES:
        w_gate_held = hold_row(w_gate_ptr, C, BLOCK_C, VEC, HELD_WEIGHTS)
        bias = load_bias(bias_ptr, rows, N, KIND)
    own_ptr = d_weights_ptr + tl.program_id(0).to(tl.int64) * (2 * C + N)
    nothing = tl.zeros([N_PAD], tl.float32)
    zero = tl.zeros([N_PAD, BLOCK_C], tl.float32)
    d_bias = tl.zeros([N_PAD], tl.float32)
    d_w_gate = ()
    d_w_pool = ()
    if HELD:
        for _ in tl.static_range(BLOCKS):
            d_w_gate = d_w_gate + (tl.zeros([BLOCK_C], tl.float32),)
            d_w_pool = d_w_pool + (tl.zeros([BLOCK_C], tl.float32),)

    first_token, stop, step = own_tokens(n_tokens, n_long, long_tokens)
    for token in tl.range(first_token, stop, step, num_stages=STAGES):
        at = tl.cast(token, tl.int64)
        s_ptr = streams_ptr + at * N_IN * C
        f_ptr = update_ptr + at * C
        g_ptr = d_pooled_ptr + at * C
        d_m_ptr = d_mixed_ptr + at * N * C
        s_held = hold_tiles(s_ptr, rows, N_IN, C, BLOCK_C, VEC, HELD)
        f_held = hold_row(f_ptr, C, BLOCK_C, VEC, HELD and KIND != "read")
        g_held = hold_row(g_ptr, C, BLOCK_C, VEC, HELD)
        if BLOCKS > 1:
            d_m_held = hold_tiles(d_m_ptr, rows, N, C, BLOCK_C, VEC, HELD and HAS_D_MIXED)

        kept = kept_ptr + at * ((4 * N if MIXES else 2 * N) + 1)
        beta = nothing
        if MIXES:  # (3) again
            z = load_numbers(kept + 1 + 2 * N, rows, N)
            r = load_numbers(kept + 1 + 3 * N, rows, N)
            beta, beta_0 = gates(z, bias, rows, N, KIND)
        a = load_numbers(kept + 1, rows, N)
        r_m = load_numbers(kept + 1 + N, rows, N)
        rho = tl.load(kept)
        alpha = softmax(a, rows, N)  # (6) again
        if INVERT:  # (18); tiles that are not held are loaded from where this stores them
            slots = load_slots(slots_ptr + at * N, rows, N) if EXACT else rows
            r_ptr = rebuilt_ptr + at * N * C
            s_held = rebuild_streams(
                s_held, f_held, beta, slots, s_ptr, f_ptr, values_ptr, r_ptr,
                rows, first, N, C, BLOCK_C, HELD, EXACT,
            )  # fmt: skip
            s_ptr = r_ptr

        along_g = nothing
        along_p = nothing
        for start in range(0, C, SPAN):
            mg = 0.0
            mp = 0.0
            for i in tl.static_range(BLOCKS):
                cols = start + i * BLOCK_C + first
                s = get_tile(s_held, i, s_ptr, rows, cols, N_IN, C, HELD)
                f = s if KIND == "read" else get_row(f_held, i, f_ptr, cols, C, HELD)
                m = make_streams(s, f, beta, rows, N, KIND)
                g = get_row(g_held, i, g_ptr, cols, C, HELD)[None, :]
                p = tl.sum(alpha[:, None] * m, 0)[None, :]
                mg = plus(mg, m * g, i)
                mp = plus(mp, m * p, i)
            along_g += tl.sum(mg, 1)
            if NORMALIZE:
                along_p += tl.sum(mp, 1)
        shrink = 0.0
        if NORMALIZE:  # (9): g_p = rho g - shrink p, with care for a rho^3 that may not fit
            shrink = rho * (rho * (rho * tl.sum(alpha * along_g, 0))) / C
        along_g_p = rho * along_g - shrink * along_p
        d_a = alpha * (along_g_p - tl.sum(alpha * along_g_p, 0))  # (10)
        to_w_pool = d_a * r_m * scale
        to_m = d_a * a * r_m * r_m / C

        if BLOCKS == 1:  # as late as can be: registers are short; of several blocks each is short enough
            d_m_held = hold_tiles(d_m_ptr, rows, N, C, BLOCK_C, VEC, HELD and HAS_D_MIXED)
        if MIXES:  # (11), (13)
            d_beta = nothing
            for start in range(0, C, SPAN):
                dd = 0.0
                for i in tl.static_range(BLOCKS):
                    cols = start + i * BLOCK_C + first
                    s = get_tile(s_held, i, s_ptr, rows, cols, N, C, HELD)
                    f = get_row(f_held, i, f_ptr, cols, C, HELD)
                    m = make_streams(s, f, beta, rows, N, KIND)
                    g = get_row(g_held, i, g_ptr, cols, C, HELD)
                    w = get_row(w_pool_held, i, w_pool_ptr, cols, C, HELD_WEIGHTS)
                    d_m = get_tile(d_m_held, i, d_m_ptr, rows, cols, N, C, HELD) if HAS_D_MIXED else zero
                    d_m = through_read(d_m, m, g, w, alpha, rho, shrink, to_w_pool, to_m)
                    d = d_m * (f[None, :] - s)
                    dd = plus(dd, d, i)
                d_beta += tl.sum(dd, 1)
            if HAS_D_BETA:
                d_beta += load_numbers(d_beta_ptr + at * N, rows, N)
            if KIND == "competitive":  # (14c)
                mean = tl.sum(beta * d_beta, 0)
                d_z = beta * (d_beta - mean)
                d_bias -= tl.where(rows == 0, beta_0 * mean, 0.0)
            else:  # (14i)
                d_z = beta * (1.0 - beta) * d_beta
                d_bias += d_z
            to_w_gate = d_z * r * scale
            to_s = d_z * z * r * r / C

        for start in range(0, C, SPAN):  # (12), (15), (16), (17)
            for i in tl.static_range(BLOCKS):
                cols = start + i * BLOCK_C + first
                s = get_tile(s_held, i, s_ptr, rows, cols, N_IN, C, HELD)
                f = s if KIND == "read" else get_row(f_held, i, f_ptr, cols, C, HELD)
                m = make_streams(s, f, beta, rows, N, KIND)
                g = get_row(g_held, i, g_ptr, cols, C, HELD)
                w = get_row(w_pool_held, i, w_pool_ptr, cols, C, HELD_WEIGHTS)
                d_m = get_tile(d_m_held, i, d_m_ptr, rows, cols, N, C, HELD) if HAS_D_MIXED else zero
                d_m = through_read(d_m, m, g, w, alpha, rho, shrink, to_w_pool, to_m)
                d_w_pool = add_row(d_w_pool, i, own_ptr + C, tl.sum(to_w_pool[:, None] * m, 0), cols, C, BLOCKS, HELD)
                if MIXES:
                    w = get_row(w_gate_held, i, w_gate_ptr, cols, C, HELD_WEIGHTS)[None, :]
                    d_s = (1.0 - beta)[:, None] * d_m + to_w_gate[:, None] * w - to_s[:, None] * s
                    store_tile(d_streams_ptr + at * N * C, d_s, rows, cols, N, C)
                    store_row(d_update_ptr + at * C, tl.sum(beta[:, None] * d_m, 0), cols, C)
                    d_w_gate = add_row(d_w_gate, i, own_ptr, tl.sum(to_w_gate[:, None] * s, 0), cols, C, BLOCKS, HELD)
                else:
                    store_tile(d_streams_ptr + at * N_IN * C, d_m, rows, cols, N_IN, C)
                    if KIND == "append":
                        d_f = tl.sum(tl.where((rows == N - 1)[:, None], d_m, 0.0), 0)
                        store_row(d_update_ptr + at * C, d_f, cols, C)
        if not HELD:
            tl.debug_barrier()  # sums that other threads of the program have stored are seen at the next token

    if HELD:
        for i in tl.static_range(BLOCKS):
            cols = i * BLOCK_C + first
            store_row(own_ptr + C, d_w_pool[i], cols, C)
            if MIXES:
                store_row(own_ptr, d_w_gate[i], cols, C)
    if MIXES:
        tl.store(own_ptr + 2 * C + rows, d_bias, mask=rows < N)
