"""The byte model is DERIVATION.md's table, and what the tensors of a call really hold."""

import re
from importlib.resources import files

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from depthlab.kernels.bench import cases
from depthlab.kernels.bench.cases import Case
from depthlab.kernels.bench.traffic import MIXING, OPS, bytes_moved, flops, paper_forward, traffic
from depthlab.kernels.mgr import reference

ROWS = {
    "mixing forward": ("mix", "forward"),
    "mixing backward": ("mix", "backward"),
    "the same from `s'`, without exact rows": ("mix-inverting", "backward"),
    "both, norm of `h` fused": ("mix", "both"),
    "appending forward": ("append", "forward"),
    "pooling forward": ("pool", "forward"),
}


def derivation_totals() -> dict[str, tuple[str, str]]:
    """Name of a row -> (its total as text, its value at n = 4) in the table "Bytes moved"."""
    text = (files("depthlab.kernels.mgr") / "DERIVATION.md").read_text(encoding="utf-8")
    table = text.partition("## Bytes moved")[2]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]
    return {row[0]: (row[3].strip("`"), row[4]) for row in cells if len(row) == 5}


def evaluate(formula: str, n: int) -> int:
    """`2 (n + 1) C` in units of C."""
    python = re.sub(r"(?<=[n)]) C", "", formula).replace("C", "1")
    python = re.sub(r"(\d) ([(n])", r"\1*\2", python)
    return eval(python, {"n": n})


@pytest.mark.parametrize("name", ROWS)
def test_the_model_is_the_derivations_table(name: str) -> None:
    formula, at_four = derivation_totals()[name]
    for n in range(1, 17):
        assert traffic(*ROWS[name], n).total == evaluate(formula, n)
    assert f"{traffic(*ROWS[name], 4).total} C" == at_four


@pytest.mark.parametrize("op", OPS)
def test_the_model_counts_every_large_tensor_of_a_call_once(op: str) -> None:
    """Forward: inputs and outputs. Backward: inputs and upstream gradients, and the gradients. Of [T, .., C] only."""
    case = Case(op, "fp32", 5, 3, 7, "independent" if op in MIXING else "")
    drawn = cases.inputs(case, torch.Generator().manual_seed(0))
    outputs = [y for y in cases.reference_step(case)(*drawn) if y.shape[-1] == 7]
    gradients = torch.autograd.grad(outputs, drawn, [torch.ones_like(y) for y in outputs])

    def large(*tensors: torch.Tensor) -> int:
        return sum(x.numel() for x in tensors if x.ndim > 1) // (5 * 7)

    forward, backward = traffic(op, "forward", 3), traffic(op, "backward", 3)
    assert (forward.reads, forward.writes) == (large(*drawn), large(*outputs))
    rebuilt = drawn[:1] if op == "mix-inverting" else ()  # written besides; read is the output in place of the input
    assert (backward.reads, backward.writes) == (large(*drawn, *outputs), large(*gradients, *rebuilt))
    assert traffic(op, "both", 3) == forward + backward


def test_bytes_are_elements_times_their_size_and_the_papers_count_is_larger() -> None:
    assert bytes_moved("mix", "forward", 32768, 4, 1024, 2) == 10 * 1024 * 2 * 32768
    assert Case("mix", "bf16", 32768, 4, 1024, "competitive").bytes("both") == 25 * 1024 * 2 * 32768
    assert Case("mix", "fp32", 32768, 4, 1024, "competitive").bytes("both") == 25 * 1024 * 4 * 32768
    assert paper_forward(4).total == 16 > traffic("mix", "forward", 4).total == 10


class Operations(TorchDispatchMode):
    """Counts one operation an element of every large elementwise result and every large reduced input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in ("sum", "mean", "mul", "add", "sub", "pow", "div"):
            elements = args[0].numel() if name in ("sum", "mean") else result.numel()
            self.count += elements if elements >= self.size else 0
        return result


def test_operations_are_those_that_the_reference_does() -> None:
    tokens, n, width = 5, 3, 64
    s, f, w = torch.randn(tokens, n, width), torch.randn(tokens, width), torch.randn(width)
    with Operations(tokens * n * width) as seen:
        reference.attn_pool(s, w)
    assert seen.count == flops("pool", "forward", tokens, n, width)
    with Operations(tokens * n * width) as seen:
        reference.mix_and_pool(s, f, w, torch.zeros(1), w, gate="competitive")
    assert seen.count == flops("mix", "forward", tokens, n, width)


def test_forward_and_backward_together_are_both() -> None:
    for op in OPS:
        assert flops(op, "both", 2, 3, 5) == flops(op, "forward", 2, 3, 5) + flops(op, "backward", 2, 3, 5)


@pytest.mark.parametrize(
    "wrong", [("mixx", "forward", 4), ("mix", "back", 4), ("mix", "both", 0), ("mix", "both", 4.0)]
)
def test_what_has_no_model_is_refused(wrong: tuple) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(wrong[[0, 1, 2, 2][_place(wrong)]]))):
        traffic(*wrong)


def _place(wrong: tuple) -> int:
    return 0 if wrong[0] != "mix" else 1 if wrong[1] == "back" else 2
