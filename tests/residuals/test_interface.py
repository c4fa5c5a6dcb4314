"""What every scheme promises whoever builds a model on it: precision, casts, copies, compilation, clear refusals."""

import copy
import io
import pickle
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from depthlab.kernels import mgr
from depthlab.kernels.mgr import function
from depthlab.residuals import SCHEMES, Recompute, Residual, build, parameter_groups

WIDTH, LAYERS = 8, 6
WITH_PARAMETERS = [s for s in SCHEMES if s != "prenorm"]

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")


@pytest.fixture(params=SCHEMES)
def scheme(request):
    return request.param


@pytest.fixture
def residual(scheme, shake):
    return shake(build(scheme, WIDTH, LAYERS, n_streams=3), size=0.3)


@pytest.fixture
def layers(network):
    return network(WIDTH, LAYERS)


@pytest.fixture
def x():
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(5))


def gradients(residual, layers, x, run=None):
    x = x.clone().requires_grad_()
    out = (residual if run is None else run)(x, layers)
    return out, torch.autograd.grad(out.float().square().sum(), [x, *layers.parameters(), *residual.parameters()])


def all_equal(xs, ys):
    return all(torch.equal(a, b) for a, b in zip(xs, ys, strict=True))


# ---- the loop


def test_forward_is_the_loop_of_start_and_step(residual, layers, x):
    h, state = residual.start(x)
    for layer, sublayer in enumerate(layers):
        assert h.shape == x.shape and h.dtype == x.dtype
        h, state = residual.step(layer, sublayer(h), state)
    assert torch.equal(h, residual(x, layers))


def test_reads_come_normalised_unless_asked_for_raw(scheme, layers, x):
    h = build(scheme, WIDTH, LAYERS)(x, layers)
    torch.testing.assert_close(h.square().mean(-1), torch.ones(2, 3), rtol=1e-3, atol=0)
    raw = build(scheme, WIDTH, LAYERS, normalize=False).start(x)[0]
    read = build(scheme, WIDTH, LAYERS).start(x)[0]
    torch.testing.assert_close(mgr.rms_normalize(raw), read, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(WIDTH,), (1, WIDTH), (0, 3, WIDTH), (2, 1, 3, WIDTH)])
def test_any_leading_dimensions_work(residual, layers, shape):
    assert residual(torch.ones(shape), layers).shape == shape


def test_layers_may_be_any_integers_and_skip_any_iterable(residual, layers, x):
    h, state = residual.start(x)
    assert torch.equal(residual.step(np.int64(0), x, state)[0], residual.step(0, x, state)[0])
    assert torch.equal(residual(x, layers, skip=(i for i in (1, 2))), residual(x, layers, skip={1, 2}))
    assert not torch.equal(residual(x, layers, skip={1, 2}), residual(x, layers))


def test_states_and_inputs_are_never_changed(residual, layers, x):
    h, state = residual.start(x)
    kept = x.clone(), [t.clone() for t in torch.utils._pytree.tree_leaves(state) if isinstance(t, torch.Tensor)]
    update = layers[0](h)
    first = residual.step(0, update, state)
    again = residual.step(0, update, state)
    now = [t for t in torch.utils._pytree.tree_leaves(state) if isinstance(t, torch.Tensor)]
    assert torch.equal(x, kept[0]) and all_equal(now, kept[1]) and torch.equal(first[0], again[0])


def test_one_token_does_not_see_another(residual, layers, x):
    other = x.clone()
    other[:, 1:] += 1
    a, b = residual(x, layers), residual(other, layers)
    torch.testing.assert_close(a[:, 0], b[:, 0])
    assert not torch.allclose(a[:, 1], b[:, 1])


# ---- precision


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16().half()])
def test_parameters_stay_float32_and_exact_under_a_cast_of_the_model(residual, layers, cast):
    model = nn.ModuleDict({"layers": layers, "residual": residual})
    before = [p.clone() for p in residual.state_dict().values()]
    cast(model)
    assert all(p.dtype == torch.float32 for p in residual.state_dict().values())
    assert all_equal(residual.state_dict().values(), before)
    assert all(p.dtype != torch.float32 for p in layers.parameters())
    dtype = next(layers.parameters()).dtype
    out = residual(torch.randn(2, 3, WIDTH, dtype=dtype), layers)
    assert out.dtype == dtype and torch.isfinite(out).all()
    out.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in residual.parameters() if p.grad is not None)


@pytest.mark.parametrize("scheme", WITH_PARAMETERS)
def test_parameters_stay_float32_when_a_part_alone_is_cast_or_loaded(residual, scheme):
    before = {name: p.clone() for name, p in residual.state_dict().items()}
    residual.residual_layers.to(torch.bfloat16)
    assert all(torch.equal(p, before[name]) for name, p in residual.state_dict().items())
    for module in reversed(list(residual.modules())):  # bottom up, as wrappers that cast module by module do
        module.half()
    assert all(torch.equal(p, before[name]) for name, p in residual.state_dict().items())
    part = residual.residual_layers[-1]
    part.load_state_dict({name: p.bfloat16() for name, p in part.state_dict().items()}, assign=True)
    assert all(p.dtype == torch.float32 for p in residual.parameters())


@pytest.mark.parametrize("scheme", WITH_PARAMETERS)
def test_gradients_stay_float32_under_a_cast(residual, layers, x):
    residual(x, layers).square().sum().backward()
    before = [p.grad.clone() for p in residual.parameters()]
    residual.to(torch.bfloat16)
    assert all_equal([p.grad for p in residual.parameters()], before)


def test_the_model_can_move_to_float64_and_back(residual):
    before = [p.clone() for p in residual.parameters()]
    residual.double()
    assert all(p.dtype == torch.float64 for p in residual.parameters())
    residual.float()
    assert all_equal(residual.parameters(), before)
    assert all(p.device.type == "meta" for p in residual.to("meta").parameters())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("scheme", WITH_PARAMETERS)
def test_a_half_precision_checkpoint_leaves_float32_parameters(residual, scheme, assign):
    model = nn.ModuleDict({"residual": build(scheme, WIDTH, LAYERS, n_streams=3)})
    narrow = {f"residual.{k}": v.bfloat16() for k, v in residual.state_dict().items()}
    model.load_state_dict(narrow, strict=True, assign=assign)
    assert all(v.dtype == torch.float32 for v in model.state_dict().values())
    assert all_equal(model.state_dict().values(), [v.float() for v in narrow.values()])
    assert all(v.dtype == torch.bfloat16 for v in narrow.values())


def test_autocast_stores_bfloat16_computes_float32_and_gives_float32_gradients(residual, layers, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h, state = residual.start(x)
        assert h.dtype == torch.float32
        for layer, sublayer in enumerate(layers):
            before, update = state, sublayer(h)
            h, state = residual.step(layer, update, before)
            assert update.dtype == h.dtype == state.stacked().dtype == torch.bfloat16
            with torch.autocast("cpu", enabled=False):
                assert torch.equal(h, residual.step(layer, update, before)[0])
        total = h.float().square().sum()
    grads = torch.autograd.grad(total, [h, *residual.parameters()])[1:]
    assert all(g.dtype == torch.float32 and torch.isfinite(g).all() for g in grads)


def test_autocast_reaches_neither_the_start_nor_a_pruned_read(residual, x):
    def run(dtype):
        h, state = residual.start(x)
        state = residual.step(0, x.flip(0).to(dtype), state)[1]
        return [h, residual.read(3, state), residual.step(4, x.to(dtype), state)[0]]

    for dtype in (torch.float32, torch.bfloat16):
        plain = run(dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert all_equal(run(dtype), plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_stored_state_is_read_as_its_float32_copy_is(scheme, shake, x, dtype):
    residual = shake(build(scheme, WIDTH, LAYERS, n_streams=3, normalize=False), size=0.3)
    _, state = residual.start(x.to(dtype))
    for layer in range(LAYERS):
        state = residual.step(layer, x.roll(layer, -1).to(dtype), state)[1]
    wide = torch.utils._pytree.tree_map(lambda v: v.float() if isinstance(v, torch.Tensor) else v, state)
    found = residual.read(LAYERS, state)
    assert found.dtype == dtype and torch.equal(found, residual.read(LAYERS, wide).to(dtype))


def test_a_float32_state_is_rounded_only_when_the_first_bfloat16_update_is_in(residual, x):
    """The embedding is float32 under autocast: rounded before the sum it would lose what the store keeps."""
    _, state = residual.start(x)
    update = x.flip(0).bfloat16()
    stored = residual.step(0, update, state)[1].stacked()
    exact = residual.step(0, update.float(), state)[1].stacked()
    assert stored.dtype == torch.bfloat16 and torch.equal(stored, exact.bfloat16())


def test_bfloat16_streams_lose_no_more_than_their_storage(scheme, layers, x):
    residual = build(scheme, WIDTH, LAYERS, n_streams=3, normalize=False)
    updates = [torch.randn(x.shape, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(LAYERS)]
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        h, state = residual.start(x.bfloat16().to(dtype))
        for layer, update in enumerate(updates):
            h, state = residual.step(layer, update.to(dtype), state)
        results.append(h.float())
    # One rounding (2^-8) a layer and one for the read, of values up to about 5; 7 * 5 / 256 = 0.14.
    torch.testing.assert_close(*results, rtol=0, atol=0.14)


def test_float64_signals_are_computed_in_float64_whatever_the_parameters(residual, x):
    updates = torch.randn(LAYERS, 2, 3, WIDTH, dtype=torch.float64)
    results = []
    for parameters in (torch.float32, torch.float64):
        residual.to(parameters)
        h, state = residual.start(x.double())
        for layer, update in enumerate(updates):
            h, state = residual.step(layer, update, state)
        assert h.dtype == state.stacked().dtype == torch.float64
        results.append(h)
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_function_transforms_work(residual, layers, x):
    torch.testing.assert_close(torch.func.vmap(lambda xi: residual(xi, layers))(x), residual(x, layers))
    parameters = dict(residual.named_parameters())

    def total(parameters, x):
        return torch.func.functional_call(residual, parameters, (x, layers)).pow(3).sum()

    if parameters:
        one_by_one = torch.func.vmap(torch.func.grad(total), in_dims=(None, 0))(parameters, x)
        together = torch.func.grad(total)(parameters, x)
        for name, gradient in together.items():
            torch.testing.assert_close(one_by_one[name].sum(0), gradient, rtol=1e-4, atol=1e-5)


def test_the_whole_model_can_be_exported(residual, layers, x):
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.residual, self.layers = residual, layers

        def forward(self, x):
            return self.residual(x, list(self.layers))

    exported = torch.export.export(Whole(), (x,)).module()
    torch.testing.assert_close(exported(x), residual(x, layers), rtol=1e-5, atol=1e-6)


# ---- copies, state dicts, initialisation


def test_deepcopy_and_pickle_are_equal_and_independent(residual, layers, x):
    buffer = io.BytesIO()
    torch.save(residual, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(residual), pickle.loads(pickle.dumps(residual)), torch.load(buffer, weights_only=False)):
        assert torch.equal(twin(x, layers), residual(x, layers))
        for p, q in zip(twin.parameters(), residual.parameters(), strict=True):
            assert p.data_ptr() != q.data_ptr()
        twin.to(torch.bfloat16)
        assert all(p.dtype == torch.float32 for p in twin.parameters())


def test_a_strict_state_dict_round_trip_restores_everything(residual, scheme, layers, x):
    fresh = build(scheme, WIDTH, LAYERS, n_streams=3)
    fresh.load_state_dict(residual.state_dict(), strict=True)
    assert torch.equal(fresh(x, layers), residual(x, layers))


def test_building_twice_is_equal_and_draws_no_random_number(scheme):
    before = torch.get_rng_state()
    a, b = (build(scheme, WIDTH, LAYERS, n_streams=3) for _ in range(2))
    assert all_equal(a.state_dict().values(), b.state_dict().values())
    assert torch.equal(before, torch.get_rng_state())


def test_no_parameter_is_left_uninitialised(scheme):
    torch.use_deterministic_algorithms(True)  # torch then fills fresh memory with NaN
    try:
        residual = build(scheme, WIDTH, LAYERS, n_streams=3)
        assert all(torch.isfinite(v).all() for v in residual.state_dict().values())
        with torch.device("meta"):
            empty = build(scheme, WIDTH, LAYERS, n_streams=3)
        empty.to_empty(device="cpu").reset_parameters()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all_equal(empty.state_dict().values(), residual.state_dict().values())


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_dtype_does_not_change_the_parameters(scheme, default):
    torch.set_default_dtype(default)
    try:
        residual = build(scheme, WIDTH, LAYERS, n_streams=3)
        h, state = residual.start(torch.ones(2, WIDTH, dtype=torch.float32))
        h, _ = residual.step(0, torch.ones(2, WIDTH, dtype=torch.float32), state)
    finally:
        torch.set_default_dtype(torch.float32)
    assert h.dtype == torch.float32
    assert all_equal(residual.state_dict().values(), build(scheme, WIDTH, LAYERS, n_streams=3).state_dict().values())


# ---- names and weight decay


class Model(nn.Module):
    def __init__(self, scheme, attribute="residual"):
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        setattr(self, attribute, build(scheme, WIDTH, LAYERS, n_streams=3))


@pytest.mark.parametrize("attribute", ["residual", "streams"])
def test_residual_parameters_have_it_in_their_name_wherever_they_hang(scheme, attribute):
    model = Model(scheme, attribute)
    own = {id(p) for p in getattr(model, attribute).parameters()}
    assert {id(p) for n, p in model.named_parameters() if "residual" in n} == own


def test_no_residual_parameter_decays_and_each_parameter_is_in_one_group(scheme):
    model = Model(scheme, "streams").to(torch.bfloat16)
    decayed, plain = parameter_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1 and plain["weight_decay"] == 0.0
    names = {id(p): n for n, p in model.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {"embed.weight", *(f"layers.{i}.weight" for i in range(LAYERS))}
    together = [names[id(p)] for group in (decayed, plain) for p in group["params"]]
    assert sorted(together) == sorted(names.values())
    model.embed.weight.requires_grad_(False)
    assert all(p is not model.embed.weight for group in parameter_groups(model, 0.1) for p in group["params"])


def drift_without_gradient(residual, groups):
    """How far 200 AdamW steps with zero gradients move the residual's parameters."""
    before = [p.detach().clone() for p in residual.parameters()]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for _ in range(200):
        for p in residual.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    return max((p - q).abs().max().item() for p, q in zip(residual.parameters(), before, strict=True))


@pytest.mark.parametrize("scheme", WITH_PARAMETERS)
def test_gates_do_not_erode_but_with_decay_they_would(scheme):
    model = Model(scheme)
    assert drift_without_gradient(model.residual, parameter_groups(model, 0.1)) == 0.0
    assert drift_without_gradient(model.residual, [{"params": model.parameters(), "weight_decay": 0.1}]) > 0.05


# ---- compilation and checkpointing


def test_compiling_the_full_graph_changes_nothing(scheme, shake, network, x):
    torch._dynamo.reset()
    residual, layers = shake(build(scheme, WIDTH, 3, n_streams=2), size=0.3), network(WIDTH, 3)
    out, grads = gradients(residual, layers, x)
    compiled = torch.compile(residual, backend="aot_eager", fullgraph=True)
    out_c, grads_c = gradients(residual, layers, x, compiled)
    torch.testing.assert_close(out_c, out, rtol=1e-5, atol=1e-6)
    for a, b in zip(grads_c, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_checkpointing_every_step_gives_equal_gradients(residual, network, x):
    layers = nn.ModuleList(nn.Sequential(layer, nn.Dropout(0.2)) for layer in network(WIDTH, LAYERS))

    def loop(again):
        def run(x, layers):
            torch.manual_seed(3)
            h, state = residual.start(x)
            for layer, sublayer in enumerate(layers):

                def block(h, state, layer=layer, sublayer=sublayer):
                    return residual.step(layer, sublayer(h), state)

                h, state = checkpoint(block, h, state, use_reentrant=False) if again else block(h, state)
            return h

        return run

    plain, again = (gradients(residual, layers, x, loop(flag)) for flag in (False, True))
    assert torch.equal(plain[0], again[0]) and all_equal(plain[1], again[1])


def test_a_second_backward_doubles_every_gradient(residual, layers, x):
    total = residual(x, layers).square().sum()
    total.backward(retain_graph=True)
    parameters = [*layers.parameters(), *residual.parameters()]
    once = [p.grad.clone() for p in parameters]
    total.backward()
    assert all_equal([p.grad for p in parameters], [2 * g for g in once])


def test_gradients_pass_finite_differences_twice(scheme, make):
    residual = make(scheme, 3, 3, n_streams=2)
    x, *updates = (torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(4))

    def run(x, *updates):
        h, state = residual.start(x)
        for layer, update in enumerate(updates):
            h, state = residual.step(layer, update, state)
        return h

    assert torch.autograd.gradcheck(run, (x, *updates))
    assert torch.autograd.gradgradcheck(run, (x, *updates))


# ---- refusals


BUILD = {
    "an unknown scheme": (ValueError, ("mgr", 8, 6), {}, "scheme='mgr' is unknown; use one of prenorm, hc, mhc-lite"),
    "no width": (ValueError, ("hc", 0, 6), {}, "d_model=0 is not allowed; use at least 1"),
    "no sublayers": (ValueError, ("hc", 8, 0), {}, "n_sublayers=0 is not allowed"),
    "no streams": (ValueError, ("hc", 8, 6), {"n_streams": 0}, "n_streams=0 is not allowed"),
    "half a stream": (TypeError, ("hc", 8, 6), {"n_streams": 2.5}, "n_streams must be an integer, got float"),
    "a word for a flag": (TypeError, ("hc", 8, 6), {"normalize": "no"}, "normalize must be True or False, got str"),
    "true streams": (TypeError, ("hc", 8, 6), {"n_streams": True}, "n_streams must be an integer, got bool"),
    "17 streams": (ValueError, ("mgr-competitive", 8, 60), {"n_streams": 17}, "use 1 to 16"),
    "six of mhc-lite": (
        ValueError,
        ("mhc-lite", 8, 6),
        {"n_streams": 6},
        "needs 6! permutation matrices; use at most 5",
    ),
    "no mixing layer": (
        ValueError,
        ("mgr-independent", 8, 3),
        {},
        "n_sublayers=3 for n_streams=4: the first 3 only append",
    ),
    "a shallow net": (ValueError, ("mgr-competitive", 8, 8), {"n_streams": 8}, "use at least 11 sublayers"),
    "triton": (
        mgr.BackendUnavailable,
        ("mgr-independent", 8, 6),
        {"backend": "triton"},
        "backend='triton' cannot run: the triton package is not installed",
    ),
    "triton for hc": (ValueError, ("hc", 8, 6), {"backend": "triton"}, "scheme='hc' has no Triton kernels"),
    "a backend": (ValueError, ("prenorm", 8, 6), {"backend": "cpu"}, "backend='cpu' is unknown"),
    "recompute": (TypeError, ("mgr-independent", 8, 6), {"recompute": True}, "recompute must be a depthlab.residuals."),
    "recompute for hc": (ValueError, ("hc", 8, 6), {"recompute": Recompute()}, "'hc' keeps no streams to rebuild"),
}


@pytest.mark.parametrize("name", BUILD)
def test_a_wrong_build_gets_one_sentence(monkeypatch, name):
    monkeypatch.setattr(function, "TRITON_INSTALLED", False)
    error, args, how, sentence = BUILD[name]
    with pytest.raises(error, match=re.escape(sentence)) as raised:
        build(*args, **how)
    assert "\n" not in str(raised.value)


USE = {
    "x of another width": (ValueError, lambda r, s: r.start(torch.ones(2, 7)), "x has shape [2, 7]; it needs [.., 8]"),
    "integers": (TypeError, lambda r, s: r.start(torch.ones(2, 8).long()), "x has dtype torch.int64"),
    "no tensor": (TypeError, lambda r, s: r.start([1.0]), "x must be a torch.Tensor, got list"),
    "another shape": (
        ValueError,
        lambda r, s: r.step(1, torch.ones(3, 8), s),
        "update has shape [3, 8]; this state carries",
    ),
    "another device": (
        ValueError,
        lambda r, s: r.step(1, torch.ones(2, 8).to("meta"), s),
        "update is on meta and the state",
    ),
    "past the end": (ValueError, lambda r, s: r.step(6, torch.ones(2, 8), s), "layer=6 is out of range; this residual"),
    "before the start": (ValueError, lambda r, s: r.step(-1, torch.ones(2, 8), s), "layer=-1 is out of range"),
    "the same layer twice": (ValueError, lambda r, s: r.step(0, torch.ones(2, 8), s), "layer=0 comes too late"),
    "a layer by name": (TypeError, lambda r, s: r.step("1", torch.ones(2, 8), s), "layer must be an integer, got str"),
    "no state": (TypeError, lambda r, s: r.step(1, torch.ones(2, 8), None), "state is NoneType; pass on the state"),
    "reading backwards": (ValueError, lambda r, s: r.read(0, s), "layer=0 comes too late"),
    "reading too far": (
        ValueError,
        lambda r, s: r.read(7, s),
        "layer=7 is out of range; this residual was built for 0 .. 6",
    ),
    "five sublayers": (ValueError, lambda r, s: r(torch.ones(2, 8), [torch.tanh] * 5), "5 sublayers were given"),
    "skipping number 6": (ValueError, lambda r, s: r(torch.ones(2, 8), [torch.tanh] * 6, skip=[6]), "skip=[6] names"),
}


@pytest.mark.parametrize("name", USE)
def test_a_wrong_use_gets_one_sentence_before_any_arithmetic(scheme, monkeypatch, name):
    error, use, sentence = USE[name]
    residual = build(scheme, WIDTH, LAYERS, n_streams=3)
    _, state = residual.start(torch.ones(2, WIDTH))
    _, state = residual.step(0, torch.ones(2, WIDTH), state)
    for method in ("_open", "_advance", "_read"):
        monkeypatch.setattr(residual, method, lambda *a: pytest.fail("computed before the checks"))
    with pytest.raises(error, match=re.escape(sentence)) as raised:
        use(residual, state)
    assert "\n" not in str(raised.value)


FORMS = {
    "prenorm": 0,
    "hc": 1,
    "mhc-lite": 1,
    "attnres": 2,
    "attnres-block": 2,
    "mgr-independent": 3,
    "mgr-competitive": 3,
}


@pytest.mark.parametrize("maker", SCHEMES)
def test_another_scheme_s_state_is_refused_before_any_arithmetic(scheme, maker, monkeypatch):
    """PreNorm took the four streams of hc for a batch and answered in that shape."""
    residual, other = (build(s, WIDTH, LAYERS, n_streams=3) for s in (scheme, maker))
    _, state = other.start(torch.ones(2, WIDTH))
    if FORMS[scheme] == FORMS[maker]:
        assert residual.read(LAYERS, state).shape == (2, WIDTH)
        return
    for method in ("_advance", "_read"):
        monkeypatch.setattr(residual, method, lambda *a: pytest.fail("computed before the checks"))
    for use in (lambda: residual.read(LAYERS, state), lambda: residual.step(0, torch.ones(2, WIDTH), state)):
        with pytest.raises(ValueError, match=r"which no \w+ of d_model=8 makes here; pass on the state that this"):
            use()


def test_a_state_of_another_width_is_refused(scheme):
    _, state = build(scheme, WIDTH, LAYERS, n_streams=3).start(torch.ones(2, WIDTH))
    narrow = build(scheme, WIDTH - 3, LAYERS, n_streams=3)
    with pytest.raises(ValueError, match="which no .* of d_model=5 makes here"):
        narrow.step(0, torch.ones(2, WIDTH), state)


@pytest.mark.parametrize("scheme", ["hc", "mhc-lite", "mgr-independent", "mgr-competitive"])
def test_a_state_of_more_streams_is_refused(scheme):
    many, few = (build(scheme, WIDTH, LAYERS, n_streams=n) for n in (4, 2))
    _, state = many.start(torch.ones(2, WIDTH))
    for layer in range(3):
        _, state = many.step(layer, torch.ones(2, WIDTH), state)
    with pytest.raises(ValueError, match=r"state holds streams of the form \[2, 4, 8\], which no"):
        few.step(3, torch.ones(2, WIDTH), state)


def test_counts_may_be_any_integers(scheme):
    residual = build(scheme, np.int64(WIDTH), np.int32(LAYERS), n_streams=np.int16(3))
    assert repr(residual) == repr(build(scheme, WIDTH, LAYERS, n_streams=3))


@pytest.mark.parametrize("scheme", WITH_PARAMETERS)
def test_an_embedding_on_another_device_is_named(scheme):
    with pytest.raises(ValueError, match="x is on meta and the residual on cpu; move one of them"):
        build(scheme, WIDTH, LAYERS).start(torch.ones(2, WIDTH, device="meta"))


def test_meta_tensors_run_through(scheme):
    residual = build(scheme, WIDTH, LAYERS, n_streams=3).to("meta")
    out = residual(torch.ones(2, WIDTH, device="meta"), [torch.tanh] * LAYERS)
    assert out.device.type == "meta" and out.shape == (2, WIDTH)


def test_every_scheme_is_a_residual_and_says_what_it_is(scheme):
    residual = build(scheme, WIDTH, LAYERS, n_streams=3)
    assert isinstance(residual, Residual)
    assert "arXiv" in type(residual).__doc__
    assert f"d_model={WIDTH}, n_sublayers={LAYERS}" in repr(residual)
