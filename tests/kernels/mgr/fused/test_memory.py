"""What the kernels may read and write: nothing past an end, nothing unwritten, no input; layouts as torch has them."""

import pytest
import torch

from depthlab.kernels import mgr

KINDS = ("independent", "competitive", "append", "read")
GUARD = 64
CANARY = -12345.0


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


class Guarded:
    """Fresh memory full of NaN, with a canary before and after it."""

    def __init__(self) -> None:
        self.buffers = []

    def empty(self, shape, *, dtype, device):
        numel = torch.Size(shape).numel()
        buffer = torch.full([numel + 2 * GUARD], CANARY, dtype=dtype, device=device)
        inside = buffer[GUARD : GUARD + numel]
        inside.fill_(torch.nan if dtype.is_floating_point else -1)
        self.buffers.append(buffer)
        return inside.view(shape)

    def around(self, x):
        """A copy of x with NaN right before and after it: what is read past an end shows in the results."""
        buffer = torch.full([x.numel() + 2 * GUARD], torch.nan, dtype=x.dtype, device=x.device)
        inside = buffer[GUARD : GUARD + x.numel()].view(x.shape)
        return inside.copy_(x)

    def intact(self) -> bool:
        return all(bool((b[:GUARD] == CANARY).all() and (b[-GUARD:] == CANARY).all()) for b in self.buffers)


@pytest.fixture
def guarded(monkeypatch):
    """Every torch.empty and new_empty is guarded memory."""
    guards = Guarded()

    def new_empty(self, *size, dtype=None, device=None, **_):
        size = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        return guards.empty(size, dtype=dtype or self.dtype, device=device or self.device)

    def empty(*size, dtype=None, device=None, **_):
        size = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        return guards.empty(size, dtype=dtype or torch.float32, device=device or "cpu")

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch, "empty", empty)
    return guards


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize(
    ("n", "width", "dtype"), [(3, 33, torch.float32), (5, 100, torch.float16), (1, 1, torch.float32)]
)
def test_all_that_is_returned_was_written_and_nothing_else(fused, kind, force, guarded, n, width, dtype, held):
    force(HELD=held, BLOCK_C=32, HELD_WEIGHTS=held)
    inputs = fused.draw(kind, 5 if width > 1 else 3, n, width, dtype)
    outputs = fused.run(kind, inputs)
    upstream = fused.upstream_of(outputs)
    assert len(guarded.buffers) >= 4
    outputs, grads = fused.with_gradients(lambda x: fused.run(kind, x, normalize=True), inputs, upstream)
    assert all(bool(torch.isfinite(x).all()) for x in (*outputs, *grads))
    assert guarded.intact()


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize(("n", "width"), [(3, 33), (1, 1)])
def test_nothing_past_the_end_of_an_input_is_read(fused, kind, force, n, width, held):
    force(HELD=held, BLOCK_C=32, HELD_WEIGHTS=held)
    guards, inputs = Guarded(), fused.draw(kind, 3, n, width)
    results = []
    for place in (lambda x: x, guards.around):
        leaves = [place(x).requires_grad_() for x in inputs]
        outputs = fused.run(kind, leaves, normalize=True)
        grads = torch.autograd.grad(outputs, leaves, [place(x) for x in fused.upstream_of(outputs)])
        results.append([*outputs, *grads])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_inputs_and_upstream_gradients_are_left_alone(fused, kind):
    leaves = [x.requires_grad_() for x in fused.draw(kind, 3, 3, 20)]
    before = [x.detach().clone() for x in leaves]
    outputs = fused.run(kind, leaves, normalize=True)
    upstream = fused.upstream_of(outputs)
    kept = [x.clone() for x in [*outputs, *upstream]]
    torch.autograd.grad(outputs, leaves, upstream)
    assert all(torch.equal(x, y) for x, y in zip([*leaves, *outputs, *upstream], [*before, *kept], strict=True))


def test_results_share_no_memory_with_the_inputs_or_one_another(fused, kind):
    leaves = [x.requires_grad_() for x in fused.draw(kind, 3, 1, 20)]
    outputs = fused.run(kind, leaves)
    upstream = fused.upstream_of(outputs)
    grads = torch.autograd.grad(outputs, leaves, upstream)
    spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in [*leaves, *outputs, *upstream, *grads])
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))


def test_strided_and_expanded_inputs(fused, kind):
    inputs = fused.draw(kind, 3, 3, 16)
    streams = inputs[0]
    views = {
        "transposed": [streams.permute(2, 1, 0).contiguous().permute(2, 1, 0)],
        "every other": [streams.repeat_interleave(2, -1)[..., ::2]],
        "expanded": [streams[:1, :1].expand_as(streams)],
        "offset": [torch.cat([streams[:1], streams])[1:]],
    }
    if kind != "read":
        update = inputs[1]
        views["transposed"].append(update.t().contiguous().t())
        views["every other"].append(update.repeat_interleave(2, 0)[::2])
        views["expanded"].append(update[:1].expand_as(update))
        views["offset"].append(torch.cat([update[:1], update])[1:])
    weights = [w.repeat_interleave(2)[::2] for w in inputs[len(views["offset"]) :]]
    for view in views.values():
        results = []
        for args in ([*view, *weights], [x.contiguous() for x in (*view, *weights)]):
            leaves = [x.detach().requires_grad_() for x in args]
            outputs = fused.run(kind, leaves)
            upstream = [
                x.expand_as(y) for x, y in zip([y[:1] for y in fused.upstream_of(outputs)], outputs, strict=True)
            ]
            results.append([*outputs, *torch.autograd.grad(outputs, leaves, upstream)])
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_an_upstream_gradient_of_a_sum_is_one_expanded_number(fused, kind):
    leaves = [x.requires_grad_() for x in fused.draw(kind, 3, 3, 16)]
    outputs = fused.run(kind, leaves)
    expanded = torch.autograd.grad(sum(x.sum() for x in outputs), leaves, retain_graph=True)
    dense = torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])
    assert all(torch.equal(x, y) for x, y in zip(expanded, dense, strict=True))


def test_leading_dimensions_do_not_matter(fused, kind):
    inputs = fused.draw(kind, 4, 3, 16)
    flat = fused.with_gradients(lambda x: fused.run(kind, x), inputs)
    upstream = fused.upstream_of(flat[0])
    stored = 1 if kind == "read" else 2
    shaped = [x.unflatten(0, (2, 1, 2)) if i < stored else x for i, x in enumerate(inputs)]
    again = fused.with_gradients(lambda x: fused.run(kind, x), shaped, [x.unflatten(0, (2, 1, 2)) for x in upstream])
    assert all(y.shape[:3] == (2, 1, 2) for y in again[0])
    for x, y in zip([*flat[0], *flat[1]], [*again[0], *again[1]], strict=True):
        assert torch.equal(x.flatten(), y.flatten())
    one = fused.run(kind, [x[1] if i < stored else x for i, x in enumerate(inputs)])
    assert all(torch.equal(x[1], y) for x, y in zip(flat[0], one, strict=True))


def test_no_tokens_give_no_tokens_and_zero_weight_gradients(fused, kind):
    leaves = [x.requires_grad_() for x in fused.draw(kind, 0, 3, 16)]
    outputs = fused.run(kind, leaves, normalize=True)
    assert all(x.shape[0] == 0 for x in outputs)
    grads = torch.autograd.grad(sum(x.sum() for x in outputs), leaves)
    assert all(torch.equal(g, torch.zeros_like(x)) for g, x in zip(grads, leaves, strict=True))


# ---- the backward that rebuilds its input: `known` is what it gets


GATES = ("independent", "competitive")


@pytest.fixture(params=GATES)
def gate(request) -> str:
    return request.param


def known_to_backward(fused, gate, tokens, n, width, dtype=torch.float32):
    """(mixed, slots, values, update, w_gate, bias, w_pool, beta, kept, d_mixed, d_pooled, d_beta), some rows exact."""
    inputs = fused.draw(gate, tokens, n, width, dtype)
    mixed, pooled, beta, kept = mgr.mix_and_pool_forward(*inputs, gate=gate, normalize=True, backend="triton")
    exact = fused.keep_rows(inputs[0], beta, 0.5)
    return [mixed, *exact, *inputs[1:], beta, kept, *fused.upstream_of((mixed, pooled, beta))]


def invert_from(gate, known):
    mixed, slots, values, *rest = known
    how = {"gate": gate, "normalize": True, "backend": "triton"}
    return mgr.mix_and_pool_backward(mixed, mgr.ExactRows(slots, values), *rest, **how)


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize(
    ("n", "width", "dtype"), [(3, 33, torch.float32), (5, 100, torch.float16), (1, 1, torch.float32)]
)
def test_all_that_inverting_returns_was_written_and_nothing_else(fused, gate, force, guarded, n, width, dtype, held):
    force(HELD=held, BLOCK_C=32, HELD_WEIGHTS=held)
    found = invert_from(gate, known_to_backward(fused, gate, 5, n, width, dtype))
    assert len(guarded.buffers) >= 7
    assert all(bool(torch.isfinite(x).all()) for x in found)
    assert guarded.intact()


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize(("n", "width"), [(3, 33), (1, 1)])
def test_inverting_reads_nothing_past_an_end_and_writes_no_input(fused, gate, force, n, width, held):
    force(HELD=held, BLOCK_C=32, HELD_WEIGHTS=held)
    guards, known = Guarded(), known_to_backward(fused, gate, 3, n, width)
    around = [guards.around(x) if x.is_floating_point() else torch.cat([x[:0], x]) for x in known]
    before = [x.clone() for x in around]
    assert all(torch.equal(x, y) for x, y in zip(invert_from(gate, known), invert_from(gate, around), strict=True))
    assert all(torch.equal(x, y) for x, y in zip(before, around, strict=True))


def test_inverting_takes_strided_inputs_and_shares_no_memory(fused, gate):
    known = known_to_backward(fused, gate, 3, 3, 16)
    found = invert_from(gate, known)
    strided = invert_from(gate, [x.repeat_interleave(2, -1)[..., ::2] for x in known])
    assert all(torch.equal(x, y) for x, y in zip(found, strided, strict=True))
    spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in [*known, *found])
    weights = {x.data_ptr() for x in found[3:]}  # those of the weights are views of one sum
    apart = [span for span in spans if span[0] not in weights]
    assert all(end <= start for (_, end), (start, _) in zip(apart, apart[1:], strict=False))
