"""What the hardware counted in one pass: Nsight Compute, run and parsed.

Bytes that crossed the memory's pins. The L2 keeps the last tens of megabytes that a kernel wrote, which no counter of
that kernel sees leave; so measure where a kernel writes far more than that (gigabytes).

What warps do with their time: issue an instruction, or wait, and for what.
"""

import csv
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from depthlab.kernels.bench.cases import DTYPES, Case

READ, WRITTEN, TIME = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"  # bytes, ns
BYTES = (READ, WRITTEN, TIME)

ISSUED, RESIDENT = "smsp__issue_active.avg.per_cycle_active", "smsp__warps_active.avg.per_cycle_active"
INSTRUCTIONS = "smsp__inst_executed.sum"
SPILLS = ("smsp__inst_executed_op_local_ld.sum", "smsp__inst_executed_op_local_st.sum")
_STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
# A warp's states as Nsight Compute names them, by what a reader of the kernel would call them.
STATES = {
    "issuing": ("selected",),
    "ready": ("not_selected",),  # another warp of its scheduler was chosen
    "memory": ("long_scoreboard", "lg_throttle", "membar", "drain"),  # global memory, and what was spilled there
    "exchange": ("short_scoreboard", "mio_throttle", "barrier"),  # other lanes and warps: shuffles, shared memory
    "arithmetic": ("wait", "dispatch_stall", "math_pipe_throttle"),  # the result of the instruction before
    "other": ("branch_resolving", "imc_miss", "misc", "no_instruction", "sleeping", "tex_throttle"),
}
WARPS = (TIME, ISSUED, RESIDENT, INSTRUCTIONS, *SPILLS)
WARPS += tuple(_STALLED.format(name) for names in STATES.values() for name in names)

_SCALE = {"byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12}
_SCALE |= {"nsecond": 1.0, "usecond": 1e3, "msecond": 1e6, "second": 1e9, "ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
_SCALE |= {"inst": 1.0, "warp": 1.0, "": 1.0}
_TIMEOUT_S = 240


class CountersMissing(RuntimeError):
    """Nsight Compute is not here, or could not read the counters."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch and its counters by name, in bytes, nanoseconds and plain counts."""

    kernel: str
    values: dict[str, float]


def parse(text: str, metrics: Sequence[str]) -> list[Launch]:
    """The launches in the output of `ncu --csv --metrics ...` (its default page), in order; other lines are skipped.

    Raises CountersMissing when there is no table, a launch lacks a metric, or a unit is unknown.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"') and '"Metric Name"' in line), None)
    if start is None:
        said = next((line for line in lines if "ERR" in line or "==WARN" in line), "no table in its output")
        raise CountersMissing(f"Nsight Compute gave no counters ({said.strip('= ')})")
    found: dict[str, Launch] = {}
    for row in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        launch = found.setdefault(row["ID"], Launch(row["Kernel Name"], {}))
        if row["Metric Name"] in metrics:
            launch.values[row["Metric Name"]] = _number(row["Metric Name"], row["Metric Value"], row["Metric Unit"])
    if not found:
        raise CountersMissing("Nsight Compute saw no launch")
    for identity, launch in found.items():
        lacking = [name for name in metrics if name not in launch.values]
        if lacking:
            raise CountersMissing(f"Nsight Compute gave no {lacking[0]} for launch {identity}")
    return list(found.values())


def count(case: Case, implementation: str, which: str, metrics: Sequence[str] = BYTES) -> list[Launch]:
    """Run one pass of `case` under ncu in a process of its own. Raises CountersMissing where that does not work."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise CountersMissing("Nsight Compute (ncu) is not installed")
    command = [ncu, "--csv", "--clock-control", "none", "--profile-from-start", "off", "--metrics", ",".join(metrics)]
    command += [sys.executable, "-m", "depthlab.kernels.bench.one_launch", *launch_arguments(case, implementation)]
    try:
        done = subprocess.run([*command, "--pass", which], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise CountersMissing(f"Nsight Compute took over {_TIMEOUT_S} s") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise CountersMissing(f"Nsight Compute ended with code {done.returncode} ({said.strip('= ')[:120]})")
    return parse(f"{done.stdout}\n{done.stderr}", metrics)


def launch_arguments(case: Case, implementation: str) -> list[str]:
    """The command line of `one_launch` for this case."""
    arguments = ["--op", case.op, "--dtype", case.dtype, "--tokens", str(case.tokens), "--streams", str(case.n_streams)]
    gate = ["--gate", case.gate] if case.gate else []
    return [*arguments, "--width", str(case.width), *gate, "--implementation", implementation]


def summarize(launches: Sequence[Launch], case: Case, which: str) -> dict[str, float]:
    """Metrics of one pass, summed over its launches.

    PASS_reads_nC, PASS_writes_nC: elements a token in units of n C, as the paper counts; PASS_bytes_per_token;
    PASS_kernels; PASS_kernel_us.
    """
    unit = case.tokens * case.n_streams * case.width * DTYPES[case.dtype].itemsize
    reads, writes, time_ns = (sum(x.values[name] for x in launches) for name in BYTES)
    return {
        f"{which}_reads_nC": reads / unit,
        f"{which}_writes_nC": writes / unit,
        f"{which}_bytes_per_token": (reads + writes) / case.tokens,
        f"{which}_kernels": float(len(launches)),
        f"{which}_kernel_us": time_ns / 1e3,
    }


def warps(launches: Sequence[Launch], case: Case) -> dict[str, float]:
    """What the warps of the fused kernels of `case` did; PASS is "forward" or "backward", by the kernel's name.

    PASS_STATE for each of STATES: the share of its time that a warp spends so, together 1; PASS_resident: warps on a
    scheduler; PASS_issued: instructions it issues a cycle, at most 1; PASS_instructions: of all warps, a token;
    PASS_spilling: the share of them that moves spilled registers. Raises CountersMissing without such a kernel.
    """
    found = {}
    for which, kernel in (("forward", "layer_fwd_kernel"), ("backward", "layer_bwd_kernel")):
        seen = next((x.values for x in launches if x.kernel == kernel), None)
        if seen is None:
            raise CountersMissing(f"Nsight Compute saw no {kernel}")
        if seen[INSTRUCTIONS] == 0 or seen[ISSUED] == 0:
            raise CountersMissing(f"Nsight Compute counted nothing in {kernel}")
        states = {state: sum(seen[_STALLED.format(name)] for name in names) for state, names in STATES.items()}
        found |= {f"{which}_{state}": value / sum(states.values()) for state, value in states.items()}
        found[f"{which}_resident"], found[f"{which}_issued"] = seen[RESIDENT], seen[ISSUED]
        found[f"{which}_instructions"] = seen[INSTRUCTIONS] / case.tokens
        found[f"{which}_spilling"] = sum(seen[name] for name in SPILLS) / seen[INSTRUCTIONS]
    return found


def _number(name: str, value: str, unit: str) -> float:
    scale = _SCALE.get(unit.strip().lower())
    if scale is None:
        raise CountersMissing(f"Nsight Compute gave the unit {unit!r}, which is none of bytes, seconds and counts")
    try:
        number = float(value.replace(",", ""))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise CountersMissing(f"Nsight Compute gave {value!r} for {name}, which is no number")
    return number * scale
