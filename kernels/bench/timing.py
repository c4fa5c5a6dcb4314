"""How long calls take on a GPU (CUDA events) or, for tests, on a CPU (the host's clock).

Calls rotate over several input sets, together many times the L2 cache, and outputs are held until the round is over:
neither inputs nor outputs are served from the cache. A round is timed as a whole, so that one event pair covers work
that is long against the event's own resolution.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

FOOTPRINT_L2 = 10  # input sets are added until one round moves this many times the L2 cache
_MIN_SAMPLE_MS = 1.0
_ENOUGH_MS, _FEWEST_SAMPLES = 300.0, 7  # slow calls get fewer samples: what they spread over is seen all the same
_COPY_BYTES = 2**30

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Time of one call: median, 20th and 80th percentile of the samples. `graphed`: replayed from a CUDA graph."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    graphed: bool = False


def summarize(samples_ms: Sequence[float], calls: int, graphed: bool = False) -> Timing:
    """Percentiles of the time of one call, from samples of `calls` calls each. ValueError for none or a bad one."""
    if not len(samples_ms) or not all(math.isfinite(s) and s > 0 for s in samples_ms):
        raise ValueError(f"summarize got {len(samples_ms)} samples, not all positive; time at least one real call.")
    p20, median, p80 = np.quantile(np.asarray(samples_ms, dtype=float) / calls, [0.2, 0.5, 0.8])
    return Timing(float(median), float(p20), float(p80), graphed)


def launched(calls: Sequence[Call], samples: int, device: torch.device) -> Timing:
    """The calls back to back as a user makes them, Python and launches included."""
    for _ in range(3):
        _round(calls)
    probe = max(summarize(_sample(lambda: _round(calls), 3, device), 1).median_ms, 1e-6)
    rounds = max(1, math.ceil(_MIN_SAMPLE_MS / probe))

    def run() -> None:
        for _ in range(rounds):
            _round(calls)

    return summarize(_sample(run, _affordable(samples, probe * rounds), device), len(calls) * rounds)


def replayed(calls: Sequence[Call], samples: int, device: torch.device) -> Timing | None:
    """The same calls captured into one CUDA graph and replayed: the device's time without Python and launches.

    Must run on the stream that the calls' saved graphs were made on. None where a call cannot be captured (because it
    waits for the device, say).
    """
    if device.type != "cuda":
        return None
    rounds = 1
    graph = _capture(calls, rounds)
    if graph is None:
        return None
    once = float(np.median(_sample(graph.replay, 5, device)))
    if once < _MIN_SAMPLE_MS:  # else what starts a replay would be a visible part of it
        graph.reset()
        rounds = math.ceil(_MIN_SAMPLE_MS / once)
        graph = _capture(calls, rounds)
        _sample(graph.replay, 2, device)
    samples = _affordable(samples, once * rounds)
    timing = summarize(_sample(graph.replay, samples, device), len(calls) * rounds, graphed=True)
    graph.reset()
    return timing


def _capture(calls: Sequence[Call], rounds: int) -> torch.cuda.CUDAGraph | None:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for _ in range(rounds):
                _round(calls)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None
    return graph


def footprint(device: torch.device) -> int:
    """Bytes that a round has to move before the cache can no longer serve it."""
    if device.type != "cuda":
        return 0
    return FOOTPRINT_L2 * torch.cuda.get_device_properties(device).L2_cache_size


def copy_gbps(device: torch.device, n_bytes: int = _COPY_BYTES, samples: int = 20) -> float:
    """The measured copy bandwidth, bytes read and written over the median time of torch's own device copy, in GB/s.

    The denominator of every share: no operation that reads and writes each byte once is expected to beat it by much.
    """
    source = torch.empty(n_bytes // 4, dtype=torch.float32, device=device).uniform_()
    target = torch.empty_like(source)
    timing = launched([lambda: target.copy_(source)], samples, device)
    return 2 * n_bytes / timing.median_ms / 1e6


def float32_tflops(device: torch.device, size: int = 8192, samples: int = 5) -> float:
    """The measured rate of a float32 matrix product without tensor cores, in TFLOP/s: the roofline's flat part."""
    a, b = (torch.empty(size, size, device=device).uniform_(-1, 1) for _ in range(2))
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        timing = launched([lambda: a @ b], samples, device)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return 2 * size**3 / timing.median_ms / 1e9


def peak_mib(call: Call, device: torch.device) -> float | None:
    """The most memory that one call holds beyond what was allocated before it, results included; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del result
    return peak / 2**20


def _affordable(samples: int, sample_ms: float) -> int:
    return max(min(samples, _FEWEST_SAMPLES), min(samples, int(_ENOUGH_MS / sample_ms)))


def _round(calls: Sequence[Call]) -> None:
    held = [call() for call in calls]  # all outputs live, so that each call writes to memory of its own
    del held


def _sample(run: Call, samples: int, device: torch.device) -> list[float]:
    """Milliseconds of `samples` runs."""
    if device.type != "cuda":
        return [_host_ms(run) for _ in range(samples)]
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(samples)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in events]


def _host_ms(run: Call) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3
