"""What training a looped model looks like from inside: gradient norms by layer, and how much a series oscillates."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def oscillation(series: Sequence[float] | Tensor) -> float:
    """Mean relative change from step to step of a series of at least two numbers g_s >= 0, here gradient norms.

        mean over s of 2 |g_(s+1) - g_s| / (g_(s+1) + g_s)

    It is 0 for a constant series, near 0 for any slow trend, 2 at most, and does not depend on the scale: unlike a
    standard deviation, which also counts a smooth rise. Two zeros in a row count 0.

    Raises:
        ValueError: fewer than two numbers, or one that is negative or not finite.
    """
    g = torch.as_tensor(series, dtype=torch.float64)
    if g.ndim != 1 or len(g) < 2 or not bool(g.isfinite().all()) or bool((g < 0).any()):
        raise ValueError(f"oscillation got {list(g.shape)} numbers; give at least two, all finite and none negative.")
    change, total = (g[1:] - g[:-1]).abs(), g[1:] + g[:-1]
    return float(torch.where(total > 0, 2 * change / total, 0.0).mean())


def parts(model: nn.Module) -> dict[str, list[int]]:
    """Part of a looped model ("embed_tokens", "blocks.0", .., "lm_head") -> its places in `model.parameters()`."""
    found: dict[str, list[int]] = {}
    for i, (name, _) in enumerate(model.named_parameters()):
        depth = 2 if name.startswith("blocks.") else 1
        found.setdefault(".".join(name.split(".")[:depth]), []).append(i)
    return found


def part_norms(norms: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Gradient norms of each parameter, [.., P], as `depthlab.lm.steps.Moved` has them -> of each part, [..]."""
    return {part: torch.linalg.vector_norm(norms[..., places], dim=-1) for part, places in parts(model).items()}
