"""Schedules: their values at the corners, their areas, and requests that make no sense."""

import math

import pytest

from depthlab.lm.schedules import SCHEDULES, constant, cosine, trapezoid


def values(schedule, total, **how) -> list[float]:
    return [schedule(step, total, **how) for step in range(total)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_warm_up_rises_linearly_to_the_full_rate_at_its_last_step(name):
    assert values(SCHEDULES[name], 100, warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]
    assert SCHEDULES[name](0, 100) == 1.0


def test_constant_stays():
    assert values(constant, 10, warmup_steps=2) == [0.5] + [1.0] * 9


def test_cosine_is_half_a_cosine_down_to_its_final_value():
    found = values(cosine, 21, warmup_steps=10, final=0.2)
    assert found[10] == 1.0 and found[20] == pytest.approx(0.2) and found[15] == pytest.approx(0.6)
    assert found[12] == pytest.approx(0.2 + 0.8 * math.cos(math.pi / 10) ** 2)
    assert all(a > b for a, b in zip(found[10:], found[11:], strict=False))


def test_trapezoid_goes_down_linearly_over_the_last_fifth_towards_zero():
    found = values(trapezoid, 100, warmup_steps=10)
    assert set(found[9:81]) == {1.0}
    assert found[81] == pytest.approx(0.95) and found[90] == pytest.approx(0.5) and found[99] == pytest.approx(0.05)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 1), (3, 3), (5, 4), (7, 2)])
def test_short_runs_have_a_finite_positive_rate_at_every_step(name, total, warmup):
    assert all(0 < value <= 1 for value in values(SCHEDULES[name], total, warmup_steps=warmup))


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((10, 10), ValueError, r"step=10 is outside 0 .. 9 \(total_steps=10\)"),
        ((-1, 10), ValueError, "step=-1 is outside"),
        ((0, 0), ValueError, "step=0 is outside"),
        ((0, 10, 11), ValueError, "warmup_steps=11 is not allowed; use 0 to total_steps=10"),
        ((0, 10, 0.5), TypeError, "warmup_steps=0.5 is float"),
    ],
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_wrong_requests_are_named(name, args, error, message):
    with pytest.raises(error, match=message):
        SCHEDULES[name](*args)


def test_a_share_that_is_none_is_named():
    with pytest.raises(ValueError, match="final_share=1.5"):
        trapezoid(0, 10, final_share=1.5)
