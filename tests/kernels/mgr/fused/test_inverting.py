"""The backward that rebuilds its input: streams beside the true ones, gradients beside the float64 reference.

Tolerances are those of conftest.py. A wide-open gate loses digits by right, so gradients are compared with those at the
true streams where the rows with gates above one half are kept; all others with those at the streams that came back.
"""

import pytest
import torch

from depthlab.kernels import mgr
from depthlab.kernels.mgr import ops

GATES = ("independent", "competitive")
SHAPES = [(1, 1), (1, 33), (2, 5), (3, 100), (4, 257), (5, 33), (8, 12), (11, 5), (15, 33), (16, 7)]
HALF = (torch.float16, torch.bfloat16)
KEPT = {"none given": None, "none": float("inf"), "some": 0.5, "all": -1.0}  # exact: the rows with gates above this
LOADED = {"HELD": False, "HELD_WEIGHTS": False}
TILES = {
    "held, one tile": {"HELD": True, "BLOCK_C": 128},
    "held, three tiles": {"HELD": True, "BLOCK_C": 32},
    "loaded, one tile": {**LOADED, "BLOCK_C": 128},
    "loaded, three tiles": {**LOADED, "BLOCK_C": 32},
    "eight elements a lane": {"VEC": 8},
}


@pytest.fixture(params=GATES)
def gate(request) -> str:
    return request.param


def check(fused, gate, inputs, **how) -> None:
    found = fused.inverting_errors(gate, inputs, **how)
    assert max(found.values()) <= 1, found


def check_at_rebuilt(fused, truth, gate, inputs, above, normalize) -> None:
    """Streams beside the true ones; gradients beside numpy's at the streams that came back."""
    made, upstream, (streams, *grads) = fused.invert(gate, inputs, above=above, normalize=normalize)
    above = float("inf") if above is None else above
    assert fused.rebuilding_error(streams, inputs[0], made, above) <= 1
    arrays = [x.double().cpu().numpy() for x in (streams, *inputs)]
    expected = truth.layer_at(*arrays, gate, normalize, 1e-6, [x.double().cpu().numpy() for x in upstream])
    pairs = zip(fused.names(gate)[3:], grads, expected, strict=True)
    terms = len(streams) ** 0.5  # of a bias' gradient, which may cancel
    found = {
        name: fused.excess(name, x, torch.from_numpy(y), terms if name == "d_bias" else 1.0) for name, x, y in pairs
    }
    assert max(found.values()) <= 1, found


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("n", "width"), SHAPES)
def test_float32(fused, gate, normalize, n, width):
    check(fused, gate, fused.draw(gate, 5 if width == 1 else None, n, width), normalize=normalize)


@pytest.mark.parametrize("kept", KEPT)
def test_streams_are_rebuilt_in_the_one_kernel_that_makes_the_gradients(fused, gate, kept, monkeypatch):
    launch, seen = ops._launch, []

    def watched(kernel, how, shares, pooled, n, kind, normalize, arguments, flags):
        seen.append((kernel.fn.__name__, flags.get("INVERT", False), flags.get("EXACT", False)))
        return launch(kernel, how, shares, pooled, n, kind, normalize, arguments, flags)

    monkeypatch.setattr(ops, "_launch", watched)
    fused.invert(gate, fused.draw(gate, 3, 2, 12), above=KEPT[kept])
    up, down = seen
    assert up == ("layer_fwd_kernel", False, False)
    assert down == ("layer_bwd_kernel", True, KEPT[kept] is not None)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_gradients_are_those_at_the_streams_handed_on(fused, truth, gate, dtype, kept):
    tokens = 4 if fused.interpreted else 61
    inputs = fused.draw(gate, tokens, 3, 40, (dtype, dtype, torch.float32))
    check_at_rebuilt(fused, truth, gate, inputs, KEPT[kept], normalize=True)
    if kept == "some" and dtype == torch.float32:
        check_at_rebuilt(fused, truth, gate, inputs, KEPT[kept], normalize=False)


@pytest.mark.parametrize("name", TILES)
def test_any_tiling(fused, truth, gate, force, name):
    force(**TILES[name])
    check(fused, gate, fused.draw(gate, None, 3, 90), normalize=True)
    inputs = fused.draw(gate, 3, 5, 90, (torch.float16, torch.float16, torch.float32))
    check_at_rebuilt(fused, truth, gate, inputs, 0.5, normalize=True)


@pytest.mark.parametrize(("n", "width"), [(4, 768), (4, 1280), (7, 2049), (2, 8192), (16, 1030)])
def test_wide_streams(fused, gate, n, width):
    check(fused, gate, fused.draw(gate, 3, n, width), normalize=True)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("n", "width"), [(1, 7), (3, 40)])
def test_half_precision_beside_the_true_streams(fused, gate, dtype, n, width):
    """What rounding costs the gradients, in roundings of their largest value: measured up to 5, allowed 8.

    Few tokens on a GPU, too. Among 2,003 some streams are small beside what they become, and their gradients as much
    less certain: 14 roundings there, 33 in plain torch."""
    unit = torch.finfo(dtype).eps / 2 * (2 if dtype == torch.bfloat16 and fused.interpreted else 1)
    inputs = fused.draw(gate, 3, n, width, (dtype, dtype, torch.float32))
    check(fused, gate, inputs, normalize=True, spare=8 * unit)


@pytest.mark.parametrize("dtype", HALF)
def test_weights_may_be_of_another_dtype(fused, gate, dtype):
    check(fused, gate, fused.draw(gate, None, 3, 40, (torch.float32, torch.float32, dtype)), normalize=True)


WHICH = [(0,), (1,), (2,), (0, 1), (1, 2)]


@pytest.mark.parametrize("which", WHICH)
def test_outputs_that_nobody_differentiates(fused, gate, which):
    check(fused, gate, fused.draw(gate, None, 3, 20), which=which, normalize=True)


def coarse(fused, dtype):
    """Streams and update of few bits and gates of 1/8, 1/4, 1/2 and 3/4, so that mixing loses none."""
    g = torch.Generator().manual_seed(2)
    tokens, n, width = 5, 4, 36
    streams = torch.randint(-3, 4, (tokens, n, width), generator=g) / 2
    update = torch.randint(-3, 4, (tokens, width), generator=g) / 2
    bias = torch.logit(torch.tensor([1 / 8, 1 / 4, 1 / 2, 3 / 4]))
    inputs = (streams.to(dtype), update.to(dtype), torch.zeros(width), bias, torch.randn(width, generator=g))
    return [x.to(fused.device) for x in inputs]


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_where_mixing_rounds_nothing_the_very_streams_and_gradients_come_back(fused, force, dtype, held):
    if dtype == torch.bfloat16 and fused.interpreted:
        pytest.skip("the interpreter truncates: 0.4999 of an ulp short is an ulp short")
    force(HELD=held, BLOCK_C=32, HELD_WEIGHTS=held)
    inputs = coarse(fused, dtype)
    (_, beta), upstream, (streams, *grads) = fused.invert("independent", inputs, above=None, normalize=True)
    assert (beta - beta.new_tensor([1 / 8, 1 / 4, 1 / 2, 3 / 4])).abs().max() <= 1e-7
    # A GPU's gates may be off by a roundoff, of which a stream that is 0 shows a trace; all other values are the same.
    assert (streams - inputs[0]).abs().max() <= (0 if fused.interpreted else 1e-6)
    assert torch.equal(streams[inputs[0] != 0], inputs[0][inputs[0] != 0])
    _, true = fused.with_gradients(lambda x: fused.run("independent", x, normalize=True), inputs, upstream)
    pairs = list(zip(fused.names("independent")[3:], grads, true, strict=True))
    if fused.interpreted:  # a GPU's compiler may fuse other multiplications and additions
        assert all(torch.equal(x, y) for _, x, y in pairs)
    assert all(fused.excess(name, x, y.double()) <= 1 for name, x, y in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("held", [True, False])
def test_a_gate_of_exactly_one_with_its_row_kept_has_finite_right_gradients(fused, truth, force, dtype, held):
    force(HELD=held, BLOCK_C=32, HELD_WEIGHTS=held)
    inputs = fused.draw("independent", 4, 3, 40, (dtype, dtype, torch.float32))
    inputs[3][1] = 100.0
    (_, beta), _, _ = fused.invert("independent", inputs)
    assert torch.equal(beta[:, 1], torch.ones(4, device=fused.device))
    check_at_rebuilt(fused, truth, "independent", inputs, 0.5, normalize=True)
    if dtype == torch.float32:
        check(fused, "independent", inputs, normalize=True)


def test_a_gate_of_exactly_one_without_its_row_spoils_no_other(fused):
    """Nothing is left of such a stream: it comes back as the update, finite, and the other rows as they do anyway."""
    inputs = fused.draw("independent", 4, 3, 40)
    inputs[3][1] = 100.0
    (_, beta), _, (streams, *grads) = fused.invert("independent", inputs, above=None)
    assert all(bool(torch.isfinite(x).all()) for x in (streams, *grads))
    assert torch.equal(streams[:, 1], inputs[1])
    _, _, (kept, *_) = fused.invert("independent", inputs, above=0.9999999)
    assert torch.equal(kept[:, ::2], streams[:, ::2]) and torch.equal(kept[:, 1], inputs[0][:, 1])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_its_own_token_and_no_other(fused, gate, wrong):
    inputs = fused.draw(gate, 5, 3, 12)
    _, _, (clean, d_clean, *_) = fused.invert(gate, inputs, above=None, normalize=True)
    inputs[0][2, 1, 4] = wrong
    _, _, (streams, d_streams, *grads) = fused.invert(gate, inputs, above=None, normalize=True)
    others = [0, 1, 3, 4]
    assert torch.equal(streams[others], clean[others]) and torch.equal(d_streams[others], d_clean[others])
    assert not torch.isfinite(streams[2]).all() and not torch.isfinite(grads[1]).all()


def test_both_backends_rebuild_the_same_streams(fused, gate):
    """The kernel, the torch backend and `unmix` alone: to one rounding of float32 arithmetic."""
    inputs = fused.draw(gate, None, 3, 40)
    (mixed, beta), _, (streams, *_) = fused.invert(gate, inputs)
    alone = mgr.unmix(mixed, fused.keep_rows(inputs[0], beta, 0.5), inputs[1], beta)
    plain = fused.invert(gate, inputs, backend="torch")[2][0]
    size = inputs[0].abs().max()
    assert (streams - alone).abs().max() <= 4 * 2.0**-24 * size
    assert (streams - plain).abs().max() <= 16 * 2.0**-24 * size  # its gates and mixed streams are its own


@pytest.mark.parametrize("which", [(0, 1, 2), (0,)])
def test_gradients_of_kept_streams_are_those_of_the_layer_bit_for_bit(fused, gate, which):
    inputs = fused.draw(gate, None, 3, 40, (torch.float16, torch.float16, torch.float32))
    outputs, true = fused.with_gradients(lambda x: fused.run(gate, x, normalize=True), inputs, which=which)
    upstream = [x if i in which else None for i, x in enumerate(fused.upstream_of(outputs))]
    how = {"gate": gate, "normalize": True, "backend": "triton"}
    kept = mgr.mix_and_pool_forward(*inputs, **how)[3]
    found = mgr.mix_and_pool_gradients(*inputs, kept, *upstream, **how)
    assert all(torch.equal(x, y) for x, y in zip(found, true, strict=True))


def test_two_calls_are_equal_bit_for_bit(fused, gate):
    inputs = fused.draw(gate, None, 4, 33)
    first, second = (fused.invert(gate, inputs, normalize=True)[2] for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_leading_dimensions_do_not_matter(fused, gate):
    inputs = fused.draw(gate, 4, 3, 16)
    flat = fused.invert(gate, inputs)[2]
    shaped = fused.invert(gate, [x.unflatten(0, (2, 1, 2)) if i < 2 else x for i, x in enumerate(inputs)])[2]
    assert shaped[0].shape == shaped[1].shape == (2, 1, 2, 3, 16) and shaped[2].shape == (2, 1, 2, 16)
    assert all(torch.equal(x.flatten(), y.flatten()) for x, y in zip(flat, shaped, strict=True))


def test_no_tokens_give_no_tokens_and_zero_weight_gradients(fused, gate):
    _, _, (streams, d_streams, d_update, *weights) = fused.invert(gate, fused.draw(gate, 0, 3, 16))
    assert streams.shape == d_streams.shape == (0, 3, 16) and d_update.shape == (0, 16)
    assert all(not x.any() for x in weights)


def test_what_the_torch_backend_kept_is_refused(fused, gate):
    inputs = fused.draw(gate, 2, 3, 8)
    mixed, pooled, beta, kept = mgr.mix_and_pool_forward(*inputs, gate=gate, backend="torch")
    with pytest.raises(ValueError, match="kept is empty.*use one backend for the forward and the backward"):
        mgr.mix_and_pool_backward(
            mixed, None, *inputs[1:], beta, kept, mixed, pooled, None, gate=gate, backend="triton"
        )
