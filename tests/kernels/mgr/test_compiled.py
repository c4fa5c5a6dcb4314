"""The kernels compiled for an H200 on any machine: each input is loaded once a token, and nothing is added atomically.

That is what the byte count of DERIVATION.md and of the benchmark stands on. No GPU is needed to compile.
"""

import functools
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from depthlab.kernels.mgr import kernels, launch  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
STORED = ("streams_ptr", "update_ptr", "mixed_ptr", "pooled_ptr")
STORED += ("d_mixed_ptr", "d_pooled_ptr", "d_streams_ptr", "d_update_ptr", "values_ptr", "rebuilt_ptr")
COUNTS = ("n_tokens", "n_long", "long_tokens")
CASES = [("competitive", n, width) for n in (4, 8) for width in (768, 1024, 2048)]  # kernels/bench times these
CASES += [("independent", 4, 1024), ("append", 4, 1024), ("read", 4, 1280)]


INVERTED = [("competitive", n, width) for n in (4, 8) for width in (768, 1024)]
INVERTED += [("independent", 4, 2048)]


@functools.cache
def compiled(kind: str, n: int, width: int, *, backward: bool, invert: bool = False, exact: bool = False):
    """The compiled kernel for bfloat16 streams and float32 weights, normalised, and the launch it is meant for."""
    kernel = kernels.layer_bwd_kernel if backward else kernels.layer_fwd_kernel
    how = launch.launch_choice(n, width, backward=backward)
    flags = {"KEEP": True}
    if backward:
        flags = {"HAS_D_MIXED": kind != "read", "HAS_D_BETA": False, "INVERT": invert, "EXACT": exact}
    shape = {"KIND": kind, "NORMALIZE": True, "N": n, "N_PAD": triton.next_power_of_2(n), "C": width}
    constants = {**flags, **shape, **how.constants}
    types = dict.fromkeys(COUNTS, "i32") | {"eps": "fp32", "slots_ptr": "*i32"} | dict.fromkeys(STORED, "*bf16")
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


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("kind", "n", "width"), INVERTED)
def test_inverting_reads_the_output_in_place_of_the_input_and_adds_one_store(kind, n, width, exact) -> None:
    """Exact rows are loaded once as well, under a branch that a token without any does not take."""
    kernel, how = compiled(kind, n, width, backward=True, invert=True, exact=exact)
    assert how.constants["HELD"]
    blocks = -(-width // how.constants["BLOCK_C"])
    read = {"streams_ptr", "update_ptr", "d_pooled_ptr", "d_mixed_ptr"} | ({"values_ptr"} if exact else set())
    made = {"d_streams_ptr", "d_update_ptr", "rebuilt_ptr"}
    assert of_streams(accesses(kernel.asm["ttir"], "load")) == {(name, 1): blocks for name in read}
    assert of_streams(accesses(kernel.asm["ttir"], "store")) == {(name, 1): blocks for name in made}
    assert "atomic" not in kernel.asm["ttir"]


@pytest.mark.parametrize(("kind", "n", "width"), [x for x in INVERTED if x[1] == 4])
def test_inverting_keeps_the_pipeline_and_its_shared_memory(kind, n, width) -> None:
    """A token's loads still run ahead of it, asynchronously, and need no room for exact rows."""
    plain, inverting = (
        compiled(kind, n, width, backward=True, invert=invert, exact=invert)[0] for invert in (False, True)
    )
    loads = [len(re.findall(r"cp\.async\.c[ag]", kernel.asm["ptx"])) for kernel in (plain, inverting)]
    assert loads[1] >= loads[0] > 0
    assert inverting.metadata.shared <= plain.metadata.shared + 256  # the slots


@pytest.mark.parametrize("backward", [False, True])
def test_no_branch_yields_the_bounds_of_the_walk_over_tokens(backward: bool) -> None:
    """Triton 3.5, which comes with torch 2.9, compiles no such kernel: it stops with "PassManager::run failed"."""
    kernel, _ = compiled("competitive", 4, 1024, backward=backward)
    assert not re.search(r"scf\.if .*-> \(i(32|64)", kernel.asm["ttir"])


def test_tiles_that_do_not_fit_are_loaded_again_and_the_count_sees_it() -> None:
    kernel, how = compiled("competitive", 16, 4096, backward=True)
    assert not how.constants["HELD"]
    again = of_streams(accesses(kernel.asm["ttir"], "load"))
    assert again["streams_ptr", 2] == 3 and again["d_mixed_ptr", 2] == 2
    assert "atomic" not in kernel.asm["ttir"]


def test_rebuilt_tiles_that_do_not_fit_are_loaded_from_where_they_are_stored() -> None:
    kernel, how = compiled("competitive", 16, 4096, backward=True, invert=True, exact=True)
    assert not how.constants["HELD"]
    loads, stores = (of_streams(accesses(kernel.asm["ttir"], what)) for what in ("load", "store"))
    assert loads["streams_ptr", 2] == loads["values_ptr", 2] == stores["rebuilt_ptr", 2] == 1
    assert loads["rebuilt_ptr", 2] == 3


def spilt(kernel, tmp_path: Path) -> int:
    """How many 4-byte values a lane puts into memory for want of registers."""
    tool, path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump", tmp_path / "kernel.cubin"
    if not tool.is_file():
        pytest.skip("this triton has no cuobjdump")
    path.write_bytes(kernel.asm["cubin"])
    said = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", said)[1]) // 4


@pytest.mark.parametrize(
    ("n", "width", "most"),
    [(4, 1024, 9), (4, 2560, 9), (8, 1536, 9), (8, 1024, 50), (8, 2048, 50), (8, 1280, 200)],
)
def test_backward_tiles_are_held_though_some_spill(n: int, width: int, most: int, tmp_path) -> None:
    """What notebook 22 says of eight streams. The bounds leave room for another compiler."""
    kernel, how = compiled("competitive", n, width, backward=True)
    assert how.constants["HELD"]
    assert spilt(kernel, tmp_path) <= most


@pytest.mark.parametrize("n", [4, 8])
@pytest.mark.parametrize("width", [768, 1024, 1280, 2048, 4096])
def test_of_the_measured_forward_kernels_only_eight_rows_of_1280_spill(n: int, width: int, tmp_path) -> None:
    values = spilt(compiled("competitive", n, width, backward=False)[0], tmp_path)
    assert (values > 0) == ((n, width) == (8, 1280))
