"""Caches: exact for every variant and partition, the published shortcut as published, memory, refusals."""

import pytest
import torch

from depthlab.lm.layers import rotary_tables
from depthlab.looped import VARIANTS, LoopCache, wiring
from depthlab.looped.model import one_loop


def in_chunks(model, tokens, sizes, cache, **how):
    parts = [model(chunk, cache=cache, **how) for chunk in tokens.split(sizes, 1)]
    return torch.cat(parts, 1)


def partitions(length, count, seed=0):
    """Random ways to cut `length`, beside the whole and single tokens."""
    generator = torch.Generator().manual_seed(seed)
    found = [[length], [1] * length, [length - 1, 1], [1, length - 1]]
    for _ in range(count):
        ends = torch.randperm(length - 1, generator=generator)[: int(torch.randint(1, length, (), generator=generator))]
        ends = [0, *sorted(int(end) + 1 for end in ends), length]
        found.append([b - a for a, b in zip(ends, ends[1:], strict=False)])
    return found


@pytest.mark.parametrize("n_loops", [1, 3, 6])
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_exact_cache_gives_the_full_pass_for_any_chunks(variant, n_loops, looped, tokens):
    model = looped(variant, dtype=torch.float64)
    with torch.no_grad():
        full = model(tokens, n_loops)
        for sizes in partitions(tokens.shape[1], 12):
            cache = LoopCache("exact")
            found = in_chunks(model, tokens, sizes, cache, n_loops=n_loops)
            torch.testing.assert_close(found, full, rtol=1e-7, atol=1e-9)
            assert cache.length == tokens.shape[1]


@pytest.mark.parametrize("mode", ["exact", "last-loop"])
def test_an_untied_model_uses_caches_too(mode, looped, tokens):
    model = looped("lt", tied=False)
    with torch.no_grad():
        torch.testing.assert_close(in_chunks(model, tokens, [13], LoopCache(mode)), model(tokens))
        found = in_chunks(model, tokens, [6, 4, 1, 1, 1], LoopCache(mode))
    assert torch.allclose(found, model(tokens), atol=1e-5) == (mode == "exact")


def test_gradients_pass_through_an_exact_cache(looped, tokens):
    model = looped("flt", dtype=torch.float64)
    found = []
    for sizes in ([13], [5, 1, 7]):
        model.zero_grad()
        in_chunks(model, tokens, sizes, LoopCache()).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def last_loop_by_hand(model, tokens, sizes, n_loops):
    """The published rule from exact pieces: a chunk's last loop sees the last-loop keys of all, earlier loops its own.

    The chunk is run alone, at its own positions, for all but the last loop (an exact cache holding nothing old).
    """
    kept, out, start = None, [], 0
    for size in sizes:
        chunk = tokens[:, start : start + size]
        e = model.embed_tokens(chunk)
        rotary = rotary_tables(model.config.head_dim, size, start=start)
        plans = [[wiring(model.config.variant, loop, block) for block in (1, 2)] for loop in (1, 2)]
        h = None
        for loop in range(1, n_loops + 1):
            past = kept if loop == n_loops else None
            _, h, new = one_loop(model.blocks, plans[min(loop, 2) - 1], e, h, rotary, past, keep=True)
        pairs = zip(kept, new, strict=True) if kept else None
        kept = [(torch.cat((a, c), 2), torch.cat((b, d), 2)) for (a, b), (c, d) in pairs] if kept else new
        out.append(15 * torch.tanh(h @ model.lm_head.weight.T / 15))
        start += size
    return torch.cat(out, 1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_last_loop_cache_is_the_published_rule(variant, looped, tokens):
    model = looped(variant)
    with torch.no_grad():
        full = model(tokens)
        whole = in_chunks(model, tokens, [13], LoopCache("last-loop"))
        torch.testing.assert_close(whole, full)  # one chunk sees all of itself
        for sizes in ([6, 4, 1, 1, 1], [1] * 13):
            found = in_chunks(model, tokens, sizes, LoopCache("last-loop"))
            torch.testing.assert_close(found, last_loop_by_hand(model, tokens, sizes, 3))
            torch.testing.assert_close(found[:, : sizes[0]], full[:, : sizes[0]])
            assert (found - full)[:, sizes[0] :].abs().amax(-1).min() > 1e-3  # and later chunks are not exact
        once = in_chunks(model, tokens, [6, 4, 1, 1, 1], LoopCache("last-loop"), n_loops=1)
        torch.testing.assert_close(once, model(tokens, 1))


def test_memory_is_what_the_keys_and_values_take_and_the_shortcut_takes_a_kth(looped, tokens):
    model, sizes = looped(), {}
    for mode in ("exact", "last-loop"):
        cache = LoopCache(mode)
        assert cache.n_bytes == 0
        for chunk in tokens.split([9, 4], 1):
            model(chunk, cache=cache)
        sizes[mode] = cache.n_bytes
        cache.clear()
        assert cache.n_bytes == cache.length == 0
    batch, length = tokens.shape
    assert sizes["last-loop"] == 2 * 2 * batch * length * 16 * 4  # k and v, two blocks, width 16, four bytes
    assert sizes["exact"] == 3 * sizes["last-loop"]


def test_a_cache_refuses_another_loop_count_variant_batch_model_and_what_does_not_fit(looped, tokens):
    model = looped(seq_len=16)
    cache = LoopCache(max_tokens=14)
    model(tokens, cache=cache)
    before = cache.n_bytes
    cases = [
        (model, tokens[:, :1], {"n_loops": 2}, "filled with n_loops=3 and is used with n_loops=2; use another"),
        (looped("lt", seq_len=16), tokens[:, :1], {}, "filled with variant='flt' and is used with variant='lt'"),
        (model, tokens[:1, :1], {}, "filled with batch=2 and is used with batch=1"),
        (looped(seq_len=16), tokens[:, :1], {}, "filled by another model; use another LoopCache, or clear"),
        (model, tokens[:, :2], {}, "holds 13 tokens, takes at most max_tokens=14, and got 2 more; make a longer"),
    ]
    for other, chunk, how, message in cases:
        with pytest.raises(ValueError, match=message):
            other(chunk, cache=cache, **how)
        assert (cache.length, cache.n_bytes) == (13, before)
    model(tokens[:, :1], cache=cache)  # what was refused left nothing behind
    long = LoopCache()
    model(tokens, cache=long)
    with pytest.raises(ValueError, match="holds 13 tokens and got 4 more, but rotary positions end at seq_len=16"):
        model(tokens[:, :4], cache=long)
    with pytest.raises(ValueError, match="takes at most max_tokens=4, and got 13 more"):
        model(tokens, cache=LoopCache(max_tokens=4))
    cache.clear()
    looped("lt")(tokens[:1], cache=cache, n_loops=5)  # a cleared one is anyone's


def test_a_cache_knows_when_weights_rule_or_dtype_are_no_longer_those_it_was_filled_with(looped, tokens):
    model = looped(seq_len=16)
    cache = LoopCache()
    with torch.no_grad():
        model(tokens[:, :6], cache=cache)
        with pytest.raises(
            ValueError, match="filled with stop_below=None and is used with stop_below=0.1; use another"
        ):
            model(tokens[:, 6:], cache=cache, stop_below=0.1)
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(ValueError, match="The cache holds torch.float32 and got torch.bfloat16; use one dtype"),
        ):
            model(tokens[:, 6:], cache=cache)
        model(tokens[:, 6:8], cache=cache)  # what was refused left nothing behind
        model.load_state_dict(looped(seq_len=16).state_dict())
        with pytest.raises(ValueError, match="weights have changed since the cache was filled; clear it"):
            model(tokens[:, 8:], cache=cache)
        with pytest.raises(TypeError, match="cache is dict; give a depthlab.looped.LoopCache, or None."):
            model(tokens, cache={})


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"mode": "all"}, ValueError, "mode='all' is unknown; use one of exact, last-loop"),
        ({"max_tokens": 0}, ValueError, "max_tokens=0 is not allowed; use at least 1"),
        ({"max_tokens": 2.5}, TypeError, "max_tokens=2.5 is float; use an integer"),
    ],
)
def test_a_wrong_cache_is_named(how, error, message):
    with pytest.raises(error, match=message):
        LoopCache(**how)


def test_a_pass_that_fails_leaves_the_cache_as_it_was(looped, tokens, monkeypatch):
    model, cache = looped(), LoopCache()
    with torch.no_grad():
        model(tokens[:, :6], cache=cache)
        before = cache.n_bytes
        calls = []

        def fail(*args, **kwargs):
            calls.append(1)
            if len(calls) == 4:
                raise RuntimeError("no memory")
            return forward(*args, **kwargs)

        forward = model.blocks[1].forward
        monkeypatch.setattr(model.blocks[1], "forward", fail)
        calls[:] = [1, 1]
        with pytest.raises(RuntimeError, match="no memory"):
            model(tokens[:, 6:], cache=cache)
        assert (cache.length, cache.n_bytes) == (6, before)
        torch.testing.assert_close(model(tokens[:, 6:], cache=cache), model(tokens)[:, 6:])
