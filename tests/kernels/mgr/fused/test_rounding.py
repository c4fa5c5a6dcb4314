"""What rounding adds up to: the kernels beside `Segment` of depthlab.residuals in float64, decisions and all.

Allowed is 1e-5 relative: sums of positive numbers in float32, layer after layer. Every mutant is above 1e-3.
"""

# ruff: noqa: E501  (one mutant a line)

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

from depthlab.kernels import mgr
from depthlab.kernels.mgr import rounding
from depthlab.kernels.mgr.rounding import carry_rounding
from depthlab.residuals.recompute import Segment

MAX_GATE, SIGMA = 0.5, 1e-3
NOWHERE = math.inf


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Three programs of a few rows each, so that a dozen tokens are several visits to each of them."""
    monkeypatch.setattr(rounding, "BLOCK_ROWS", 16)
    monkeypatch.setattr(rounding, "PROGRAMS", 4)


def draw(device, n, lead=(3, 7), layers=6, widest=0.55, seed=0):
    """Layers' (beta, kept, chosen): [.., n], [.., 4n+1], [.., n] or None, gates up to `widest`."""
    g = torch.Generator().manual_seed(seed)
    for layer in range(layers):
        beta = torch.rand(*lead, n, generator=g) * widest
        kept = 0.3 + torch.rand(*lead, 4 * n + 1, generator=g) * 2
        chosen = torch.rand(*lead, n, generator=g) > 0.8 if layer % 2 else None
        yield tuple(x if x is None else x.to(device) for x in (beta, kept, chosen))


def expected(layers, tolerance):
    """By `Segment`, in float64: each layer's state [4, .., n] and numbers [3]."""
    segment = Segment()
    for beta, kept, chosen in layers:
        n = beta.shape[-1]
        beta, kept = beta.double(), kept.double()
        after, before = kept[..., 1 + n : 1 + 2 * n].pow(-2), kept[..., 1 + 3 * n :].pow(-2)
        wide_open = beta > MAX_GATE
        keeps = wide_open if chosen is None else wide_open | chosen
        segment = segment.with_layer(beta, before, after, keeps)
        predicted = SIGMA * math.sqrt(max(segment.shares().tolist()))
        segment, n_open = segment.without_rows(keeps), int(wide_open.sum())
        ends = not predicted <= tolerance or 2 * n_open > beta.numel()
        state = torch.stack([segment.growth, segment.variance, segment.least, segment.closed])
        yield state, torch.tensor([predicted, n_open, ends], dtype=torch.float64)
        segment = Segment() if ends else segment


def found(layers, tolerance):
    below = None
    for beta, kept, chosen in layers:
        below = carry_rounding(beta, kept, chosen, below, max_gate=MAX_GATE, sigma=SIGMA, tolerance=tolerance)
        yield below


def worst(layers, tolerance=NOWHERE) -> float:
    """The largest relative error of anything; infinite where a decision is another one."""
    far = 0.0
    for (state, numbers), one in zip(expected(layers, tolerance), found(layers, tolerance), strict=True):
        for x, y in ((one.state, state), (one.numbers, numbers)):
            y = y.to(x.device)
            error = torch.where(x == y, 0, (x.double() - y).abs() / y.abs().clamp_min(1e-30))  # equal: also infinite
            far = max(far, error.max().nan_to_num(math.inf).item() if x.shape == y.shape else math.inf)
        if not torch.equal(one.numbers[1:3].cpu().double(), numbers[1:3].cpu()):
            return math.inf
    return far


@pytest.mark.parametrize("n", [*range(1, 10), 15, 16])
@pytest.mark.parametrize("tolerance", [NOWHERE, 4e-3])
def test_layers_add_up_as_by_definition(fused, n, tolerance):
    layers = list(draw(fused.device, n))
    ends = [bool(numbers[2]) for _, numbers in expected(layers, tolerance)]
    assert any(ends) == (tolerance != NOWHERE) and not all(ends)
    assert worst(layers, tolerance) < 1e-5


@pytest.mark.parametrize("lead", [(), (1,), (2, 1, 3), (101,), (0,)])
def test_any_leading_dimensions_and_token_counts(fused, lead):
    if lead == (0,):
        (one,) = found(list(draw(fused.device, 3, lead, layers=1)), NOWHERE)
        assert one.state.shape == (4, 0, 3) and one.numbers[:3].tolist() == [0, 0, 0]
    else:
        assert worst(list(draw(fused.device, 3, lead)), 6e-3) < 1e-5


def test_the_sizes_of_launches_change_nothing_but_the_order_of_sums(fused, monkeypatch):
    layers = list(draw(fused.device, 4))
    for rows, programs in ((16, 1), (64, 2), (512, 128)):
        monkeypatch.setattr(rounding, "BLOCK_ROWS", rows)
        monkeypatch.setattr(rounding, "PROGRAMS", programs)
        assert worst(layers, 6e-3) < 1e-5
    once, again = (list(found(layers, 6e-3)) for _ in range(2))
    assert all(torch.equal(x, y) for a, b in zip(once, again, strict=True) for x, y in zip(a, b, strict=True))


def test_a_segment_ends_where_most_gates_are_above_the_ceiling(fused):
    for widest, ends in ((0.95, False), (1.1, True)):
        ((beta, kept, _),) = draw(fused.device, 2, (50,), layers=1)
        beta = torch.linspace(0.0, widest, 100, device=fused.device).view(50, 2)
        (one,) = found([(beta, kept, None)], NOWHERE)
        assert int(one.numbers[1]) == int((beta > MAX_GATE).sum())
        assert bool(one.numbers[2]) == ends == bool((beta > MAX_GATE).sum() > 50)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
def test_what_is_no_number_is_predicted_as_infinite_until_the_segment_ends(fused, bad):
    layers = list(draw(fused.device, 3))
    layers[1][1][0, 0, 1 + 3] = bad  # the norm of one stream of one token, in a row that is kept
    layers[1][2][0, 0, 0] = True
    for tolerance, last in ((NOWHERE, True), (4e-3, False)):
        predicted = [float(one.numbers[0]) for one in found(layers, tolerance)]
        assert predicted[0] < 1
        if bad == math.inf:  # a stream of size 0 has no error
            assert predicted[1] < 1
        else:
            assert predicted[1] == math.inf and (predicted[2] == math.inf) == last


def test_nothing_past_an_end_is_read_and_all_is_written(fused, monkeypatch):
    layers = list(draw(fused.device, 3, (13,)))
    plain = list(found(layers, 6e-3))
    buffers = []

    new_empty = torch.Tensor.new_empty

    def guarded(self, size, **how):
        if how:  # the interpreter's own
            return new_empty(self, size, **how)
        buffer = torch.full([torch.Size([size] if isinstance(size, int) else size).numel() + 8], math.nan)
        buffer[:4] = buffer[-4:] = -7.0
        buffers.append(buffer.to(self.device))
        return buffers[-1][4:-4].view(size)

    def around(x):
        return None if x is None else torch.cat([x[:1], x, x[:1]]).fill_(True)[1:-1].copy_(x)

    shifted = [tuple(around(x) for x in layer) for layer in layers]
    for beta, kept, _ in shifted:
        for x in (beta, kept):
            x._base[0] = x._base[-1] = math.nan
    monkeypatch.setattr(torch.Tensor, "new_empty", guarded)
    for a, b in zip(plain, found(shifted, 6e-3), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    for buffer in buffers:
        assert (buffer[:4] == -7).all() and (buffer[-4:] == -7).all() and not buffer.isnan().any()


# ---- mutants

MUTANTS = {
    "growth not squared": ("below / (left * left)", "below / left"),
    "growth without what was below": ("growth = below / ", "growth = 1.0 / "),
    "the output's rounding before this layer": ("growth / (r_m * r_m)", "below / (r_m * r_m)"),
    "the input's rounding with this layer": ("below * before", "growth * before"),
    "the input's rounding left out": (" + below * before", ""),
    "norms for mean squares": ("before = 1.0 / (r * r)", "before = 1.0 / r"),
    "norms of other streams": ("1 + 3 * N + rows", "1 + 3 * N + (N - 1 - rows)"),
    "scores for norms": ("1 + N + rows", "1 + 2 * N + rows"),
    "gates of kept rows taken in": ("tl.where(keeps, 0.0, beta)", "beta"),
    "chosen rows ignored": ("keeps = keeps | (", "keeps = keeps & ("),
    "kept rows carried on": ("tl.where(keeps, 0.0, variance)", "variance"),
    "growth of kept rows carried on": ("tl.where(keeps, 1.0, growth)", "growth"),
    "closed parts forgotten": ("tl.where(keeps, largest, closed)", "closed"),
    "closed parts taken for all": ("tl.where(keeps, largest, closed)", "largest"),
    "closed parts not predicted": ("tl.where(mask, largest, 0.0)", "tl.where(mask, variance / least, 0.0)"),
    "the newest for the largest": ("largest = tl.maximum(closed, variance / least", "largest = tl.maximum(0.0 * closed, variance / least"),
    "absolute errors": ("variance / least, propagate", "variance, propagate"),
    "the newest size for the least": ("least = tl.minimum(least, before", "least = tl.minimum(before, before"),
    "the largest size for the least": ("least = tl.minimum(least, before", "least = tl.maximum(tl.where(least == float('inf'), 0.0, least), before"),
    "the least of kept rows carried on": ("tl.where(keeps, float(\"inf\"), least)", "least"),
    "a segment that never ends": ("ended = tl.load(numbers_ptr + 2)", "ended = 0.0"),
    "a segment of one layer": ("ended = tl.load(numbers_ptr + 2)", "ended = 1.0"),
    "the least of an ended segment": ("least = tl.where(ended > 0.0, least, ", "least = tl.where(ended > 9.0, least, "),
    "tokens not counted": (" * N / tl.maximum(n_rows, 1)", ""),
    "rows for tokens": (" * N / tl.maximum(n_rows, 1)", " / tl.maximum(n_rows, 1)"),
    "the first stream only": ("tl.max(share, 0)", "tl.sum(tl.where(rows == 0, share, 0.0), 0)"),
    "no root": ("sigma * tl.sqrt(", "sigma * ("),
    "tolerance unheeded": (" | (predicted > tolerance)", ""),
    "half the rows unheeded": ("2.0 * n_open > n_rows", "1.0 * n_open > n_rows"),
    "a program's tokens left out": ("tl.num_programs(0) * BLOCK)", "(tl.num_programs(0) + 1) * BLOCK)"),
    "a program's sums left out": ("program < n_programs", "program < n_programs - 1"),
    "padded tokens counted": ("tl.sum(tl.where(mask, largest, 0.0), 0)", "tl.sum(largest, 0)"),
}  # fmt: skip
SETTINGS = (NOWHERE, 4e-3)


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """copied(old, new): the kernels that run are a copy in which `old` reads `new`."""

    def install(old: str = "", new: str = "") -> None:
        source = (Path(mgr.__file__).parent / "rounding_kernels.py").read_text(encoding="utf-8")
        assert not old or old in source, f"no kernel says {old!r}: state this mutant anew"
        path = tmp_path / "copied_rounding.py"
        path.write_text(source.replace(old, new) if old else source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        monkeypatch.setattr(mgr, "rounding_kernels", module, raising=False)

    return install


def worst_of_all(device) -> float:
    """Over two tolerances, and once with gates of which most, but not all, are above the ceiling."""
    layers = list(draw(device, 3))
    mostly_open = list(draw(device, 3, layers=3, widest=0.9))
    return max(*(worst(layers, tolerance) for tolerance in SETTINGS), worst(mostly_open))


def test_an_unchanged_copy_passes(fused, copied):
    copied()
    assert worst_of_all(fused.device) < 1e-5


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(fused, copied, name):
    copied(*MUTANTS[name])
    assert worst_of_all(fused.device) > 1e-3


def test_a_replacement_that_finds_nothing_is_no_mutant(copied):
    with pytest.raises(AssertionError, match="state this mutant anew"):
        copied("what no kernel says", "")
