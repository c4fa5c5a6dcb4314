"""Settings for ``pytest --nbval notebooks/``: the kernels that it starts inherit this environment."""

import os

from depthlab.nbtools import KERNEL_ENV

# Student copies fail by design until they are filled in; tests/test_exercises.py runs them.
collect_ignore_glob = ["exercises/*"]

for _name, _value in KERNEL_ENV.items():
    os.environ.setdefault(_name, _value)


def pytest_collectstart(collector):
    """A table's HTML differs between pandas versions; its text is compared. PNG is never compared."""
    if getattr(collector, "skip_compare", None) is not None and collector.path.suffix == ".ipynb":
        collector.skip_compare += ("text/html",)
