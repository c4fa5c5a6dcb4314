"""The benchmarks of the MGR kernels as records: `depthlab bench mgr`, or `depthlab runs make kernels-mgr-bench`.

Variants are "<case>/<implementation>", for example "mix/competitive/bf16/T=32768,n=4,C=1024/triton", and "machine".
Seeds are repetitions of the whole timing with fresh inputs. The metrics of a row are those of `measure.measure`;
`reading.rows` has the ratios.
"""

from dataclasses import asdict
from typing import Any

import torch

from depthlab.kernels.bench import gate, needs, timing
from depthlab.kernels.bench.cases import Case, inverting_table, quick_table, table
from depthlab.kernels.bench.measure import measure, metric_names
from depthlab.kernels.bench.peers import PEERS, PeerMissing
from depthlab.kernels.bench.subjects import subject
from depthlab.kernels.bench.traffic import PASSES
from depthlab.runs import Cell, Experiment, Result, in_ci

REPETITIONS = 3
SAMPLES = 30
CLAIMS = ("MGR-9",)

Rows = list[tuple[Case, list[str]]]


def bench() -> Experiment:
    """The whole table, three times: the record kernels-mgr-bench."""
    return experiment("kernels-mgr-bench", table())


def inverting() -> Experiment:
    """What a layer costs that rebuilds its streams, beside one that keeps them: the record kernels-mgr-inverting."""
    return experiment("kernels-mgr-inverting", inverting_table(), claims=("MGR-10",))


def trial(quick: bool = False, only: str = "") -> Experiment:
    """A part of the table, for tuning: its record, kernels-mgr-trial, is nobody's evidence.

    `only`: keep the rows whose "<case>/<implementation>" holds this text. ValueError when none does.
    """
    rows = quick_table() if quick else table()
    rows = [(case, [i for i in names if only in f"{case.name}/{i}"]) for case, names in rows]
    rows = [(case, names) for case, names in rows if names]
    if not rows:
        raise ValueError(f"No row of the benchmark holds {only!r}; give a part of a name like '{_name(*table()[0])}'.")
    return experiment("kernels-mgr-trial", rows, repetitions=1 if quick else REPETITIONS)


def experiment(
    record_id: str,
    rows: Rows,
    device: str = "cuda",
    repetitions: int = REPETITIONS,
    claims: tuple[str, ...] = CLAIMS,
) -> Experiment:
    """The experiment that times `rows`; device "cpu" exists for tests of this code, its times say nothing."""
    config = {"device": device, "samples": SAMPLES, "normalize": True, "footprint_over_l2": timing.FOOTPRINT_L2}
    cells = []
    for seed in range(repetitions):
        cells.append(Cell(f"machine,seed={seed}", {"seed": seed}))
        for case, names in rows:
            cells.append(Cell(f"{case.name},seed={seed}", {**asdict(case), "implementations": names, "seed": seed}))
    return Experiment(record_id, claims, config, cells, run_cell)


def rows_of(made: Experiment) -> list[Case]:
    """The cases that an experiment's cells time with the fused kernels: what the gate has to pass."""
    return [_case(c.settings) for c in made.cells if "triton" in c.settings.get("implementations", [])]


def run_cell(cell: Cell, config: dict[str, Any]) -> list[Result]:
    """All implementations at one case, one after the other, so that their ratio is of one machine and one moment.

    Raises GateFailed where the fused kernels are wrong, BenchUnavailable without a GPU or triton.
    """
    device, seed = torch.device(config["device"]), cell.settings["seed"]
    if device.type == "cuda":
        needs.require()
    if "op" not in cell.settings:
        return [Result("machine", seed, _machine(device))]
    case, names = _case(cell.settings), cell.settings["implementations"]
    if "triton" in names:
        gate.require(case, device)
    copy_gbps = timing.copy_gbps(device, *_copy_size(device))
    results = [_row(case, name, copy_gbps, device, config["samples"], seed) for name in names]
    for result in results:
        _say(result)
    return results


def _row(case: Case, name: str, copy_gbps: float, device: torch.device, samples: int, seed: int) -> Result:
    try:
        metrics = measure(subject(case, name), case, copy_gbps, device, samples, seed)
        return Result(_name(case, [name]), seed, metrics)
    except PeerMissing as error:
        why = f"{error}"
    except torch.OutOfMemoryError:
        why = f"{name} ran out of the GPU's memory"
    except Exception as error:  # others' code may fail as it likes; ours may not
        if name not in PEERS:
            raise
        why = f"{name} failed here ({type(error).__name__})"
        print(f"{_name(case, [name])}: {error}", flush=True)
    return Result(_name(case, [name]), seed, dict.fromkeys(metric_names(device), float("nan")), diverged=why)


def _machine(device: torch.device) -> dict[str, float]:
    size = {} if device.type == "cuda" else {"size": 64}
    l2 = torch.cuda.get_device_properties(device).L2_cache_size / 2**20 if device.type == "cuda" else 0.0
    return {
        "copy_gbps": timing.copy_gbps(device, *_copy_size(device)),
        "float32_tflops": timing.float32_tflops(device, **size),
        "l2_mib": l2,
    }


def _copy_size(device: torch.device) -> list[int]:
    return [] if device.type == "cuda" else [2**16]


def _case(settings: dict[str, Any]) -> Case:
    return Case(**{k: v for k, v in settings.items() if k not in ("implementations", "seed")})


def _name(case: Case, implementations: list[str]) -> str:
    return f"{case.name}/{implementations[0]}"


def _say(result: Result) -> None:
    """One line a row as soon as it is measured."""
    if in_ci():
        return
    if result.diverged:
        print(f"{result.variant:<62} {result.diverged}", flush=True)
        return
    m = result.metrics
    shown = "  ".join(f"{w} {m[f'{w}_ms']:8.3f} ms {m[f'{w}_share']:5.2f}" for w in PASSES)
    how = "graph" if m["forward_graphed"] else "launched"
    print(f"{result.variant:<62} {shown}  {how}, launched {m['both_launched_ms']:.3f}", flush=True)
