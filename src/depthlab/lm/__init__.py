"""Language models over any residual scheme: their layers, training, evaluation and generation."""

from depthlab.lm.gpt import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig"]
