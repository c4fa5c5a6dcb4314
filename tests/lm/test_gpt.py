"""GPT: the papers' sizes, the plain definition written out, every scheme, autocast, compilation, pruning, refusals."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from depthlab.diagnostics import record
from depthlab.lm import GPT, GPTConfig
from depthlab.residuals import SCHEMES

SMALL = GPTConfig.preset("toy", residual="prenorm", n_layers=3, n_heads=4, d_model=32, seq_len=16)
TOKENS = torch.randint(0, 256, (3, 17), generator=torch.Generator().manual_seed(0))
INPUTS, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]


def gpt(residual: str = "prenorm", seed: int = 0, **changes) -> GPT:
    return GPT(replace(SMALL, residual=residual, **changes), torch.Generator().manual_seed(seed))


def count(config: GPTConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(config).parameters())


SIZES = [("S", 0.12, 124_354_560), ("M", 0.35, 354_549_760), ("L", 0.77, 773_488_640)]


@pytest.mark.parametrize(("name", "billions", "exact"), SIZES)
def test_presets_have_the_papers_sizes(name, billions, exact):
    config = GPTConfig.preset(name, residual="prenorm")
    blocks, width = config.n_layers, config.d_model
    assert (config.vocab_size, config.seq_len) == (50_304, 1024)
    assert count(config) == exact == 12 * blocks * width**2 + (50_304 + 1024) * width
    assert round(exact / 1e9, 2) == billions


@pytest.mark.parametrize("name", ["toy", "S", "M", "L"])
def test_each_scheme_adds_just_the_parameters_of_its_rule(name):
    base = GPTConfig.preset(name, residual="prenorm")
    c, sublayers, n = base.d_model, 2 * base.n_layers, 4
    mixing = sublayers - (n - 1)
    queries = sublayers * c
    added = {
        "prenorm": 0,
        "hc": sublayers * (2 * c + c * n + 2 * n + n * n + 2),
        "mhc-lite": sublayers * (n * c * (2 * n + 24) + 2 * n + 24 + 3),
        "attnres": 2 * queries,
        "attnres-block": 2 * queries,
        "mgr-independent": queries + mixing * (c + n),
        "mgr-competitive": queries + mixing * (c + 1),
    }
    for scheme in SCHEMES:
        assert count(replace(base, residual=scheme, n_streams=n)) - count(base) == added[scheme], scheme


def test_logits_and_loss_are_those_of_the_plain_definition():
    model = gpt().double()
    w = model.state_dict()

    def norm(x):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

    x = w["embed_tokens.weight"][INPUTS] + w["embed_positions.weight"]
    unseen = torch.ones(16, 16).triu(1).bool()
    for block in range(3):
        attention, mlp = f"sublayers.{2 * block}.", f"sublayers.{2 * block + 1}."
        q, k, v = (norm(x) @ w[f"{attention}{name}_proj.weight"].T for name in "qkv")
        heads = [
            ((q[..., s] @ k[..., s].mT) / math.sqrt(8)).masked_fill(unseen, -torch.inf).softmax(-1) @ v[..., s]
            for s in (slice(8 * i, 8 * i + 8) for i in range(4))
        ]
        x = x + torch.cat(heads, -1) @ w[f"{attention}o_proj.weight"].T
        up = norm(x) @ w[f"{mlp}up_proj.weight"].T
        x = x + (0.5 * up * (1 + torch.erf(up / math.sqrt(2)))) @ w[f"{mlp}down_proj.weight"].T
    logits = norm(x) @ w["embed_tokens.weight"].T
    torch.testing.assert_close(model(INPUTS), logits)
    torch.testing.assert_close(model.loss(INPUTS, TARGETS), F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten()))


def test_start_values_are_nanogpts_and_a_seed_decides_them_all():
    model = gpt(seed=1, d_model=64)
    stds = {name: float(p.detach().std()) for name, p in model.named_parameters()}
    for name, std in stds.items():
        expected = 0.02 / math.sqrt(6) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        assert std == pytest.approx(expected, rel=0.06), name
    same, other = gpt(seed=1, d_model=64), gpt(seed=2, d_model=64)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
    assert not torch.equal(model.embed_tokens.weight, other.embed_tokens.weight)
    assert abs(float(model.loss(INPUTS, TARGETS).detach()) - math.log(256)) < 0.1


def test_a_seed_gives_every_scheme_the_same_weights_outside_the_residual():
    plain = dict(gpt().named_parameters())
    for scheme in SCHEMES:
        for name, p in gpt(scheme).named_parameters():
            assert "residual" in name or torch.equal(p, plain[name])


def test_building_leaves_the_global_generator_alone_when_one_is_given():
    before = torch.get_rng_state()
    gpt()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(3)
    first = GPT(SMALL)
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), GPT(SMALL).parameters(), strict=True))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_made_on_meta_and_filled_later_is_the_model(scheme):
    with torch.device("meta"):
        empty = GPT(replace(SMALL, residual=scheme))
    late = empty.to_empty(device="cpu")
    late.reset_parameters(torch.Generator().manual_seed(0))
    assert torch.equal(late(INPUTS), gpt(scheme)(INPUTS))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_token_sees_the_future_and_every_parameter_of_a_sublayer_learns(scheme):
    model = gpt(scheme)
    changed = INPUTS.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 256
    torch.testing.assert_close(model(changed)[:, :9], model(INPUTS)[:, :9])
    assert not torch.allclose(model(changed)[:, 9:], model(INPUTS)[:, 9:])
    torch.testing.assert_close(model(INPUTS[:, :5]), model(INPUTS)[:, :5])
    model.loss(INPUTS, TARGETS).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None or "residual" in name, name
        assert p.grad is None or p.grad.isfinite().all()
    assert all(p.grad.any() for name, p in model.named_parameters() if "sublayers" in name)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_forward_pass_is_the_residuals_loop_and_nothing_else(scheme):
    model = gpt(scheme)
    h, state = model.residual.start(model.embed_tokens(INPUTS) + model.embed_positions.weight)
    for layer, sublayer in enumerate(model.sublayers):
        h, state = model.residual.step(layer, sublayer(h), state)
    assert torch.equal(model(INPUTS), F.linear(h, model.embed_tokens.weight))
    with record(model.residual) as trace:
        model(INPUTS)
    assert [step.layer for step in trace.steps] == list(range(6))


def test_skipped_sublayers_are_left_out():
    model = gpt()
    assert not torch.equal(model(INPUTS, skip=(2, 3)), model(INPUTS))
    shorter = gpt(n_layers=2)
    names = {f"sublayers.{i}.": f"sublayers.{i if i < 2 else i + 2}." for i in range(4)}
    whole = model.state_dict()
    with torch.no_grad():
        for name, p in shorter.named_parameters():
            prefix = ".".join(name.split(".")[:2]) + "."
            p.copy_(whole[name.replace(prefix, names.get(prefix, prefix))])
    assert torch.equal(model(INPUTS, skip=(2, 3)), shorter(INPUTS))
    assert torch.equal(model.loss(INPUTS, TARGETS, skip=(2, 3)), shorter.loss(INPUTS, TARGETS))
    with pytest.raises(ValueError, match="names a sublayer outside 0 .. 5"):
        model(INPUTS, skip=(6,))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_under_autocast_state_and_logits_are_bfloat16_and_loss_and_gradients_float32(scheme):
    model = gpt(scheme)
    exact = float(model.loss(INPUTS, TARGETS).detach())
    with record(model.residual) as trace, torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.loss(INPUTS, TARGETS)
        assert model(INPUTS).dtype == torch.bfloat16
    assert {step.after.stacked().dtype for step in trace.steps} == {torch.bfloat16}
    assert loss.dtype == torch.float32 and abs(float(loss.detach()) - exact) < 0.02
    loss.backward()
    assert all(
        p.grad is None or (p.grad.dtype == torch.float32 and p.grad.isfinite().all()) for p in model.parameters()
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_cast_to_bfloat16_runs_and_keeps_the_residuals_parameters_in_float32(scheme):
    model = gpt(scheme)
    exact = float(model.loss(INPUTS, TARGETS).detach())
    model.to(torch.bfloat16)
    for name, p in model.named_parameters():
        assert p.dtype == (torch.float32 if "residual" in name else torch.bfloat16), name
    loss = model.loss(INPUTS, TARGETS)
    loss.backward()
    assert loss.dtype == torch.float32 and abs(float(loss.detach()) - exact) < 0.02


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_parameter_is_left_uninitialised(scheme):
    torch.use_deterministic_algorithms(True)  # torch then fills fresh memory with NaN
    try:
        model = gpt(scheme)
        assert torch.empty(3).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(p.isfinite().all() for p in model.state_dict().values())


def test_dropout_acts_in_training_only():
    model = gpt(dropout=0.2)
    torch.manual_seed(0)
    assert not torch.equal(model(INPUTS), model(INPUTS))
    model.eval()
    assert torch.equal(model(INPUTS), model(INPUTS))
    assert torch.equal(model(INPUTS), gpt()(INPUTS))


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("scheme", ["prenorm", "hc", "mgr-independent", "mgr-competitive"])
def test_the_whole_loss_compiles_to_one_graph_and_equals_eager(scheme, autocast):
    torch._dynamo.reset()
    model = gpt(scheme, n_layers=2)
    found = []
    for loss in (torch.compile(model.loss, fullgraph=True, backend="aot_eager"), model.loss):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            value = loss(INPUTS, TARGETS)
        value.backward()
        found.append([value.detach()] + [p.grad.clone() for p in model.parameters() if p.grad is not None])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4 if autocast else 1e-6)  # sums in another order


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"residual": "post"}, ValueError, "residual='post' is unknown; use one of prenorm, hc, mhc-lite"),
        ({"residual": None}, ValueError, "residual=None is unknown"),
        ({"backend": "cuda"}, ValueError, "backend='cuda' is unknown; use one of auto, torch, triton"),
        ({"d_model": 30}, ValueError, "d_model=30 is not divisible by n_heads=4"),
        ({"d_model": 0}, ValueError, "d_model=0 is not allowed; use at least 1"),
        ({"n_layers": 2.0}, TypeError, "n_layers=2.0 is float; use an integer"),
        ({"seq_len": True}, TypeError, "seq_len=True is bool"),
        ({"dropout": 1.0}, ValueError, "dropout=1.0 is not allowed; use a number from 0 to below 1"),
        ({"dropout": "some"}, TypeError, "dropout='some' is str"),
        ({"residual": "mhc-lite", "n_streams": 6}, ValueError, "n_streams=6 is too many for .*mhc-lite.* at most 5"),
        (
            {"residual": "mgr-independent", "n_streams": 7},
            ValueError,
            r"n_streams=7 is too many for residual='mgr-independent' with n_layers=3 \(6 sublayers\); use n_streams of "
            "at most 6, or n_layers of at least 4",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_what_is_allowed(change, error, message):
    with pytest.raises(error, match=message):
        replace(SMALL, **change)


def test_the_most_streams_and_the_fewest_blocks_that_are_named_do_exist():
    for scheme in ("mgr-independent", "mgr-competitive"):
        with pytest.raises(ValueError, match="too many") as raised:
            replace(SMALL, residual=scheme, n_streams=9)
        words = str(raised.value).rstrip(".").replace(",", "").split()
        most, blocks = int(words[-7]), int(words[-1])
        assert gpt(scheme, n_streams=most).config.n_streams == most
        assert gpt(scheme, n_streams=9, n_layers=blocks).config.n_layers == blocks
        for change in ({"n_streams": most + 1}, {"n_streams": 9, "n_layers": blocks - 1}):
            with pytest.raises(ValueError, match="too many"):
                replace(SMALL, residual=scheme, **change)


def test_an_unknown_preset_is_named():
    with pytest.raises(ValueError, match="preset='XL' is unknown; use one of toy, S, M, L"):
        GPTConfig.preset("XL")


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (torch.zeros(1, 17, dtype=torch.long), ValueError, "tokens are 17 long and the model reads at most seq_len=16"),
        (torch.full((1, 4), 256), ValueError, r"tokens hold the number 256, and the vocabulary is 0 \.\. 255"),
        (torch.full((1, 4), -1), ValueError, "tokens hold the number -1"),
        (torch.zeros(4, dtype=torch.long), ValueError, r"tokens have shape \[4\]; they need \[B, T\]"),
        (torch.zeros(2, 0, dtype=torch.long), ValueError, r"tokens have shape \[2, 0\]"),
        (torch.zeros(1, 4), TypeError, "tokens have dtype torch.float32; use int64 or int32"),
        ([[1, 2]], TypeError, "tokens must be a torch.Tensor, got list"),
    ],
)
def test_wrong_tokens_are_named(tokens, error, message):
    with pytest.raises(error, match=message):
        gpt()(tokens)


def test_int32_tokens_are_tokens():
    model = gpt()
    assert torch.equal(model(INPUTS.int()), model(INPUTS))
    assert torch.equal(model.loss(INPUTS.int(), TARGETS.int()), model.loss(INPUTS, TARGETS))
