"""The published setting, loop counts, objectives, checkpointing, truncation, compilation, data parallel, refusals."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from depthlab.kernels.mgr import rms_normalize
from depthlab.lm import build_optimizers, evaluate, generate
from depthlab.lm.layers import rotary_tables
from depthlab.looped import VARIANTS, LoopedConfig, LoopedTransformer, wiring
from depthlab.looped.model import one_loop


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def same_gradients(a, b, **tolerance):
    for name in a:
        assert (a[name] is None) == (b[name] is None), name
        if a[name] is not None:
            torch.testing.assert_close(a[name], b[name], msg=name, **tolerance)


# ---- the published setting


def test_start_values_are_the_published_ones_and_a_seed_decides_them_all(looped):
    model = looped(start=True, d_model=96, vocab_size=512)
    for name, p in model.named_parameters():
        w, bound = p.detach(), math.sqrt(3 / 96)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert not w.any(), name
        elif "blocks" in name:
            assert float(w.std()) == pytest.approx(96**-0.5, rel=0.03), name
            assert 0.98 * bound < float(w.abs().max()) <= bound, name  # uniform
        else:
            std = {"embed_tokens.weight": 1.0, "lm_head.weight": 0.001}[name]
            assert float(w.std()) == pytest.approx(std, rel=0.03), name
            assert float(w.abs().max()) > 3 * std, name  # normal
    assert not any("bias" in name or "norm" in name for name, _ in model.named_parameters())
    same, other = (looped(start=True, seed=seed, d_model=96, vocab_size=512) for seed in (0, 1))
    pairs = zip(model.parameters(), same.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(model.embed_tokens.weight, other.embed_tokens.weight)


def test_at_the_start_all_variants_are_one_model_whose_loss_is_that_of_chance(looped, tokens):
    losses = [looped(variant, start=True).loss(tokens[:, :-1], tokens[:, 1:]).item() for variant in VARIANTS]
    assert max(losses) - min(losses) < 1e-6 and losses[0] == pytest.approx(math.log(32), abs=0.01)


def test_logits_never_pass_the_soft_cap(looped, tokens):
    model = looped()
    with torch.no_grad():
        model.lm_head.weight.mul_(1e4)
        assert 14.9 < float(model(tokens).abs().max()) <= 15
        assert float(looped(soft_cap=2.0)(tokens).abs().max()) <= 2


def test_a_seed_leaves_the_global_generator_alone_and_a_model_on_meta_can_be_filled_later(looped, tokens):
    before = torch.get_rng_state()
    model = looped(start=True)
    assert torch.equal(before, torch.get_rng_state())
    with torch.device("meta"):
        late = LoopedTransformer(model.config)
    late = late.to_empty(device="cpu")
    late.reset_parameters(torch.Generator().manual_seed(0))
    assert torch.equal(late(tokens), model(tokens))


def test_the_published_optimizers_take_every_parameter_at_its_rate(looped):
    model = looped()
    muon, adamw = build_optimizers(model, "flt")
    scale = (16 / 768) ** -0.5
    assert muon.param_groups[0]["lr"] == 0.02 and len(muon.param_groups[0]["params"]) == 2 * 6
    rates = {id(p): group["lr"] for group in adamw.param_groups for p in group["params"]}
    assert rates[id(model.embed_tokens.weight)] == pytest.approx(0.2 * scale)
    assert rates[id(model.lm_head.weight)] == pytest.approx(0.004 * scale)


def test_attention_mixes_values_convexly_so_an_injected_query_cannot_make_them_longer(looped, tokens, monkeypatch):
    """The norm bound of attention injection: what o_proj reads is, per head, no longer than the longest value."""
    model, found = looped("flt"), []
    attention = model.blocks[0].attention
    project, merge = attention.project, attention.merge
    monkeypatch.setattr(attention, "project", lambda *inputs: found.append([project(*inputs)[2]]) or project(*inputs))
    monkeypatch.setattr(attention, "merge", lambda heads: found[-1].append(heads) or merge(heads))
    with torch.no_grad():
        model(tokens)
    assert len(found) == 3  # one pair a loop
    for values, heads in found:  # [B, H, T, D]
        longest = values.norm(dim=-1).cummax(-1).values  # over the tokens so far
        assert (heads.norm(dim=-1) <= longest * (1 + 1e-5)).all()


# ---- loop counts, objectives


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_loop_count_up_to_four_times_the_trained_one_gives_finite_logits(variant, looped, tokens):
    model = looped(variant)
    with torch.no_grad():
        for n_loops in range(1, 13):
            logits, states = model(tokens, n_loops, return_loops=True)
            assert logits.shape == (2, 13, 32) and logits.isfinite().all()
            assert [z.shape for z in states] == [(2, 13, 16)] * n_loops
            assert model.loop_norms.shape == (n_loops,)
        torch.testing.assert_close(model(tokens), model(tokens, 3))


def test_loop_norms_are_those_of_the_states_before_their_norm(looped, tokens):
    model = looped()
    assert model.loop_norms is None
    logits, states = model(tokens, return_loops=True)
    expected = torch.stack([z.norm(dim=-1).mean() for z in states])
    assert torch.equal(model.loop_norms, expected) and not model.loop_norms.requires_grad
    h = states[-1] / (states[-1].pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(logits, 15 * torch.tanh(F.linear(h, model.lm_head.weight) / 15))


def test_more_loops_go_on_where_fewer_end(looped, tokens):
    """The states of a call are the first ones of a longer call."""
    model = looped()
    for a, b in zip(model(tokens, 2, return_loops=True)[1], model(tokens, 5, return_loops=True)[1], strict=False):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("objective", "loops"), [("END", (7,)), ("FEW", (5, 6, 7)), ("STEP", range(1, 8))])
def test_an_objective_averages_the_losses_of_its_loops(objective, loops, looped, tokens):
    model = looped(n_loops=7, objective=objective)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    each = [F.cross_entropy(model(inputs, loop).flatten(0, 1), targets.flatten()) for loop in loops]
    torch.testing.assert_close(model.loss(inputs, targets), torch.stack(each).mean())
    model.eval()  # evaluation asks what the model would say
    last = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model.loss(inputs, targets), last)
    torch.testing.assert_close(model.loss(inputs, targets, objective=objective), torch.stack(each).mean())


def test_evaluation_and_generation_take_a_loop_count(looped, tokens):
    model = looped()
    losses = [evaluate(model, tokens.flatten(), n_loops=n).loss_nats for n in (1, 3)]
    assert losses[0] != losses[1] and losses[1] == evaluate(model, tokens.flatten()).loss_nats
    texts = [generate(model, tokens, 8, temperature=0, n_loops=n) for n in (1, 3)]
    assert not torch.equal(*texts)


# ---- memory: checkpointing, truncation


class Storages(TorchDispatchMode):
    """Bytes of everything that operations made inside and that is still alive."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def alive(self):
        self.made = {key: (ref, size) for key, (ref, size) in self.made.items() if not ref.expired()}
        return sum(size for _, size in self.made.values())


def bytes_kept(model, tokens):
    with Storages() as storages:
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    return storages.alive(), loss


@pytest.mark.parametrize("variant", VARIANTS)
def test_checkpointed_loops_give_equal_gradients_and_keep_less(variant, looped, tokens):
    plain, lean = looped(variant), looped(variant, checkpoint_loops=True)
    kept = {}
    found = []
    for name, model in (("plain", plain), ("lean", lean)):
        kept[name], loss = bytes_kept(model, tokens)
        found.append(gradients(model, loss))
    same_gradients(*found, rtol=0, atol=0)
    assert kept["lean"] < 0.4 * kept["plain"], kept


def test_checkpointed_training_does_not_grow(looped, tokens):
    model, alive = looped(checkpoint_loops=True, n_layers=1), []
    with Storages() as storages:
        for _ in range(50):
            model.loss(tokens[:, :4], tokens[:, 1:5]).backward()
            model.zero_grad(set_to_none=True)
            alive.append(storages.alive())
    assert max(alive[5:]) == min(alive[5:])


def detached(model, tokens, targets, k):
    """Truncated by hand: all but the last k loops are run first, and what they give is a constant."""
    config = model.config
    e = model.embed_tokens(tokens)
    rotary = rotary_tables(config.head_dim, tokens.shape[1])
    h, first = None, config.n_loops - k
    if first:
        with torch.no_grad():
            h = rms_normalize(model(tokens, first, return_loops=True)[1][-1])
    for loop in range(first + 1, config.n_loops + 1):
        plan = [wiring(config.variant, loop, block) for block in (1, 2)]
        _, h, _ = one_loop(model.blocks, plan, e, h, rotary)
    logits = 15 * torch.tanh(F.linear(h, model.lm_head.weight) / 15)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_truncated_backpropagation_is_that_of_a_detached_reference(variant, k, looped, tokens):
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    full, cut = (looped(variant, n_loops=4, dtype=torch.float64, backprop_loops=x) for x in (None, k))
    loss = cut.loss(inputs, targets)
    torch.testing.assert_close(loss, full.loss(inputs, targets))
    found = gradients(cut, loss)
    same_gradients(found, gradients(cut, detached(cut, inputs, targets, k)))
    whole = gradients(full, full.loss(inputs, targets))
    if k == 4:
        same_gradients(found, whole)
    else:
        gap = (found["blocks.0.mlp.up_proj.weight"] - whole["blocks.0.mlp.up_proj.weight"]).abs().max()
        assert gap > 1e-4
        # only lt meets the embedding nowhere but in its first loop
        assert (found["embed_tokens.weight"] is None) == (variant == "lt")


def test_truncation_keeps_the_memory_of_its_loops_only(looped, tokens):
    kept = [bytes_kept(looped(n_loops=n, backprop_loops=2), tokens)[0] for n in (2, 4, 8)]
    assert kept[2] < 1.1 * kept[1] < 1.2 * kept[0]
    assert kept[2] < 0.5 * bytes_kept(looped(n_loops=8), tokens)[0]


# ---- untied


def test_an_untied_stack_has_blocks_for_each_loop_and_equals_the_tied_one_with_copies(looped, tokens):
    tied, untied = looped("lt", dtype=torch.float64), looped("lt", dtype=torch.float64, tied=False)
    assert len(untied.blocks) == 3 * len(tied.blocks)
    weights = tied.state_dict()
    for i in range(3):
        for block in range(2):
            part = {k.removeprefix(f"blocks.{block}."): v for k, v in weights.items() if f"blocks.{block}." in k}
            untied.blocks[2 * i + block].load_state_dict(part)
    untied.embed_tokens.load_state_dict(tied.embed_tokens.state_dict())
    untied.lm_head.load_state_dict(tied.lm_head.state_dict())
    losses = [model.loss(tokens[:, :-1], tokens[:, 1:]) for model in (tied, untied)]
    assert torch.equal(*losses)
    shared, apart = (gradients(model, loss) for model, loss in zip((tied, untied), losses, strict=True))
    for block in range(2):  # the gradient of a shared weight is the sum over its loops
        name = "mlp.up_proj.weight"
        summed = sum(apart[f"blocks.{2 * i + block}.{name}"] for i in range(3))
        torch.testing.assert_close(shared[f"blocks.{block}.{name}"], summed)
    assert torch.equal(untied(tokens, 2), tied(tokens, 2))
    with pytest.raises(ValueError, match="n_loops=4 is above the 3 loops that have blocks; an untied model"):
        untied(tokens, 4)


# ---- compiled, in parts, in bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "objective"), [(True, "END"), (False, "END"), (True, "STEP"), (True, "FEW")])
def test_what_compiling_costs_does_not_grow_with_the_loops(tied, objective, looped, tokens):
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    graphs, operations = [], []
    for n_loops, backend in ((2, "aot_eager"), (12, "eager")):
        torch.compiler.reset()
        model = looped("flt", n_loops=n_loops, tied=tied, n_layers=1)
        counter = CompileCounterWithBackend(backend)
        loss = torch.compile(model.loss, backend=counter)(inputs, targets, objective=objective)
        found = gradients(model, loss)
        same_gradients(found, gradients(model, model.loss(inputs, targets, objective=objective)), rtol=1e-4, atol=1e-5)
        graphs.append(counter.frame_count)
        operations.append(counter.op_count)
    assert graphs[0] == graphs[1] <= 5
    assert operations[0] == operations[1]


@pytest.mark.slow
def test_a_compiled_model_takes_any_loop_count_without_being_compiled_again(looped, tokens):
    torch.compiler.reset()
    model = looped("flt-res", n_layers=1)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter)
    with torch.no_grad():
        for n_loops in (2, 3):  # the second one shows the compiler that n_loops varies
            compiled(tokens, n_loops)
        before = counter.frame_count
        for n_loops in (4, 5, 12):
            torch.testing.assert_close(compiled(tokens, n_loops), model(tokens, n_loops), rtol=1e-4, atol=1e-4)
    assert counter.frame_count == before


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("checkpoint_loops", [False, True])
@pytest.mark.parametrize("variant", ["lt", "flt"])
def test_under_data_parallel_a_shared_stack_has_its_own_gradients(
    variant, checkpoint_loops, looped, tokens, one_process
):
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    plain = looped(variant)
    expected = gradients(plain, plain.loss(inputs, targets))
    model = looped(variant, checkpoint_loops=checkpoint_loops)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(2):  # the second step meets the buckets that the first one built
        model.zero_grad()
        F.cross_entropy(parallel(inputs).flatten(0, 1), targets.flatten()).backward()
        same_gradients({name: p.grad for name, p in model.named_parameters()}, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"backprop_loops": 1}, {"checkpoint_loops": True}])
@pytest.mark.parametrize("variant", VARIANTS)
def test_under_autocast_the_loss_and_every_gradient_are_float32(variant, changes, looped, tokens):
    model = looped(variant, **changes)
    exact = model.loss(tokens[:, :-1], tokens[:, 1:])
    expected = gradients(model, exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    assert loss.dtype == torch.float32 and abs(loss.item() - exact.item()) < 0.05 * exact.item()
    for name, gradient in gradients(model, loss).items():
        assert (gradient is None) == (expected[name] is None)
        if gradient is not None:
            assert gradient.dtype == torch.float32
            assert F.cosine_similarity(gradient.flatten(), expected[name].flatten(), 0) > 0.9, name


# ---- refusals


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"variant": "ft"}, ValueError, "variant='ft' is unknown; use one of lt, lt-input, lt-attn, flt-res, flt"),
        ({"n_loops": 0}, ValueError, "n_loops=0 is not allowed; use at least 1"),
        ({"n_loops": 2.0}, TypeError, "n_loops=2.0 is float; use an integer"),
        ({"d_model": 18, "n_heads": 4}, ValueError, "d_model=18 is not divisible by n_heads=4"),
        ({"d_model": 6, "n_heads": 2}, ValueError, "makes heads 3 wide; rotary positions turn pairs"),
        ({"rope_base": 0}, ValueError, "rope_base=0 is not allowed; use a positive number"),
        ({"soft_cap": -1.0}, ValueError, "soft_cap=-1.0 is not allowed"),
        ({"objective": "ALL"}, ValueError, "objective='ALL' is unknown; use one of END, STEP, FEW"),
        ({"tied": 1}, TypeError, "tied=1 is not allowed; use True or False"),
        ({"backprop_loops": 0}, ValueError, "backprop_loops=0 is not allowed; use at least 1"),
        (
            {"backprop_loops": 2, "objective": "STEP"},
            ValueError,
            "backprop_loops=2 is below the 3 loops whose loss objective='STEP' takes at n_loops=3; use at least 3",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_what_is_allowed(change, error, message, looped):
    with pytest.raises(error, match=message):
        looped(**{"variant": "flt"} | change)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"n_loops": 0}, ValueError, "n_loops=0 is not allowed; use at least 1"),
        ({"n_loops": -1}, ValueError, "n_loops=-1 is not allowed"),
        ({"n_loops": 1.5}, TypeError, "n_loops=1.5 is float"),
        ({"n_loops": True}, TypeError, "n_loops=True is bool"),
        ({"stop_below": 0.0}, ValueError, "stop_below=0.0 is not allowed; use a positive number"),
    ],
)
def test_a_wrong_call_is_named(how, error, message, looped, tokens):
    with pytest.raises(error, match=message):
        looped()(tokens, **how)


def test_tokens_beyond_the_rotary_table_and_outside_the_vocabulary_are_named(looped, tokens):
    model = looped(seq_len=12)
    with pytest.raises(ValueError, match="tokens are 13 long and the model reads at most seq_len=12"):
        model(tokens)
    with pytest.raises(ValueError, match="tokens hold the number 32, and the vocabulary is 0 .. 31"):
        model(torch.full((1, 3), 32))
    with pytest.raises(ValueError, match="objective='LAST' is unknown"):
        model.loss(tokens[:, :5], tokens[:, 1:6], objective="LAST")
    with pytest.raises(ValueError, match="backprop_loops=2 is below the 4 loops whose loss objective='FEW'"):
        looped(backprop_loops=2).loss(tokens[:, :5], tokens[:, 1:6], n_loops=12, objective="FEW")


def test_presets_are_named_and_changed(looped):
    assert LoopedConfig.preset("toy", variant="lt", n_loops=9).n_loops == 9
    small = LoopedConfig.preset("small")
    assert (small.variant, small.n_layers, small.d_model, small.n_heads, small.seq_len) == ("flt", 6, 384, 3, 512)
    with pytest.raises(ValueError, match="preset='S' is unknown; use one of toy, small"):
        LoopedConfig.preset("S")
