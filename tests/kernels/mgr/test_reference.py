"""The torch statement of one MGR layer against numbers by hand, numpy, finite differences, and wrong variants."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from depthlab.kernels.mgr import append_and_pool, attn_pool, mix_and_pool, reference

GATES = ("independent", "competitive")
NAMES = ("streams", "pooled", "beta", "d streams", "d update", "d w_gate", "d bias", "d w_pool")


def test_three_tokens_by_hand_with_independent_gates():
    # C = 1: RMSNorm of a number is its sign, so with w_gate = ln 3 and zero biases a gate is 3/4 or 1/4, and with
    # w_pool = ln 2 a positive stream weighs 4 times a negative one.
    streams = torch.tensor([[[2.0], [-4.0]], [[1.0], [3.0]], [[-8.0], [-8.0]]], dtype=torch.float64)
    update = torch.tensor([[6.0], [-3.0], [0.0]], dtype=torch.float64)
    ln2, ln3 = (torch.tensor([math.log(x)], dtype=torch.float64) for x in (2, 3))
    mixed, pooled, beta = mix_and_pool(streams, update, ln3, streams.new_zeros(2), ln2, gate="independent", eps=1e-30)
    close(beta, [[0.75, 0.25], [0.75, 0.75], [0.25, 0.25]])
    close(mixed, [[[5.0], [-1.5]], [[-2.0], [-1.5]], [[-6.0], [-6.0]]])
    close(pooled, [[0.8 * 5 - 0.2 * 1.5], [-1.75], [-6.0]])


def test_three_tokens_by_hand_with_competitive_gates():
    # The same, with shares b : z_1 : z_2 of 1 : 3 : 1/3, of 1 : 3 : 3 and of 1 : 1/3 : 1/3.
    streams = torch.tensor([[[2.0], [-4.0]], [[1.0], [3.0]], [[-8.0], [-8.0]]], dtype=torch.float64)
    update = torch.tensor([[6.0], [-3.0], [0.0]], dtype=torch.float64)
    ln2, ln3 = (torch.tensor([math.log(x)], dtype=torch.float64) for x in (2, 3))
    mixed, pooled, beta = mix_and_pool(streams, update, ln3, streams.new_zeros(1), ln2, gate="competitive", eps=1e-30)
    close(beta, [[9 / 13, 1 / 13], [3 / 7, 3 / 7], [1 / 5, 1 / 5]])
    close(mixed, [[[62 / 13], [-42 / 13]], [[-5 / 7], [3 / 7]], [[-32 / 5], [-32 / 5]]])
    close(pooled, [[41.2 / 13], [0.2 * -5 / 7 + 0.8 * 3 / 7], [-6.4]])


def test_append_and_pool_by_hand():
    streams, update = torch.tensor([[[3.0]]], dtype=torch.float64), torch.tensor([[-5.0]], dtype=torch.float64)
    appended, pooled = append_and_pool(streams, update, torch.tensor([math.log(2)], dtype=torch.float64), eps=1e-30)
    close(appended, [[[3.0], [-5.0]]])
    close(pooled, [[0.8 * 3 - 0.2 * 5]])


def test_rms_normalize_by_hand():
    close(reference.rms_normalize(torch.tensor([3.0, 4.0], dtype=torch.float64), eps=0.5), [3 / 13**0.5, 4 / 13**0.5])


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("n", "width"), [(1, 1), (1, 7), (2, 3), (4, 48), (7, 5), (16, 33)])
def test_values_and_every_gradient_agree_with_numpy(truth, make_inputs, gate, normalize, n, width):
    assert worst_error(truth, make_inputs, gate, normalize, n, width, torch.float64) < 1
    assert worst_error(truth, make_inputs, gate, normalize, n, width, torch.float32) < 1


@pytest.mark.parametrize("normalize", [False, True])
def test_append_and_pool_and_attn_pool_agree_with_numpy(truth, make_inputs, normalize):
    streams, update, _, _, w_pool = make_inputs(3, 3, 10, "independent")
    for x in (streams, update, w_pool):
        x.requires_grad_()
    appended, h = append_and_pool(streams, update, w_pool, normalize=normalize)
    upstream = torch.randn(appended.shape, dtype=torch.float64), torch.randn(h.shape, dtype=torch.float64)
    d_s, d_f, d_q = torch.autograd.grad((appended, h), (streams, update, w_pool), upstream)
    pooled = attn_pool(streams, w_pool, normalize=normalize)
    p_s, p_q = torch.autograd.grad(pooled, (streams, w_pool), upstream[1])
    query, append_query, pool_query = w_pool.detach().numpy(), 0, 0
    for t in range(3):
        s, f, g_s, g_h = (x[t].detach().numpy() for x in (streams, update, *upstream))
        v = truth.append_token(s, f, query, normalize, 1e-6)
        close(appended[t], v.mixed)
        close(h[t], v.h)
        d_mixed, share = truth.read_backward(v, query, g_s, g_h, normalize)
        close(d_s[t], d_mixed[:-1])
        close(d_f[t], d_mixed[-1])
        append_query = append_query + share
        v = truth.pool_token(s, query, normalize, 1e-6)
        close(pooled[t], v.h)
        d_mixed, share = truth.read_backward(v, query, 0 * s, g_h, normalize)
        close(p_s[t], d_mixed)
        pool_query = pool_query + share
    close(d_q, append_query)
    close(p_q, pool_query)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_first_and_second_derivatives_pass_finite_differences(make_inputs, gate, normalize):
    inputs = tuple(x.requires_grad_() for x in make_inputs(2, 3, 4, gate))

    def layer(*args):
        return mix_and_pool(*args, gate=gate, normalize=normalize)

    assert gradcheck(layer, inputs, check_forward_ad=True)
    assert gradgradcheck(layer, inputs)


def test_derivatives_of_appending_and_of_pooling_pass_finite_differences(make_inputs):
    streams, update, _, _, w_pool = (x.requires_grad_() for x in make_inputs(2, 3, 4, "independent"))
    assert gradcheck(lambda *a: append_and_pool(*a, normalize=True), (streams, update, w_pool))
    assert gradgradcheck(lambda *a: append_and_pool(*a, normalize=True), (streams, update, w_pool))
    assert gradcheck(lambda *a: attn_pool(*a, normalize=True), (streams, w_pool))
    assert gradgradcheck(lambda *a: attn_pool(*a), (streams, w_pool))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_both_end_points_of_the_gate_are_exact(make_inputs, dtype):
    streams, update, w_gate, _, w_pool = make_inputs(5, 3, 9, "independent", dtype)
    for bias, expected in ((-1e4, streams), (1e4, update.unsqueeze(1).expand_as(streams))):
        b = torch.full((3,), bias, dtype=torch.float32)
        mixed, _, beta = mix_and_pool(streams, update, w_gate, b, w_pool, gate="independent")
        assert torch.equal(beta, torch.full_like(beta, float(bias > 0)))
        assert torch.equal(mixed, expected)
    mixed, _, beta = mix_and_pool(streams, update, w_gate, torch.tensor([1e4]), w_pool, gate="competitive")
    assert torch.equal(mixed, streams) and not beta.any()


@pytest.mark.parametrize("bias", [-200.0, 200.0])
@pytest.mark.parametrize("gate", GATES)
def test_saturated_gates_give_finite_gradients(make_inputs, gate, bias):
    inputs = list(make_inputs(4, 3, 8, gate, torch.float32))
    inputs[3] = torch.full_like(inputs[3], bias)
    inputs = [x.requires_grad_() for x in inputs]
    total = sum(x.square().sum() for x in mix_and_pool(*inputs, gate=gate))
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(total, inputs))


def test_zero_streams_and_a_zero_update_stay_finite():
    for gate in GATES:
        s, f, w = torch.zeros(2, 3, 4), torch.zeros(2, 4), torch.ones(4)
        inputs = [x.requires_grad_() for x in (s, f, w, torch.zeros(3 if gate == "independent" else 1), torch.ones(4))]
        out = mix_and_pool(*inputs, gate=gate, normalize=True)
        grads = torch.autograd.grad([x.sum() for x in out], inputs)
        assert all(torch.isfinite(x).all() for x in (*out, *grads))


def test_a_nan_reaches_its_own_token_and_no_other(make_inputs):
    streams, *rest = make_inputs(3, 2, 5, "competitive")
    streams[1, 0, 2] = math.nan
    outputs = mix_and_pool(streams, *rest, gate="competitive")
    for x in outputs:
        assert torch.isnan(x).flatten(1).any(1).tolist() == [False, True, False]
    assert torch.isnan(outputs[1][1]).all()


# ---- wrong variants: each must fail the very comparison that the right one passes


def _sum_norm(x, eps=1e-6):
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def _eps_outside(x, eps=1e-6):
    return 1 / (x.square().mean(-1, keepdim=True).sqrt() + eps**0.5)


def _centred(x, eps=1e-6):
    return torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + eps)


def _uniform(z, bias):
    return torch.sigmoid(z + bias).mean(-1, keepdim=True).expand_as(z)


def _drop_last_stream(streams, alpha):
    return (alpha.unsqueeze(-1) * streams)[..., :-1, :].sum(-2)


RIGHT = SimpleNamespace(**vars(reference))
MUTANTS = {
    "uniform gates": ("independent", {"independent_gate": _uniform}),
    "a dropped stream": ("independent", {"pool": _drop_last_stream}),
    "no gradient through the norm": (
        "independent",
        {"inverse_rms": lambda x, eps=1e-6: RIGHT.inverse_rms(x.detach(), eps)},
    ),
    "no gradient through the gate": (
        "independent",
        {"gate_values": lambda *a, **k: RIGHT.gate_values(*a, **k).detach()},
    ),
    "no gradient through the pool": ("independent", {"pool_weights": lambda *a: RIGHT.pool_weights(*a).detach()}),
    "competitive gates for independent": (
        "independent",
        {"independent_gate": lambda z, b: RIGHT.competitive_gate(z, b[:1])},
    ),
    "independent gates for competitive": ("competitive", {"competitive_gate": RIGHT.independent_gate}),
    "the forget logit's sign turned": ("competitive", {"competitive_gate": lambda z, b: RIGHT.competitive_gate(z, -b)}),
    "the forget share handed out": (
        "competitive",
        {"competitive_gate": lambda z, b: RIGHT.competitive_gate(z, b) / RIGHT.competitive_gate(z, b).sum(-1, True)},
    ),
    "gate and carry swapped": ("independent", {"interpolate": lambda s, f, b: RIGHT.interpolate(s, f, 1 - b)}),
    "sum for mean in the norm": ("independent", {"inverse_rms": _sum_norm}),
    "eps outside the root": ("independent", {"inverse_rms": _eps_outside}),
    "LayerNorm for RMSNorm": ("independent", {"inverse_rms": _centred}),
    "no 1/sqrt(C)": ("independent", {"scores": lambda s, w, eps=1e-6: RIGHT.scores(s, w, eps) * s.shape[-1] ** 0.5}),
    "h without its norm": ("independent", {"rms_normalize": lambda x, eps=1e-6: x}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_variants_fail_the_same_comparison(truth, make_inputs, monkeypatch, name):
    gate, patches = MUTANTS[name]
    assert worst_error(truth, make_inputs, gate, True, 4, 48, torch.float32, eps=1e-2) < 1
    for function, wrong in patches.items():
        monkeypatch.setattr(reference, function, wrong)
    assert worst_error(truth, make_inputs, gate, True, 4, 48, torch.float32, eps=1e-2) > 1


def test_pooling_the_rounded_streams_is_not_the_rule(make_inputs):
    """The pool sees the mixed streams before they are stored: in bfloat16 the two differ by more than one rounding."""
    inputs = make_inputs(64, 4, 48, "independent", torch.bfloat16)
    stored, pooled, _ = mix_and_pool(*inputs, gate="independent")
    exact = mix_and_pool(*(x.float() for x in inputs), gate="independent")[1]
    assert torch.equal(pooled, exact.bfloat16())
    assert not torch.equal(pooled, attn_pool(stored, inputs[4]))


def worst_error(truth, make_inputs, gate, normalize, n, width, dtype, eps=1e-6):
    """Largest error of three outputs and five gradients, in units of the tolerance.

    The tolerance is 128 u times the largest value of the tensor: a logit is a sum of C products and reaches 10, softmax
    and sigmoid pass its absolute error on as a relative one, and a gradient goes through two of them. Measured: up to
    27 u in float32 and 55 u in float64, where numpy rounds as much as torch. The mildest wrong variant: a million u.
    """
    inputs = make_inputs(6, n, width, gate, dtype)
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = mix_and_pool(*leaves, gate=gate, normalize=normalize, eps=eps)
    g = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=g, dtype=dtype) for x in outputs]
    total = sum((x * up).sum() for x, up in zip(outputs, upstream, strict=True))
    found = (*outputs, *torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))
    expected = truth.layer(
        *(x.double().numpy() for x in inputs), gate, normalize, eps, [x.double().numpy() for x in upstream]
    )
    unit = torch.finfo(dtype).eps / 2
    errors = []
    for name, x, y in zip(NAMES, found, expected, strict=True):
        y = torch.from_numpy(y)
        assert x.shape == y.shape, name
        error = (x.detach().double() - y).abs().max().item()
        # Where the true gradient vanishes (w_pool of one stream) there is no scale but 1.
        errors.append(error / (128 * unit * max(y.abs().max().item(), 1.0)))
    assert all(math.isfinite(e) for e in errors), dict(zip(NAMES, errors, strict=True))
    return max(errors)


def close(found, expected):
    torch.testing.assert_close(
        torch.as_tensor(found).detach(), torch.as_tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize("size", [1e-17, 1e15, 1e17])
def test_gradients_are_right_over_the_whole_allowed_range(make_inputs, size):
    """The cube of an inverse RMS leaves float32's range long before its square does."""
    streams, update, *weights = make_inputs(3, 2, 8, "independent")
    eps = 1.2e-38 if size < 1 else 1e-6
    gradients = []
    for dtype in (torch.float64, torch.float32):
        inputs = [x.to(dtype).requires_grad_() for x in (streams * size, update * size, *weights)]
        read = reference.mix_and_pool(*inputs, gate="independent", normalize=True, eps=eps)[1]
        gradients.append(torch.autograd.grad(read.square().sum() + read.sum(), inputs))
    for true, found in zip(*gradients, strict=True):
        assert (found - true).abs().max() < 1e-4 * true.abs().max()
