"""Language models over any residual scheme: their layers, training, evaluation and generation."""

from depthlab.lm.gpt import GPT, GPTConfig
from depthlab.lm.optimizers import build_optimizers

__all__ = ["GPT", "GPTConfig", "build_optimizers"]
