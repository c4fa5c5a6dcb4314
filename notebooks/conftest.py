"""Settings for ``pytest --nbval notebooks/``: the kernels that it starts inherit this environment."""

import os
from pathlib import Path

from depthlab.nbtools import KERNEL_ENV, cannot_run, find

# Student copies fail by design until they are filled in; tests/test_exercises.py runs them.
collect_ignore_glob = ["exercises/*"]
# Those on Triton kernels, where there is no triton: nothing of theirs could be compared.
collect_ignore = [path.name for path in find(Path(__file__).parent) if cannot_run(path)]

for _name, _value in KERNEL_ENV.items():
    os.environ.setdefault(_name, _value)


def pytest_collectstart(collector):
    """A table's HTML differs between pandas versions; its text is compared. PNG is never compared."""
    if getattr(collector, "skip_compare", None) is not None and collector.path.suffix == ".ipynb":
        collector.skip_compare += ("text/html",)
