"""A reader can point from each equation to one place in the code: the places that our texts name exist."""

import importlib
import inspect
import json
import re
from operator import attrgetter
from pathlib import Path

import pytest
import torch

from depthlab.kernels.mgr import reference
from depthlab.residuals import SCHEMES, build, recompute

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "20_mgr_from_scratch.ipynb"
DERIVATION = ROOT / "kernels" / "mgr" / "DERIVATION.md"


def resolve(name):
    """The object behind a dotted name, importing as much of it as is a module."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[cut:]:
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(name)


def table_names():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    prose = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    table = re.search(r"### Where each equation lives\n(.*?)(?=\n#)", prose, re.DOTALL)[1]
    return re.findall(r"`(depthlab\.[\w.]+)`", table)


def test_every_name_in_the_notebooks_table_is_documented_code():
    names = table_names()
    assert len(names) == len(set(names)) >= 17
    for name in names:
        assert inspect.getdoc(resolve(name)), name


def test_the_table_names_every_equation_of_the_reference_and_every_scheme():
    named = {resolve(name) for name in table_names()}
    equations = {
        "rms_normalize",
        "scores",
        "pool_weights",
        "pool",
        "independent_gate",
        "competitive_gate",
        "interpolate",
    }
    assert {getattr(reference, name) for name in equations} <= named
    assert {type(build(scheme, 4, 6)) for scheme in SCHEMES} <= named


def test_the_derivation_numbers_each_stage_once_and_names_the_code_but_of_the_backward():
    text = DERIVATION.read_text(encoding="utf-8")
    rows = re.findall(r"^\| \((\d+\w?)\) \|(.*)\|$", text, re.MULTILINE)
    numbers = [number for number, _ in rows]
    assert numbers == ["1", "2", "3i", "3c", *map(str, range(4, 14)), "14i", "14c", *map(str, range(15, 24))]
    for number, row in rows:
        number, name = int(re.match(r"\d+", number)[0]), (re.findall(r"`([\w.]+)`", row) or [""])[-1]
        if number >= 19:
            assert callable(attrgetter(name)(recompute))
        elif number <= 8 or number == 18:
            assert callable(resolve(name) if "." in name else getattr(reference, name))


@pytest.mark.parametrize("number", [1, "3i", "3c", 6, 7])
def test_the_reference_quotes_the_numbers_of_the_derivation(number):
    where = {1: "inverse_rms", "3i": "independent_gate", "3c": "competitive_gate", 6: "pool_weights", 7: "pool"}[number]
    assert f"Equation ({number})" in getattr(reference, where).__doc__


def test_the_byte_count_adds_up():
    """DERIVATION.md's totals from its own terms, at n = 4 in units of C."""
    text, n = DERIVATION.read_text(encoding="utf-8"), 4
    forward, backward = (n + 1) + (n + 1), (n + 1) + (n + 1) + (n + 1)
    rows = {row[0]: row[-1] for row in (r.strip("| ").split(" | ") for r in text.splitlines() if r.startswith("| "))}
    assert rows["mixing forward"] == f"{forward} C" and rows["mixing backward"] == f"{backward} C"
    assert rows["both, norm of `h` fused"] == f"{forward + backward} C"
    assert next(v for k, v in rows.items() if k.startswith("the norm apart")) == f"{forward + backward + 5} C"
    assert rows["appending forward"] == f"{(n + 1) + (n + 2)} C" and rows["pooling forward"] == f"{n + 1} C"


def test_equal_streams_get_equal_everything_as_the_derivation_says():
    streams = torch.randn(6, 1, 8, dtype=torch.float64).expand(6, 4, 8)
    leaf = streams.clone().requires_grad_()
    query = torch.randn(8, dtype=torch.float64, requires_grad=True)
    pooled = reference.attn_pool(leaf, query)
    d_streams, d_query = torch.autograd.grad(pooled.pow(3).sum(), (leaf, query))
    torch.testing.assert_close(d_streams, d_streams[:, :1].expand_as(d_streams))
    assert d_query.abs().max() < 1e-14
