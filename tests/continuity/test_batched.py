"""Stacks of networks: each is the single run, none touches another, and what diverges is reported."""

from dataclasses import replace

import pytest
import torch

from depthlab.continuity import measuring, metrics, optimizers, toy, training
from depthlab.continuity.batched import Net, Stack
from depthlab.lm import optimizers as muon

UNLIKE = ("res-relu", "no-res-tanh", "res-none-rms", "res-radial-unit", "res-none-clip", "res-relu-ln")
# Low enough that a perturbation of the last digit does not grow: at higher rates two right answers differ in 50 steps.
RATES = {"adam": 1e-3, "adam-beta2-0": 3e-5, "sgd": 3e-3, "muon": 1e-3}


def small(name: str) -> toy.ToyConfig:
    return replace(toy.VARIANTS[name], width=16, depth=3)


@pytest.fixture(scope="module")
def digits() -> training.Digits:
    whole = training.digits(dtype=torch.float64)
    return training.Digits(*(t[:400] for t in whole))


def nets(rate: float) -> list[Net]:
    return [Net(s, g, r) for r in (rate, 2 * rate) for g in (0.3, 0.9) for s in (1, 0)]


CASES = [(name, "adam") for name in UNLIKE]
CASES += [(name, optimizer) for optimizer in optimizers.NAMES[1:] for name in ("res-relu", "no-res-tanh")]


@pytest.mark.parametrize(("name", "optimizer"), CASES)
def test_each_network_of_a_stack_is_the_single_run(digits, name, optimizer):
    stack = Stack(small(name), nets(RATES[optimizer]), digits, steps=50, optimizer=optimizer)
    stack.advance(50)
    for i in (3, 6):
        net = stack.nets[i]
        config = replace(small(name), init_scale=net.init_scale)
        *_, alone = training.train(
            config, digits, seed=net.seed, steps=50, learning_rate=net.rate, optimizer=optimizer, snapshots=[50]
        )
        for ours, theirs in zip(stack.params, alone.params, strict=True):
            torch.testing.assert_close(ours[i], theirs, rtol=0, atol=1e-10)
        torch.testing.assert_close(stack.initial[i], alone.initial, rtol=0, atol=0)
        torch.testing.assert_close(stack.gradient_sum[i], alone.gradient_sum, rtol=0, atol=1e-10)
        assert abs(float(stack.losses[i].mean()) - alone.train_loss) < 1e-10
    assert (stack.params.weights - stack.initial).abs().amax((1, 2, 3)).min() > 1e-4  # all of them moved


@pytest.mark.parametrize("optimizer", optimizers.NAMES)
def test_a_network_that_diverges_leaves_the_others_as_they_are_and_is_reported(digits, optimizer):
    good = nets(RATES[optimizer])
    bad = [*good[:3], replace(good[3], rate=1e200), *good[4:]]
    calm, wild = (Stack(small("res-none"), n, digits, steps=30, optimizer=optimizer) for n in (good, bad))
    for stack in (calm, wild):
        stack.advance(30)
    others = [i for i in range(8) if i != 3]
    for a, b in zip(calm.params, wild.params, strict=True):
        torch.testing.assert_close(a[others], b[others], rtol=0, atol=1e-12)
    torch.testing.assert_close(calm.losses[others], wild.losses[others], rtol=0, atol=1e-12)
    assert calm.diverged_at() == [None] * 8 and calm.alive().all()
    assert wild.diverged_at()[3] in (2, 3, 4) and [wild.diverged_at()[i] for i in others] == [None] * 7
    assert wild.alive().tolist() == [i != 3 for i in range(8)]
    calm_scores, wild_scores = measuring.measure(calm, 64), measuring.measure(wild, 64)
    for name, values in wild_scores.items():
        assert values.isnan().tolist() == [i == 3 for i in range(8)], name
        torch.testing.assert_close(values[others], calm_scores[name][others])


def test_a_stack_in_which_all_diverge_is_measured_as_nan(digits):
    stack = Stack(small("res-none"), [Net(0, 0.3, 1e200)], digits, steps=9, optimizer="sgd")
    stack.advance(9)
    assert all(values.isnan().all() for values in measuring.measure(stack, 64).values())
    assert measuring.index_matched(stack).isnan().all()


def test_a_network_does_not_depend_on_what_else_is_in_the_stack(digits):
    alone = Stack(small("res-gelu"), [Net(7, 0.3, 1e-3)], digits, steps=20)
    among = Stack(small("res-gelu"), [Net(2, 0.9, 3e-3), Net(7, 0.3, 1e-3), Net(0, 0.3, 1e-3)], digits, steps=40)
    alone.advance(20), among.advance(20)
    torch.testing.assert_close(among.params.weights[1], alone.params.weights[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(among.losses[1, :20], alone.losses[0], rtol=0, atol=1e-12)
    assert among.losses[:, 20:].isnan().all()


@pytest.mark.parametrize("name", ["res-relu", "no-res-tanh"])
def test_scores_of_a_stack_are_the_public_scores_of_each_network(digits, name):
    config = replace(toy.VARIANTS[name], width=80, depth=4)  # wide enough for the iterative path
    stack = Stack(config, [Net(s, g, 1e-3) for g in (0.3, 0.9) for s in (0, 1)], digits, steps=30)
    assert not {"follows", "cumulative_v1"} & set(measuring.measure(stack, 64))  # no gradient has been summed up yet
    stack.advance(30)
    scores = measuring.measure(stack, 64) | {"weight_index_matched": measuring.index_matched(stack, threads=2)}
    for i in range(4):
        w, total = stack.params.weights[i], stack.gradient_sum[i]
        params = toy.Params(*(p[i] for p in stack.params))
        gradient = training.weight_gradient(params, config, digits.train_x[:64], digits.train_y[:64])
        expected = {f"weight_{k}": v for k, v in metrics.summary(w).items()}
        expected |= {
            "weight_u1": metrics.alignment(w, "output").mean(),
            "weight_v1_no_ones": metrics.alignment(w, remove_ones=True).mean(),
            "weight_gram_no_ones": metrics.spectral_alignment(w, remove_ones=True).mean(),
            "grad_v1": metrics.alignment(gradient).mean(),
            "grad_u1": metrics.alignment(gradient, "output").mean(),
            "grad_v1_no_ones": metrics.alignment(gradient, remove_ones=True).mean(),
            "grad_gram": metrics.spectral_alignment(gradient).mean(),
            "ratio_spectral": metrics.update_ratio(w, stack.initial[i]).mean(),
            "ratio_frobenius": metrics.update_ratio(w, stack.initial[i], "frobenius").mean(),
            "cumulative_v1": metrics.alignment(total).mean(),
        }
        leading = [metrics.leading_directions(m) for m in (w, total)]
        expected["follows"] = (leading[0] * leading[1]).sum(-1).abs().mean()
        v1, ten = leading[0], [metrics.spectrum(m).directions[:, :10] for m in w]
        both = [(ten[j + 1].T @ v1[j]).square().sum() + (ten[j].T @ v1[j + 1]).square().sum() for j in range(3)]
        expected["weight_v1_in_span"] = torch.stack(both).mean() / 2
        expected["val_loss"], expected["val_accuracy"] = training.evaluate(params, config, digits.val_x, digits.val_y)
        assert set(expected) == set(scores)
        for key, value in expected.items():
            assert abs(float(scores[key][i]) - float(value)) < 1e-6, key


def test_an_intervention_is_called_after_each_update_from_then_on(digits):
    free, held = (Stack(small("res-none"), nets(1e-3), digits, steps=12) for _ in range(2))
    free.advance(12), held.advance(5)
    seen = []

    def reset_first(stack: Stack) -> None:
        seen.append(int(stack.at))
        stack.params.weights[0].copy_(stack.initial[0])

    held.intervene(reset_first)
    held.advance(12)
    assert seen == list(range(5, 12))
    assert torch.equal(held.params.weights[0], held.initial[0])
    assert torch.equal(held.params.weights[1:], free.params.weights[1:])


def test_wrong_requests_are_named(digits):
    with pytest.raises(ValueError, match="no networks"):
        Stack(small("res-none"), [], digits, steps=3)
    stack = Stack(small("res-none"), nets(1e-3), digits, steps=3)
    stack.advance(2)
    for to in (1, 4):
        with pytest.raises(ValueError, match=f"step {to}; 2 are done, give at most 3"):
            stack.advance(to)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("optimizer", optimizers.NAMES)
@pytest.mark.parametrize("name", ["res-relu", "res-none-rms"])
def test_the_captured_step_on_cuda_computes_what_the_cpu_does(digits, name, optimizer, monkeypatch):
    exact = muon.orthogonalize  # its default on CUDA is bfloat16
    monkeypatch.setattr(muon, "orthogonalize", lambda m: exact(m, dtype=m.dtype))
    config, several = small(name), nets(RATES[optimizer])
    here, there = (Stack(config, several, digits, steps=50, optimizer=optimizer, device=d) for d in ("cpu", "cuda"))
    here.advance(50), there.advance(50)
    assert there._graph is not None
    for a, b in zip(here.params, there.params, strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=0, atol=1e-9)
    torch.testing.assert_close(there.losses.cpu(), here.losses, rtol=0, atol=1e-9)
    torch.testing.assert_close(there.gradient_sum.cpu(), here.gradient_sum, rtol=0, atol=1e-9)
    for name, values in measuring.measure(here, 64).items():
        torch.testing.assert_close(measuring.measure(there, 64)[name], values, rtol=0, atol=1e-6)
