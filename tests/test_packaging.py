"""The wheel holds everything it needs, and pyproject.toml says what is on disk."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]
CORE = PROJECT["project"]["dependencies"]
EXTRAS = PROJECT["project"]["optional-dependencies"]
# Where the packages of each name start on disk (pyproject's package-dir).
PLACES = {"depthlab": "src/depthlab", "depthlab.kernels": "kernels", "depthlab.bundles": "data"}
PARTS_OF_WHEEL = ["src", "kernels", "data", "pyproject.toml", "README.md", "LICENSE"]
ENVIRONMENT_EXTRAS = ("notebooks", "data", "dev")  # what environment.yml installs beside the core


# --- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built without network, from a copy: a build folder in the checkout would leak old files into it."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in PARTS_OF_WHEEL:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".ipynb_checkpoints")
            shutil.copytree(ROOT / name, folder / "checkout" / name, ignore=ignored)
        else:
            (folder / "checkout").mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / "checkout" / name)
    pip(["wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder), str(folder / "checkout")])
    (made,) = folder.glob("*.whl")
    return made


def pip(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments, "--no-index"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
def test_wheel_installs_imports_every_sub_package_and_loads_both_bundles(wheel, tmp_path):
    pip(["install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)])
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for bundle in ("mnist", "text"):
        bundled = {path.name for path in (ROOT / "data" / bundle).iterdir() if not path.name.startswith(".")}
        assert bundled == {Path(n).name for n in names if n.startswith(f"depthlab/bundles/{bundle}/")}
    assert "depthlab/bundles/claims.yaml" in names
    assert not [n for n in names if re.search(r"(^|/)(tests?|notebooks|build)/|\.py[co]$|\.ipynb$", n)]
    # -S and -I: neither the checkout nor an editable install of it can be found, only what is on this path.
    path = [str(tmp_path / "site"), sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]]
    code = f"""
import sys
sys.path[:0] = {path}
import importlib
for name in {PACKAGES}:
    module = importlib.import_module(name)
    assert module.__file__.startswith({path[0]!r}), module.__file__
from depthlab import data
assert len(data.mnist("train").labels) == 10_000 and len(data.mnist("test").labels) == 2_000
assert len(data.addresses()) == 233 and data.text().train
print(len(data.prepare()))
"""
    command = [sys.executable, "-I", "-S", "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=_no_threads())
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "3\n"


def _no_threads() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


# --- pyproject.toml


def packages_on_disk() -> set[str]:
    """Every folder with Python files under the places of PLACES; one that lacks __init__.py is there all the same."""
    found = set()
    for package, place in PLACES.items():
        for path in (ROOT / place).rglob("*.py"):
            below = path.parent.relative_to(ROOT / place).parts
            found.add(".".join([package, *below]))
    return found


def test_every_package_on_disk_is_listed_and_the_other_way_round():
    assert sorted(PACKAGES) == sorted(packages_on_disk())
    assert len(PACKAGES) == len(set(PACKAGES))
    assert PROJECT["tool"]["setuptools"]["package-dir"] == PLACES


def test_every_package_has_an_init_file():
    for package in PACKAGES:
        base = max((name for name in PLACES if f"{package}.".startswith(f"{name}.")), key=len)
        below = package.removeprefix(base).strip(".").split(".") if package != base else []
        assert ROOT.joinpath(PLACES[base], *below, "__init__.py").is_file(), package


def test_every_requirement_parses_and_is_named_once():
    for group in (CORE, *EXTRAS.values()):
        names = [Requirement(line).name.lower() for line in group]
        assert len(names) == len(set(names))
    with pytest.raises(InvalidRequirement):
        Requirement("triton==3.1.0==3.2.0")


def test_ranges_admit_the_versions_promised():
    torch = next(Requirement(line) for line in CORE if Requirement(line).name == "torch")
    assert all(torch.specifier.contains(version) for version in ("2.9.0", "2.13.1", "2.14.1", "2.99"))
    assert not torch.specifier.contains("2.8.0")
    python = SpecifierSet(PROJECT["project"]["requires-python"])
    assert python.contains("3.11.0") and python.contains("3.12.9") and not python.contains("3.10.14")


def unguarded_triton(requirements: Iterable[str]) -> list[str]:
    """Requirements on triton that would be installed where it has no wheel."""
    parsed = [Requirement(line) for line in requirements]
    elsewhere = [
        {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64"},
        {"sys_platform": "win32", "platform_system": "Windows", "platform_machine": "AMD64"},
    ]
    return [
        str(r) for r in parsed if "triton" in r.name and (not r.marker or any(r.marker.evaluate(e) for e in elsewhere))
    ]


def test_triton_is_required_on_linux_only():
    assert unguarded_triton([*CORE, *(line for group in EXTRAS.values() for line in group)]) == []
    assert unguarded_triton(["triton>=3.5", "torch"]) == ["triton>=3.5"]
    assert unguarded_triton(["triton; python_version > '3.8'"])


# --- environment.yml


def read_environment(text: str) -> tuple[list[str], list[str]]:
    """Lines that conda and pip install, from the text of an environment file."""
    content = yaml.safe_load(text)
    conda = [entry for entry in content["dependencies"] if isinstance(entry, str)]
    pip_lines = [line for entry in content["dependencies"] if isinstance(entry, dict) for line in entry["pip"]]
    return conda, pip_lines


def environment_faults(text: str) -> list[str]:
    """What makes an environment file differ from pyproject.toml, or solve on one system only."""
    conda, pip_lines = read_environment(text)
    faults = []
    for line in conda:
        # A build string is a third part: name=version=build.
        if re.search(r"^[^=<>!~\s]+\s*=\s*[^=\s]+=\S+", line) or len(line.split()) > 2:
            faults.append(f"build string: {line}")
    for line in [*conda, *pip_lines]:
        if re.search(r"cuda|cudnn|nccl|nvidia|\+cu\d", line, re.IGNORECASE):
            faults.append(f"CUDA package: {line}")
    for line in conda:
        name = re.split(r"[\s=<>!~\[]", line, maxsplit=1)[0]
        if name not in ("python", "pip"):
            faults.append(f"second source of packages: {line}")
    python = [line.removeprefix("python") for line in conda if re.match(r"python(?![\w-])", line)]
    if [SpecifierSet(line) for line in python] != [SpecifierSet(PROJECT["project"]["requires-python"])]:
        faults.append(f"python range: {python}")
    requirements = [line for line in pip_lines if not line.startswith("-e ")]
    wanted = [*CORE, *(line for extra in ENVIRONMENT_EXTRAS for line in EXTRAS[extra])]
    faults += [
        f"differs: {r}"
        for r in sorted({str(Requirement(r)) for r in requirements} ^ {str(Requirement(w)) for w in wanted})
    ]
    if len(requirements) != len(wanted):
        faults.append("a requirement is listed twice")
    if [line for line in pip_lines if line.startswith("-e ")] != ["-e ."]:
        faults.append("the project itself is not installed once by `-e .`")
    return faults + [f"triton: {line}" for line in unguarded_triton(requirements)]


def test_environment_file_has_the_ranges_of_pyproject():
    assert environment_faults((ROOT / "environment.yml").read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "old, new, fault",
    [
        ("torch>=2.9", "torch>=2.10", "differs: torch"),
        ("- numpy>=1.26\n", "- numpy>=1.26\n      - scipy\n", "differs: scipy"),
        ("      - numpy>=1.26\n", "", "differs: numpy"),
        ("      - numpy>=1.26\n", "      - numpy>=1.26\n      - numpy>=1.26\n", "listed twice"),
        ("- pip\n", "- pip\n  - numpy\n", "second source"),
        ("- pip\n", "- pip\n  - pytorch::pytorch-cuda=12.1\n", "CUDA package"),
        ("- pip\n", "- pip=24.0=pyhd8ed1ab_0\n", "build string"),
        ("- pip\n", "- pip 24.0 pyhd8ed1ab_0\n", "build string"),
        ("torch>=2.9", "torch==2.9.0+cu121", "CUDA package"),
        ("- python>=3.11", "- python>=3.10", "python range"),
        (" sys_platform == 'linux' and", "", "triton"),
        ("      - -e .\n", "", "-e ."),
    ],
)
def test_a_wrong_environment_file_is_noticed(old, new, fault):
    text = (ROOT / "environment.yml").read_text(encoding="utf-8")
    assert old in text
    faults = environment_faults(text.replace(old, new, 1))
    assert any(fault in found for found in faults), faults
