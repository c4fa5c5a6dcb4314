"""The two ends of every language model here: what tokens may be, and the loss of the next one."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from depthlab.kernels.mgr.reference import wide

# Eager cross-entropy keeps about three float32 copies of the logits. Beyond this many logits (1 GiB a copy) it goes
# piece by piece, and computes each piece again in backward.
MAX_EAGER_LOGITS = 2**28
_NONE = torch.iinfo(torch.int64).min  # torch would leave out targets of -100 in silence; here no target is left out


def check_tokens(name: str, tokens: Tensor, vocab_size: int, seq_len: int | None = None) -> None:
    """Raise in one sentence unless `tokens` is [B, T] of integers in 0 .. vocab_size - 1 with 1 <= T <= seq_len.

    The range is read only from CPU tensors outside `torch.compile`: elsewhere it would wait for the device, and there
    torch's own kernels assert it.

    Raises:
        TypeError: no tensor, or not of int64 or int32.
        ValueError: shape, length, or a token outside the vocabulary.
    """
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tokens).__name__}; convert it first.")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} have dtype {tokens.dtype}; use int64 or int32 token numbers.")
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"{name} have shape {list(tokens.shape)}; they need [B, T] with at least one token.")
    if seq_len is not None and tokens.shape[1] > seq_len:
        raise ValueError(
            f"{name} are {tokens.shape[1]} long and the model reads at most seq_len={seq_len}; shorten them, or build "
            "the model with a larger seq_len."
        )
    if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (int(bound) for bound in tokens.aminmax())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"{name} hold the number {low if low < 0 else high}, and the vocabulary is 0 .. {vocab_size - 1}; use "
                "the tokenizer that the model was made for."
            )


def head_logits(h: Tensor, weight: Tensor, soft_cap: float | None = None) -> Tensor:
    """h [.., C] and weight [V, C] -> logits [.., V]; with `soft_cap` c they are c tanh(logits / c), float32 or wider.

    Source of the cap: Gemma Team, arXiv 2408.00118, section 2.
    """
    logits = F.linear(h, weight)
    return logits if soft_cap is None else soft_cap * torch.tanh(wide(logits)[0] / soft_cap)


def next_token_loss(h: Tensor, weight: Tensor, targets: Tensor, soft_cap: float | None = None) -> Tensor:
    """Mean cross-entropy in nats, float32 or wider, of the head's logits: h [B, T, C], weight [V, C], targets [B, T].

    Logits have the dtype of the matrix product (bfloat16 under autocast). Compiled, their conversion is part of the
    softmax's kernel and only they are kept for backward. Eager, beyond `MAX_EAGER_LOGITS`, the tokens go in pieces.

    Raises:
        TypeError, ValueError: as `check_tokens`, or targets of another shape than h's tokens.
    """
    check_tokens("targets", targets, weight.shape[0])
    if targets.shape != h.shape[:-1]:
        raise ValueError(f"targets have shape {list(targets.shape)}; the tokens need {list(h.shape[:-1])}.")
    h, targets = h.flatten(0, 1), targets.flatten().long()
    rows = max(1, MAX_EAGER_LOGITS // weight.shape[0])
    if torch.compiler.is_compiling() or len(h) <= rows:
        return _summed_loss(h, weight, targets, soft_cap) / len(h)
    total = sum(
        checkpoint(_summed_loss, piece, weight, labels, soft_cap, use_reentrant=False, preserve_rng_state=False)
        for piece, labels in zip(h.split(rows), targets.split(rows), strict=True)
    )
    return total / len(h)


def _summed_loss(h: Tensor, weight: Tensor, targets: Tensor, soft_cap: float | None) -> Tensor:
    (logits,) = wide(head_logits(h, weight, soft_cap))
    return F.cross_entropy(logits, targets, ignore_index=_NONE, reduction="sum")
