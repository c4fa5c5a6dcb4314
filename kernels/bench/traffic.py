"""The byte model: what each operation must read and write when every input is read and every output written once.

The one definition behind every GB/s, floor and share; it is the table "Bytes moved" of kernels/mgr/DERIVATION.md, in
units of C elements a token. Weights, beta and alpha are left out: n or C values against n C a token.
"""

from dataclasses import dataclass

MIXING = ("mix", "mix-inverting")
OPS = (*MIXING, "append", "pool")
PASSES = ("forward", "backward", "both")


@dataclass(frozen=True)
class Traffic:
    """Elements read and written, in units of C a token."""

    reads: int
    writes: int

    @property
    def total(self) -> int:
        return self.reads + self.writes

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.reads + other.reads, self.writes + other.writes)


def traffic(op: str, which: str, n_streams: int) -> Traffic:
    """What `op` moves in one pass ("forward", "backward", or "both": one after the other) with n streams going in.

    Backward reads the stored inputs again (s, F) and the upstream gradients (G of the streams, g of the read), and
    writes the gradients of the inputs. The norm of the read costs nothing when it is fused. "mix-inverting" reads the
    streams that it made (s') in place of s, and writes the s that it rebuilds, none of them kept exactly.

    Raises ValueError for an op, pass or number of streams that there is not.
    """
    if op not in OPS:
        raise ValueError(f"traffic got op={op!r}; use one of {', '.join(OPS)}.")
    if which not in PASSES:
        raise ValueError(f"traffic got the pass {which!r}; use one of {', '.join(PASSES)}.")
    if isinstance(n_streams, bool) or not isinstance(n_streams, int) or n_streams < 1:
        raise ValueError(f"traffic got n_streams={n_streams!r}; give a whole number from 1 on.")
    n = n_streams
    if which == "both":
        return traffic(op, "forward", n) + traffic(op, "backward", n)
    table = {
        ("mix", "forward"): Traffic(n + 1, n + 1),  # s, F; s', h
        ("mix", "backward"): Traffic(2 * n + 2, n + 1),  # s, F, G, g; ds, dF
        ("mix-inverting", "forward"): Traffic(n + 1, n + 1),
        ("mix-inverting", "backward"): Traffic(2 * n + 2, 2 * n + 1),  # s', F, G, g; s, ds, dF
        ("append", "forward"): Traffic(n + 1, n + 2),  # s, F; s', h
        ("append", "backward"): Traffic(2 * n + 3, n + 1),  # s, F, G (n + 1 streams), g; ds, dF
        ("pool", "forward"): Traffic(n, 1),  # s; h
        ("pool", "backward"): Traffic(n + 1, n),  # s, g; ds
    }
    return table[op, which]


def paper_forward(n_streams: int) -> Traffic:
    """MGR-9's own count of the fused forward of a mixing layer: about 3 n C reads and 1 n C writes a token."""
    return Traffic(3 * n_streams, n_streams)


def bytes_moved(op: str, which: str, tokens: int, n_streams: int, width: int, itemsize: int) -> int:
    """The model in bytes for `tokens` tokens of n streams, C = width, stored in elements of `itemsize` bytes."""
    return traffic(op, which, n_streams).total * width * tokens * itemsize


def flops(op: str, which: str, tokens: int, n_streams: int, width: int) -> int:
    """Floating-point operations on elements of the streams, counted off DERIVATION.md's stages (a multiply-add is 2).

    A stage's work a stream element, forward: |s|^2 2 (1), w_g . s 2 (2), the interpolation 3 (4), |s'|^2 and
    w_p . s' 4 (5), the read 2 (7). Backward first does that again, then: g_p . s' 2 (10), D 6 (11), dw_p 2 (12),
    D . (F - s) 3 (13), dF 2 (15), ds 5 (16), dw_g 2 (17); inverting, 3 more (18). Work a token alone (C, not n C) is
    left out.
    """
    read, mixing = 6, 7  # a stream element: (5) and (7); (1), (2) and (4)
    table = {  # forward, and what backward adds to it
        "mix": (n_streams * (mixing + read), n_streams * 22),
        "mix-inverting": (n_streams * (mixing + read), n_streams * 25),
        "append": ((n_streams + 1) * read, (n_streams + 1) * 10),
        "pool": (n_streams * read, n_streams * 10),
    }
    forward, again = table[op]
    each = {"forward": forward, "backward": forward + again, "both": 2 * forward + again}[which]
    return each * width * tokens
