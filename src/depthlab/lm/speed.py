"""How fast a model trains on this machine: tokens a second, share of the peak, memory.

The step is the trainer's own (`steps.gradients`, `build_optimizers`), on random tokens that are on the device already.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from depthlab.lm.flops import PEAK_BF16_TFLOPS, mfu
from depthlab.lm.gpt import GPT, GPTConfig
from depthlab.lm.optimizers import build_optimizers
from depthlab.lm.steps import gradients
from depthlab.runs import Cell, Experiment, Result

ID = "lm-speed"
_GIB = 2**30
_SCHEMES = [("prenorm", "auto"), ("mgr-competitive", "torch"), ("mgr-competitive", "triton")]


class Speed(NamedTuple):
    """Time of a training step (median, 20th and 80th percentile), tokens a second at the median, peak memory."""

    ms_per_step: float
    p20_ms: float
    p80_ms: float
    tokens_per_s: float
    memory_gib: float  # of the device's allocator, warm-up included; 0 on a CPU


def training_speed(
    model: nn.Module,
    *,
    batch_size: int,
    steps: int,
    warm_up: int = 5,
    precision: str = "bfloat16",
    compiled: bool = False,
    optimizer: str = "adamw",
) -> Speed:
    """Time `steps` training steps of batch_size x ``config.seq_len`` tokens, after `warm_up` of them (compilation too).

    Steps follow each other without waiting for the device. Clipping is on, as in training.

    Raises:
        FloatingPointError: the last loss is not finite, so the times would be of no use.
    """
    device = next(model.parameters()).device
    shape = (batch_size, model.config.seq_len + 1)
    batch = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
    optimizers = build_optimizers(model, optimizer)
    compute = gradients(model, precision=precision, clip=1.0, compiled=compiled)
    losses = []

    def step() -> None:
        losses[:] = [compute([batch]).loss]
        for one in optimizers:
            one.step()
            one.zero_grad(set_to_none=True)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    model.train()
    for _ in range(warm_up):
        step()
    times = _times_ms(step, steps, device)
    if not bool(losses[0].isfinite()):
        raise FloatingPointError(f"The loss after {warm_up + steps} steps is {float(losses[0])}; no speed is reported.")
    p20, median, p80 = (float(q) for q in np.quantile(times, [0.2, 0.5, 0.8]))
    memory = torch.cuda.max_memory_allocated(device) / _GIB if device.type == "cuda" else 0.0
    return Speed(median, p20, p80, batch_size * model.config.seq_len / median * 1000, memory)


def lm_speed() -> Experiment:
    """GPT toy and S on one H200, eager and compiled, MGR by the reference and by the kernels; PreNorm also at batch 64.

    The batch of 16 is what the reference has memory for.
    """
    config = {
        "device": "cuda",
        "precision": "bfloat16",
        "warm_up": 8,
        "steps": 20,
        "repeats": 3,
        "peak_tflops": PEAK_BF16_TFLOPS["H200"],
    }
    settings = [
        {"preset": preset, "residual": residual, "backend": backend, "compiled": compiled, "batch_size": batch_size}
        for preset, batch_size in (("toy", 256), ("S", 16))
        for residual, backend in _SCHEMES
        for compiled in (False, True)
    ]
    settings.append({"preset": "S", "residual": "prenorm", "backend": "auto", "compiled": True, "batch_size": 64})
    cells = [Cell(variant(one), one) for one in settings]
    return Experiment(ID, ("MGR-11",), config, cells, run_cell)


def variant(settings: dict[str, Any]) -> str:
    """PRESET/RESIDUAL[-BACKEND]/eager or compiled/batch-SIZE."""
    backend = "" if settings["backend"] == "auto" else f"-{settings['backend']}"
    how = "compiled" if settings["compiled"] else "eager"
    return f"{settings['preset']}/{settings['residual']}{backend}/{how}/batch-{settings['batch_size']}"


def run_cell(cell: Cell, config: dict[str, Any]) -> list[Result]:
    """Speed, MFU (`flops`, against the peak in config) and memory of one setting; the seed counts the repeats.

    What does not fit in memory is recorded so.
    """
    chosen = cell.settings
    shape = GPTConfig.preset(chosen["preset"], residual=chosen["residual"], backend=chosen["backend"])
    torch.compiler.reset()
    with torch.device(config["device"]):
        model = GPT(shape, torch.Generator(config["device"]).manual_seed(0))
    results = []
    for repeat in range(config["repeats"]):
        try:
            speed = training_speed(
                model,
                batch_size=chosen["batch_size"],
                steps=config["steps"],
                warm_up=config["warm_up"],
                precision=config["precision"],
                compiled=chosen["compiled"],
            )
        except torch.OutOfMemoryError:
            nothing = dict.fromkeys([*Speed._fields, "mfu"], float("nan"))
            results.append(Result(variant(chosen), repeat, nothing, diverged="It does not fit in the device's memory."))
            continue
        metrics = {**speed._asdict(), "mfu": mfu(speed.tokens_per_s, shape, config["peak_tflops"])}
        results.append(Result(variant(chosen), repeat, metrics))
    return results


def _times_ms(step: Callable[[], None], steps: int, device: torch.device) -> list[float]:
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(steps):
            step()
            marks.append(time.perf_counter())
        return [1000 * (b - a) for a, b in zip(marks, marks[1:], strict=False)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    events[-1].synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]
