"""`make`: run an experiment cell by cell, keep every finished cell, write one record.

Layout of the work folder: WORK/<experiment>/<hash of the shared config>/<cell>.json. A cell file appears whole or not
at all (temporary file, fsync, rename), so a run can be killed at any moment and goes on where it was. Once the record
is written the cell files are deleted: making a record again really runs it again.
"""

import contextlib
import hashlib
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from depthlab.runs import worker
from depthlab.runs.experiment import Cell, Experiment
from depthlab.runs.merge import merge
from depthlab.runs.progress import Progress
from depthlab.runs.provenance import provenance
from depthlab.runs.record import Record, config_hash, faults
from depthlab.runs.worker import RunError, write_atomic


def make(
    experiment: Experiment,
    work_dir: str | Path = "build/runs",
    out_dir: str | Path = "data/results",
    processes: int = 1,
) -> Record:
    """Run the cells that are not finished yet and write OUT/<id>.json; the same record whether interrupted or not.

    Each cell runs with one torch thread. Prints a line when kept cells are used or refused, and, once the whole takes
    over 10 s and CI is not set, one line a finished cell. Ctrl-C keeps what is finished and says how to go on.

    Args:
        processes: 1 runs here; more starts that many fresh ("spawn") processes.

    Raises:
        RunError: a cell failed, a worker died, another runner holds the work folder, or a folder cannot be written.
        ValueError: processes < 1. Finished cells survive all of these.
    """
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise ValueError(f"make got processes={processes!r}; give a whole number from 1 on.")
    out = Path(out_dir) / f"{experiment.id}.json"
    home = Path(work_dir) / experiment.id
    folder = home / config_hash(experiment.config)[:16]
    for place in (folder, out.parent):
        _need_writable(place)
    with only_runner(home / "lock"), worker.one_thread():
        origin = provenance()
        _mention_other_configs(home, folder)
        finished = _finished(experiment, folder, origin)
        todo = [cell for cell in experiment.cells if cell.name not in finished]
        progress = Progress(experiment.id, done=len(finished), total=len(experiment.cells))
        try:
            with progress, contextlib.closing(_run(experiment, todo, folder, origin, processes)) as running:
                for cell in running:
                    finished[cell.name] = worker.read_cell(_cell_path(folder, cell), experiment, cell)
                    progress.finished(cell.name, finished[cell.name]["seconds"])
        except KeyboardInterrupt:
            print(
                f"{experiment.id}: interrupted; {progress.done} of {progress.total} cells are finished and kept in "
                f"{home}. Run the same command again to go on."
            )
            raise
        cells = [finished[cell.name] for cell in experiment.cells]
        record = _assemble(experiment, cells, origin)
        write_atomic(out, record.to_json())
        shutil.rmtree(folder, ignore_errors=True)
        for torn in out.parent.glob(f".{out.name}.*.tmp"):  # of runs that were killed while they wrote the record
            torn.unlink(missing_ok=True)
    return record


def _assemble(experiment: Experiment, cells: list[dict[str, Any]], origin: dict[str, Any]) -> Record:
    same_code = all(c["commit"] == origin["commit"] and c["clean"] for c in cells)
    data = {
        "id": experiment.id,
        "claims": list(experiment.claims),
        "command": f"depthlab runs make {experiment.id}",
        "config": experiment.full_config,
        "config_hash": experiment.config_hash,
        **origin,
        "clean": origin["clean"] and same_code,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "wall_time_s": round(sum(c["seconds"] for c in cells), 3),
        **merge([result for c in cells for result in c["results"]]),
    }
    found = faults(data)
    if found:
        raise RunError(f"Experiment {experiment.id} gives no valid record: {found[0]}")
    return Record(**data)


def _finished(experiment: Experiment, folder: Path, origin: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Cells already on disk that belong to this experiment; says what it does with those that do not."""
    kept: dict[str, dict[str, Any]] = {}
    others = 0
    for cell in experiment.cells:
        path = _cell_path(folder, cell)
        if not path.exists():
            continue
        try:
            data = worker.read_cell(path, experiment, cell)
        except ValueError as error:
            print(f"{experiment.id}: the file of cell {cell.name} is damaged ({error}); it is computed again.")
            continue
        if worker.machine(data) != worker.machine(origin):
            print(f"{experiment.id}: cell {cell.name} is from another machine or other versions; it is computed again.")
            continue
        others += data["commit"] != origin["commit"]
        kept[cell.name] = data
    if kept:
        note = f" ({others} of them by another commit, so the record is marked clean: false)" if others else ""
        print(f"{experiment.id}: {len(kept)} of {len(experiment.cells)} cells were finished before{note}.")
    return kept


def _run(
    experiment: Experiment, todo: list[Cell], folder: Path, origin: dict[str, Any], processes: int
) -> Iterator[Cell]:
    """Yield each cell as soon as its file is written."""
    jobs = [(experiment, cell, str(_cell_path(folder, cell)), origin) for cell in todo]
    if processes == 1 or len(jobs) <= 1:
        for job in jobs:
            worker.run_cell(*job)
            yield job[1]
    else:
        yield from _run_in_workers(jobs, min(processes, len(jobs)))


def _run_in_workers(jobs: list[tuple], processes: int) -> Iterator[Cell]:
    import multiprocessing

    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")  # fork copies locks and CUDA contexts in an unknown state
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=worker.start_worker)
    futures: dict[Future, Cell] = {}
    try:
        with worker.children_inherit():  # the first submit starts all of them
            futures = {pool.submit(worker.run_cell, *job): job[1] for job in jobs}
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
                yield futures[future]
    except BrokenProcessPool:
        raise RunError(
            "A worker process died (often: out of memory); finished cells are kept. Run the same command again to go "
            "on, perhaps with fewer processes."
        ) from None
    except BaseException:
        # Without this, leaving would wait for the cells in progress, which Ctrl-C means to end.
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _cell_path(folder: Path, cell: Cell) -> Path:
    """Readable, safe on every file system, and different for different settings."""
    digest = hashlib.sha256(f"{cell.name}\n{config_hash(cell.settings)}".encode()).hexdigest()[:12]
    return folder / f"{re.sub(r'[^A-Za-z0-9=.-]+', '_', cell.name)[:60].lstrip('.')}-{digest}.json"


def _mention_other_configs(home: Path, folder: Path) -> None:
    for other in sorted(p for p in home.iterdir() if p.is_dir() and p != folder):
        count = len(list(other.glob("*.json")))
        if count:
            print(f"{home.name}: {count} finished cells in {other} belong to another config; they are not used.")


def _need_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RunError(f"Cannot write in {folder} ({error.strerror}); give another folder.") from None


@contextlib.contextmanager
def only_runner(path: Path) -> Iterator[None]:
    """Hold `path` as a lock that the system frees when this process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # Windows: two runners would only do the work twice, since files appear whole
        yield
        return
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"Another run of {path.parent.name} works in {path.parent}; wait for it or give another work folder."
            ) from None
        except OSError:  # a file system without locks: as on Windows
            pass
        yield
