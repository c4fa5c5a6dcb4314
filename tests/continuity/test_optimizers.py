"""The optimizers: Muon against torch's own, orthogonalisation, and the settings that are stated."""

import pytest
import torch

from depthlab.continuity import optimizers, toy
from depthlab.continuity.optimizers import Muon, orthogonalize


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(12, 12), (8, 20), (20, 8)])
def test_orthogonalize_keeps_the_directions_and_brings_the_values_near_one(shape):
    matrix = normal(*shape)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.T @ orthogonalize(matrix) @ vh.T
    off = inner - torch.diag(inner.diagonal())
    assert off.abs().max() < 1e-10
    assert inner.diagonal().min() > 0.5 and inner.diagonal().max() < 1.25


def test_orthogonalize_treats_a_stack_as_many_matrices_and_does_not_see_their_scale():
    stack = normal(2, 3, 10, 10)
    each = torch.stack([orthogonalize(m) for m in stack.flatten(0, 1)]).view(2, 3, 10, 10)
    torch.testing.assert_close(orthogonalize(stack), each)
    torch.testing.assert_close(orthogonalize(1e-4 * stack), each)
    assert not orthogonalize(torch.zeros(2, 4, 4)).any()


def test_orthogonalize_computes_in_the_given_dtype_and_returns_its_own():
    matrix = normal(16, 16)
    coarse = orthogonalize(matrix, dtype=torch.bfloat16)
    assert coarse.dtype == torch.float64
    assert 1e-4 < (coarse - orthogonalize(matrix)).abs().max() < 0.05


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon of its own")
@pytest.mark.parametrize("shape", [(12, 12), (20, 8)])
def test_muon_is_torchs(shape, monkeypatch):
    in_half = orthogonalize  # torch's computes in bfloat16 everywhere
    monkeypatch.setattr(optimizers, "orthogonalize", lambda m: in_half(m, dtype=torch.bfloat16))

    def moved(kind, **settings) -> torch.Tensor:
        start = normal(*shape, seed=5).float()
        p = torch.nn.Parameter(start.clone())
        optimizer = kind([p], lr=0.02, **settings)
        for step in range(6):
            p.grad = normal(*shape, seed=step).float()
            optimizer.step()
        return (p - start).detach()

    theirs = moved(torch.optim.Muon, weight_decay=0.0)
    assert (moved(Muon) - theirs).norm() < 0.03 * theirs.norm()  # what bfloat16 leaves
    for wrong in ({"nesterov": False}, {"momentum": 0.8}):
        assert (moved(Muon) - moved(torch.optim.Muon, weight_decay=0.0, **wrong)).norm() > 0.1 * theirs.norm()


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
