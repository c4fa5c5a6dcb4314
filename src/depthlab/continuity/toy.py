"""The toy networks of the continuity experiments: L square layers of width d on MNIST digits.

One layer is ``h <- h + act(W norm(h))``, or ``h <- act(W norm(h))`` without the residual connection. The networks are
plain functions over plain tensors; every tensor may carry the same leading dimensions (variants, seeds), so that one
definition serves a single network and a stack of them.

Source: Why Geometric Continuity Emerges in Deep Neural Networks, arXiv 2605.04971 (variants of its MLP experiments);
sizes and scales are ours.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_NORM_EPS = 1e-5


def radial(x: Tensor) -> Tensor:
    """``x tanh(|x|)``, |x| the Euclidean norm over the last dimension: nonlinear, and any rotation commutes with it."""
    return x * torch.tanh(torch.linalg.vector_norm(x, dim=-1, keepdim=True))


def radial_unit(x: Tensor) -> Tensor:
    """``x tanh(|x|) / |x|``: the same direction at a length below one, so the increment of a layer is bounded."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-6)  # tanh(r) / r is 1 there
    return x * (torch.tanh(length) / length)


def clip(x: Tensor, rms: float = 1.0) -> Tensor:
    """x, shortened to root mean square `rms` where it is longer; any rotation commutes with it.

    Bounded as a norm layer's output is, but the identity below the bound.
    """
    length = x.square().mean(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny).sqrt()
    return x * (rms / length).clamp_max(1.0)


# The bound on a layer's increment, in the same units: at width 256 a norm of 4, just above the increments at g = 0.32.
_INCREMENT_RMS = 0.25
_SHRINK = 0.1  # half the size of a typical pre-activation at g = 0.32, so that "shrink" is far from linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "radial": radial,
    "radial-unit": radial_unit,
    "clip": lambda x: clip(x, _INCREMENT_RMS),
    "shrink": lambda x: F.softshrink(x, _SHRINK),  # elementwise, odd, unbounded
}

NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "layer": lambda x: F.layer_norm(x, x.shape[-1:], eps=_NORM_EPS),
    "rms": lambda x: F.rms_norm(x, x.shape[-1:], eps=_NORM_EPS),
    "clip": clip,  # bounds what a layer reads, to the length that "rms" gives it
}


@dataclass(frozen=True)
class ToyConfig:
    """Shape and wiring of one toy network.

    Args:
        activation: a key of `ACTIVATIONS`, applied to each layer's W norm(h).
        residual: keep ``h +`` in each layer.
        norm: a key of `NORMS`, without weights, before each layer and once more before the head.
        width: d, the side of the square matrices.
        depth: L, their number.
        init_scale: g; entries of W start as N(0, g^2 / d).
        edge_scale: the same for the input projection and the head, over their fan-in.

    Raises:
        ValueError: an unknown name, or a size or scale that is not positive.
    """

    activation: str = "relu"
    residual: bool = True
    norm: str = "none"
    width: int = 256
    depth: int = 16
    init_scale: float = 0.32
    edge_scale: float = 0.577
    inputs: int = 784
    classes: int = 10

    def __post_init__(self) -> None:
        for name, value, known in (("activation", self.activation, ACTIVATIONS), ("norm", self.norm, NORMS)):
            if value not in known:
                raise ValueError(f"ToyConfig got {name} {value!r}; use one of {', '.join(known)}.")
        for name in ("width", "depth", "init_scale", "edge_scale", "inputs", "classes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"ToyConfig got {name} {getattr(self, name)}; give a positive number.")


# The networks by the names that records and plots use.
VARIANTS: dict[str, ToyConfig] = {
    "res-relu": ToyConfig("relu"),
    "res-gelu": ToyConfig("gelu"),
    "res-silu": ToyConfig("silu"),
    "res-tanh": ToyConfig("tanh"),
    "res-none": ToyConfig("none"),
    "res-radial": ToyConfig("radial"),
    "res-radial-unit": ToyConfig("radial-unit"),
    "res-none-rms": ToyConfig("none", norm="rms"),
    "res-none-clip": ToyConfig("none", norm="clip"),
    "res-clip": ToyConfig("clip"),
    "res-shrink": ToyConfig("shrink"),
    "res-none-ln": ToyConfig("none", norm="layer"),
    "res-relu-ln": ToyConfig("relu", norm="layer"),
    "res-gelu-ln": ToyConfig("gelu", norm="layer"),
    "no-res-tanh": ToyConfig("tanh", residual=False, init_scale=1.0),
    "no-res-relu": ToyConfig("relu", residual=False, init_scale=2**0.5),  # He initialisation
}


class Params(NamedTuple):
    """The trained tensors; `..` stands for any leading dimensions, the same for all five."""

    w_in: Tensor  # [.., d, inputs]
    b_in: Tensor  # [.., d]
    weights: Tensor  # [.., L, d, d], rows are outputs: a layer computes W h
    w_out: Tensor  # [.., classes, d]
    b_out: Tensor  # [.., classes]


def init(config: ToyConfig, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Params:
    """Draw one network: normal entries, zero biases.

    The draws are float32 whatever `dtype`, and of one shape for all variants of one size: networks of equal seed start
    from equal draws, scaled by their own `init_scale`.
    """
    d, depth = config.width, config.depth

    def normal(*shape: int, scale: float) -> Tensor:
        return (torch.randn(*shape, generator=generator) * (scale / shape[-1] ** 0.5)).to(dtype)

    return Params(
        w_in=normal(d, config.inputs, scale=config.edge_scale),
        b_in=torch.zeros(d, dtype=dtype),
        weights=normal(depth, d, d, scale=config.init_scale),
        w_out=normal(config.classes, d, scale=config.edge_scale),
        b_out=torch.zeros(config.classes, dtype=dtype),
    )


def layer(h: Tensor, weight: Tensor, config: ToyConfig) -> Tensor:
    """One layer: h [.., B, d] and weight [.., d, d] -> [.., B, d]."""
    update = ACTIVATIONS[config.activation](NORMS[config.norm](h) @ weight.mT)
    return h + update if config.residual else update


def embed(params: Params, x: Tensor) -> Tensor:
    """Pixels x [.., B, inputs] -> h_0 [.., B, d]."""
    return x @ params.w_in.mT + params.b_in.unsqueeze(-2)


def head(params: Params, h: Tensor, config: ToyConfig) -> Tensor:
    """h_L [.., B, d] -> logits [.., B, classes]."""
    return NORMS[config.norm](h) @ params.w_out.mT + params.b_out.unsqueeze(-2)


def forward(params: Params, x: Tensor, config: ToyConfig) -> Tensor:
    """Pixels x [.., B, inputs], or [B, inputs] shared by all -> logits [.., B, classes]."""
    return head(params, hidden(params, x, config)[-1], config)


def hidden(params: Params, x: Tensor, config: ToyConfig) -> list[Tensor]:
    """The stream h_0 .. h_L, L + 1 tensors [.., B, d]."""
    states = [embed(params, x)]
    for weight in params.weights.unbind(-3):
        states.append(layer(states[-1], weight, config))
    return states


def loss(params: Params, x: Tensor, labels: Tensor, config: ToyConfig) -> Tensor:
    """Mean cross-entropy over the batch, one a network: x [.., B, inputs], labels [.., B] -> [..]."""
    log_probs = F.log_softmax(forward(params, x, config), dim=-1)
    index = labels.expand(log_probs.shape[:-1]).unsqueeze(-1)
    return -log_probs.gather(-1, index).squeeze(-1).mean(-1)
