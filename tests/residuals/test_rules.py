"""Each scheme against its rule: by hand, in numpy with every parameter moved, and against others where they meet."""

import math

import pytest
import torch

from depthlab.residuals import SCHEMES, State, build
from depthlab.theory import carry

MGR = ("mgr-independent", "mgr-competitive")


def drive(residual, x, updates, skip=()):
    """All reads [L + 1, .., C] when the sublayers put out `updates`, whatever they read."""
    h, state = residual.start(x)
    reads = [h]
    for layer, update in enumerate(updates):
        if layer in skip:
            h = residual.read(layer + 1, state)
        else:
            h, state = residual.step(layer, update, state)
        reads.append(h)
    return torch.stack(reads)


def signals(tokens=3, width=5, layers=6, seed=1, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    return make(tokens, width), make(layers, tokens, width)


def close(x, y, **tolerance):
    torch.testing.assert_close(torch.as_tensor(x), torch.as_tensor(y, dtype=x.dtype), **tolerance)


# ---- in numpy


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_read_follows_the_rule(truth, make, scheme, n, normalize):
    residual = make(scheme, n_streams=n, normalize=normalize)
    x, updates = signals()
    expected = truth.reads(scheme, residual, x.numpy(), updates.numpy(), normalize=normalize)
    close(drive(residual, x, updates), expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("skip", [(0,), (1, 2), (3,), (0, 1, 4), (5,), (0, 1, 2, 3, 4, 5)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_pruning_leaves_a_step_out_and_the_next_sublayer_reads_by_its_own_query(truth, make, scheme, skip):
    residual = make(scheme, n_streams=3, normalize=False)
    x, updates = signals()
    expected = truth.reads(scheme, residual, x.numpy(), updates.numpy(), skip)
    close(drive(residual, x, updates, skip), expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("skip", [(3,), (4,), (5,), (3, 4), (5, 6), (3, 4, 5), (2, 3, 4, 5, 6), (0, 23)])
def test_block_attnres_lets_the_next_sublayer_open_a_block_whose_first_is_pruned(truth, make, skip):
    residual = make("attnres-block", n_sublayers=24, normalize=False)
    x, updates = signals(layers=24)
    close(drive(residual, x, updates, skip), truth.reads("attnres-block", residual, x.numpy(), updates.numpy(), skip))


@pytest.mark.parametrize("layers", [1, 7, 8, 9, 16, 21, 24])
def test_block_attnres_sums_eight_blocks(truth, make, layers):
    residual = make("attnres-block", n_sublayers=layers, normalize=False)
    x, updates = signals(layers=layers)
    close(drive(residual, x, updates), truth.reads("attnres-block", residual, x.numpy(), updates.numpy()))
    h, state = residual.start(x)
    for layer, update in enumerate(updates):
        h, state = residual.step(layer, update, state)
    assert len(state.streams) == 1 + min(8, layers)
    close(sum(state.streams), x + updates.sum(0))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_linear_form_is_what_step_applies(make, scheme):
    """`write_weights` and `read_weights` state the whole scheme: diagnostics rest on that."""
    residual = make(scheme, n_streams=3, n_sublayers=10, normalize=False)
    x, updates = signals(layers=10)
    h, state = residual.start(x)
    for layer, update in enumerate(updates):
        mix, write = (w.double() for w in residual.write_weights(layer, state))
        expected = carry(state.stacked(), update, mix, write)
        h, state = residual.step(layer, update, state)
        close(state.stacked(), expected)
        weights = residual.read_weights(layer + 1, state).double()
        close(h, (weights.unsqueeze(-1) * state.stacked()).sum(-2))


# ---- by hand, three tokens, C = 1, where RMSNorm is the sign


X = torch.tensor([[2.0], [-4.0], [1.0]], dtype=torch.float64)


def like_x(*values):
    return torch.tensor(values, dtype=torch.float64).unsqueeze(-1)


def test_prenorm_by_hand():
    residual = build("prenorm", 1, 2, normalize=False)
    reads = drive(residual, X, [like_x(1, 1, 1), like_x(0.5, 4, -2)])
    close(reads[..., 0], [[2.0, -4.0, 1.0], [3.0, -3.0, 2.0], [3.5, 1.0, 0.0]])


def test_hyper_connections_by_hand():
    residual = build("hc", 1, 2, n_streams=2, normalize=False).double()
    with torch.no_grad():
        own = residual.residual_layers[0]
        own.read_mix_scale.fill_(0.1), own.write_scale.fill_(0.1)
        own.dynamic_read.fill_(math.atanh(0.5)), own.dynamic_write.fill_(math.atanh(0.5))
        own.dynamic_mix[0, 0] = math.atanh(0.2)
    reads = drive(residual, X, [like_x(10, 10, 10), like_x(1, 1, 1)])
    # Read 0: x (1 + 0.05 sign) + x 0.05 sign. Stream 0 keeps 1 + 2 * 0.02 sign of x and takes 1 + 0.05 sign of F;
    # stream 1 keeps x. Layer 1 reads stream 1; the output is the mean.
    close(reads[..., 0], [[2.2, -3.6, 1.1], [12.5, 5.5, 11.5], [13.54, 6.58, 12.52]])


def test_mhc_lite_by_hand():
    residual = build("mhc-lite", 1, 2, n_streams=2, normalize=False).double()
    with torch.no_grad():
        first, second = residual.residual_layers
        first.read_bias.copy_(torch.tensor([math.log(3), 0.0])), first.write_bias.copy_(first.read_bias)
        first.read_scale.fill_(1), first.read_weight.zero_()
        first.read_weight[0, 0] = math.log(2)
        second.read_bias.zero_(), second.write_bias.zero_()
        second.mix_bias.copy_(torch.tensor([math.log(3), 0.0]))
    reads = drive(residual, X, [like_x(4, 4, 4), like_x(-1, -1, -1)])
    # Read 0: 6/7 + 1/2 where x > 0, 3/5 + 1/2 where x < 0. Then (x + 6, x + 4), read by halves; mixed 3 : 1, plus F.
    first = [2 * (6 / 7 + 0.5), -4 * 1.1, 6 / 7 + 0.5]
    close(reads[..., 0], [first, [7.0, 1.0, 6.0], [6.0, 0.0, 5.0]], rtol=1e-6, atol=1e-6)


def test_attention_residuals_by_hand():
    residual = build("attnres", 1, 2, normalize=False).double()
    with torch.no_grad():
        residual.residual_layers[0].query.fill_(math.log(3) / 4)
        residual.residual_layers[0].key_weight.fill_(2)
    reads = drive(residual, X, [like_x(-2, 5, 3), like_x(9, 2, 5)])
    # Score of a source: +- ln(3)/2, so opposite signs weigh 3 : 1 and equal ones 1 : 1. The output is the plain mean.
    close(reads[..., 0], [[2.0, -4.0, 1.0], [1.0, 2.75, 2.0], [3.0, 1.0, 3.0]], rtol=1e-6, atol=1e-6)


def test_multi_gate_residuals_by_hand():
    residual = build("mgr-independent", 1, 2, n_streams=2, normalize=False).double()
    with torch.no_grad():
        residual.residual_layers[0].w_pool.fill_(math.log(3) / 2)
        residual.residual_layers[1].w_gate.fill_(math.log(3))
        residual.residual_layers[1].bias.copy_(torch.tensor([0.0, math.log(3)]))
    reads = drive(residual, X, [like_x(-2, 5, 3), like_x(10, 0, -3)])
    # Streams (2, -2): gates 3/4 and 1/2 -> (8, 4); (-4, 5): 1/4 and 9/10 -> (-3, 0.5); (1, 3): 3/4, 9/10 -> (-2, -2.4).
    close(reads[..., 0], [[2.0, -4.0, 1.0], [1.0, 2.75, 2.0], [6.0, -1.25, -2.2]], rtol=1e-5, atol=1e-5)


# ---- where one scheme is another


def assert_same_reads(a, b, layers=6, **tolerance):
    x, updates = signals(layers=layers)
    close(drive(a, x, updates), drive(b, x, updates), **tolerance)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_hyper_connections_start_as_prenorm(network, n, normalize):
    hc, prenorm = (build(s, 5, 6, n_streams=n, normalize=normalize).double() for s in ("hc", "prenorm"))
    assert_same_reads(hc, prenorm)
    layers, x = network(5, 6, dtype=torch.float64), signals()[0]
    grads = [torch.autograd.grad(r(x, layers).square().sum(), list(layers.parameters())) for r in (hc, prenorm)]
    for a, b in zip(*grads, strict=True):
        close(a, b)


def test_mhc_lite_with_one_stream_and_a_write_of_one_is_prenorm_once_normalised():
    lite, prenorm = (build(s, 5, 6, n_streams=1).double() for s in ("mhc-lite", "prenorm"))
    with torch.no_grad():
        for layer in lite.residual_layers:
            layer.write_bias.zero_()
    assert_same_reads(lite, prenorm, rtol=1e-4, atol=1e-5)  # a read of 0.73 x: equal but for eps in the norm


def test_mhc_lite_with_static_coefficients_is_hyper_connections_with_the_same_ones(shake):
    lite, hc = build("mhc-lite", 5, 6, n_streams=3).double(), build("hc", 5, 6, n_streams=3).double()
    shake(lite)
    with torch.no_grad():
        for own, other in zip(lite.residual_layers, hc.residual_layers, strict=True):
            own.read_weight.zero_(), own.write_weight.zero_(), own.mix_weight.zero_()
            other.static_read.copy_(own.read_bias.sigmoid()), other.static_write.copy_(2 * own.write_bias.sigmoid())
            mixer = torch.einsum("k,kij->ij", own.mix_bias.softmax(0), lite.residual_permutations)
            other.static_mix.copy_(mixer.t())
    assert_same_reads(lite, hc)


@pytest.mark.parametrize("layers", [1, 5, 8])
def test_block_attnres_is_attnres_up_to_eight_sublayers(shake, layers):
    block, full = (shake(build(s, 5, layers).double(), seed=3) for s in ("attnres-block", "attnres"))
    assert_same_reads(block, full, layers)


def test_block_attnres_with_one_block_attends_over_the_embedding_and_prenorms_sum(shake, monkeypatch):
    block = shake(build("attnres-block", 5, 6, normalize=False).double())
    monkeypatch.setattr(type(block), "N_BLOCKS", 1)
    x, updates = signals()
    h, state = block.start(x)
    for layer, update in enumerate(updates):
        h, state = block.step(layer, update, state)
    close(state.stacked(), torch.stack([x, updates.sum(0)], -2))


@pytest.mark.parametrize("scheme", MGR)
def test_mgr_reads_like_attnres_while_it_accumulates(shake, scheme):
    gated, full = build(scheme, 5, 8, n_streams=6).double(), build("attnres", 5, 8).double()
    shake(gated)
    with torch.no_grad():
        for own, other in zip(gated.residual_layers, full.residual_layers, strict=True):
            other.query.copy_(own.w_pool / 5**0.5)
    x, updates = signals(layers=8)
    close(drive(gated, x, updates)[:6], drive(full, x, updates)[:6])


def test_one_competitive_stream_is_one_independent_stream_with_the_bias_turned(shake):
    independent, competitive = (shake(build(s, 5, 6, n_streams=1).double()) for s in MGR)
    with torch.no_grad():
        for own, other in zip(independent.residual_layers, competitive.residual_layers, strict=True):
            other.bias.copy_(-own.bias), other.w_gate.copy_(own.w_gate)
    assert_same_reads(independent, competitive)


@pytest.mark.parametrize("scheme", MGR)
def test_one_stream_starts_as_a_highway_network_with_a_constant_gate(scheme):
    residual = build(scheme, 5, 21, n_streams=1, normalize=False).double()
    x, updates = signals(layers=21)
    g = 1 / (1 + math.exp(3.0))  # 21 mixing layers are the reference depth, so the gate is sigmoid(-3)
    expected = [x]
    for update in updates:
        expected.append((1 - g) * expected[-1] + g * update)
    close(drive(residual, x, updates), torch.stack(expected), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scheme", MGR)
def test_open_gates_leave_no_residual_and_closed_gates_freeze_the_streams(scheme):
    x, updates = signals()
    for open_gate in (True, False):
        residual = build(scheme, 5, 6, n_streams=1, normalize=False).double()
        with torch.no_grad():
            for layer in residual.residual_layers:
                layer.bias.fill_(1e4 if open_gate == (scheme == "mgr-independent") else -1e4)
        expected = updates[-1] if open_gate else x
        assert torch.equal(drive(residual, x, updates)[-1], expected)


# ---- the optional peers


def test_hyper_connections_agree_with_the_public_package(make):
    peer_package = pytest.importorskip("hyper_connections")
    residual = make("hc", n_sublayers=4, n_streams=3, normalize=False)
    x, updates = signals(layers=4)
    streams = x.unsqueeze(0).repeat(3, 1, 1)  # the peer keeps streams in the batch dimension
    h, state = residual.start(x)
    for layer, update in enumerate(updates):
        own = residual.residual_layers[layer]
        peer = peer_package.HyperConnections(3, dim=5, layer_index=layer).double()
        with torch.no_grad():
            peer.static_alpha.copy_(torch.cat([own.static_read.unsqueeze(1), own.static_mix], 1))
            peer.dynamic_alpha_fn.copy_(torch.cat([own.dynamic_read.unsqueeze(1), own.dynamic_mix], 1))
            peer.dynamic_alpha_scale.copy_(own.read_mix_scale), peer.dynamic_beta_scale.copy_(own.write_scale)
            peer.static_beta.copy_(own.static_write), peer.dynamic_beta_fn.copy_(own.dynamic_write)
        read, add = peer(streams)
        close(h, read[0] if read.ndim == 3 else read, rtol=1e-4, atol=1e-4)  # the peer's norm has its eps elsewhere
        streams = add(update.unsqueeze(0) if read.ndim == 3 else update)
        h, state = residual.step(layer, update, state)
        close(state.streams.movedim(-2, 0), streams.reshape(3, 3, 5), rtol=1e-4, atol=1e-4)


def test_attention_residuals_agree_with_the_public_package(make):
    peer = pytest.importorskip("fla.ops.attnres").naive_attnres
    residual = make("attnres", n_sublayers=4, normalize=False).float()
    x, updates = signals(layers=4, dtype=torch.float32)
    reads = drive(residual, x, updates)
    for layer, own in enumerate(residual.residual_layers):
        close(reads[layer + 1], peer(own.query, [x, *updates[: layer + 1]], own.key_weight).detach())


def test_a_state_can_be_made_by_hand():
    """What the notebook does to show copies: a state is plain data."""
    residual = build("mgr-independent", 4, 6, n_streams=3)
    copies = torch.ones(2, 1, 4).expand(2, 3, 4)
    h, state = residual.step(4, torch.zeros(2, 4), State(4, copies, (0, 1, 2)))
    assert state.layer == 5 and state.streams.shape == (2, 3, 4)
