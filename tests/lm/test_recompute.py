"""GPT with rebuilt streams: the same training, from the command line to the checkpoint."""

import json

import pytest
import torch
from safetensors.torch import load_file

from depthlab.cli import main
from depthlab.lm import GPT, GPTConfig, checkpoint
from depthlab.lm.runlog import read_run
from depthlab.residuals import Recompute

SMALL = {"n_layers": 6, "n_heads": 2, "d_model": 32, "seq_len": 16}
FLAGS = ["--layers", "3", "--heads", "2", "--width", "16", "--seq-len", "16", "--streams", "2", "--batch-size", "2"]
FLAGS += ["--steps", "4", "--checkpoint-every", "2", "--evaluate-tokens", "64", "--warmup", "1"]


def gradients(recompute):
    config = GPTConfig.preset("toy", **SMALL, recompute=recompute)
    model = GPT(config, torch.Generator().manual_seed(0))
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters()}, model


def test_a_gpt_has_the_same_loss_and_the_same_gradients():
    loss, expected, _ = gradients(None)
    again, found, model = gradients(Recompute())
    assert torch.equal(loss, again)
    for name in expected:
        assert (found[name] - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
    report = model.residual.recompute_report()
    assert len(report.layers) == 12 - 3 and report.anchors == (11,)


def test_a_config_goes_through_json_and_refuses_what_it_cannot_do():
    config = GPTConfig.preset("toy", recompute=Recompute(anchor_every=4, top_p=0.1))
    saved = json.loads(json.dumps(checkpoint.describe(GPT(config))["config"]))
    assert GPTConfig(**saved) == config
    with pytest.raises(TypeError, match="recompute must be a depthlab.residuals.Recompute or None, got str"):
        GPTConfig.preset("toy", recompute="auto")
    with pytest.raises(ValueError, match="'prenorm' keeps no streams to rebuild"):
        GPTConfig.preset("toy", residual="prenorm", recompute=Recompute())


@pytest.fixture
def train(tmp_path, monkeypatch):
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("DEPTHLAB_CACHE", str(tmp_path / "cache"))
    story = tmp_path / "story.txt"
    story.write_text("the cat sat on the mat and the dog sat on the cat; " * 60)

    def run(out, *more):
        return main(["train", *FLAGS, "--data", str(story), "--out", str(tmp_path / out), *more])

    return run


def test_the_command_line_trains_resumes_and_evaluates_with_it(tmp_path, train, capsys):
    assert train("on", "--recompute", "auto") == 0
    run = read_run(tmp_path / "on")["settings"]
    assert run["model"]["config"]["recompute"]["anchor_every"] == "auto"
    assert train("off", "--recompute", "off") == 0
    weights = [load_file(tmp_path / name / "step-000004" / "model.safetensors") for name in ("on", "off")]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=1e-3, atol=1e-4)
    assert main(["train", "--out", str(tmp_path / "on"), "--resume", "--recompute", "auto"]) == 0
    assert main(["eval", str(tmp_path / "on"), "--tokens", "64"]) == 0
    assert train("from", "--recompute", "off", "--from", str(tmp_path / "on")) == 0
    capsys.readouterr()
    assert train("other", "--recompute", "yes") == 2
    assert "recompute='yes' is unknown; use one of off, auto." in capsys.readouterr().err
