"""Bytes that really crossed the memory's pins: Nsight Compute's counters, run and parsed.

The L2 keeps the last tens of megabytes that a kernel wrote, which no counter of that kernel sees leave; so measure
where a kernel writes far more than that (gigabytes).
"""

import csv
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from depthlab.kernels.bench.cases import DTYPES, Case

METRICS = {
    "dram__bytes_read.sum": "read_bytes",
    "dram__bytes_write.sum": "write_bytes",
    "gpu__time_duration.sum": "time_ns",
}
_SCALE = {"byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12}
_SCALE |= {"nsecond": 1.0, "usecond": 1e3, "msecond": 1e6, "second": 1e9, "ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
_TIMEOUT_S = 240


class CountersMissing(RuntimeError):
    """Nsight Compute is not here, or could not read the counters."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch and what its counters say."""

    kernel: str
    read_bytes: float
    write_bytes: float
    time_ns: float


def parse(text: str) -> list[Launch]:
    """The launches in the output of `ncu --csv --metrics ...` (its default page), in order; other lines are skipped.

    Raises CountersMissing when there is no table, a launch lacks a metric, or a unit is unknown.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        said = next((line for line in lines if "ERR" in line or "==WARN" in line), "no table in its output")
        raise CountersMissing(f"Nsight Compute gave no counters ({said.strip('= ')})")
    found: dict[str, dict] = {}
    for row in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        launch = found.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
        if row["Metric Name"] in METRICS:
            launch[METRICS[row["Metric Name"]]] = _number(row["Metric Value"], row["Metric Unit"])
    for identity, launch in found.items():
        lacking = [name for name, field in METRICS.items() if field not in launch]
        if lacking:
            raise CountersMissing(f"Nsight Compute gave no {lacking[0]} for launch {identity}")
    return [Launch(**launch) for launch in found.values()]


def count(case: Case, implementation: str, which: str) -> list[Launch]:
    """Run one pass of `case` under ncu in a process of its own. Raises CountersMissing where that does not work."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise CountersMissing("Nsight Compute (ncu) is not installed")
    command = [ncu, "--csv", "--clock-control", "none", "--profile-from-start", "off", "--metrics", ",".join(METRICS)]
    command += [sys.executable, "-m", "depthlab.kernels.bench.one_launch", *launch_arguments(case, implementation)]
    try:
        done = subprocess.run([*command, "--pass", which], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise CountersMissing(f"Nsight Compute took over {_TIMEOUT_S} s") from None
    return parse(done.stdout + done.stderr)


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
    reads, writes = sum(x.read_bytes for x in launches), sum(x.write_bytes for x in launches)
    return {
        f"{which}_reads_nC": reads / unit,
        f"{which}_writes_nC": writes / unit,
        f"{which}_bytes_per_token": (reads + writes) / case.tokens,
        f"{which}_kernels": float(len(launches)),
        f"{which}_kernel_us": sum(x.time_ns for x in launches) / 1e3,
    }


def _number(value: str, unit: str) -> float:
    scale = _SCALE.get(unit.strip().lower())
    if scale is None:
        raise CountersMissing(f"Nsight Compute gave the unit {unit!r}, which is neither bytes nor seconds")
    return float(value.replace(",", "")) * scale
