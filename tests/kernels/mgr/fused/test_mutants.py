"""Deliberately wrong kernels: each must fail the very comparison, at the very tolerance, that the right ones pass.

A mutant is the kernels' source with one string replaced, in the one file that holds it; a string that no file holds
fails its test.
"""

# ruff: noqa: E501  (one mutant a line)

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from depthlab.kernels import mgr

FOLDER = Path(mgr.__file__).parent
FILES = ("tiles", "equations", "rebuilding", "kernels")  # each imports only those before it
LOADED = {"HELD": False, "HELD_WEIGHTS": False}
READ, MIX = "read", "independent"

# name: (kind, what stands there, what the mutant says, how to run it)
MUTANTS = {
    "uniform gates": (MIX, "tl.sigmoid(z + bias)", "tl.sigmoid(tl.sum(tl.where(rows < N, z + bias, 0.0), 0) / N + 0.0 * z)", {}),
    "gates without their bias": (MIX, "tl.sigmoid(z + bias)", "tl.sigmoid(z)", {}),
    "independent gates for competitive": ("competitive", 'KIND == "competitive":\n        z = tl', "False:\n        z = tl", {}),
    "a forget share handed out": ("competitive", "tl.sum(e, 0) + e_0\n        return e / total, e_0", "tl.sum(e, 0)\n        return e / total, e_0", {}),
    "the forget logit's sign turned": ("competitive", "forget = tl.max(bias, 0)", "forget = -tl.max(bias, 0)", {}),
    "the carry and the gate swapped": (MIX, "beta * f[None, :] + (s - beta * s)", "beta * s + (f[None, :] - beta * f[None, :])", {}),
    "an update added, not mixed": (MIX, "beta * f[None, :] + (s - beta * s)", "beta * f[None, :] + s", {}),
    "a dropped stream": (READ, "tl.sum(alpha[:, None] * m, 0), cols, C)", "tl.sum(tl.where((rows < N - 1)[:, None], alpha[:, None] * m, 0.0), 0), cols, C)", {}),
    "an update appended first": ("append", "(rows == N - 1)[:, None], f", "(rows == 0)[:, None], f", {}),
    "uniform pool weights": (READ, "e / tl.sum(e, 0)", "tl.where(rows < N, 1.0, 0.0) / N", {}),
    "padded rows in the softmax": (READ, 'tl.where(rows < N, x, -float("inf"))\n    e', "x\n    e", {}),
    "a sum for a mean in the norm": (READ, "squares / C + eps", "squares + eps", {}),
    "eps outside the root": (READ, "tl.rsqrt(squares / C + eps)", "1.0 / (tl.sqrt(squares / C) + tl.sqrt(eps))", {"eps": 1e-2}),
    "no eps": (READ, "squares / C + eps", "squares / C", {"eps": 1e-2}),
    "no 1/sqrt(C)": (READ, "scale = C**-0.5", "scale = 1.0", {}),
    "alpha of the rounded streams": ("append", "m = make_streams(s, f, beta, rows, N, KIND)\n                mm", "m = make_streams(s, f, beta, rows, N, KIND).to(tl.float16).to(tl.float32)\n                mm", {}),
    "scores of the streams before mixing": (MIX, "mw = plus(mw, m * w, i)", "mw = plus(mw, s * w, i)", {}),
    "h without its norm": (READ, "rho * tl.sum(alpha[:, None] * m, 0)", "tl.sum(alpha[:, None] * m, 0)", {"normalize": True}),
    "only a first tile summed": (READ, "        return total + x\n", "        return total\n", {"BLOCK_C": 16}),
    "stale scores kept for the backward": (MIX, "store_numbers(kept + 1 + 2 * N, z", "store_numbers(kept + 1 + 2 * N, 0.0 * z", {}),
    "a stale norm kept for the backward": (MIX, "store_numbers(kept + 1 + N, r_m", "store_numbers(kept + 1 + N, 2.0 * r_m", {}),
    "(9) without its second term": (READ, " - shrink * along_p", "", {"normalize": True}),
    "(9) without p's share of a stream's gradient": (READ, "rho * g - shrink * tl.sum(alpha[:, None] * m, 0)", "rho * g", {"normalize": True}),
    "(9) without rho": (READ, "along_g_p = rho * along_g", "along_g_p = along_g", {"normalize": True}),
    "(10) without the mean": (READ, "alpha * (along_g_p - tl.sum(alpha * along_g_p, 0))", "alpha * along_g_p", {}),
    "(11) without the query": (READ, "d_m + to_w_pool[:, None] * w[None, :] - ", "d_m - ", {}),
    "(11) without the norm's own term": (READ, " - to_m[:, None] * m", "", {}),
    "(11) without the read": (READ, " + alpha[:, None] * g_p[None, :]", "", {}),
    "(11) without the upstream gradient": (MIX, "rows, cols, N, C, HELD) if HAS_D_MIXED else zero", "rows, cols, N, C, HELD) * 0.0 if HAS_D_MIXED else zero", {}),
    "(12) of the gradient of the scores alone": (READ, "to_w_pool = d_a * r_m * scale", "to_w_pool = d_a * scale", {}),
    "(13) without the stream": (MIX, "d_m * (f[None, :] - s)", "d_m * f[None, :]", {}),
    "(13) without beta's upstream gradient": (MIX, "d_beta += load_numbers(", "d_beta += 0.0 * load_numbers(", {}),
    "(14i) without 1 - beta": (MIX, "beta * (1.0 - beta) * d_beta", "beta * d_beta", {}),
    "(14c) without the mean": ("competitive", "beta * (d_beta - mean)", "beta * d_beta", {}),
    "(14c) without beta_0": ("competitive", "beta_0 * mean", "mean", {}),
    "(14c) with the bias's sign turned": ("competitive", "d_bias -= tl.where", "d_bias += tl.where", {}),
    "(14i) of the last token only": (MIX, "d_bias += d_z", "d_bias = d_z", {}),
    "(15) without the gate": (MIX, "tl.sum(beta[:, None] * d_m, 0), cols", "tl.sum(d_m, 0), cols", {}),
    "(16) without the carry": (MIX, "(1.0 - beta)[:, None] * d_m + ", "d_m + ", {}),
    "(16) without the gate's query": (MIX, " + to_w_gate[:, None] * w - to_s", " - to_s", {}),
    "(16) without the norm's own term": (MIX, " - to_s[:, None] * s", "", {}),
    "(17) of the mixed streams": (MIX, "tl.sum(to_w_gate[:, None] * s, 0)", "tl.sum(to_w_gate[:, None] * m, 0)", {}),
    "gate and pool queries swapped": (MIX, "w_gate_held = hold_row(w_gate_ptr", "w_gate_held = hold_row(w_pool_ptr", {"HELD_WEIGHTS": True}),
    "a stale norm of the read kept for the backward": (READ, "tl.store(kept, rho)", "tl.store(kept, 1.0)", {"normalize": True}),
    "a token dealt to nobody": (READ, "is_long, long_tokens, n_tokens", "is_long, long_tokens - 1, n_tokens", {}),
    "a token dealt out twice": (READ, "long_tokens + program - n_long", "long_tokens - 1 + program - n_long", {}),
    "gate and pool scores swapped": (MIX, "store_numbers(kept + 1, a", "store_numbers(kept + 1, z", {}),
    "the last stream not loaded": (READ, "(rows < N)[:, None] & (cols < C)[None, :]\n    return", "(rows < N - 1)[:, None] & (cols < C)[None, :]\n    return", {}),
    "columns of the next row": (READ, "(rows < N)[:, None] & (cols < C)[None, :]\n    return", "(rows < N)[:, None] & (cols < C + 1)[None, :]\n    return", {}),
    "an update past its end": (MIX, "mask=cols < C, other=0.0", "mask=cols < C, other=1.0", {}),
    "half precision products": (READ, "mask=mask, other=0.0).to(tl.float32)", "mask=mask, other=0.0).to(tl.float16).to(tl.float32)", {}),
    "one bias for all streams": (MIX, 'rows * 0 if KIND == "competitive" else rows', "rows * 0", {}),
    "kept numbers of other streams": (MIX, "tl.load(ptr + rows, mask=rows < N, other=0.0)", "tl.load(ptr + (N - 1 - rows), mask=rows < N, other=0.0)", {}),
}  # fmt: skip


# The backward that rebuilds its input. name: (what stands there, what the mutant says, dtype, constants)
HALF, FULL = torch.float16, torch.float32
INVERTING = {
    "(18) towards the update": ("m + odds[:, None]", "m - odds[:, None]", FULL, {}),
    "(18) without 1 / (1 - beta)": ("beta / tl.where(beta < 1.0, 1.0 - beta, 1.0), 0.0", "beta, 0.0", FULL, {}),
    "(18) without the gate": ("m + odds[:, None] *", "m + 0.0 * odds[:, None] *", FULL, {}),
    "(18) without the update": ("(m - f[None, :])", "m", FULL, {}),
    "the mixed streams taken for the streams": ("unmix(m, f, odds).to", "m.to", FULL, {}),
    "the mixed streams where tiles are loaded": ("            s_ptr = r_ptr\n", "", FULL, LOADED),
    "a slot off by one": ("slots.to(tl.int64)[:, None] * C", "(slots.to(tl.int64)[:, None] - 1) * C", FULL, {}),
    "another stream's slot": ("tl.load(ptr + rows, mask=rows < N, other=-1)", "tl.load(ptr + (N - 1 - rows), mask=rows < N, other=-1)", FULL, {}),
    "another token's slots": ("slots_ptr + at * N", "slots_ptr", FULL, {}),
    "exact rows ignored": ("    if EXACT:\n        s = put", "    if False:\n        s = put", FULL, {}),
    "the first exact row only": ("if tl.max(slots, 0) >= 0", "if tl.max(slots, 0) == 0", FULL, {}),
    "streams used before they are rounded": (".to(s_ptr.dtype.element_ty).to(tl.float32)", "", HALF, {}),
    "streams not stored": ("    store_tile(s_ptr, s, rows, cols, N, C)\n    return s", "    return s", FULL, {}),
    "streams stored for a first token": ("rebuilt_ptr + at * N * C", "rebuilt_ptr", FULL, {}),
}  # fmt: skip


SETTINGS = [(kind, how) for kind, _, _, how in MUTANTS.values()]
SETTINGS = [x for i, x in enumerate(SETTINGS) if x not in SETTINGS[:i]]


@pytest.fixture
def copied(tmp_path, monkeypatch, force):
    """copied(old, new, **constants): the kernels that run are a copy, in one of whose files `old` reads `new`."""

    def install(old: str = "", new: str = "", **constants) -> None:
        sources = {name: (FOLDER / f"{name}.py").read_text(encoding="utf-8") for name in FILES}
        holding = [name for name, source in sources.items() if old and old in source]
        assert len(holding) == bool(old), f"{len(holding)} files say {old!r}: state this mutant anew"
        for name, source in sources.items():
            source = source.replace(old, new) if name in holding else source
            path = tmp_path / f"copied_{name}.py"
            path.write_text(source.replace("depthlab.kernels.mgr.", "copied_"), encoding="utf-8")
            spec = importlib.util.spec_from_file_location(path.stem, path)
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, path.stem, module)
            spec.loader.exec_module(module)
        monkeypatch.setattr(mgr, "kernels", module, raising=False)
        force(**constants)

    return install


def worst(fused, kind: str, how: dict) -> float:
    how = {k: v for k, v in how.items() if k.islower()}
    return max(fused.errors(kind, fused.draw(kind, None, 3, 40), **how).values())


@pytest.mark.parametrize(("kind", "how"), SETTINGS)
def test_an_unchanged_copy_passes(fused, copied, kind, how):
    copied(**{k: v for k, v in how.items() if k.isupper()})
    assert worst(fused, kind, how) <= 1


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(fused, copied, name):
    kind, old, new, how = MUTANTS[name]
    copied(old, new, **{k: v for k, v in how.items() if k.isupper()})
    assert worst(fused, kind, how) > 4  # so 2,000 float32 roundoffs and more


def worst_inverting(fused, truth, dtype) -> float:
    """Of streams beside the true ones, and of gradients beside numpy's at the streams that came back."""
    inputs = fused.draw("independent", 4, 3, 40, (dtype, dtype, torch.float32))
    made, upstream, (streams, *grads) = fused.invert("independent", inputs, normalize=True)
    arrays = [x.double().cpu().numpy() for x in (streams, *inputs)]
    expected = truth.layer_at(*arrays, "independent", True, 1e-6, [x.double().cpu().numpy() for x in upstream])
    pairs = zip(fused.names("independent")[3:], grads, expected, strict=True)
    found = [fused.excess(name, x, torch.from_numpy(y)) for name, x, y in pairs]
    return max(fused.rebuilding_error(streams, inputs[0], made, 0.5), *found)


@pytest.mark.parametrize("constants", [{}, LOADED])
@pytest.mark.parametrize("dtype", [FULL, HALF])
def test_an_unchanged_copy_inverts(fused, truth, copied, dtype, constants):
    copied(**constants)
    assert worst_inverting(fused, truth, dtype) <= 1


@pytest.mark.parametrize("name", INVERTING)
def test_a_mutant_of_inverting_fails(fused, truth, copied, name):
    old, new, dtype, constants = INVERTING[name]
    copied(old, new, **constants)
    assert worst_inverting(fused, truth, dtype) > 4


def test_pooling_the_rounded_streams_is_told_apart_in_half_precision(fused, copied):
    """What is right in float32 and wrong in float16: scores and pool of the streams as they were stored."""
    old = "m = make_streams(s, f, beta, rows, N, KIND)\n                if KIND"
    inputs = fused.draw("independent", None, 4, 100, torch.float16)
    copied(old, old.replace("\n", ".to(tl.float16).to(tl.float32)\n", 1))
    assert fused.errors("independent", inputs)["pooled"] > 1


def test_a_replacement_that_finds_nothing_is_no_mutant(copied):
    with pytest.raises(AssertionError, match="state this mutant anew"):
        copied("what no kernel says", "")
