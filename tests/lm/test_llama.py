"""Llama: equal to Hugging Face's, to a Llama written out by hand, and over every residual scheme."""

import math
from dataclasses import replace

import pytest
import torch

from depthlab.lm.llama import Llama, LlamaConfig
from depthlab.lm.llama_hf import load_hf, to_hf
from depthlab.residuals import SCHEMES

SMALL = LlamaConfig(
    vocab_size=37,
    seq_len=12,
    n_layers=3,
    n_heads=6,
    n_kv_heads=2,
    d_model=24,
    d_hidden=40,
    norm_eps=1e-5,
    rope_base=500.0,
)


def shaken(config: LlamaConfig, seed: int = 0) -> Llama:
    """A Llama in float64 whose norm weights have left 1 and whose weights are large enough to matter."""
    g = torch.Generator().manual_seed(seed)
    model = Llama(config, g).double()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape, generator=g, dtype=p.dtype)
    return model


def tokens(config: LlamaConfig, batch: int = 2, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (batch, config.seq_len), generator=torch.Generator().manual_seed(seed))


def by_hand(weights: dict, config: LlamaConfig, row: torch.Tensor, *, flip: bool = False, swap: bool = False):
    """Logits [T, V] of one row of tokens: complex rotations, one head and one query at a time."""
    d, groups = config.head_dim, config.n_heads // config.n_kv_heads

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[name]

    def rotate(x, t):
        pairs = torch.complex(x[0::2], x[1::2]) if swap else torch.complex(x[: d // 2], x[d // 2 :])
        angles = t * config.rope_base ** (-2 * torch.arange(d // 2, dtype=torch.float64) / d)
        turned = pairs * torch.polar(torch.ones_like(angles), -angles if flip and t % 2 else angles)
        return torch.cat((turned.real, turned.imag))

    x = weights["model.embed_tokens.weight"][row]
    for layer in range(config.n_layers):
        w = {k.split(".", 3)[3]: v for k, v in weights.items() if k.startswith(f"model.layers.{layer}.")}
        h = norm(x, f"model.layers.{layer}.input_layernorm.weight")
        q, k, v = (h @ w[f"self_attn.{name}_proj.weight"].T for name in "qkv")
        read = torch.zeros_like(x)
        for t in range(len(row)):
            for head in range(config.n_heads):
                mine, shared = slice(head * d, head * d + d), slice(head // groups * d, head // groups * d + d)
                scores = torch.stack(
                    [rotate(q[t, mine], t) @ rotate(k[s, shared], s) / math.sqrt(d) for s in range(t + 1)]
                )
                read[t, mine] = scores.softmax(0) @ v[: t + 1, shared]
        x = x + read @ w["self_attn.o_proj.weight"].T
        h = norm(x, f"model.layers.{layer}.post_attention_layernorm.weight")
        gate = h @ w["mlp.gate_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_a_llama_written_out_by_hand(tied):
    config = replace(SMALL, tied=tied)
    model = shaken(config)
    row = tokens(config)[0]
    found = model(row.unsqueeze(0))[0].detach()
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    torch.testing.assert_close(found, by_hand(weights, config, row), rtol=0, atol=1e-5)  # the tables are float32
    for wrong in ({"flip": True}, {"swap": True}):
        assert (found - by_hand(weights, config, row, **wrong)).abs().max() > 0.01


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("activation", ["silu", "none", "relu2"])
def test_logits_and_gradients_are_hugging_faces(tied, activation):
    transformers = pytest.importorskip("transformers", reason="the 'hub' extra is not installed")
    ours = shaken(replace(SMALL, tied=tied, activation=activation)).float()
    config, weights = to_hf(ours)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    theirs.load_state_dict(weights, strict=True)
    batch = tokens(SMALL)
    torch.testing.assert_close(ours(batch), theirs(batch).logits, rtol=1e-5, atol=2e-5)
    ours.loss(batch[:, :-1], batch[:, 1:]).backward()
    theirs(batch, labels=batch).loss.backward()
    other = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, other[name].grad, rtol=1e-4, atol=2e-6, msg=lambda m, name=name: name + m)
    # and back, from what they save
    again = load_hf(theirs.config.to_dict(), theirs.state_dict())
    assert again.config == ours.config
    assert torch.equal(again(batch), ours(batch))


@pytest.mark.parametrize("tied", [True, False])
def test_a_round_trip_through_hugging_faces_form_gives_the_same_model(tied):
    ours = shaken(replace(SMALL, tied=tied)).float()
    again = load_hf(*to_hf(ours))
    assert again.config == ours.config
    batch = tokens(SMALL)
    assert torch.equal(again(batch), ours(batch))
    with torch.no_grad():
        again.model["norm"].weight.zero_()
    assert ours.model["norm"].weight.abs().min() > 0  # the weights are copies


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_runs_and_learns_over_every_scheme(scheme):
    model = Llama(replace(SMALL, residual=scheme, n_streams=2), torch.Generator().manual_seed(0))
    batch = tokens(SMALL)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(8):
        loss = model.loss(batch[:, :-1], batch[:, 1:])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert abs(losses[0] - math.log(37)) < 0.2 and losses[-1] < losses[0] - 0.3
    assert all(p.grad is not None for name, p in model.named_parameters() if "residual" not in name)


def test_names_and_count_are_those_of_the_paper_size():
    config = LlamaConfig.preset("34M")
    with torch.device("meta"):
        model = Llama(config)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(33.7e6, rel=0.002)
    projections = ("q", "k", "v", "o")
    names = {f"model.layers.0.self_attn.{p}_proj.weight" for p in projections}
    names |= {f"model.layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    assert names <= set(model.state_dict())


def test_matmul_parameters_are_the_matrices_of_the_model():
    for config in (SMALL, replace(SMALL, tied=False), LlamaConfig.preset("toy")):
        model = Llama(config)
        matrices = sum(p.numel() for block in model.model["layers"] for p in block.parameters() if p.ndim == 2)
        assert config.matmul_parameters == matrices + model.head_weight.numel()


def test_the_gates_activation_can_be_dropped():
    silu, none = (shaken(replace(SMALL, activation=name)) for name in ("silu", "none"))
    mlp = none.model["layers"][0].mlp
    h = torch.randn(3, 24, dtype=torch.float64)
    expected = (mlp.gate_proj(h) * mlp.up_proj(h)) @ mlp.down_proj.weight.T
    torch.testing.assert_close(mlp(h), expected)
    assert not torch.allclose(silu.model["layers"][0].mlp(h), expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"activation": "swish"}, ValueError, "activation='swish' is unknown; use one of gelu, silu"),
        ({"n_kv_heads": 4}, ValueError, "n_heads=6 is not divisible by n_kv_heads=4"),
        ({"n_heads": 8, "n_kv_heads": 8}, ValueError, "d_model=24 with n_heads=8 makes heads 3 wide"),
        ({"rope_base": -1.0}, ValueError, "rope_base=-1.0 is not allowed; use a positive number"),
        ({"norm_eps": "small"}, TypeError, "norm_eps='small' is str"),
        ({"residual": "postnorm"}, ValueError, "residual='postnorm' is unknown; use one of prenorm, hc"),
    ],
)
def test_wrong_settings_are_named(change, error, message):
    with pytest.raises(error, match=message):
        replace(SMALL, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma"}, "model_type='gemma' is no Llama"),
        ({"rope_scaling": {"rope_type": "llama3"}, "rope_parameters": None}, "kind 'llama3'"),
        ({"attention_bias": True}, "attention_bias=True; this Llama has no biases"),
        ({"head_dim": 16}, "head_dim=16; this Llama needs 4"),
        ({"hidden_act": "mish"}, "hidden_act='mish' is unknown; use one of silu"),
        ({"vocab_size": 38}, r"model.embed_tokens.weight has shape \[37, 24\]; the config needs \[38, 24\]"),
        ({"num_hidden_layers": 2}, "0 are missing .none., 9 are unknown .model.layers.2"),
        ({"num_hidden_layers": 4}, "9 are missing .model.layers.3.*; give the whole state dict"),
        ({"tie_word_embeddings": False}, None),
    ],
)
def test_a_foreign_config_or_weight_is_named(change, message):
    config, weights = to_hf(Llama(SMALL))
    if message is None:  # an untied head that happens to equal the embedding is legitimate
        assert not load_hf(config | change, weights).config.tied
        return
    with pytest.raises(ValueError, match=message):
        load_hf(config | change, weights)


def test_a_tied_config_with_two_different_matrices_is_refused():
    config, weights = to_hf(Llama(replace(SMALL, tied=False)))
    with pytest.raises(ValueError, match="use tied=False"):
        load_hf(config | {"tie_word_embeddings": True}, weights)


def test_only_prenorm_has_an_equal_at_hugging_face():
    with pytest.raises(ValueError, match="residual='hc' has no equal"):
        to_hf(Llama(replace(SMALL, residual="hc")))
