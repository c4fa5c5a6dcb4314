"""Every measure against an independent computation, for all seven schemes; and nothing left behind when it is off."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from depthlab import diagnostics as dg
from depthlab.residuals import SCHEMES, build

WIDTH, LAYERS = 6, 10
MEASURES = (
    dg.norms,
    dg.raw_reads,
    dg.source_coefficients,
    dg.embedding_share,
    dg.gate_statistics,
    dg.pool_statistics,
    dg.layer_angles,
    dg.stream_angles,
    dg.stream_turns,
    dg.signal_gradient_norms,
)


@pytest.fixture(params=SCHEMES)
def scheme(request):
    return request.param


@pytest.fixture
def model(scheme):
    """(residual in float64 with every parameter moved, sublayers, embedding)."""
    torch.manual_seed(0)
    residual = build(scheme, WIDTH, LAYERS, n_streams=3).double()
    with torch.no_grad():
        for p in residual.parameters():
            p += 0.5 * torch.randn_like(p)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)).double()
    return residual, layers, torch.randn(2, 4, WIDTH, dtype=torch.float64)


def traced(model, skip=(), **how):
    residual, layers, x = model
    with dg.record(residual, **how) as trace:
        out = residual(x, layers, skip)
    return trace, out


# ---- recording


def test_a_trace_holds_the_pass_and_changes_nothing(model):
    residual, layers, x = model
    trace, out = traced(model)
    assert torch.equal(out, residual(x, layers))
    assert torch.equal(trace.embedding, x) and [s.layer for s in trace.steps] == list(range(LAYERS))
    assert torch.equal(trace.inputs[LAYERS], out.detach()) and sorted(trace.reads) == list(range(LAYERS + 1))
    for step in trace.steps:
        assert torch.equal(step.update, layers[step.layer](trace.inputs[step.layer]))
        assert not step.update.requires_grad and not step.after.stacked().requires_grad


def test_the_last_pass_counts_and_a_recomputation_does_not(model):
    residual, layers, x = model
    with dg.record(residual) as trace:
        residual(x + 1, layers)
        h, state = residual.start(x)
        h, after = residual.step(0, layers[0](h), state)
        residual.step(0, layers[0](h) + 1, state)
        residual.step(1, layers[1](h), after)
    assert torch.equal(trace.embedding, x) and [s.layer for s in trace.steps] == [0, 1]


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


def test_it_costs_nothing_when_it_is_off(model):
    residual, layers, x = model

    def work():
        with Count() as count:
            residual(x, layers)
        return count.calls

    before, attributes = work(), dict(vars(residual))
    with pytest.raises(KeyError), dg.record(residual):
        residual(x, layers)
        raise KeyError  # an error inside must not leave the wrappers on
    assert work() == before and vars(residual).keys() == attributes.keys()
    for module in residual.modules():
        assert not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def test_recording_wrongly_gets_one_sentence(model):
    residual = model[0]
    with (
        pytest.raises(TypeError, match="record needs a depthlab.residuals.Residual, got Linear"),
        dg.record(nn.Linear(2, 2)),
    ):
        pass
    with dg.record(residual), pytest.raises(RuntimeError, match="recorded already"), dg.record(residual):
        pass
    with dg.record(residual) as trace:
        pass
    for measure in MEASURES:
        with pytest.raises(ValueError, match="This trace is empty"):
            measure(trace)


def test_a_pass_without_a_token_is_refused_by_every_measure(model):
    residual, layers, x = model
    trace, _ = traced((residual, layers, x[:, :0]))
    for measure in MEASURES:
        with pytest.raises(ValueError, match=r"An embedding of shape \[2, 0, 6\] has no token to measure"):
            measure(trace)


# ---- linearity


@pytest.mark.parametrize("skip", [(), (0, 1), (4, 5, 9)])
def test_source_coefficients_rebuild_every_read_and_equal_the_jacobian(model, skip):
    residual, _, x = model
    trace, _ = traced(model, skip)
    updates = {s.layer: s.update for s in trace.steps}
    sources = torch.stack([x, *(updates.get(i, torch.zeros_like(x)) for i in range(LAYERS))], -2)
    for layer, read in dg.raw_reads(trace).items():
        weights = dg.source_coefficients(trace)[layer]
        torch.testing.assert_close((weights.unsqueeze(-1) * sources).sum(-2), read)
        assert not weights[..., [1 + i for i in skip]].any()
        normed = read / (read.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(normed, trace.inputs[layer])


def test_embedding_share_is_the_share_of_its_length(model):
    trace, _ = traced(model)
    table = dg.embedding_share(trace)
    assert table.layer.tolist() == list(range(LAYERS + 1))
    np.testing.assert_allclose(table.share[0], 1.0)
    weights = dg.source_coefficients(trace)[4].numpy()
    lengths = np.stack(
        [np.linalg.norm(trace.embedding.numpy(), axis=-1)]
        + [np.linalg.norm(s.update.numpy(), axis=-1) for s in trace.steps],
        -1,
    )
    parts = np.abs(weights) * lengths
    np.testing.assert_allclose(table.share[4], (parts[..., 0] / parts.sum(-1)).mean())
    np.testing.assert_allclose(table.coefficient[4], weights[..., 0].mean())


def test_embedding_share_of_equal_updates_by_hand():
    """All sources have length 1: PreNorm keeps 1/(1 + l) of x_0, one MGR stream (1 - g)^l."""
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    turn = lambda h: torch.tensor([[0.0, 1.0]], dtype=torch.float64)  # noqa: E731
    for scheme, expected in (
        ("prenorm", [1 / (1 + layer) for layer in range(22)]),
        ("mgr-independent", [(1 - 1 / (1 + math.exp(3))) ** layer for layer in range(22)]),
    ):
        residual = build(scheme, 2, 21, n_streams=1)
        with dg.record(residual) as trace:
            residual(x, [turn] * 21)
        np.testing.assert_allclose(dg.embedding_share(trace).share, expected, rtol=1e-6)


# ---- norms, gates, pools


def test_norms_agree_with_numpy(model):
    trace, _ = traced(model)
    table = dg.norms(trace).set_index(["signal", "layer", "stream"])
    assert len(table.loc["read"]) == LAYERS + 1 and len(table.loc["update"]) == LAYERS
    cases = [("update", 3, -1, trace.steps[3].update), ("read", 5, -1, dg.raw_reads(trace)[5])]
    cases += [("stream", 7, i, s) for i, s in enumerate(trace.reads[7].stacked().unbind(-2))]
    for signal, layer, stream, tensor in cases:
        v = tensor.numpy()
        row = table.loc[(signal, layer, stream)]
        length = np.linalg.norm(v, axis=-1)
        np.testing.assert_allclose([row["mean"], row["max"]], [length.mean(), length.max()])
        np.testing.assert_allclose(row.massive, np.abs(v).max() / np.median(np.abs(v)))


def test_one_massive_activation_shows():
    residual = build("prenorm", 50, 1)
    x = torch.ones(1, 20, 50)
    x[0, 3, 7] = 300.0
    with dg.record(residual) as trace:
        residual(x, [torch.zeros_like])
    read = dg.norms(trace).query("signal == 'read' and layer == 0").iloc[0]
    assert read.massive == 300.0 and read["max"] > 6 * read["mean"] > 6 * 50**0.5


def test_gate_and_pool_statistics_agree_with_the_scheme(model):
    residual = model[0]
    trace, _ = traced(model)
    for table, coefficients in (
        (dg.gate_statistics(trace), lambda layer: residual.write_weights(layer, trace.reads[layer])[1]),
        (dg.pool_statistics(trace), lambda layer: residual.read_weights(layer, trace.reads[layer])),
    ):
        for layer in (2, 6):
            w = coefficients(layer).detach().double().numpy()
            rows = table[table.layer == layer]
            assert rows.stream.tolist() == list(range(w.shape[-1]))
            axes = tuple(range(w.ndim - 1))
            for name, by_numpy in (
                ("mean", w.mean(axes)),
                ("std", w.std(axes)),
                ("min", w.min(axes)),
                ("max", w.max(axes)),
            ):
                np.testing.assert_allclose(rows[name], by_numpy, rtol=1e-9, atol=1e-12)


def test_gates_at_the_start_are_the_bias_alone():
    residual = build("mgr-competitive", WIDTH, 24, n_streams=4)
    with dg.record(residual) as trace:
        residual(torch.randn(3, WIDTH), [torch.tanh] * 24)
    gates = dg.gate_statistics(trace)
    np.testing.assert_allclose(gates[gates.layer >= 3]["mean"], 1 / (1 + math.exp(3)), rtol=1e-5)
    assert gates[gates.layer >= 3]["std"].max() < 1e-7
    assert gates[gates.layer == 1]["mean"].tolist() == [0.0, 0.0, 1.0]


def test_half_precision_states_are_measured_in_float32(model):
    residual, layers, x = model
    residual.float(), layers.float()
    with torch.autocast("cpu", dtype=torch.bfloat16), dg.record(residual) as trace:
        residual(x.float(), layers)
        shares, sizes = dg.embedding_share(trace), dg.norms(trace)
    assert trace.steps[2].update.dtype == torch.bfloat16
    assert shares.share.between(0, 1).all() and np.isfinite(sizes["mean"]).all()
    update = sizes.query("signal == 'update' and layer == 2").iloc[0]
    v = trace.steps[2].update.float().numpy()
    length, values = np.linalg.norm(v, axis=-1), np.abs(v)
    np.testing.assert_allclose([update["mean"], update["max"]], [length.mean(), length.max()], rtol=1e-5)
    np.testing.assert_allclose(update.massive, values.max() / np.median(values), rtol=1e-5)
    assert shares.equals(dg.embedding_share(trace))  # autocast does not reach the measures


# ---- angles


def test_angular_distance_by_hand():
    a = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [2.0, 0.0], [3.0, 4.0]])
    b = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 0.0], [-1.0, 0.0], [6.0, 8.0]])
    torch.testing.assert_close(dg.angular_distance(a, b), torch.tensor([0, 0.5, 0.25, 1, 0]).double())
    assert torch.isnan(dg.angular_distance(torch.zeros(2), torch.ones(2)))
    tiny = dg.angular_distance(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1e-6]))
    torch.testing.assert_close(tiny.item(), 1e-6 / math.pi, rtol=1e-6, atol=0)  # arccos would say 0


@pytest.mark.parametrize("size", [1e-300, 1e-200, 1e200, 1e300])
def test_an_angle_does_not_depend_on_the_length(size):
    """Squares of these leave float64; the two directions came out at right angles."""
    a, b = torch.tensor([3.0, 4.0]).double(), torch.tensor([4.0, 3.0]).double()
    for left, right in ((a * size, b), (a, b * size), (a * size, b * size)):
        torch.testing.assert_close(dg.angular_distance(left, right), dg.angular_distance(a, b))
    assert dg.angular_distance(a * size, -a) == 1 and dg.angular_distance(a * size, a) < 1e-15


def test_an_angle_with_a_vector_that_is_not_finite_is_nan():
    a, odd = torch.ones(2), torch.tensor([1.0, math.inf])
    assert torch.isnan(dg.angular_distance(a, odd)) and torch.isnan(dg.angular_distance(a, odd * math.nan))


@pytest.mark.parametrize(("value", "shows"), [(0.0, False), (math.nan, True), (math.inf, True)])
def test_mean_angles_leave_out_zero_tokens_and_show_broken_ones(value, shows):
    residual = build("mgr-independent", WIDTH, 4, n_streams=2)
    x, others = torch.randn(2, 5, WIDTH).unbind(0)
    x[2] = value
    with dg.record(residual) as trace:
        residual(x, [lambda h: others] * 4)
    clean = [0, 1, 3, 4]
    with dg.record(residual) as without:
        residual(x[clean], [lambda h: others[clean]] * 4)
    for measure in (lambda t: dg.layer_angles(t)[0, 1], lambda t: dg.stream_angles(t).angle[0]):
        if shows:
            assert math.isnan(measure(trace))
        else:
            np.testing.assert_allclose(measure(trace), measure(without), rtol=1e-6)
    assert math.isnan(dg.stream_turns(trace).angle[0]) == shows


def test_angles_between_layers_and_streams_agree_with_arccos(model):
    trace, _ = traced(model)
    reads = dg.raw_reads(trace)

    def by_arccos(a, b):
        cos = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))
        return (torch.arccos(cos.clamp(-1, 1)) / math.pi).mean().item()

    matrix = dg.layer_angles(trace)
    assert matrix.shape == (LAYERS + 1, LAYERS + 1)
    np.testing.assert_allclose(matrix, matrix.T)
    np.testing.assert_allclose(np.diag(matrix), 0, atol=1e-12)
    np.testing.assert_allclose(matrix[2, 7], by_arccos(reads[2], reads[7]), rtol=1e-6)
    streams = trace.reads[6].stacked().unbind(-2)
    pairs = dg.stream_angles(trace).query("layer == 6").set_index(["stream", "other"]).angle
    assert len(pairs) == math.comb(len(streams), 2)
    for (i, j), angle in pairs.items():
        np.testing.assert_allclose(angle, by_arccos(streams[i], streams[j]), rtol=1e-6, atol=1e-7)
    turns = dg.stream_turns(trace).query("layer == 6").set_index("stream").angle
    after = trace.steps[6].after.stacked().unbind(-2)
    for i, angle in turns.items():
        np.testing.assert_allclose(angle, by_arccos(streams[i], after[i]), rtol=1e-6, atol=1e-7)


# ---- pruning and gradients


def test_block_pruning_leaves_out_what_it_says(model):
    residual, layers, x = model
    target = torch.randn_like(x)

    def loss(skip):
        return (residual(x, layers, skip) - target).square().mean().item()

    table = dg.block_pruning(loss, LAYERS)
    assert table.layers.tolist() == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    assert table.loss[2] == loss({4, 5}) != loss(())
    np.testing.assert_allclose(table.increase, table.loss - loss(()))


def test_pruning_what_does_nothing_costs_nothing():
    residual = build("prenorm", WIDTH, 4)
    layers = [torch.tanh, torch.tanh, torch.zeros_like, torch.zeros_like]
    x = torch.randn(3, WIDTH)
    table = dg.block_pruning(lambda skip: residual(x, layers, skip).pow(3).sum().item(), 4)
    assert table.increase[1] == 0 and table.increase[0] != 0


def test_pruning_wrongly_gets_one_sentence():
    with pytest.raises(ValueError, match="5 sublayers do not form blocks of 2"):
        dg.block_pruning(lambda skip: 0.0, 5)
    with pytest.raises(ValueError, match=r"loss without sublayers \[0, 1\] is NaN"):
        dg.block_pruning(lambda skip: math.nan if skip else 1.0, 4)


def test_gradient_norms_agree_with_autograd(model):
    residual, layers, x = model
    other, out = traced(model, gradients=True)
    expected = [g.norm().item() for g in torch.autograd.grad(out.pow(3).sum(), [s.update for s in other.steps])]
    trace, out = traced(model, gradients=True)
    out.pow(3).sum().backward()
    np.testing.assert_allclose(list(dg.signal_gradient_norms(trace).values()), expected)
    by_hand = [math.sqrt(sum(p.grad.square().sum().item() for p in layer.parameters())) for layer in layers]
    np.testing.assert_allclose(dg.gradient_norms(layers), by_hand)
    assert dg.gradient_norms([nn.Tanh()]) == [0.0]


def test_missing_gradients_get_one_sentence(model):
    trace, _ = traced(model)
    with pytest.raises(ValueError, match=r"Sublayer 0 has no gradient; use `record\(residual, gradients=True\)`"):
        dg.signal_gradient_norms(trace)
    with pytest.raises(ValueError, match="Module 0 has no gradient; call backward first"):
        dg.gradient_norms(model[1])
