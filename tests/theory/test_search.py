"""The searches: they obey the bound where it holds, beat it where it does not, and their schemes are what they say."""

import pytest
import torch

from depthlab.theory import rounding_term
from depthlab.theory.search import (
    SCHEMES,
    _coefficients,
    block_sums,
    draw_logits,
    draw_terms,
    gradient_ascent,
    random_search,
    rounding_ratchet,
    run_scheme,
)

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
L, N, C = 8, 3, 6


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("scheme,layers", [("mgr", L), ("attnres", L), ("attnres-block-sums", 2 * L)])
def test_convex_schemes_are_never_beaten_but_reached(scheme, layers):
    climbed = gradient_ascent(scheme, 120, 8, layers, N, C, rng())
    assert climbed.max() <= 1 + rounding_term(layers, F64)
    assert climbed[-1].max() > 0.999  # the search is strong enough to arrive at the bound
    assert random_search(scheme, 500, layers, N, C, rng(1)).max() <= 1 + rounding_term(layers, F64)


@pytest.mark.parametrize(
    "scheme,least", [("prenorm", L), ("mhc", L), ("hc", 2.0), ("mgr-per-channel", 1.2), ("attnres-block", 1.0)]
)
def test_the_same_search_beats_every_other_scheme(scheme, least):
    layers = 16 if scheme == "attnres-block" else L  # two layers a block
    assert gradient_ascent(scheme, 120, 8, layers, N, C, rng())[-1].max() > least


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_depends_on_all_its_inputs(scheme):
    terms = draw_terms(2, L, C, rng()).requires_grad_()
    logits = draw_logits(scheme, 2, L, N, C, rng(1)).requires_grad_()
    run_scheme(scheme, terms, logits, N).square().sum().backward()
    assert bool((terms.grad.norm(dim=-1) > 0).all())
    assert scheme == "prenorm" or logits.grad.norm() > 0


def test_mgr_follows_its_two_phases_by_hand():
    terms, logits = draw_terms(1, 3, 4, rng()), draw_logits("mgr", 1, 3, 2, 4, rng(1))
    beta = torch.sigmoid(logits[0])
    streams = [terms[0, 0], terms[0, 1]]  # the embedding, and layer 1's output appended
    for layer in (1, 2):
        streams = [(1 - beta[layer, i]) * streams[i] + beta[layer, i] * terms[0, layer + 1] for i in range(2)]
    assert torch.allclose(run_scheme("mgr", terms, logits, 2)[0], torch.stack(streams), rtol=0, atol=1e-15)


def test_prenorm_sums_everything():
    terms = draw_terms(3, L, C, rng())
    reached = run_scheme("prenorm", terms, draw_logits("prenorm", 3, L, N, C, rng()), N)
    assert torch.allclose(reached[:, 0], terms.sum(1))


def test_mhc_mixer_is_doubly_stochastic_and_its_write_in_zero_to_two():
    mix, write = _coefficients("mhc", draw_logits("mhc", 5, 1, 4, C, rng())[:, 0])
    assert torch.allclose(mix.sum(-1), torch.ones(5, 4, dtype=F64)) and torch.allclose(mix.sum(-2), mix.sum(-1))
    assert bool((mix >= 0).all()) and bool(((write > 0) & (write < 2)).all())


def test_mhc_writes_up_to_twice_the_update():
    terms, open_ = torch.ones(2, 3, dtype=torch.float64), torch.full((1, 8), 40.0, dtype=torch.float64)
    assert run_scheme("mhc", terms, open_, 4).tolist() == [[pytest.approx(3.0)] * 3] * 4


def test_block_sums_are_complete_and_block_attnres_obeys_the_bound_in_them():
    terms = draw_terms(4, 20, C, rng())
    sums = block_sums(terms, 20)  # blocks of 3, the last of 2
    assert sums.shape == (4, 8, C)
    assert torch.allclose(sums.sum(1), terms.sum(1))
    reads = run_scheme("attnres-block", terms, draw_logits("attnres-block", 4, 20, N, C, rng()), N)
    partial = torch.stack([block_sums(terms[:, : k + 2], 20).norm(dim=-1).amax(-1) for k in range(20)], -1)
    assert bool((reads.norm(dim=-1) <= partial * (1 + 1e-14)).all())


@pytest.mark.parametrize("arithmetic,storage", [(F64, F64), (F32, F32), (F32, BF16)], ids=["f64", "f32", "bf16"])
@pytest.mark.parametrize("min_gate", [0.0, 0.047])
def test_rounding_can_use_most_of_its_stated_term_and_no_more(arithmetic, storage, min_gate):
    ratios = rounding_ratchet(60, arithmetic, storage, min_gate)
    shares = [(r - 1) / rounding_term(k, arithmetic, storage, min_gate) for k, r in enumerate(ratios, start=1)]
    # The ratios themselves are float64, which a float64 stream's term is too small for by one spacing.
    assert max(ratios) <= 1 + 2**-52 + max(rounding_term(k, arithmetic, storage, min_gate) for k in range(61))
    assert arithmetic == F64 or max(shares) <= 1
    assert shares[29] > 0.5


def test_searches_repeat_with_their_seed():
    first, again = (gradient_ascent("mgr", 5, 4, L, N, C, rng(7)) for _ in range(2))
    assert torch.equal(first, again)


def test_unknown_scheme_is_named():
    with pytest.raises(ValueError, match="Unknown scheme 'resnet'"):
        draw_logits("resnet", 1, L, N, C, rng())
