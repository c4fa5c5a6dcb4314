"""Language models over any residual scheme: their layers, training, evaluation and generation."""

from depthlab.lm.evaluation import Evaluation, evaluate
from depthlab.lm.flops import flops_per_token, mfu
from depthlab.lm.generation import generate
from depthlab.lm.gpt import GPT, GPTConfig
from depthlab.lm.optimizers import build_optimizers

__all__ = ["GPT", "Evaluation", "GPTConfig", "build_optimizers", "evaluate", "flops_per_token", "generate", "mfu"]
