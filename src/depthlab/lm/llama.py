"""Llama over any residual scheme, under Hugging Face's parameter names."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from depthlab import residuals
from depthlab.lm.gpt import INIT_STD
from depthlab.lm.head import check_tokens, head_logits, next_token_loss
from depthlab.lm.layers import (
    ACTIVATIONS,
    CausalSelfAttention,
    Embedding,
    GatedMlp,
    Linear,
    Rotary,
    check_heads,
    draw_normal,
    rotary_tables,
)
from depthlab.lm.settings import check_choice, check_counts, check_positive, check_residual

PRESETS: dict[str, dict[str, Any]] = {
    "toy": {"vocab_size": 256, "seq_len": 128, "n_layers": 4, "n_heads": 4, "d_model": 128, "d_hidden": 344},
    "34M": {"vocab_size": 16_384, "seq_len": 512, "n_layers": 8, "n_heads": 8, "d_model": 512, "d_hidden": 1376},
}


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama.

    Args:
        vocab_size: V. seq_len: the most tokens it reads. d_model: C. d_hidden: width inside the MLP.
        n_layers: blocks of one attention and one MLP, so 2 n_layers sublayers.
        n_kv_heads: key-value heads, each shared by n_heads / n_kv_heads query heads; None: n_heads.
        activation: of the MLP's gate, a key of `depthlab.lm.layers.ACTIVATIONS`; "none" drops it.
        rope_base: of the rotary angles. norm_eps: inside the root of every RMSNorm.
        tied: the head is the embedding's matrix.
        residual: a scheme of `depthlab.residuals.SCHEMES`; n_streams: its n. backend: of its kernels.

    Raises:
        TypeError, ValueError: naming the field, its value and what is allowed.
    """

    kind: ClassVar[str] = "llama"

    vocab_size: int
    seq_len: int
    n_layers: int
    n_heads: int
    d_model: int
    d_hidden: int
    n_kv_heads: int | None = None
    activation: str = "silu"
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6
    tied: bool = True
    residual: str = "prenorm"
    n_streams: int = 4
    backend: str = "auto"

    def __post_init__(self) -> None:
        check_counts(self, "vocab_size", "seq_len", "n_layers", "n_heads", "d_model", "d_hidden", "n_streams")
        if self.n_kv_heads is not None:
            check_counts(self, "n_kv_heads")
        check_choice("activation", self.activation, ACTIVATIONS)
        check_positive("rope_base", self.rope_base)
        check_positive("norm_eps", self.norm_eps)
        check_heads(self.d_model, self.n_heads, self.n_kv_heads or self.n_heads, rotary=True)
        check_residual(self.residual, self.n_streams, self.n_layers, self.backend)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "LlamaConfig":
        """A named shape: "toy" (bytes), or "34M", a guess at the small Llama of arXiv 2605.04971.

        `changes` replace fields. Raises ValueError for an unknown name.
        """
        check_choice("preset", name, PRESETS)
        return cls(**PRESETS[name] | changes)

    @property
    def head_dim(self) -> int:
        """D, the width of a head."""
        return self.d_model // self.n_heads

    @property
    def matmul_parameters(self) -> int:
        """Entries of the weight matrices that a token is multiplied with, the head's included."""
        attention = 2 * self.d_model * (self.d_model + (self.n_kv_heads or self.n_heads) * self.head_dim)
        return self.n_layers * (attention + 3 * self.d_model * self.d_hidden) + self.vocab_size * self.d_model

    @property
    def n_attentions(self) -> int:
        """Attentions that a token passes."""
        return self.n_layers


class NormWeight(nn.Module):
    """The weight [C] of an RMSNorm whose normalising the residual has done: h [.., C] -> h x weight, in h's dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, h: Tensor) -> Tensor:
        return (h * self.weight).to(h.dtype)


class LlamaBlock(nn.Module):
    """Two sublayers and the weights of the norms in front of them, under Hugging Face's names."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = NormWeight(config.d_model)
        self.self_attn = CausalSelfAttention(config.d_model, config.n_heads, n_kv_heads=config.n_kv_heads)
        self.post_attention_layernorm = NormWeight(config.d_model)
        self.mlp = GatedMlp(config.d_model, config.d_hidden, activation=config.activation)

    def attention(self, h: Tensor, rotary: Rotary) -> Tensor:
        """Sublayer 2 l: normalised h [B, T, C] -> [B, T, C]."""
        return self.self_attn(self.input_layernorm(h), rotary)

    def feed_forward(self, h: Tensor) -> Tensor:
        """Sublayer 2 l + 1: normalised h [B, T, C] -> [B, T, C]."""
        return self.mlp(self.post_attention_layernorm(h))


class Llama(nn.Module):
    """Llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases; weights start as N(0, 0.02^2).

    The residual normalises without a weight; each sublayer and the head multiply what they read by a weight of their
    own, which together is RMSNorm as everywhere. With residual "prenorm" the state dict is that of Hugging Face's
    ``LlamaForCausalLM`` and the logits are equal (`depthlab.lm.llama_hf` converts the config too).

    Args:
        config: its shape.
        generator: draws the start values; torch's global generator by default.

    Source: Touvron et al., arXiv 2302.13971; grouped queries: Ainslie et al., arXiv 2305.13245.
    """

    def __init__(self, config: LlamaConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        vocabulary, width = config.vocab_size, config.d_model
        self.model = nn.ModuleDict(
            {
                "embed_tokens": Embedding(vocabulary, width),
                "layers": nn.ModuleList(LlamaBlock(config) for _ in range(config.n_layers)),
                "norm": NormWeight(width),
            }
        )
        if not config.tied:
            self.lm_head = Linear(width, vocabulary)
        self.residual = residuals.build(
            config.residual, width, 2 * config.n_layers, n_streams=config.n_streams, backend=config.backend
        )
        self.residual.eps = config.norm_eps
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all start values anew, also after ``to_empty``."""
        draw_normal(self, self.residual.n_sublayers, INIT_STD, generator)
        for module in self.modules():
            if isinstance(module, NormWeight):
                module.weight.fill_(1)
        self.residual.reset_parameters()

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix [V, C]."""
        return self.model["embed_tokens"].weight if self.config.tied else self.lm_head.weight

    def hidden(self, tokens: Tensor, skip: Iterable[int] = ()) -> Tensor:
        """What the head reads [B, T, C] of tokens [B, T], leaving out the sublayers in `skip`."""
        check_tokens("tokens", tokens, self.config.vocab_size, self.config.seq_len)
        rotary = rotary_tables(
            self.config.head_dim, tokens.shape[1], base=self.config.rope_base, device=tokens.device
        )  # two of [T, D / 2]
        sublayers = []
        for block in self.model["layers"]:
            sublayers += [partial(block.attention, rotary=rotary), block.feed_forward]
        h = self.residual(self.model["embed_tokens"](tokens), sublayers, skip)
        return self.model["norm"](h)

    def forward(self, tokens: Tensor, skip: Iterable[int] = ()) -> Tensor:
        """Logits [B, T, V]; arguments and errors as `depthlab.lm.GPT.forward`."""
        return head_logits(self.hidden(tokens, skip), self.head_weight)

    def loss(self, tokens: Tensor, targets: Tensor, skip: Iterable[int] = ()) -> Tensor:
        """Mean cross-entropy in nats (float32) of targets [B, T], each the token after that of tokens [B, T]."""
        return next_token_loss(self.hidden(tokens, skip), self.head_weight, targets)
