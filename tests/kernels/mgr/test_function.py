"""The public functions under every use that torch's own operators allow, and one sentence for every wrong call."""

import math
import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from depthlab.kernels import mgr
from depthlab.kernels.mgr import append_and_pool, attn_pool, mix_and_pool, reference

GATES = ("independent", "competitive")


@pytest.fixture(params=GATES)
def gate(request):
    return request.param


def leaves(inputs):
    return [x.clone().requires_grad_() for x in inputs]


def all_equal(xs, ys):
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


# ---- autograd


def test_inputs_and_the_upstream_gradient_are_left_alone(make_inputs, gate):
    inputs = leaves(make_inputs(5, 3, 7, gate, torch.float32))
    before = [x.detach().clone() for x in inputs]
    outputs = mix_and_pool(*inputs, gate=gate, normalize=True)
    upstream = [torch.randn_like(x) for x in outputs]
    kept = [x.clone() for x in upstream]
    torch.autograd.grad(outputs, inputs, upstream)
    assert all_equal(inputs, before) and all_equal(upstream, kept)


def test_a_second_backward_exactly_doubles_every_gradient(make_inputs, gate):
    inputs = leaves(make_inputs(5, 3, 7, gate, torch.float32))
    total = sum(x.square().sum() for x in mix_and_pool(*inputs, gate=gate))
    total.backward(retain_graph=True)
    once = [x.grad.clone() for x in inputs]
    total.backward()
    assert all_equal([x.grad for x in inputs], [2 * g for g in once])


def test_two_calls_are_equal_bit_for_bit(make_inputs, gate):
    runs = []
    for _ in range(2):
        inputs = leaves(make_inputs(40, 4, 48, gate, torch.float32))
        outputs = mix_and_pool(*inputs, gate=gate, normalize=True)
        runs.append([*outputs, *torch.autograd.grad(sum(x.sum() for x in outputs), inputs)])
    assert all_equal(*runs)


@pytest.mark.parametrize("wanted", range(5))
def test_each_input_alone_gets_the_gradient_it_gets_with_all(make_inputs, gate, wanted):
    inputs = make_inputs(3, 2, 5, gate)
    every = leaves(inputs)
    one = [x.clone().requires_grad_(i == wanted) for i, x in enumerate(inputs)]
    total, alone = (sum(x.square().sum() for x in mix_and_pool(*args, gate=gate)) for args in (every, one))
    assert torch.equal(torch.autograd.grad(alone, one[wanted])[0], torch.autograd.grad(total, every[wanted])[0])


@pytest.mark.parametrize("output", range(3))
def test_one_output_alone_can_be_differentiated(make_inputs, gate, output):
    inputs = leaves(make_inputs(3, 2, 5, gate))
    grads = torch.autograd.grad(
        mix_and_pool(*inputs, gate=gate)[output].sum(), inputs, allow_unused=True, materialize_grads=True
    )
    used = [bool(g.abs().max() > 0) for g in grads]
    assert used == [[True, True, True, True, False], [True] * 5, [True, False, True, True, False]][output]


def test_no_graph_is_kept_without_gradients(make_inputs, gate):
    inputs = leaves(make_inputs(3, 2, 5, gate))
    with torch.no_grad():
        assert not any(x.requires_grad for x in mix_and_pool(*inputs, gate=gate))
    with torch.inference_mode():
        mix_and_pool(*(x.detach() for x in inputs), gate=gate)


def test_checkpointing_gives_equal_gradients(make_inputs, gate):
    def layer(*args):
        return mix_and_pool(*args, gate=gate, normalize=True)

    results = []
    for run in (layer, lambda *a: checkpoint(layer, *a, use_reentrant=False)):
        inputs = leaves(make_inputs(4, 3, 6, gate, torch.float32))
        results.append(torch.autograd.grad(sum(x.square().sum() for x in run(*inputs)), inputs))
    assert all_equal(*results)


def test_function_transforms_agree_with_a_loop(make_inputs, gate):
    streams, update, w_gate, bias, w_pool = make_inputs(3, 2, 5, gate)

    def total(s, f, w, b, q):
        return mix_and_pool(s, f, w, b, q, gate=gate, normalize=True)[1].square().sum()

    grad = torch.func.grad(total, argnums=(0, 1, 2, 3, 4))
    batched = torch.func.vmap(grad, in_dims=(0, 0, None, None, None))(streams, update, w_gate, bias, w_pool)
    looped = [grad(s, f, w_gate, bias, w_pool) for s, f in zip(streams, update, strict=True)]
    for x, y in zip(batched, zip(*looped, strict=True), strict=True):
        torch.testing.assert_close(x, torch.stack(y))
    models = torch.func.vmap(lambda w, b: mix_and_pool(streams, update, w, b, w_pool, gate=gate)[0])
    two = models(torch.stack([w_gate, -w_gate]), torch.stack([bias, -bias]))
    torch.testing.assert_close(two[1], mix_and_pool(streams, update, -w_gate, -bias, w_pool, gate=gate)[0])
    jacobian = torch.func.jacrev(lambda f: mix_and_pool(streams, f, w_gate, bias, w_pool, gate=gate)[1])(update)
    forward = torch.func.jacfwd(lambda f: mix_and_pool(streams, f, w_gate, bias, w_pool, gate=gate)[1])(update)
    torch.testing.assert_close(jacobian, forward)


# ---- layouts and shapes


def test_leading_dimensions_do_not_matter(make_inputs, gate):
    streams, update, *weights = make_inputs(6, 3, 5, gate)
    flat = mix_and_pool(streams, update, *weights, gate=gate)
    shaped = mix_and_pool(streams.view(2, 1, 3, 3, 5), update.view(2, 1, 3, 5), *weights, gate=gate)
    one = mix_and_pool(streams[4], update[4], *weights, gate=gate)
    for a, b, c in zip(flat, shaped, one, strict=True):
        assert torch.equal(a, b.flatten(0, 2)) and c.shape == a.shape[1:]
        torch.testing.assert_close(a[4], c)


def test_no_tokens_give_no_tokens_and_zero_weight_gradients(gate):
    n_bias = 3 if gate == "independent" else 1
    inputs = leaves([torch.zeros(0, 3, 5), torch.zeros(0, 5), torch.ones(5), torch.ones(n_bias), torch.ones(5)])
    outputs = mix_and_pool(*inputs, gate=gate, normalize=True)
    assert [list(x.shape) for x in outputs] == [[0, 3, 5], [0, 5], [0, 3]]
    grads = torch.autograd.grad(sum(x.sum() for x in outputs), inputs)
    assert all(torch.equal(g, torch.zeros_like(x)) for g, x in zip(grads, inputs, strict=True))
    assert [list(x.shape) for x in append_and_pool(inputs[0], inputs[1], inputs[4])] == [[0, 4, 5], [0, 5]]


def test_strided_and_expanded_inputs_give_the_values_and_gradients_of_contiguous_ones(make_inputs, gate):
    streams, update, w_gate, bias, w_pool = make_inputs(4, 3, 6, gate)
    cases = {
        "transposed": (streams.permute(2, 1, 0).contiguous().permute(2, 1, 0), update.t().contiguous().t()),
        "every other": (streams.repeat_interleave(2, -1)[..., ::2], update.repeat_interleave(2, 0)[::2]),
        "expanded": (streams[:1, :1].expand(4, 3, 6), update[:1].expand(4, 6)),
    }
    for name, (s, f) in cases.items():
        results = []
        for args in ((s, f, w_gate, bias, w_pool), (s.contiguous(), f.contiguous(), w_gate, bias, w_pool)):
            inputs = [x.detach().requires_grad_() for x in args]
            outputs = mix_and_pool(*inputs, gate=gate)
            results.append((*outputs, *torch.autograd.grad(sum(x.square().sum() for x in outputs), inputs)))
        for x, y in zip(*results, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, msg=name)


def test_meta_tensors_give_shapes_and_dtypes(gate):
    n_bias = 3 if gate == "independent" else 1
    meta = {"device": "meta"}
    args = torch.empty(2, 3, 5, **meta), torch.empty(2, 5, dtype=torch.bfloat16, **meta), torch.empty(5, **meta)
    outputs = mix_and_pool(*args, torch.empty(n_bias, **meta), torch.empty(5, **meta), gate=gate)
    assert [(list(x.shape), x.dtype, x.device.type) for x in outputs] == [
        ([2, 3, 5], torch.bfloat16, "meta"),
        ([2, 5], torch.bfloat16, "meta"),
        ([2, 3], torch.float32, "meta"),
    ]


# ---- precision


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_half_precision_is_only_how_results_are_stored(make_inputs, gate, stored):
    inputs = make_inputs(50, 3, 40, gate, stored)
    weights = [x.float() for x in inputs[2:]]
    found = mix_and_pool(*inputs[:2], *weights, gate=gate, normalize=True)
    exact = mix_and_pool(*(x.float() for x in inputs[:2]), *weights, gate=gate, normalize=True)
    assert [x.dtype for x in found] == [stored, stored, torch.float32]
    assert all_equal(found, [exact[0].to(stored), exact[1].to(stored), exact[2]])


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_no_arithmetic_is_in_half_precision_when_every_input_is(make_inputs, gate, stored):
    inputs = make_inputs(50, 3, 40, gate, stored)
    exact_inputs = [x.float() for x in inputs]
    streams, pooled, beta = mix_and_pool(*inputs, gate=gate, normalize=True)
    exact = mix_and_pool(*exact_inputs, gate=gate, normalize=True)
    assert beta.dtype == torch.float32
    assert all_equal((streams, pooled, beta), (exact[0].to(stored), exact[1].to(stored), exact[2]))
    s, f, q = inputs[0], inputs[1], inputs[4]
    for found, wide in (
        (attn_pool(s, q), attn_pool(s.float(), q.float())),
        (append_and_pool(s, f, q)[1], append_and_pool(s.float(), f.float(), q.float())[1]),
        (mgr.rms_normalize(s), mgr.rms_normalize(s.float())),
    ):
        assert found.dtype == stored and torch.equal(found, wide.to(stored))


def test_an_appended_read_sees_the_streams_before_they_are_rounded(make_inputs):
    streams, update, _, _, w_pool = make_inputs(50, 3, 40, "independent", torch.float32)
    update = update.bfloat16()
    stored, pooled = append_and_pool(streams, update, w_pool)
    exact = append_and_pool(streams, update.float(), w_pool)
    assert torch.equal(stored, exact[0].bfloat16()) and torch.equal(pooled, exact[1].bfloat16())
    assert not torch.equal(pooled, attn_pool(stored, w_pool))


def test_autocast_changes_nothing_and_parameters_get_float32_gradients(make_inputs, gate):
    """Under autocast the embedding is float32, the sublayer's output bfloat16 and every gate parameter float32."""
    streams, update, *weights = make_inputs(5, 3, 48, gate, torch.float32)
    results = []
    for autocast in (False, True):
        inputs = leaves([streams, update.bfloat16(), *weights])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            outputs = mix_and_pool(*inputs, gate=gate, normalize=True)
            total = sum(x.float().square().sum() for x in outputs)
        grads = torch.autograd.grad(total, inputs)
        assert [g.dtype for g in grads] == [torch.float32, torch.bfloat16, *[torch.float32] * 3]
        assert all(torch.isfinite(g).all() for g in grads)
        results.append((*outputs, *grads))
    assert all_equal(*results)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        appended, pooled = append_and_pool(streams, update.bfloat16(), weights[0])
        assert appended.dtype == pooled.dtype == torch.bfloat16
        assert attn_pool(streams, weights[0]).dtype == torch.float32


# ---- torch.compile


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiling_the_full_graph_changes_nothing(make_inputs, gate, backend):
    def layer(*args):
        streams, _ = append_and_pool(args[0], args[1], args[4])
        return mix_and_pool(streams[..., 1:, :], *args[1:], gate=gate, normalize=True)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    results = []
    for run in (layer, compiled):
        inputs = leaves(make_inputs(4, 3, 8, gate, torch.float32))
        outputs = run(*inputs)
        results.append((*outputs, *torch.autograd.grad(sum(x.square().sum() for x in outputs), inputs)))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


# ---- wrong calls


def call(**changes):
    n = changes.pop("n", 2)
    args = {
        "streams": torch.ones(3, n, 4),
        "update": torch.ones(3, 4),
        "w_gate": torch.ones(4),
        "bias": torch.ones(n),
        "w_pool": torch.ones(4),
        "gate": "independent",
    }
    return mix_and_pool(**(args | changes))


def nested(n):
    return torch.nested.nested_tensor([torch.ones(n, 4), torch.ones(n, 4)], layout=torch.jagged)


WRONG = {
    "streams are a list": (TypeError, {"streams": [1.0]}, "streams must be a torch.Tensor, got list"),
    "streams are integers": (TypeError, {"streams": torch.ones(3, 2, 4).long()}, "streams has dtype torch.int64"),
    "update is complex": (TypeError, {"update": torch.ones(3, 4) + 0j}, "update has dtype torch.complex64"),
    "sparse streams": (TypeError, {"streams": torch.ones(3, 2, 4).to_sparse()}, "streams has layout torch.sparse_coo"),
    "nested streams": (TypeError, {"streams": nested(2)}, "streams is a nested tensor; pad it first"),
    "normalize is a word": (TypeError, {"normalize": "no"}, "normalize must be True or False, got str"),
    "bias is None": (TypeError, {"bias": None}, "bias must be a torch.Tensor, got NoneType"),
    "one dimension": (ValueError, {"streams": torch.ones(4)}, "streams has shape [4]; it needs [.., n, C]"),
    "no stream": (ValueError, {"streams": torch.ones(3, 0, 4)}, "n=0; a token has 1 to 16 streams"),
    "17 streams": (ValueError, {"n": 17}, "n=17; a token has 1 to 16 streams"),
    "no width": (ValueError, {"streams": torch.ones(3, 2, 0)}, "C=0; a stream is at least 1 wide"),
    "update with n": (ValueError, {"update": torch.ones(3, 2, 4)}, "update has shape [3, 2, 4]"),
    "fewer tokens": (ValueError, {"update": torch.ones(1, 4)}, "streams of shape [3, 2, 4] need [3, 4], without n"),
    "other width": (ValueError, {"w_gate": torch.ones(5)}, "w_gate has shape [5]; it needs [4] (C)"),
    "a column": (ValueError, {"w_pool": torch.ones(4, 1)}, "w_pool has shape [4, 1]; it needs [4] (C)"),
    "one bias": (ValueError, {"bias": torch.ones(1)}, "bias has shape [1]; it needs [2] (n, one bias a stream"),
    "n forget logits": (ValueError, {"gate": "competitive"}, "bias has shape [2]; it needs [1] (the one forget logit"),
    "a gate of neither kind": (ValueError, {"gate": "sigmoid"}, "gate='sigmoid' is unknown; use 'independent' or"),
    "negative eps": (ValueError, {"eps": -1e-6}, "eps=-1e-06 is not a finite number of at least 1.2e-38"),
    "eps of zero": (ValueError, {"eps": 0.0}, "eps=0.0 is not a finite number"),
    "eps is NaN": (ValueError, {"eps": math.nan}, "eps=nan is not a finite number"),
    "eps is infinite": (ValueError, {"eps": math.inf}, "eps=inf is not a finite number"),
    "eps is a string": (TypeError, {"eps": "1e-6"}, "eps must be a number, got str"),
    "another device": (ValueError, {"update": torch.ones(3, 4, device="meta")}, "update is on meta and streams on cpu"),
    "a weight elsewhere": (
        ValueError,
        {"w_pool": torch.ones(4, device="meta")},
        "w_pool is on meta and streams on cpu",
    ),
    "an unknown backend": (ValueError, {"backend": "cuda"}, "backend='cuda' is unknown; use one of 'auto', 'torch'"),
    "triton for float64": (
        mgr.BackendUnavailable,
        {"backend": "triton", "w_pool": torch.ones(4).double()},
        "backend='triton' cannot run: a float64 tensor was given",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_gets_one_sentence_before_any_arithmetic(monkeypatch, name):
    error, changes, sentence = WRONG[name]

    def computed(*args, **kwargs):
        raise AssertionError("computed before the checks")

    monkeypatch.setattr(reference, "mix_and_pool", computed)
    with pytest.raises(error, match=re.escape(sentence)) as raised:
        call(**changes)
    assert "\n" not in str(raised.value) and str(raised.value).endswith(".")


def test_the_other_two_functions_check_as_well():
    with pytest.raises(ValueError, match="16 streams, the most a token can have"):
        append_and_pool(torch.ones(16, 4), torch.ones(4), torch.ones(4))
    with pytest.raises(ValueError, match="update has shape"):
        append_and_pool(torch.ones(2, 4), torch.ones(2, 4), torch.ones(4))
    with pytest.raises(ValueError, match="w_pool has shape"):
        attn_pool(torch.ones(2, 4), torch.ones(2))
    for wrong in ({"eps": -1.0}, {"backend": "none"}):
        with pytest.raises(ValueError):
            append_and_pool(torch.ones(2, 4), torch.ones(4), torch.ones(4), **wrong)
        with pytest.raises(ValueError):
            attn_pool(torch.ones(2, 4), torch.ones(4), **wrong)


def test_eps_reaches_every_root(make_inputs):
    streams, update, _, _, w_pool = make_inputs(3, 2, 5, "independent")
    for normalize in (False, True):
        found = attn_pool(streams, w_pool, normalize=normalize, eps=0.5)
        assert torch.equal(found, reference.attn_pool(streams, w_pool, normalize=normalize, eps=0.5))
        assert not torch.allclose(found, attn_pool(streams, w_pool, normalize=normalize))
        found = append_and_pool(streams, update, w_pool, normalize=normalize, eps=0.5)[1]
        assert not torch.allclose(found, append_and_pool(streams, update, w_pool, normalize=normalize)[1])
