"""The optimizers: Muon against torch's own, every parameter in one group, and the published settings."""

from collections import Counter

import pytest
import torch

from depthlab.lm import GPT, GPTConfig, optimizers
from depthlab.lm.optimizers import Muon, build_optimizers, momentum_at, orthogonalize, parameter_kinds


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


def test_muon_moves_matrices_of_one_shape_together_as_it_would_each_alone():
    def moved(shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
        params = [torch.nn.Parameter(torch.zeros(*shape, dtype=torch.float64)) for shape in shapes]
        optimizer = Muon(params, lr=0.1)
        for step in range(3):
            for p in params:
                p.grad = normal(*p.shape, seed=step + p.shape[0])
            optimizer.step()
        return [p.detach() for p in params]

    together = moved([(6, 4), (8, 8), (6, 4), (4, 6)])
    for shape, tensor in zip([(6, 4), (8, 8), (6, 4), (4, 6)], together, strict=True):
        torch.testing.assert_close(tensor, moved([shape])[0])


def test_muons_decay_is_decoupled_and_a_parameter_without_gradient_stays():
    matrix, still = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    matrix.grad = torch.zeros(4, 4)
    Muon([matrix, still], lr=0.5, weight_decay=0.1).step()
    torch.testing.assert_close(matrix.detach(), torch.full((4, 4), 0.95))
    assert bool((still == 1).all())


def test_muon_refuses_what_is_no_matrix():
    with pytest.raises(ValueError, match=r"shape \[3\]; it updates matrices"):
        Muon([torch.nn.Parameter(torch.zeros(3))])


def gpt(residual: str = "mgr-competitive", **changes) -> GPT:
    small = {"n_layers": 3, "d_model": 16, "seq_len": 8} | changes
    return GPT(GPTConfig.preset("toy", residual=residual, **small), torch.Generator().manual_seed(0))


class Untied(torch.nn.Module):
    """A GPT with a norm weight, a bias and a head of its own, as other models have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt()
        self.config = self.inner.config
        self.norm = torch.nn.RMSNorm(16)
        self.lm_head = torch.nn.Linear(16, 256)


def rates(found: list[torch.optim.Optimizer], model: torch.nn.Module) -> dict[str, tuple[str, float, float]]:
    """name -> (optimizer, rate, decay); fails where a parameter has none or two."""
    names = {id(p): name for name, p in model.named_parameters()}
    owned = [
        (names[id(p)], (type(one).__name__, group["lr"], group["weight_decay"]))
        for one in found
        for group in one.param_groups
        for p in group["params"]
    ]
    assert Counter(name for name, _ in owned) == Counter(names.values())
    return dict(owned)


@pytest.mark.parametrize("optimizer", optimizers.OPTIMIZERS)
@pytest.mark.parametrize("residual", ["prenorm", "hc", "mhc-lite", "attnres", "mgr-independent", "mgr-competitive"])
def test_every_parameter_is_in_one_group_and_what_must_not_decay_does_not(residual, optimizer):
    model = gpt(residual)
    found = build_optimizers(model, optimizer, weight_decay=0.3)
    for name, (kind, _, decay) in rates(found, model).items():
        matrix = name.startswith("sublayers.")
        assert decay == (0.3 if matrix else 0.0), name
        assert kind == ("Muon" if matrix and optimizer != "adamw" else "AdamW"), name
    assert all(group["initial_lr"] == group["lr"] for one in found for group in one.param_groups)


def test_kinds_count_what_the_model_has():
    model = Untied()
    kinds = parameter_kinds(model)
    residual = sum(1 for name, _ in model.named_parameters() if "residual" in name)
    assert residual > 0
    assert {kind: len(params) for kind, params in kinds.items()} == {
        "matrix": 3 * (4 + 2),
        "head": 1,
        "embedding": 2,
        "other": residual + 2,  # the norm's weight and the head's bias
    }
    model.inner.embed_positions.weight.requires_grad_(False)
    assert len(parameter_kinds(model)["embedding"]) == 1


def test_flt_is_the_published_setting():
    model = Untied()
    muon, adamw = build_optimizers(model, "flt")
    found = rates([muon, adamw], model)
    scale = (16 / 768) ** -0.5
    assert found["inner.sublayers.0.q_proj.weight"] == ("Muon", 0.02, 0.0)
    assert found["inner.embed_tokens.weight"] == ("AdamW", pytest.approx(0.2 * scale), 0.0)
    assert found["lm_head.weight"] == ("AdamW", pytest.approx(0.004 * scale), 0.0)
    assert found["norm.weight"] == ("AdamW", pytest.approx(0.004 * scale), 0.0)
    assert all(g["betas"] == (0.8, 0.95) and g["eps"] == 1e-10 for g in adamw.param_groups)
    tied = gpt()
    assert rates(build_optimizers(tied, "flt"), tied)["embed_tokens.weight"][1] == pytest.approx(0.004 * scale)


def test_flts_momentum_rises_from_085_to_095_over_300_steps_and_survives_a_state_dict():
    model = gpt("prenorm", n_layers=1)
    (muon, _) = build_optimizers(model, "flt")
    group = muon.param_groups[0]
    seen = {}
    for step in range(302):
        seen[step] = momentum_at(group)
        muon.step()
    assert seen[0] == 0.85 and seen[150] == pytest.approx(0.90) and seen[300] == seen[301] == 0.95
    (fresh, _) = build_optimizers(model, "flt")
    group["steps"] = 150
    fresh.load_state_dict(muon.state_dict())
    assert momentum_at(fresh.param_groups[0]) == pytest.approx(0.90)


def test_the_momentum_that_is_stated_is_the_one_that_is_used():
    p = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    optimizer = Muon([p], momentum_start=0.5, momentum_steps=1)
    for gradient in (torch.eye(2), torch.eye(2) * 3):
        p.grad = gradient.double()
        optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["average"], torch.eye(2).double() * (0.5 * 0.95 + 3 * 0.05))


@pytest.mark.parametrize("optimizer", optimizers.OPTIMIZERS)
def test_a_rate_and_a_decay_reach_their_groups(optimizer):
    model = gpt("prenorm")
    found = rates(build_optimizers(model, optimizer, lr=0.007, weight_decay=0.2), model)
    assert found["sublayers.0.q_proj.weight"][1:] == (0.007, 0.2)
    default = rates(build_optimizers(model, optimizer), model)["sublayers.0.q_proj.weight"]
    assert default[1:] == {"adamw": (6e-4, 0.1), "muon": (0.02, 0.0), "flt": (0.02, 0.0)}[optimizer]


@pytest.mark.parametrize("optimizer", optimizers.OPTIMIZERS)
def test_the_loss_falls(optimizer):
    model = gpt()
    tokens = torch.randint(0, 256, (4, 9), generator=torch.Generator().manual_seed(1))
    found = build_optimizers(model, optimizer)
    losses = []
    for _ in range(20):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        losses.append(loss.item())
        model.zero_grad()
        loss.backward()
        for one in found:
            one.step()
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"optimizer": "sgd"}, ValueError, "optimizer='sgd' is unknown; use one of adamw, muon, flt"),
        ({"lr": 0.0}, ValueError, "lr=0.0 is not allowed; use a positive number"),
        ({"lr": float("nan")}, ValueError, "lr=nan is not allowed"),
        ({"lr": "fast"}, TypeError, "lr='fast' is str"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay=-0.1 is not allowed; use a number of at least 0"),
    ],
)
def test_wrong_settings_are_named(how, error, message):
    with pytest.raises(error, match=message):
        build_optimizers(gpt("prenorm"), **how)


def test_a_model_with_nothing_to_train_or_without_a_width_is_named():
    with pytest.raises(ValueError, match="nothing to train"):
        build_optimizers(gpt("prenorm").requires_grad_(False))
    with pytest.raises(ValueError, match="model.config.d_model"):
        build_optimizers(torch.nn.Linear(3, 3), "flt")
