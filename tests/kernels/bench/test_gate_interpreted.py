"""The real kernels, in Triton's interpreter, pass the gate: the gate's tolerance fits them and not torch alone.

A process of its own, since the interpreter must be chosen before the kernels are imported. Not in bfloat16, whose store
the interpreter truncates: the GPU run covers that.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

INVERTING = """
import torch
from depthlab.kernels.bench import gate, inverting
from depthlab.kernels.bench.cases import Case
inverting.ops.INTERPRETED_PROGRAMS = 1
case, right = Case("mix-inverting", "fp16", 3, 3, 33, "independent"), inverting.mix_and_pool_backward
def without_exact_rows(mixed, exact, *known, **how):
    return right(mixed, None, *known, **how)
def of_the_mixed_streams(mixed, exact, update, w_gate, bias, w_pool, beta, kept, *upstream, **how):
    streams = right(mixed, exact, update, w_gate, bias, w_pool, beta, kept, *upstream, **how)[0]
    return streams, *inverting.ops.compute_backward(
        mixed, update, w_gate, bias, w_pool, kept, *upstream, how["gate"], True, how["eps"])
for backward in (right, without_exact_rows, of_the_mixed_streams):
    inverting.mix_and_pool_backward = backward
    print(backward.__name__, len(gate.inverting_faults(case, torch.device("cpu"))) > 0)
"""
SCRIPT = """
import torch
from depthlab.kernels.bench import gate
from depthlab.kernels.bench.cases import Case, public_step
for case in [Case("mix", "fp16", 1, 3, 33, "independent"), Case("mix", "fp32", 1, 4, 96, "competitive"),
             Case("append", "fp16", 1, 3, 40), Case("pool", "fp32", 1, 4, 33)]:
    print(case.op, gate.faults(public_step(case, "triton"), case, torch.device("cpu"), tokens=13))
"""


def test_the_kernels_pass_the_gate_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines() == ["mix []", "mix []", "append []", "pool []"], done.stderr


def test_the_gate_of_inverting_lets_the_kernels_through_and_stops_wrong_ones() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INVERTING], capture_output=True, text=True, env=environment)
    found = ["mix_and_pool_backward False", "without_exact_rows True", "of_the_mixed_streams True"]
    assert done.stdout.splitlines() == found, done.stderr
