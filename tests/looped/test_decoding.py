"""Cached generation is uncached generation; tokens that stop early keep what they had; loops against loss."""

import pytest
import torch
import torch.nn.functional as F

from depthlab import lm
from depthlab.looped import VARIANTS, LoopCache, decoding


@pytest.mark.parametrize("variant", VARIANTS)
def test_generation_with_an_exact_cache_writes_what_it_writes_without(variant, looped, tokens):
    """Also beyond seq_len, where the window moves on with every token."""
    model, prompt = looped(variant, seq_len=16), tokens[:, :5]
    plain = lm.generate(model, prompt, 20, temperature=0)
    assert torch.equal(decoding.generate(model, prompt, 20, temperature=0), plain)
    assert torch.equal(decoding.generate(model, prompt, 20, temperature=0, cache=None), plain)
    drawn = [
        write(model, prompt, 20, 1.0, 5, torch.Generator().manual_seed(3)) for write in (lm.generate, decoding.generate)
    ]
    assert torch.equal(*drawn)
    shorter = decoding.generate(model, prompt, 20, temperature=0, n_loops=1)
    assert not torch.equal(shorter, plain)
    assert torch.equal(shorter, lm.generate(model, prompt, 20, temperature=0, n_loops=1))
    assert not torch.equal(decoding.generate(model, prompt, 20, temperature=0, cache="last-loop"), plain)


def test_a_cached_reader_gives_the_model_new_tokens_only(looped, tokens, monkeypatch):
    model, seen = looped(seq_len=8), []
    run = model.run
    monkeypatch.setattr(model, "run", lambda chunk, *rest: seen.append(chunk.shape[1]) or run(chunk, *rest))
    decoding.generate(model, tokens[:, :5], 6)
    assert seen == [5, 1, 1, 1, 8, 8]  # then the window is full


def test_a_wrong_cache_mode_is_named(looped, tokens):
    with pytest.raises(ValueError, match="mode='all' is unknown; use one of exact, last-loop"):
        decoding.generate(looped(), tokens, 2, cache="all")


def moved(model, tokens, n_loops):
    """|h_t - h_(t-1)| / |h_t| of a pass without stopping, of all tokens and loops that do move [N]."""
    with torch.no_grad():
        h = torch.stack(model.run(tokens, n_loops).outputs)
    moves = (h[1:] - h[:-1]).norm(dim=-1) / h[1:].norm(dim=-1)
    return moves[moves > 1e-5]


def middle(moves):
    """A number that about half of `moves` are below, and none of them is: rounding decides nothing."""
    ordered = moves.sort().values
    return float(ordered[len(ordered) // 2 - 1 : len(ordered) // 2 + 1].mean())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_threshold_below_all_movement_changes_nothing_and_one_above_stops_all_after_two_loops(
    variant, looped, tokens
):
    model, moves = looped(variant), moved(looped(variant), tokens, 6)
    with torch.no_grad():
        full, two = model(tokens, 6), model(tokens, 2)
        for threshold, expected, loops in ((0.5 * float(moves.min()), full, 6), (2.1, two, 2)):
            found = model.run(tokens, 6, stop_below=threshold)
            torch.testing.assert_close(model(tokens, 6, stop_below=threshold), expected)
            assert (found.loops_used[:, 1:] == loops).all() and len(found.states) == len(found.outputs) == 6
        once = model.run(tokens, 1, stop_below=9.0)  # one loop has nothing to be compared with
        assert (once.loops_used == 1).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_stopped_token_keeps_its_state_and_shows_its_last_keys_and_values(variant, looped, tokens):
    model = looped(variant, dtype=torch.float64)
    threshold = middle(moved(model, tokens, 6))
    with torch.no_grad():
        found = model.run(tokens, 6, stop_below=threshold)
        states, used = torch.stack(found.states)[:, :, 1:], found.loops_used[:, 1:]
        assert len(used.unique()) > 2 and int(used.min()) >= 2
        for loop in range(1, 6):
            still = used <= loop
            assert torch.equal(states[loop][still], states[loop - 1][still])
            assert not (states[loop] == states[loop - 1]).all(-1)[~still].any()
        # A cache holds what later tokens see, so cached decoding with stopping is the same, token by token.
        cache = LoopCache()
        logits = [model(part, 6, cache=cache, stop_below=threshold) for part in tokens.split([4, 1, 1, 7], 1)]
        torch.testing.assert_close(torch.cat(logits, 1), model(tokens, 6, stop_below=threshold))
        keys = torch.stack([blocks[-1][0] for blocks in cache._sets])  # [K, B, H, S, D] of the last block
        for loop in range(1, 6):
            same = (keys[loop] == keys[loop - 1]).all(-1).all(1)[:, 1:]  # [B, S - 1]
            assert torch.equal(same, used <= loop)


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_injection_never_moves_the_first_token(variant, looped, tokens):
    """A token that sees only itself mixes one value, whatever its query; all other variants do move it."""
    with torch.no_grad():
        first = [z[:, 0] for z in looped(variant)(tokens, return_loops=True)[1]]
    assert torch.allclose(first[0], first[2]) == (variant in ("lt-attn", "flt"))


def test_early_stop_measures_loss_and_loops(looped, tokens):
    model, inputs, targets = looped(), tokens[:, :-1], tokens[:, 1:]
    never = decoding.early_stop(model, inputs, targets, None, 6)
    exact = F.cross_entropy(model(inputs, 6).flatten(0, 1), targets.flatten())
    assert never.loss_nats == pytest.approx(float(exact.detach()), rel=1e-6)
    assert (never.loops_used, never.stopped) == (6, 0)
    threshold = middle(moved(model, inputs, 6))
    some = decoding.early_stop(model, inputs, targets, threshold, 6)
    assert 2 <= some.loops_used < 6 and 0 < some.stopped <= 1 and some.loss_nats != never.loss_nats
    found = model.run(inputs, 6, stop_below=threshold)
    assert some.loops_used == pytest.approx(float(found.loops_used.double().mean()))
    assert model.training


def test_the_loss_through_a_cache_shows_what_the_published_shortcut_costs(looped, tokens):
    model, inputs, targets = looped(), tokens[:, :-1], tokens[:, 1:]
    plain = float(model.loss(inputs, targets).detach())
    for chunk in (1, 5, 12):
        assert decoding.cached_loss(model, inputs, targets, chunk, "exact") == pytest.approx(plain, rel=1e-5)
    assert decoding.cached_loss(model, inputs, targets, 12, "last-loop") == pytest.approx(plain, rel=1e-5)
    assert abs(decoding.cached_loss(model, inputs, targets, 1, "last-loop") - plain) > 1e-3
