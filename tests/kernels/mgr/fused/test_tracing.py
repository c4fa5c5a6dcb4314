"""The operators as torch.library, fake tensors and torch.compile see them."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from depthlab.kernels.mgr import ops

KINDS = ("independent", "competitive", "append", "read")
PLACES = {"append": (0, 1, 4), "read": (0, 4)}


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


def five(kind, inputs):
    given = dict(zip(PLACES.get(kind, range(5)), inputs, strict=True))
    return [given.get(i) for i in range(5)]


def test_opcheck_of_the_forward(fused, kind):
    for needs in (False, True):
        inputs = [x.requires_grad_(needs) for x in fused.draw(kind, 2, 2, 8)]
        torch.library.opcheck(ops.layer, (*five(kind, inputs), kind, True, 1e-6, needs))


@pytest.mark.parametrize("given", [(True, True, True), (False, True, False), (True, False, False)])
def test_opcheck_of_the_backward(fused, kind, given):
    inputs = five(kind, fused.draw(kind, 2, 2, 8))
    mixed, pooled, beta, kept = ops.layer(*inputs, kind, True, 1e-6, True)
    upstream = [
        torch.randn_like(x) if use and x.numel() else None for x, use in zip((mixed, pooled, beta), given, strict=True)
    ]
    torch.library.opcheck(ops.layer_backward, (*inputs, kept, *upstream, kind, True, 1e-6))


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.float32, torch.float16, torch.float32)])
def test_fake_results_are_like_real_ones(fused, kind, dtypes):
    """Shapes, dtypes and strides, forward and backward, for contiguous and for transposed inputs."""
    inputs = fused.draw(kind, (2, 1), 2, 8, dtypes)
    inputs[0] = inputs[0].transpose(0, 1).contiguous().transpose(0, 1)
    real = fused.with_gradients(lambda x: fused.run(kind, x, normalize=True), inputs)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x).requires_grad_() for x in inputs]
        outputs = fused.run(kind, fakes, normalize=True)
        grads = torch.autograd.grad(outputs, fakes, [torch.empty_like(x) for x in outputs])
    for x, y in zip([*real[0], *real[1]], [*outputs, *grads], strict=True):
        assert (x.shape, x.dtype, x.stride(), x.device) == (y.shape, y.dtype, y.stride(), y.device)


def test_meta_tensors_go_through_the_operator(fused, kind):
    inputs = [None if x is None else x.to("meta") for x in five(kind, fused.draw(kind, 4, 3, 8, torch.float16))]
    mixed, pooled, beta, kept = ops.layer(*inputs, kind, False, 1e-6, True)
    n = 4 if kind == "append" else 3
    assert list(pooled.shape) == [4, 8] and pooled.dtype == torch.float16 and pooled.is_meta
    assert list(mixed.shape) == ([0] if kind == "read" else [4, n, 8])
    assert list(beta.shape) == ([0] if kind in ("read", "append") else [4, n]) and beta.dtype == torch.float32
    assert list(kept.shape) == [4, (2 if kind in ("read", "append") else 4) * n + 1]


def compiled(fused, kind, backend, **how):
    torch._dynamo.reset()
    return torch.compile(lambda x: fused.run(kind, x, normalize=True), backend=backend, fullgraph=True, **how)


def test_compiling_the_full_graph_changes_nothing(fused, kind):
    inputs = fused.draw(kind, 3, 2, 8)
    eager = fused.with_gradients(lambda x: fused.run(kind, x, normalize=True), inputs)
    layer = compiled(fused, kind, "aot_eager")
    traced = fused.with_gradients(layer, inputs)
    for x, y in zip([*eager[0], *eager[1]], [*traced[0], *traced[1]], strict=True):
        assert torch.equal(x, y)


def test_one_graph_serves_every_number_of_tokens(fused, kind):
    """With the number of tokens marked dynamic, a second number compiles nothing."""
    graphs = []

    def counting(graph, example_inputs):
        graphs.append(graph)
        return graph

    layer = compiled(fused, kind, counting)
    for tokens in (3, 4, 2):
        inputs = fused.draw(kind, tokens, 2, 8)
        for x in inputs[: 1 if kind == "read" else 2]:
            torch._dynamo.mark_dynamic(x, 0)
        found, eager = layer(inputs), fused.run(kind, inputs, normalize=True)
        assert all(torch.equal(x, y) for x, y in zip(found, eager, strict=True))
    assert len(graphs) == 1


def test_a_compiled_pipeline_of_kinds_is_one_graph(fused):
    """Append, mix and read one after another, as a network does, forward and backward."""
    inputs = fused.draw("competitive", 2, 2, 8)

    def network(x):
        streams, _ = fused.run("append", (x[0], x[1], x[4]))
        streams, h, _ = fused.run("competitive", (streams, x[1], x[2], x[3], x[4]), normalize=True)
        return fused.run("read", (streams, x[2]))[0], h

    torch._dynamo.reset()
    traced = torch.compile(network, backend="aot_eager", fullgraph=True)
    eager, found = (fused.with_gradients(f, inputs) for f in (network, traced))
    assert all(torch.equal(x, y) for x, y in zip([*eager[0], *eager[1]], [*found[0], *found[1]], strict=True))
