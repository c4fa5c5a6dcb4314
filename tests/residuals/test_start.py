"""Where MGR starts and what follows: the depth-scaled bias, streams that separate, copies that never do."""

import math

import pytest
import torch
from torch import nn

from depthlab.kernels.mgr import mix_and_pool
from depthlab.residuals import SCHEMES, build
from depthlab.residuals import mgr as mgr_module
from depthlab.theory import gate_bias

GATES = ("independent", "competitive")
WIDTH, LAYERS = 8, 8


class Toy(nn.Module):
    """Regression through tanh sublayers: enough for every gate and query to matter."""

    def __init__(self, scheme, n_streams=4, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)
        self.residual = build(scheme, WIDTH, LAYERS, n_streams=n_streams)

    def forward(self, x):
        return self.head(self.residual(x, self.layers))


def batch(step):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(16, 4, WIDTH, generator=g)
    return x, torch.sin(2 * x[..., :1]) + x[..., 1:2] * x[..., 2:3]


def train(model, steps, watch=lambda: None):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, y = batch(step)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        watch()
        optimizer.step()
    return loss.item()


# ---- the bias


def initial_gates(scheme, n_streams, n_sublayers):
    """Every gate [mixing layers, n] that an untrained network opens, whatever the signals are."""
    residual = build(scheme, WIDTH, n_sublayers, n_streams=n_streams)
    g = torch.Generator().manual_seed(0)
    h, state = residual.start(torch.randn(1, WIDTH, generator=g))
    gates = []
    for layer in range(n_sublayers):
        if layer >= n_streams - 1:
            gates.append(residual.write_weights(layer, state)[1][0])
        h, state = residual.step(layer, torch.randn(1, WIDTH, generator=g), state)
    return torch.stack(gates)


def wanted_gate(n_mixing_layers):
    return (1 / (1 + math.exp(3))) * math.sqrt(21 / n_mixing_layers)


@pytest.mark.parametrize(("n_streams", "n_sublayers"), [(4, 24), (1, 21), (2, 12), (4, 7), (8, 48)])
@pytest.mark.parametrize("gate", GATES)
def test_gates_open_as_the_number_of_mixing_layers_asks(gate, n_streams, n_sublayers):
    gates = initial_gates(f"mgr-{gate}", n_streams, n_sublayers)
    assert gates.shape == (n_sublayers - n_streams + 1, n_streams)
    expected = wanted_gate(n_sublayers - n_streams + 1)
    torch.testing.assert_close(gates, torch.full_like(gates, expected), rtol=1e-5, atol=0)


WRONG_BIASES = {
    "the other gate's form": lambda gate, n, layers: gate_bias(GATES[gate == "independent"], n, layers),
    "all sublayers counted": lambda gate, n, layers: gate_bias(gate, n, layers + n - 1),
    "no scaling with depth": lambda gate, n, layers: gate_bias(gate, n, 21),
}


@pytest.mark.parametrize("name", WRONG_BIASES)
@pytest.mark.parametrize("gate", GATES)
def test_a_wrong_bias_opens_other_gates(monkeypatch, gate, name):
    monkeypatch.setattr(mgr_module, "gate_bias", WRONG_BIASES[name])
    gates = initial_gates(f"mgr-{gate}", 4, 12)
    assert (gates / wanted_gate(9) - 1).abs().min() > 0.05


@pytest.mark.parametrize("gate", GATES)
def test_only_mixing_layers_own_a_gate_and_only_pools_own_a_query(gate):
    for n in (1, 2, 4):
        residual = build(f"mgr-{gate}", WIDTH, LAYERS, n_streams=n)
        names = [n for n, _ in residual.named_parameters()]
        mixing = LAYERS - n + 1
        assert sum("w_gate" in name for name in names) == sum("bias" in name for name in names) == mixing
        assert sum("w_pool" in name for name in names) == (LAYERS if n > 1 else 0)
        n_bias = n if gate == "independent" else 1
        size = mixing * (WIDTH + n_bias) + (LAYERS * WIDTH if n > 1 else 0)
        assert sum(p.numel() for p in residual.parameters()) == size
        assert all(p.abs().max() == 0 for name, p in residual.named_parameters() if "bias" not in name)


# ---- the start values of the baselines, as their papers give them


def by_end_of_name(layer):
    return {name: value.detach() for name, value in layer.named_parameters()}


@pytest.mark.parametrize("n", [1, 2, 4])
def test_hyper_connections_start_at_the_papers_values(n):
    for index, layer in enumerate(build("hc", WIDTH, LAYERS, n_streams=n).residual_layers):
        own, read = by_end_of_name(layer), torch.eye(n)[index % n]
        assert torch.equal(own.pop("static_read"), read) and torch.equal(own.pop("static_mix"), torch.eye(n))
        assert torch.equal(own.pop("static_write"), torch.ones(n))
        assert {own.pop("read_mix_scale").item(), own.pop("write_scale").item()} == {torch.tensor(0.01).item()}
        assert len(own) == 3 and not any(weight.any() for weight in own.values())


@pytest.mark.parametrize("n", [1, 2, 4])
def test_mhc_lite_starts_at_the_papers_values(n):
    residual = build("mhc-lite", WIDTH, LAYERS, n_streams=n)
    for index, layer in enumerate(residual.residual_layers):
        own, one_stream = by_end_of_name(layer), 2 * torch.eye(n)[index % n] - 1
        assert torch.equal(own.pop("read_bias"), one_stream) and torch.equal(own.pop("write_bias"), one_stream)
        scales = {own.pop(name).item() for name in list(own) if name.endswith("_scale")}
        assert scales == {torch.tensor(0.01).item()}
        if n > 1:
            mix = own.pop("mix_bias")
            assert mix.tolist() == [0.0] + [-8.0] * (math.factorial(n) - 1)
            assert torch.equal(residual.residual_permutations[mix.argmax()], torch.eye(n))
        assert len(own) == 2 + (n > 1) and not any(weight.any() for weight in own.values())


def test_attention_residuals_start_as_plain_means():
    for scheme in ("attnres", "attnres-block"):
        for layer in build(scheme, WIDTH, LAYERS).residual_layers:
            assert not layer.query.any() and torch.equal(layer.key_weight, torch.ones(WIDTH))


# ---- gradients


@pytest.mark.parametrize("n_streams", [1, 2, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_parameter_gets_a_gradient_in_the_first_five_steps(scheme, n_streams):
    model = Toy(scheme, n_streams)
    moved = {name: False for name, _ in model.named_parameters()}

    def watch():
        for name, p in model.named_parameters():
            moved[name] |= p.grad is not None and bool(p.grad.abs().max() > 0)

    train(model, 5, watch)
    assert all(moved.values()), [name for name, seen in moved.items() if not seen]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_learns(scheme):
    assert train(Toy(scheme), 60) < 0.9 * batch(59)[1].var().item()  # seen: 0.39 to 0.72 of the variance, two seeds


# ---- streams separate, copies do not


def spread(streams):
    """max |s_i - mean of the streams|: 0 exactly when all n are equal (n a power of two, so the mean is exact)."""
    return (streams - streams.mean(-2, keepdim=True)).abs().max().item()


@pytest.mark.parametrize("gate", GATES)
def test_streams_are_apart_from_the_start_and_stay_apart_in_training(gate):
    model = Toy(f"mgr-{gate}")
    gate_gradients = []

    def watch():
        gate_gradients.append([layer.bias.grad for layer in model.residual.residual_layers[3:]])

    def final_spread():
        h, state = model.residual.start(batch(0)[0])
        for layer, sublayer in enumerate(model.layers):
            h, state = model.residual.step(layer, sublayer(h), state)
        return spread(state.streams)

    before = final_spread()
    train(model, 20, watch)
    assert before > 0.1 and final_spread() > 0.1
    if gate == "independent":  # each stream's gate is told something else at the very first step
        for gradient in gate_gradients[0]:
            differences = (gradient.unsqueeze(0) - gradient.unsqueeze(1)).abs() + torch.eye(4)
            assert differences.min() > 0


class Copies(nn.Module):
    """The tempting wrong start: n copies of x_0, and every layer mixes."""

    def __init__(self, gate, n_streams=4):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.n_streams = gate, n_streams
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)
        n_bias = n_streams if gate == "independent" else 1
        start = gate_bias(gate, n_streams, LAYERS)
        self.w_gate = nn.ParameterList(torch.zeros(WIDTH) for _ in range(LAYERS))
        self.w_pool = nn.ParameterList(torch.zeros(WIDTH) for _ in range(LAYERS))
        self.bias = nn.ParameterList(torch.full((n_bias,), start) for _ in range(LAYERS))

    def forward(self, x):
        streams, h = x.unsqueeze(-2).expand(*x.shape[:-1], self.n_streams, WIDTH), x
        for sublayer, w, b, q in zip(self.layers, self.w_gate, self.bias, self.w_pool, strict=True):
            streams, h, _ = mix_and_pool(streams, sublayer(h), w, b, q, gate=self.gate, normalize=True)
        self.spread = spread(streams)
        return self.head(h)


@pytest.mark.parametrize("gate", GATES)
def test_copies_of_the_embedding_never_separate_and_their_queries_never_learn(gate):
    model = Copies(gate)
    spreads, query_gradients = [], []

    def watch():
        spreads.append(model.spread)
        query_gradients.extend(q.grad.abs().max().item() for q in model.w_pool)

    train(model, 50, watch)
    assert set(spreads) == {0.0} and set(query_gradients) == {0.0}
    assert all(torch.equal(b, b[:1].expand_as(b)) for b in model.bias)
    assert not torch.equal(model.bias[0], torch.full_like(model.bias[0], gate_bias(gate, 4, LAYERS)))  # it did train


# ---- a bias keeps its stream


def test_a_pruned_accumulation_layer_leaves_the_other_streams_their_own_biases():
    residual = build("mgr-independent", WIDTH, LAYERS, n_streams=4)
    with torch.no_grad():
        residual.residual_layers[3].bias.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    h, state = residual.start(torch.ones(WIDTH))
    for layer in (0, 2):  # sublayer 1, so slot 2, is pruned
        h, state = residual.step(layer, torch.ones(WIDTH), state)
    assert state.extra == (0, 1, 3) and state.streams.shape == (3, WIDTH)
    torch.testing.assert_close(residual.write_weights(3, state)[1], torch.sigmoid(torch.tensor([1.0, 2.0, 4.0])))
