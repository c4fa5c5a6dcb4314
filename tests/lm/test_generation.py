"""Generation: greedy is the likeliest token, sampling follows the model's distribution, seeds decide it."""

from types import SimpleNamespace

import pytest
import torch

from depthlab.lm import GPT, GPTConfig, generate
from depthlab.lm.layers import draw_normal
from depthlab.lm.llama import Llama, LlamaConfig

CONFIG = GPTConfig.preset("toy", n_layers=2, d_model=16, seq_len=6, dropout=0.3)
PROMPT = torch.tensor([[1, 2, 3], [7, 8, 9]])


@pytest.fixture(params=["gpt", "llama"])
def model(request):
    g = torch.Generator().manual_seed(0)
    if request.param == "gpt":
        model = GPT(CONFIG)
    else:
        model = Llama(LlamaConfig.preset("toy", n_layers=2, d_model=16, d_hidden=32, seq_len=6))
    draw_normal(model, 1, 1.0, g)  # large weights: a fresh model with a tied head only repeats its last token
    return model


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_greedy_takes_the_likeliest_token_of_the_last_seq_len(model):
    found = generate(model, PROMPT, 9, temperature=0)
    assert found.shape == (2, 12) and torch.equal(found[:, :3], PROMPT)
    model.eval()
    for t in range(3, 12):
        assert torch.equal(model(found[:, max(0, t - 6) : t])[:, -1].argmax(-1), found[:, t])
    assert torch.equal(generate(model, PROMPT, 9, temperature=0), found)


def test_one_seed_gives_one_text_and_another_seed_another(model):
    first = generate(model, PROMPT, 20, generator=seeded())
    assert torch.equal(generate(model, PROMPT, 20, generator=seeded()), first)
    assert not torch.equal(generate(model, PROMPT, 20, generator=seeded(1)), first)


def test_the_mode_is_put_back_and_no_global_random_number_is_drawn(model):
    state = torch.get_rng_state()
    model.train()
    generate(model, PROMPT, 3, generator=seeded())
    assert model.training and torch.equal(state, torch.get_rng_state())


class Fixed(torch.nn.Module):
    """Gives the same logits after every token."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits = torch.tensor(logits)
        self.config = SimpleNamespace(seq_len=4, vocab_size=len(logits))

    def forward(self, tokens):
        return self.logits.expand(*tokens.shape, -1)


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (2.0, 2), (1.0, 9)])
def test_draws_follow_the_tempered_and_cut_distribution(temperature, top_k):
    logits = [0.0, 1.0, 2.0, -1.0]
    drawn = generate(Fixed(logits), torch.zeros(20_000, 1).long(), 1, temperature, top_k, seeded())[:, 1]
    kept = sorted(range(4), key=lambda i: -logits[i])[: top_k or 4]
    weights = torch.tensor([logits[i] / temperature for i in kept]).softmax(0)
    for i in range(4):
        expected = float(weights[kept.index(i)]) if i in kept else 0.0
        assert float((drawn == i).float().mean()) == pytest.approx(expected, abs=0.015 if expected else 0)


@pytest.mark.parametrize("temperature", [1e-30, 1e-50, 1e-320])  # the latter two are 0 in float32
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(temperature):
    drawn = generate(Fixed([0.0, 1e4, -1e4]), torch.zeros(50, 1).long(), 1, temperature, generator=seeded())
    assert bool((drawn[:, 1] == 1).all())


def test_nothing_is_added_where_nothing_is_asked_for():
    assert torch.equal(generate(Fixed([0.0, 1.0]), torch.tensor([[0, 1]]), 0), torch.tensor([[0, 1]]))


def test_logits_that_are_not_finite_stop_it():
    with pytest.raises(FloatingPointError, match="The logits after 1 tokens are not finite"):
        generate(Fixed([0.0, float("nan")]), torch.tensor([[0]]), 1)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens=-1 is not allowed; use at least 0"),
        ({"max_new_tokens": 1, "top_k": 0}, ValueError, "top_k=0 is not allowed; use at least 1"),
        ({"max_new_tokens": 1, "temperature": -1.0}, ValueError, "temperature=-1.0 is not allowed"),
        ({"max_new_tokens": 1, "temperature": float("nan")}, ValueError, "temperature=nan is not allowed"),
        ({"max_new_tokens": 1, "temperature": None}, TypeError, "temperature=None is NoneType"),
        ({"max_new_tokens": 1, "tokens": torch.tensor([[2]])}, ValueError, "tokens hold the number 2"),
        ({"max_new_tokens": 1, "tokens": torch.zeros(1, 0).long()}, ValueError, "at least one token"),
    ],
)
def test_wrong_requests_are_named(how, error, message):
    with pytest.raises(error, match=message):
        generate(Fixed([0.0, 1.0]), **{"tokens": torch.tensor([[0]])} | how)
