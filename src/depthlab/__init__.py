"""depthlab: what happens to a signal on its way through depth.

Sub-packages load on first use, so `import depthlab as dl; dl.theory.gate_bias(...)` works and importing stays fast.
"""

import importlib
import importlib.util
from typing import Any

from depthlab.checks import CheckFailed, check

__version__ = "0.1.0"
__all__ = ["CheckFailed", "__version__", "check", "start"]

_SUBMODULES = frozenset(
    {"claims", "continuity", "data", "diagnostics", "kernels", "lm", "looped", "nbtools", "plots", "residuals", "runs",
     "theory"}
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "start":
        return importlib.import_module("depthlab.nbtools").start
    if name in _SUBMODULES:
        try:
            return importlib.import_module(f"depthlab.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"depthlab.{name}":  # a part that is here needs something that is not
                raise
    raise AttributeError(f"module 'depthlab' has no attribute {name!r}")


def __dir__() -> list[str]:
    here = {name for name in _SUBMODULES if importlib.util.find_spec(f"depthlab.{name}")}
    return sorted(set(globals()) | here | {"start"})
