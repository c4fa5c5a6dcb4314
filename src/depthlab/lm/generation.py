"""Text from a language model, one token at a time."""

from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from depthlab.lm.head import check_tokens
from depthlab.lm.modes import evaluating
from depthlab.lm.settings import check_count


def generate(
    model: nn.Module,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    **how: Any,
) -> Tensor:
    """Continue each row of tokens [B, T] by `max_new_tokens`: [B, T + max_new_tokens] on the tokens' device.

    The model sees the last ``config.seq_len`` tokens: what is longer is cropped from the left, at every step.

    Args:
        model: has ``forward(tokens, **how) -> logits [B, T, V]``, ``config.seq_len`` and ``config.vocab_size``; it is
            in eval mode meanwhile.
        temperature: logits are divided by it; 0 takes the likeliest token (the first of equals) and draws nothing.
        top_k: draw among the k likeliest only (and what ties with the last of them).
        generator: of the draws, on any device; torch's global one by default.
        how: passed on to the model.

    Raises:
        TypeError, ValueError: tokens that are no [B, T] of the vocabulary, a count or temperature out of range.
        FloatingPointError: logits that are not finite.
    """
    _check(max_new_tokens, temperature, top_k)
    check_tokens("tokens", tokens, model.config.vocab_size)
    with evaluating(model):
        for _ in range(max_new_tokens):
            logits = model(tokens[:, -model.config.seq_len :], **how)[:, -1].float()  # [B, V]
            if not bool(logits.isfinite().all()):
                raise FloatingPointError(
                    f"The logits after {tokens.shape[1]} tokens are not finite; the model is broken."
                )
            following = _choose(logits, temperature, top_k, generator)  # [B, 1]
            tokens = torch.cat((tokens, following.to(tokens)), 1)
    return tokens


def _choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    # The largest is moved to 0 first: a small temperature would otherwise overflow, or be 0 in float32 itself.
    temperature = max(temperature, torch.finfo(torch.float32).tiny)
    chances = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    return torch.multinomial(chances if generator is None else chances.to(generator.device), 1, generator=generator)


def _check(max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    check_count("max_new_tokens", max_new_tokens, 0)
    if top_k is not None:
        check_count("top_k", top_k)
    if isinstance(temperature, bool) or not isinstance(temperature, Real):
        raise TypeError(f"temperature={temperature!r} is {type(temperature).__name__}; use a number of at least 0.")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} is not allowed; use 0 (the likeliest token) or more.")
