"""How well a language model predicts a text."""

import math
import time
from collections.abc import Iterator
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from depthlab.lm.modes import evaluating
from depthlab.lm.settings import check_count
from depthlab.runs import in_ci

_PROGRESS_S = 10.0
_LARGEST = 700.0  # nats whose exponential is still a float


class Evaluation(NamedTuple):
    """Mean loss in nats a token, its exponential, the loss in bits a byte (None without bytes_per_token), n_tokens."""

    loss_nats: float
    perplexity: float
    bits_per_byte: float | None
    n_tokens: int


def evaluate(
    model: nn.Module,
    tokens: Tensor | np.ndarray,
    *,
    batch_size: int = 8,
    bytes_per_token: float | None = None,
    max_tokens: int | None = None,
    **how: Any,
) -> Evaluation:
    """Predict every token but the first of `tokens` once, in windows of ``model.config.seq_len`` that do not overlap.

    A token sees only what is before it in its window (its first tokens see little), so a model that reads longer
    windows gains by that alone. The last window may be shorter. No random number is drawn: the model is in eval mode
    meanwhile, and each of its modules is put back into its own mode after. Precision is the caller's (autocast).

    Args:
        model: has ``loss(tokens, targets, **how)`` (mean nats), ``config.seq_len`` and ``config.vocab_size``.
        tokens: N >= 2 token numbers [N], a tensor or an array (also memory-mapped; a window at a time is read).
        batch_size: windows a call. bytes_per_token: of this text, for bits per byte; 1 for byte tokens.
        max_tokens: predict only the first so many. how: passed on to `loss`.

    Raises:
        TypeError: tokens that are no integers, a count that is no integer.
        ValueError: fewer than two tokens, a token outside the vocabulary, a number out of range.
        FloatingPointError: a loss that is not finite; the message names the tokens.
    """
    tokens = _checked(tokens)
    check_count("batch_size", batch_size)
    if max_tokens is not None:
        check_count("max_tokens", max_tokens)
    if bytes_per_token is not None and not (isinstance(bytes_per_token, Real) and 0 < bytes_per_token < math.inf):
        raise ValueError(f"bytes_per_token={bytes_per_token!r} is not allowed; use a positive number.")
    n_tokens = len(tokens) - 1 if max_tokens is None else min(max_tokens, len(tokens) - 1)
    device = next(model.parameters()).device
    total, done, spoken = 0.0, 0, time.monotonic()
    with evaluating(model):
        for begins, width in _windows(n_tokens, model.config.seq_len, batch_size):
            batch = _read(tokens, begins, width, model.config.vocab_size).to(device)  # [windows, width + 1]
            loss = float(model.loss(batch[:, :-1], batch[:, 1:], **how))
            if not math.isfinite(loss):
                raise FloatingPointError(f"The loss of tokens {begins[0]} to {begins[-1] + width} is {loss}.")
            total += loss * len(begins) * width
            done += len(begins) * width
            if time.monotonic() - spoken > _PROGRESS_S and not in_ci():
                spoken = time.monotonic()
                print(f"evaluate: {done} of {n_tokens} tokens", flush=True)
    mean = total / n_tokens
    bits = None if bytes_per_token is None else mean / math.log(2) / bytes_per_token
    return Evaluation(mean, math.exp(mean) if mean < _LARGEST else math.inf, bits, n_tokens)


def _windows(n_tokens: int, length: int, batch_size: int) -> Iterator[tuple[range, int]]:
    """(first tokens of the windows of a batch, their length): whole windows first, at last what is left."""
    whole = n_tokens - n_tokens % length
    starts = range(0, whole, length)
    for first in range(0, len(starts), batch_size):
        yield starts[first : first + batch_size], length
    if n_tokens % length:
        yield range(whole, whole + 1), n_tokens % length


def _read(tokens: Tensor | np.ndarray, begins: range, width: int, vocab_size: int) -> Tensor:
    """Windows and the token after each, [len(begins), width + 1]."""
    batch = torch.stack([_as_tensor(tokens[begin : begin + width + 1]) for begin in begins])
    low, high = (int(bound) for bound in batch.aminmax())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"Tokens {begins[0]} to {begins[-1] + width} hold numbers from {low} to {high}; the model's vocabulary is "
            f"0 .. {vocab_size - 1}."
        )
    return batch


def _as_tensor(window: Tensor | np.ndarray) -> Tensor:
    # uint16 and uint32 of token files have hardly any torch operators
    return torch.from_numpy(window.astype(np.int64)) if isinstance(window, np.ndarray) else window.long().cpu()


def _checked(tokens: Any) -> Tensor | np.ndarray:
    if isinstance(tokens, Tensor):
        whole = not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)
    else:
        tokens = np.asanyarray(tokens)
        whole = np.issubdtype(tokens.dtype, np.integer)
    if not whole:
        raise TypeError(f"tokens have dtype {tokens.dtype}; evaluate needs token numbers (integers).")
    if tokens.ndim != 1 or len(tokens) < 2:
        raise ValueError(f"tokens have shape {list(tokens.shape)}; evaluate needs [N] with at least two tokens.")
    return tokens
