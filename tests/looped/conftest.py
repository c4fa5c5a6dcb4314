"""Small looped models with every weight drawn: as they start, output matrices are zero and hide what is wired where."""

import pytest
import torch

from depthlab.looped import LoopedConfig, LoopedTransformer

SMALL = {"n_layers": 2, "n_loops": 3, "d_model": 16, "n_heads": 2, "vocab_size": 32, "seq_len": 24}


@pytest.fixture
def looped():
    """looped(variant, dtype=.., start=.., **changes) -> a model; start=True leaves its own start values."""

    def build(variant="flt", seed=0, dtype=torch.float32, start=False, **changes):
        generator = torch.Generator().manual_seed(seed)
        model = LoopedTransformer(LoopedConfig(variant=variant, **SMALL | changes), generator)
        with torch.no_grad():
            for name, p in model.named_parameters() if not start else ():
                p.copy_(torch.randn(p.shape, generator=generator) * (1.0 if "embed" in name else 0.25))
        return model.to(dtype)

    return build


@pytest.fixture
def tokens():
    """Tokens [2, 13]: inputs [:, :-1], targets [:, 1:]."""
    return torch.randint(0, SMALL["vocab_size"], (2, 13), generator=torch.Generator().manual_seed(1))
