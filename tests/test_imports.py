"""Imports go one way, and no part reaches into another's private names."""

import ast
import inspect
from pathlib import Path

import pytest

import depthlab

ROOT = Path(__file__).parents[1]
LEAVES = {"checks", "runs", "plots", "data", "theory", "bundles"}
# part -> the parts it may import besides the leaves and itself
ALLOWED = {
    **{leaf: set() for leaf in LEAVES},
    "kernels.mgr": set(),
    "kernels.bench": {"kernels.mgr"},
    "residuals": {"kernels.mgr"},
    "diagnostics": {"residuals", "kernels.mgr"},
    "lm": {"diagnostics", "residuals", "kernels.mgr"},
    "looped": {"lm", "diagnostics", "residuals", "kernels.mgr"},
    "continuity": {"lm"},
    "ledger": set(),
    "doctor": {"claims"},
    "nbtools": {"claims"},
    "claims": {"ledger", "looped", "lm", "continuity", "diagnostics", "residuals", "kernels.mgr", "kernels.bench"},
}
ALLOWED["cli"] = set(ALLOWED) | {"claims"}
ALLOWED["__main__"] = {"cli"}
# A kernel needs no records, plots or data; it shares the formula of the interpolation with the theory of its bound.
LEAVES_OF = {"kernels.mgr": {"theory"}}


def part_of(module: str) -> str | None:
    """`depthlab.residuals.mgr` -> `residuals`; None for modules that are not ours or for `depthlab` itself."""
    names = module.split(".")
    if names[0] != "depthlab" or len(names) == 1:
        return None
    return ".".join(names[1:3]) if names[1] == "kernels" and len(names) > 2 else names[1]


def imports(source: str) -> list[tuple[str, list[str]]]:
    """(module, imported names) of every import statement, also inside functions."""
    found: list[tuple[str, list[str]]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                found.append(("relative", []))
            elif node.module == "depthlab":
                found += [(f"depthlab.{alias.name}", []) for alias in node.names]
            else:
                found.append((node.module or "", [alias.name for alias in node.names]))
    return found


def faults(part: str, source: str) -> list[str]:
    out = []
    for module, names in imports(source):
        if module == "relative":
            out.append("a relative import; write the full name")
        if module.split(".")[0] in {"kernels", "src"}:
            out.append(f"imports {module}; the name is depthlab.kernels")
        other = part_of(module)
        if other is None or other == part or other in {"check", "CheckFailed", "__version__"}:
            continue
        if other not in ALLOWED[part] | LEAVES_OF.get(part, LEAVES):
            out.append(f"{part} may not import {other}")
        private = [name for name in [*module.split(".")[1:], *names] if name.startswith("_") and name != "__version__"]
        out += [f"reaches for the private {module}.{name}" for name in private]
    return out


def our_files() -> list[tuple[str, Path]]:
    files = [("src/depthlab", "depthlab"), ("kernels", "depthlab.kernels")]
    out = []
    for folder, package in files:
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT / folder).with_suffix("").parts
            module = ".".join([package, *relative]).removesuffix(".__init__")
            if (part := part_of(module)) not in (None, "kernels"):
                out.append((part, path))
    return out


@pytest.mark.parametrize(
    ("part", "path"), our_files(), ids=lambda x: str(x.relative_to(ROOT)) if isinstance(x, Path) else ""
)
def test_imports_go_one_way(part: str, path: Path) -> None:
    assert faults(part, path.read_text()) == []


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("residuals", "from depthlab.lm import GPT"),
        ("kernels.mgr", "from depthlab.runs import load"),
        ("runs", "import depthlab.claims"),
        ("theory", "def f():\n    from depthlab import residuals"),
        ("claims", "from depthlab.runs import _secret"),
        ("claims", "from depthlab.runs._secret import x"),
        ("lm", "from . import x"),
        ("lm", "import kernels.mgr"),
    ],
)
def test_a_wrong_import_is_found(part: str, source: str) -> None:
    assert len(faults(part, source)) == 1


def test_what_the_package_lists_can_be_asked_for():
    """inspect and help() ask for every name of dir(); a part that is not built yet must not break them."""
    members = dict(inspect.getmembers(depthlab))
    assert {"check", "start", "theory", "data", "claims", "residuals"} <= set(members)
    assert not hasattr(depthlab, "no_such_part")
