"""Evaluation: every token once, equal to the definition, the same each time, and the model left as it was."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from depthlab.lm import GPT, Evaluation, GPTConfig, evaluate

CONFIG = GPTConfig.preset("toy", residual="prenorm", n_layers=2, d_model=16, seq_len=8, dropout=0.3)


@pytest.fixture
def model() -> GPT:
    return GPT(CONFIG, torch.Generator().manual_seed(0))


def text(n: int) -> torch.Tensor:
    return torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n))


def by_definition(model, tokens: torch.Tensor) -> float:
    """Mean nats, one window and one token at a time."""
    model.eval()
    losses = []
    for begin in range(0, len(tokens) - 1, 8):
        window = tokens[begin : begin + 9]
        logits = model(window[:-1].unsqueeze(0))[0]
        losses += [
            -float(F.log_softmax(row.double(), -1)[t]) for row, t in zip(logits.detach(), window[1:], strict=True)
        ]
    assert len(losses) == len(tokens) - 1
    return sum(losses) / len(losses)


@pytest.mark.parametrize("n", [2, 8, 9, 10, 41, 75])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_token_but_the_first_is_predicted_once(model, n, batch_size):
    found = evaluate(model, text(n), batch_size=batch_size, bytes_per_token=2.5)
    assert found.n_tokens == n - 1
    assert found.loss_nats == pytest.approx(by_definition(model, text(n)), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(found.loss_nats))
    assert found.bits_per_byte == pytest.approx(found.loss_nats / math.log(2) / 2.5)


def test_a_uniform_model_of_bytes_has_perplexity_256_and_8_bits_a_byte(model):
    with torch.no_grad():
        model.embed_tokens.weight.zero_()
    found = evaluate(model, text(50), bytes_per_token=1)
    assert found.perplexity == pytest.approx(256, rel=1e-5) and found.bits_per_byte == pytest.approx(8, rel=1e-6)
    assert evaluate(model, text(50)).bits_per_byte is None


@pytest.mark.parametrize("most", [1, 8, 11, 1000])
def test_max_tokens_evaluates_the_beginning(model, most):
    assert evaluate(model, text(41), max_tokens=most) == evaluate(model, text(41)[: most + 1])


def test_arrays_of_token_files_give_the_same(model, tmp_path):
    expected = evaluate(model, text(30))
    path = tmp_path / "tokens"
    text(30).numpy().astype(np.uint16).tofile(path)
    assert evaluate(model, np.memmap(path, np.uint16, "r")) == expected
    assert evaluate(model, text(30).to(torch.uint8)) == expected
    assert evaluate(model, text(30).tolist()) == expected


def test_it_is_deterministic_draws_nothing_and_leaves_every_modules_mode(model):
    model.train()
    model.sublayers[1].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    first = evaluate(model, text(40))
    assert torch.equal(state, torch.get_rng_state())
    assert evaluate(model, text(40)) == first
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())


def test_further_arguments_reach_the_loss(model):
    assert evaluate(model, text(20), skip=(0, 1)) != evaluate(model, text(20))


class Constant(torch.nn.Module):
    """A model whose loss is given."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.tensor(value))
        self.config = SimpleNamespace(seq_len=4, vocab_size=256)

    def loss(self, tokens, targets):
        return self.value


def test_a_loss_that_is_not_finite_stops_with_the_tokens_and_a_huge_one_is_reported():
    with pytest.raises(FloatingPointError, match="The loss of tokens 0 to 8 is nan"):
        evaluate(Constant(float("nan")), text(9))
    assert evaluate(Constant(1000.0), text(9)) == Evaluation(1000.0, math.inf, None, 8)


@pytest.mark.parametrize(
    ("tokens", "how", "error", "message"),
    [
        (torch.tensor([1]), {}, ValueError, r"tokens have shape \[1\]; evaluate needs \[N\] with at least two"),
        (torch.zeros(2, 9).long(), {}, ValueError, r"tokens have shape \[2, 9\]"),
        (torch.zeros(9), {}, TypeError, "tokens have dtype torch.float32"),
        (np.zeros(9), {}, TypeError, "tokens have dtype float64"),
        (torch.tensor([1, 256, 3]), {}, ValueError, r"Tokens 0 to 2 hold numbers from 1 to 256.*0 \.\. 255"),
        (torch.zeros(9).long(), {"batch_size": 0}, ValueError, "batch_size=0 is not allowed"),
        (torch.zeros(9).long(), {"max_tokens": 0.5}, TypeError, "max_tokens=0.5 is float"),
        (torch.zeros(9).long(), {"bytes_per_token": 0}, ValueError, "bytes_per_token=0 is not allowed"),
    ],
)
def test_wrong_requests_are_named(model, tokens, how, error, message):
    with pytest.raises(error, match=message):
        evaluate(model, tokens, **how)
