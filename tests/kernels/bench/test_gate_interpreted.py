"""The real kernels, in Triton's interpreter, pass the gate: the gate's tolerance fits them and not torch alone.

A process of its own, since the interpreter must be chosen before the kernels are imported. Not in bfloat16, whose store
the interpreter truncates: the GPU run covers that.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

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
