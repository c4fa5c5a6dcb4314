"""Every output and every input's and weight's gradient against the float64 reference, and against numpy."""

import numpy as np
import pytest
import torch

from depthlab.kernels.mgr import ops

KINDS = ("independent", "competitive", "append", "read")
SHAPES = [(1, 1), (1, 33), (2, 5), (3, 100), (4, 257), (5, 33), (8, 12), (11, 5), (15, 33), (16, 7)]
HALF = (torch.float16, torch.bfloat16)


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("n", "width"), SHAPES)
def test_float32(fused, kind, normalize, n, width):
    if kind == "append" and n == 16:
        pytest.skip("16 streams take no other")
    tokens = 5 if width == 1 else None
    fused.check(kind, fused.draw(kind, tokens, n, width), normalize=normalize)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("n", "width"), [(1, 7), (3, 100), (4, 33)])
def test_half_precision(fused, kind, dtype, n, width):
    fused.check(kind, fused.draw(kind, None, n, width, dtype), normalize=True)


MIXED = {
    "float32 streams, bfloat16 update": (torch.float32, torch.bfloat16, torch.float32),
    "float32 streams, float16 update": (torch.float32, torch.float16, torch.float32),
    "float16 streams, float32 update": (torch.float16, torch.float32, torch.float16),
    "bfloat16 with float32 weights": (torch.bfloat16, torch.bfloat16, torch.float32),
    "float32 with bfloat16 weights": (torch.float32, torch.float32, torch.bfloat16),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_dtypes(fused, kind, name):
    fused.check(kind, fused.draw(kind, None, 3, 40, MIXED[name]), normalize=True)


@pytest.mark.parametrize(("n", "width"), [(4, 768), (4, 1280), (7, 2049), (2, 8192), (16, 1030), (15, 8191)])
def test_wide_streams(fused, kind, n, width):
    if kind == "append" and n == 16:
        n = 15
    fused.check(kind, fused.draw(kind, 3, n, width), normalize=True)


@pytest.mark.parametrize(("tokens", "programs"), [(1, 1), (2, 2), (7, 3), (20, 2), (13, 8)])
def test_any_number_of_tokens_is_dealt_out(fused, monkeypatch, tokens, programs):
    monkeypatch.setattr(ops, "INTERPRETED_PROGRAMS", programs)
    fused.check("independent", fused.draw("independent", tokens, 2, 3))


TILES = {
    "held, one tile": {"HELD": True, "BLOCK_C": 128},
    "held, three tiles": {"HELD": True, "BLOCK_C": 32},
    "held, loaded weights": {"HELD": True, "HELD_WEIGHTS": False, "BLOCK_C": 128},
    "loaded, one tile": {"HELD": False, "HELD_WEIGHTS": False, "BLOCK_C": 128},
    "loaded, three tiles": {"HELD": False, "HELD_WEIGHTS": False, "BLOCK_C": 32},
    "single elements a lane": {"VEC": 1},
    "eight elements a lane": {"VEC": 8},
}


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", TILES)
def test_any_tiling(fused, kind, force, name, normalize):
    force(**TILES[name])
    fused.check(kind, fused.draw(kind, None, 3, 90), normalize=normalize)


def test_other_tiles_change_only_the_last_bits(fused, kind, force):
    inputs = fused.draw(kind, 4, 3, 90)
    results = []
    for how in TILES.values():
        force(**how)
        outputs, grads = fused.with_gradients(lambda x: fused.run(kind, x, normalize=True), inputs)
        results.append([*outputs, *grads])
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            assert (x - y).abs().max() <= 1e-6 * max(1.0, x.abs().max())


WHICH = {
    "independent": [(0,), (1,), (2,), (0, 2), (1, 2)],
    "competitive": [(0,), (1,), (2,), (0, 1)],
    "append": [(0,), (1,)],
}


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("kind", "which"), [(k, w) for k, ws in WHICH.items() for w in ws])
def test_outputs_that_nobody_differentiates(fused, kind, which, normalize):
    fused.check(kind, fused.draw(kind, None, 3, 20), which=which, normalize=normalize)


@pytest.mark.parametrize("eps", [1e-2, 0.5])
def test_eps_reaches_every_root(fused, kind, eps):
    inputs = fused.draw(kind, None, 3, 20)
    fused.check(kind, inputs, normalize=True, eps=eps)
    apart = fused.run(kind, inputs, normalize=True, eps=eps)[-1] - fused.run(kind, inputs, normalize=True)[-1]
    assert apart.abs().max() > 1e-4


@pytest.mark.parametrize("normalize", [False, True])
def test_numpy_agrees_token_by_token(fused, truth, kind, normalize):
    tokens = 3
    inputs = fused.draw(kind, tokens, 3, 21)
    outputs, grads = fused.with_gradients(lambda x: fused.run(kind, x, normalize=normalize), inputs)
    arrays = [x.double().cpu().numpy() for x in inputs]
    upstream = [x.double().cpu().numpy() for x in fused.upstream_of(outputs)]
    if kind in ("independent", "competitive"):
        expected = truth.layer(*arrays, kind, normalize, 1e-6, upstream)
    else:
        rows, d_pool = [], 0
        for t in range(tokens):
            if kind == "append":
                v = truth.append_token(arrays[0][t], arrays[1][t], arrays[2], normalize, 1e-6)
                g_mixed, g_h = upstream[0][t], upstream[1][t]
            else:
                v = truth.pool_token(arrays[0][t], arrays[1], normalize, 1e-6)
                g_mixed, g_h = 0 * arrays[0][t], upstream[0][t]
            d_mixed, share = truth.read_backward(v, arrays[-1], g_mixed, g_h, normalize)
            d_pool = d_pool + share
            rows.append((v.mixed, v.h, d_mixed[:-1], d_mixed[-1]) if kind == "append" else (v.h, d_mixed))
        expected = (*(np.stack(x) for x in zip(*rows, strict=True)), d_pool)
    pairs = zip(fused.names(kind), [*outputs, *grads], expected, strict=True)
    found = {name: fused.excess(name, x, torch.from_numpy(y)) for name, x, y in pairs}
    assert max(found.values()) <= 1, found
