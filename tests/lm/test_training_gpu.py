"""On a GPU: a step never waits for the device, a bad one is found all the same, and a stopped run goes on."""

import math

import numpy as np
import pytest
import torch

from depthlab.lm import GPT, GPTConfig, NonFiniteError, TokenStream, TrainConfig, as_tokens, checkpoint, train, training

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
IDS = as_tokens(np.random.default_rng(0).integers(0, 64, 2000), 64)
CONFIG = TrainConfig(steps=12, lr=1e-3, precision="bfloat16", log_every=4, evaluate_every=6, checkpoint_every=6)


def tiny() -> GPT:
    shape = {"vocab_size": 64, "seq_len": 32, "n_layers": 2, "n_heads": 2, "d_model": 64, "n_streams": 2}
    return GPT(GPTConfig(**shape, dropout=0.1), torch.Generator().manual_seed(0)).cuda()


def stream() -> TokenStream:
    return TokenStream(IDS, batch_size=4, seq_len=32, seed=1)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_never_waits_for_the_device(tmp_path, monkeypatch, optimizer):
    whole = training._step

    def step(run, number):
        torch.cuda.set_sync_debug_mode("error" if number > 2 else "default")  # the first ones load kernels
        try:
            return whole(run, number)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(training, "_step", step)
    config = TrainConfig(**{**vars(CONFIG), "optimizer": optimizer})
    assert math.isfinite(train(tiny(), stream(), config, tmp_path, IDS, quiet=True).val_loss)


def test_a_stopped_run_goes_on_with_dropout_data_and_optimizer_where_they_were(tmp_path):
    whole, again = tiny(), tiny()
    train(whole, stream(), CONFIG, tmp_path, IDS, quiet=True)
    for file in (tmp_path / "step-000012").iterdir():
        file.unlink()
    (tmp_path / "step-000012").rmdir()
    train(again, stream(), CONFIG, tmp_path, IDS, resume=True, quiet=True)
    for (name, a), b in zip(whole.named_parameters(), again.parameters(), strict=True):
        # A GPU may add in another order; a lost state would show as a step of the size of the rate, 1e-3.
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4, msg=name)


def test_a_bad_step_is_found_before_a_line_or_a_checkpoint_is_written(tmp_path):
    class Breaks(GPT):
        calls = 0

        def loss(self, tokens, targets):
            self.calls += self.training
            loss = super().loss(tokens, targets)
            return loss * math.nan if self.training and self.calls == 8 else loss

    model = Breaks(tiny().config).cuda()
    with pytest.raises(NonFiniteError, match="Step 8 is not finite: its loss is nan"):
        train(model, stream(), CONFIG, tmp_path, quiet=True)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["step-000006"]


def test_compiled_training_gives_about_the_same(tmp_path):
    results = []
    for compiled in (False, True):
        config = TrainConfig(**{**vars(CONFIG), "compile": compiled})
        results.append(train(tiny(), stream(), config, tmp_path / str(compiled), IDS, quiet=True).val_loss)
    assert results[0] == pytest.approx(results[1], rel=0.02)
