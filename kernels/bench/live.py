"""The benchmark in a few seconds, for a notebook on a machine with a GPU."""

import os
import subprocess
import sys
from collections.abc import Sequence
from io import StringIO

import pandas as pd
import torch

from depthlab.kernels.bench import gate, needs, timing
from depthlab.kernels.bench.cases import Case
from depthlab.kernels.bench.measure import measure
from depthlab.kernels.bench.subjects import subject


def measure_here(
    tokens: int = 32768,
    n_streams: int = 4,
    width: int = 1024,
    implementations: Sequence[str] = ("eager", "triton"),
    *,
    device: str = "cuda",
    samples: int = 10,
) -> pd.DataFrame:
    """Mixing and pooling in bfloat16, competitive gates: one row an implementation, after the gate.

    Columns: implementation, then the metrics of `measure.measure`, then `copy_gbps`. Nothing is recorded.

    Raises:
        BenchUnavailable: no CUDA device or no triton, naming what is missing. GateFailed: the kernels are wrong here.
    """
    place = torch.device(device)
    if place.type == "cuda":
        needs.require()
    case = Case("mix", "bf16", tokens, n_streams, width, "competitive")
    if "triton" in implementations:
        gate.require(case, place)
    copy = timing.copy_gbps(place) if place.type == "cuda" else timing.copy_gbps(place, 2**16)
    found = [
        {"implementation": name, **measure(subject(case, name), case, copy, place, samples, seed=0), "copy_gbps": copy}
        for name in implementations
    ]
    return pd.DataFrame(found)


def measure_apart() -> pd.DataFrame:
    """`measure_here` with its defaults in a process of its own: for a notebook whose own kernels are interpreted.

    Raises RuntimeError with the last line that the process wrote when it failed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "depthlab.kernels.bench.live"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it wrote nothing"]
        raise RuntimeError(f"The live benchmark failed: {last[0]}")
    return pd.read_json(StringIO(done.stdout), orient="records")


if __name__ == "__main__":
    print(measure_here().to_json(orient="records"))
