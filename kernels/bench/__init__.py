"""Benchmarks of the kernels: gated on their correctness, measured against the bytes they must move.

`depthlab bench mgr` makes the records; `live.measure_here` is the small version for a notebook; `figures` draws them.
"""

from depthlab.kernels.bench.cases import Case
from depthlab.kernels.bench.gate import GateFailed
from depthlab.kernels.bench.needs import BenchUnavailable, missing

__all__ = ["BenchUnavailable", "Case", "GateFailed", "missing"]
