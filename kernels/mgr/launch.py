"""How the fused kernels are launched: chosen by sweeps on an H200 in bfloat16 at 32,768 tokens.

`depthlab bench mgr` measures what the choices give at its widths; the launches of others rest on one sweep.

What decides is how much of a tile one lane holds. Forward, 128 elements and three pipeline stages are best: few warps
mean few exchanges between them, and there is little a token needs beside its streams. Backward, a lane can hold 64: the
gradients of two streams and both weights' sums live beside them. A multiprocessor then works on as many tokens as
registers allow; fewer leave the memory idle, more change nothing. Values that do not fit (a spill) cost less than what
is loaded again in blocks, so blocks are for tiles that are far too large.
"""

import math
from functools import lru_cache
from typing import NamedTuple

FORWARD_LANE, BACKWARD_LANE = 128, 64  # elements of a tile that one lane holds
FORWARD_TILE, BACKWARD_TILE = 32_768, 16_384  # elements; larger ones are visited in blocks
WIDEST = 8  # columns a lane loads at once: 16 bytes of bfloat16
CHUNK, CHUNKS = 256, 8  # least columns and most chunks, for widths that a power of two would pad too much
LONG_ROW = 4096  # columns; from here on one program keeps a multiprocessor's memory busy
SHARED_BYTES = 232_448  # of one H200 multiprocessor, for one program


class Launch(NamedTuple):
    """constants: the kernel's own. programs: at work at once on one multiprocessor, whom the share `long_share` of the
    tokens is dealt out to evenly; the rest goes in portions of `short_tokens` to whoever is first (`own_tokens`).
    """

    constants: dict[str, int | bool]
    warps: int
    programs: int
    long_share: float
    short_tokens: int


@lru_cache
def launch_choice(n: int, width: int, itemsize: int = 2, *, backward: bool, shared_bytes: int = SHARED_BYTES) -> Launch:
    """The launch for streams [.., n, width] of `itemsize` bytes an element."""
    n_pad, padded = power_of_two(n), power_of_two(width)
    chunked = width % CHUNK == 0 and width < (padded if backward or n_pad > 4 else 0.75 * padded)
    block = max(CHUNK, padded // CHUNKS) if chunked else padded
    lane, largest = (BACKWARD_LANE, BACKWARD_TILE) if backward else (FORWARD_LANE, FORWARD_TILE)
    if chunked and n_pad > 4:  # a quarter more each is better than twice the warps
        lane += lane // 4
    warps = power_of_two(math.ceil(n_pad * _up_to(block, width) / (32 * lane)))
    if warps > 1:
        block = max(block, 64 * warps)  # two columns a lane at least
    columns = _up_to(block, width)
    if n_pad * columns > largest:
        return _in_blocks(n_pad, block)
    stages = 3 if not backward else 1 if chunked and (n_pad > 4 or warps == 8) else 2
    loaded = ((2 * n_pad + 2) if backward else (n_pad + 1)) * columns * itemsize  # a token's bytes, padding included
    while stages > 1 and (stages - 1) * loaded + 16 * columns > shared_bytes:  # 16: both weights, and some to spare
        stages -= 1
    constants = {
        "BLOCK_C": block,
        "VEC": min(WIDEST, max(1, block // (32 * warps))),
        "HELD": True,
        "HELD_WEIGHTS": chunked or not backward,  # else they wait in shared memory, not in registers
        "STAGES": stages,
    }
    if not backward and padded >= LONG_ROW:
        return Launch(constants, warps, programs=1, long_share=1.0, short_tokens=2)
    share, short = (0.85, 4) if backward else (0.6, 2)
    return Launch(constants, warps, max(1, 8 // warps), share, short)


def _in_blocks(n_pad: int, block: int) -> Launch:
    block = min(max(block, 1024), 8192 // n_pad)
    constants = {
        "BLOCK_C": block,
        "VEC": min(WIDEST, block // 256),
        "HELD": False,
        "HELD_WEIGHTS": False,
        "STAGES": 1,
    }
    return Launch(constants, warps=8, programs=2, long_share=0.97, short_tokens=4)


def _up_to(block: int, width: int) -> int:
    """The columns of all blocks that it takes for `width`."""
    return math.ceil(width / block) * block


def power_of_two(x: int) -> int:
    """The smallest power of two that is not below x."""
    return 1 << (x - 1).bit_length()
