"""What a benchmark needs of the machine."""

import importlib.util

import torch


class BenchUnavailable(RuntimeError):
    """The benchmark cannot run on this machine; the message says what is missing."""


def missing() -> str | None:
    """One sentence that says what keeps the benchmark from running here, or None."""
    lacks = []
    if not torch.cuda.is_available():
        lacks.append("a CUDA device that torch sees")
    if importlib.util.find_spec("triton") is None:
        lacks.append("triton")
    if not lacks:
        return None
    return f"The benchmark needs {' and '.join(lacks)}; run it on a machine with an NVIDIA GPU and triton installed."


def require() -> None:
    """Raise BenchUnavailable unless the benchmark can run here."""
    sentence = missing()
    if sentence:
        raise BenchUnavailable(sentence)
