"""The kernels' own tests on this machine, and what only a GPU can show: the record kernels-mgr-tests.

suite              pytest over tests/kernels: tests, passed, failed, errors, skipped, and passed/<file>
memcheck           compute-sanitizer over every operation and gate, small: its count of errors
racecheck          the same for hazards in shared memory
beyond-2^31        offsets past 2^31 elements: tokens at both ends and around the boundary against the reference
"""

import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from depthlab.kernels.bench import cases, needs
from depthlab.kernels.bench.cases import Case
from depthlab.kernels.bench.gate import difference
from depthlab.kernels.bench.subjects import subject
from depthlab.runs import Cell, Experiment, Record, Result

ID = "kernels-mgr-tests"
CHECKERS = {"memcheck": r"ERROR SUMMARY: (\d+) error", "racecheck": r"RACECHECK SUMMARY: (\d+) hazard"}
LARGE = Case("mix", "bf16", 2**31 // (4 * 1024) + 4096, 4, 1024, "competitive")
_SMALL = ["--op", "all", "--tokens", "37", "--streams", "3", "--width", "200"]
_TIMEOUT_S = 540
_WORKERS = 12  # on each GPU: most of the time goes to compiling, and one keeps up to 11 GiB of the GPU's memory


def tests() -> Experiment:
    """All of the above, once."""
    cells = [Cell(name, {"check": name}) for name in ("suite", *CHECKERS, "beyond-2^31")]
    return Experiment(ID, ("MGR-9",), {"device": "cuda"}, cells, run_cell)


def run_cell(cell: Cell, config: dict[str, Any]) -> list[Result]:
    """One of the checks; a failing test is a number here, and `failures` names it."""
    needs.require()
    check = cell.settings["check"]
    if check == "suite":
        return [Result("suite", 0, run_suite())]
    if check in CHECKERS:
        return [run_checker(check)]
    return [Result("beyond-2_31", 0, beyond(LARGE, torch.device(config["device"])))]


def failures(record: Record) -> list[str]:
    """What the record of this experiment holds against the kernels, a sentence each."""
    found = []
    for variant, metrics in (("suite", ("failed", "errors")), *((c, ("errors",)) for c in CHECKERS)):
        for metric in metrics:
            count = record.values(f"{variant}.{metric}")[0]
            if count > 0:  # NaN: the checker is not on this machine, as the record says
                found.append(f"{variant} counts {count:.0f} {metric}.")
    if record.values("suite.passed")[0] == 0:
        found.append("suite ran no test.")
    if record.values("beyond-2_31.faults")[0] > 0:
        found.append("past 2^31 elements the results are wrong.")
    return found


def run_suite() -> dict[str, float]:
    """pytest over tests/kernels/mgr in a process of its own, as counts; its output is shown.

    Raises FileNotFoundError where there is no checkout, RuntimeError when pytest could not run.
    """
    root = Path(str(files("depthlab.bundles"))).resolve().parent
    if not (root / "tests" / "kernels" / "mgr").is_dir():
        raise FileNotFoundError("The kernels' tests are not here; run the benchmark in a checkout of the project.")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", f"--junitxml={report}", "tests/kernels/mgr"]
        workers = _WORKERS * torch.cuda.device_count()
        command += ["-n", str(workers)] if importlib.util.find_spec("xdist") else []
        done = subprocess.run(command, cwd=root, env=environment, timeout=_TIMEOUT_S)
        if not report.is_file():
            raise RuntimeError(f"pytest ended with code {done.returncode} and no report")
        return counts(report.read_text(encoding="utf-8"))


def counts(junit: str) -> dict[str, float]:
    """Outcomes in a junit report: tests, passed, failed, errors, skipped, and passed/<file> for each test file."""
    outcomes = {"failure": "failed", "error": "errors", "skipped": "skipped"}
    metrics = dict.fromkeys(("tests", "passed", *outcomes.values()), 0.0)
    for case in ElementTree.fromstring(junit).iter("testcase"):
        outcome = next((outcomes[child.tag] for child in case if child.tag in outcomes), "passed")
        metrics["tests"] += 1
        metrics[outcome] += 1
        file = next((part for part in case.get("classname", "").split(".") if part.startswith("test_")), "unknown")
        metrics.setdefault(f"passed/{file}", 0.0)
        metrics[f"passed/{file}"] += outcome == "passed"
    return metrics


def run_checker(tool: str) -> Result:
    """compute-sanitizer over every operation and gate at a small odd shape: the errors (or hazards) it counts."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return _unchecked(tool, "compute-sanitizer is not installed")
    # Without torch's pool every tensor is an allocation of its own, whose end the checker knows.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, "--tool", tool, *(["--report-api-errors", "no"] if tool == "memcheck" else [])]
    command += [sys.executable, "-m", "depthlab.kernels.bench.one_launch", *_SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment)
    text = done.stdout + done.stderr
    launched = len(re.findall("^launched ", text, re.MULTILINE))
    errors = checker_errors(tool, text)
    if errors is None or launched == 0:
        last = text.strip().splitlines()[-1:] or ["no output"]
        return _unchecked(tool, f"{tool} could not run ({re.sub(r'[^ ]*/[^ ]*', '...', last[0])[:120]})")
    if errors:
        print(text, flush=True)
    return Result(tool, 0, {"errors": float(errors), "cases": float(launched)})


def _unchecked(tool: str, why: str) -> Result:
    return Result(tool, 0, {"errors": math.nan, "cases": 0.0}, diverged=why)


def checker_errors(tool: str, text: str) -> int | None:
    """The count in compute-sanitizer's summary line; None when there is none."""
    found = re.search(CHECKERS[tool], text)
    return int(found[1]) if found else None


def beyond(case: Case, device: torch.device, edge: int = 32) -> dict[str, float]:
    """Forward and backward where offsets pass 2^31 elements: faults among tokens at both ends and at the boundary.

    The upstream gradient is zero but at those tokens, so that the weights' gradients are theirs alone and all other
    gradients must be zero.
    """
    chosen = subject(case, "triton")
    boundary = min(2**31 // (case.n_streams * case.width), case.tokens - edge)
    looked_at = sorted(
        {*range(edge), *range(boundary - edge, boundary + edge), *range(case.tokens - edge, case.tokens)}
    )
    index = torch.tensor(looked_at, device=device)
    generator = torch.Generator(device).manual_seed(0)
    drawn = chosen.inputs(generator)
    outputs = chosen.step(*drawn)[: chosen.graded]
    some = [torch.randn(len(index), *y.shape[1:], generator=generator, dtype=y.dtype, device=device) for y in outputs]
    upstream = [torch.zeros_like(y).index_copy_(0, index, g) for y, g in zip(outputs, some, strict=True)]
    gradients = torch.autograd.grad(outputs, drawn, upstream)
    wide = [(x.detach()[index] if i < 2 else x.detach()).double().requires_grad_() for i, x in enumerate(drawn)]
    true = cases.reference_step(case)(*wide)[: chosen.graded]
    true_gradients = torch.autograd.grad(true, wide, [g.double() for g in some])
    pairs = [(y[index], t) for y, t in zip(outputs, true, strict=True)]
    pairs += [(g[index] if i < 2 else g, t) for i, (g, t) in enumerate(zip(gradients, true_gradients, strict=True))]
    found = [fault for i, (got, t) in enumerate(pairs) if (fault := difference(f"result {i}", got, t))]
    for name, gradient in zip(("streams", "update"), gradients, strict=False):
        elsewhere = int((gradient != 0).flatten(1).any(1).sum()) - int((gradient[index] != 0).flatten(1).any(1).sum())
        found += [f"{elsewhere} tokens of the gradient of {name} are not zero"] if elsewhere else []
    for fault in found:
        print(f"{case.name}: {fault}", flush=True)
    elements = case.tokens * case.n_streams * case.width
    return {"faults": float(len(found)), "elements": float(elements), "checked_tokens": float(len(looked_at))}
