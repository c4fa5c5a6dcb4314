"""Language models over any residual scheme: their layers, training, evaluation and generation."""

from depthlab.lm.checkpoint import CheckpointError
from depthlab.lm.evaluation import Evaluation, evaluate
from depthlab.lm.flops import PEAK_BF16_TFLOPS, flops_per_token, mfu
from depthlab.lm.generation import generate
from depthlab.lm.gpt import GPT, GPTConfig
from depthlab.lm.llama import Llama, LlamaConfig
from depthlab.lm.llama_hf import load_hf, to_hf
from depthlab.lm.optimizers import build_optimizers
from depthlab.lm.runlog import TrainingError
from depthlab.lm.sentry import NonFiniteError
from depthlab.lm.tokens import TokenFileError, Tokens, TokenStream, as_tokens, read_tokens, write_tokens
from depthlab.lm.training import TrainConfig, TrainResult, train

__all__ = [
    "CheckpointError",
    "Evaluation",
    "GPT",
    "GPTConfig",
    "Llama",
    "LlamaConfig",
    "NonFiniteError",
    "PEAK_BF16_TFLOPS",
    "TokenFileError",
    "TokenStream",
    "Tokens",
    "TrainConfig",
    "TrainResult",
    "TrainingError",
    "as_tokens",
    "build_optimizers",
    "evaluate",
    "flops_per_token",
    "generate",
    "load_hf",
    "mfu",
    "read_tokens",
    "to_hf",
    "train",
    "write_tokens",
]
