"""The parity record: its runs are seeded, paired and the trainer's."""

from itertools import combinations
from statistics import median

import pytest

from depthlab.lm import parity
from depthlab.runs import Cell, load

SMALL = parity.lm_parity().config | {
    "device": "cpu",
    "changes": {"n_layers": 2, "d_model": 32, "seq_len": 16},
    "precision": "float32",
    "backends": ["torch", "auto"],
    "steps": 12,
    "warm_up": 2,
    "batch_size": 8,
    "last": 3,
    "validation_tokens": 200,
}


def run(seed: int) -> list:
    return parity.run_cell(Cell("c", {"residual": "mgr-competitive", "seed": seed}), SMALL)


def test_backends_start_alike_and_seeds_differ():
    plain, auto = run(0)
    assert (plain.variant, auto.variant) == ("mgr-competitive/torch", "mgr-competitive/auto")
    assert plain.metrics["first_loss"] == auto.metrics["first_loss"]
    assert auto.metrics["loss"] == pytest.approx(plain.metrics["loss"], abs=1e-6)  # on a CPU "auto" is torch
    other, _ = run(1)
    assert abs(other.metrics["loss"] - plain.metrics["loss"]) > 1e-4
    assert plain.metrics["loss"] < plain.metrics["first_loss"] - 0.05
    assert plain.metrics["loss"] == pytest.approx(sum(plain.curves["loss"].y[-3:]) / 3, rel=1e-5)


def test_the_record_pairs_both_backends_over_eight_seeds_and_both_gates():
    experiment = parity.lm_parity()
    assert experiment.config["backends"] == ["torch", "triton"] and experiment.config["steps"] == 200
    assert [cell.settings for cell in experiment.cells] == [
        {"residual": residual, "seed": seed} for residual in ("mgr-independent", "mgr-competitive") for seed in range(8)
    ]


@pytest.mark.parametrize("residual", ["mgr-independent", "mgr-competitive"])
@pytest.mark.parametrize("metric", ["loss", "validation_loss"])
def test_on_record_the_backends_are_no_further_apart_than_two_seeds(residual, metric):
    """Medians: of the difference that the backend makes to a seed, and of that between two seeds of the reference."""
    record = load(parity.ID)
    plain, fused = (record.values(f"{residual}/{backend}.{metric}") for backend in ("torch", "triton"))
    backend = median(abs(a - b) for a, b in zip(plain, fused, strict=True))
    assert backend < 0.8 * median(abs(a - b) for a, b in combinations(plain, 2))
