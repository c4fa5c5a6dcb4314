"""Floating-point operations of training, and the share of a device's peak that a measured speed uses."""

from typing import Protocol

# Dense bfloat16 matrix products. Source: NVIDIA's data sheets (their doubled figures are for 2:4 sparsity).
PEAK_BF16_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}


class Shape(Protocol):
    """What a config states about its matrix products; blocks that are applied again count again."""

    d_model: int
    seq_len: int

    @property
    def matmul_parameters(self) -> int:
        """N: entries of weight matrices a token is multiplied with, the head's included, embeddings not."""

    @property
    def n_attentions(self) -> int:
        """L: attentions a token passes."""


def flops_per_token(config: Shape) -> int:
    """Training FLOPs a token at length T = seq_len, forward and backward: 6 N + 12 L C T.

    A multiplication and an addition count two. The second term is attention's scores and mixtures over all T
    positions; the causal half is *not* taken off, as is customary. Norms, residual scheme, softmax and recomputation
    count nothing.

    Source: Chowdhery et al., arXiv 2204.02311 (PaLM), appendix B.
    """
    return 6 * config.matmul_parameters + 12 * config.n_attentions * config.d_model * config.seq_len


def mfu(tokens_per_s: float, config: Shape, peak_tflops: float) -> float:
    """Model FLOPs utilisation: FLOPs a second of training at `tokens_per_s` over the peak (10^12 a second, dense).

    Raises ValueError unless both numbers are positive. Source: as `flops_per_token`.
    """
    for name, value in (("tokens_per_s", tokens_per_s), ("peak_tflops", peak_tflops)):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name}={value} is not allowed; use a positive number.")
    return tokens_per_s * flops_per_token(config) / (peak_tflops * 1e12)
