"""What rounding will do to rebuilt streams, added up layer by layer: one pass over numbers, none over streams.

`carry_kernel` takes a layer into the segment that it belongs to and sums, program by program; `decide_kernel` adds up
the programs, predicts, and says whether the segment ends here. So the next layer's kernel knows without the host.
The mathematics: `depthlab.residuals.recompute`. Upper case is fixed when a kernel is compiled.
"""

import triton
import triton.language as tl

COUNTS = ["n_tokens", "n_programs", "n_rows"]  # one compiled kernel for all of them


@triton.jit(do_not_specialize=COUNTS)
def carry_kernel(
    beta_ptr,  # [tokens, N]
    kept_ptr,  # [tokens, 4 N + 1]: rho, a, r_m, z, r
    chosen_ptr,  # [tokens, N] bool, rows that are kept whatever their gates; if CHOOSES
    below_ptr,  # [4, tokens, N]: growth, variance, least, closed up to the layer below; unless FRESH
    numbers_ptr,  # [3] of the layer below, as `decide_kernel` says; unless FRESH
    carried_ptr,  # [4, tokens, N]: the same with this layer, and without the rows that it keeps
    sums_ptr,  # [programs, N + 1]: of V relative to the rows, and how many gates are above the ceiling
    n_tokens,
    max_gate,
    CHOOSES: tl.constexpr,
    FRESH: tl.constexpr,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.arange(0, N_PAD)[None, :]
    size = tl.cast(n_tokens, tl.int64) * N
    sum_shares = tl.zeros([N_PAD], tl.float32)
    n_open = sum_shares
    ended = 0.0
    if not FRESH:
        ended = tl.load(numbers_ptr + 2)
    for start in range(tl.program_id(0) * BLOCK, n_tokens, tl.num_programs(0) * BLOCK):
        token = (start + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
        mask = (token < n_tokens) & (rows < N)
        at = token * N + rows
        beta = tl.load(beta_ptr + at, mask=mask, other=0.0)
        r_m = tl.load(kept_ptr + token * (4 * N + 1) + 1 + N + rows, mask=mask, other=1.0)
        r = tl.load(kept_ptr + token * (4 * N + 1) + 1 + 3 * N + rows, mask=mask, other=1.0)
        before = 1.0 / (r * r)
        is_open = beta > max_gate
        keeps = is_open
        if CHOOSES:
            keeps = keeps | (tl.load(chosen_ptr + at, mask=mask, other=0) != 0)
        below = tl.full([BLOCK, N_PAD], 1.0, tl.float32)
        variance = tl.zeros([BLOCK, N_PAD], tl.float32)
        closed = variance
        least = tl.full([BLOCK, N_PAD], float("inf"), tl.float32)
        if not FRESH:
            below = tl.where(ended > 0.0, below, tl.load(below_ptr + at, mask=mask, other=1.0))
            variance = tl.where(ended > 0.0, variance, tl.load(below_ptr + size + at, mask=mask, other=0.0))
            least = tl.where(ended > 0.0, least, tl.load(below_ptr + 2 * size + at, mask=mask, other=1.0))
            closed = tl.where(ended > 0.0, closed, tl.load(below_ptr + 3 * size + at, mask=mask, other=0.0))

        left = 1.0 - tl.where(keeps, 0.0, beta)
        growth = below / (left * left)
        variance = variance + growth / (r_m * r_m) + below * before
        least = tl.minimum(least, before, propagate_nan=tl.PropagateNan.ALL)
        largest = tl.maximum(closed, variance / least, propagate_nan=tl.PropagateNan.ALL)
        sum_shares += tl.sum(tl.where(mask, largest, 0.0), 0)
        n_open += tl.sum((is_open & mask).to(tl.float32), 0)
        tl.store(carried_ptr + at, tl.where(keeps, 1.0, growth), mask=mask)
        tl.store(carried_ptr + size + at, tl.where(keeps, 0.0, variance), mask=mask)
        tl.store(carried_ptr + 2 * size + at, tl.where(keeps, float("inf"), least), mask=mask)
        tl.store(carried_ptr + 3 * size + at, tl.where(keeps, largest, closed), mask=mask)

    row = tl.arange(0, N_PAD)
    own_ptr = sums_ptr + tl.program_id(0) * (N + 1)
    tl.store(own_ptr + row, sum_shares, mask=row < N)
    tl.store(own_ptr + N, tl.sum(n_open, 0))


@triton.jit(do_not_specialize=COUNTS)
def decide_kernel(
    sums_ptr,  # [programs, N + 1], from `carry_kernel`
    numbers_ptr,  # [3]: predicted error, gates above the ceiling, 1 if the segment ends here
    n_programs,
    n_rows,
    sigma,
    tolerance,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    rows = tl.arange(0, N_PAD)
    program = tl.arange(0, PROGRAMS)
    own_ptr = sums_ptr + program * (N + 1)
    own_mask = program < n_programs
    mask = own_mask[:, None] & (rows < N)[None, :]
    share = tl.sum(tl.load(own_ptr[:, None] + rows[None, :], mask=mask, other=0.0), 0) * N / tl.maximum(n_rows, 1)
    n_open = tl.sum(tl.load(own_ptr + N, mask=own_mask, other=0.0), 0)
    share = tl.where(share == share, share, float("inf"))  # not a number is no promise
    predicted = sigma * tl.sqrt(tl.max(share, 0))
    ends = (2.0 * n_open > n_rows) | (predicted > tolerance)
    tl.store(numbers_ptr, predicted)
    tl.store(numbers_ptr + 1, n_open)
    tl.store(numbers_ptr + 2, ends.to(tl.float32))
