"""`depthlab doctor`: what is installed, what works, what is missing and how to get it."""

import platform
import re
import sys
from importlib import metadata

from packaging.requirements import Requirement

# extra -> what it is for; the packages of each come from our own metadata
_PURPOSES = {
    "notebooks": "executing the notebooks",
    "data": "the complete MNIST and the Hugging Face texts",
    "hub": "reading checkpoints by hub id",
    "dev": "tests and lint",
    "peers": "other people's kernels to compare with; never needed",
}


def examine() -> tuple[bool, list[str]]:
    """(whether the core works, lines of text). The core: its packages in range, the bundles whole, the ledger valid."""
    try:
        required = [Requirement(text) for text in metadata.requires("depthlab") or []]
    except metadata.PackageNotFoundError:
        return False, ["missing  depthlab is not installed here; run: pip install -e ."]
    lines = [f"ok       Python {platform.python_version()} on {platform.system()}"]
    core = [r for r in required if _extra(r) is None and (r.marker is None or r.marker.evaluate())]
    lines += [_package(r, "pip install -e .") for r in core if r.name != "triton"]
    if all(line.startswith("ok") for line in lines):  # without the core, nothing below can be imported
        lines += [_bundles(), _ledger()]
    healthy = all(line.startswith("ok") for line in lines)
    for extra, purpose in _PURPOSES.items():
        faults = [f for r in required if _extra(r) == extra and (f := _fault(r))]
        if faults:
            lines.append(f"absent   {purpose}: {'; '.join(faults)}; run: pip install -e '.[{extra}]'")
        else:
            lines.append(f"ok       {purpose}")
    lines += _accelerator() if healthy else []
    lines.append("The core works." if healthy else "The core does not work; mend the lines that do not begin with ok.")
    return healthy, lines


def _extra(requirement: Requirement) -> str | None:
    found = re.search(r'extra == "([^"]+)"', str(requirement.marker or ""))
    return found[1] if found else None


def _fault(requirement: Requirement) -> str | None:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is missing"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} is {version}, needs {requirement.specifier}"
    return None


def _package(requirement: Requirement, remedy: str) -> str:
    fault = _fault(requirement)
    if fault:
        return f"missing  {fault}; run: {remedy}"
    return f"ok       {requirement.name} {metadata.version(requirement.name)}"


def _bundles() -> str:
    from depthlab import data

    try:
        found = data.prepare()
    except ValueError as error:
        return f"broken   {error}"
    return f"ok       bundled data, {len(found)} parts verified"


def _ledger() -> str:
    from depthlab import claims

    try:
        return f"ok       {claims.summary()}"
    except claims.LedgerError as error:
        return f"broken   {error}"


def _accelerator() -> list[str]:
    import torch

    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        lines = [f"ok       CUDA {torch.version.cuda}: {names}"]
    else:
        lines = ["absent   no CUDA device; everything runs on the CPU, only smaller"]
    try:
        lines.append(f"ok       triton {metadata.version('triton')}")
    except metadata.PackageNotFoundError:
        where = "run: pip install triton" if sys.platform == "linux" else "it exists for Linux only"
        lines.append(f"absent   triton; kernels use plain torch instead ({where})")
    return lines
