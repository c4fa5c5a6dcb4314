"""What runs on the GPU in one pass, fused and eager: the record kernels-mgr-profile.

    trace/<case>/<implementation>      torch.profiler: one metric a kernel in order, "012/<name>", its time in us;
                                       "launches", "kernel_us", "span_us" (first start to last end), and the curve
                                       "start_us"
    counters/<case>/<implementation>   Nsight Compute: bytes that crossed the memory's pins (`counters.summarize`)
    model/<case>                       the same metrics as this project's byte model and the paper count them
    warps/<case>/triton                Nsight Compute: what warps do with their time (`counters.warps`)

Both passes are forward and backward; the sizes are such that the L2 cannot hide bytes from the counters.
"""

import math
import re
from dataclasses import asdict
from typing import Any

import torch

from depthlab.kernels.bench import gate, needs
from depthlab.kernels.bench.cases import Case
from depthlab.kernels.bench.counters import STATES, WARPS, CountersMissing, count, summarize, warps
from depthlab.kernels.bench.subjects import subject
from depthlab.kernels.bench.traffic import paper_forward, traffic
from depthlab.runs import Cell, Curve, Experiment, Result

TRACED = Case("mix", "bf16", 32768, 4, 1024, "competitive")
COUNTED = [Case("mix", "bf16", 131072, n, 1024, "competitive") for n in (4, 8)]
_SHAPES = ((4, 1024), (4, 1280), (4, 2048), (8, 768), (8, 1024), (8, 1280), (8, 2048))
WATCHED = [Case("mix", "bf16", 32768, *shape, "competitive") for shape in _SHAPES]
_PASSES = ("forward", "backward")
_LONGEST_NAME = 80
_MOST_KERNELS = 200
_FUNCTOR = r"\b\w*(?:[Ff]unctor\w*|_kernel_cuda|_kernel_impl|Ops)\b"
_WRAPPERS = ("BinaryFunctor", "AUnaryFunctor", "BUnaryFunctor")


def profile() -> Experiment:
    """Traces and counters of the fused kernels and eager torch; one run each: bytes do not vary."""
    cells = [Cell(f"trace/{name}", {"case": asdict(TRACED), "implementation": name}) for name in ("eager", "triton")]
    for case in COUNTED:
        cells.append(Cell(f"model/{case.name}", {"case": asdict(case), "model": True}))
        names = ("eager", "triton") if case.n_streams == 4 else ("triton",)
        cells += [
            Cell(f"counters/{case.name}/{name}", {"case": asdict(case), "implementation": name, "counters": True})
            for name in names
        ]
    cells += [
        Cell(f"warps/{case.name}/triton", {"case": asdict(case), "implementation": "triton", "warps": True})
        for case in WATCHED
    ]
    return Experiment("kernels-mgr-profile", ("MGR-9",), {"device": "cuda", "normalize": True}, cells, run_cell)


def run_cell(cell: Cell, config: dict[str, Any]) -> list[Result]:
    """One trace, one set of counters, or the model's numbers beside them."""
    case, device = Case(**cell.settings["case"]), torch.device(config["device"])
    if "model" in cell.settings:
        return [Result(cell.name, 0, model(case))]
    if device.type == "cuda":
        needs.require()
    if cell.settings["implementation"] == "triton":
        gate.require(case, device)
    if "warps" in cell.settings:
        return [_watched(cell.name, case)]
    if "counters" in cell.settings:
        return [_counted(cell.name, case, cell.settings["implementation"])]
    kernels = trace(case, cell.settings["implementation"], device)
    return [traced(cell.name, kernels)]


def model(case: Case) -> dict[str, float]:
    """Reads and writes of one pass in units of n C a token: by our model, and the forward as the paper counts it."""
    metrics = {}
    for which in _PASSES:
        moved = traffic(case.op, which, case.n_streams)
        metrics[f"{which}_reads_nC"] = moved.reads / case.n_streams
        metrics[f"{which}_writes_nC"] = moved.writes / case.n_streams
        metrics[f"{which}_bytes_per_token"] = case.bytes(which) / case.tokens
    paper = paper_forward(case.n_streams)
    metrics["paper_forward_reads_nC"] = paper.reads / case.n_streams
    metrics["paper_forward_writes_nC"] = paper.writes / case.n_streams
    return metrics


def trace(case: Case, implementation: str, device: torch.device) -> list[tuple[str, float, float]]:
    """(name, start in us, duration in us) of every kernel of one forward and backward, in order, once warm."""
    from torch.profiler import ProfilerActivity, profile

    chosen = subject(case, implementation)
    generator = torch.Generator(device).manual_seed(0)
    drawn = chosen.inputs(generator)
    upstream = [torch.randn_like(y) for y in chosen.step(*drawn)[: chosen.graded]]

    def step() -> None:
        torch.autograd.grad(chosen.step(*drawn)[: chosen.graded], drawn, upstream)

    for _ in range(3):
        step()
    gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as seen:
        step()
        if gpu:
            torch.cuda.synchronize(device)
    wanted = torch.autograd.DeviceType.CUDA if gpu else torch.autograd.DeviceType.CPU
    events = [e for e in seen.events() if e.device_type == wanted]
    kernels = sorted((e.time_range.start, e.name, e.time_range.elapsed_us()) for e in events)
    return [(name, start - kernels[0][0], duration) for start, name, duration in kernels]


def traced(variant: str, kernels: list[tuple[str, float, float]]) -> Result:
    """The trace as a Result. ValueError for none, or more than a record's curve holds."""
    if not 1 <= len(kernels) <= _MOST_KERNELS:
        raise ValueError(f"The trace of {variant} has {len(kernels)} kernels; a record holds 1 to {_MOST_KERNELS}.")
    starts = [start for _, start, _ in kernels]
    metrics = {
        "launches": float(len(kernels)),
        "kernel_us": sum(duration for _, _, duration in kernels),
        "span_us": max(start + duration for _, start, duration in kernels),
    }
    metrics |= {f"{i:03d}/{plain_name(name)}": duration for i, (name, _, duration) in enumerate(kernels)}
    return Result(variant, 0, metrics, {"start_us": Curve([float(i) for i in range(len(starts))], starts)})


def plain_name(kernel: str) -> str:
    """A kernel's name without template arguments and namespaces, in a metric name's letters.

    torch's elementwise and reduce kernels are all called alike; what they compute is the functor in the arguments.
    """
    base, _, arguments = kernel.partition("<")
    base = re.sub(r"\(.*", "", base).replace("void ", "").rpartition("::")[2]
    found = [w for w in re.findall(_FUNCTOR, arguments) if w not in _WRAPPERS]
    name = f"{base}-{found[0]}" if found else base
    return re.sub(r"[^A-Za-z0-9_,=+@-]+", "_", name).strip("_")[:_LONGEST_NAME] or "kernel"


def _counted(variant: str, case: Case, implementation: str) -> Result:
    try:
        metrics: dict[str, float] = {}
        for which in _PASSES:
            metrics |= summarize(count(case, implementation, which), case, which)
        return Result(variant, 0, metrics)
    except CountersMissing as error:
        names = [name for which in _PASSES for name in summarize([], case, which)]
        return Result(variant, 0, dict.fromkeys(names, math.nan), diverged=str(error))


def _watched(variant: str, case: Case) -> Result:
    try:
        return Result(variant, 0, warps(count(case, "triton", "both", WARPS), case))
    except CountersMissing as error:
        kinds = (*STATES, "resident", "issued", "instructions", "spilling")
        names = [f"{which}_{kind}" for which in _PASSES for kind in kinds]
        return Result(variant, 0, dict.fromkeys(names, math.nan), diverged=str(error))
