"""Rebuilt streams: gradients as with stored ones, whatever is done to the graph, and memory that goes back at once."""

import copy
import gc
import io
import os
import runpy
import subprocess
import sys
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from depthlab.residuals import Recompute, State, build, rebuild

WIDTH, LAYERS, STREAMS = 8, 12, 3
GATES = ("independent", "competitive")
MANNERS = {
    "no anchors": Recompute(anchor_every=None),
    "rows": Recompute(anchor_every=None, top_p=0.1),
    "every 4": Recompute(anchor_every=4),
    "auto": Recompute(),
    "auto, much kept": Recompute(top_p=0.05, tolerance=1e-15),
    "all": Recompute(anchor_every=1),
}
FEW = MANNERS["no anchors"]


@pytest.fixture(params=GATES)
def gate(request):
    return request.param


@pytest.fixture
def pair(gate, shake):
    """(stored, rebuilt): one scheme twice with equal parameters, float64."""

    def both(recompute=FEW, n_streams=STREAMS, size=0.4, n_sublayers=LAYERS, dtype=torch.float64, **how):
        stored = shake(build(f"mgr-{gate}", WIDTH, n_sublayers, n_streams=n_streams, **how), size=size).to(dtype)
        rebuilt = build(f"mgr-{gate}", WIDTH, n_sublayers, n_streams=n_streams, recompute=recompute, **how).to(dtype)
        rebuilt.load_state_dict(stored.state_dict())
        return stored, rebuilt

    return both


@pytest.fixture
def layers(network):
    return network(WIDTH, LAYERS, dtype=torch.float64)


def signal(dtype=torch.float64, seed=5):
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def total(out):
    return (out.double() * torch.linspace(-1, 2, out.shape[-1], dtype=torch.float64)).pow(2).sum()


def parameters_of(residual, layers):
    return [*layers.parameters(), *residual.parameters()]


def gradients(residual, layers, run=None, dtype=torch.float64):
    x = signal(dtype).requires_grad_()
    out = (run or (lambda r, x, f: r(x, f)))(residual, x, layers)
    wanted = [x, *parameters_of(residual, layers)]
    return out, torch.autograd.grad(total(out), wanted, allow_unused=True, materialize_grads=True)


def close(found, expected, tolerance=1e-10):
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b.double()).norm() <= tolerance * b.double().norm() + 1e-14


# ---- gradients


@pytest.mark.parametrize("manner", MANNERS)
def test_gradients_are_those_of_stored_streams_and_the_forward_is_equal_bit_by_bit(pair, layers, manner):
    stored, rebuilt = pair(MANNERS[manner])
    expected, found = gradients(stored, layers), gradients(rebuilt, layers)
    assert torch.equal(expected[0], found[0])
    close(found[1], expected[1])


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("n_streams", [1, 2, 5])
def test_any_number_of_streams_and_raw_reads_work(pair, layers, n_streams, normalize):
    both = pair(n_streams=n_streams, normalize=normalize)
    close(*(gradients(r, layers)[1] for r in reversed(both)))


def test_a_wrong_gate_in_the_rebuilding_would_be_seen(pair, layers, monkeypatch):
    from depthlab.residuals import rebuilding

    stored, rebuilt = pair()
    true = rebuilding.mix_and_pool_backward

    def wrong(mixed, rows, update, w_gate, bias, w_pool, beta, *others, **how):
        return true(mixed, rows, update, w_gate, bias, w_pool, beta * 1.01, *others, **how)

    monkeypatch.setattr(rebuilding, "mix_and_pool_backward", wrong)
    with pytest.raises(AssertionError):
        close(gradients(rebuilt, layers)[1], gradients(stored, layers)[1], 1e-4)


@pytest.mark.parametrize("skip", [{1}, {3}, {5, 6, 7}, {11}, {0, 4, 10}, set(range(4, 12))])
def test_pruned_sublayers_change_nothing_about_it(pair, layers, skip):
    both = pair(Recompute(anchor_every=3, top_p=0.05))
    close(*(gradients(r, layers, lambda r, x, f: r(x, f, skip=skip))[1] for r in reversed(both)))


def fork(residual, x, layers):
    """Two continuations from the middle, each with its own end; the first reads half the way up once more."""
    h, state = residual.start(x)
    for layer in range(6):
        h, state = residual.step(layer, layers[layer](h), state)
    ends = []
    for sign in (1, -1):
        g, branch = h, state
        for layer in range(6, LAYERS - (sign < 0)):
            g, branch = residual.step(layer, sign * layers[layer](g), branch)
        ends.append(g)
    return ends[0] + 2 * ends[1] + residual.read(LAYERS, state)


@pytest.mark.parametrize("manner", MANNERS)
def test_a_state_may_be_used_twice(pair, layers, manner):
    both = pair(MANNERS[manner])
    close(*(gradients(r, layers, fork)[1] for r in reversed(both)))


def test_an_early_exit_beside_the_whole_depth_works(pair, layers):
    def run(residual, x, layers):
        h, state = residual.start(x)
        for layer, sublayer in enumerate(layers):
            h, state = residual.step(layer, sublayer(h), state)
            if layer == 6:
                exit_ = h
        return h + 3 * exit_

    close(*(gradients(r, layers, run)[1] for r in reversed(pair())))


def test_an_exit_alone_is_rebuilt_from_above(pair, layers):
    def run(residual, x, layers):
        h, state = residual.start(x)
        for layer, sublayer in enumerate(layers):
            h, state = residual.step(layer, sublayer(h), state)
            if layer == 5:
                exit_ = h
        return exit_

    close(*(gradients(r, layers, run)[1] for r in reversed(pair())))


@pytest.mark.parametrize("change", ["replaced", "without trail", "in place"])
def test_streams_that_a_caller_changes_are_not_taken_for_those_of_the_layer_below(pair, layers, change):
    def run(residual, x, layers):
        h, state = residual.start(x)
        for layer, sublayer in enumerate(layers):
            h, state = residual.step(layer, sublayer(h), state)
            if layer == 6 and change == "in place" and residual.recompute:  # where they are stored, torch refuses this
                state.streams.mul_(0.5)
            elif layer == 6 and change != "without trail":
                state = state._replace(streams=state.streams * 0.5)
            elif layer == 6:
                state = State(*state[:3])
        return h

    close(*(gradients(r, layers, run)[1] for r in reversed(pair())))


# ---- several backward passes


def test_a_second_backward_through_a_retained_graph_doubles_every_gradient(pair, layers):
    for recompute in MANNERS.values():
        stored, rebuilt = pair(recompute)
        loss = total(rebuilt(signal(), layers))
        loss.backward(retain_graph=True)
        wanted = parameters_of(rebuilt, layers)
        once = [p.grad.clone() for p in wanted]
        loss.backward()
        close([p.grad for p in wanted], [2 * g for g in once], 1e-12)
        close(once, gradients(stored, layers)[1][1:])
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        layers.zero_grad()


def with_heights(residual, layers):
    """Every read, and the last."""
    x = signal().requires_grad_()
    h, state = residual.start(x)
    reads = [h]
    for layer, sublayer in enumerate(layers):
        h, state = residual.step(layer, sublayer(h), state)
        reads.append(h)
    return x, reads


@pytest.mark.parametrize("retain", [[True, True, True], [True, False], [False]])
def test_partial_backward_passes_in_any_order_agree(pair, layers, retain):
    stored, rebuilt = pair()
    results = []
    for residual in (stored, rebuilt):
        x, reads = with_heights(residual, layers)
        found = []
        heights = [4, 9, 6, 2][: len(retain)]
        for height, keep in zip(heights, retain, strict=True):
            found += torch.autograd.grad(total(reads[height]), [x, layers[0][0].weight], retain_graph=True)
            if not keep:
                break
        found += torch.autograd.grad(total(reads[-1]), [x, layers[0][0].weight], retain_graph=retain[-1])
        results.append(found)
    close(*reversed(results))


def test_a_backward_that_stops_half_way_leaves_the_rest_to_another(pair, layers):
    """The part above is used up by the first, so what it rebuilt must still be there for the second."""
    results = []
    for residual in pair():
        x, reads = with_heights(residual, layers)
        first = torch.autograd.grad(total(reads[-1]), [reads[7]])
        second = torch.autograd.grad(total(reads[6]), [x, layers[2][0].weight], retain_graph=True)
        third = torch.autograd.grad(total(reads[6]), [x, layers[2][0].weight])
        results.append([*first, *second, *third])
    close(*reversed(results))


def test_a_graph_whose_upper_part_is_gone_still_has_its_gradients(pair, layers):
    results = []
    for residual in pair():
        x, reads = with_heights(residual, layers)
        whole = torch.autograd.grad(total(reads[-1]), [x], retain_graph=True)
        del reads[7:]
        gc.collect()
        results.append([*whole, *torch.autograd.grad(total(reads[6]), [x, layers[1][0].weight])])
    close(*reversed(results))


def test_only_what_is_asked_for_is_returned(pair, layers):
    stored, rebuilt = pair()
    for name in ("w_gate", "bias", "w_pool"):
        found = []
        for residual in (rebuilt, stored):
            wanted = [getattr(residual.residual_layers[i], name) for i in (4, 9)]
            found.append(torch.autograd.grad(total(residual(signal(), layers)), wanted))
        close(*found)
    rebuilt.requires_grad_(False)
    stored.requires_grad_(False)
    found = [torch.autograd.grad(total(r(signal(), layers)), list(layers.parameters())) for r in (rebuilt, stored)]
    close(*found)


def test_second_derivatives_are_refused_in_one_sentence(pair, layers):
    _, rebuilt = pair()
    x = signal().requires_grad_()
    with pytest.raises(RuntimeError, match="first derivatives only; use recompute=None") as raised:
        torch.autograd.grad(total(rebuilt(x, layers)), x, create_graph=True)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("what", ["update", "w_gate", "input"])
def test_what_was_changed_in_place_is_refused_as_torch_would(pair, layers, what):
    _, rebuilt = pair()
    h, state = rebuilt.start(signal())
    for layer, sublayer in enumerate(layers):
        before, update = state, sublayer(h)
        h, state = rebuilt.step(layer, update, state)
        if layer == 8 and what == "update":
            with torch.no_grad():
                update.add_(1)
    if what == "w_gate":
        with torch.no_grad():
            rebuilt.residual_layers[5].w_gate.add_(1)
    if what == "input":
        with torch.no_grad():
            before.streams.add_(1)
    with pytest.raises(RuntimeError, match=rf"The {what} of sublayer \d+'s residual step was changed in place"):
        total(h).backward()


# ---- memory


def watched(residual, layers):
    """(loss, weak references to the storages of every step's streams): the tensors that are kept are detached."""
    h, state = residual.start(signal())
    streams = []
    for layer, sublayer in enumerate(layers):
        h, state = residual.step(layer, sublayer(h), state)
        streams.append(state.streams.untyped_storage()._weak_ref())
    return total(h), streams


def alive(references):
    """How many storages are still there."""
    return sum(not torch.UntypedStorage._expired(reference) for reference in references)


@pytest.mark.parametrize("automatic", [True, False])
def test_streams_are_not_kept_and_everything_goes_back_with_the_backward(pair, layers, automatic):
    if not automatic:
        gc.disable()
    try:
        for recompute, kept in ((FEW, 1), (Recompute(anchor_every=4), 3)):
            stored, rebuilt = pair(recompute)
            assert alive(watched(stored, layers)[1]) == 0  # nobody holds the loss
            loss, streams = watched(stored, layers)
            assert alive(streams[2:]) >= LAYERS - STREAMS
            loss, streams = watched(rebuilt, layers)
            assert alive(streams[2:]) == kept
            loss.backward(retain_graph=True)
            assert alive(streams[2:]) == kept
            loss.backward()
            assert alive(streams) == 0 and loss.isfinite()
            loss, streams = watched(rebuilt, layers)
            del loss
            assert alive(streams) == 0  # dropped without a backward, and no cycle to collect
    finally:
        gc.enable()


def held_layers(state):
    """Weak references to all mixing layers below a state."""
    maker, found = state.trail.made_by(), []
    while maker is not None:
        found.append(weakref.ref(maker))
        maker = maker.maker()
    return found


def test_updates_are_freed_while_the_backward_goes_on(pair, layers):
    _, rebuilt = pair()
    x = signal().requires_grad_()
    h, state = rebuilt.start(x)
    seen = []
    for layer, sublayer in enumerate(layers):
        update = sublayer(h)
        update.register_hook(lambda _, layer=layer: seen.append((layer, sum(r() is not None for r in held))))
        h, state = rebuilt.step(layer, update, state)
    held = held_layers(state)
    assert len(held) == LAYERS - STREAMS + 1
    loss = total(h)
    del state, h, update
    loss.backward()
    counts = dict(seen)
    for layer in range(STREAMS, LAYERS):  # below it, itself and the one above, which its backward may have needed
        assert counts[layer] <= layer - STREAMS + 1 + 2
    assert all(r() is None for r in held) and loss.isfinite()


def test_nothing_is_kept_without_gradients(pair, layers):
    stored, rebuilt = pair()
    with torch.no_grad():
        h, state = rebuilt.start(signal())
        for layer, sublayer in enumerate(layers):
            h, state = rebuilt.step(layer, sublayer(h), state)
    assert state.trail is None and rebuilt.recompute_report().layers == ()
    with torch.no_grad():
        assert torch.equal(h, stored(signal(), layers))
    frozen = copy.deepcopy(rebuilt).requires_grad_(False)
    _, state = frozen.start(signal())
    for layer in range(LAYERS):
        state = frozen.step(layer, signal(), state)[1]
    assert state.trail is None and not state.streams.requires_grad


def test_a_state_continued_after_its_graph_was_used_up_is_right(pair, layers):
    """Carried over a truncated backward, as in training on long sequences."""
    results = []
    for residual in pair():
        h, state = residual.start(signal())
        for layer in range(6):
            h, state = residual.step(layer, layers[layer](h), state)
        total(h).backward()
        h, state = h.detach(), state._replace(streams=state.streams.detach())
        for layer in range(6, LAYERS):
            h, state = residual.step(layer, layers[layer](h), state)
        results.append(torch.autograd.grad(total(h), [p for f in layers[6:] for p in f.parameters()]))
    close(*reversed(results))


# ---- in company


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_sublayers_with_dropout_work(pair, network, reentrant):
    layers = nn.ModuleList(
        nn.Sequential(layer, nn.Dropout(0.3)) for layer in network(WIDTH, LAYERS, dtype=torch.float64)
    )

    def run(residual, x, layers):
        torch.manual_seed(3)
        return residual(x, [lambda h, f=f: checkpoint(f, h, use_reentrant=reentrant) for f in layers])

    found = []
    for residual in pair():
        layers.zero_grad()
        total(run(residual, signal().requires_grad_(), layers)).backward()
        found.append([p.grad for p in parameters_of(residual, layers)])
    close(*reversed(found))


def test_a_checkpointed_step_works(pair, layers):
    def run(residual, x, layers):
        h, state = residual.start(x)
        for layer, sublayer in enumerate(layers):
            h, state = checkpoint(
                lambda h, state, layer=layer, f=sublayer: residual.step(layer, f(h), state),
                h,
                state,
                use_reentrant=False,
            )
        return h

    close(*(gradients(r, layers, run)[1] for r in reversed(pair(Recompute(anchor_every=4)))))


def test_saved_tensors_that_a_caller_moves_away_work(pair, layers):
    def run(residual, x, layers):
        with torch.autograd.graph.save_on_cpu():
            return residual(x, layers)

    close(*(gradients(r, layers, run)[1] for r in reversed(pair())))


def test_bfloat16_by_autocast_works(pair, network):
    layers = network(WIDTH, LAYERS)

    def run(residual, x, layers):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return residual(x, layers)

    stored, rebuilt = pair(dtype=torch.float32, size=0.2)
    (out, expected), (again, found) = (gradients(r, layers, run, torch.float32) for r in (stored, rebuilt))
    assert out.dtype == torch.bfloat16 and torch.equal(out, again)
    close(found, expected, 0.05)
    assert all(g.dtype == torch.float32 for g in found)
    kinds = [layer.kind for layer in rebuilt.recompute_report().layers]
    assert kinds == ["rows"] * (LAYERS - STREAMS) + ["newest"]


def test_a_float32_stream_among_bfloat16_updates_is_kept_and_not_rounded(gate, shake):
    """With one stream the first mixing layer gets the embedding itself, float32 under autocast."""
    rebuilt = shake(build(f"mgr-{gate}", WIDTH, 4, n_streams=1, recompute=FEW), size=0.3)
    x = signal(torch.float32).requires_grad_()
    h, state = rebuilt.start(x)
    for layer in range(4):
        h, state = rebuilt.step(layer, (h.bfloat16() * 0.7).tanh(), state)
    assert torch.equal(rebuild(state)[-1].streams.squeeze(-2), x)
    assert rebuilt.recompute_report().layers[0].kind == "anchor"
    (grad,) = torch.autograd.grad(total(h), x)
    assert grad.dtype == torch.float32 and grad.isfinite().all()


@pytest.mark.parametrize("logit", [-80.0, 20.0, 80.0])
def test_saturated_gates_give_finite_and_right_gradients(gate, shake, network, logit):
    """Gates of exactly 0 and exactly 1; the latter leave nothing to rebuild from."""
    grads = []
    for recompute in (Recompute(), None):
        residual = shake(build(f"mgr-{gate}", WIDTH, LAYERS, n_streams=STREAMS, recompute=recompute), size=0.3)
        with torch.no_grad():
            for own in residual.residual_layers[STREAMS - 1 :: 2]:
                own.bias[:1] = logit if gate == "independent" else -logit
        grads.append(gradients(residual, network(WIDTH, LAYERS), dtype=torch.float32)[1])
    assert all(g.isfinite().all() for g in grads[0])
    close(*grads, 1e-4)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
def test_compiled_sublayers_and_a_compiled_whole_give_equal_gradients(pair, network):
    layers = network(WIDTH, LAYERS, dtype=torch.float64)
    stored, rebuilt = pair(Recompute(anchor_every=4))
    expected = gradients(stored, layers)[1]
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    whole = torch.compile(rebuilt, backend=count)
    close(gradients(rebuilt, layers, lambda r, x, f: whole(x, f))[1], expected)
    assert 0 < len(graphs) < 5  # what is around the steps, not anew for each of them
    torch._dynamo.reset()
    each = [torch.compile(f, backend="aot_eager", fullgraph=True) for f in layers]
    close(gradients(rebuilt, layers, lambda r, x, f: r(x, each))[1], expected)


def test_transforms_tracers_and_exports_take_the_ordinary_way(pair, layers):
    stored, rebuilt = pair(n_sublayers=LAYERS)
    parameters = dict(rebuilt.named_parameters())

    def loss(parameters, x, residual):
        return total(torch.func.functional_call(residual, parameters, (x, layers)))

    found = torch.func.grad(loss)(parameters, signal(), rebuilt)
    expected = torch.func.grad(loss)(dict(stored.named_parameters()), signal(), stored)
    close(found.values(), expected.values())
    tangent = torch.func.jvp(lambda x: rebuilt(x, layers), (signal(),), (signal(seed=6),))[1]
    close([tangent], [torch.func.jvp(lambda x: stored(x, layers), (signal(),), (signal(seed=6),))[1]])

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.residual, self.layers = rebuilt, layers

        def forward(self, x):
            return self.residual(x, list(self.layers))

    exported = torch.export.export(Whole(), (signal(),)).module()
    close([exported(signal())], [stored(signal(), layers)])


@pytest.mark.parametrize("shape", [(WIDTH,), (1, WIDTH), (0, 3, WIDTH)])
def test_any_leading_dimensions_work(pair, layers, shape):
    for recompute in (FEW, Recompute(top_p=0.2), Recompute(anchor_every=2)):
        x = torch.ones(shape, dtype=torch.float64).requires_grad_()
        grads = [torch.autograd.grad(total(r(x, layers)), [x, *r.parameters()]) for r in reversed(pair(recompute))]
        close(*grads)


def test_copies_and_pickles_keep_the_setting_and_need_no_graph(pair, layers):
    _, rebuilt = pair(Recompute(top_p=0.1))
    total(rebuilt(signal(), layers)).backward()
    buffer = io.BytesIO()
    torch.save(rebuilt, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(rebuilt), torch.load(buffer, weights_only=False)):
        assert twin.recompute == Recompute(top_p=0.1)
        close(gradients(twin, layers)[1], gradients(rebuilt, layers)[1], 1e-14)


@pytest.fixture
def one_process(tmp_path):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Model(nn.Module):
    def __init__(self, residual, layers):
        super().__init__()
        self.residual, self.layers = residual, layers

    def forward(self, x):
        return self.residual(x, self.layers)


RANK = """
import sys, torch, torch.distributed as dist
from torch import nn
from depthlab.residuals import Recompute, build

def gradients(recompute, rank, wrap=lambda model: model):
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(9))
    model.residual = build("mgr-independent", 8, 9, n_streams=2, recompute=recompute)
    model.forward = lambda x: model.residual(x, model.layers)
    model.double()
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    wrapped = wrap(model)  # which has to live until the backward pass
    wrapped(x).square().sum().backward()
    return [p.grad for p in model.parameters()]

if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.save(gradients(Recompute(anchor_every=4), rank, nn.parallel.DistributedDataParallel), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
"""


def test_two_processes_end_with_the_mean_of_their_gradients(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK, encoding="utf-8")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(tmp_path)], env=environment) for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    alone = runpy.run_path(str(script))["gradients"]
    both = [alone(None, rank) for rank in range(2)]
    expected = [(a + b) / 2 for a, b in zip(*both, strict=True)]
    assert max(float((a - m).norm() / m.norm()) for a, m in zip(both[0], expected, strict=True)) > 0.1
    for rank in range(2):
        close(torch.load(tmp_path / f"{rank}.pt"), expected, 1e-5)


@pytest.mark.parametrize("bare", [True, False])
def test_data_parallel_training_with_accumulation_gives_equal_gradients(pair, layers, one_process, bare):
    results = []
    for residual in pair(Recompute(anchor_every=4)):
        model = Model(copy.deepcopy(residual), copy.deepcopy(layers))
        parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=bare)
        with parallel.no_sync() if bare else nullcontext():
            total(parallel(signal(seed=1))).backward()
        total(parallel(signal(seed=2))).backward()
        results.append([p.grad for p in model.parameters()])
    close(*reversed(results))
