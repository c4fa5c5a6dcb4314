"""The records of cost and parity: every way on one model, the ways that their names say."""

import pytest
import torch

from depthlab.lm import recompute_cost, recompute_parity
from depthlab.lm.gpt import GPT, GPTConfig
from depthlab.residuals import Recompute
from depthlab.runs import Cell, load

SMALL = {"n_layers": 4, "d_model": 32, "seq_len": 16}
CELL = Cell("c", {"preset": "toy", "n_streams": 4, "batch_size": 2, "compiled": False})
COST = recompute_cost.recompute_cost().config | {
    "device": "cpu",
    "precision": "float32",
    "backend": "torch",
    "steps": 2,
    "rounds": 2,
    "changes": SMALL,
}


def test_all_ways_have_the_same_loss_and_gradients():
    config = GPTConfig.preset("toy", **SMALL, dropout=0.1)
    model = recompute_cost.CheckpointedGPT(config, torch.Generator().manual_seed(0))
    plain = GPT(config, torch.Generator().manual_seed(0))
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))
    grads = []
    for way in (None, *recompute_cost.WAYS):
        one = model if way else plain
        if way:
            model.residual.recompute, model.checkpoints_blocks = recompute_cost.WAYS[way]
        one.zero_grad()
        torch.manual_seed(2)
        one.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        grads.append([p.grad.clone() for p in one.parameters()])
    for found in grads[1:]:
        for a, b in zip(found, grads[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def test_checkpointed_blocks_keep_one_state_a_block():
    model = recompute_cost.CheckpointedGPT(GPTConfig.preset("toy", **SMALL))
    tokens = torch.zeros(2, 16, dtype=torch.long)
    kept = {}
    for way in ("stored", "checkpointed"):
        model.residual.recompute, model.checkpoints_blocks = recompute_cost.WAYS[way]
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            model.hidden(tokens)
        kept[way] = sum(sizes)
    assert kept["checkpointed"] < kept["stored"] / 5


def test_a_cell_measures_the_ways_in_turns():
    results = recompute_cost.run_cell(CELL, COST)
    assert [(r.variant.removeprefix("toy/n-4/batch-2/eager/"), r.seed) for r in results] == [
        (way, turn) for turn in range(2) for way in recompute_cost.WAYS
    ]
    stored, rebuilt, checkpointed = (r.metrics for r in results[:3])
    assert stored["time_ratio"] == stored["kept"] == stored["kept_with_updates"] == 1
    assert rebuilt["time_ratio"] == pytest.approx(rebuilt["ms_per_step"] / stored["ms_per_step"])
    assert rebuilt["kept"] == pytest.approx(1 / 5)  # of five mixing layers, the newest
    assert rebuilt["kept_with_updates"] == pytest.approx((4 + 5) / (5 * 4 + 5))
    assert rebuilt["streams_gib"] == pytest.approx(4 * 32 * 32 * 4 / 2**30)
    assert "kept" not in checkpointed and checkpointed["ms_per_step"] > 0


def test_what_does_not_fit_is_recorded_so(monkeypatch):
    def full(model, **how):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(recompute_cost, "training_speed", full)
    results = recompute_cost.run_cell(CELL, COST)
    assert all("does not fit" in r.diverged for r in results) and len(results) == 6


def test_the_record_holds_all_presets_with_four_and_eight_streams():
    experiment = recompute_cost.recompute_cost()
    names = {recompute_cost.name_of(cell.settings) for cell in experiment.cells}
    assert names == {f"{p}/n-{n}/batch-16/eager" for p in "SML" for n in (4, 8)} | {
        "M/n-4/batch-16/compiled",
        "M/n-4/batch-32/eager",
    }
    assert recompute_cost.WAYS["rebuilt"] == (Recompute(), False)


def test_parity_trains_both_ways_from_one_start():
    config = recompute_parity.recompute_parity().config
    assert config["steps"] == 500
    small = config | {"device": "cpu", "backend": "torch", "steps": 6, "warm_up": 2}
    small |= {"changes": SMALL, "batch_size": 4, "last": 3, "validation_tokens": 200}
    stored, rebuilt = recompute_parity.run_cell(Cell("c", {"residual": "mgr-independent", "seed": 0}), small)
    assert (stored.variant, rebuilt.variant) == ("mgr-independent/stored", "mgr-independent/rebuilt")
    assert stored.metrics["first_loss"] == rebuilt.metrics["first_loss"]
    assert rebuilt.metrics["loss"] == pytest.approx(stored.metrics["loss"], rel=1e-3)
    assert rebuilt.curves["loss"].y != stored.curves["loss"].y  # bfloat16 tells them apart


def test_a_long_curve_is_thinned(monkeypatch):
    from depthlab.lm import parity

    monkeypatch.setattr(parity, "MAX_CURVE_POINTS", 5)
    config = recompute_parity.recompute_parity().config | {"device": "cpu", "precision": "float32", "steps": 12}
    config |= {"changes": {"n_layers": 2, "d_model": 8, "seq_len": 4}, "warm_up": 0, "validation_tokens": 20}
    result = parity.train_once("mgr-competitive", "torch", 0, config)
    assert result.curves["loss"].x == [0, 3, 6, 9]


def test_rebuilding_changes_the_loss_by_less_than_three_seeds_span():
    """What the README and notebook 23 say."""
    record = load(recompute_parity.ID)
    for gate in ("mgr-independent", "mgr-competitive"):
        stored, rebuilt = (record.values(f"{gate}/{way}.validation_loss") for way in recompute_parity.WAYS)
        assert max(abs(a - b) for a, b in zip(stored, rebuilt, strict=True)) < max(stored) - min(stored)
        firsts = [record.values(f"{gate}/{way}.first_loss") for way in recompute_parity.WAYS]
        assert len(stored) == 3 and firsts[0] == firsts[1]
