"""What rounding does to rebuilt streams: never more than the bound, about what is predicted, less than tolerated."""

import math
import re

import pytest
import torch

from depthlab.residuals import LayerKept, Recompute, RecomputeReport, build, rebuild
from depthlab.residuals.recompute import Segment, predicted
from depthlab.theory import unit_roundoff

WIDTH, LAYERS, STREAMS = 32, 40, 4
GATES = ("independent", "competitive")
NOWHERE = Recompute(anchor_every=None)


@pytest.fixture(params=GATES)
def gate(request):
    return request.param


def opened(gate, recompute, logit, spread=1.0, n_layers=LAYERS, seed=0):
    """A residual whose gates have this logit on average, and spread by token."""
    residual = build(f"mgr-{gate}", WIDTH, n_layers, n_streams=STREAMS, recompute=recompute)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for own in residual.residual_layers:
            own.w_pool.copy_(torch.randn(WIDTH, generator=g))
            if own.bias is not None:
                own.bias.fill_(logit if gate == "independent" else -logit)
                own.w_gate.copy_(spread * torch.randn(WIDTH, generator=g))
    return residual


def run(residual, dtype, seed=0, update=None):
    """The last state of random updates, and each layer's true input streams."""
    g = torch.Generator().manual_seed(seed)
    h, state = residual.start(torch.randn(2, 16, WIDTH, generator=g).to(dtype).requires_grad_())
    true = []
    for layer in range(residual.n_sublayers):
        true.append(state.streams.detach())
        f = torch.randn(h.shape, generator=g).to(dtype) if update is None else update(state.streams, g)
        h, state = residual.step(layer, f, state)
    return state, true


def rms(x):
    return x.double().square().mean(-1).sqrt()


def measured(state, true):
    """(the largest error over its bound, the largest relative error of a stream, RMS over its rows' own).

    A row's size is the one that RMSNorm divides by, so that a row of zeros has one."""
    beyond = relative = 0.0
    for found in rebuild(state):
        error, size = rms(found.streams.double() - true[found.layer].double()), rms(true[found.layer])
        assert (error[found.bound == 0] == 0).all()
        beyond = max(beyond, float(torch.where(error > 0, error / found.bound, 0).max()))
        relative = max(relative, float((error.square() / (size.square() + 1e-6)).mean((0, 1)).max().sqrt()))
    return beyond, relative


def adversary(streams, g):
    """Updates that nearly cancel the streams, so that what is left is small against what was rounded."""
    return (-20 * streams[..., 0, :] * (1 + 0.1 * torch.rand(streams[..., 0, :1].shape, generator=g))).to(streams.dtype)


CASES = {"closed": (-3.0, None), "open": (-1.0, None), "wide open": (0.0, None), "adversary": (-3.0, adversary)}
MANNERS = [
    NOWHERE,
    Recompute(anchor_every=None, max_gate=0.9),
    Recompute(anchor_every=None, top_p=0.05),
    Recompute(anchor_every=8),
    Recompute(),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_no_error_is_beyond_its_bound(gate, case, dtype):
    logit, update = CASES[case]
    for recompute in MANNERS:
        state, true = run(opened(gate, recompute, logit), dtype, update=update)
        assert measured(state, true)[0] <= 1


def test_a_bound_without_the_growth_would_be_beaten(gate):
    state, true = run(opened(gate, NOWHERE, -1.0), torch.bfloat16)
    beyond = 0.0
    for found in rebuild(state):
        error = rms(found.streams.double() - true[found.layer].double())
        flat = 2 * (LAYERS - found.layer) * unit_roundoff(torch.bfloat16) * rms(true[found.layer])
        beyond = max(beyond, float((error / flat).max()))
    assert beyond > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["closed", "open", "adversary"])
def test_the_prediction_is_above_the_error_and_within_a_factor_of_40(gate, case, dtype):
    """Rounding a rebuilt stream often restores it exactly, which the model leaves out: it may say up to 40 times more.

    Where a stream fades away on its way up, it says more still: it takes the stream at its smallest.
    """
    logit, update = CASES[case]
    for recompute in (NOWHERE, Recompute(anchor_every=8), Recompute(anchor_every=None, top_p=0.05)):
        residual = opened(gate, recompute, logit)
        state, true = run(residual, dtype, update=update)
        relative, foreseen = measured(state, true)[1], residual.recompute_report().predicted
        if foreseen < 0.3:  # beyond, errors come back to the gates of nothing: there is no number to be near to
            assert relative < foreseen
            assert update or relative > foreseen / 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logit", [-3.0, -1.0, 0.0])
@pytest.mark.parametrize("tolerance", [None, 1e-3])
def test_auto_keeps_the_error_under_its_tolerance_with_no_more_anchors_than_needed(gate, logit, tolerance, dtype):
    recompute = Recompute(tolerance=tolerance)
    residual = opened(gate, recompute, logit)
    state, true = run(residual, dtype)
    limit = recompute.tolerance_of(dtype)
    report = residual.recompute_report()
    assert limit == (tolerance or (1e-4 if dtype == torch.float32 else 2e-2))
    assert measured(state, true)[1] <= limit and report.predicted <= limit
    for other in (NOWHERE, *(Recompute(anchor_every=k) for k in (2, 3, 4, 6, 8, 12))):
        residual = opened(gate, other, logit)
        run(residual, dtype)
        evenly = residual.recompute_report()
        if evenly.predicted <= limit:  # then it would do, and as many are enough
            assert len(report.anchors) <= len(evenly.anchors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_huge_token_does_not_hide_what_becomes_of_the_others(dtype):
    """An attention sink whose gates are shut: it has no error, and relative to its size nobody else has."""
    anchors = []
    for size in (1, 300):
        residual, g = opened("independent", Recompute(), -1.0, spread=0.3), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for own in residual.residual_layers[STREAMS - 1 :]:
                own.w_gate[0] = -40.0
        sink = torch.zeros(2, 16, WIDTH)
        sink[:, 0, 0] = size * WIDTH**0.5

        def draw(g=g):
            x = torch.randn(2, 16, WIDTH, generator=g)
            x[..., 0] = 0
            return x

        h, state = residual.start((draw() + sink).to(dtype).requires_grad_())
        true = []
        for layer in range(LAYERS):
            true.append(state.streams.detach())
            h, state = residual.step(layer, (draw() + (sink if layer < STREAMS - 1 else 0)).to(dtype), state)
        for found in rebuild(state):
            error, whole = rms(found.streams.double() - true[found.layer].double()), rms(true[found.layer])
            assert (error / whole)[:, 1:].square().mean((0, 1)).max().sqrt() < Recompute().tolerance_of(dtype)
        anchors.append(residual.recompute_report().anchors)
    assert anchors[0] == anchors[1] and len(anchors[0]) > 1


def test_the_segment_adds_up_what_its_two_lines_of_mathematics_say():
    g = torch.Generator().manual_seed(1)
    beta, before, after = torch.rand(3, 5, 2, 4, generator=g, dtype=torch.float64) * 0.5
    nothing = torch.zeros(2, 4, dtype=torch.bool)
    segment = Segment()
    layers = list(zip(torch.stack([beta] * 3) * torch.tensor([1.0, 0.5, 0.3]).view(3, 1, 1, 1), strict=True))
    gates = [b[0][i] for i, b in enumerate(layers)]
    for i, b in enumerate(gates):
        segment = segment.with_layer(b, before[i], after[i], nothing)
    v = torch.zeros(2, 4, dtype=torch.float64)
    for i in reversed(range(3)):  # downwards, as the errors go
        v = (v + after[i]) / (1 - gates[i]).square() + before[i]
    torch.testing.assert_close(segment.variance, v)
    shares = (v / before[:3].amin(0)).mean(0)
    torch.testing.assert_close(segment.shares(), shares)
    found = predicted(shares.tolist(), torch.bfloat16, torch.float32)
    assert found == pytest.approx((2**-8 + 2**-24) / math.sqrt(3) * shares.max().sqrt().item())


def test_a_kept_row_ends_its_chain_and_starts_another():
    ones = torch.ones(1, 2, dtype=torch.float64)
    kept = torch.tensor([[True, False]])
    segment = Segment().with_layer(0.5 * ones, ones, ones, kept & False)
    assert segment.variance.tolist() == [[5, 5]]
    segment = segment.with_layer(0.5 * ones, 0.5 * ones, ones, kept).without_rows(kept)
    assert segment.variance.tolist() == [[0, 5 + 16 + 2]] and segment.growth.tolist() == [[1, 16]]
    assert segment.least.tolist() == [[math.inf, 0.5]]
    segment = segment.with_layer(0.5 * ones, 4 * ones, ones, kept & False)
    assert segment.variance[0, 0] == 4 + 4 and segment.least[0, 0] == 4
    assert segment.shares()[0] == (5 + 4 + 2) / 0.5  # of the closed part, which is remembered, not 8 / 4


def test_a_prediction_that_is_no_number_is_infinite_and_makes_an_anchor():
    assert predicted([0.0, 0.0], torch.float32, torch.float32) == 0
    assert predicted([math.nan, 1.0], torch.float32, torch.float32) == math.inf
    for error in (math.nan, math.inf):
        assert Recompute().is_anchor(1, 8, 0, error, torch.float32)


# ---- what is kept


def test_rows_with_the_largest_gates_and_all_above_the_ceiling_are_kept(gate):
    for recompute in (Recompute(top_p=0.1, anchor_every=None), Recompute(max_gate=0.3, anchor_every=None)):
        residual = opened(gate, recompute, -1.5)
        state, _ = run(residual, torch.float32)
        maker, seen = state.trail.made_by().maker(), 0
        while maker is not None:
            entry = residual.recompute_report().layers[maker.layer - STREAMS + 1]
            least = math.ceil(recompute.top_p * maker.beta.numel())
            wide_open = int((maker.beta > recompute.max_gate).sum())
            if maker.rows is not None:
                kept = maker.rows.slots >= 0
                assert kept.sum() == entry.kept == max(least, wide_open) == len(maker.rows.values)
                assert maker.beta[kept].min() >= maker.beta[~kept].max()
                seen += 1
            elif entry.kind == "rows":
                assert entry.kept == least == wide_open == 0
            maker = maker.maker()
        assert seen > 10


def test_a_layer_that_would_keep_most_rows_is_an_anchor(gate):
    residual = opened(gate, Recompute(top_p=0.6, anchor_every=None), -3.0)
    state, true = run(residual, torch.bfloat16)
    report = residual.recompute_report()
    assert report.share == 1 and report.predicted == 0 and measured(state, true) == (0, 0)


@pytest.mark.parametrize("every", [1, 3, 5, 100])
def test_anchors_come_at_every_kth_mixing_layer(gate, every):
    residual = opened(gate, Recompute(anchor_every=every), -3.0)
    run(residual, torch.float32)
    first = STREAMS - 1
    expected = [layer for layer in range(first, LAYERS) if (layer - first + 1) % every == 0 or layer == LAYERS - 1]
    assert list(residual.recompute_report().anchors) == expected


def test_the_report_counts_bytes_as_they_are_stored():
    residual = opened("competitive", Recompute(anchor_every=8, top_p=0.1), -3.0)
    run(residual, torch.bfloat16)
    report = residual.recompute_report()
    tokens, layers = 2 * 16, LAYERS - STREAMS + 1
    assert report.all_bytes == layers * tokens * STREAMS * WIDTH * 2
    assert report.update_bytes == layers * tokens * WIDTH * 2
    whole = layers // 8 + 1
    rows = math.ceil(0.1 * tokens * STREAMS)
    assert report.kept_bytes == (whole * tokens * STREAMS + (layers - whole) * rows) * WIDTH * 2
    assert report.share == report.kept_bytes / report.all_bytes
    with_updates = (report.kept_bytes + report.update_bytes) / (report.all_bytes + report.update_bytes)
    assert report.share_with_updates == with_updates
    assert f"{layers} mixing layers, {whole} of them kept whole" in str(report)


def test_a_report_is_of_the_last_forward_and_starts_empty():
    residual = opened("independent", Recompute(), -3.0)
    assert residual.recompute_report() == RecomputeReport(())
    assert (residual.recompute_report().share, residual.recompute_report().predicted) == (0, 0)
    run(residual, torch.float32)
    h, state = residual.start(torch.ones(1, WIDTH, requires_grad=True))
    for layer in range(STREAMS):
        h, state = residual.step(layer, h, state)
    assert residual.recompute_report().layers == (LayerKept(STREAMS - 1, "newest", 4, 4, 4 * WIDTH, 4 * WIDTH, 0.0),)


def test_rebuild_says_what_it_needs():
    residual = opened("independent", Recompute(), -3.0)
    with torch.no_grad():
        state, _ = run(residual, torch.float32)
    with pytest.raises(ValueError, match="holds no mixing layer to go down from; give one that step returned"):
        rebuild(state)


# ---- settings

WRONG = {
    "top_p text": (TypeError, {"top_p": "1"}, "top_p='1' is str; use a number from 0 to 1."),
    "top_p": (ValueError, {"top_p": 1.5}, "top_p=1.5 is not allowed"),
    "top_p nan": (ValueError, {"top_p": math.nan}, "top_p=nan is not allowed"),
    "max_gate": (ValueError, {"max_gate": 1.0}, "max_gate=1.0 is not allowed; use a number from 0 to 0.99."),
    "max_gate bool": (TypeError, {"max_gate": True}, "max_gate=True is bool"),
    "anchors": (ValueError, {"anchor_every": 0}, "anchor_every=0 is not allowed; use at least 1, 'auto' or None."),
    "anchors text": (TypeError, {"anchor_every": "all"}, "anchor_every='all' is no number of layers"),
    "anchors float": (TypeError, {"anchor_every": 4.0}, "anchor_every=4.0 is no number of layers"),
    "tolerance": (ValueError, {"tolerance": 0.0}, "tolerance=0.0 is not allowed; use a positive number, or None."),
    "tolerance inf": (ValueError, {"tolerance": math.inf}, "tolerance=inf is not allowed"),
    "no use": (ValueError, {"tolerance": 1e-3, "anchor_every": 4}, "tolerance=0.001 has no use with anchor_every=4"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_setting_gets_one_sentence(name):
    error, settings, sentence = WRONG[name]
    with pytest.raises(error, match=re.escape(sentence)) as raised:
        Recompute(**settings)
    assert "\n" not in str(raised.value)
