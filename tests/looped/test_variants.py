"""Every variant against the table written out once more, token by token; wrong wirings differ; equal cost."""

import math
from dataclasses import replace

import pytest
import torch

from depthlab.lm import flops_per_token
from depthlab.lm.layers import CausalSelfAttention
from depthlab.looped import VARIANTS, wiring
from depthlab.looped.cost import cost, looped_cost


def norm(v):
    return v / (v.pow(2).mean() + 1e-6).sqrt()


def rotate(v, position):
    half = len(v) // 2
    out = [None] * len(v)
    for i in range(half):
        angle = position * 10_000.0 ** (-2 * i / len(v))
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = v[i] * cos - v[i + half] * sin
        out[i + half] = v[i + half] * cos + v[i] * sin
    return torch.stack(out)


def attention(w, queries, keys, values, n_heads):
    """Lists of vectors [C], one a token -> the same; queries, keys and values are each read from their own."""
    width = len(queries[0]) // n_heads
    cut = [slice(i * width, (i + 1) * width) for i in range(n_heads)]
    q, k = (
        [[norm(rotate((w[f"attention.{name}_proj.weight"] @ v)[c], t)) for c in cut] for t, v in enumerate(source)]
        for name, source in (("q", queries), ("k", keys))
    )
    v = [[(w["attention.v_proj.weight"] @ u)[c] for c in cut] for u in values]
    out = []
    for t in range(len(queries)):
        heads = []
        for head in range(n_heads):
            scores = torch.stack([q[t][head] @ k[s][head] / math.sqrt(width) for s in range(t + 1)])
            shares = scores.exp() / scores.exp().sum()
            heads.append(sum(shares[s] * v[s][head] for s in range(t + 1)))
        out.append(w["attention.o_proj.weight"] @ torch.cat(heads))
    return out


def block_of(w, z, n_heads, query=None, fault=""):
    normed = [norm(v) for v in z]
    read = normed if query is None else [norm(v) for v in query]
    keys = values = normed
    if query is not None and fault == "keys":
        read, keys = normed, read
    if query is not None and fault == "values":
        read, values = normed, read
    z = [a + b for a, b in zip(z, attention(w, read, keys, values, n_heads), strict=True)]
    hidden = [(w["mlp.up_proj.weight"] @ norm(v)).clamp(min=0) ** 2 for v in z]
    return [a + w["mlp.down_proj.weight"] @ b for a, b in zip(z, hidden, strict=True)]


def naive(model, tokens, fault=""):
    """Logits [B, T, V] in plain loops. `fault` wires something wrongly."""
    config, parameters = model.config, dict(model.named_parameters())
    variant, rows = config.variant, []
    only = 2 if fault == "other block" else 1  # where lt-attn injects
    for row in tokens.tolist():
        e = [parameters["embed_tokens.weight"][token] for token in row]
        x, h = [norm(v) for v in e], None
        start = e if fault == "e for x" else x
        for loop in range(1, config.n_loops + 1):
            if loop == 1 and fault == "loop 1":
                h = x
            injects = h is not None
            z = start
            if injects and variant == "lt":
                z = h
            if injects and variant == "lt-input":
                base = x if fault == "e for x" else e
                z = [a + b for a, b in zip(base, h, strict=True)]
                z = z if fault == "no norm" else [norm(v) for v in z]
            for block in range(1, config.n_layers + 1):
                number = block - 1 + (0 if config.tied else (loop - 1) * config.n_layers)
                prefix = f"blocks.{number}."
                w = {name.removeprefix(prefix): p for name, p in parameters.items() if name.startswith(prefix)}
                if injects and variant == "flt-res" and not (fault == "other block" and block == 1):
                    z = [a + b for a, b in zip(z, h, strict=True)]
                    z = z if fault == "no norm" else [norm(v) for v in z]
                asks = injects and (variant == "flt" or (variant == "lt-attn" and block == only))
                if variant == "flt" and fault == "other block" and block == 1:
                    asks = False
                z = block_of(w, z, config.n_heads, h if asks else None, fault)
            h = z if fault == "h before its norm" else [norm(v) for v in z]
        rows.append(torch.stack([15 * torch.tanh(parameters["lm_head.weight"] @ norm(v) / 15) for v in z]))
    return torch.stack(rows)


def gradients(model, logits, targets):
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_all_gradients_are_those_of_the_table_written_out(variant, tied, looped, tokens):
    model = looped(variant, dtype=torch.float64, tied=tied)
    inputs, targets = tokens[:, :5], tokens[:, 1:6]
    logits, expected = model(inputs), naive(model, inputs)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)  # rotary angles are float32
    found = gradients(model, logits, targets)
    for (name, _), a, b in zip(model.named_parameters(), found, gradients(model, expected, targets), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, msg=name)
        assert a.abs().max() > 1e-4, name


FAULTS = [
    ("lt", "h before its norm"),
    ("lt", "e for x"),
    ("lt-input", "no norm"),
    ("lt-input", "e for x"),
    ("lt-attn", "keys"),
    ("lt-attn", "values"),
    ("lt-attn", "other block"),
    ("lt-attn", "e for x"),
    ("flt-res", "no norm"),
    ("flt-res", "loop 1"),
    ("flt-res", "other block"),
    ("flt-res", "e for x"),
    ("flt-res", "h before its norm"),
    ("flt", "keys"),
    ("flt", "values"),
    ("flt", "loop 1"),
    ("flt", "other block"),
    ("flt", "e for x"),
]


@pytest.mark.parametrize(("variant", "fault"), FAULTS)
def test_a_wrong_wiring_gives_other_logits(variant, fault, looped, tokens):
    model = looped(variant, dtype=torch.float64)
    with torch.no_grad():
        gap = (model(tokens[:, :5]) - naive(model, tokens[:, :5], fault)).abs().max()
    assert gap > 1e-2, (fault, float(gap))


def test_the_variants_differ_from_each_other_from_the_second_loop_on(looped, tokens):
    models = [looped(variant, dtype=torch.float64) for variant in VARIANTS]
    first = [model(tokens, n_loops=1) for model in models]
    assert all(torch.equal(logits, first[0]) for logits in first)
    later = [model(tokens, n_loops=2) for model in models]
    gaps = [(a - b).abs().max() for i, a in enumerate(later) for b in later[:i]]
    assert min(gaps) > 1e-2


def test_the_wiring_is_the_published_table():
    """Loop 3 of 3 blocks: (what enters, what the query is read from)."""
    own = ("z", "z")
    expected = {
        "lt": [("h", "z"), own, own],
        "lt-input": [("norm(e + h)", "z"), own, own],
        "lt-attn": [("z", "h"), own, own],
        "flt-res": [("norm(z + h)", "z")] * 3,
        "flt": [("z", "h")] * 3,
    }
    for variant, rows in expected.items():
        assert [tuple(wiring(variant, 3, block)) for block in (1, 2, 3)] == rows
        assert [tuple(wiring(variant, 1, block)) for block in (1, 2, 3)] == [own] * 3
    with pytest.raises(ValueError, match="variant='ft' is unknown; use one of lt, lt-input, lt-attn, flt-res, flt"):
        wiring("ft", 2, 1)


@pytest.mark.parametrize("n_loops", [1, 2, 5])
def test_all_variants_have_equal_parameters_and_equal_matrix_work(n_loops, looped):
    """FLT-7."""
    shapes = {variant: [(name, p.shape) for name, p in looped(variant).named_parameters()] for variant in VARIANTS}
    assert all(found == shapes["lt"] for found in shapes.values())
    config = looped().config
    costs = {variant: cost(replace(config, variant=variant), 2, n_loops) for variant in VARIANTS}
    assert all(found == costs["lt"] for found in costs.values())
    assert costs["flt"].parameters == sum(math.prod(shape) for _, shape in shapes["flt"])
    length, width = config.seq_len, config.d_model
    entries = 12 * config.n_layers * width**2 * n_loops + config.vocab_size * width
    scores = 2 * config.n_layers * n_loops * width * length  # q . k and shares x v, over all positions
    assert costs["flt"].forward_flops == 2 * 2 * length * (entries + scores)
    assert costs["flt"].backward_flops > 1.9 * costs["flt"].forward_flops


def test_the_config_states_the_matrix_work_that_is_counted(looped):
    config = looped().config
    counted = cost(config).forward_flops / config.seq_len
    attention = 4 * config.n_attentions * config.d_model * config.seq_len
    assert counted == 2 * config.matmul_parameters + attention == flops_per_token(config) / 3


def test_another_wiring_with_its_own_query_matrix_would_be_counted(looped, monkeypatch):
    """The count is of what is done: a second query projection in the injecting variants shows."""
    config, plain = looped("flt").config, cost(looped("flt").config)
    project = CausalSelfAttention.project

    def wasteful(self, h, rotary=None, query_from=None):
        return project(self, h, rotary, None if query_from is None else query_from + 0 * self.q_proj(h))

    monkeypatch.setattr(CausalSelfAttention, "project", wasteful)
    assert cost(config).forward_flops > plain.forward_flops
    assert cost(replace(config, variant="lt")) == plain


def test_the_record_of_costs_finds_nothing_extra():
    experiment = looped_cost()
    (result,) = experiment.run_cell(experiment.cells[-1], experiment.config | {"n_loops": [1, 2]})
    assert result.metrics["parameters"] == 12 * 6 * 384**2 + 2 * 256 * 384
    assert result.metrics["flops_per_loop"] == 2 * 8 * 6 * (12 * 384**2 + 2 * 384 * 8)
    assert [result.metrics[name] for name in result.metrics if name.startswith("extra")] == [0, 0, 0]
