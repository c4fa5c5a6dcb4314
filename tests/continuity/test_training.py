"""Training a toy network: the split, the order of batches, agreement with a plain module, what is measured."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from depthlab import continuity
from depthlab.continuity import toy, training

SMALL = toy.ToyConfig("relu", width=12, depth=3, inputs=784)


@pytest.fixture(scope="module")
def images() -> training.Digits:
    return training.digits()


class PlainNet(nn.Module):
    """The residual ReLU network as a textbook module."""

    def __init__(self, params: toy.Params) -> None:
        super().__init__()
        d, inputs = params.w_in.shape
        self.first, self.last = nn.Linear(inputs, d), nn.Linear(d, len(params.w_out))
        self.layers = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in params.weights)
        pairs = [(self.first.weight, params.w_in), (self.first.bias, params.b_in)]
        pairs += [(self.last.weight, params.w_out), (self.last.bias, params.b_out)]
        pairs += [(one.weight, w) for one, w in zip(self.layers, params.weights, strict=True)]
        for mine, given in pairs:
            mine.data = given.detach().clone()

    def forward(self, x):
        h = self.first(x)
        for one in self.layers:
            h = h + torch.relu(one(h))
        return self.last(h)


def test_the_split_has_the_stated_sizes_and_shares_no_digit(images):
    assert [len(t) for t in images] == [8000, 8000, 2000, 2000, 2000, 2000]
    train = {x.numpy().tobytes() for x in images.train_x}
    assert not train & {x.numpy().tobytes() for x in images.val_x} and len(train) > 7990
    for labels in (images.train_y, images.val_y, images.test_y):
        assert (labels.bincount(minlength=10) / len(labels)).min() > 0.08
    again = training.digits()
    assert all(torch.equal(a, b) for a, b in zip(images, again, strict=True))


def test_pixels_are_standardised_the_same_from_bytes_and_from_floats(images):
    assert abs(float(images.train_x.mean())) < 0.02 and abs(float(images.train_x.std()) - 1) < 0.02
    raw = torch.randint(0, 256, (3, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(training.standardise(raw), training.standardise(raw.double() / 255))


@pytest.mark.parametrize("size", [0, 10_000])
def test_a_split_without_training_or_validation_digits_is_refused(size):
    with pytest.raises(ValueError, match="1 to 9999"):
        training.digits(size)


def test_every_pass_sees_each_sample_once_and_longer_runs_begin_like_shorter_ones():
    order = training.batch_order(40, 8, 12, torch.Generator().manual_seed(1))
    assert order.shape == (12, 8)
    for start in (0, 5):
        assert sorted(order[start : start + 5].flatten().tolist()) == list(range(40))
    longer = training.batch_order(40, 8, 30, torch.Generator().manual_seed(1))
    assert torch.equal(longer[:12], order)
    assert training.batch_order(40, 8, 0, torch.Generator()).shape == (0, 8)
    with pytest.raises(ValueError, match="1 to 40"):
        training.batch_order(40, 41, 1, torch.Generator())


@pytest.mark.parametrize("steps, points", [(3000, 30), (50, 40), (1, 2), (7, 2)])
def test_log_steps_start_at_zero_end_at_the_last_step_and_keep_to_their_number(steps, points):
    chosen = training.log_steps(steps, points)
    assert chosen[0] == 0 and chosen[-1] == steps and len(chosen) <= points
    assert all(a < b for a, b in pairwise(chosen))
    if steps == 3000:
        ratios = [b / a for a, b in pairwise(chosen[12:])]
        assert max(ratios) / min(ratios) < 1.1


def test_training_equals_a_plain_module_with_plain_adam(images):
    """Ten float64 steps: weights, and the sum of raw gradients."""
    images = training.Digits(*(t.double() if t.is_floating_point() else t for t in images))
    first, last = training.train(SMALL, images, seed=4, steps=10, snapshots=[0, 10])
    net = PlainNet(first.params)
    _, order = training.start(SMALL, 8000, 16, 10, 4, torch.float64)
    adam = torch.optim.Adam(net.parameters(), lr=1e-3, foreach=False)
    total = torch.zeros_like(first.initial)
    for rows in order:
        adam.zero_grad()
        nn.functional.cross_entropy(net(images.train_x[rows]), images.train_y[rows]).backward()
        total += torch.stack([one.weight.grad for one in net.layers])
        adam.step()
    trained = torch.stack([one.weight.detach() for one in net.layers])
    torch.testing.assert_close(last.params.weights, trained, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(last.params.w_out, net.last.weight.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(last.gradient_sum, total, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(last.params.weights, first.params.weights, atol=1e-4)


def test_snapshots_are_copies_and_the_first_is_before_any_update(images):
    shots = list(training.train(SMALL, images, seed=0, steps=6, snapshots=[0, 3, 6]))
    assert [s.step for s in shots] == [0, 3, 6]
    assert torch.equal(shots[0].params.weights, shots[0].initial) and not shots[0].gradient_sum.any()
    assert torch.equal(shots[0].initial, training.start(SMALL, 8000, 16, 6, 0)[0].weights)
    (alone,) = training.train(SMALL, images, seed=0, steps=3, snapshots=[3])
    assert torch.equal(alone.params.weights, shots[1].params.weights)  # not moved by the steps after
    assert not torch.equal(shots[1].params.weights, shots[2].params.weights)


def test_the_train_loss_of_a_snapshot_is_the_mean_since_the_one_before(images):
    each = [s.train_loss for s in training.train(SMALL, images, seed=0, steps=6, snapshots=range(7))]
    few = [s.train_loss for s in training.train(SMALL, images, seed=0, steps=6, snapshots=[0, 2, 6])]
    assert each[0] == pytest.approx(each[1], rel=1e-5)  # the first batch, before and during the first step
    assert few[1:] == pytest.approx([sum(each[1:3]) / 2, sum(each[3:7]) / 4])


def test_a_loss_that_is_not_finite_stops_training_and_names_the_step(images):
    with pytest.raises(FloatingPointError, match=r"at step [2-9];"):
        list(training.train(toy.ToyConfig("none", width=12), images, seed=0, steps=9, learning_rate=1e9))


def test_a_snapshot_beyond_the_end_is_refused(images):
    with pytest.raises(ValueError, match="between 0 and 5"):
        next(training.train(SMALL, images, seed=0, steps=5, snapshots=[6]))


@pytest.mark.parametrize("name", ["res-relu", "no-res-tanh", "res-none-rms"])
def test_small_networks_learn(images, name):
    config = toy.ToyConfig(toy.VARIANTS[name].activation, toy.VARIANTS[name].residual, toy.VARIANTS[name].norm, 32, 4)
    (last,) = training.train(config, images, seed=0, steps=300, snapshots=[300], learning_rate=3e-3)
    assert training.evaluate(last.params, config, images.test_x, images.test_y)[1] > 0.6


def test_weight_gradients_agree_with_finite_differences_and_stack():
    generator = torch.Generator().manual_seed(0)
    config = toy.ToyConfig("gelu", width=6, depth=2, inputs=5, classes=3)
    params = [toy.init(config, generator, torch.float64) for _ in range(2)]
    x = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    labels = torch.arange(7) % 3
    gradient = training.weight_gradient(params[0], config, x, labels)
    for index in ((0, 1, 2), (1, 5, 0)):
        losses = []
        for sign in (1, -1):
            moved = params[0].weights.clone()
            moved[index] += sign * 1e-6
            losses.append(float(toy.loss(params[0]._replace(weights=moved), x, labels, config)))
        assert float(gradient[index]) == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-5)
    stacked = toy.Params(*(torch.stack(pair) for pair in zip(*params, strict=True)))
    torch.testing.assert_close(training.weight_gradient(stacked, config, x, labels)[0], gradient)


def test_gradients_line_up_at_the_start_with_residuals_only(images):
    """The linear residual network has 1 / sqrt(1 + g^2) by arithmetic; without residuals there is chance."""
    x, y = images.train_x[:512], images.train_y[:512]

    def start_alignment(config: toy.ToyConfig) -> float:
        params = toy.init(config, torch.Generator().manual_seed(0))
        return float(continuity.alignment(training.weight_gradient(params, config, x, y)).mean())

    for g in (0.1, 0.32, 1.0):
        linear = toy.ToyConfig("none", width=128, depth=8, init_scale=g)
        assert start_alignment(linear) == pytest.approx(1 / math.sqrt(1 + g * g), abs=0.08)
    without = toy.ToyConfig("tanh", residual=False, width=128, depth=8, init_scale=1.0)
    assert start_alignment(without) < 3 * continuity.chance_level(128)


def test_preactivation_norms_are_the_lengths_the_activation_is_given(images):
    config = toy.ToyConfig("none", width=12, depth=3)
    params = toy.init(config, torch.Generator().manual_seed(0))
    norms = training.preactivation_norms(params, config, images.val_x[:5])
    states = toy.hidden(params, images.val_x[:5], config)
    increments = torch.stack([(b - a).norm(dim=-1) for a, b in pairwise(states)])  # without activation: W h itself
    torch.testing.assert_close(norms, increments, rtol=1e-4, atol=1e-5)
