"""Rebuilt streams with the kernels, on a GPU or, with TRITON_INTERPRET=1, on the CPU; the truth is torch's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from depthlab.residuals import Recompute, build, rebuild, rebuilding

WIDTH, LAYERS, STREAMS = 8, 5, 2
MANNERS = {"independent": Recompute(anchor_every=None), "competitive": Recompute(top_p=0.3, anchor_every=3)}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = "cuda" if torch.cuda.is_available() else "cpu"
fused = pytest.mark.skipif(HERE == "cpu" and not INTERPRETED, reason="needs a GPU, or Triton's interpreter")


def make(gate, recompute, backend, shake, size=0.7):
    residual = build(f"mgr-{gate}", WIDTH, LAYERS, n_streams=STREAMS, backend=backend, recompute=recompute)
    return shake(residual, size=size).to(HERE)


def run(residual, network):
    """(loss, gradients, the last state, true streams by layer)."""
    layers = network(WIDTH, LAYERS).to(HERE)
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(5)).to(HERE).requires_grad_()
    h, state = residual.start(x)
    true = []
    for layer, sublayer in enumerate(layers):
        true.append(state.streams.detach())
        h, state = residual.step(layer, sublayer(h), state)
    loss = (h.float() * torch.linspace(-1, 2, WIDTH, device=HERE)).square().sum()
    wanted = [x, *layers.parameters(), *residual.parameters()]
    return loss, torch.autograd.grad(loss, wanted, retain_graph=True), state, true


@fused
@pytest.mark.parametrize("gate", MANNERS)
def test_gradients_are_those_of_stored_streams_in_torch(gate, shake, network):
    rebuilt, stored = make(gate, MANNERS[gate], "triton", shake), make(gate, None, "torch", shake)
    loss, found, state, true = run(rebuilt, network)
    expected_loss, expected, _, _ = run(stored, network)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-6
    for one in rebuild(state):
        error = (one.streams - true[one.layer]).double().square().mean(-1).sqrt()
        assert (error <= one.bound).all()
    # the kernels keep mean squares of their own, from which the prediction is made
    in_torch = make(gate, MANNERS[gate], "torch", shake)
    run(in_torch, network)
    reports = [residual.recompute_report() for residual in (rebuilt, in_torch)]
    assert len(reports[0].layers) == LAYERS - STREAMS + 1 and 0 < reports[0].predicted < 1e-4
    predicted = [[layer.predicted for layer in report.layers] for report in reports]
    assert predicted[0] == pytest.approx(predicted[1], rel=1e-4)


# ---- in company


def train(residual, layers, way):
    """Leave gradients on all parameters, by one forward pass in one of the ways that training goes."""
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(5)).to(HERE)
    if way == "checkpointed, with dropout":
        dropped = [nn.Sequential(layer, nn.Dropout(0.3)) for layer in layers]
        layers = [lambda h, f=f: checkpoint(f, h, use_reentrant=False) for f in dropped]
    torch.manual_seed(3)
    with torch.autocast(HERE, dtype=torch.bfloat16, enabled=way == "autocast"):
        loss = (residual(x, layers).float() * torch.linspace(-1, 2, WIDTH, device=HERE)).square().sum()
    loss.backward(retain_graph=way == "twice")
    if way == "twice":
        loss.backward()


@fused
@pytest.mark.parametrize("way", ["autocast", "checkpointed, with dropout", "twice", "saturated"])
@pytest.mark.parametrize("gate", MANNERS)
def test_however_one_trains_gradients_are_those_of_stored_streams(gate, way, shake, network):
    found = []
    for recompute in (Recompute(anchor_every=4), None):
        residual, layers = make(gate, recompute, "triton", shake, size=0.2), network(WIDTH, LAYERS).to(HERE)
        if way == "saturated":
            with torch.no_grad():
                for own in residual.residual_layers[STREAMS - 1 :: 2]:
                    own.bias[:1] = 80.0 if gate == "independent" else -80.0
        train(residual, layers, way)
        found.append([p.grad for p in (*layers.parameters(), *residual.parameters())])
        assert recompute is None or any(layer.kind == "rows" for layer in residual.recompute_report().layers)
    in_bfloat16 = 0.15 if INTERPRETED else 0.05  # which the interpreter cuts off instead of rounding it
    tolerance = in_bfloat16 if way == "autocast" else 1e-4
    for a, b in zip(*found, strict=True):
        assert a.isfinite().all() and (a - b).norm() <= tolerance * b.norm() + 1e-6


# ---- numbers that come late

DEEP, LATE_STREAMS = 10, 2
LATE = {
    "auto": Recompute(tolerance=2.3e-7, max_gate=0.9),
    "auto, rows": Recompute(tolerance=1.9e-7, top_p=0.1, max_gate=0.6),
    "mostly open": Recompute(anchor_every=4, max_gate=0.4),
}
ARRIVALS = {"at once": lambda: True, "never": lambda: False, "at times": None}


def deep(recompute, backend, shake, gate="independent"):
    return shake(build(f"mgr-{gate}", WIDTH, DEEP, n_streams=LATE_STREAMS, backend=backend, recompute=recompute)).to(
        HERE
    )


def climb(residual, network, fork=False):
    """(gradients, report, how many layers held their input in all before the last layer, and after it).

    A fork continues half-way a second time, for one layer, when two others have followed already."""
    layers = network(WIDTH, DEEP).to(HERE)
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(5)).to(HERE).requires_grad_()
    h, state = residual.start(x)
    ends = 0
    for layer, sublayer in enumerate(layers):
        if layer == 6:
            before = h, state
        if fork and layer == 8:
            ends = 2 * residual.step(6, -layers[6](before[0]), before[1])[0]
        held = count_held(state)
        h, state = residual.step(layer, sublayer(h), state)
    held = held, count_held(state)
    loss = ((h + ends).float() * torch.linspace(-1, 2, WIDTH, device=HERE)).square().sum()
    return torch.autograd.grad(loss, [x, *layers.parameters()]), residual.recompute_report(), held


def count_held(state):
    """Layers below `state` that hold their input."""
    maker, held = state.trail and state.trail.made_by(), 0
    while maker is not None:
        held += maker.input is not None
        maker = maker.maker()
    return held


@fused
@pytest.mark.parametrize("manner", LATE)
def test_what_is_kept_does_not_depend_on_when_numbers_arrive(manner, shake, network, monkeypatch):
    results = {}
    monkeypatch.setattr(rebuilding, "PENDING", 3)
    for name, arrives in ARRIVALS.items():
        g = torch.Generator().manual_seed(1)
        arrives = arrives or (lambda g=g: bool(torch.rand(1, generator=g) < 0.4))
        monkeypatch.setattr(rebuilding.Reading, "is_here", lambda _, arrives=arrives: arrives())
        results[name] = climb(deep(LATE[manner], "triton", shake), network, fork=manner == "auto, rows")
    first, report, (least, settled) = results["at once"]
    assert settled <= len(report.anchors) and len(report.anchors) > 2
    for gradients, other, (holding, at_the_end) in results.values():
        assert all(torch.equal(a, b) for a, b in zip(gradients, first, strict=True)) and other == report
        assert least <= holding <= least + rebuilding.PENDING
        assert at_the_end == settled  # nobody waits any more
    assert results["never"][2][0] > least or manner == "mostly open"


@fused
@pytest.mark.parametrize("manner", LATE)
def test_anchors_that_the_device_decides_about_are_those_that_torch_does(manner, shake, network, monkeypatch):
    """Late, too: an anchor starts a new segment at once, so that no more are placed than needed."""
    monkeypatch.setattr(rebuilding, "PENDING", 3)
    monkeypatch.setattr(rebuilding.Reading, "is_here", lambda _: False)
    found, expected = (climb(deep(LATE[manner], backend, shake), network)[1] for backend in ("triton", "torch"))
    assert [x._replace(predicted=0) for x in found.layers] == [x._replace(predicted=0) for x in expected.layers]
    predicted = [[x.predicted for x in report.layers] for report in (found, expected)]
    assert predicted[0] == pytest.approx(predicted[1], rel=1e-3)
    assert 2 < len(found.anchors) < len(found.layers) - 2


@fused
def test_a_segment_that_goes_on_from_torch_to_the_kernels_starts_anew_at_an_anchor(shake, network):
    """Who changes the backend on the way: what has added up so far is unknown to the other side."""
    residual = deep(Recompute(anchor_every=None, max_gate=0.9), "torch", shake)
    layers = network(WIDTH, DEEP).to(HERE)
    h, state = residual.start(torch.ones(2, WIDTH, device=HERE))
    for layer, sublayer in enumerate(layers):
        residual.backend = "torch" if layer < 8 else "triton"
        h, state = residual.step(layer, sublayer(h), state)
    assert residual.recompute_report().anchors == (8, DEEP - 1)


@pytest.mark.slow
def test_all_of_this_holds_in_the_interpreter():
    if HERE == "cuda" or INTERPRETED:
        pytest.skip("the tests above have run")
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", str(Path(__file__))]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    assert done.returncode == 0 and "17 passed" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


# ---- on a GPU alone

gpu = [pytest.mark.gpu, pytest.mark.skipif(HERE == "cpu", reason="needs a CUDA device")]


class Deep(nn.Module):
    """48 sublayers of width 256, on tokens enough for streams to be most of the memory."""

    def __init__(self, recompute, n_layers=48):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(n_layers)).cuda()
        self.residual = build("mgr-competitive", 256, n_layers, recompute=recompute).cuda()

    def forward(self, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.residual(x, self.layers).float().square().mean()


def stream_memory(recompute):
    """(bytes that the forward pass leaves, bytes that its backward leaves while the loss is held, gradients)."""
    model, x = Deep(recompute), torch.randn(8, 512, 256, device="cuda")
    model(x).backward()
    before = torch.cuda.memory_allocated()
    loss = model(x)
    model.residual.recompute_report()  # waits for the last layers' numbers, so that they keep what they will keep
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    left = torch.cuda.memory_allocated() - before
    assert loss.isfinite()
    return kept, left, [p.grad for p in model.parameters()]


class TestOnAGpu:
    pytestmark = gpu

    def test_memory_is_that_of_the_report_and_goes_back_at_once(self):
        model = Deep(Recompute())
        model(torch.randn(8, 512, 256, device="cuda"))
        report = model.residual.recompute_report()
        stored, after, expected = stream_memory(None)
        kept, left, found = stream_memory(Recompute())
        assert report.share < 0.3
        saved = report.all_bytes - report.kept_bytes
        assert stored - kept == pytest.approx(saved, rel=0.1)
        assert left <= after + 2**20
        for a, b in zip(found, expected, strict=True):
            assert (a - b).norm() <= 2e-2 * b.norm()

    def test_the_forward_never_waits_for_what_is_still_running(self):
        model, x = Deep(Recompute()), torch.randn(8, 512, 256, device="cuda")
        model(x).backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_compiled_sublayers_give_equal_gradients(self):
        x = torch.randn(2, 64, 256, device="cuda")
        plain, compiled = Deep(Recompute(), 12), Deep(Recompute(), 12)
        for layer in compiled.layers:
            layer.compile()
        for model in (plain, compiled):
            model(x).backward()
        for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
            assert (a.grad - b.grad).norm() <= 2e-2 * a.grad.norm()
