"""The record of errors: true differences, on the networks that it names."""

import math

import pytest
import torch

from depthlab.lm import GPT, GPTConfig, recompute_error
from depthlab.residuals import Recompute
from depthlab.runs import Cell

SMALL = recompute_error.recompute_error().config | {
    "shape": {"vocab_size": 256, "seq_len": 8, "n_heads": 2, "d_model": 16},
    "top_p": [0.0, 0.1],
    "anchors": [None, 4, "auto"],
    "top_p_with_anchors": [0.0],
    "train_steps": 3,
    "warm_up": 1,
}


def run(gates, depth=12, seed=0, config=SMALL, residual="mgr-independent"):
    settings = {"depth": depth, "residual": residual, "gates": gates, "seed": seed}
    return {r.variant: r for r in recompute_error.run_cell(Cell("c", settings), config)}


@pytest.fixture(scope="module")
def opened():
    return run("-1")


def test_a_cell_compares_every_manner_in_every_precision(opened):
    where = "12/mgr-independent/-1"
    assert len(opened) == 2 * (1 + 2 + 2)
    for precision, limit in (("float32", 1e-4), ("bfloat16", 2e-2)):
        auto = opened[f"{where}/{precision}/top-0/anchors-auto"].metrics
        assert 0 < auto["gradient_error"] < limit and auto["gradient_error"] <= auto["worst_error"]
        assert 0 < auto["stream_error"] <= auto["bound"] and auto["share_of_bound"] <= 1
        assert auto["predicted"] <= limit and 0 < auto["kept"] < 1
        assert all(f"{group}_error" in auto for group in recompute_error.GROUPS.values())
    stored = opened[f"{where}/bfloat16/stored"].metrics
    assert 1e-3 < stored["gradient_error"] < 0.2 and 0.2 < stored["gate_mean"] < 0.4 < stored["gate_max"] < 1
    assert opened[f"{where}/float32/stored"].metrics["gradient_error"] == 0


def test_more_anchors_leave_smaller_errors(opened):
    for precision in SMALL["precisions"]:
        every, nowhere = (opened[f"12/mgr-independent/-1/{precision}/top-0/anchors-{k}"].metrics for k in (4, None))
        assert every["stream_error"] < nowhere["stream_error"] and every["kept"] > nowhere["kept"]


def test_seeds_and_training_change_the_network():
    networks = [run("start"), run("start", seed=1), run("trained"), run("0")]
    means = [n[min(k for k in n if k.endswith("stored"))].metrics["gate_mean"] for n in networks]
    errors = [next(r.metrics["gradient_error"] for k, r in n.items() if "anchors-None" in k) for n in networks]
    assert means[0] == means[1] and len(set(means)) == 3 and len(set(errors)) == 4
    assert means[3] == pytest.approx(0.5, abs=0.05)


def test_the_errors_of_gradients_are_relative_by_group():
    exact = {"a.w_gate": torch.tensor([3.0, 4.0]), "sublayers.0.w": torch.tensor([10.0]), "b.w_pool": torch.zeros(2)}
    found = {"a.w_gate": torch.tensor([3.0, 4.5]), "sublayers.0.w": torch.tensor([11.0]), "b.w_pool": torch.zeros(2)}
    errors = recompute_error.gradient_errors(found, exact)
    assert errors["gates_error"] == pytest.approx(0.1) == errors["sublayers_error"] == errors["worst_error"]
    assert errors["queries_error"] == 0
    assert errors["gradient_error"] == pytest.approx(math.sqrt(1.25 / 125))


def test_a_vanishing_gradient_counts_apart():
    exact = {"sublayers.0.w": torch.full((4,), 1.0), "sublayers.1.w": torch.full((4,), 1e-3)}
    found = {"sublayers.0.w": torch.full((4,), 1.1), "sublayers.1.w": torch.full((4,), 2e-3)}
    errors = recompute_error.gradient_errors(found, exact)
    assert errors["worst_error"] == pytest.approx(0.1) and errors["worst_any_error"] == pytest.approx(1)


def test_the_gradients_compared_are_the_models_own():
    model = GPT(GPTConfig.preset("toy", n_layers=3, d_model=16, seq_len=8), torch.Generator().manual_seed(0))
    batch = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(1))
    model.residual.recompute = Recompute()
    found, rebuilt, true = recompute_error.backward(model, batch, "float32")
    model.zero_grad()
    model.residual.recompute = None
    model.loss(batch[:, :-1], batch[:, 1:]).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-7)
    assert [one.layer for one in rebuilt] == [5, 4, 3] and set(true) == set(range(6))


def test_the_records_hold_what_the_issue_asks_for():
    experiment = recompute_error.recompute_error()
    assert len(experiment.cells) == 3 * 2 * 5 * 3
    assert experiment.config["top_p"] == [0, 0.01, 0.05, 0.1]
    assert experiment.config["anchors"] == [None, 4, 8, "auto"]
    gpu = recompute_error.recompute_error_gpu()
    assert {(c.settings["depth"], c.settings["gates"]) for c in gpu.cells} == {(72, "trained")} and len(gpu.cells) == 6
    assert gpu.config["backend"] == "triton"
