"""Learning-rate schedules: pure functions of the step, each returning what to multiply the rate with.

Steps count from 0 to total_steps - 1. All rise linearly over the first `warmup_steps`: step 0 has 1 / warmup_steps, and
step warmup_steps - 1 the full rate, so that no step is wasted at rate 0.
"""

import math
from collections.abc import Callable
from numbers import Integral

FINAL_SHARE = 0.2  # of training, in which "trapezoid" goes down: the published setting of looped transformers


def constant(step: int, total_steps: int, warmup_steps: int = 0) -> float:
    """1 after the warm-up."""
    return _warm_up(step, total_steps, warmup_steps)


def cosine(step: int, total_steps: int, warmup_steps: int = 0, final: float = 0.1) -> float:
    """Half a cosine from 1 (first step after the warm-up) down to `final` (last step).

    Source: Loshchilov & Hutter, arXiv 1608.03983, equation 5 without restarts; `final` 0.1 is nanoGPT's.
    """
    rise = _warm_up(step, total_steps, warmup_steps)
    if step < warmup_steps:
        return rise
    length = total_steps - 1 - warmup_steps
    share = (step - warmup_steps) / length if length else 1.0
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * share))


def trapezoid(step: int, total_steps: int, warmup_steps: int = 0, final_share: float = FINAL_SHARE) -> float:
    """1 after the warm-up, then linearly towards 0 over the last `final_share` of all steps.

    The rate would reach 0 one step after the last, as in the published setting of looped transformers (arXiv
    2605.18797, its code). Where the warm-up reaches into the last part, the smaller of the two holds.
    """
    if not 0 <= final_share <= 1:
        raise ValueError(f"final_share={final_share} is not allowed; use a share of the steps from 0 to 1.")
    rise = _warm_up(step, total_steps, warmup_steps)
    length = round(final_share * total_steps)
    return min(rise, (total_steps - step) / length) if length else rise


SCHEDULES: dict[str, Callable[..., float]] = {"constant": constant, "cosine": cosine, "trapezoid": trapezoid}


def _warm_up(step: int, total_steps: int, warmup_steps: int) -> float:
    for name, value in (("step", step), ("total_steps", total_steps), ("warmup_steps", warmup_steps)):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name}={value!r} is {type(value).__name__}; use an integer.")
    if not 0 <= step < total_steps:
        raise ValueError(f"step={step} is outside 0 .. {total_steps - 1} (total_steps={total_steps}).")
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(f"warmup_steps={warmup_steps} is not allowed; use 0 to total_steps={total_steps}.")
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
