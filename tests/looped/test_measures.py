"""Oscillation of a series, and gradient norms by part."""

import math

import pytest
import torch

from depthlab.lm.steps import gradients
from depthlab.looped.measures import oscillation, part_norms, parts


def test_oscillation_is_zero_for_a_constant_small_for_a_trend_and_two_at_most():
    assert oscillation([3.0] * 10) == 0
    rise = torch.linspace(1, 10, 1000)
    assert oscillation(rise) < 0.003 and float(rise.std() / rise.mean()) > 0.4  # which a standard deviation calls large
    assert oscillation([1.0, 3.0] * 50) == pytest.approx(1.0)
    assert oscillation([0.0, 1.0] * 50) == pytest.approx(2.0)
    assert oscillation([0.0, 0.0]) == 0


def test_oscillation_does_not_depend_on_the_scale():
    series = torch.rand(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
    assert oscillation(series) == pytest.approx(oscillation(1e6 * series))
    assert oscillation(series) == pytest.approx(
        sum(2 * abs(b - a) / (a + b) for a, b in zip(series.tolist(), series[1:].tolist(), strict=False)) / 99
    )


@pytest.mark.parametrize("series", [[1.0], [1.0, math.nan], [1.0, math.inf], [1.0, -1.0], [[1.0, 2.0]]])
def test_a_series_without_an_oscillation_is_named(series):
    with pytest.raises(ValueError, match="oscillation got .* give at least two, all finite and none negative"):
        oscillation(series)


def test_every_parameter_belongs_to_one_part_and_norms_add_up(looped, tokens):
    model = looped()
    found = parts(model)
    assert list(found) == ["embed_tokens", "blocks.0", "blocks.1", "lm_head"]
    count = len(list(model.parameters()))
    assert sorted(i for places in found.values() for i in places) == list(range(count))
    moved = gradients(model)([tokens])
    norms = part_norms(torch.stack([moved.norms, moved.norms]), model)
    expected = torch.cat([p.grad.flatten() for p in model.blocks[1].parameters()]).norm()
    torch.testing.assert_close(norms["blocks.1"], torch.stack([expected, expected]))
    total = torch.stack(list(norms.values())).square().sum(0).sqrt()
    torch.testing.assert_close(total[0], moved.grad_norm)
