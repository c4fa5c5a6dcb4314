"""Attention and MLPs against plain formulas: rotary angles, grouped heads, late queries, QK-norm, another query."""

import math

import pytest
import torch

from depthlab.lm.layers import (
    CausalSelfAttention,
    GatedMlp,
    Mlp,
    apply_rotary,
    attend,
    draw_normal,
    rotary_tables,
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    draw_normal(module, 4, 0.5, torch.Generator().manual_seed(seed))
    return module.double()


def test_rotary_turns_pairs_by_position_times_frequency():
    x = normal(2, 5, 6)
    cos, sin = rotary_tables(6, 5, base=100.0)
    found = apply_rotary(x, (cos, sin))
    for t, i in ((0, 0), (3, 1), (4, 2)):
        angle = t * 100.0 ** (-2 * i / 6)
        a, b = x[:, t, i], x[:, t, i + 3]
        torch.testing.assert_close(found[:, t, i], a * math.cos(angle) - b * math.sin(angle), rtol=0, atol=1e-6)
        torch.testing.assert_close(found[:, t, i + 3], a * math.sin(angle) + b * math.cos(angle), rtol=0, atol=1e-6)


def test_rotary_products_depend_on_the_distance_only_and_tables_can_start_anywhere():
    q, k = normal(8, seed=1), normal(8, seed=2)
    whole = rotary_tables(8, 200)

    def product(s: int, t: int) -> torch.Tensor:
        return apply_rotary(q, tuple(x[s] for x in whole)) @ apply_rotary(k, tuple(x[t] for x in whole))

    torch.testing.assert_close(product(150, 140), product(30, 20), rtol=0, atol=1e-4)
    assert abs(product(150, 140) - product(30, 22)) > 1e-3
    for late, all_of_it in zip(rotary_tables(8, 50, start=150), whole, strict=True):
        assert torch.equal(late, all_of_it[150:])


def test_rotary_keeps_its_inputs_dtype_and_its_angles_in_float32():
    tables = rotary_tables(8, 2000)
    x = normal(1, 2000, 8)
    half = apply_rotary(x.bfloat16(), tables)
    assert half.dtype == torch.bfloat16 and tables[0].dtype == torch.float32
    torch.testing.assert_close(half.double(), apply_rotary(x.bfloat16().double(), tables), rtol=2**-8, atol=1e-2)


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("late", [0, 3, 6])
def test_attend_is_causal_softmax_with_shared_heads_for_the_last_queries(n_kv_heads, late):
    q, k, v = normal(2, 4, 7, 5), normal(2, n_kv_heads, 7, 5, seed=1), normal(2, n_kv_heads, 7, 5, seed=2)
    expected = torch.empty(2, 4, 7, 5, dtype=torch.float64)
    for head in range(4):
        shared = head // (4 // n_kv_heads)
        for t in range(7):
            scores = (k[:, shared, : t + 1] @ q[:, head, t].unsqueeze(-1)).squeeze(-1) / math.sqrt(5)
            expected[:, head, t] = (scores.softmax(-1).unsqueeze(-1) * v[:, shared, : t + 1]).sum(1)
    torch.testing.assert_close(attend(q[:, :, late:], k, v), expected[:, :, late:])


def test_attention_reads_by_q_over_k_of_its_own_projections():
    attention = drawn(CausalSelfAttention(12, 3, n_kv_heads=1))
    h = normal(2, 5, 12)
    q = (h @ attention.q_proj.weight.T).view(2, 5, 3, 4).transpose(1, 2)
    k, v = ((h @ p.weight.T).view(2, 5, 1, 4).transpose(1, 2) for p in (attention.k_proj, attention.v_proj))
    expected = attend(q, k, v).transpose(1, 2).reshape(2, 5, 12) @ attention.o_proj.weight.T
    torch.testing.assert_close(attention(h), expected)
    tables = rotary_tables(4, 5)
    turned = attend(apply_rotary(q, tables), apply_rotary(k, tables), v)
    torch.testing.assert_close(
        attention(h, tables), turned.transpose(1, 2).reshape(2, 5, 12) @ attention.o_proj.weight.T
    )
    assert not torch.allclose(attention(h, tables), expected)


def test_queries_can_come_from_another_state():
    attention = drawn(CausalSelfAttention(12, 3))
    h, other, tables = normal(2, 5, 12), normal(2, 5, 12, seed=1), rotary_tables(4, 5)
    mixed = attention.project(h, tables, query_from=other)
    torch.testing.assert_close(mixed[0], attention.project(other, tables)[0])
    for a, b in zip(mixed[1:], attention.project(h, tables)[1:], strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(attention(h, tables, query_from=h), attention(h, tables))
    assert not torch.allclose(attention(h, tables, query_from=other), attention(h, tables))


def test_qk_norm_makes_scores_blind_to_the_size_of_queries_and_keys():
    plain, normed = (drawn(CausalSelfAttention(12, 3, qk_norm=on)) for on in (False, True))
    h, tables = normal(2, 5, 12), rotary_tables(4, 5)
    before = normed(h, tables)
    q, k, _ = normed.project(h, tables)
    torch.testing.assert_close(q.square().mean(-1), torch.ones(2, 3, 5).double(), rtol=0, atol=1e-4)
    torch.testing.assert_close(k.square().mean(-1), torch.ones(2, 3, 5).double(), rtol=0, atol=1e-4)
    other = plain(h, tables)
    with torch.no_grad():
        for attention in (plain, normed):
            attention.q_proj.weight *= 7
            attention.k_proj.weight *= 5
    torch.testing.assert_close(normed(h, tables), before, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain(h, tables), other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("activation", "formula"),
    [("relu2", lambda x: x.clamp_min(0) ** 2), ("silu", lambda x: x * torch.sigmoid(x)), ("none", lambda x: x)],
)
def test_mlps_are_their_formulas(activation, formula):
    h = normal(3, 4, 8)
    mlp = drawn(Mlp(8, activation=activation))
    assert mlp.up_proj.weight.shape == (32, 8)
    torch.testing.assert_close(mlp(h), formula(h @ mlp.up_proj.weight.T) @ mlp.down_proj.weight.T)
    gated = drawn(GatedMlp(8, 20, activation=activation))
    inside = formula(h @ gated.gate_proj.weight.T) * (h @ gated.up_proj.weight.T)
    torch.testing.assert_close(gated(h), inside @ gated.down_proj.weight.T)


@pytest.mark.parametrize(
    ("heads", "message"),
    [((12, 5, None), "d_model=12 is not divisible by n_heads=5"), ((12, 6, 4), "n_heads=6 is not .* n_kv_heads=4")],
)
def test_heads_that_do_not_fit_are_named(heads, message):
    with pytest.raises(ValueError, match=message):
        CausalSelfAttention(heads[0], heads[1], n_kv_heads=heads[2])
