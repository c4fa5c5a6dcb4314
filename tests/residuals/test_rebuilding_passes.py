"""Rebuilt streams where forward passes meet: in threads, in turns, cut short by an error, traced, and from a file."""

import io
import pickle
import threading

import pytest
import torch
from torch import nn

from depthlab.kernels.mgr import reference
from depthlab.residuals import Recompute, build

WIDTH, LAYERS, STREAMS = 8, 12, 3
FEW = Recompute(anchor_every=None)


@pytest.fixture
def residual(shake):
    return shake(build("mgr-independent", WIDTH, LAYERS, n_streams=STREAMS, recompute=FEW), size=0.4).double()


@pytest.fixture
def layers(network):
    return network(WIDTH, LAYERS, dtype=torch.float64)


def signal(tokens=3, seed=5):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, WIDTH, generator=g, dtype=torch.float64).requires_grad_()


def gradient(residual, layers, x, recompute):
    residual.recompute = recompute
    return torch.autograd.grad(residual(x, layers).square().sum(), x)[0]


def test_several_threads_may_use_one_model(residual, layers):
    xs = [signal(seed=seed) for seed in range(60)]
    expected = [gradient(residual, layers, x, None) for x in xs]
    residual.recompute = Recompute(top_p=0.05)
    found, failures = {}, []

    def work(first):
        try:
            for i in range(first, len(xs), 3):
                found[i] = torch.autograd.grad(residual(xs[i], layers).square().sum(), xs[i])[0]
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and all((found[i] - one).norm() <= 1e-10 * one.norm() for i, one in enumerate(expected))


def test_of_two_passes_in_turn_each_has_its_own_books(residual, layers):
    """The report is that of the pass that made a step last, not a mixture of both."""
    passes = [residual.start(signal(tokens)) for tokens in (2, 5)]
    for layer in range(LAYERS):
        for i, (h, state) in enumerate(passes):
            if (layer, i) == (6, 1):  # pruned in the second pass
                passes[i] = residual.read(7, state), state
            else:
                passes[i] = residual.step(layer, layers[layer](h), state)
    report = residual.recompute_report()
    assert {entry.rows for entry in report.layers} == {5 * STREAMS}
    assert [entry.layer for entry in report.layers] == [2, 3, 4, 5, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("recompute", [FEW, Recompute(), Recompute(anchor_every=2, top_p=0.2)])
def test_after_a_step_that_failed_the_graph_below_it_is_whole(residual, layers, recompute, monkeypatch):
    """Out of memory, say: the caller leaves early, or frees something and steps again."""

    def climb(residual, fails, again):
        x = signal()
        h, state = residual.start(x)
        for layer in range(LAYERS - 2):
            if layer == LAYERS - 3 and fails:
                with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
                    patch.setattr(reference, "mix_and_pool", full)
                    residual.step(layer, layers[layer](h), state)
            if layer < LAYERS - 3 or again:
                h, state = residual.step(layer, layers[layer](h), state)
        return torch.autograd.grad(h.square().sum(), [x, *layers[: LAYERS - 3].parameters()])

    def full(*_, **__):
        raise torch.OutOfMemoryError("no room")

    for again in (False, True):
        residual.recompute = None
        expected = climb(residual, fails=False, again=again)
        residual.recompute = recompute
        for a, b in zip(climb(residual, fails=True, again=again), expected, strict=True):
            assert (a - b).norm() <= 1e-10 * b.norm()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
def test_a_tracer_takes_the_ordinary_way(residual, layers):
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.residual, self.layers = residual, layers

        def forward(self, x):
            return self.residual(x, self.layers)

    traced = torch.jit.trace(Whole(), signal(), check_trace=False)
    torch.jit.save(traced, io.BytesIO())
    torch.testing.assert_close(traced(signal()), residual(signal(), layers))


def test_a_state_from_a_file_begins_anew(residual, layers):
    h, state = residual.start(signal())
    for layer in range(5):
        h, state = residual.step(layer, layers[layer](h), state)
    own = state._replace(streams=state.streams.detach())
    copied = pickle.loads(pickle.dumps(own))
    assert own.trail is not None and copied.trail is None and torch.equal(copied.streams, own.streams)
    f = layers[5](h.detach())
    ends = [torch.autograd.grad(residual.step(5, f, s)[0].square().sum(), f)[0] for s in (own, copied)]
    assert torch.equal(*ends)


def test_what_is_no_setting_is_refused_when_it_is_set(residual):
    with pytest.raises(TypeError, match="recompute must be a depthlab.residuals.Recompute or None, got str."):
        residual.recompute = "auto"
    assert residual.recompute == FEW
