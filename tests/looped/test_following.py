"""Following a run is the trainer's run, step by step, with the series of the passes themselves."""

import math

import pytest
import torch

from depthlab.lm import training
from depthlab.lm.tokens import TokenStream, as_tokens
from depthlab.looped.following import follow


@pytest.fixture
def stream():
    ids = torch.randint(0, 32, (2000,), generator=torch.Generator().manual_seed(0))
    return lambda: TokenStream(as_tokens(ids, 32), batch_size=2, seq_len=8)


def test_it_ends_where_the_trainer_ends(looped, stream, tmp_path):
    followed_model, trained = looped("flt", start=True), looped("flt", start=True)
    found = follow(followed_model, stream(), 7)
    config = training.TrainConfig(7, optimizer="flt", schedule="trapezoid", warmup_steps=0, log_every=1)
    result = training.train(trained, stream(), config, tmp_path, quiet=True)
    for a, b in zip(followed_model.parameters(), trained.parameters(), strict=True):
        assert torch.equal(a, b)
    assert found.losses.tolist() == [line["loss"] for line in result.log]
    norms = found.gradient_norms.norm(dim=1)
    assert norms.tolist() == pytest.approx([line["grad_norm"] for line in result.log])
    assert found.stopped == 0 and found.ms_per_step > 0
    for row, line in zip(found.loop_norms.tolist(), result.log, strict=True):  # of the pass, not of a validation
        assert line["loop_norms"] == pytest.approx(row, abs=1e-4)


def test_its_series_are_those_of_its_passes(looped, stream):
    model, batches = looped("lt", start=True), stream()
    first = batches.next_batch()
    expected = model.loss(first[:, :-1], first[:, 1:])
    expected.backward()
    norms, loops = [p.grad.norm() for p in model.parameters()], model.loop_norms.clone()
    model.zero_grad(set_to_none=True)
    found = follow(model, stream(), 3)
    assert found.losses.shape == (3,) and found.loop_norms.shape == (3, 3)
    assert found.losses[0] == pytest.approx(float(expected.detach()))
    torch.testing.assert_close(found.gradient_norms[0].float(), torch.stack(norms))
    torch.testing.assert_close(found.loop_norms[0].float(), loops)
    assert not torch.equal(found.loop_norms[1], found.loop_norms[0])


def test_the_rate_multiplies_every_optimizers_rate(looped, stream):
    moved = []
    for rate in (1.0, 0.5):
        model = looped("flt", start=True)
        before = model.embed_tokens.weight.detach().clone()
        follow(model, stream(), 1, rate=rate, schedule="constant")
        moved.append((model.embed_tokens.weight.detach() - before).abs().max())
    torch.testing.assert_close(moved[1], 0.5 * moved[0])


def test_a_run_that_is_not_finite_stops_and_names_its_first_bad_step(looped, stream):
    model, count = looped("lt", start=True), []
    loss = model.loss

    def spoiled(tokens, targets):
        count.append(1)
        return loss(tokens, targets) * (math.nan if len(count) == 4 else 1)

    model.loss = spoiled
    found = follow(model, stream(), 400)
    assert found.stopped == 4 and len(found.losses) == 50
