"""Training that keeps loss, gradient norms and state norms of every step, and waits for the device at none of them."""

import math
import time
from typing import NamedTuple

import torch
from torch import Tensor

from depthlab.lm.optimizers import build_optimizers
from depthlab.lm.schedules import SCHEDULES
from depthlab.lm.steps import gradients
from depthlab.lm.tokens import TokenStream
from depthlab.looped.model import LoopedTransformer

CHECK_EVERY = 50  # steps between looks at whether all is finite


class Followed(NamedTuple):
    """Series over S steps, on the CPU, from the training passes themselves.

    losses [S] in nats; gradient norms before clipping of each parameter [S, P]; loop_norms [S, K] as
    `LoopedTransformer.loop_norms`. stopped: the first step (from 1) that was not finite, after which training stopped;
    0: none. ms_per_step: median of blocks of `CHECK_EVERY` steps, the first left out where there are more.
    """

    losses: Tensor
    gradient_norms: Tensor
    loop_norms: Tensor
    stopped: int
    ms_per_step: float


def follow(
    model: LoopedTransformer,
    stream: TokenStream,
    steps: int,
    *,
    optimizer: str = "flt",
    rate: float = 1.0,
    schedule: str = "trapezoid",
    warmup_steps: int = 0,
    clip: float = 1.0,
    precision: str = "float32",
    compiled: bool = False,
) -> Followed:
    """Train `model` in place by the trainer's own step (`lm.steps.gradients`) and schedule.

    Args:
        rate: what the rates of all optimizers are multiplied with; 1 is the published setting with optimizer "flt".

    Raises as `build_optimizers` and the schedule do.
    """
    optimizers = build_optimizers(model, optimizer)
    compute = gradients(model, precision=precision, clip=clip, compiled=compiled)
    model.train()
    losses, norms, loops, marks = [], [], [], [time.perf_counter()]
    for step in range(steps):
        factor = rate * SCHEDULES[schedule](step, steps, warmup_steps)
        for group in (group for one in optimizers for group in one.param_groups):
            group["lr"] = group["initial_lr"] * factor
        moved = compute([stream.next_batch()])
        losses.append(moved.loss)
        norms.append(moved.norms)
        loops.append(model.loop_norms)
        for one in optimizers:
            one.step()
            one.zero_grad(set_to_none=True)
        if (step + 1) % CHECK_EVERY == 0 or step + 1 == steps:
            sound = bool(torch.stack(losses[-CHECK_EVERY:]).isfinite().all())
            marks.append(time.perf_counter())
            if not sound or not bool(torch.stack(norms[-CHECK_EVERY:]).isfinite().all()):
                break
    series = [torch.stack(rows).double().cpu() for rows in (losses, norms, loops)]
    bad = ~(series[0].isfinite() & series[1].isfinite().all(1))
    stopped = int(bad.nonzero()[0]) + 1 if bool(bad.any()) else 0
    return Followed(*series, stopped, _median_ms(marks))


def _median_ms(marks: list[float]) -> float:
    blocks = [1000 * (b - a) / CHECK_EVERY for a, b in zip(marks, marks[1:], strict=False)]
    blocks = sorted(blocks[1:] or blocks)
    return blocks[len(blocks) // 2] if blocks else math.nan
