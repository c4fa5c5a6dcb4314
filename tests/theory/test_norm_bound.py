"""The norm bound in three number formats, held by hypothesis; wrong mixers must break it at the same tolerance.

Norms are compared as exact rationals, so the comparison itself cannot round.
"""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthlab.theory import carry, interpolate, norm_ratio, rounding_term, row_weight, unit_roundoff

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
FORMATS = [(F64, F64), (F32, F32), (F32, BF16)]  # (arithmetic, storage)
IDS = ["float64", "float32", "bfloat16"]


def squared(vector: torch.Tensor) -> Fraction:
    return sum((Fraction(x) ** 2 for x in vector.double().tolist()), Fraction(0))


def holds(reached: torch.Tensor, terms: list[torch.Tensor], term: float) -> bool:
    """norm(reached) <= (1 + term) * max norm of the terms, decided exactly."""
    return squared(reached) <= (1 + Fraction(term)) ** 2 * max(map(squared, terms))


def mix_stored(stream, update, beta, arithmetic, storage, mixer=interpolate):
    return mixer(stream.to(arithmetic), update.to(arithmetic), beta.to(arithmetic)).to(storage)


# Every float32 from 2^-60 to 2^60 and zero: no product underflows, so the stated factor is all there is.
number = st.floats(2.0**-60, 2.0**60, width=32) | st.floats(-(2.0**60), -(2.0**-60), width=32) | st.just(0.0)
nearby = st.integers(-3, 3)  # spacings between stream and update: where rounding shows most
gate = st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1, width=32), st.sampled_from([0.5, 2**-24, 1 - 2**-24]))


@st.composite
def chains(draw, max_layers=6):
    """x_0, updates (free, or within a few spacings of x_0) and gates; as float64 lists."""
    width = draw(st.integers(1, 5))
    vector = st.lists(number, min_size=width, max_size=width)
    first = draw(vector)
    updates = []
    for _ in range(draw(st.integers(1, max_layers))):
        if draw(st.booleans()):
            updates.append(draw(vector))
        else:
            steps = draw(st.lists(nearby, min_size=width, max_size=width))
            updates.append([x * (1 + k * draw(st.sampled_from([2.0**-52, 2.0**-23, 2.0**-7]))) for x, k in
                            zip(first, steps, strict=True)])  # fmt: skip
    return first, updates, [draw(gate) for _ in updates]


@pytest.mark.parametrize("arithmetic,storage", FORMATS, ids=IDS)
@settings(max_examples=250, deadline=None, derandomize=True)
@given(chain=chains())
def test_bound_holds_over_depth_with_its_rounding_term(arithmetic, storage, chain):
    first, updates, betas = chain
    stream = torch.tensor(first, dtype=F64).to(storage)
    terms = [stream]
    for layer, (update, beta) in enumerate(zip(updates, betas, strict=True), start=1):
        terms.append(torch.tensor(update, dtype=F64).to(storage))
        before = stream
        stream = mix_stored(stream, terms[-1], torch.tensor(beta), arithmetic, storage)
        assert holds(stream, [before, terms[-1]], rounding_term(1, arithmetic, storage))
        assert holds(stream, terms, rounding_term(layer, arithmetic, storage))


@pytest.mark.parametrize("arithmetic,storage", FORMATS, ids=IDS)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(x=number, y=number, beta=gate)
def test_every_element_lies_between_its_two_ends(arithmetic, storage, x, y, beta):
    s, f = (torch.tensor([v], dtype=F64).to(storage) for v in (x, y))
    mixed = mix_stored(s, f, torch.tensor(beta), arithmetic, storage)
    assert min(s, f) <= mixed <= max(s, f)


@pytest.mark.parametrize("arithmetic,storage", FORMATS, ids=IDS)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(x=number, y=number, beta=gate)
def test_end_points_and_equal_inputs_are_exact(arithmetic, storage, x, y, beta):
    s, f = (torch.tensor([v], dtype=F64).to(storage) for v in (x, y))
    zero, one = torch.tensor(0.0), torch.tensor(1.0)
    assert mix_stored(s, f, zero, arithmetic, storage) == s
    assert mix_stored(s, f, one, arithmetic, storage) == f
    assert mix_stored(s, s, torch.tensor(beta), arithmetic, storage) == s


@pytest.mark.parametrize("arithmetic,storage", FORMATS, ids=IDS)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data(), min_gate=st.sampled_from([0.05, 0.3, 0.9]))
def test_open_gates_keep_the_rounding_term_small(arithmetic, storage, data, min_gate):
    first, updates, betas = data.draw(chains(max_layers=12))
    stream = torch.tensor(first, dtype=F64).to(storage)
    terms = [stream]
    for update, beta in zip(updates, betas, strict=True):
        terms.append(torch.tensor(update, dtype=F64).to(storage))
        open_gate = torch.tensor(max(min_gate, beta), dtype=arithmetic)
        stream = mix_stored(stream, terms[-1], open_gate, arithmetic, storage)
    least = min(min_gate, float(torch.tensor(min_gate, dtype=arithmetic)))
    assert holds(stream, terms, rounding_term(len(betas), arithmetic, storage, least))


@pytest.mark.parametrize("arithmetic,storage", [(F64, F64), (F32, F32)], ids=["float64", "float32"])
@settings(max_examples=150, deadline=None, derandomize=True)
@given(rows=st.lists(st.lists(number, min_size=3, max_size=3), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_pooling_by_a_softmax_never_beats_its_largest_stream(arithmetic, storage, rows, seed):
    streams = torch.tensor(rows, dtype=F64).to(storage)
    scores = 3 * torch.randn(len(rows), generator=torch.Generator().manual_seed(seed), dtype=arithmetic)
    pooled = (torch.softmax(scores, 0).unsqueeze(-1) * streams.to(arithmetic)).sum(0)
    # Weights: an exponential (2 u), their sum and a division; then n products and n - 1 additions.
    assert holds(pooled, list(streams), 1.01 * (2 * len(rows) + 4) * unit_roundoff(arithmetic))


# Mutants: each takes (stream, update, beta) and must break the bound on some input that hypothesis-sized search meets.


def per_channel(stream, update, beta):
    return interpolate(stream, update, (torch.arange(stream.shape[-1]) % 2).to(stream.dtype))


def overshooting(stream, update, beta):
    return interpolate(stream, update, 1.01 * beta)


def negative(stream, update, beta):
    return interpolate(stream, update, beta - 0.01)


def prenorm(stream, update, beta):
    return stream + update


def plain_add(stream, update, beta):
    return stream + beta * update


def naive(stream, update, beta):
    return (1 - beta) * stream + beta * update


def one_sided(stream, update, beta):
    return stream + beta * (update - stream)


def broken(mixer, arithmetic, storage) -> bool:
    """Does `mixer` break the one-layer bound, rounding term included, on any of 4,000 random layers?"""
    generator = torch.Generator().manual_seed(0)
    term = rounding_term(1, arithmetic, storage)
    shape = (4000, 4)
    stream = torch.randn(shape, generator=generator, dtype=F64)
    update = torch.cat([torch.randn(2000, 4, generator=generator, dtype=F64), stream[2000:]])
    sparse = torch.tensor([[1.0, 0, 1, 0], [0, 1.0, 0, 1]], dtype=F64)
    stream[:1000], update[:1000] = stream[:1000] * sparse[0], update[:1000] * sparse[1]
    stream, update = stream.to(storage), update.to(storage)
    beta = torch.rand(4000, 1, generator=generator, dtype=F64).to(arithmetic)
    mixed = mix_stored(stream, update, beta, arithmetic, storage, mixer)
    candidates = zip(mixed, stream, update, strict=True)
    return any(not holds(m, [s, f], term) for m, s, f in candidates)


@pytest.mark.parametrize("arithmetic,storage", FORMATS, ids=IDS)
@pytest.mark.parametrize("mutant", [per_channel, overshooting, negative, prenorm, plain_add], ids=lambda f: f.__name__)
def test_wrong_mixers_break_the_bound(mutant, arithmetic, storage):
    assert broken(mutant, arithmetic, storage)
    assert not broken(interpolate, arithmetic, storage)


@pytest.mark.parametrize("arithmetic", [F64, F32], ids=["float64", "float32"])
def test_the_naive_form_rounds_more_than_the_stated_term(arithmetic):
    assert broken(naive, arithmetic, arithmetic)


@pytest.mark.parametrize("arithmetic", [F64, F32], ids=["float64", "float32"])
def test_the_one_sided_form_misses_its_end_point(arithmetic):
    far, near = torch.tensor([1e9], dtype=arithmetic), torch.tensor([0.1], dtype=arithmetic)
    assert one_sided(far, near, torch.tensor(1.0, dtype=arithmetic)) != near


def test_unnormalised_pooling_weights_break_the_bound():
    streams = torch.eye(3, dtype=F64)[:1].expand(3, 3)
    weights = torch.tensor([0.3, 0.3, 0.5], dtype=F64)
    assert norm_ratio((weights.unsqueeze(-1) * streams).sum(0, keepdim=True), streams) > 1.09


def test_per_channel_gates_reach_the_square_root_of_two_and_no_more():
    s, f = torch.tensor([1.0, 0.0], dtype=F64), torch.tensor([0.0, 1.0], dtype=F64)
    mixed = interpolate(s, f, torch.tensor([0.0, 1.0], dtype=F64))
    assert norm_ratio(mixed.unsqueeze(0), torch.stack([s, f])).item() == pytest.approx(2**0.5, rel=1e-15)
    generator = torch.Generator().manual_seed(1)
    s, f, beta = (torch.randn(5000, 3, generator=generator, dtype=F64) for _ in range(3))
    mixed = interpolate(s, f, torch.sigmoid(4 * beta))
    assert norm_ratio(mixed.unsqueeze(-2), torch.stack([s, f], -2)).max() < 2**0.5 + 1e-12


def test_row_weight_is_attained_and_never_exceeded():
    generator = torch.Generator().manual_seed(2)
    mix, write = (torch.randn(*shape, generator=generator, dtype=F64) for shape in ((50, 4, 4), (50, 4)))
    weights = row_weight(mix, write).amax(-1)
    streams, update = (
        torch.randn(50, 4, 8, generator=generator, dtype=F64),
        torch.randn(50, 8, generator=generator, dtype=F64),
    )
    free = norm_ratio(carry(streams, update, mix, write), torch.cat([streams, update.unsqueeze(-2)], -2))
    assert bool((free <= weights * (1 + 1e-14)).all())
    # One direction with the signs of the heaviest row attains it.
    row = row_weight(mix, write).argmax(-1)
    batch = torch.arange(50)
    direction = torch.nn.functional.one_hot(torch.tensor(0), 8).to(F64)
    aligned = mix[batch, row].sign().unsqueeze(-1) * direction
    pushed = write[batch, row].sign().unsqueeze(-1) * direction
    attained = carry(aligned, pushed, mix, write).norm(dim=-1).amax(-1)
    assert torch.allclose(attained, weights, rtol=1e-14, atol=0)


def test_carry_with_gate_coefficients_is_interpolation():
    generator = torch.Generator().manual_seed(3)
    streams, update = torch.randn(4, 6, generator=generator, dtype=F64), torch.randn(6, generator=generator, dtype=F64)
    beta = torch.rand(4, generator=generator, dtype=F64)
    assert row_weight(torch.diag(1 - beta), beta).tolist() == pytest.approx([1] * 4, rel=1e-15)
    both = carry(streams, update, torch.diag(1 - beta), beta), interpolate(streams, update, beta.unsqueeze(-1))
    assert torch.allclose(*both, rtol=0, atol=1e-15)


def test_gradients_of_interpolation_are_right_to_second_order():
    generator = torch.Generator().manual_seed(4)
    s, f = (torch.randn(3, 5, generator=generator, dtype=F64, requires_grad=True) for _ in range(2))
    beta = torch.tensor([[0.1], [0.6], [0.97]], dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(interpolate, (s, f, beta))
    assert torch.autograd.gradgradcheck(interpolate, (s, f, beta))


def test_half_precision_arithmetic_is_refused():
    wide, half = torch.zeros(2), torch.zeros(2, dtype=BF16)
    for arguments in ((half, wide, wide), (wide, half, wide), (wide, wide, half)):
        with pytest.raises(TypeError, match="float32 or wider"):
            interpolate(*arguments)
    with pytest.raises(ValueError, match="float32 or wider"):
        rounding_term(3, BF16)


def test_nan_never_passes_silently():
    nan, one = torch.full((1,), float("nan")), torch.ones(1)
    for arguments in ((nan, one, 0.3 * one), (one, nan, 0.3 * one), (one, one, nan)):
        assert interpolate(*arguments).isnan().all()
    with pytest.raises(ValueError, match="not finite"):
        norm_ratio(torch.ones(1, 2), torch.full((1, 2), float("nan")))
    with pytest.raises(ValueError, match="zero"):
        norm_ratio(torch.ones(1, 2), torch.zeros(1, 2))


def test_rounding_term_grows_and_settles_as_stated():
    assert rounding_term(0) == 0
    assert rounding_term(1, F64) == pytest.approx(2.0**-53, rel=1e-12)
    assert rounding_term(100) == pytest.approx(100 * 2.0**-24, rel=1e-4)
    assert rounding_term(381, F32, BF16) == pytest.approx((1 + 2.0**-8) ** 381 - 1, rel=1e-3)
    gate, rho2 = 0.05, (1 + 2.0**-8) ** 2
    settled = rounding_term(10_000, F32, BF16, gate)
    assert (1 + settled) ** 2 == pytest.approx(rho2 * gate / (1 - rho2 * (1 - gate)), rel=1e-5)  # the fixed point
    assert rounding_term(381, F32, BF16, gate) <= settled < 0.1 < rounding_term(381, F32, BF16)


@pytest.mark.parametrize(
    "arguments,says",
    [({"n_layers": -1}, "0 or more"), ({"n_layers": 1, "min_gate": 1.5}, "in \\[0, 1\\]"),
     ({"n_layers": 1, "min_gate": float("nan")}, "in \\[0, 1\\]")],
)  # fmt: skip
def test_rounding_term_refuses_bad_input(arguments, says):
    with pytest.raises(ValueError, match=says):
        rounding_term(**arguments)


def test_unit_roundoff_is_half_a_spacing():
    for dtype in (F64, F32, BF16, torch.float16):
        u, one = unit_roundoff(dtype), torch.ones((), dtype=dtype)
        assert (one.double() + u).to(dtype) == one  # a tie goes to even
        assert (one.double() + 1.01 * u).to(dtype) > one or dtype == F64
    with pytest.raises(TypeError, match="floating-point"):
        unit_roundoff(torch.int64)


@pytest.mark.parametrize("arithmetic", [torch.float32, torch.float64])
def test_the_step_is_taken_from_the_nearer_end(arithmetic):
    beta = torch.linspace(0.01, 0.99, 99, dtype=arithmetic)[:, None]
    x, zero = (
        torch.randn(256, generator=torch.Generator().manual_seed(0), dtype=arithmetic),
        torch.zeros(1, dtype=arithmetic),
    )
    near, far = beta < 0.5, beta >= 0.5
    # From zero to x one rounding is all there is; stepping back from x would add the rounding of 1 - beta.
    assert torch.equal(interpolate(zero, x, beta)[near[:, 0]], (beta * x)[near[:, 0]])
    assert torch.equal(interpolate(x, zero, beta)[far[:, 0]], ((1 - beta) * x)[far[:, 0]])


def test_the_norm_ratio_takes_the_longest_of_each_side():
    vectors = torch.tensor([[[0.0, 2.0], [3.0, 4.0], [1.0, 0.0]]])
    assert norm_ratio(vectors, vectors[:, :1]).tolist() == [2.5]
    assert norm_ratio(vectors[:, :1], vectors).tolist() == [pytest.approx(0.4)]


@pytest.mark.parametrize("arguments", [(2.5,), ("5",), (True,), (float("nan"),), (5, "float32"), (5, torch.int8)])
def test_rounding_term_of_what_is_no_depth_or_dtype_is_one_sentence(arguments):
    with pytest.raises(TypeError, match=r"^(rounding_term|unit_roundoff) got .*; give a .*\.$"):
        rounding_term(*arguments)
