"""The speed of training: counted tokens, a plausible time, every setting once."""

import time
from pathlib import Path
from statistics import median

import pytest
import torch

from depthlab.lm import GPT, GPTConfig, mfu, speed
from depthlab.runs import Cell, load

CONFIG = GPTConfig.preset("toy", residual="prenorm", n_layers=1, d_model=32, seq_len=32)


def test_the_speed_is_tokens_over_the_median_time_of_whole_steps():
    model = GPT(CONFIG, torch.Generator().manual_seed(0))
    before = [p.detach().clone() for p in model.parameters()]
    began = time.perf_counter()
    found = speed.training_speed(model, batch_size=3, steps=8, warm_up=1, precision="float32")
    wall = 1000 * (time.perf_counter() - began)
    assert found.p20_ms <= found.ms_per_step <= found.p80_ms
    assert 0 < found.ms_per_step * 4 < wall
    assert found.tokens_per_s == pytest.approx(3 * 32 / found.ms_per_step * 1000)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_no_speed_is_reported_of_a_broken_model():
    model = GPT(CONFIG)
    with torch.no_grad():
        model.embed_tokens.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="The loss after 3 steps is nan"):
        speed.training_speed(model, batch_size=1, steps=2, warm_up=1, precision="float32")


def test_the_record_holds_each_preset_and_scheme_eager_and_compiled():
    experiment = speed.lm_speed()
    names = {cell.name for cell in experiment.cells}
    shown = {"S/prenorm/compiled/batch-64", "toy/mgr-competitive-torch/eager/batch-256"}
    assert shown | {"S/mgr-competitive-triton/compiled/batch-16"} <= names
    assert len(experiment.cells) == len(names) == 2 * 3 * 2 + 1


def test_a_cell_gives_the_share_of_the_stated_peak():
    small = {"device": "cpu", "precision": "bfloat16", "warm_up": 1, "steps": 2, "repeats": 3}
    chosen = {"preset": "toy", "residual": "mgr-competitive", "backend": "torch", "compiled": False, "batch_size": 1}
    result, *others = speed.run_cell(Cell("c", chosen), small | {"peak_tflops": 0.5})
    assert result.variant == "toy/mgr-competitive-torch/eager/batch-1"
    assert [other.seed for other in others] == [1, 2]
    shape = GPTConfig.preset("toy", residual="mgr-competitive")
    assert result.metrics["mfu"] == pytest.approx(mfu(result.metrics["tokens_per_s"], shape, 0.5))


def test_what_does_not_fit_in_memory_is_a_row_that_says_so(monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(speed, "training_speed", full)
    small = {"device": "cpu", "precision": "bfloat16", "warm_up": 1, "steps": 2, "repeats": 2, "peak_tflops": 1.0}
    chosen = {"preset": "toy", "residual": "prenorm", "backend": "auto", "compiled": False, "batch_size": 1}
    found = speed.run_cell(Cell("c", chosen), small)
    assert [result.diverged for result in found] == ["It does not fit in the device's memory."] * 2


def test_the_readme_shows_the_record():
    record = load(speed.ID)
    shown = []
    for name in record.metrics:
        preset, scheme, how, batch = name.split("/")
        metrics = ("ms_per_step", "tokens_per_s", "mfu", "memory_gib")
        ms, tokens, share, gib = (median(record.values(f"{name}.{metric}")) for metric in metrics)
        row = f"| {scheme} | {batch.removeprefix('batch-')} | {how} | {ms:.0f} | {tokens:,.0f} "
        row += f"| {share:.2f} | {gib:.1f} |"
        shown += [row] if preset == "S" else []
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert len(shown) == 7 and "\n".join(shown) in readme
    assert f"share of {record.config['peak_tflops']:.0f} TFLOP/s" in readme
    assert min(record.values("S/prenorm/compiled/batch-16.mfu")) >= 0.4
