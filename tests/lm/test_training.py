"""Training does what its settings say, stops at the first number that is not finite, and never loses or mixes runs."""

import json
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from depthlab.lm import checkpoint, runlog, sentry, training
from depthlab.lm.checkpoint import CheckpointError
from depthlab.lm.evaluation import Evaluation
from depthlab.lm.gpt import GPT, GPTConfig
from depthlab.lm.runlog import TrainingError, table
from depthlab.lm.schedules import SCHEDULES
from depthlab.lm.sentry import NonFiniteError, Sentry
from depthlab.lm.steps import gradients
from depthlab.lm.tokens import TokenStream, as_tokens
from depthlab.lm.training import TrainConfig, train

IDS = as_tokens(np.random.default_rng(0).integers(0, 32, 500), 32)
QUICK = TrainConfig(steps=6, lr=1e-3, warmup_steps=2, log_every=2, checkpoint_every=2)


def tiny(seed: int = 0, **changes) -> GPT:
    shape = {"vocab_size": 32, "seq_len": 8, "n_layers": 2, "n_heads": 2, "d_model": 16, "n_streams": 2} | changes
    return GPT(GPTConfig(**shape), torch.Generator().manual_seed(seed))


def stream(batch_size: int = 4, **changes) -> TokenStream:
    return TokenStream(IDS, **{"batch_size": batch_size, "seq_len": 8, "seed": 1} | changes)


@dataclass(frozen=True)
class AnyConfig:
    kind: ClassVar[str] = "any"
    vocab_size: int = 32
    seq_len: int = 8


class Bigram(nn.Module):
    """The least that `train` asks of a model; it can be told to go wrong at a call."""

    def __init__(self, breaks_at: int = 0, value: float = math.nan) -> None:
        super().__init__()
        self.config, self.breaks_at, self.value, self.calls = AnyConfig(), breaks_at, value, 0
        self.table = nn.Embedding(32, 32)
        nn.init.zeros_(self.table.weight)

    def loss(self, tokens, targets):
        self.calls += self.training
        loss = nn.functional.cross_entropy(self.table(tokens).flatten(0, 1), targets.flatten())
        return loss * self.value if self.calls == self.breaks_at and self.training else loss


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


# ---- what the settings say


def test_a_run_is_the_update_rule_written_out(tmp_path):
    model, plain = tiny(), tiny()
    train(model, stream(), replace(QUICK, clip=0.5, accumulate=2), tmp_path, quiet=True)
    batches, norms = stream(), []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    decayed = {id(p) for name, p in plain.named_parameters() if name.startswith("sublayers")}
    for step in range(6):
        loss = 0
        for _ in range(2):
            batch = batches.next_batch()
            logits = plain(batch[:, :-1])
            loss = loss + nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) / 2
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item())
        rate = 1e-3 * SCHEDULES["cosine"](step, 6, 2)
        with torch.no_grad():
            for p in plain.parameters():
                p.mul_(1 - rate * 0.1 * (id(p) in decayed))
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    assert min(norms) > 0.5  # otherwise clipping was not tested
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-5, atol=1e-6)
    assert [line["grad_norm"] for line in runlog.read_log(tmp_path)] == pytest.approx(norms[1::2], rel=1e-4)


def test_accumulated_batches_are_one_large_batch():
    one, two = tiny(), tiny()
    batch = stream(8).next_batch()
    whole, halves = gradients(one)([batch]), gradients(two)([batch[:4], batch[4:]])
    assert whole.loss.item() == pytest.approx(halves.loss.item(), rel=1e-5)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    assert whole.grad_norm.item() == pytest.approx(
        math.sqrt(sum(p.grad.square().sum().item() for p in one.parameters())), rel=1e-5
    )


def test_a_parameter_without_gradient_counts_as_zero():
    model = Bigram()
    model.idle = nn.Parameter(torch.ones(3))
    moved = gradients(model, clip=1.0)([stream().next_batch()])
    assert moved.norms.shape == (2,) and moved.norms.min() == 0 and moved.grad_norm > 0
    assert model.idle.grad is None


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "flt"])
def test_the_validation_loss_falls_on_text_with_a_rule(tmp_path, optimizer):
    ids = as_tokens(np.arange(4000) * 7 % 32, 32)
    config = TrainConfig(steps=60, optimizer=optimizer, lr=0.02, evaluate_every=30, evaluate_tokens=100)
    train(tiny(), TokenStream(ids, 8, 8), config, tmp_path, ids, quiet=True)
    losses = [line["val_loss"] for line in runlog.read_log(tmp_path) if "val_loss" in line]
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0] and losses[2] < 0.9 * losses[0]


def test_the_log_has_one_line_a_logged_step_with_every_field(tmp_path):
    config = replace(QUICK, steps=7, log_every=3, evaluate_every=2, accumulate=2)
    result = train(tiny(), stream(), config, tmp_path, IDS, quiet=True)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [0, 2, 3, 4, 6, 7]
    assert [line["step"] for line in log if "val_loss" in line] == [0, 2, 4, 6, 7]
    fields = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "ms_per_step"}
    assert all(set(line) - {"val_loss"} == fields for line in log[1:])
    assert [line["tokens"] for line in log] == [line["step"] * 2 * 4 * 8 for line in log]
    assert result.log == log and (result.loss, result.val_loss) == (log[-1]["loss"], log[-1]["val_loss"])


def test_training_in_bfloat16_keeps_float32_weights_and_gives_about_the_same(tmp_path):
    full, half = tiny(), tiny()
    a = train(full, stream(), QUICK, tmp_path / "a", quiet=True)
    b = train(half, stream(), replace(QUICK, precision="bfloat16"), tmp_path / "b", quiet=True)
    assert all(p.dtype == torch.float32 for p in half.parameters())
    assert a.loss != b.loss and a.loss == pytest.approx(b.loss, rel=0.02)


def test_compile_compiles_the_loss(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda f: compiled.append(f) or f)
    model = tiny()
    train(model, stream(), replace(QUICK, compile=True), tmp_path, quiet=True)
    assert compiled == [model.loss]


def test_any_model_with_a_loss_and_a_config_can_be_trained_and_resumed(tmp_path):
    train(Bigram(), stream(), QUICK, tmp_path, IDS, quiet=True)
    model = Bigram()
    result = train(model, stream(), QUICK, tmp_path, IDS, resume=True, quiet=True)
    assert result.step == 6 and model.table.weight.abs().max() > 0
    with pytest.raises(TrainingError, match="kind='any', and now it is 'gpt'"):
        train(tiny(), stream(), QUICK, tmp_path, IDS, resume=True, quiet=True)


def test_nothing_is_printed_in_ci_but_what_happened(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CI", "true")
    train(tiny(), stream(), QUICK, tmp_path)
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("CI", "")
    train(tiny(), stream(), replace(QUICK, keep=1), tmp_path / "b")
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"step {i} of 6" for i in (2, 4, 6)
    ]
    assert [p.name for p in checkpoint.checkpoints(tmp_path / "b")] == ["step-000006"]


def test_a_run_says_where_it_is_also_between_its_log_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(training, "_SILENT_S", 0.0)
    train(tiny(), stream(), replace(QUICK, log_every=3), tmp_path)
    lines = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == [f"step {n} of 6" for n in range(1, 7)]
    monkeypatch.setattr(training, "_SILENT_S", 1e9)
    train(tiny(), stream(), replace(QUICK, log_every=3), tmp_path / "fast")
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_validation_that_is_not_finite_names_the_step_and_the_last_good_checkpoint(tmp_path, monkeypatch):
    def broken(model, ids, **how):
        if weights(model).equal(start):
            return Evaluation(1.0, 2.7, None, 1)
        raise FloatingPointError("The loss of tokens 0 to 8 is nan.")

    model = tiny()
    start = weights(model)
    monkeypatch.setattr(training, "evaluate", broken)
    with pytest.raises(NonFiniteError) as caught:
        train(model, stream(), replace(QUICK, evaluate_every=3), tmp_path, IDS, quiet=True)
    assert str(caught.value) == (
        "Validation after step 3 failed: The loss of tokens 0 to 8 is nan. "
        f"The last good checkpoint is {tmp_path / 'step-000002'}."
    )


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("steps", 0, "steps=0 is not allowed; use 1 or more"),
        ("steps", 2.5, "steps=2.5 is float; use a whole number"),
        ("keep", -1, "keep=-1 is not allowed; use 0 or more"),
        ("seed", 2**32, "seed=4294967296 is not allowed; use 0 to 2..32 - 1"),
        ("optimizer", "sgd", "optimizer='sgd' is unknown; use one of adamw, muon, flt"),
        ("schedule", "step", "schedule='step' is unknown; use one of constant, cosine, trapezoid"),
        ("precision", "float16", "precision='float16' is unknown; use one of float32, bfloat16"),
        ("clip", 0.0, "clip=0.0 is not allowed"),
        ("clip", math.nan, "clip=nan is not allowed"),
        ("warmup_steps", 7, "warmup_steps=7 is not allowed; use 0 to steps=6"),
    ],
)
def test_a_setting_out_of_range_is_named_with_what_is_allowed(field, value, says):
    with pytest.raises((ValueError, TypeError), match=says):
        replace(QUICK, **{field: value})


def test_tokens_and_sequences_must_fit_the_model(tmp_path):
    with pytest.raises(ValueError, match="vocab_size=31 of the model is below the 32 of given ids"):
        train(tiny(vocab_size=31), stream(), QUICK, tmp_path)
    with pytest.raises(ValueError, match="seq_len=8 of the data is above the model's 7"):
        train(tiny(seq_len=7), stream(), QUICK, tmp_path)
    assert not list(tmp_path.iterdir())


# ---- numbers that are not finite


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_first_bad_step_stops_the_run_before_it_is_applied(tmp_path, value):
    model = Bigram(breaks_at=5, value=value)
    with pytest.raises(NonFiniteError) as caught:
        train(model, stream(), QUICK, tmp_path, quiet=True)
    said = str(caught.value)
    assert said.startswith(f"Step 5 is not finite: its loss is {value:g}, 1 of 1 modules have a gradient")
    assert f"The last good checkpoint is {tmp_path / 'step-000004'}." in said
    report = json.loads((tmp_path / "nonfinite-step-000005.json").read_text())
    assert report["gradient_norms"] == {"table": "nan"}
    good = Bigram()
    checkpoint.load(tmp_path / "step-000004", good)
    assert torch.equal(good.table.weight, model.table.weight)  # step 5 changed nothing
    assert [line["step"] for line in runlog.read_log(tmp_path)] == [2, 4]


def test_a_gradient_that_overflows_under_a_finite_loss_stops_the_run_too(tmp_path):
    class Steep(Bigram):
        def loss(self, tokens, targets):
            loss = super().loss(tokens, targets)
            return loss + (loss - loss.detach()) * 3e38 if self.training and self.calls == 3 else loss

    with pytest.raises(
        NonFiniteError, match=r"Step 3 is not finite: its loss is \d.*, 1 of 1 modules have a gradient norm that is not"
    ):
        train(Steep(), stream(), QUICK, tmp_path, quiet=True)


def test_the_report_names_the_first_signal_that_is_not_finite(tmp_path):
    model = tiny()
    with torch.no_grad():
        model.sublayers[2].o_proj.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match="the first signal that is not finite is the update of sublayer 2"):
        train(model, stream(), QUICK, tmp_path, quiet=True)
    report = json.loads((tmp_path / "nonfinite-step-000001.json").read_text())
    rows = {(row["layer"], row["signal"]): row["max"] for row in report["signals"]}
    assert rows[2, "update"] == "nan" and rows[1, "update"] > 0
    assert "embed_tokens" in report["gradient_norms"]


def test_of_accumulated_batches_the_one_with_a_bad_signal_is_reported():
    model = tiny()
    batches = [stream().next_batch() for _ in range(3)]
    sound = sentry.signal_norms(model, batches[0])
    spoil = batches[1][0, 0].item()
    with torch.no_grad():
        model.embed_tokens.weight[spoil] = math.inf
    others = [torch.where(batch == spoil, (spoil + 1) % model.config.vocab_size, batch) for batch in batches]
    found = sentry.first_bad_signals(model, [others[0], batches[1], others[2]])
    assert any(not math.isfinite(row["max"]) for row in found) and len(found) == len(sound)
    assert sentry.first_bad_signals(model, others[:2]) == sentry.signal_norms(model, others[1])
    assert sentry.first_bad_signals(model, []) == []


def test_where_steps_are_not_looked_at_one_by_one_no_bad_one_is_saved(tmp_path, monkeypatch):
    """As on a GPU, where the flag is read only before a line or a checkpoint is written."""
    monkeypatch.setattr("depthlab.lm.training._checks_every_step", lambda device: False)
    for at, log_every, logged in ((5, 2, [2, 4]), (3, 6, [])):
        out = tmp_path / str(at)
        with pytest.raises(NonFiniteError, match=f"Step {at} is not finite: its loss is nan"):
            train(Bigram(breaks_at=at), stream(), replace(QUICK, log_every=log_every), out, quiet=True)
        saved = [checkpoint.step_of(p) for p in checkpoint.checkpoints(out)]
        assert saved == list(range(2, at, 2))
        assert [line["step"] for line in runlog.read_log(out)] == logged


def test_a_step_that_is_not_looked_at_never_waits_for_the_device(tmp_path, monkeypatch):
    """Whatever turns a tensor into a Python number waits; so do copies to the CPU."""
    monkeypatch.setattr("depthlab.lm.training._checks_every_step", lambda device: False)
    waits: list[str] = []
    in_step = [False]
    for name in ("item", "__bool__", "__float__", "__int__", "__index__", "tolist", "cpu", "numpy"):

        def spy(real):
            return lambda self, *arguments: waits.extend([real.__name__] * in_step[0]) or real(self, *arguments)

        monkeypatch.setattr(torch.Tensor, name, spy(getattr(torch.Tensor, name)))
    whole = training._step

    def step(*arguments):
        arguments[0].stream.next_batch = lambda: batch  # what is read on the CPU is no wait
        in_step[0] = True
        try:
            return whole(*arguments)
        finally:
            in_step[0] = False

    batch = stream().next_batch()
    monkeypatch.setattr(training, "_step", step)
    train(Bigram(), stream(), QUICK, tmp_path / "a", quiet=True)
    assert waits == []
    monkeypatch.setattr("depthlab.lm.training._checks_every_step", lambda device: True)
    train(Bigram(), stream(), QUICK, tmp_path / "b", quiet=True)
    assert "__int__" in waits  # the spy sees a wait where there is one


def test_the_report_keeps_the_norms_of_the_first_bad_step():
    watch = Sentry(Bigram())
    for step, norm in ((1, 1.0), (2, math.inf), (3, 5.0), (4, math.nan)):
        watch.watch(step, torch.tensor(float(step)), torch.tensor([norm]))
    assert watch.report() == {"step": 2, "loss": 2.0, "gradient_norms": {"table": math.inf}}


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """An update can overflow although its gradient is finite."""
    config = replace(QUICK, lr=1e39, warmup_steps=0, checkpoint_every=1)
    with pytest.raises(NonFiniteError, match="weights of table.weight are not finite after step 1"):
        train(Bigram(), stream(), config, tmp_path, quiet=True)
    assert checkpoint.checkpoints(tmp_path) == []


# ---- folders that hold a run


def test_a_folder_with_a_run_is_refused_without_resume(tmp_path):
    train(tiny(), stream(), QUICK, tmp_path, quiet=True)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(TrainingError, match="holds a run already; go on with it by --resume"):
        train(tiny(), stream(), QUICK, tmp_path, quiet=True)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"config": replace(QUICK, steps=8)}, "steps=6, and now it is 8"),
        ({"config": replace(QUICK, lr=2e-3)}, "lr=0.001, and now it is 0.002"),
        ({"model": {"residual": "prenorm"}}, "residual='mgr-competitive', and now it is 'prenorm'"),
        ({"model": {"vocab_size": 33}}, "vocab_size=32, and now it is 33"),
        ({"stream": {"batch_size": 2}}, "batch_size=4, and now it is 2"),
        ({"stream": {"seed": 9}}, "seed=1, and now it is 9"),
        ({"about": {"note": "b"}}, "note=None, and now it is 'b'"),
    ],
)
def test_a_resumed_run_with_another_setting_names_it_and_both_values(tmp_path, change, says):
    train(tiny(), stream(), QUICK, tmp_path, quiet=True)
    model, batches = tiny(**change.get("model", {})), stream(**change.get("stream", {}))
    with pytest.raises(TrainingError, match=says):
        train(model, batches, change.get("config", QUICK), tmp_path, resume=True, about=change.get("about"), quiet=True)


def test_other_data_is_another_setting(tmp_path):
    train(tiny(), stream(), QUICK, tmp_path, IDS, quiet=True)
    other = as_tokens(IDS.ids[::-1], 32)
    with pytest.raises(TrainingError, match="has SHA-256 of the tokens="):
        train(tiny(), TokenStream(other, 4, 8, 1), QUICK, tmp_path, IDS, resume=True, quiet=True)
    with pytest.raises(TrainingError, match="has SHA-256 of the validation tokens="):
        train(tiny(), stream(), QUICK, tmp_path, other, resume=True, quiet=True)


def test_what_changes_no_number_may_change_on_resume(tmp_path):
    train(tiny(), stream(), QUICK, tmp_path, quiet=True)
    config = replace(QUICK, log_every=1, keep=1, checkpoint_every=3)
    assert train(tiny(), stream(), config, tmp_path, resume=True, quiet=True).step == 6


def stopped_at(out: Path, step: int) -> None:
    """Make `out` look as if the run had been killed right after that checkpoint."""
    for path in checkpoint.checkpoints(out):
        if checkpoint.step_of(path) > step:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()


def test_resume_takes_the_newest_good_one_and_names_those_it_passed_over(tmp_path, capsys):
    whole = tiny()
    train(whole, stream(), QUICK, tmp_path, quiet=True)
    (tmp_path / "step-000006" / "model.safetensors").write_bytes(b"torn")
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"step": 8, "lo')  # a kill cut the line
    again = tiny(seed=3)
    train(again, stream(), QUICK, tmp_path, resume=True)
    said = capsys.readouterr().out
    assert (
        f"The checkpoint {tmp_path / 'step-000006'} is damaged (model.safetensors does not have its SHA-256)." in said
    )
    assert f"Going on from {tmp_path / 'step-000004'}." in said
    assert torch.equal(weights(again), weights(whole))
    assert [line["step"] for line in runlog.read_log(tmp_path)] == [2, 4, 6]
    assert checkpoint.find(tmp_path)[0].name == "step-000006"


def test_a_damaged_checkpoint_does_not_cost_the_good_ones_that_a_resumed_run_saves_before_it(tmp_path, monkeypatch):
    train(tiny(), stream(), QUICK, tmp_path, quiet=True)
    (tmp_path / "step-000006" / "model.safetensors").write_bytes(b"torn")
    config = replace(QUICK, keep=1, checkpoint_every=5)

    def stop(run, step):
        path = save(run, step)
        raise KeyboardInterrupt if path.exists() else AssertionError

    save = training._save
    monkeypatch.setattr(training, "_save", stop)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), stream(), config, tmp_path, resume=True, quiet=True)
    assert checkpoint.find(tmp_path)[1]["step"] == 5


def test_a_checkpoint_of_another_run_is_passed_over_by_name(tmp_path, capsys):
    whole = tiny()
    train(whole, stream(), QUICK, tmp_path / "a", quiet=True)
    for name, model, batches in (("b", tiny(residual="prenorm"), stream()), ("c", tiny(), stream(seed=9))):
        train(model, batches, QUICK, tmp_path / name, quiet=True)
    for name, why in (("b", "residual='prenorm', here 'mgr-competitive'"), ("c", "seed=9, here 1")):
        shutil.rmtree(tmp_path / "a" / "step-000006")
        shutil.copytree(tmp_path / name / "step-000006", tmp_path / "a" / "step-000006")
        again = tiny(seed=2)
        train(again, stream(), QUICK, tmp_path / "a", resume=True)
        said = capsys.readouterr().out
        assert f"The checkpoint {tmp_path / 'a' / 'step-000006'} is of another run ({why})." in said
        assert f"Going on from {tmp_path / 'a' / 'step-000004'}." in said
        assert torch.equal(weights(again), weights(whole))


def test_resume_begins_anew_without_a_checkpoint_but_not_over_damaged_ones(tmp_path):
    whole = tiny()
    train(whole, stream(), QUICK, tmp_path, quiet=True)
    stopped_at(tmp_path, 0)
    again = tiny()
    train(again, stream(), QUICK, tmp_path, resume=True, quiet=True)
    assert torch.equal(weights(again), weights(whole))
    for path in checkpoint.checkpoints(tmp_path):
        (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="No other is there; move .* away to begin anew"):
        train(tiny(), stream(), QUICK, tmp_path, resume=True, quiet=True)


def test_a_full_disk_ends_the_run_in_one_sentence_that_names_the_last_good_checkpoint(tmp_path, monkeypatch):
    def full(self, line):
        if line["step"] == 4:
            raise OSError(28, "No space left on device")
        whole(self, line)

    whole = runlog.Log.write
    monkeypatch.setattr(runlog.Log, "write", full)
    with pytest.raises(TrainingError) as caught:
        train(tiny(), stream(), QUICK, tmp_path, quiet=True)
    assert str(caught.value) == (
        f"{tmp_path} cannot be written (No space left on device); make room there, or give another folder. "
        f"The last good checkpoint is {tmp_path / 'step-000002'}."
    )
    monkeypatch.setattr(runlog.Log, "write", whole)
    assert train(tiny(), stream(), QUICK, tmp_path, resume=True, quiet=True).step == 6


LACKING = '{"settings": {"model": {"kind": "gpt", "config": {}}, "training": {"steps": 3}}, "parameters": 1}'


@pytest.mark.parametrize("content", ["{", "[]", "\xff", '{"settings": 1}', '{"settings": {}}', LACKING, ""])
def test_a_damaged_run_file_is_one_sentence(tmp_path, content):
    (tmp_path / "run.json").write_text(content, encoding="latin-1")
    for use in (lambda: train(tiny(), stream(), QUICK, tmp_path, resume=True, quiet=True), lambda: table([tmp_path])):
        with pytest.raises(TrainingError, match="run.json (is damaged|lacks settings)"):
            use()


@pytest.mark.parametrize("line", ["5", "null", '{"loss": 1}', "\xff", "{"])
def test_a_log_line_of_another_kind_is_one_sentence(tmp_path, line):
    train(tiny(), stream(), QUICK, tmp_path, quiet=True)
    (tmp_path / "log.jsonl").write_text(line + "\n", encoding="latin-1")
    for use in (lambda: train(tiny(), stream(), QUICK, tmp_path, resume=True, quiet=True), lambda: table([tmp_path])):
        with pytest.raises(TrainingError, match="log.jsonl is damaged; remove the lines"):
            use()
