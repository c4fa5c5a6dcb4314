"""The gate before any timing: the fused kernels against the float64 reference, on this machine, in this run.

Compact on purpose: the kernels' own tests are tests/kernels/mgr. Here each operation, gate, dtype, n and C about
to be timed must give the right outputs and the right gradient of every input and weight, bit-equal in a second run.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from depthlab.kernels.bench import cases, inverting
from depthlab.kernels.bench.cases import Case, Step
from depthlab.kernels.bench.subjects import subject

TOKENS = 1031  # prime, and more than there are programs at once, so that every program loops
_OUTPUTS = {"mix": ["streams", "pooled", "beta"], "append": ["streams", "pooled"], "pool": ["pooled"]}
_INPUTS = {
    "mix": ["streams", "update", "w_gate", "bias", "w_pool"],
    "append": ["streams", "update", "w_pool"],
    "pool": ["streams", "w_pool"],
}
# Of the largest value, in units of float32's roundoff: the sums over C and over tokens are float32, in any order.
# torch's own float32 arithmetic stays below 64; uniform gates, a dropped stream or gradient path are above 1e5.
_SUM_ROUNDOFFS = 256


class GateFailed(RuntimeError):
    """The kernels are wrong on this machine, so nothing is timed."""


def faults(step: Step, case: Case, device: torch.device, tokens: int = TOKENS, seed: int = 0) -> list[str]:
    """What is wrong with `step` at `case` (with this many tokens): a sentence each, none when all is right.

    Every output and gradient must be within one rounding to its dtype, plus 256 float32 roundoffs of the largest value,
    of the float64 reference; inputs must be left alone; a second run must be bit-equal.
    """
    small = case.with_tokens(tokens)
    generator = torch.Generator(device).manual_seed(seed)
    drawn = cases.inputs(small, generator)
    kept = [x.detach().clone() for x in drawn]
    wide = [x.detach().double().requires_grad_() for x in drawn]
    true, outputs = cases.reference_step(small)(*wide), step(*drawn)
    found = [_wrong_shape(*each) for each in zip(_OUTPUTS[case.op], outputs, true, strict=True)]
    if not any(found):
        upstream = [torch.randn(y.shape, generator=generator, dtype=y.dtype, device=device) for y in outputs]
        got = (*outputs, *torch.autograd.grad(outputs, drawn, upstream))
        again = step(*drawn)
        again = (*again, *torch.autograd.grad(again, drawn, upstream))
        true = (*true, *torch.autograd.grad(true, wide, [g.double() for g in upstream]))
        names = _OUTPUTS[case.op] + [f"the gradient of {name}" for name in _INPUTS[case.op]]
        found = [difference(*each) for each in zip(names, got, true, strict=True)]
        found += [_unlike(*each, "differs from run to run") for each in zip(names, got, again, strict=True)]
        found += [_unlike(*each, "was overwritten") for each in zip(_INPUTS[case.op], drawn, kept, strict=True)]
    where = case.name.replace(f"T={case.tokens}", f"T={tokens}")
    return [f"{where}: {fault}." for fault in found if fault]


def check(all_cases: Sequence[Case], device: torch.device) -> list[str]:
    """Faults of the fused kernels over the distinct (op, gate, dtype, n, C) of the cases."""
    distinct = {case.with_tokens(TOKENS): None for case in all_cases}
    return [fault for case in distinct for fault in _fused_faults(case, device)]


def require(case: Case, device: torch.device) -> None:
    """Raise GateFailed, naming the first fault, unless the fused kernels are right at `case`; looked at once a run."""
    found = _fused_faults(case.with_tokens(TOKENS), device)
    if found:
        raise GateFailed(f"The kernels are wrong here, so nothing is timed: {found[0]}")


@functools.cache
def _fused_faults(case: Case, device: torch.device) -> tuple[str, ...]:
    if case.op == "mix-inverting":
        ordinary = [replace(case, op="mix", dtype=dtype) for dtype in dict.fromkeys((case.dtype, "fp32"))]
        return (*(x for each in ordinary for x in _fused_faults(each, device)), *inverting_faults(case, device))
    return tuple(faults(subject(case, "triton").step, case, device))


def inverting_faults(case: Case, device: torch.device, seed: int = 0) -> list[str]:
    """What is wrong with the backward that rebuilds its streams, without and with exact rows: a sentence each.

    The tolerance of `faults`, beside what `inverting.compared` says is right; a second run must be bit-equal.
    """
    found = []
    for above in (None, 0.5):
        (got, right), (again, _) = (inverting.compared(case, device, above, seed) for _ in range(2))
        found += [difference(*each) for each in zip(inverting.NAMES, got, right, strict=True)]
        found += [_unlike(*each, "differs from run to run") for each in zip(inverting.NAMES, got, again, strict=True)]
    return [f"{case.name}: {fault}." for fault in found if fault]


def difference(name: str, got: Tensor, true: Tensor) -> str | None:
    """What is wrong with `got` beside the float64 `true`, by the tolerance of `faults`; None when nothing is."""
    error = (got.double() - true).abs()
    unit = torch.finfo(got.dtype).eps / 2
    allowed = unit * true.abs() + _SUM_ROUNDOFFS * torch.finfo(torch.float32).eps / 2 * true.abs().max()
    excess = error - allowed
    if not torch.isfinite(excess).all():
        return f"{name} is not finite"
    worst = int(excess.argmax())
    if excess.flatten()[worst] <= 0:
        return None
    return f"{name} is off by {error.flatten()[worst]:.1e} where {allowed.flatten()[worst]:.1e} is allowed"


def _wrong_shape(name: str, got: Tensor, true: Tensor) -> str | None:
    right = got.shape == true.shape
    return None if right else f"{name} has the shape {list(got.shape)} where {list(true.shape)} is right"


def _unlike(name: str, a: Tensor, b: Tensor, what: str) -> str | None:
    return None if torch.equal(a, b) else f"{name} {what}"
