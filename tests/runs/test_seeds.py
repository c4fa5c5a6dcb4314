"""One seed fixes Python, NumPy, torch and the generator that is passed down."""

import random

import numpy as np
import pytest
import torch

from depthlab.runs import seed_everything


def draws(seed: int) -> list[float]:
    generator = seed_everything(seed)
    return [
        random.random(),
        float(np.random.rand()),  # noqa: NPY002 - the global stream is what is tested
        torch.rand(()).item(),
        torch.rand((), generator=generator).item(),
    ]


def test_the_same_seed_gives_the_same_draws_and_another_seed_others() -> None:
    first, again, other = draws(7), draws(7), draws(8)
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_the_generator_does_not_follow_the_global_stream() -> None:
    generator = seed_everything(0)
    torch.rand(10)
    assert torch.equal(torch.rand(3, generator=generator), torch.rand(3, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("seed", "error"), [(-1, ValueError), (2**32, ValueError), (1.0, TypeError), (True, TypeError)]
)
def test_seeds_outside_the_range_are_refused(seed: object, error: type) -> None:
    with pytest.raises(error, match="whole number from 0"):
        seed_everything(seed)
