"""A mixing layer that keeps no streams, in plain torch: the input that comes back, the gradients, the sentences."""

import pytest
import torch

from depthlab.kernels import mgr
from depthlab.kernels.mgr import reference

GATES = ("independent", "competitive")
SHAPES = [(1, 1), (1, 33), (2, 5), (3, 100), (5, 33), (8, 12), (16, 7)]
KEPT = {"none given": None, "none": float("inf"), "some": 0.5, "all": -1.0}  # exact: the rows with gates above this
HALF = (torch.float16, torch.bfloat16)


@pytest.fixture(params=GATES)
def gate(request) -> str:
    return request.param


def keep_rows(streams, beta, above):
    """The rows whose gate is above a number, last ones first."""
    if above is None:
        return None
    chosen = beta > above
    slots = torch.full(beta.shape, -1, dtype=torch.int32)
    slots[chosen] = torch.arange(int(chosen.sum()), dtype=torch.int32).flip(0)
    return mgr.ExactRows(slots, streams[chosen].flip(0))


def invert(inputs, gate, above=None, which=(0, 1, 2), normalize=True, backend="torch"):
    """(mixed, beta), what the backward returns, and the gradients of autograd at the true streams."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = mgr.mix_and_pool(*leaves, gate=gate, normalize=normalize, backend=backend)
    g = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype) for x in outputs]
    true = torch.autograd.grad(
        [outputs[i] for i in which], leaves, [upstream[i] for i in which], allow_unused=True, materialize_grads=True
    )
    how = {"gate": gate, "normalize": normalize, "backend": backend}
    mixed, pooled, beta, kept = mgr.mix_and_pool_forward(*inputs, **how)
    assert all(torch.equal(x, y) for x, y in zip((mixed, pooled, beta), outputs, strict=True))
    upstream = [x if i in which else None for i, x in enumerate(upstream)]
    exact = keep_rows(inputs[0], beta, above)
    return (mixed, beta), mgr.mix_and_pool_backward(mixed, exact, *inputs[1:], beta, kept, *upstream, **how), true


def worst(found, true) -> float:
    """The largest relative error, of each tensor's largest value, infinite where not finite."""
    errors = [
        (x.double() - y.double()).abs().max() / y.double().abs().max().clamp_min(1)
        for x, y in zip(found, true, strict=True)
    ]
    error = torch.stack(errors).max().item()
    return error if error == error else float("inf")


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("n", "width"), SHAPES)
def test_streams_and_gradients_come_back_in_float64(make_inputs, gate, n, width, normalize):
    inputs = make_inputs(9, n, width, gate)
    _, (streams, *grads), true = invert(inputs, gate, 0.9, normalize=normalize)
    assert worst([streams, *grads], [inputs[0], *true]) <= 1e-12


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_a_rebuilt_row_has_the_rounding_of_what_was_stored_over_one_minus_its_gate(make_inputs, gate, dtype, kept):
    inputs = [x.to(dtype if i < 2 else torch.float32) for i, x in enumerate(make_inputs(40, 4, 30, gate))]
    (mixed, beta), (streams, *grads), true = invert(inputs, gate, KEPT[kept])
    above = float("inf") if KEPT[kept] is None else KEPT[kept]
    assert torch.equal(streams[beta > above], inputs[0][beta > above])
    unit, left = torch.finfo(dtype).eps / 2, 1 / (1 - beta.double()).unsqueeze(-1)
    size = (inputs[0].abs().amax(-1, keepdim=True) + inputs[1].abs().amax(-1)[:, None, None]).double()
    allowed = unit * (inputs[0].double().abs() + left * mixed.double().abs()) + 4 * 2.0**-24 * left * size
    assert ((streams.double() - inputs[0].double()).abs() <= allowed).all()
    if kept in ("some", "all"):
        assert worst(grads, true) <= (64 if dtype == torch.float32 else 16) * unit  # measured: up to 20 and 8


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1), ()])
def test_outputs_that_nobody_differentiates(make_inputs, gate, which):
    inputs = make_inputs(5, 3, 10, gate)
    if not which:
        (mixed, beta), _, _ = invert(inputs, gate)
        kept = beta.new_empty(0)
        found = mgr.mix_and_pool_backward(mixed, None, *inputs[1:], beta, kept, None, None, None, gate=gate)
        assert all(torch.equal(x, torch.zeros_like(y)) for x, y in zip(found[1:], inputs, strict=True))
        return
    _, (_, *grads), true = invert(inputs, gate, which=which)
    assert worst(grads, true) <= 1e-11


def test_the_two_halves_are_not_recorded_by_autograd(make_inputs, gate):
    leaves = [x.requires_grad_() for x in make_inputs(3, 3, 10, gate)]
    mixed, pooled, beta, kept = mgr.mix_and_pool_forward(*leaves, gate=gate)
    found = mgr.mix_and_pool_backward(mixed, None, *leaves[1:], beta, kept, mixed, pooled, beta, gate=gate)
    alone = mgr.unmix(mixed, None, leaves[1], beta)
    assert not any(x.requires_grad for x in (mixed, pooled, beta, *found, alone))


@pytest.mark.parametrize("which", [(0, 1, 2), (1,)])
def test_gradients_of_kept_streams_are_autograds(make_inputs, gate, which):
    inputs = make_inputs(5, 3, 10, gate, torch.float32)
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = mgr.mix_and_pool(*leaves, gate=gate, normalize=True)
    upstream = [torch.randn_like(x) for x in outputs]
    true = torch.autograd.grad([outputs[i] for i in which], leaves, [upstream[i] for i in which])
    kept = mgr.mix_and_pool_forward(*inputs, gate=gate, normalize=True)[3]
    upstream = [x if i in which else None for i, x in enumerate(upstream)]
    found = mgr.mix_and_pool_gradients(*inputs, kept, *upstream, gate=gate, normalize=True)
    assert all(torch.equal(x, y) for x, y in zip(found, true, strict=True))


def test_unmix_is_what_the_backward_rebuilds(make_inputs, gate):
    inputs = make_inputs(5, 4, 12, gate)
    (mixed, beta), (streams, *_), _ = invert(inputs, gate, 0.5)
    assert torch.equal(mgr.unmix(mixed, keep_rows(inputs[0], beta, 0.5), inputs[1], beta), streams)


def test_a_closed_gate_returns_the_stream_itself():
    mixed, update = torch.randn(4, 3, 8), torch.randn(4, 8)
    assert torch.equal(mgr.unmix(mixed, None, update, torch.zeros(4, 3)), mixed)


def test_equal_stream_and_update_come_back_exactly_at_any_gate():
    update = torch.randn(4, 8)
    mixed, beta = update[:, None].repeat(1, 3, 1), torch.rand(4, 3)
    assert torch.equal(mgr.unmix(mixed, None, update, beta), mixed)


def test_small_gates_lose_less_than_the_quotient_of_18_as_it_is_written():
    """s' + beta / (1 - beta) (s' - F) rounds what is small once more, (s' - beta F) / (1 - beta) what is large."""
    g = torch.Generator().manual_seed(0)
    streams, update = (torch.randn(2000, 1, 8, generator=g, dtype=torch.float64).float() for _ in range(2))
    beta = torch.full((2000, 1), 0.03)
    mixed = (streams.double() + beta.double()[..., None] * (update.double() - streams.double())).float()
    b = beta[..., None]
    ours = mgr.unmix(mixed, None, update[:, 0], beta)
    written = (mixed - b * update) / (1 - b)
    far = [(x.double() - streams.double()).square().mean().sqrt().item() for x in (ours, written)]
    assert far[0] < 0.5 * far[1]


def test_a_gate_of_exactly_one_is_finite_and_with_its_row_kept_right(make_inputs):
    inputs = [x.float() for x in make_inputs(6, 3, 20, "independent")]
    inputs[3][1] = 100.0
    (mixed, beta), (streams, *grads), _ = invert(inputs, "independent")
    assert torch.equal(beta[:, 1], torch.ones(6)) and torch.equal(streams[:, 1], inputs[1])
    assert all(bool(torch.isfinite(x).all()) for x in (streams, *grads))
    _, (streams, *grads), true = invert(inputs, "independent", 0.5)
    assert torch.equal(streams[:, 1], inputs[0][:, 1])
    assert worst(grads, true) <= 1e-5


WRONG = {
    "towards the update": lambda m, f, beta: m - (beta / (1 - beta)).unsqueeze(-1) * (m - f.unsqueeze(-2)),
    "without 1 / (1 - beta)": lambda m, f, beta: m - beta.unsqueeze(-1) * f.unsqueeze(-2),
    "a gate too few": lambda m, f, beta: m + beta.unsqueeze(-1) * (m - f.unsqueeze(-2)),
    "the mixed streams": lambda m, f, beta: m,
    "another stream's gate": lambda m, f, beta: RIGHT(m, f, beta.flip(-1)),
}
RIGHT = reference.unmix


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_inverse_fails_the_same_comparison(make_inputs, monkeypatch, gate, name):
    inputs = make_inputs(9, 3, 33, gate)
    monkeypatch.setattr(reference, "unmix", WRONG[name])
    _, (streams, *grads), true = invert(inputs, gate, 0.9)
    assert worst([streams], [inputs[0]]) > 1e-3 and worst(grads, true) > 1e-3


def test_inputs_are_left_alone_and_strides_do_not_matter(make_inputs, gate):
    inputs = make_inputs(4, 3, 10, gate)
    mixed, pooled, beta, kept = mgr.mix_and_pool_forward(*inputs, gate=gate)
    exact = keep_rows(inputs[0], beta, 0.5)
    known = [mixed, *exact, *inputs[1:], beta, kept, mixed.clone(), pooled, beta.clone()]
    before = [x.clone() for x in known]

    def backward(mixed, slots, values, *rest):
        return mgr.mix_and_pool_backward(mixed, mgr.ExactRows(slots, values), *rest, gate=gate)

    found = backward(*known)
    strided = backward(*(x.repeat_interleave(2, -1)[..., ::2] for x in known))
    assert all(torch.equal(x, y) for x, y in zip(before, known, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(found, strided, strict=True))


def test_no_tokens_give_no_tokens_and_zero_weight_gradients(make_inputs, gate):
    inputs = make_inputs(0, 3, 10, gate)
    _, (streams, d_streams, d_update, *weights), _ = invert(inputs, gate, 0.5)
    assert streams.shape == d_streams.shape == (0, 3, 10) and d_update.shape == (0, 10)
    assert all(not x.any() for x in weights)


def test_autocast_changes_nothing(make_inputs, gate):
    inputs = [x.float() for x in make_inputs(4, 3, 10, gate)]
    plain = invert(inputs, gate, 0.5)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = invert(inputs, gate, 0.5)[1]
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(plain, cast, strict=True))


BAD = {
    "slots of int64": (lambda k: k.update(slots=k["slots"].long()), TypeError, "exact.slots has dtype torch.int64"),
    "slots of another shape": (lambda k: k.update(slots=k["slots"][1:]), ValueError, r"exact.slots has shape \[3, 3\]"),
    "no slots": (lambda k: k.update(slots=None), TypeError, "exact.slots must be a torch.Tensor, got NoneType"),
    "wider values": (lambda k: k.update(values=torch.zeros(2, 9)), ValueError, r"exact.values has shape \[2, 9\]"),
    "values of one dimension": (lambda k: k.update(values=torch.zeros(8)), ValueError, r"exact.values has shape \[8\]"),
    "values of another dtype": (
        lambda k: k.update(values=k["values"].half()), TypeError, "keep such a layer's input instead",
    ),
    "fewer gates": (lambda k: k.update(beta=k["beta"][:, 1:]), ValueError, r"beta has shape \[4, 2\]; it needs"),
    "gates of int": (lambda k: k.update(beta=k["beta"].int()), TypeError, "beta has dtype torch.int32"),
    "another upstream gradient": (lambda k: k.update(d_pooled=torch.zeros(4, 9)), ValueError, r"d_pooled has shape"),
    "an upstream gradient that is none": (lambda k: k.update(d_mixed=1.0), TypeError, "d_mixed must be a torch.Tensor"),
    "another update": (lambda k: k.update(update=torch.zeros(4, 9)), ValueError, r"update has shape \[4, 9\]"),
    "an unknown gate": (lambda k: k.update(gate="open"), ValueError, "gate='open' is unknown"),
    "no root": (lambda k: k.update(eps=0.0), ValueError, "eps=0.0 is not"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_gets_one_sentence(make_inputs, name):
    spoil, error, sentence = BAD[name]
    inputs = [x.float() for x in make_inputs(4, 3, 8, "competitive")]
    mixed, pooled, beta, kept = mgr.mix_and_pool_forward(*inputs, gate="competitive")
    slots, values = keep_rows(inputs[0], beta, 0.2)
    given = {"slots": slots, "values": values, "update": inputs[1], "beta": beta, "d_mixed": mixed, "d_pooled": pooled}
    given |= {"gate": "competitive", "eps": 1e-6}
    spoil(given)
    exact = mgr.ExactRows(given.pop("slots"), given.pop("values"))
    weights = dict(zip(("w_gate", "bias", "w_pool"), inputs[2:], strict=True))
    with pytest.raises(error, match=sentence) as raised:
        mgr.mix_and_pool_backward(mixed, exact, **given, **weights, kept=kept, d_beta=None)
    assert str(raised.value).endswith(".") and "\n" not in str(raised.value)


def test_unmix_says_what_does_not_fit():
    mixed, beta = torch.zeros(4, 3, 8), torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"mixed has shape \[4, 3, 8\] and update \[4, 7\]"):
        mgr.unmix(mixed, None, torch.zeros(4, 7), beta)
    with pytest.raises(TypeError, match="mixed must be a torch.Tensor, got list"):
        mgr.unmix([1.0], None, torch.zeros(4, 8), beta)
    with pytest.raises(ValueError, match=r"beta has shape \[4\]"):
        mgr.unmix(mixed, None, torch.zeros(4, 8), beta[:, 0])
