"""Where a number comes from: commit, hardware, versions. Never a host name or a path."""

import contextlib
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

# What can change a number. Records and notebooks may be edited while an experiment runs; they do not make it unclean.
_SOURCES = ("src", "kernels", "data/mnist", "data/text", "data/__init__.py", "pyproject.toml")


def provenance() -> dict[str, Any]:
    """{commit, clean, hardware, versions} of this process, ready for a record.

    commit and clean come from DEPTHLAB_COMMIT and DEPTHLAB_CLEAN when the first is set (for a copy without git), else
    from git; "unknown" and False when neither knows. `clean` means that no file that can change a number (the package,
    the kernels, the bundled inputs) differs from the commit.

    Raises:
        ValueError: DEPTHLAB_COMMIT is not 40 hex digits, or DEPTHLAB_CLEAN is neither 0 nor 1.
    """
    commit, clean = _commit()
    return {"commit": commit, "clean": clean, "hardware": hardware(), "versions": versions()}


def hardware() -> dict[str, Any]:
    """CPU model, logical cores this process may use, torch threads; GPU names and driver where CUDA works."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, Any] = {"cpu": _cpu_model(), "cores": cores, "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        drivers = _run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).splitlines()
        found["driver"] = drivers[0] if drivers else "unknown"
    return found


def versions() -> dict[str, str]:
    """Versions of Python, depthlab, torch (with its CUDA), NumPy, and triton where installed."""
    import numpy
    import torch

    from depthlab import __version__

    found = {
        "python": platform.python_version(),
        "depthlab": __version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
    }
    if torch.version.cuda and torch.cuda.is_available():
        found["cuda"] = torch.version.cuda
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["triton"] = metadata.version("triton")
    return found


def _commit() -> tuple[str, bool]:
    given = os.environ.get("DEPTHLAB_COMMIT", "").strip()
    if given:
        clean = os.environ.get("DEPTHLAB_CLEAN", "0").strip()
        if not re.fullmatch("[0-9a-f]{40}", given):
            raise ValueError(f"DEPTHLAB_COMMIT is {given!r}; give the 40 hex digits of `git rev-parse HEAD`.")
        if clean not in ("0", "1"):
            raise ValueError(f"DEPTHLAB_CLEAN is {clean!r}; give 1 if no source file differs from the commit, else 0.")
        return given, clean == "1"
    here = Path(__file__).resolve()
    # An installed copy can lie inside somebody else's repository: only one that tracks this very file is ours.
    root = _git(here.parent, "rev-parse", "--show-toplevel")
    if not root or not _git(root, "ls-files", "--", str(here)):
        return "unknown", False
    commit = _git(root, "rev-parse", "HEAD")
    if not re.fullmatch("[0-9a-f]{40}", commit):
        return "unknown", False
    changed = _git(root, "status", "--porcelain", "--untracked-files=all", "--", *_SOURCES, failed="?")
    return commit, not changed


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.lower().startswith(("model name", "hardware"))]
    return next((n for n in names if n), "") or platform.processor() or platform.machine() or "unknown"


def _git(folder: Path | str, *arguments: str, failed: str = "") -> str:
    # Optional locks would make a git command that somebody runs at the same moment fail.
    return _run(["git", "--no-optional-locks", "-C", str(folder), *arguments], failed)


def _run(command: list[str], failed: str = "") -> str:
    try:
        done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError):
        return failed
    return os.fsdecode(done.stdout).strip() if done.returncode == 0 else failed  # a path, whatever the locale
