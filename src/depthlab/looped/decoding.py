"""Text from a looped model through a cache, and what stopping tokens early costs and saves."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthlab.lm import generation
from depthlab.lm.head import check_tokens, head_logits
from depthlab.lm.modes import evaluating
from depthlab.looped.cache import LoopCache
from depthlab.looped.model import LoopedTransformer


class Cached(nn.Module):
    """A model as `depthlab.lm.generate` calls it, [B, T] -> [B, new, V], that gives it only what its cache lacks.

    Each call must repeat the tokens of the call before and add to them, or be the window of ``seq_len`` tokens that has
    moved on; then every position changes, and the cache is filled anew.
    """

    def __init__(self, model: LoopedTransformer, cache: LoopCache) -> None:
        super().__init__()
        self.model, self.cache, self.config = model, cache, model.config

    def forward(self, tokens: Tensor, **how: Any) -> Tensor:
        if self.cache.length >= tokens.shape[1]:
            self.cache.clear()
        return self.model(tokens[:, self.cache.length :], cache=self.cache, **how)


def generate(
    model: LoopedTransformer,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    *,
    cache: str | None = "exact",
    **how: Any,
) -> Tensor:
    """`depthlab.lm.generate` with a cache: [B, T] -> [B, T + max_new_tokens], raising what it raises.

    Args:
        cache: the mode of a `LoopCache`, or None for none. "exact" changes nothing but the time.
        how: n_loops and stop_below, passed on to the model.
    """
    reader = model if cache is None else Cached(model, LoopCache(cache))
    return generation.generate(reader, tokens, max_new_tokens, temperature, top_k, generator, **how)


class EarlyStop(NamedTuple):
    """Mean loss in nats with tokens stopped below a threshold, mean loops a token used, and the share that stopped."""

    loss_nats: float
    loops_used: float
    stopped: float


def early_stop(
    model: LoopedTransformer, tokens: Tensor, targets: Tensor, stop_below: float | None, n_loops: int | None = None
) -> EarlyStop:
    """Loops used against loss: targets [B, T], each the token after that of tokens [B, T], at one threshold.

    `stop_below` as `LoopedTransformer.run` takes it; None stops nothing. "stopped": of all tokens, those that used
    fewer loops than K.
    """
    check_tokens("targets", targets, model.config.vocab_size)
    with evaluating(model):
        found = model.run(tokens, n_loops, stop_below=stop_below)
        logits = head_logits(found.h, model.lm_head.weight, model.config.soft_cap)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten().long())
    used = found.loops_used.double()
    return EarlyStop(float(loss), float(used.mean()), float((used < len(found.states)).double().mean()))


def cached_loss(model: LoopedTransformer, tokens: Tensor, targets: Tensor, chunk: int, mode: str) -> float:
    """Mean loss in nats of targets [B, T] when tokens [B, T] are read in chunks through a cache of `mode`.

    The first chunk is exact in both modes; with `chunk` = 1 every token is decoded as in generation.
    """
    check_tokens("targets", targets, model.config.vocab_size)
    cache = LoopCache(mode)
    with evaluating(model):
        logits = torch.cat([model(part, cache=cache) for part in tokens.split(chunk, 1)], 1)  # [B, T, V]
        return float(F.cross_entropy(logits.flatten(0, 1), targets.flatten().long()))
