"""Which backend runs is what was asked for and is proven; where Triton cannot run, one sentence says why."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from depthlab.kernels import mgr
from depthlab.kernels.mgr import function, ops, reference

CPU = "there is no CUDA GPU here (TRITON_INTERPRET=1, set before Python starts, interprets the kernels on the CPU"


@pytest.fixture
def calls(monkeypatch):
    """What would have computed, in order: "torch" is the reference, "triton" the kernels."""
    seen = []

    monkeypatch.setattr(function, "_fused", lambda *a: seen.append("triton") or (None,) * 4)
    for name in ("mix_and_pool", "append_and_pool", "attn_pool"):
        monkeypatch.setattr(reference, name, lambda *a, **k: seen.append("torch"))
    return seen


def call_all(backend, device="cpu", dtype=torch.float32, n=2, width=4):
    how = {"device": device, "dtype": dtype}
    streams, update, w = torch.ones(3, n, width, **how), torch.ones(3, width, **how), torch.ones(width, **how)
    mgr.mix_and_pool(streams, update, w, torch.ones(n, **how), w, gate="independent", backend=backend)
    mgr.append_and_pool(streams, update, w, backend=backend)
    mgr.attn_pool(streams, w, backend=backend)


@pytest.fixture
def gpu(monkeypatch):
    """gpu(capability): CPU tensors say that they are on a GPU of that capability."""

    def install(capability=(9, 0)):
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
        monkeypatch.setattr(torch.Tensor, "device", property(lambda x: SimpleNamespace(type="cuda", index=0)))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
        about = SimpleNamespace(major=capability[0], minor=capability[1], shared_memory_per_block_optin=232_448)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index=None: about)

    return install


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_on_a_cpu_auto_is_torch(calls, backend):
    call_all(backend)
    assert calls == ["torch"] * 3
    assert mgr.resolve_backend(backend, torch.ones(1, 1)) == mgr.resolve_backend(backend) == "torch"


def test_on_a_gpu_auto_is_triton_and_torch_is_torch(calls, gpu):
    pytest.importorskip("triton")
    gpu()
    call_all("auto")
    call_all("triton")
    call_all("torch")
    assert calls == ["triton"] * 6 + ["torch"] * 3


@pytest.mark.parametrize(
    ("changes", "capability"), [({"dtype": torch.float64}, (9, 0)), ({"width": 8193}, (9, 0)), ({}, (7, 5))]
)
def test_auto_is_torch_for_what_the_kernels_do_not_take(calls, gpu, changes, capability):
    gpu(capability)
    call_all("auto", **changes)
    assert calls == ["torch"] * 3


def refused(sentence: str, **changes) -> None:
    with pytest.raises(mgr.BackendUnavailable, match=re.escape(f"backend='triton' cannot run: {sentence}")) as raised:
        call_all("triton", **changes)
    said = str(raised.value)
    assert said.endswith("; use 'auto' or 'torch'.") and "\n" not in said


def test_triton_is_refused_in_one_sentence(calls, gpu, monkeypatch):
    pytest.importorskip("triton")
    if not torch.cuda.is_available() and not ops.INTERPRETED:
        refused(CPU)
    gpu()
    refused("a float64 tensor was given and the kernels take float16, bfloat16 and float32", dtype=torch.float64)
    refused("streams have C=8193 and the kernels take 1 to 8192", width=8193)
    gpu((7, 5))
    refused("this GPU has compute capability 7.5 and the kernels need 8.0")
    monkeypatch.setattr(function, "TRITON_INSTALLED", False)
    refused("the triton package is not installed (Linux on x86-64: pip install triton)")
    assert calls == []


def test_one_float64_weight_is_enough_to_be_refused(gpu):
    gpu()
    w = torch.ones(4, dtype=torch.float64)
    with pytest.raises(mgr.BackendUnavailable, match="a float64 tensor was given"):
        mgr.attn_pool(torch.ones(3, 2, 4), w, backend="triton")


@pytest.mark.parametrize("backend", ["auto", "torch", "triton"])
def test_shapes_and_devices_are_named_before_the_backend(calls, backend):
    one, meta = torch.ones(4), torch.ones(4, device="meta")
    with pytest.raises(ValueError, match="n=17; a token has 1 to 16 streams"):
        mgr.attn_pool(torch.ones(3, 17, 4), one, backend=backend)
    with pytest.raises(ValueError, match="w_pool is on meta and streams on cpu"):
        mgr.attn_pool(torch.ones(3, 2, 4), meta, backend=backend)
    with pytest.raises(ValueError, match="16 streams, the most a token can have"):
        mgr.append_and_pool(torch.ones(16, 4), one, one, backend=backend)
    assert calls == []


SCRIPT = """
import torch
from depthlab.kernels import mgr
from depthlab.kernels.mgr import kernels
ran, kernel = [], kernels.layer_fwd_kernel
class Counted:
    def __getitem__(self, grid):
        return lambda *a, **k: ran.append(grid) or kernel[grid](*a, **k)
kernels.layer_fwd_kernel = Counted()
streams, w = torch.ones(1, 2, 4), torch.ones(4)
for backend in ("auto", "torch", "triton"):
    mgr.attn_pool(streams, w, backend=backend)
    print(backend, mgr.resolve_backend(backend, streams), len(ran))
"""


def test_in_the_interpreter_only_triton_is_triton():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment)
    if function._interpreter_problem():
        assert f"backend='triton' cannot run: {function._interpreter_problem()}" in done.stderr
        pytest.skip(function._interpreter_problem())
    assert done.stdout.splitlines() == ["auto torch 0", "torch torch 0", "triton triton 1"], done.stderr


@pytest.mark.parametrize(
    ("numpy", "triton", "runs"),
    [("2.5.2", "3.6.0", False), ("2.4.6", "3.6.0", True), ("2.5.2", "3.7.0", True), ("1.26.4", "3.10.1", True)],
)
def test_an_interpreter_that_cannot_run_with_its_numpy_is_refused_with_both_versions(monkeypatch, numpy, triton, runs):
    monkeypatch.setattr(function, "version", {"numpy": numpy, "triton": triton}.get)
    function._interpreter_problem.cache_clear()
    problem = function._interpreter_problem()
    function._interpreter_problem.cache_clear()
    assert (problem == "") == runs and (runs or (numpy in problem and triton in problem))


def test_importing_the_functions_imports_no_kernel():
    """So that nothing is compiled or interpreted, and no GPU touched, by whoever only uses torch."""
    script = "import sys, depthlab.kernels.mgr as m, torch; m.attn_pool(torch.ones(2, 4), torch.ones(4)); "
    script += "print('depthlab.kernels.mgr.kernels' in sys.modules, 'triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split()[0] == "False", done.stderr
