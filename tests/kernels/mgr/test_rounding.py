"""The kernels that carry rounding, compiled for an H200 on any machine: nothing is added atomically, nothing spilt."""

import os

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from depthlab.kernels.mgr import rounding, rounding_kernels  # noqa: E402

TYPES = {"chosen_ptr": "*i1", "max_gate": "fp32", "sigma": "fp32", "tolerance": "fp32"}
TYPES |= dict.fromkeys(rounding_kernels.COUNTS, "i32")


def compiled(kernel, constants):
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "*fp32") for name in kernel.arg_names}
    return triton.compile(ASTSource(kernel, signature, constants, {}), target=GPUTarget("cuda", 90, 32))


@pytest.mark.parametrize(
    ("n", "fresh", "chooses"), [(1, True, True), (4, False, False), (5, False, True), (16, True, False)]
)
def test_both_kernels_compile_without_atomics_or_spills(n, fresh, chooses):
    n_pad = triton.next_power_of_2(n)
    shape = {"N": n, "N_PAD": n_pad}
    carry = {"CHOOSES": chooses, "FRESH": fresh, "BLOCK": rounding.BLOCK_ROWS // n_pad, **shape}
    for kernel, constants in (
        (rounding_kernels.carry_kernel, carry),
        (rounding_kernels.decide_kernel, {"PROGRAMS": rounding.PROGRAMS, **shape}),
    ):
        ptx = compiled(kernel, constants).asm["ptx"]
        assert "st.global" in ptx and "atom" not in ptx and ".local" not in ptx
