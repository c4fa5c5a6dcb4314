"""The loss of the next token: eager in pieces, soft-capped, in half precision, and its refusals."""

import pytest
import torch
import torch.nn.functional as F

from depthlab.lm import head


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


H, WEIGHT = normal(2, 7, 6), normal(11, 6, seed=1)
TARGETS = torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("limit", [1, 5 * 11, 2**28])
def test_the_loss_and_its_gradients_are_those_of_all_logits_at_once(monkeypatch, soft_cap, limit):
    monkeypatch.setattr(head, "MAX_EAGER_LOGITS", limit)
    found = []
    for own in (True, False):
        h, weight = H.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
        if own:
            loss = head.next_token_loss(h, weight, TARGETS, soft_cap)
        else:
            logits = h @ weight.T
            logits = soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits
            loss = F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten())
        loss.backward()
        found.append((loss.detach(), h.grad, weight.grad))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_pieces_keep_fewer_bytes_for_backward(monkeypatch):
    def kept(limit: int) -> int:
        monkeypatch.setattr(head, "MAX_EAGER_LOGITS", limit)
        sizes = []
        h, weight = normal(4, 64, 6).requires_grad_(), normal(500, 6).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
            head.next_token_loss(h, weight, torch.zeros(4, 64).long())
        return sum(sizes)

    assert kept(10_000) < kept(2**28) / 5


def test_half_precision_logits_give_a_float32_loss():
    loss = head.next_token_loss(H.bfloat16(), WEIGHT.bfloat16(), TARGETS)
    assert loss.dtype == torch.float32
    exact = head.next_token_loss(H, WEIGHT, TARGETS)
    assert exact.dtype == torch.float64 and abs(float(loss) - float(exact)) < 0.05


def test_the_soft_cap_bounds_logits_and_is_nearly_the_identity_below_it():
    logits = head.head_logits(30 * H, WEIGHT, 15.0)
    assert logits.abs().max() <= 15 and logits.abs().max() > 14
    torch.testing.assert_close(head.head_logits(1e-3 * H, WEIGHT, 15.0), 1e-3 * H @ WEIGHT.T, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.full((2, 7), -100), r"targets hold the number -100, and the vocabulary is 0 \.\. 10"),
        (torch.full((2, 7), 11), "targets hold the number 11"),
        (TARGETS[:, 1:], r"targets have shape \[2, 6\]; the tokens need \[2, 7\]"),
        (TARGETS.flatten(), r"targets have shape \[14\]; they need \[B, T\]"),
    ],
)
def test_wrong_targets_are_named(targets, message):
    with pytest.raises(ValueError, match=message):
        head.next_token_loss(H, WEIGHT, targets)


def test_a_compiled_loss_leaves_no_target_out_in_silence():
    compiled = torch.compile(head.next_token_loss, backend="aot_eager")
    assert float(compiled(H, WEIGHT, TARGETS)) == pytest.approx(float(head.next_token_loss(H, WEIGHT, TARGETS)))
    with pytest.raises(IndexError, match="-100 is out of bounds"):
        compiled(H, WEIGHT, torch.full((2, 7), -100))
