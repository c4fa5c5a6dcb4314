"""GPT over any residual scheme."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthlab import residuals
from depthlab.lm.head import check_tokens, head_logits, next_token_loss
from depthlab.lm.layers import CausalSelfAttention, Embedding, Mlp, check_heads, draw_normal
from depthlab.lm.settings import check_counts, check_recompute, check_residual, check_share
from depthlab.residuals import Recompute

INIT_STD = 0.02
_GPT2 = {"vocab_size": 50_304, "seq_len": 1024}
PRESETS: dict[str, dict[str, int]] = {
    "toy": {"vocab_size": 256, "seq_len": 128, "n_layers": 4, "n_heads": 4, "d_model": 128},
    "S": _GPT2 | {"n_layers": 12, "n_heads": 12, "d_model": 768},
    "M": _GPT2 | {"n_layers": 24, "n_heads": 16, "d_model": 1024},
    "L": _GPT2 | {"n_layers": 36, "n_heads": 20, "d_model": 1280},
}


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT.

    Args:
        vocab_size: V. seq_len: the most tokens it reads. d_model: C.
        n_layers: blocks of one attention and one MLP, so 2 n_layers sublayers.
        residual: a scheme of `depthlab.residuals.SCHEMES`; n_streams: its n, where it has one.
        dropout: of embedding, attention weights and sublayer outputs.
        backend: of the residual's kernels: "auto", "torch" or "triton".
        recompute: how mgr rebuilds streams in the backward pass, or its fields by name; None stores them all.

    Raises:
        TypeError, ValueError: naming the field, its value and what is allowed.
    """

    kind: ClassVar[str] = "gpt"

    vocab_size: int
    seq_len: int
    n_layers: int
    n_heads: int
    d_model: int
    residual: str = "mgr-competitive"
    n_streams: int = 4
    dropout: float = 0.0
    backend: str = "auto"
    recompute: Recompute | None = None

    def __post_init__(self) -> None:
        if isinstance(self.recompute, dict):  # from a checkpoint
            object.__setattr__(self, "recompute", Recompute(**self.recompute))
        check_counts(self, "vocab_size", "seq_len", "n_layers", "n_heads", "d_model", "n_streams")
        check_share("dropout", self.dropout)
        check_heads(self.d_model, self.n_heads, self.n_heads)
        check_residual(self.residual, self.n_streams, self.n_layers, self.backend)
        check_recompute(self.recompute, self.residual, self.n_streams, self.n_layers)

    @property
    def matmul_parameters(self) -> int:
        """Entries of the weight matrices that a token is multiplied with: 12 C^2 a block, and the head."""
        return 12 * self.n_layers * self.d_model**2 + self.vocab_size * self.d_model

    @property
    def n_attentions(self) -> int:
        """Attentions that a token passes."""
        return self.n_layers

    @classmethod
    def preset(cls, name: str, *, residual: str = "mgr-competitive", n_streams: int = 4, **changes: Any) -> "GPTConfig":
        """A named shape: "toy" (bytes, trains on a CPU), or the MGR paper's "S", "M" and "L" (GPT-2 small to large).

        `changes` replace further fields. Raises ValueError for an unknown name.
        """
        if name not in PRESETS:
            raise ValueError(f"preset={name!r} is unknown; use one of {', '.join(PRESETS)}.")
        return cls(**PRESETS[name] | {"residual": residual, "n_streams": n_streams} | changes)


class GPT(nn.Module):
    """GPT-2's shape in nanoGPT's manner: learned positions, GELU, tied head, no biases, weights N(0, 0.02^2).

    The norm in front of sublayers and head is the residual's, without a weight. Parameters are float32; run it in
    bfloat16 by autocast.

    Args:
        config: its shape.
        generator: draws the start values; torch's global generator by default.

    Source: Radford et al. 2019 (GPT-2); nanoGPT; arXiv 2605.23259 (sizes).
    """

    def __init__(self, config: GPTConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        n, width, dropout = config.n_layers, config.d_model, config.dropout
        self.embed_tokens = Embedding(config.vocab_size, width)
        self.embed_positions = Embedding(config.seq_len, width)
        self.sublayers = nn.ModuleList()  # attention and MLP in turn
        for _ in range(n):
            self.sublayers.append(CausalSelfAttention(width, config.n_heads, dropout=dropout))
            self.sublayers.append(Mlp(width, dropout=dropout))
        how = {"n_streams": config.n_streams, "backend": config.backend, "recompute": config.recompute}
        self.residual = residuals.build(config.residual, width, 2 * n, **how)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all start values anew, also after ``to_empty``."""
        draw_normal(self, self.residual.n_sublayers, INIT_STD, generator)
        self.residual.reset_parameters()

    def hidden(self, tokens: Tensor, skip: Iterable[int] = ()) -> Tensor:
        """What the head reads [B, T, C], normalised, of tokens [B, T], leaving out the sublayers in `skip`."""
        # start, then step by step; nothing else knows of residuals
        return self.residual(self.embed(tokens), self.sublayers, skip)

    def embed(self, tokens: Tensor) -> Tensor:
        """What the residual starts from [B, T, C], of tokens [B, T]: their embeddings and those of their positions."""
        check_tokens("tokens", tokens, self.config.vocab_size, self.config.seq_len)
        x = self.embed_tokens(tokens) + self.embed_positions.weight[: tokens.shape[1]]  # [B, T, C]
        return F.dropout(x, self.config.dropout, self.training)

    def forward(self, tokens: Tensor, skip: Iterable[int] = ()) -> Tensor:
        """Logits [B, T, V] of the token after each of tokens [B, T]; bfloat16 under autocast, else the weights' dtype.

        Args:
            skip: sublayers left out (pruning; block b is 2 b and 2 b + 1).

        Raises:
            TypeError, ValueError: tokens that are no [B, T] of integers in the vocabulary (checked on a CPU; a GPU
                asserts), longer than seq_len, or an unknown number in `skip`.
        """
        return head_logits(self.hidden(tokens, skip), self.embed_tokens.weight)

    def loss(self, tokens: Tensor, targets: Tensor, skip: Iterable[int] = ()) -> Tensor:
        """Mean cross-entropy in nats (float32) of targets [B, T], each the token after that of tokens [B, T]."""
        return next_token_loss(self.hidden(tokens, skip), self.embed_tokens.weight, targets)
