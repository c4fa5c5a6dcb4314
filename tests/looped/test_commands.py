"""depthlab train, generate, eval and runs of looped models; a checkpoint of another variant; resuming."""

import json

import pytest
import torch

from depthlab.cli import main
from depthlab.lm import checkpoint
from depthlab.lm.checkpoint import CheckpointError

SMALL = ["--model", "looped", "--layers", "1", "--heads", "2", "--width", "16", "--seq-len", "16", "--loops", "3"]
SMALL += ["--batch-size", "2", "--steps", "4", "--checkpoint-every", "2", "--log-every", "1"]
SMALL += ["--evaluate-tokens", "64", "--evaluate-every", "2"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("CI", "true")


@pytest.fixture
def story(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text("the cat sat on the mat and the dog sat on the cat; " * 60)
    return ["--data", str(path)]


@pytest.mark.parametrize("variant", ["lt", "flt"])
def test_a_looped_model_goes_through_all_commands(variant, story, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["train", *SMALL, *story, "--variant", variant, "--objective", "FEW", "--out", out]) == 0
    assert main(["eval", out]) == 0
    assert main(["generate", out, "--prompt", "the", "--tokens", "5", "--temperature", "0"]) == 0
    assert main(["runs", out]) == 0
    assert ["looped", variant] == capsys.readouterr().out.splitlines()[-1].split()[1:3]
    settings = json.loads((tmp_path / "out" / "run.json").read_text())["settings"]
    assert settings["training"]["optimizer"] == "flt" and settings["training"]["lr"] is None  # not the preset's 2e-3
    assert settings["training"]["schedule"] == "trapezoid" and settings["training"]["warmup_steps"] == 0
    assert settings["model"]["config"]["n_loops"] == 3


def test_what_is_given_comes_before_the_published_setting(story, tmp_path):
    out = tmp_path / "out"
    more = ["--optimizer", "adamw", "--lr", "0.001", "--schedule", "cosine", "--warmup", "2"]
    assert main(["train", *SMALL, *story, *more, "--out", str(out)]) == 0
    training = json.loads((out / "run.json").read_text())["settings"]["training"]
    assert (training["optimizer"], training["lr"], training["schedule"]) == ("adamw", 0.001, "cosine")


def test_a_resumed_run_ends_as_an_undisturbed_one_and_refuses_another_variant(story, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["train", *SMALL, *story, "--out", str(out)]) == 0
    weights = (out / "step-000004" / "model.safetensors").read_bytes()
    for path in (out / "step-000004").iterdir():
        path.unlink()
    (out / "step-000004").rmdir()
    capsys.readouterr()
    assert main(["train", "--out", str(out), "--resume", "--variant", "lt"]) == 2
    assert "has variant='flt', and now it is 'lt'" in capsys.readouterr().err
    assert main(["train", "--out", str(out), "--resume"]) == 0
    assert (out / "step-000004" / "model.safetensors").read_bytes() == weights


def test_a_checkpoint_of_another_variant_or_loop_count_is_refused_and_changes_nothing(looped, tmp_path):
    model = looped("flt")
    path = checkpoint.save(tmp_path, 1, model, [], {})
    for changes, message in (
        ({"variant": "lt"}, "was saved with variant='flt', and this model has variant='lt'"),
        ({"n_loops": 5}, "was saved with n_loops=3, and this model has n_loops=5"),
    ):
        other = looped(seed=1, **changes)
        before = [p.clone() for p in other.parameters()]
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load(path, other)
        assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    same = looped("flt", seed=1)
    checkpoint.load(path, same)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--loops", "0"], "n_loops=0 is not allowed; use at least 1"),
        (["--variant", "ft"], "variant='ft' is unknown; use one of lt, lt-input, lt-attn, flt-res, flt"),
        (["--residual", "hc"], "residual is an option of --model gpt and llama, not of looped; leave it out."),
        (["--preset", "S"], "preset='S' is unknown; use one of toy, small"),
    ],
)
def test_a_wrong_option_is_one_sentence(more, message, story, tmp_path, capsys):
    capsys.readouterr()
    assert main(["train", *SMALL, *story, *more, "--out", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out
    assert not (tmp_path / "out").exists()
