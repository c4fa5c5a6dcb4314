"""The optimizers: every tensor at its rate, and the settings that are stated."""

import pytest
import torch

from depthlab.continuity import optimizers, toy


@pytest.mark.parametrize("name", optimizers.NAMES)
def test_every_tensor_is_updated_by_one_optimizer_at_its_groups_rate(name):
    config = toy.ToyConfig("relu", width=8, depth=2, inputs=6, classes=3)
    groups = [(toy.init(config, torch.Generator().manual_seed(s)), rate) for s, rate in ((0, 1e-3), (1, 1e-2))]
    before = [[t.clone() for t in params] for params, _ in groups]
    for params, _ in groups:
        for tensor in params:
            tensor.grad = torch.ones_like(tensor)
    found = optimizers.build(name, groups)
    owned = [id(t) for o in found for g in o.param_groups for t in g["params"]]
    assert sorted(owned) == sorted(id(t) for params, _ in groups for t in params)
    for optimizer in found:
        optimizer.step()
    moved = [
        [float((t - old).abs().mean()) for t, old in zip(params, olds, strict=True)]
        for (params, _), olds in zip(groups, before, strict=True)
    ]
    weights = toy.Params._fields.index("weights")
    assert moved[1][weights] / moved[0][weights] == pytest.approx(10, rel=1e-3)
    assert min(moved[0] + moved[1]) > 0


def test_beta2_zero_divides_by_the_momentary_gradient_plus_the_stated_eps():
    params = toy.Params(*(torch.zeros(1, dtype=torch.float64) for _ in range(5)))
    for tensor in params:
        tensor.grad = torch.full_like(tensor, 1e-3)
    optimizers.build("adam-beta2-0", [(params, 0.1)])[0].step()
    torch.testing.assert_close(params.weights, torch.full_like(params.weights, -0.1 * 1e-3 / 2e-3))


def test_an_unknown_optimizer_is_named_with_what_is_allowed():
    with pytest.raises(ValueError, match="'adamw'; use one of adam, adam-beta2-0, sgd, muon"):
        optimizers.build("adamw", [])
