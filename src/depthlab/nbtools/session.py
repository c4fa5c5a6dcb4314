"""`start`: the one line of set-up that a notebook needs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import TYPE_CHECKING, NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import depthlab

if TYPE_CHECKING:
    import torch


class Start(NamedTuple):
    """What a notebook works with: its seeded generator, whether this is the full run, and the device to run on."""

    generator: torch.Generator
    full: bool
    device: torch.device


def start(seed: int = 0) -> Start:
    """Check versions, seed Python, NumPy and torch, set the plot theme and print one line that describes the session.

    ``DEPTHLAB_FULL=1`` asks for the full run, which uses a CUDA device where there is one; the quick run is always on
    the CPU, so that its numbers are the same kind of numbers for everybody.

    Raises:
        RuntimeError: Python or a package is outside the tested range; one sentence says which and what to do.
        ValueError: DEPTHLAB_FULL is set to something other than 0 or 1.
    """
    import torch  # here, because the tools that only read notebooks do without it

    problem = outside_tested_range(_installed_versions(), *_tested_range())
    if problem:
        raise RuntimeError(problem)
    full = full_mode()
    generator = depthlab.runs.seed_everything(seed)
    depthlab.plots.theme()
    device = torch.device("cuda" if full and torch.cuda.is_available() else "cpu")
    print(
        f"depthlab {depthlab.__version__} | Python {platform.python_version()} | torch {torch.__version__} | "
        f"{_describe(device)} | {'full' if full else 'quick'} mode"
    )
    return Start(generator, full, device)


def full_mode() -> bool:
    """Whether ``DEPTHLAB_FULL`` asks for the full run."""
    value = os.environ.get("DEPTHLAB_FULL", "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"DEPTHLAB_FULL is {value!r}; set it to 1 for the full run, to 0 for the quick one.")
    return value == "1"


def outside_tested_range(installed: dict[str, str], python: str, requirements: list[str]) -> str | None:
    """One sentence about the first version that is outside the tested range, or None.

    Args:
        installed: version by package name, with Python's own under ``"python"``; packages left out are not judged.
        python: the range for Python, for example ``">=3.11"``.
        requirements: requirement strings; those behind a marker are optional and not judged.
    """
    ranges = {"python": SpecifierSet(python)}
    for requirement in map(Requirement, requirements):
        if requirement.marker is None:
            ranges[requirement.name.lower()] = requirement.specifier
    for name, allowed in ranges.items():
        version = installed.get(name)
        if version is not None and not allowed.contains(version, prereleases=True):
            remedy = (
                "make a new environment with such a Python"
                if name == "python"
                else f"run: pip install --upgrade '{name}{allowed}'"
            )
            return f"depthlab is tested with {name} {allowed} and found {version}; {remedy}."
    return None


def _tested_range() -> tuple[str, list[str]]:
    """The ranges that the installed package declares: pyproject.toml stays their only home."""
    try:
        distribution = importlib.metadata.distribution("depthlab")
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError("depthlab is not installed here; run: pip install -e '.[notebooks]'.") from None
    return distribution.metadata["Requires-Python"], distribution.requires or []


def _installed_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for requirement in map(Requirement, _tested_range()[1]):
        name = requirement.name.lower()
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a missing package says so by itself where it is imported
    return versions


def _describe(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"cpu, {threads} thread{'s' if threads > 1 else ''}"
