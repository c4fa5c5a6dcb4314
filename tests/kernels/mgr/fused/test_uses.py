"""The kernels under autograd, checkpointing, autocast, torch.func, data parallel, and in a whole residual."""

import copy
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from depthlab.residuals import build

KINDS = ("independent", "competitive", "append", "read")


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


def all_equal(xs, ys) -> bool:
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


# ---- autograd


def test_a_second_backward_exactly_doubles_every_gradient(fused, kind):
    leaves = [x.requires_grad_() for x in fused.draw(kind, 3, 3, 16)]
    outputs = fused.run(kind, leaves, normalize=True)
    upstream = fused.upstream_of(outputs)
    torch.autograd.backward(outputs, upstream, retain_graph=True)
    once = [x.grad.clone() for x in leaves]
    torch.autograd.backward(outputs, upstream)
    assert all_equal([x.grad for x in leaves], [2 * g for g in once])


def test_two_calls_are_equal_bit_for_bit(fused, kind):
    inputs = fused.draw(kind, None, 4, 33)
    runs = [fused.with_gradients(lambda x: fused.run(kind, x, normalize=True), inputs) for _ in range(2)]
    assert all_equal(*([*outputs, *grads] for outputs, grads in runs))


def test_only_what_needs_a_gradient_gets_one_and_the_same(fused, kind):
    inputs = fused.draw(kind, 2, 3, 8)
    _, every = fused.with_gradients(lambda x: fused.run(kind, x), inputs)
    names = fused.names(kind)[-len(inputs) :]
    for wanted in [(i,) for i in range(len(inputs))] + list(itertools.combinations(range(len(inputs)), 2))[:2]:
        leaves = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
        outputs = fused.run(kind, leaves)
        upstream = fused.upstream_of(outputs)
        used = [(y, g) for y, g in zip(outputs, upstream, strict=True) if y.requires_grad]
        torch.autograd.backward([y for y, _ in used], [g for _, g in used])
        for i, (x, name) in enumerate(zip(leaves, names, strict=True)):
            assert (x.grad is None) == (i not in wanted), name
            assert x.grad is None or torch.equal(x.grad, every[i]), name


def test_without_gradients_nothing_is_kept(fused, kind, monkeypatch):
    from depthlab.kernels.mgr import ops

    kept = []
    launch = ops._launch
    monkeypatch.setattr(ops, "_launch", lambda *a: kept.append(a[-1]) or launch(*a))
    leaves = [x.requires_grad_() for x in fused.draw(kind, 2, 3, 8)]
    with torch.no_grad():
        outputs = fused.run(kind, leaves)
    with torch.inference_mode():
        inferred = fused.run(kind, [x.detach() for x in leaves])
    assert not any(x.requires_grad for x in outputs) and all_equal(outputs, inferred)
    assert kept == [{"KEEP": False}] * 2
    fused.run(kind, leaves)
    assert kept[-1] == {"KEEP": True}


def test_a_gradient_that_only_the_backward_asks_for_is_right(fused, kind):
    """The operator itself called without `keep`, as after a transformation that hides who needs gradients."""
    from depthlab.kernels.mgr import ops

    inputs = fused.draw(kind, 2, 3, 8)
    places = {"append": (0, 1, 4), "read": (0, 4)}.get(kind, range(5))
    results = []
    for keep in (True, False):
        leaves = [x.clone().requires_grad_() for x in inputs]
        five = dict(zip(places, leaves, strict=True))
        pooled = ops.layer(*(five.get(i) for i in range(5)), kind, True, 1e-6, keep)[1]
        results.append(torch.autograd.grad(pooled, leaves, fused.upstream_of([pooled])[0], allow_unused=True))
    assert all_equal(*results)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_equal_gradients(fused, kind, use_reentrant):
    inputs = fused.draw(kind, 3, 3, 16)
    plain = fused.with_gradients(lambda x: fused.run(kind, x, normalize=True), inputs)

    def layer(*leaves):
        return fused.run(kind, leaves, normalize=True)

    leaves = [x.clone().requires_grad_() for x in inputs]
    saved = checkpoint(layer, *leaves, use_reentrant=use_reentrant)
    torch.autograd.backward(saved, fused.upstream_of(saved))
    assert all_equal([*plain[0], *plain[1]], [*saved, *(x.grad for x in leaves)])


def test_a_second_derivative_gets_one_sentence(fused, kind):
    leaves = [x.requires_grad_() for x in fused.draw(kind, 2, 2, 8)]
    total = sum(x.square().sum() for x in fused.run(kind, leaves))
    grads = torch.autograd.grad(total, leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once, not twice; use backend='torch' for that"):
        sum(g.square().sum() for g in grads).backward()


def test_forward_mode_is_refused(fused, kind):
    import torch.autograd.forward_ad as fwd

    inputs = fused.draw(kind, 2, 2, 8)
    with fwd.dual_level():
        dual = fwd.make_dual(inputs[0], torch.ones_like(inputs[0]))
        with pytest.raises(RuntimeError, match="backend='torch'"):
            fused.run(kind, [dual, *inputs[1:]])


def test_anomaly_mode_finds_nothing(fused, kind):
    with torch.autograd.detect_anomaly(check_nan=True):
        leaves = [x.requires_grad_() for x in fused.draw(kind, 2, 3, 8)]
        outputs = fused.run(kind, leaves, normalize=True)
        torch.autograd.backward(outputs, fused.upstream_of(outputs))


def test_autocast_changes_nothing_and_parameters_get_float32_gradients(fused, kind):
    inputs = fused.draw(kind, 3, 3, 16, (torch.float32, torch.bfloat16, torch.float32))
    plain = fused.with_gradients(lambda x: fused.run(kind, x, normalize=True), inputs)
    with torch.autocast(fused.device.type, dtype=torch.bfloat16):
        cast = fused.with_gradients(lambda x: fused.run(kind, x, normalize=True), inputs)
    assert [g.dtype for g in cast[1]] == [x.dtype for x in inputs]
    assert all_equal([*plain[0], *plain[1]], [*cast[0], *cast[1]])


# ---- torch.func


def test_vmap_agrees_with_a_loop(fused, kind):
    inputs = fused.draw(kind, 2, 2, 8)
    stored = 1 if kind == "read" else 2
    in_dims = tuple(0 if i < stored else None for i in range(len(inputs)))
    batched = torch.func.vmap(lambda *a: fused.run(kind, a), in_dims)(*inputs)
    rows = [[x[t] if d == 0 else x for x, d in zip(inputs, in_dims, strict=True)] for t in range(2)]
    looped = [fused.run(kind, row) for row in rows]
    assert all_equal(batched, [torch.stack(xs) for xs in zip(*looped, strict=True)])


@pytest.mark.parametrize("transform", ["grad", "jvp", "vjp"])
def test_other_function_transforms_are_refused_not_ignored(fused, kind, transform):
    inputs = fused.draw(kind, 2, 2, 8)

    def total(streams):
        return sum(x.square().sum() for x in fused.run(kind, [streams, *inputs[1:]]))

    with pytest.raises(RuntimeError, match="backend='torch'"):
        if transform == "grad":
            torch.func.grad(total)(inputs[0])
        elif transform == "vjp":
            torch.func.vjp(total, inputs[0])
        else:
            torch.func.jvp(total, (inputs[0],), (torch.ones_like(inputs[0]),))


# ---- modules


def carry(residual, x, updates, pruned=()):
    """Through all sublayers but the pruned ones; what the sublayers read, and the last read."""
    h, state = residual.start(x)
    reads = [h]
    for layer, update in enumerate(updates):
        if layer not in pruned:
            h, state = residual.step(layer, update + h, state)
            reads.append(h)
    return reads


def parameters_of(residual, seed=0):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in residual.parameters():
            p.copy_(torch.randn(p.shape, generator=g))


@pytest.mark.parametrize("pruned", [(), (1,), (0, 3)])
@pytest.mark.parametrize("scheme", ["mgr-independent", "mgr-competitive"])
def test_a_whole_residual_is_that_of_plain_torch(fused, scheme, pruned):
    g = torch.Generator().manual_seed(3)
    x, *updates = (torch.randn(1, 2, 12, generator=g).to(fused.device) for _ in range(7))
    plain = build(scheme, 12, 6, n_streams=3, backend="torch").to(fused.device)
    parameters_of(plain)
    kernels = build(scheme, 12, 6, n_streams=3, backend="triton").to(fused.device)
    kernels.load_state_dict(plain.state_dict(), strict=True)
    results = []
    for residual in (plain, kernels, copy.deepcopy(kernels)):
        leaves = [t.clone().requires_grad_() for t in (x, *updates)]
        reads = carry(residual, leaves[0], leaves[1:], pruned)
        grads = torch.autograd.grad(
            sum(r.square().sum() * w for w, r in enumerate(reads, 1)),
            [*leaves, *residual.parameters()],
            allow_unused=True,
            materialize_grads=True,
        )
        results.append([*reads, *grads])
    assert all_equal(results[1], results[2])
    for a, b in zip(results[0], results[1], strict=True):
        assert (a - b).abs().max() <= 2e-5 * max(1.0, a.abs().max())  # seven layers, each within 8e-6


def test_one_step_of_a_shared_block_under_data_parallel(fused, tmp_path):
    """gloo, one process: the gradients are those of the same module alone, also checkpointed."""
    import torch.distributed as dist

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.residual = build("mgr-competitive", 8, 3, n_streams=2, backend="triton")
            self.mix = torch.nn.Linear(8, 8)

        def forward(self, x, saves=False):
            h, state = self.residual.start(x)
            for layer in range(3):
                update = checkpoint(self.mix, h, use_reentrant=False) if saves else self.mix(h)
                h, state = self.residual.step(layer, update, state)
            return h

    torch.manual_seed(0)
    block = Block().to(fused.device)
    x = torch.randn(1, 2, 8, device=fused.device)
    alone = torch.autograd.grad(block(x).square().sum(), list(block.parameters()), allow_unused=True)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for saves in (False, True):
            block.zero_grad()
            parallel = torch.nn.parallel.DistributedDataParallel(block, find_unused_parameters=True)
            parallel(x, saves).square().sum().backward()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in block.parameters()]
            assert all_equal(
                grads, [torch.zeros_like(p) if g is None else g for p, g in zip(block.parameters(), alone, strict=True)]
            )
    finally:
        dist.destroy_process_group()
