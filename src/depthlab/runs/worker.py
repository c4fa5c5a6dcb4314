"""One cell: run it, write it whole, read it back. This is what a worker process executes."""

import contextlib
import hashlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from depthlab.runs.experiment import Cell, Curve, Experiment, Result
from depthlab.runs.record import canonical_json, config_hash, parse_json
from depthlab.runs.seeds import seed_everything

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class RunError(RuntimeError):
    """A run could not go on; the message says what is kept and what to do."""


def run_cell(experiment: Experiment, cell: Cell, path: str, origin: dict[str, Any]) -> None:
    """Run `cell` and write its file at once. RunError names the cell and what went wrong inside it."""
    seed_everything(int(config_hash(cell.settings)[:8], 16))  # so that no cell depends on what ran before it
    start = time.monotonic()
    try:
        own = Cell(cell.name, json.loads(canonical_json(cell.settings)))  # copies, since a cell may change what it gets
        results = experiment.run_cell(own, json.loads(canonical_json(experiment.config)))
        if not isinstance(results, list | tuple) or not all(isinstance(r, Result) for r in results) or not results:
            raise TypeError(f"run_cell gave {type(results).__name__}; give a list of Result with at least one entry")
    except Exception as error:
        raise RunError(
            f"Cell {cell.name} of {experiment.id} failed ({type(error).__name__}: {str(error).rstrip('.')}); finished "
            f"cells are kept, so mend it and run the same command again."
        ) from error
    data = {
        "name": cell.name,
        "settings": cell.settings,
        "config_hash": config_hash(experiment.config),
        "seconds": time.monotonic() - start,
        **origin,
        "results": [_to_json(result) for result in results],
    }
    stored = {"sha256": _digest(canonical_json(data)), "cell": data}
    try:
        write_atomic(
            Path(path), json.dumps(stored, allow_nan=False)
        )  # unsorted: metrics keep the order they were given
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"Cell {cell.name} of {experiment.id} cannot be written ({reason}); free the disk.") from None


def read_cell(path: Path, experiment: Experiment, cell: Cell) -> dict[str, Any]:
    """A finished cell's file, with `results` as Result objects. ValueError says how the file is damaged."""
    try:
        stored = parse_json(path.read_text(encoding="utf-8"))
        data = stored["cell"]
        if stored["sha256"] != _digest(canonical_json(data)):
            raise ValueError("its checksum is wrong")
        expected = (cell.name, config_hash(cell.settings), config_hash(experiment.config))
        if (data["name"], config_hash(data["settings"]), data["config_hash"]) != expected:
            raise ValueError("it belongs to another cell")
        return {**data, "results": [_from_json(result) for result in data["results"]]}
    except (KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def machine(data: dict[str, Any]) -> dict[str, Any]:
    """What must agree between the cells of one record: processor, GPUs and versions."""
    return {"cpu": data["hardware"]["cpu"], "gpus": data["hardware"].get("gpus"), **data["versions"]}


def write_atomic(path: Path, text: str) -> None:
    """Write `text` so that `path` holds the old content or all of the new, also when killed or powered off midway."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if hasattr(os, "O_DIRECTORY"):  # the rename itself must reach the disk too
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def start_worker() -> None:
    """Set up a worker process: one thread, no Ctrl-C of its own, and no life beyond its parent's."""
    import multiprocessing

    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def leave_with_parent() -> None:
        parent.join()
        os._exit(1)

    if parent is not None:
        threading.Thread(target=leave_with_parent, daemon=True).start()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread inside: sums then come out the same however many processes share the work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def children_inherit() -> Iterator[None]:
    """Processes started inside find one thread for OpenMP and BLAS in their environment, and ignore Ctrl-C."""
    before = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    main = threading.current_thread() is threading.main_thread()  # only there may signals be set
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGINT, handler)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _to_json(result: Result) -> dict[str, Any]:
    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: finite(v) for k, v in value.items()}
        if isinstance(value, list):
            return [finite(v) for v in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return finite(asdict(result))


def _from_json(data: dict[str, Any]) -> Result:
    def number(value: float | None) -> float:
        return math.nan if value is None else value

    curves = {name: Curve(c["x"], [number(v) for v in c["y"]]) for name, c in data["curves"].items()}
    metrics = {name: number(v) for name, v in data["metrics"].items()}
    return Result(data["variant"], data["seed"], metrics, curves, data["diverged"])
