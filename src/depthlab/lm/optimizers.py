"""Optimizers of the language models: AdamW, Muon for hidden matrices, and the published setting of looped models.

Muon is written here, although torch has one since 2.9: this one treats a stack [.., m, n] as many matrices, batches
matrices of one shape, and warms its momentum up.
"""

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from depthlab.residuals import parameter_groups

OPTIMIZERS = ("adamw", "muon", "flt")
ADAMW = {"lr": 6e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}  # nanoGPT's, for GPT-2 small
MUON_MOMENTUM = 0.95
MUON_LR = 0.02
# The published setting of Fully Looped Transformers, after nanochat: rates of embedding and head at width 768.
FLT_EMBEDDING_LR, FLT_HEAD_LR, FLT_WIDTH = 0.2, 0.004, 768
FLT_ADAMW = {"betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0}
FLT_MOMENTUM_START, FLT_MOMENTUM_STEPS = 0.85, 300


def build_optimizers(
    model: nn.Module, optimizer: str = "adamw", *, lr: float | None = None, weight_decay: float | None = None
) -> list[torch.optim.Optimizer]:
    """Optimizers that together update every parameter of `model` that requires a gradient, each exactly once.

    - "adamw": AdamW, betas 0.9 and 0.95. Decayed are the weight matrices of sublayers and of an untied head. Not
      decayed are embeddings (a tied head is one), every parameter of a `Residual`, and all with fewer than two
      dimensions (norm weights, biases).
    - "muon": the weight matrices of sublayers by `Muon` (momentum 0.95), all else by AdamW as above at 6e-4.
    - "flt": the published setting of looped transformers: Muon at 0.02, its momentum from 0.85 to 0.95 over 300 steps;
      AdamW with betas 0.8 and 0.95 and eps 1e-10 at 0.2 for embeddings and 0.004 for the untied head and what else
      there is, both times (C / 768)^-0.5; no decay. A tied head is trained at the head's rate, for 0.2 would drown it.

    The head is a module called ``lm_head``. AdamW is torch's fused one where the device has it.

    Args:
        lr: rate of AdamW ("adamw": 6e-4) or of the matrices ("muon", "flt": 0.02); the other rates stay.
        weight_decay: of what is decayed ("adamw": 0.1, "muon" and "flt": 0), decoupled: a step takes lr x weight_decay.

    Returns:
        the optimizers. Each group carries "initial_lr", for a schedule to multiply.

    Raises:
        ValueError: an unknown name, a rate or decay out of range, or a model with nothing to train.
        TypeError: a rate or decay that is no number.

    Source: Loshchilov & Hutter, arXiv 1711.05101 (AdamW); Jordan et al. 2024 (Muon); arXiv 2605.18797 and its code
    ("flt").
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r} is unknown; use one of {', '.join(OPTIMIZERS)}.")
    _check_number("lr", lr, allow_zero=False)
    _check_number("weight_decay", weight_decay, allow_zero=True)
    kinds = parameter_kinds(model)
    if not any(kinds.values()):
        raise ValueError("The model has no parameter that requires a gradient, so there is nothing to train.")
    if optimizer == "flt":
        found = _flt(model, kinds, MUON_LR if lr is None else lr, weight_decay or 0.0)
    elif optimizer == "muon":
        decay = weight_decay or 0.0
        edges = [_group(kinds["head"], weight_decay=decay), _group(kinds["embedding"] + kinds["other"])]
        found = [
            _muon(kinds["matrix"], lr=MUON_LR if lr is None else lr, weight_decay=decay),
            _adamw(edges, ADAMW | {"weight_decay": 0.0}),
        ]
    else:
        decay = ADAMW["weight_decay"] if weight_decay is None else weight_decay
        groups = [
            _group(kinds["matrix"] + kinds["head"], weight_decay=decay),
            _group(kinds["embedding"] + kinds["other"]),
        ]
        found = [_adamw(groups, ADAMW | {"weight_decay": 0.0} | ({} if lr is None else {"lr": lr}))]
    found = [one for one in found if one is not None]
    for group in (group for one in found for group in one.param_groups):
        group["initial_lr"] = group["lr"]
    return found


def parameter_kinds(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Every parameter that requires a gradient, under one of "matrix", "head", "embedding", "other".

    matrix: two or more dimensions, in a sublayer. head: the matrix of a module called ``lm_head`` that is no embedding.
    embedding: of an `nn.Embedding`. other: of a `Residual`, or with fewer than two dimensions.
    """
    decayed, plain = (group["params"] for group in parameter_groups(model, 0.0))
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    heads = {id(p) for name, p in model.named_parameters() if "lm_head" in name.split(".")}
    kinds: dict[str, list[nn.Parameter]] = {"matrix": [], "head": [], "embedding": [], "other": plain}
    for p in decayed:
        kinds["embedding" if id(p) in embeddings else "head" if id(p) in heads else "matrix"].append(p)
    return kinds


def _flt(model: nn.Module, kinds: dict[str, list], lr: float, decay: float) -> list[torch.optim.Optimizer | None]:
    width = getattr(getattr(model, "config", None), "d_model", None)
    if width is None:
        raise ValueError("optimizer='flt' scales rates by the width and needs model.config.d_model; use 'muon'.")
    scale = (width / FLT_WIDTH) ** -0.5
    head = FLT_HEAD_LR * scale
    embedding = FLT_EMBEDDING_LR * scale if kinds["head"] else head
    groups = [_group(kinds["embedding"], lr=embedding), _group(kinds["head"] + kinds["other"], lr=head)]
    warm_up = {"momentum_start": FLT_MOMENTUM_START, "momentum_steps": FLT_MOMENTUM_STEPS}
    return [_muon(kinds["matrix"], lr=lr, weight_decay=decay, **warm_up), _adamw(groups, FLT_ADAMW)]


def _group(params: list[nn.Parameter], **settings: float) -> dict[str, Any]:
    return {"params": params, **settings}


def _muon(params: list[nn.Parameter], **settings: float) -> "Muon | None":
    return Muon(params, **settings) if params else None


def _adamw(groups: list[dict[str, Any]], settings: dict[str, Any]) -> torch.optim.Optimizer | None:
    groups = [group for group in groups if group["params"]]
    params = [p for group in groups for p in group["params"]]
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in params)
    return torch.optim.AdamW(groups, fused=fused, **settings) if groups else None


def _check_number(name: str, value: float | None, *, allow_zero: bool) -> None:
    if value is None:
        return
    allowed = "a number of at least 0" if allow_zero else "a positive number"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} is {type(value).__name__}; use {allowed}.")
    if not (math.isfinite(value) and (value > 0 or (allow_zero and value == 0))):
        raise ValueError(f"{name}={value} is not allowed; use {allowed}.")


def orthogonalize(matrices: Tensor, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Each matrix of [.., m, n] with its singular values brought near 1 (0.7 to 1.2) and its directions kept.

    Newton-Schulz iteration of a quintic whose slope at 0 is as steep as convergence allows. It is computed in `dtype`,
    by default bfloat16 on CUDA and the given dtype elsewhere; the result has the given dtype.

    Source: Keller Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), whose coefficients
    these are.
    """
    x = matrices.to(dtype or (torch.bfloat16 if matrices.is_cuda else matrices.dtype))
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_min(1e-7)  # spectral norm at most 1
    x = x.reshape(-1, *x.shape[-2:])
    for _ in range(steps):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)  # one kernel in place of four
        x = torch.baddbmm(x, gram, x, beta=3.4445)
    return (x if wide else x.mT).reshape(matrices.shape).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum SGD whose every update is orthogonalised: Nesterov momentum 0.95.

    Each parameter is a matrix or a stack of matrices [.., m, n], moved by rate x sqrt(max(1, m / n)) x an orthogonal
    matrix, after a decoupled decay by rate x weight_decay. Parameters of equal shape are orthogonalised in one batch.

    Args:
        momentum_start: momentum of the first step; it rises linearly to `momentum` over `momentum_steps` steps. The
            count of steps is part of the state dict.

    Raises:
        ValueError: a parameter with fewer than two dimensions.

    Source: as `orthogonalize`.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        momentum: float = MUON_MOMENTUM,
        *,
        weight_decay: float = 0.0,
        momentum_start: float | None = None,
        momentum_steps: int = 0,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        warm_up = {"momentum_start": momentum_start, "momentum_steps": momentum_steps, "steps": 0}
        super().__init__(params, settings | warm_up)
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.ndim < 2:
                raise ValueError(f"Muon got a parameter of shape {list(p.shape)}; it updates matrices [.., m, n].")

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            momentum = momentum_at(group)
            by_shape: dict[tuple, list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault((p.shape, p.dtype, p.device), []).append(p)
            for params in by_shape.values():
                self._move(params, group, momentum)
            group["steps"] += 1

    def _move(self, params: list[nn.Parameter], group: dict[str, Any], momentum: float) -> None:
        ahead = []
        for p in params:
            if not self.state[p]:
                self.state[p]["average"] = torch.zeros_like(p)
            average = self.state[p]["average"]
            average.lerp_(p.grad, 1 - momentum)
            ahead.append(p.grad.lerp(average, momentum))
        rows, columns = params[0].shape[-2:]
        rate = group["lr"] * max(1.0, rows / columns) ** 0.5
        for p, update in zip(params, orthogonalize(torch.stack(ahead)).unbind(0), strict=True):
            if group["weight_decay"]:
                p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(update, alpha=-rate)


def momentum_at(group: dict[str, Any]) -> float:
    """The momentum of the next step of one of Muon's groups."""
    start, end, length = group["momentum_start"], group["momentum"], group["momentum_steps"]
    if start is None or group["steps"] >= length:
        return end
    return start + (end - start) * group["steps"] / length
