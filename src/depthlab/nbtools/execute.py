"""Execute notebooks top to bottom in fresh kernels, and compare their outputs with the committed ones (nbval)."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from depthlab.nbtools.document import Cell, Notebook, code_cells, find, normalise, printed, read, write
from depthlab.nbtools.headers import cannot_run

CELL_TIMEOUT = 120.0  # seconds
SANITIZE = "nbval.cfg"  # beside the notebooks
# The same kernel for everybody: one thread unless the reader asks for more, threads that sleep while they wait (two
# spinning on a busy core took twice the time), and no progress bars in outputs.
KERNEL_ENV = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TQDM_DISABLE": "1", "CI": "1"}

# VmHWM is the kernel's own peak; getrusage, for systems without /proc, starts from the peak of the parent process.
_PEAK_MEMORY = """
try:
    with open("/proc/self/status") as status:
        print(next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM")))
except OSError:
    import resource, sys
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
"""


class Outcome(NamedTuple):
    """One execution: the normalised notebook, what went wrong (None when nothing), and what it cost."""

    notebook: Notebook
    problem: str | None
    seconds: float
    checks: int
    peak_bytes: int | None


def run(
    paths: Sequence[str | Path] | None = None,
    in_place: bool = False,
    out_dir: str | Path = "build/notebooks",
    cell_timeout: float = CELL_TIMEOUT,
) -> int:
    """Execute each notebook in a fresh kernel whose working directory is the notebook's folder; 0 when all is well.

    One line a notebook: name, seconds, checks passed, peak memory; then the total. A failing check, a dead kernel or a
    cell that takes over `cell_timeout` seconds is named in one line and the other notebooks still run. One that needs
    triton where there is none is left out, and a line says so.

    Args:
        paths: notebooks; None means all numbered ones in ``notebooks/``.
        in_place: write results over the notebooks themselves, and only when nothing went wrong. Otherwise executed
            copies go to `out_dir`, the failing ones included, with the traceback to look at.
    """
    chosen = _runnable(_chosen(paths))
    started, failures, checks = time.perf_counter(), 0, 0
    for path in chosen:
        if sys.stdout.isatty():
            print(f"running {path.name}", end="\r", flush=True)  # the outcome's line overwrites it
        outcome = execute(path, cell_timeout)
        checks += outcome.checks
        if outcome.problem:
            failures += 1
            print(f"FAILED  {outcome.problem}", flush=True)
        else:
            peak = f"{outcome.peak_bytes / 1e9:.1f} GB" if outcome.peak_bytes else "memory unknown"
            line = f"ok      {path.name:<36} {outcome.seconds:6.1f} s  {outcome.checks:3d} checks passed  {peak}"
            print(line, flush=True)
        if in_place and not outcome.problem:
            write(outcome.notebook, path)
        elif not in_place:
            write(outcome.notebook, Path(out_dir) / path.name)
    total = time.perf_counter() - started
    print(f"{len(chosen) - failures} of {len(chosen)} notebooks ran to the end, {checks} checks passed, {total:.1f} s")
    return 1 if failures else 0


def execute(path: str | Path, cell_timeout: float = CELL_TIMEOUT) -> Outcome:
    """Execute one notebook; nothing is written. A problem is one line with the notebook and the cell."""
    try:
        import nbformat
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    except ImportError:
        raise RuntimeError("Running notebooks needs nbclient; run: pip install 'depthlab[notebooks]'.") from None

    path = Path(path)
    notebook = normalise(read(path))
    for cell in code_cells(notebook):
        cell["execution_count"], cell["outputs"] = None, []
    node = nbformat.from_dict(notebook)
    client = NotebookClient(
        node,
        kernel_name="python3",
        timeout=cell_timeout,
        record_timing=False,
        shutdown_kernel="immediate",
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.create_kernel_manager()
    client.km.kernel_spec_manager = _this_python()
    started, where, problem, peak = time.perf_counter(), "before the first cell", None, None
    try:
        with client.setup_kernel(env={**KERNEL_ENV, **os.environ}, stderr=subprocess.DEVNULL):
            for index, cell in enumerate(node.cells):
                where = f"cell {cell.id}"
                client.execute_cell(cell, index)
            where = "after the last cell"
            peak = _peak_memory(client, len(node.cells))
    except CellExecutionError as error:
        problem = _in_one_line(f"{error.ename}: {error.evalue}")
    except CellTimeoutError:
        problem = f"took over {cell_timeout:g} s and was stopped"
    except (DeadKernelError, RuntimeError) as error:  # a kernel that dies early raises a plain RuntimeError
        problem = f"the kernel died ({_in_one_line(str(error))})"
    seconds = time.perf_counter() - started
    done = normalise(node)
    if problem is None and (noisy := _writes_to_stderr(done)):
        where, problem = f"cell {noisy['id']}", f"writes to stderr: {_in_one_line(_stderr(noisy))}"
    checks = sum(line.startswith("PASS  ") for cell in code_cells(done) for line in printed(cell).splitlines())
    return Outcome(done, problem and f"{path.name}, {where}: {problem}", seconds, checks, peak)


def check(paths: Sequence[str | Path] | None = None, cell_timeout: float = CELL_TIMEOUT) -> int:
    """Hold notebooks against the policy, then re-run them under strict nbval; 0 when both are satisfied.

    `paths` defaults to all numbered notebooks in ``notebooks/``. One with no code at all has nothing to re-run; one
    that needs triton where there is none is held against the policy only, and a line says so.
    """
    from depthlab.nbtools.policy import problems

    chosen = _chosen(paths)
    found = [problem for path in chosen for problem in problems(path)]
    for problem in found:
        print(problem)
    runnable = [path for path in _runnable(chosen) if code_cells(read(path))]
    if not runnable:
        return 1 if found else 0
    command = [sys.executable, "-m", "pytest", *nbval_flags(runnable[0].parent, cell_timeout), *map(str, runnable)]
    environment = {**KERNEL_ENV, **os.environ}
    failed, started = compare(command, environment)
    if failed and not started:  # two kernels that start at one moment can pick the same port: no fault of a notebook
        print("A kernel did not start; comparing once more.", flush=True)
        failed, _ = compare(command, environment)
    return 1 if found else failed


def compare(command: Sequence[str], environment: dict[str, str]) -> tuple[int, bool]:
    """Run pytest and show what it prints: its exit code, and whether every kernel started."""
    started = True
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with subprocess.Popen(command, env=environment, **pipe) as running:
        for line in running.stdout:
            print(line, end="", flush=True)
            started = started and "Kernel didn't respond in" not in line
    return running.returncode, started


def nbval_flags(folder: str | Path, cell_timeout: float = CELL_TIMEOUT) -> list[str]:
    """The strict comparison, as `make test` runs it: every untagged cell must print what is committed."""
    flags = ["-q", "-p", "no:cacheprovider", "--nbval", "--nbval-current-env", f"--nbval-cell-timeout={cell_timeout:g}"]
    if (rules := Path(folder) / SANITIZE).exists():
        flags.append(f"--nbval-sanitize-with={rules}")
    return [*flags, "-n", "2", "--dist", "loadscope"]


def _chosen(paths: Sequence[str | Path] | None) -> list[Path]:
    chosen = find() if paths is None else [Path(path) for path in paths]
    if not chosen:
        raise ValueError("No notebook was given and this installation holds none; give paths, or work in a checkout.")
    return chosen


def _runnable(paths: Sequence[Path]) -> list[Path]:
    """Those that can run here; a line says why each of the others cannot."""
    why = {path: cannot_run(path) for path in paths if path.exists()}
    for sentence in filter(None, why.values()):
        print(f"skipped {sentence}", flush=True)
    return [path for path in paths if not why.get(path)]


def _this_python():
    """Find "python3" as the interpreter that runs this, whatever kernel of that name a user has installed."""
    from ipykernel.kernelspec import RESOURCES, get_kernel_dict
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager

    class ThisPython(KernelSpecManager):
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            return KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())

    return ThisPython()


def _peak_memory(client, index: int) -> int | None:
    import nbformat

    cell = nbformat.v4.new_code_cell(_PEAK_MEMORY)
    client.nb.cells.append(cell)  # nbclient looks the cell up by its index
    try:
        client.execute_cell(cell, index, store_history=False)
        return int(printed(cell))
    except Exception:  # the measurement is a courtesy; it never fails a notebook
        return None
    finally:
        client.nb.cells.pop()


def _writes_to_stderr(notebook: Notebook) -> Cell | None:
    return next((cell for cell in code_cells(notebook) if _stderr(cell)), None)


def _stderr(cell: Cell) -> str:
    return "".join(output["text"] for output in cell["outputs"] if output.get("name") == "stderr")


def _in_one_line(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;]*m", "", text)).strip()
