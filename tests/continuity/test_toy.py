"""The toy networks: what a layer computes, stacking, symmetries, initial scales."""

import math

import pytest
import torch

from depthlab.continuity import toy

SMALL = {"width": 24, "depth": 3, "inputs": 20, "classes": 5}


def small(name: str, **changes) -> toy.ToyConfig:
    config = toy.VARIANTS[name]
    return toy.ToyConfig(
        config.activation, config.residual, config.norm, init_scale=config.init_scale, **(SMALL | changes)
    )


def draw(config: toy.ToyConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> toy.Params:
    return toy.init(config, torch.Generator().manual_seed(seed), dtype)


def pixels(batch: int = 7) -> torch.Tensor:
    return torch.randn(batch, SMALL["inputs"], generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def rotation(d: int, seed: int = 3) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))[0]


def by_hand(name: str, params: toy.Params, x: torch.Tensor) -> torch.Tensor:
    """The same network written out sample by sample, with matrices on the left."""
    act, norm = toy.VARIANTS[name].activation, toy.VARIANTS[name].norm

    def normed(h):
        if norm == "layer":
            return (h - h.mean()) / (h.var(unbiased=False) + 1e-5).sqrt()
        if norm == "clip":
            return h / max(1.0, float(h.square().mean().sqrt()))
        return h / (h.square().mean() + 1e-5).sqrt() if norm == "rms" else h

    def activated(z):
        r = z.square().sum().sqrt()
        return {
            "none": z,
            "relu": z.clamp_min(0),
            "gelu": z * 0.5 * (1 + torch.erf(z / math.sqrt(2))),
            "silu": z / (1 + torch.exp(-z)),
            "tanh": z.tanh(),
            "radial": z * r.tanh(),
            "radial-unit": z * r.tanh() / r,
            "clip": z / max(1.0, float(r) / 24**0.5 / 0.25),
            "shrink": z.sign() * (z.abs() - 0.1).clamp_min(0),
        }[act]

    logits = []
    for sample in x:
        h = params.w_in @ sample + params.b_in
        for weight in params.weights:
            h = (h if toy.VARIANTS[name].residual else 0) + activated(weight @ normed(h))
        logits.append(params.w_out @ normed(h) + params.b_out)
    return torch.stack(logits)


@pytest.mark.parametrize("name", toy.VARIANTS)
def test_forward_equals_the_network_written_out_by_hand(name):
    params = draw(small(name))
    params = params._replace(b_in=params.w_in[:, 0].clone(), b_out=params.w_out[:, 0].clone())
    torch.testing.assert_close(toy.forward(params, pixels(), small(name)), by_hand(name, params, pixels()))


@pytest.mark.parametrize("name", toy.VARIANTS)
def test_a_stack_of_networks_computes_each_of_them(name):
    config, x, labels = small(name), pixels(), torch.arange(7) % 5
    singles = [draw(config, seed) for seed in range(4)]
    stacked = toy.Params(*(torch.stack(t).unflatten(0, (2, 2)) for t in zip(*singles, strict=True)))
    assert toy.hidden(stacked, x, config)[-1].shape == (2, 2, 7, 24)
    expected = torch.stack([toy.loss(p, x, labels, config) for p in singles]).view(2, 2)
    torch.testing.assert_close(toy.loss(stacked, x, labels, config), expected, rtol=1e-12, atol=1e-12)
    # one batch a network: labels and pixels with leading dimensions
    per_network = toy.loss(stacked, x.expand(2, 2, -1, -1), labels.expand(2, 2, -1), config)
    torch.testing.assert_close(per_network, expected, rtol=1e-12, atol=1e-12)


def test_loss_is_the_mean_cross_entropy():
    config, labels = small("res-gelu"), torch.arange(7) % 5
    logits = toy.forward(draw(config), pixels(), config)
    expected = torch.nn.functional.cross_entropy(logits, labels)
    torch.testing.assert_close(toy.loss(draw(config), pixels(), labels, config), expected)


@pytest.mark.parametrize("name", ["none", "radial", "radial-unit", "clip"])
def test_rotations_commute_with_the_radial_activations(name):
    act, turn = toy.ACTIVATIONS[name], rotation(24)
    x = torch.randn(5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(act(x @ turn.T), act(x) @ turn.T)


@pytest.mark.parametrize("name", ["relu", "gelu", "silu", "tanh", "shrink"])
def test_rotations_do_not_commute_with_elementwise_activations(name):
    act, turn = toy.ACTIVATIONS[name], rotation(24)
    x = torch.randn(5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert (act(x @ turn.T) - act(x) @ turn.T).abs().max() > 0.05


def test_radial_is_nearly_the_identity_at_ordinary_norms_and_radial_unit_is_bounded():
    x = torch.randn(50, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = 3 * x / x.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(toy.radial(x), x * math.tanh(3.0))
    assert math.tanh(3.0) > 0.995
    assert toy.radial_unit(100 * x).norm(dim=-1).max() <= 1 + 1e-12


def test_clip_is_the_identity_up_to_its_bound_and_bounded_beyond():
    x = torch.randn(50, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(toy.clip(0.99 * x), 0.99 * x, rtol=0, atol=0)
    torch.testing.assert_close(toy.clip(7 * x), x)
    assert toy.clip(torch.zeros(2, 24, requires_grad=True)).sum().backward() is None
    assert toy.ACTIVATIONS["clip"](7 * x).square().mean(-1).sqrt().max() <= 0.25 + 1e-12


@pytest.mark.parametrize("name", ["radial", "radial-unit"])
def test_radial_activations_have_a_finite_gradient_at_zero(name):
    x = torch.zeros(2, 6, requires_grad=True)
    toy.ACTIVATIONS[name](x).sum().backward()
    assert x.grad.isfinite().all()
    torch.testing.assert_close(x.grad, torch.full_like(x, 0.0 if name == "radial" else 1.0))


def test_initial_scales_are_as_stated_and_variants_share_their_draws():
    params = draw(toy.ToyConfig(init_scale=0.5), dtype=torch.float32)
    assert params.weights.shape == (16, 256, 256)
    assert abs(float(params.weights.std()) * 16 - 0.5) < 0.005
    assert abs(float(params.w_in.std()) * 28 - 0.577) < 0.005
    assert abs(float(params.w_out.std()) * 16 - 0.577) < 0.04
    assert not params.b_in.any() and not params.b_out.any()
    other = draw(toy.ToyConfig("tanh", init_scale=1.0), dtype=torch.float32)
    torch.testing.assert_close(other.weights, 2 * params.weights)
    torch.testing.assert_close(other.w_out, params.w_out, rtol=0, atol=0)


def test_equal_seeds_give_equal_networks_and_the_global_generator_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second, third = draw(small("res-relu"), 1), draw(small("res-relu"), 1), draw(small("res-relu"), 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.weights, second.weights) and not torch.equal(first.weights, third.weights)


@pytest.mark.parametrize(
    "changes, named", [({"activation": "elu"}, "radial-unit"), ({"norm": "batch"}, "rms"), ({"width": 0}, "width")]
)
def test_a_wrong_setting_is_named_with_what_is_allowed(changes, named):
    with pytest.raises(ValueError, match=named):
        toy.ToyConfig(**changes)
