"""Keys and values of the tokens read so far, loop by loop, so that new tokens need no second look at old ones."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from depthlab.lm.settings import check_choice, check_count

MODES = ("exact", "last-loop")
KeyValue = tuple[Tensor, Tensor]  # k and v, each [B, H, S, D]


class LoopCache:
    """Filled by ``model(tokens, cache=cache)``, chunk by chunk; it belongs to the first model, K and batch it sees.

    - "exact": a set of keys and values for each loop. Tokens of loop t see those of loop t, so the logits are those of
      the full forward pass, whatever the chunks.
    - "last-loop": one set, the last loop's, as the authors' code keeps it. The last loop of a new token sees all tokens
      before it; its earlier loops see only the chunk that it came in. Exact for the first chunk, or with K = 1.

    Args:
        mode: "exact" or "last-loop".
        max_tokens: the most tokens it takes; None: as many as the model reads.

    Raises:
        ValueError, TypeError: an unknown mode, or max_tokens that is no count.
    """

    def __init__(self, mode: str = "exact", max_tokens: int | None = None) -> None:
        check_choice("mode", mode, MODES)
        if max_tokens is not None:
            check_count("max_tokens", max_tokens)
        self.mode, self.max_tokens = mode, max_tokens
        self.clear()

    def clear(self) -> None:
        """Forget all tokens, and whose they were."""
        self.length = 0  # tokens held
        self._sets: list[list[KeyValue]] = []  # [kept loops][blocks]
        self._owner: dict[str, Any] = {}

    @property
    def n_bytes(self) -> int:
        """Bytes of all keys and values held."""
        return sum(x.numel() * x.element_size() for blocks in self._sets for kv in blocks for x in kv)

    @torch.compiler.disable
    def check(self, model: nn.Module, n_loops: int, tokens: Tensor, stop_below: float | None = None) -> None:
        """ValueError unless `tokens` [B, T] are fit to come next, from `model` applied `n_loops` times."""
        after, seq_len = self.length + tokens.shape[1], model.config.seq_len
        if self.length:
            self._check_owner(model, _setting(model, n_loops, tokens, stop_below))
        if self.max_tokens is not None and after > self.max_tokens:
            raise ValueError(
                f"The cache holds {self.length} tokens, takes at most max_tokens={self.max_tokens}, and got "
                f"{tokens.shape[1]} more; make a longer LoopCache and fill it from the start."
            )
        if after > seq_len:
            raise ValueError(
                f"The cache holds {self.length} tokens and got {tokens.shape[1]} more, but rotary positions end at "
                f"seq_len={seq_len}; clear the cache and go on from the last tokens, or build the model longer."
            )

    def _check_owner(self, model: nn.Module, setting: dict[str, Any]) -> None:
        own = self._owner
        for name, now in setting.items():
            if own[name] != now:
                raise ValueError(
                    f"The cache was filled with {name}={own[name]!r} and is used with {name}={now!r}; use another "
                    "LoopCache, or clear this one."
                )
        if own["model"]() is not model:
            raise ValueError("The cache was filled by another model; use another LoopCache, or clear this one.")
        if own["weights"] != _versions(model):
            raise ValueError("The model's weights have changed since the cache was filled; clear it and begin anew.")

    def past(self, loop: int, n_loops: int) -> list[KeyValue] | None:
        """What loop `loop` (from 1) of `n_loops` sees of the tokens before, one pair a block; None: nothing."""
        if not self.length or (self.mode == "last-loop" and loop < n_loops):
            return None
        return self._sets[-1 if self.mode == "last-loop" else loop - 1]

    @torch.compiler.disable
    def extend(
        self, model: nn.Module, tokens: Tensor, new: list[list[KeyValue]], stop_below: float | None = None
    ) -> None:
        """Take the keys and values of the chunk `tokens` [B, T]: new[loop][block], all loops.

        ValueError where they are of another dtype than those before."""
        n_loops, new = len(new), new if self.mode == "exact" else new[-1:]
        if self.length:
            before, now = self._sets[0][0][0].dtype, new[0][0][0].dtype
            if before != now:
                raise ValueError(f"The cache holds {before} and got {now}; use one dtype, or clear the cache.")
            pairs = [zip(old, chunk, strict=True) for old, chunk in zip(self._sets, new, strict=True)]
            self._sets = [[(joined(k, a), joined(v, b)) for (k, v), (a, b) in blocks] for blocks in pairs]
        else:
            self._sets = new
            self._owner = {"model": weakref.ref(model), "weights": _versions(model)}
            self._owner |= _setting(model, n_loops, tokens, stop_below)
        self.length += tokens.shape[1]


def _setting(model: nn.Module, n_loops: int, tokens: Tensor, stop_below: float | None) -> dict[str, Any]:
    """What the keys and values of one cache have in common."""
    own = {"variant": model.config.variant, "n_loops": n_loops, "batch": tokens.shape[0]}
    return own | {"stop_below": stop_below}


def _versions(model: nn.Module) -> list[int]:
    """How often each parameter was changed in place, where torch counts that."""
    return [0 if p.is_inference() else p._version for p in model.parameters()]


def joined(past: Tensor, new: Tensor) -> Tensor:
    """[B, H, S, D] and [B, H, T, D] -> [B, H, S + T, D]."""
    return torch.cat((past, new), -2)
