"""The gate lets right kernels through and stops wrong ones, whatever is wrong with them."""

import itertools

import pytest
import torch

from depthlab.kernels.bench import cases, gate
from depthlab.kernels.bench.cases import Case
from depthlab.kernels.mgr import mix_and_pool, reference

TOKENS = 40
LAST_BITS = itertools.cycle([1.0, 1 + 2**-22])
OPS = [("mix", "independent"), ("mix", "competitive"), ("append", ""), ("pool", "")]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("op", "kind"), OPS)
@pytest.mark.parametrize(("n", "width"), [(1, 5), (3, 33), (4, 768)])
def test_plain_torch_passes(op: str, kind: str, dtype: str, n: int, width: int, cpu: torch.device) -> None:
    case = Case(op, dtype, 1, n, width, kind)
    assert gate.faults(cases.public_step(case, "torch"), case, cpu, TOKENS) == []


def uniform_gates(s, f, w_gate, bias, w_pool, gate):
    return right(s, f, 0 * w_gate, bias, w_pool, gate)


def swapped_gates(s, f, w_gate, bias, w_pool, gate):
    other = {"independent": "competitive", "competitive": "independent"}[gate]
    return right(s, f, w_gate, bias[:1] if other == "competitive" else bias.expand(s.shape[-2]), w_pool, other)


def dropped_stream(s, f, w_gate, bias, w_pool, gate):
    mixed, _, beta = right(s, f, w_gate, bias, w_pool, gate)
    return mixed, reference.attn_pool(mixed[:, 1:], w_pool, normalize=True), beta


def missing_gradient_path(s, f, w_gate, bias, w_pool, gate):
    mixed, _, beta = right(s, f, w_gate, bias, w_pool, gate)
    pooled = mix_and_pool(s.detach(), f, w_gate, bias, w_pool, gate=gate, normalize=True, backend="torch")[1]
    return mixed, pooled, beta


def without_the_norm(s, f, w_gate, bias, w_pool, gate):
    return mix_and_pool(s, f, w_gate, bias, w_pool, gate=gate, normalize=False, backend="torch")


def large_eps(s, f, w_gate, bias, w_pool, gate):
    return mix_and_pool(s, f, w_gate, bias, w_pool, gate=gate, normalize=True, eps=1e-3, backend="torch")


def rounded_before_the_read(s, f, w_gate, bias, w_pool, gate):
    mixed, _, beta = right(s, f, w_gate, bias, w_pool, gate)
    return mixed, reference.attn_pool(mixed, w_pool, normalize=True), beta


def half_precision_scores(s, f, w_gate, bias, w_pool, gate):
    return right(s, f, w_gate.bfloat16().float(), bias, w_pool, gate)


def one_wrong_token(s, f, w_gate, bias, w_pool, gate):
    mixed, pooled, beta = right(s, f, w_gate, bias, w_pool, gate)
    return mixed, torch.cat([pooled[:-1], pooled[:1]]), beta


def not_finite(s, f, w_gate, bias, w_pool, gate):
    mixed, pooled, beta = right(s, f, w_gate, bias, w_pool, gate)
    return mixed, pooled / (pooled != pooled[0, 0]), beta


def wrong_shape(s, f, w_gate, bias, w_pool, gate):
    mixed, pooled, beta = right(s, f, w_gate, bias, w_pool, gate)
    return mixed, pooled[:-1], beta


def different_each_time(s, f, w_gate, bias, w_pool, gate):
    mixed, pooled, beta = right(s, f, w_gate, bias, w_pool, gate)
    return mixed, pooled, beta * next(LAST_BITS)


def overwritten_input(s, f, w_gate, bias, w_pool, gate):
    results = right(s, f, w_gate, bias, w_pool, gate)
    f.data += 1e-3
    return results


def right(s, f, w_gate, bias, w_pool, gate):
    return mix_and_pool(s, f, w_gate, bias, w_pool, gate=gate, normalize=True, backend="torch")


MUTANTS = [uniform_gates, swapped_gates, dropped_stream, missing_gradient_path, without_the_norm, large_eps]
MUTANTS += [rounded_before_the_read, half_precision_scores, one_wrong_token, not_finite, wrong_shape]
MUTANTS += [different_each_time, overwritten_input]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["independent", "competitive"])
def test_a_wrong_implementation_is_stopped(mutant, kind: str, cpu: torch.device) -> None:
    case = Case("mix", "bf16", 9999, 3, 24, kind)
    found = gate.faults(lambda *x: mutant(*x, gate=kind), case, cpu, TOKENS)
    assert found
    assert all(f.startswith(f"mix/{kind}/bf16/T={TOKENS},n=3,C=24: ") and f.endswith(".") for f in found)


def test_the_sentence_says_what_is_off_and_by_how_much(cpu: torch.device) -> None:
    case = Case("mix", "bf16", 9999, 3, 24, "competitive")
    (said,) = [f for f in gate.faults(lambda *x: not_finite(*x, gate="competitive"), case, cpu, TOKENS) if "d is" in f]
    assert said == f"mix/competitive/bf16/T={TOKENS},n=3,C=24: pooled is not finite."
    found = gate.faults(lambda *x: large_eps(*x, gate="competitive"), case, cpu, TOKENS)
    assert any("pooled is off by " in f and " is allowed." in f for f in found)


def test_each_kind_of_kernel_is_checked_once_whatever_its_tokens(cpu: torch.device, pretend) -> None:
    made = []
    pretend(lambda case: made.append(case) or cases.public_step(case, "torch"))
    several = [Case("mix", "fp32", tokens, 2, 8, "competitive") for tokens in (16, 32, 64)]
    assert gate.check([*several, Case("pool", "fp32", 16, 2, 8)], cpu) == []
    for case in several:
        gate.require(case, cpu)
    assert [(case.op, case.tokens) for case in made] == [("mix", gate.TOKENS), ("pool", gate.TOKENS)]


def test_a_failed_gate_raises_with_its_first_fault(cpu: torch.device, pretend) -> None:
    pretend(lambda case: lambda *x: uniform_gates(*x, gate=case.gate))
    with pytest.raises(gate.GateFailed, match="nothing is timed: mix/competitive/bf16/T=1031,n=3,C=20: "):
        gate.require(Case("mix", "bf16", 16, 3, 20, "competitive"), cpu)


def test_inverting_has_to_pass_beside_ordinary_mixing_in_its_dtype_and_in_float32(
    cpu: torch.device, pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, said = [], "the rebuilt streams are off."
    pretend(lambda case: made.append(case) or cases.public_step(case, "torch"))
    monkeypatch.setattr(gate, "inverting_faults", lambda case, device: [f"{case.name}: {said}"])
    case = Case("mix-inverting", "fp16", gate.TOKENS, 2, 8, "competitive")
    assert gate.check([case], cpu) == [f"{case.name}: {said}"]
    assert [(each.op, each.dtype) for each in made] == [("mix", "fp16"), ("mix", "fp32")]
