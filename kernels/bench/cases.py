"""What is measured: one operation at one shape, its random inputs, and the table of all of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from depthlab.kernels.bench.traffic import bytes_moved
from depthlab.kernels.mgr import append_and_pool, attn_pool, mix_and_pool, reference

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
EPS = 1e-6

Step = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """`op` ("mix" | "mix-inverting" | "append" | "pool") on `tokens` tokens of `n_streams` streams, C = width.

    `gate` is for the two that mix; "mix-inverting" rebuilds its streams in the backward (`inverting.py`).

    The read is always normalised, as the models use it; weights are float32, as the models store them.
    """

    op: str
    dtype: str
    tokens: int
    n_streams: int
    width: int
    gate: str = ""

    @property
    def shape(self) -> str:
        return f"T={self.tokens},n={self.n_streams},C={self.width}"

    @property
    def name(self) -> str:
        return "/".join(filter(None, [self.op, self.gate, self.dtype, self.shape]))

    def with_tokens(self, tokens: int) -> "Case":
        return replace(self, tokens=tokens)

    def bytes(self, which: str) -> int:
        """What the byte model says one pass moves."""
        itemsize = DTYPES[self.dtype].itemsize
        return bytes_moved(self.op, which, self.tokens, self.n_streams, self.width, itemsize)


@dataclass(frozen=True)
class Subject:
    """Something to time: how its inputs are drawn, and what it computes from them.

    Only the first `graded` outputs get an upstream gradient: nothing trains on beta.
    """

    inputs: Callable[[torch.Generator], tuple[Tensor, ...]]
    step: Step
    graded: int


def inputs(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Fresh random inputs that require gradients, on the generator's device: in the order of the public function.

    streams [T, n, C] and update [T, C] in the case's dtype, weights in float32 (float64 for a float64 case).
    """
    dtype, n, width = DTYPES[case.dtype], case.n_streams, case.width
    wide = torch.promote_types(dtype, torch.float32)

    def normal(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype, device=generator.device).requires_grad_()

    streams = normal(case.tokens, n, width, dtype=dtype)
    if case.op == "pool":
        return streams, normal(width, dtype=wide)
    update = normal(case.tokens, width, dtype=dtype)
    if case.op == "append":
        return streams, update, normal(width, dtype=wide)
    bias = normal(n if case.gate == "independent" else 1, dtype=wide)
    return streams, update, normal(width, dtype=wide), bias, normal(width, dtype=wide)


def public_step(case: Case, backend: str) -> Step:
    """The public function of `case` with this backend: inputs -> (streams, pooled[, beta]), or (pooled,)."""
    if case.op == "mix":
        return lambda *x: mix_and_pool(*x, gate=case.gate, normalize=True, eps=EPS, backend=backend)
    if case.op == "append":
        return lambda *x: append_and_pool(*x, normalize=True, eps=EPS, backend=backend)
    return lambda *x: (attn_pool(*x, normalize=True, eps=EPS, backend=backend),)


def reference_step(case: Case) -> Step:
    """The reference of `case`, without checks or dispatch."""
    if case.gate:
        return lambda *x: reference.mix_and_pool(*x, gate=case.gate, normalize=True, eps=EPS)
    if case.op == "append":
        return lambda *x: reference.append_and_pool(*x, normalize=True, eps=EPS)
    return lambda *x: (reference.attn_pool(*x, normalize=True, eps=EPS),)


TOKENS = (4096, 32768, 131072)
STREAMS = (4, 8)
WIDTHS = (768, 1024, 1280, 2048, 4096)
# torch.compile takes up to a minute a shape, and eager needs tens of times the memory: only these.
COMPARED = ((4096, 4, 1024), (32768, 4, 768), (32768, 4, 1024), (32768, 8, 1024), (32768, 4, 2048), (131072, 4, 1024))
PEERED = ((32768, 4, 1024), (32768, 8, 1024), (32768, 4, 2048))
QUICK = ((4096, 4, 1024), (32768, 4, 1024), (32768, 8, 1024))


def inverting_table() -> list[tuple[Case, list[str]]]:
    """Mixing with its streams kept beside mixing that rebuilds them, at the widths of models."""
    shapes = [(32768, n, c) for n in STREAMS for c in WIDTHS[:3]]
    return [
        (Case(op, "bf16", *shape, "competitive"), ["triton"]) for shape in shapes for op in ("mix", "mix-inverting")
    ]


def table() -> list[tuple[Case, list[str]]]:
    """Every case with the implementations measured at it; peers last, so that a failing one spoils nothing."""
    shapes = [(t, n, c) for t in TOKENS for n in STREAMS for c in WIDTHS]
    cases = [(Case("mix", "bf16", *shape, "competitive"), _implementations(shape)) for shape in shapes]
    cases += [(Case("mix", "bf16", 32768, n, 1024, "independent"), ["triton"]) for n in STREAMS]
    cases += [
        (Case("mix", "fp32", 32768, n, c, "competitive"), ["triton"]) for n, c in ((4, 768), (4, 1024), (8, 1024))
    ]
    for n in STREAMS:
        cases.append((Case("append", "bf16", 32768, n - 1, 1024), ["eager", "triton"]))
        cases.append((Case("pool", "bf16", 32768, n, 1024), ["eager", "triton", "liger-attnres", "fla-attnres"]))
    return cases


def quick_table() -> list[tuple[Case, list[str]]]:
    """Three shapes, torch.compile at one of them: half a minute, for tuning."""
    compiled = {QUICK[1]: ["compile"]}
    names = [["eager", *compiled.get(shape, []), "triton"] for shape in QUICK]
    return [(Case("mix", "bf16", *shape, "competitive"), n) for shape, n in zip(QUICK, names, strict=True)]


def _implementations(shape: tuple[int, int, int]) -> list[str]:
    compared = ["eager", "compile"] if shape in COMPARED else []
    return [*compared, "triton", *(["liger-mhc"] if shape in PEERED else [])]
