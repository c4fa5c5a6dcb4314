"""The recorded runs: complete, small enough to try here, honest about runs that diverge or reach a plateau."""

import math

import pytest
import torch

from depthlab.lm.tokens import as_tokens
from depthlab.looped import experiments
from depthlab.looped.following import Followed
from depthlab.runs import Experiment

TINY = {
    "n_layers": 1,
    "d_model": 16,
    "n_heads": 2,
    "seq_len": 16,
    "batch_size": 2,
    "steps": 6,
    "validation_tokens": 64,
    "precision": "float32",
    "compiled": False,
}


def settings(experiment: Experiment):
    return [cell.settings for cell in experiment.cells]


def test_the_gpu_record_has_both_at_two_loop_counts_from_three_seeds_a_sweep_and_controls():
    experiment = experiments.looped_instability()
    config = experiment.config
    assert (config["n_layers"], config["d_model"], config["n_heads"], config["seq_len"]) == (6, 384, 3, 512)
    assert (config["batch_size"], config["steps"]) == (32, 1000)
    cells = settings(experiment)
    for variant in ("lt", "flt"):
        for loops in (6, 12):
            plain = {"variant": variant, "n_loops": loops, "rate": 1.0}
            assert [plain | {"seed": seed} in cells for seed in (0, 1, 2)] == [True] * 3
        sweep = [s for s in settings(experiments.looped_rates()) if s["variant"] == variant]
        assert {0.25, 0.5, 2.0} <= {s["rate"] for s in sweep} and {s["n_loops"] for s in sweep} == {12}
        low = [s for s in settings(experiments.looped_low_rate()) if s["variant"] == variant]
        assert [(s["rate"], s["n_loops"], s["seed"]) for s in low] == [(0.25, 12, seed) for seed in (0, 1, 2)]
    assert experiments.looped_rates().config == experiments.looped_low_rate().config == config
    controls = settings(experiments.looped_controls())
    assert sum(s.get("tied") is False for s in controls) == sum("backprop_loops" in s for s in controls) == 3
    names = [experiments.variant({**config, **s, "searched": False}) for s in [*cells, *controls]]
    assert "lt/K=12/rate=1/untied" in names and "lt/K=12/rate=1/backprop=3" in names
    assert len({(name, s["seed"]) for name, s in zip(names, [*cells, *controls], strict=True)}) == len(names)


GPU = ("looped_instability", "looped_rates", "looped_low_rate", "looped_controls", "looped_variants")
ALL = (*GPU, "looped_toy", "looped_toy_search")


@pytest.mark.parametrize("name", ALL)
def test_every_variant_has_every_seed_of_its_record(name):
    experiment = getattr(experiments, name)()
    seeds = {}
    for s in settings(experiment):
        own = experiments.variant({**experiment.config, **s, "searched": "n_layers" in s})
        seeds.setdefault(own, []).append(s["seed"])
    assert len({tuple(sorted(found)) for found in seeds.values()}) == 1


def test_the_toy_has_the_size_and_rate_of_its_search():
    toy, search = experiments.looped_toy(), experiments.looped_toy_search()
    chosen = {"n_layers": toy.config["n_layers"], "d_model": toy.config["d_model"], "rate": experiments.TOY_RATE}
    assert sum(chosen.items() <= s.items() for s in settings(search)) == 2  # both variants
    shared = ("steps", "batch_size", "seq_len", "n_heads", "optimizer", "data")
    assert all(toy.config[name] == search.config[name] for name in shared)


@pytest.mark.parametrize("index", [0, -1])
@pytest.mark.parametrize("name", ALL)
def test_a_cell_gives_all_numbers_and_curves(name, index):
    experiment = getattr(experiments, name)()
    config = experiment.config | {k: v for k, v in TINY.items() if k in experiment.config}
    cell = experiment.cells[index]
    for axis in ("n_layers", "d_model"):
        if axis in cell.settings:
            cell.settings[axis] = TINY[axis]
    (result,) = experiment.run_cell(cell, config)
    assert result.seed == cell.settings["seed"] and not result.diverged
    assert result.metrics["loss"] == pytest.approx(result.curves["loss"].y[-1], rel=1e-5)
    assert math.isfinite(result.metrics["val_loss"]) and result.metrics["norm_peak"] >= result.metrics["norm_last"]
    n_loops = {**config, **cell.settings}["n_loops"]
    assert result.curves["norms_end"].x == list(range(1, n_loops + 1))
    assert result.curves["norms_end"].y[-1] == pytest.approx(result.metrics["norm_last"], rel=1e-5)
    if "curves" in config:
        assert list(result.curves) == config["curves"]
        return
    assert len(result.curves["gradient_norm"].y) == 6
    parts = [name for name in result.curves if name.startswith("gradient_norm/")]
    squares = sum(result.curves[part].y[3] ** 2 for part in parts)
    assert math.sqrt(squares) == pytest.approx(result.curves["gradient_norm"].y[3], rel=1e-4)


def followed(losses, stopped=0):
    steps = len(losses)
    return Followed(torch.tensor(losses).double(), torch.ones(steps, 2).double(), torch.ones(steps, 3), stopped, 1.0)


def test_a_plateau_is_a_loss_no_better_than_byte_frequencies():
    for end, flag in ((3.2, 1), (2.7, 1), (2.5, 0)):
        found = experiments.metrics_of(followed([5.0] * 80 + [end] * 20), entropy=3.0)
        assert found["plateau"] == flag and found["loss"] == pytest.approx(end)
    stopped = experiments.metrics_of(followed([3.0, math.nan], 2), entropy=3.0)
    assert math.isnan(stopped["loss"]) and math.isnan(stopped["oscillation"])


def test_long_series_keep_at_most_200_points_at_their_own_steps(looped):
    model = looped()
    count = len(list(model.parameters()))
    for steps in (1, 199, 200, 201, 1000):
        series = torch.arange(steps).double()
        found = Followed(series, torch.ones(steps, count), torch.ones(steps, 3), 0, 1.0)
        curves = experiments.curves_of(found, model, steps)
        curve = curves["loss"]
        assert min(steps, 100) <= len(curve.x) <= 200 and [x - 1 for x in curve.x] == curve.y and curve.x[0] == 1
        assert len(curves["gradient_norm/blocks-1"].x) <= 50
        stopped = experiments.curves_of(found, model, 1000)["loss"]  # the steps of a run that was to go on
        assert stopped.x == [x for x in range(1, 1000, 5) if x <= steps]


def test_the_entropy_of_byte_frequencies_is_that_of_the_shares():
    assert experiments.byte_entropy(as_tokens([0, 1, 0, 1], 4)) == pytest.approx(math.log(2))
    assert experiments.byte_entropy(as_tokens([2, 2, 2], 4)) == 0


@pytest.mark.parametrize(("process", "expected"), [("MainProcess", 0), ("SpawnProcess-1", 1), ("SpawnProcess-6", 2)])
def test_worker_processes_take_turns_among_gpus(process, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(experiments.multiprocessing.current_process(), "_config", {}, raising=False)
    monkeypatch.setattr(experiments.multiprocessing, "current_process", lambda: type("P", (), {"name": process}))
    assert experiments.device() == torch.device("cuda", expected)
