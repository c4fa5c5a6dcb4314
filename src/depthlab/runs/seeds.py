"""One seed for everything that draws random numbers."""

import random
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def seed_everything(seed: int) -> "torch.Generator":
    """Seed Python, NumPy and torch, and return a CPU generator with the same seed to pass down.

    Pass the generator on; the global seeding only guards against libraries that draw from global state.

    Raises:
        TypeError: `seed` is not an int. ValueError: it is negative or 2**32 or more (NumPy's range).
    """
    import torch  # here, so that reading records does not wait for torch

    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed_everything got {seed!r}; give a whole number from 0 to 2**32 - 1.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed_everything got {seed}; give a whole number from 0 to 2**32 - 1.")
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global stream is what other libraries use
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)
