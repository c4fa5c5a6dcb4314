"""The records' experiments at toy size, and the simulation against closed forms."""

import math

import pytest
import torch

from depthlab.runs import Cell
from depthlab.theory import GATES, additive_increment, carry_weight, initial_gate, rounding_term, stream_variance
from depthlab.theory.experiments import (
    gate_bias_over_depth,
    initial_gates,
    norm_bound,
    run_gate_rule,
    run_norm_bound,
)
from depthlab.theory.search import rounding_ratchet
from depthlab.theory.simulate import simulate


@pytest.mark.parametrize("g,layers", [(0.2, 5), (0.05, 40), (1.0, 3), (0.0, 3)])
def test_simulated_moments_agree_with_the_closed_forms(g, layers):
    samples = 40_000
    noise = 5 * math.sqrt(2 / samples)
    seen = simulate(torch.tensor([g, g]), layers, samples, torch.Generator().manual_seed(0))
    assert seen.carry.tolist() == pytest.approx([carry_weight(g, layers)] * 2, abs=noise)
    assert seen.variance.tolist() == pytest.approx([stream_variance(g, layers)] * 2, rel=noise)
    assert seen.increment == pytest.approx(additive_increment(g, layers), rel=noise)
    # All streams take the same updates, so only what they began with tells them apart.
    assert seen.distance == pytest.approx((1 - g) ** layers, rel=1e-6, abs=1e-12)


def test_without_a_layer_a_stream_is_what_it_began_as():
    seen = simulate(torch.tensor([0.3, 0.3]), 0, 50, torch.Generator().manual_seed(0))
    assert seen.carry.tolist() == pytest.approx([1.0, 1.0], rel=1e-14)  # whatever 50 samples happen to be
    assert (seen.increment, seen.distance) == (0.0, 1.0)


def test_simulation_tells_the_right_formula_from_its_neighbours():
    g, layers, samples = 0.2, 5, 40_000
    noise = 5 * math.sqrt(2 / samples)
    seen = simulate(torch.tensor([g]), layers, samples, torch.Generator().manual_seed(0)).variance.item()
    wrong = [stream_variance(g, layers + 1), (1 - g) ** (2 * layers), 1 + additive_increment(g, layers)]
    assert all(abs(seen / w - 1) > noise for w in wrong)


@pytest.mark.parametrize("rule", GATES)
@pytest.mark.parametrize("layers", [6, 21, 381])
def test_experiment_gates_are_those_the_bias_promises(rule, layers):
    gates = initial_gates(rule, 4, layers)
    assert gates.tolist() == pytest.approx([math.sqrt(21 / layers) / (1 + math.exp(3))] * 4, rel=1e-12)


def test_one_over_depth_meets_the_others_at_the_base_depth():
    assert initial_gates("one-over-depth", 4, 21)[0].item() == pytest.approx(initial_gate("independent", 4, -3.0))
    assert initial_gates("one-over-depth", 4, 42)[0].item() == pytest.approx(initial_gate("independent", 4, -3.0) / 2)


def test_every_norm_bound_cell_gives_its_metrics_and_repeats():
    config = norm_bound().config | {"n_layers": 4, "tries": 8, "steps": 4, "restarts": 2, "rounding_layers": 5}
    for cell in [c for c in norm_bound().cells if c.settings["seed"] == 1]:
        (first,), (again,) = run_norm_bound(cell, config), run_norm_bound(cell, config)
        assert first.metrics == again.metrics and first.seed == 1
        assert all(math.isfinite(v) for v in first.metrics.values())


def test_the_share_of_the_rounding_term_is_the_worst_over_depth():
    config = norm_bound().config | {"tries": 8, "rounding_layers": 5}
    (result,) = run_norm_bound(Cell("c", {"storage": "bfloat16", "seed": 0}), config)
    excess = [ratio - 1 for ratio in rounding_ratchet(5, torch.float32, torch.bfloat16)]
    shares = [e / rounding_term(i + 1, torch.float32, torch.bfloat16) for i, e in enumerate(excess)]
    assert max(shares) > min(shares)
    assert result.metrics["ratchet_share"] == max(shares)
    assert result.metrics["ratchet_excess"] == excess[-1]


def test_gate_rule_cell_compares_itself_with_the_closed_forms():
    config = gate_bias_over_depth().config | {"depths": [6, 21, 381], "samples": 2000}
    (result,) = run_gate_rule(Cell("x", {"rule": "competitive", "seed": 0}), config)
    assert result.metrics["worst_gap"] < 0.1
    assert result.metrics["carry_21"] == pytest.approx(result.curves["carry"].y[1], rel=1e-5)  # curves keep 6 digits
