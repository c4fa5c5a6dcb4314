"""Saturated gates, nearly cancelling rows, equal, zero, huge and tiny streams, and what rounding does to the bound."""

import math
from functools import partial

import pytest
import torch

GATES = ("independent", "competitive")
KINDS = (*GATES, "append", "read")


@pytest.fixture(params=GATES)
def gate(request) -> str:
    return request.param


def stored(kind: str) -> int:
    """How many of a kind's inputs are streams and update; the others are weights."""
    return 1 if kind == "read" else 2


def all_finite(tensors) -> bool:
    return all(bool(torch.isfinite(x).all()) for x in tensors)


@pytest.mark.parametrize("bias", [-100.0, 100.0])
def test_saturated_gates_give_finite_right_gradients(fused, gate, bias):
    inputs = fused.draw(gate, None, 3, 20)
    inputs[3] = torch.full_like(inputs[3], bias)
    fused.check(gate, inputs, normalize=True)
    fused.check(gate, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_both_end_points_of_the_gate_are_exact(fused, gate, dtype):
    streams, update, w_gate, bias, w_pool = fused.draw(gate, None, 3, 19, dtype)
    cases = [(-1e4, 0.0, streams), (1e4, 1.0, update.unsqueeze(1).expand_as(streams))]
    if gate == "competitive":
        cases = [(1e4, 0.0, streams)]
    for logit, share, expected in cases:
        b = torch.full_like(bias, logit)
        mixed, _, beta = fused.run(gate, (streams, update, w_gate, b, w_pool))
        assert torch.equal(beta, torch.full_like(beta, share))
        assert torch.equal(mixed, expected)


def test_one_stream_that_wins_the_competition_becomes_the_update(fused):
    streams, update, w_gate, bias, w_pool = fused.draw("competitive", 3, 3, 16)
    streams[:] = -w_gate
    streams[:, 1] = w_gate  # a score of +50 |RMS| against -50, and a forget logit far below
    mixed, _, beta = fused.run("competitive", (streams, update, 40 * w_gate, bias - 1e4, w_pool))
    assert beta.tolist() == [[0.0, 1.0, 0.0]] * 3
    assert torch.equal(mixed[:, 1], update) and torch.equal(mixed[:, ::2], streams[:, ::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_half_open_gate_between_equal_ends_returns_them(fused, gate, dtype):
    """s = F: the interpolation's two roundings are all that may move it."""
    streams, update, *weights = fused.draw(gate, None, 3, 19, dtype)
    mixed = fused.run(gate, (update.unsqueeze(1).expand_as(streams), update, *weights))[0]
    far = (mixed.double() - update.unsqueeze(1).double()).abs() / update.unsqueeze(1).double().abs()
    assert far.max() <= torch.finfo(dtype).eps / 2 + roundings(fused) * 2.0**-24


def roundings(fused) -> int:
    """Of the interpolation b f + (s - b s): two fused multiply-adds on a GPU, four operations in the interpreter."""
    return 4 if fused.interpreted else 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_norm_bound_holds_with_its_rounding_term(fused, gate, dtype):
    """|s'| <= max(|s|, |F|) (1 + roundings), tight where s and F agree; and |p| <= max |s'|."""
    streams, update, *weights = fused.draw(gate, None, 4, 23, dtype)
    streams[1:, :2] = update[1:, None] * streams.new_tensor([1.0, 1.0])[:, None]  # where the bound is tight
    mixed, pooled, _ = fused.run(gate, (streams, update, *weights))
    norm = lambda x: x.double().square().sum(-1).sqrt()  # noqa: E731
    stored = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    bound = torch.maximum(norm(streams), norm(update)[:, None])
    assert (norm(mixed) <= bound * (1 + stored) * (1 + roundings(fused) * 2.0**-24)).all()
    n = streams.shape[1]  # the pool's weights sum to 1 within n roundings and their quotients'
    assert (norm(pooled) <= norm(mixed).amax(-1) * (1 + 2 * stored) * (1 + (2 * n + 8) * 2.0**-24)).all()


@pytest.mark.parametrize("left", [1e-3, 1e-4, 1e-5, 1e-6])
def test_rows_where_update_and_stream_nearly_cancel(fused, left):
    """F = -s + tiny with gates near one half: |s'| is down to 1e-6 |s|, and its norm must come from s' itself.

    What no float32 kernel can help: beta and the interpolation round relatively to |s|, so the stored s' may be off by
    a few 2^-24 |s|. So s' is compared on that scale, and the read with the float64 read of the very s' that came out.
    """
    n, width, tokens = 3, 96, 9 if fused.interpreted else 4000
    g = torch.Generator().manual_seed(5)
    update = torch.randn(tokens, width, generator=g, dtype=torch.float64)
    streams = -update[:, None] + 2 * left * torch.randn(tokens, n, width, generator=g, dtype=torch.float64)
    w = torch.zeros(width, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    w_pool = 3 * torch.randn(width, generator=g, dtype=torch.float64)
    inputs = [x.float().to(fused.device) for x in (streams, update, *w, w_pool)]
    how = {"normalize": True, "eps": 1e-30}
    outputs, grads = fused.with_gradients(lambda x: fused.run("independent", x, **how), inputs)
    mixed, pooled, beta = outputs
    assert all_finite(outputs) and all_finite(grads)
    assert torch.equal(beta, torch.full_like(beta, 0.5))  # a half is exact, so the interpolation is the only rounding
    exact = (inputs[0].double() + inputs[1].double()[:, None]) / 2
    size = exact.norm(dim=-1).max() / inputs[0].double().norm(dim=-1).max()
    assert 0.3 * left < size < 3 * left
    ends = inputs[0].double().abs() + inputs[1].double().abs()[:, None]
    assert ((mixed.double() - exact).abs() <= roundings(fused) * 2.0**-24 * ends / 2).all()
    read = fused.run("read", (mixed.double(), inputs[4].double()), backend="reference", **how)[0]
    assert fused.excess("pooled", pooled, read) <= 1


@pytest.mark.parametrize("left", [1e-3, 1e-4, 1e-5, 1e-6])
def test_gradients_of_nearly_cancelling_rows(fused, left):
    """They grow as 1 / |s'|; on that scale they are right up to the rounding of s' itself, 2^-24 |s| / |s'|."""
    n, width, tokens = 2, 96, 5 if fused.interpreted else 2000
    g = torch.Generator().manual_seed(6)
    update = torch.randn(tokens, width, generator=g, dtype=torch.float64)
    streams = -update[:, None] + 2 * left * torch.randn(tokens, n, width, generator=g, dtype=torch.float64)
    zeros = torch.zeros(width, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    w_pool = 3 * torch.randn(width, generator=g, dtype=torch.float64)
    inputs = [x.float().to(fused.device) for x in (streams, update, *zeros, w_pool)]
    found = fused.errors("independent", inputs, normalize=True, eps=1e-30)
    condition = 1 / left
    assert max(found.values()) <= max(1.0, condition * 40 / 128), found


@pytest.mark.parametrize("kind", KINDS)
def test_equal_streams_stay_equal_and_teach_the_query_nothing(fused, kind):
    inputs = fused.draw(kind, None, 3, 24)
    inputs[0] = inputs[0][:, :1].expand(-1, 3, -1).contiguous()
    if kind == "append":
        inputs[1] = inputs[0][:, 0].clone()
    if kind == "independent":
        inputs[3] = inputs[3][:1].expand(3).contiguous()
    upstream = None
    if kind != "read":
        made = fused.run(kind, inputs)
        upstream = fused.upstream_of(made)
        upstream[0] = upstream[0][:, :1].expand_as(upstream[0]).contiguous()
        if len(upstream) == 3:
            upstream[2] = upstream[2][:, :1].expand_as(upstream[2]).contiguous()
    outputs, grads = fused.with_gradients(lambda x: fused.run(kind, x), inputs, upstream)
    for x in ([outputs[0]] if kind != "read" else []) + [grads[0]]:
        assert torch.equal(x, x[:, :1].expand_as(x))
    assert grads[-1].abs().max() <= 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eps", [1e-6, 1.2e-38])
def test_zero_streams_and_a_zero_update_stay_finite(fused, kind, eps):
    inputs = fused.draw(kind, None, 3, 12)
    for x in inputs[: stored(kind)]:
        x.zero_()
    for normalize in (False, True):
        outputs, grads = fused.with_gradients(partial(fused.run, kind, normalize=normalize, eps=eps), inputs)
        assert all_finite(outputs) and all_finite(grads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("power", [-55, -40, -15, 20, 40, 57])
def test_streams_of_any_size_are_scaled_not_changed(fused, kind, power):
    """Streams and update times 2^k and eps times 4^k scale s', leave h and beta, and divide the gradients by 2^k.

    Up to 1e17: no square overflows, and nothing in the backward may either, or vanish.
    """
    inputs = fused.draw(kind, None, 3, 24)
    which = {"append": (1,), "read": (0,)}.get(kind, (1, 2))
    results = []
    for size in (1.0, 2.0**power):
        scaled = [x * size if i < stored(kind) else x for i, x in enumerate(inputs)]
        layer = partial(fused.run, kind, normalize=True, eps=1e-3 * size**2)
        outputs, grads = fused.with_gradients(layer, scaled, which=which)
        results.append([outputs[i] for i in which] + [g * size if i < stored(kind) else g for i, g in enumerate(grads)])
    for x, y in zip(*results, strict=True):
        assert torch.isfinite(y).all()
        assert (x - y).abs().max() <= 1e-6 * max(1.0, x.abs().max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_reaches_its_own_token_and_no_other(fused, kind, wrong):
    inputs = fused.draw(kind, 9, 3, 12)
    clean = fused.with_gradients(lambda x: fused.run(kind, x, normalize=True), inputs)
    inputs[0][4, 1, 2] = wrong
    outputs, grads = fused.with_gradients(lambda x: fused.run(kind, x, normalize=True), inputs)
    per_token = stored(kind)
    for x, y in zip([*outputs, *grads[:per_token]], [*clean[0], *clean[1][:per_token]], strict=True):
        x, y = x.flatten(1), y.flatten(1)
        others = [t for t in range(9) if t != 4]
        assert torch.equal(x[others], y[others])
    assert torch.isnan(outputs[-1 if kind in ("append", "read") else 1][4]).any()
    assert not all_finite(grads[per_token:])  # a weight's gradient is a sum over tokens: it must not hide the NaN
