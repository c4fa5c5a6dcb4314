"""One implementation at one case: forward, backward on a saved graph, and both, as the numbers of a record."""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from depthlab.kernels.bench import timing
from depthlab.kernels.bench.cases import Case, Subject
from depthlab.kernels.bench.traffic import PASSES


def measure(subject: Subject, case: Case, copy_gbps: float, device: torch.device, samples: int, seed: int) -> dict:
    """Metrics of the three passes; "both" is the forward and the backward of it as one.

    For each PASS: PASS_ms with PASS_p20_ms and PASS_p80_ms (replayed from a CUDA graph where PASS_graphed is 1, else
    launched from Python), PASS_launched_ms (always launched from Python), PASS_gbps by the byte model, PASS_share of
    the measured copy bandwidth, and on a GPU, for forward and both, PASS_peak_mib beyond the inputs.
    """
    with _own_stream(device):
        generator = torch.Generator(device).manual_seed(seed)
        sets = max(1, math.ceil(timing.footprint(device) / case.bytes("forward")))
        drawn = [subject.inputs(generator) for _ in range(sets)]
        upstream = [_like(subject.step(*x)[: subject.graded], generator) for x in drawn]
        metrics: dict[str, float] = {}
        for which in PASSES:
            calls = _calls(which, subject, drawn, upstream)
            metrics |= _times(which, calls, case, copy_gbps, device, samples)
            if which != "backward":  # a saved graph is no part of what backward adds
                peak = timing.peak_mib(calls[0], device)
                metrics |= {} if peak is None else {f"{which}_peak_mib": peak}
            del calls
            _free(device)
    return metrics


def metric_names(device: torch.device) -> list[str]:
    """The names that `measure` gives, for a row that could not be measured."""
    kinds = ("ms", "p20_ms", "p80_ms", "launched_ms", "graphed", "gbps", "share")
    names = [f"{which}_{kind}" for which in PASSES for kind in kinds]
    return names + ([] if device.type != "cuda" else ["forward_peak_mib", "both_peak_mib"])


def _calls(which: str, subject: Subject, drawn: list, upstream: list) -> list[timing.Call]:
    """One call an input set."""

    def outputs(x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return subject.step(*x)[: subject.graded]

    pairs = list(zip(drawn, upstream, strict=True))
    if which == "forward":
        return [lambda x=x: subject.step(*x) for x in drawn]
    if which == "both":
        return [lambda x=x, g=g: torch.autograd.grad(outputs(x), x, g) for x, g in pairs]
    saved = [(outputs(x), x, g) for x, g in pairs]
    return [lambda y=y, x=x, g=g: torch.autograd.grad(y, x, g, retain_graph=True) for y, x, g in saved]


def _times(
    which: str, calls: list[timing.Call], case: Case, copy_gbps: float, device: torch.device, samples: int
) -> dict[str, float]:
    launched = timing.launched(calls, samples, device)
    _free(device)
    best = timing.replayed(calls, samples, device) or launched
    gbps = case.bytes(which) / best.median_ms / 1e6
    return {
        f"{which}_ms": best.median_ms,
        f"{which}_p20_ms": best.p20_ms,
        f"{which}_p80_ms": best.p80_ms,
        f"{which}_launched_ms": launched.median_ms,
        f"{which}_graphed": float(best.graphed),
        f"{which}_gbps": gbps,
        f"{which}_share": gbps / copy_gbps,
    }


def _like(outputs: tuple[Tensor, ...], generator: torch.Generator) -> tuple[Tensor, ...]:
    return tuple(torch.randn(y.shape, generator=generator, dtype=y.dtype, device=y.device) for y in outputs)


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """A stream on which saved graphs are made and captured: autograd runs backward on the stream of its forward."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.synchronize(device)
    _free(device)


def _free(device: torch.device) -> None:
    """Give cached blocks back: a graph's pool cannot use them."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
