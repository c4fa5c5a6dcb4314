"""The kernels compiled for an H200 on any machine: each input is loaded once a token, and nothing is added atomically.

That is what the byte count of DERIVATION.md and of the benchmark stands on. No GPU is needed to compile.
"""

import os
import re
from collections import Counter

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from depthlab.kernels.mgr import kernels, launch  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
STORED = ("streams_ptr", "update_ptr", "mixed_ptr", "pooled_ptr")
STORED += ("d_mixed_ptr", "d_pooled_ptr", "d_streams_ptr", "d_update_ptr")
COUNTS = ("n_tokens", "n_long", "long_tokens")
CASES = [("competitive", n, width) for n in (4, 8) for width in (768, 1024, 2048)]  # kernels/bench times these
CASES += [("independent", 4, 1024), ("append", 4, 1024), ("read", 4, 1280)]


def compiled(kind: str, n: int, width: int, *, backward: bool):
    """The compiled kernel for bfloat16 streams and float32 weights, normalised, and the launch it is meant for."""
    kernel = kernels.layer_bwd_kernel if backward else kernels.layer_fwd_kernel
    how = launch.launch_choice(n, width, backward=backward)
    flags = {"HAS_D_MIXED": kind != "read", "HAS_D_BETA": False} if backward else {"KEEP": True}
    shape = {"KIND": kind, "NORMALIZE": True, "N": n, "N_PAD": triton.next_power_of_2(n), "C": width}
    constants = {**flags, **shape, **how.constants}
    types = dict.fromkeys(COUNTS, "i32") | {"eps": "fp32"} | dict.fromkeys(STORED, "*bf16")
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name.endswith("_ptr")}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=HOPPER, options={"num_warps": how.warps}), how


def accesses(ttir: str, operation: str) -> Counter:
    """How often each pointer argument is in a tt.load or tt.store inside the walk over tokens, by (argument, depth of
    loops): pointers are traced back to the argument that they come from."""
    came_from, found, loops = {}, Counter(), []
    for line in ttir.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        if loops and indent == loops[-1] and line.startswith(f"{indent}}}"):
            loops.pop()
        made = re.match(r"\s*(%[\w#]+) = tt\.(?:addptr|splat|broadcast|expand_dims) (%[\w#]+)", line)
        if made:
            came_from[made[1]] = made[2]
        used = re.search(rf"tt\.{operation} (%[\w#]+)", line)
        if used:
            pointer = used[1]
            while pointer in came_from:
                pointer = came_from[pointer]
            found[pointer.lstrip("%"), len(loops)] += 1
        if "scf.for " in line:
            loops.append(indent)
    return found


def of_streams(found: Counter) -> dict[tuple[str, int], int]:
    return {(name, depth): count for (name, depth), count in found.items() if name in STORED}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("kind", "n", "width"), CASES)
def test_a_token_is_loaded_once_and_stored_once(kind: str, n: int, width: int, backward: bool) -> None:
    kernel, how = compiled(kind, n, width, backward=backward)
    assert how.constants["HELD"]
    blocks = -(-width // how.constants["BLOCK_C"])
    read = {"streams_ptr", "update_ptr"} | ({"d_pooled_ptr", "d_mixed_ptr"} if backward else set())
    made = {"d_streams_ptr", "d_update_ptr"} if backward else {"mixed_ptr", "pooled_ptr"}
    if kind == "read":
        read, made = read - {"update_ptr", "d_mixed_ptr"}, made - {"d_update_ptr", "mixed_ptr"}
    assert of_streams(accesses(kernel.asm["ttir"], "load")) == {(name, 1): blocks for name in read}
    assert of_streams(accesses(kernel.asm["ttir"], "store")) == {(name, 1): blocks for name in made}
    assert "atomic" not in kernel.asm["ttir"]


def test_tiles_that_do_not_fit_are_loaded_again_and_the_count_sees_it() -> None:
    kernel, how = compiled("competitive", 16, 4096, backward=True)
    assert not how.constants["HELD"]
    again = of_streams(accesses(kernel.asm["ttir"], "load"))
    assert again["streams_ptr", 2] == 3 and again["d_mixed_ptr", 2] == 2
    assert "atomic" not in kernel.asm["ttir"]
