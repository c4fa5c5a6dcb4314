"""The sublayers of every transformer here: attention, MLPs, rotary positions.

None has a norm in front of it, and none adds to anything: the residual hands out a normalised h and takes the output.
Weights start at zero until the model that owns them draws them (`draw_normal`, or its own rule).
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthlab.kernels.mgr import rms_normalize

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "none": lambda x: x,
}

Rotary = tuple[Tensor, Tensor]


class Linear(nn.Linear):
    """x W^T without a bias. W [d_out, d_in] starts at zero, so that building a model draws each weight only once."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out, bias=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class Embedding(nn.Embedding):
    """Rows [size, C] to look up; they start at zero, as `Linear`'s weight does and for the same reason."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def rotary_tables(
    head_dim: int, length: int, *, start: int = 0, base: float = 10_000.0, device: torch.device | str | None = None
) -> Rotary:
    """cos and sin [length, head_dim / 2], float32, of the angles position x base^(-2 i / head_dim), i = 0, 1, ...

    Positions are start .. start + length - 1. Source: Su et al., arXiv 2104.09864, section 3.2.2.
    """
    # Always in float32: in bfloat16 positions beyond 256 would already share an angle.
    frequencies = base ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    positions = torch.arange(start, start + length, device=device, dtype=torch.float32)
    angles = positions.unsqueeze(-1) * frequencies
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn each pair (x_i, x_(i + D/2)) of x [.., T, D] by its position's angle; the result has x's dtype.

    The pairing is Hugging Face's Llama ("rotate half"), not the interleaved one of the paper; weights for one are a
    permutation of those for the other. Arithmetic is float32 or wider.
    """
    cos, sin = rotary
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Causal softmax attention, scores over sqrt(D): q [B, H, T, D], k and v [B, G, S, D] -> [B, H, T, D].

    The T queries are the last T of S positions. With G < H key-value heads, H / G neighbouring query heads share one.
    """
    length, known = q.shape[-2], k.shape[-2]
    mask = None
    if length != known:  # `is_causal` would count queries from position 0
        mask = torch.ones(length, known, dtype=torch.bool, device=q.device).tril(known - length)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=q.shape[-3] != k.shape[-3]
    )


def check_heads(d_model: int, n_heads: int, n_kv_heads: int, *, rotary: bool = False) -> None:
    """ValueError naming the field, unless the heads divide the width (evenly in two, for `rotary`) and each other."""
    if d_model % n_heads:
        raise ValueError(f"d_model={d_model} is not divisible by n_heads={n_heads}; change one of them.")
    if n_heads % n_kv_heads:
        raise ValueError(f"n_heads={n_heads} is not divisible by n_kv_heads={n_kv_heads}; change one of them.")
    if rotary and d_model // n_heads % 2:
        raise ValueError(
            f"d_model={d_model} with n_heads={n_heads} makes heads {d_model // n_heads} wide; rotary positions turn "
            "pairs, so use an even width a head."
        )


class CausalSelfAttention(nn.Module):
    """Causal self-attention of H = n_heads heads of width D = d_model / H, without biases.

    Args:
        n_kv_heads: G, the key-value heads, each shared by H / G query heads; H by default.
        qk_norm: RMS-normalise q and k (no weight) after their rotation.
        dropout: of the attention weights and of the output, while training.

    Raises:
        ValueError: heads that do not divide the width or each other.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        qk_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = n_heads, n_heads if n_kv_heads is None else n_kv_heads
        check_heads(d_model, self.n_heads, self.n_kv_heads)
        self.head_dim, self.qk_norm, self.dropout = d_model // n_heads, qk_norm, dropout
        self.q_proj = Linear(d_model, d_model)
        self.k_proj = Linear(d_model, self.n_kv_heads * self.head_dim)
        self.v_proj = Linear(d_model, self.n_kv_heads * self.head_dim)
        self.o_proj = Linear(d_model, d_model)

    def forward(self, h: Tensor, rotary: Rotary | None = None, query_from: Tensor | None = None) -> Tensor:
        """h [B, T, C] -> [B, T, C]; `rotary`: tables of its T positions; `query_from`: as in `project`."""
        q, k, v = self.project(h, rotary, query_from)
        return self.merge(attend(q, k, v, self.dropout if self.training else 0.0))

    def project(
        self, h: Tensor, rotary: Rotary | None = None, query_from: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, T, D], k and v [B, G, T, D] of h [B, T, C], q of `query_from` where given; rotated, normalised."""
        if query_from is None:
            # Parameters apart (for Muon, for continuity, for Hugging Face's names), one matrix product.
            weights = (self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
            joint = F.linear(h, torch.cat(weights))  # [B, T, (H + 2 G) D]
            q, k, v = joint.split([len(weight) for weight in weights], -1)
        else:
            q = self.q_proj(query_from)
            k, v = F.linear(h, torch.cat((self.k_proj.weight, self.v_proj.weight))).chunk(2, -1)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(-2, -3) for x in (q, k, v))
        if rotary is not None:
            q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
        if self.qk_norm:
            q, k = rms_normalize(q), rms_normalize(k)
        return q, k, v

    def merge(self, heads: Tensor) -> Tensor:
        """The output [B, T, C] of what the heads read, [B, H, T, D]."""
        joined = heads.transpose(-2, -3).flatten(-2)  # [B, T, C]
        return F.dropout(self.o_proj(joined), self.dropout, self.training)


class Mlp(nn.Module):
    """down(activation(up h)): `d_hidden` is 4 x d_model by default; `activation` a key of `ACTIVATIONS`."""

    def __init__(
        self, d_model: int, d_hidden: int | None = None, *, activation: str = "gelu", dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.activation, self.dropout = activation, dropout
        self.up_proj = Linear(d_model, d_hidden or 4 * d_model)
        self.down_proj = Linear(d_hidden or 4 * d_model, d_model)

    def forward(self, h: Tensor) -> Tensor:
        """h [.., C] -> [.., C]."""
        hidden = ACTIVATIONS[self.activation](self.up_proj(h))
        return F.dropout(self.down_proj(hidden), self.dropout, self.training)


class GatedMlp(nn.Module):
    """down(activation(gate h) * up h); SwiGLU with "silu". Source: Shazeer, arXiv 2002.05202, equation 6."""

    def __init__(self, d_model: int, d_hidden: int, *, activation: str = "silu", dropout: float = 0.0) -> None:
        super().__init__()
        self.activation, self.dropout = activation, dropout
        self.gate_proj = Linear(d_model, d_hidden)
        self.up_proj = Linear(d_model, d_hidden)
        self.down_proj = Linear(d_hidden, d_model)

    def forward(self, h: Tensor) -> Tensor:
        """h [.., C] -> [.., C]."""
        hidden = ACTIVATIONS[self.activation](self.gate_proj(h)) * self.up_proj(h)
        return F.dropout(self.down_proj(hidden), self.dropout, self.training)


@torch.no_grad()
def draw_normal(
    model: nn.Module, n_sublayers: int, std: float = 0.02, generator: torch.Generator | None = None
) -> None:
    """Draw every `Linear` and embedding of `model` from N(0, std^2), outputs of sublayers with std / sqrt(n_sublayers).

    Outputs (o_proj, down_proj) are what a plain residual sums up over depth. Source: GPT-2 (Radford et al. 2019,
    section 2.3). Order: that of `named_modules`, so one generator state gives one model.
    """
    for name, module in model.named_modules():
        if isinstance(module, Linear | nn.Embedding):
            is_output = name.endswith(("o_proj", "down_proj"))
            scale = std / math.sqrt(n_sublayers) if is_output else std
            nn.init.normal_(module.weight, std=scale, generator=generator)
