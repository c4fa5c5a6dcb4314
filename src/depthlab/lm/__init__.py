"""Language models over any residual scheme: their layers, training, evaluation and generation."""

from depthlab.lm.evaluation import Evaluation, evaluate
from depthlab.lm.flops import PEAK_BF16_TFLOPS, flops_per_token, mfu
from depthlab.lm.generation import generate
from depthlab.lm.gpt import GPT, GPTConfig
from depthlab.lm.llama import Llama, LlamaConfig
from depthlab.lm.llama_hf import load_hf, to_hf
from depthlab.lm.optimizers import build_optimizers

__all__ = [
    "GPT",
    "PEAK_BF16_TFLOPS",
    "Evaluation",
    "GPTConfig",
    "Llama",
    "LlamaConfig",
    "build_optimizers",
    "evaluate",
    "flops_per_token",
    "generate",
    "load_hf",
    "mfu",
    "to_hf",
]
