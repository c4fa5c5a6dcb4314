"""What only a GPU shows: bfloat16 as it is rounded, races, graphs, other devices, memory, offsets past 2^31."""

import pytest
import torch

from depthlab.kernels import mgr
from depthlab.kernels.mgr import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
KINDS = ("independent", "competitive", "append", "read")


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(autouse=True)
def not_interpreted(fused):
    if fused.interpreted:
        pytest.skip("in the interpreter nothing runs on a GPU")


def everything(fused, kind, inputs):
    outputs, grads = fused.with_gradients(lambda x: fused.run(kind, x, normalize=True), inputs)
    return [*outputs, *grads]


def all_equal(xs, ys) -> bool:
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


@pytest.mark.parametrize(("n", "width"), [(4, 768), (8, 1024), (4, 2048), (8, 1280), (16, 4096)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_sizes_of_real_models(fused, kind, n, width, dtype):
    if kind == "append":
        n -= 1
    fused.check(kind, fused.draw(kind, 2003, n, width, (dtype, dtype, torch.float32)), normalize=True)


@pytest.mark.parametrize(("n", "width"), [(4, 1024), (3, 100), (16, 8192)])
def test_five_runs_are_equal_bit_for_bit_with_other_work_between(fused, kind, n, width):
    if kind == "append":
        n -= 1
    inputs = fused.draw(kind, 5000 if width < 2000 else 600, n, width, torch.bfloat16)
    first = everything(fused, kind, inputs)
    other = torch.cuda.Stream()
    for _ in range(4):
        with torch.cuda.stream(other):
            x = torch.randn(3000, 3000, device=fused.device)
            x @ x
        assert all_equal(everything(fused, kind, inputs), first)
    torch.cuda.synchronize()


def test_memory_is_the_results_and_little_else(fused, kind):
    """Forward: outputs and four numbers a stream. Backward: the gradients and the programs' own weight gradients."""
    inputs = [x.requires_grad_() for x in fused.draw(kind, 20_000, 4, 1024, torch.bfloat16)]
    everything(fused, kind, inputs)  # compiled by now
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = fused.run(kind, inputs, normalize=True)
    made = sum(x.nbytes for x in outputs)
    n = 5 if kind == "append" else 4
    kept = 20_000 * (4 * n + 1) * 4
    spare = 4 * 2**20  # the allocator's own rounding
    assert torch.cuda.max_memory_allocated() - before <= made + kept + spare
    upstream = fused.upstream_of(outputs)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(outputs, inputs, upstream)
    programs = 64 * torch.cuda.get_device_properties(0).multi_processor_count
    own = programs * (2 * 1024 + n) * 4
    gradients = sum(x.nbytes for x in inputs)
    assert torch.cuda.max_memory_allocated() - before <= gradients + own + spare


def test_a_step_is_captured_in_a_graph_and_replayed_on_new_data(fused, kind):
    inputs = fused.draw(kind, 500, 3, 200)
    static = [x.clone().requires_grad_() for x in inputs]

    def step():
        outputs = fused.run(kind, static, normalize=True)
        return [*outputs, *torch.autograd.grad([x.sum() for x in outputs], static)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x, new in zip(static, fused.draw(kind, 500, 3, 200, seed=9), strict=True):
            x.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    assert all_equal([x.clone() for x in captured], step())


def test_inductor_compiles_the_layer_into_a_network(fused, kind):
    weight = torch.randn(64, 64, device=fused.device) / 8
    inputs = fused.draw(kind, 300, 3, 64)

    def network(x):
        outputs = fused.run(kind, x, normalize=True)
        return [torch.tanh(outputs[1 if kind != "read" else 0] @ weight)]

    torch._dynamo.reset()
    compiled = torch.compile(network, fullgraph=True)
    eager, found = (fused.with_gradients(f, inputs) for f in (network, compiled))
    for x, y in zip([*eager[0], *eager[1]], [*found[0], *found[1]], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3 * x.abs().max().item())  # matmul and tanh may differ


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_launch_is_on_the_device_of_its_tensors(fused, kind):
    inputs = fused.draw(kind, 200, 3, 100)
    here = everything(fused, kind, inputs)
    assert torch.cuda.current_device() == 0
    there = everything(fused, kind, [x.to("cuda:1") for x in inputs])
    assert all(x.device.index == 1 for x in there)
    assert all_equal(here, [x.to("cuda:0") for x in there])


def test_offsets_past_2_to_the_31(fused, kind):
    """A token's results do not depend on how far out it lies: the last tokens as in a small run of them alone."""
    n, width = 4, 1024
    tokens = 2**31 // (n * width) + 300
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GB of GPU memory")
    last = fused.draw(kind, 300, n - (kind == "append"), width, torch.bfloat16)
    stored = 1 if kind == "read" else 2
    far = [x.new_zeros(tokens, *x.shape[1:]) if i < stored else x.clone() for i, x in enumerate(last)]
    for x, y in zip(far[:stored], last, strict=False):
        x[-300:] = y
    far = [x.requires_grad_() for x in far]
    near = [x.clone().requires_grad_() for x in last]
    outputs, expected = fused.run(kind, far, normalize=True), fused.run(kind, near, normalize=True)
    assert all_equal([x[-300:] for x in outputs], expected)
    some = fused.upstream_of(expected)
    upstream = [torch.zeros_like(x) for x in outputs]
    for x, y in zip(upstream, some, strict=True):
        x[-300:] = y
    found, true = torch.autograd.grad(outputs, far, upstream), torch.autograd.grad(expected, near, some)
    for i, (x, y) in enumerate(zip(found, true, strict=True)):
        if i < stored:
            assert torch.equal(x[-300:], y)
            assert not x[:-300].any()
        else:
            assert fused.excess("d_w_pool", x, y) <= 1  # another order of summation


# ---- the backward that rebuilds its input


GATES = ("independent", "competitive")


@pytest.fixture(params=GATES)
def gate(request) -> str:
    return request.param


def forward_of(fused, gate, tokens, n, width, dtype):
    """Inputs, the forward's four results, upstream gradients and the exact rows of gates above one half."""
    inputs = fused.draw(gate, tokens, n, width, (dtype, dtype, torch.float32))
    made = mgr.mix_and_pool_forward(*inputs, gate=gate, normalize=True, backend="triton")
    return inputs, made, fused.upstream_of(made[:3]), fused.keep_rows(inputs[0], made[2], 0.5)


def backward_of(gate, inputs, made, upstream, exact):
    mixed, _, *kept = made
    how = {"gate": gate, "normalize": True, "backend": "triton"}
    return mgr.mix_and_pool_backward(mixed, exact, *inputs[1:], *kept, *upstream, **how)


@pytest.mark.parametrize(("n", "width"), [(4, 768), (8, 1024), (4, 2048), (8, 1280), (16, 4096), (3, 100)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_inverting_at_the_sizes_of_real_models(fused, gate, n, width, dtype):
    """Streams beside the true ones; gradients beside the ordinary kernels' in float32 at the streams that came back."""
    inputs, made, upstream, exact = forward_of(fused, gate, 2003, n, width, dtype)
    streams, *grads = backward_of(gate, inputs, made, upstream, exact)
    assert fused.rebuilding_error(streams, inputs[0], made[::2], 0.5) <= 1
    wide = (x.float() for x in (streams, *inputs[1:], made[3], *upstream))
    true = ops.compute_backward(*wide, gate, True, 1e-6)
    found = {
        name: fused.excess(name, x, y, 40.0 if name == "d_bias" else 1.0)
        for name, x, y in zip(fused.names(gate)[3:], grads, true, strict=True)
    }
    assert max(found.values()) <= 1, found
    if dtype == torch.float32:
        fused_errors = fused.inverting_errors(gate, inputs, normalize=True)
        assert max(fused_errors.values()) <= 1, fused_errors


@pytest.mark.parametrize(("n", "width"), [(4, 1024), (3, 100), (16, 4096)])
def test_five_inverting_runs_are_equal_bit_for_bit_with_other_work_between(fused, gate, n, width):
    known = forward_of(fused, gate, 3000 if width < 2000 else 600, n, width, torch.bfloat16)
    first = backward_of(gate, *known)
    other = torch.cuda.Stream()
    for _ in range(4):
        with torch.cuda.stream(other):
            x = torch.randn(3000, 3000, device=fused.device)
            x @ x
        assert all_equal(backward_of(gate, *known), first)
    torch.cuda.synchronize()


def test_memory_of_inverting_is_its_results_and_little_else(fused, gate):
    known = forward_of(fused, gate, 20_000, 4, 1024, torch.bfloat16)
    backward_of(gate, *known)  # compiled by now
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = backward_of(gate, *known)
    own = 64 * torch.cuda.get_device_properties(0).multi_processor_count * (2 * 1024 + 4) * 4
    assert torch.cuda.max_memory_allocated() - before <= sum(x.nbytes for x in found) + own + 4 * 2**20


def test_inverting_at_offsets_past_2_to_the_31(fused, gate):
    """Of tokens and of exact rows: the last ones as in a small run of them alone."""
    n, width = 4, 1024
    if torch.cuda.get_device_properties(0).total_memory < 80 * 2**30:
        pytest.skip("needs 80 GB of GPU memory")
    inputs, made, upstream, exact = forward_of(fused, gate, 300, n, width, torch.bfloat16)
    streams, d_streams, d_update, *weights = backward_of(gate, inputs, made, upstream, exact)

    def far(x, rows, fill=0):
        return torch.cat([x.new_full((rows, *x.shape[1:]), fill), x])

    more = 2**31 // (n * width)
    rows = 2**31 // width
    slots = torch.where(exact.slots >= 0, exact.slots + rows, -1)
    distant = mgr.ExactRows(far(slots, more, -1), far(exact.values, rows))
    known = (
        [inputs[0], far(inputs[1], more), *inputs[2:]],
        [far(x, more) for x in made],
        [far(x, more) for x in upstream],
    )
    found = backward_of(gate, *known, distant)
    for x, y in zip(found, (streams, d_streams, d_update), strict=False):
        assert torch.equal(x[-300:], y)
    assert not found[0][:-300].any() and not found[1][:-300].any()
    for name, x, y in zip(fused.names(gate)[-3:], found[3:], weights, strict=True):
        assert fused.excess(name, x, y, 40.0) <= 1  # another order of summation
