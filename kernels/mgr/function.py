"""Checks, dispatch and the public functions of Multi-Gate Residuals.

Whatever can be wrong with a call is found before any arithmetic and named in one sentence: what was given, what is
allowed, what to do. `reference.py` computes in plain torch, `ops.py` launches the kernels.
"""

import math
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from numbers import Real
from typing import Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from depthlab.kernels.mgr import ops, reference
from depthlab.theory import GATES

BACKENDS = ("auto", "torch", "triton")
MAX_STREAMS = 16
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TRITON_INSTALLED = find_spec("triton") is not None
MAX_TRITON_WIDTH = 8192
TRITON_CAPABILITY = (8, 0)  # the oldest GPUs with bfloat16

Gate = Literal["independent", "competitive"]
Backend = Literal["auto", "torch", "triton"]


class BackendUnavailable(ValueError):
    """The backend that was asked for cannot run here; the message says what is missing."""


def resolve_backend(backend: Backend, *tensors: Tensor) -> Literal["torch", "triton"]:
    """The backend that will run on these tensors, the streams first.

    "auto" is Triton for CUDA tensors of float16, bfloat16 and float32 up to C = 8192, where triton is installed and the
    GPU has compute capability 8.0; torch for everything else. Without tensors: what could run here at all.

    Raises:
        BackendUnavailable: "triton", with what is missing.
        ValueError: an unknown name.
    """
    _check_backend(backend)
    if backend == "torch" or (backend == "auto" and not (tensors and tensors[0].is_cuda)):
        return "torch"
    problem = _triton_problem(tensors)
    if problem and backend == "triton":
        raise BackendUnavailable(f"backend='triton' cannot run: {problem}; use 'auto' or 'torch'.")
    return "torch" if problem else "triton"


def _triton_problem(tensors: tuple[Tensor, ...]) -> str:
    for x in tensors:
        if x.dtype == torch.float64:
            return "a float64 tensor was given and the kernels take float16, bfloat16 and float32"
    if tensors and tensors[0].shape[-1] > MAX_TRITON_WIDTH:
        return f"streams have C={tensors[0].shape[-1]} and the kernels take 1 to {MAX_TRITON_WIDTH}"
    device = tensors[0].device if tensors else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return _device_problem(device.type, device.index)


def _device_problem(kind: str, index: int | None) -> str:
    if not TRITON_INSTALLED:
        return "the triton package is not installed (Linux on x86-64: pip install triton)"
    if kind == "cuda":
        gpu = torch.cuda.get_device_properties(index)
        needed = "this GPU has compute capability {}.{} and the kernels need {}.{}"
        old = (gpu.major, gpu.minor) < TRITON_CAPABILITY
        return needed.format(gpu.major, gpu.minor, *TRITON_CAPABILITY) if old else ""
    if kind == "cpu" and ops.INTERPRETED:
        return _interpreter_problem()
    where = "there is no CUDA GPU here" if not torch.cuda.is_available() else f"the streams are on {kind}"
    return f"{where} (TRITON_INTERPRET=1, set before Python starts, interprets the kernels on the CPU, slowly)"


@lru_cache
def _interpreter_problem() -> str:
    """A loop's bounds are arrays of one element there; numpy 2.5 makes no number of one, Triton 3.7 asks it no more."""
    numpy, triton = version("numpy"), version("triton")
    if _major_minor(numpy) < (2, 5) or _major_minor(triton) >= (3, 7):
        return ""
    return f"Triton {triton} cannot interpret kernels with numpy {numpy} (install numpy below 2.5)"


def _major_minor(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".")[:2])


def _is_transformed(x: Tensor) -> bool:
    """Whether a derivative is taken that torch would leave out in silence, or refuse with a sentence about itself."""
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        return True
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_gradtrackingtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def _fused(kind: str, streams: Tensor, update, w_gate, bias, w_pool: Tensor, normalize: bool, eps: float):
    tensors = [x for x in (streams, update, w_gate, bias, w_pool) if x is not None]
    if not torch.compiler.is_compiling() and any(map(_is_transformed, tensors)):
        raise RuntimeError(
            "The fused kernels have gradients by backward() and autograd.grad, and vmap, but no forward mode and no "
            "other function transform; use backend='torch' for those."
        )
    return ops.run(streams, update, w_gate, bias, w_pool, kind, normalize, float(eps))


def mix_and_pool(
    streams: Tensor,
    update: Tensor,
    w_gate: Tensor,
    bias: Tensor,
    w_pool: Tensor,
    *,
    gate: Gate,
    normalize: bool = False,
    eps: float = 1e-6,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """One mixing layer: move every stream towards the update by its gate, then pool what the next sublayer reads.

    Args:
        streams: [.., n, C], n = 1 .. 16, C >= 1, any leading dimensions; float16, bfloat16, float32 or float64. As for
            torch's own RMSNorm, squares must stay finite: values up to 1e18 in float32 and bfloat16.
        update: [.., C], the sublayer's output F.
        w_gate: [C], the gate's query.
        bias: [n] for "independent" gates, [1] (the forget logit) for "competitive" ones.
        w_pool: [C], the next read's query. Not used when n = 1, where the read is the stream itself.
        gate: "independent" or "competitive".
        normalize: also RMS-normalise (without a weight) the pooled output.
        eps: added to the mean square inside every root; a finite number of at least 1.2e-38.
        backend: "auto" (Triton on CUDA tensors that it takes, see `resolve_backend`; torch elsewhere), "torch", or
            "triton", which raises where it cannot run. Triton's gradients can be taken once, not twice.

    Returns:
        ``(streams [.., n, C], pooled [.., C], beta [.., n])``. Streams and pooled are stored in the update's dtype,
        also under autocast; beta keeps the dtype of the arithmetic: float32, or float64 if any input is float64. The
        gates' end points are exact: beta = 0 returns the stream and beta = 1 the update.

    Raises:
        TypeError: an argument is no tensor, or of a dtype that is not listed above.
        ValueError: a shape, device, gate, eps or backend that does not fit (BackendUnavailable for the backend).

    Source: arXiv 2605.23259; equations (1) to (8) of DERIVATION.md.
    """
    check_mixing(streams, update, w_gate, bias, w_pool, gate, normalize, eps, backend)
    if resolve_backend(backend, streams, update, w_gate, bias, w_pool) == "triton":
        return _fused(gate, streams, update, w_gate, bias, w_pool, normalize, eps)[:3]
    return reference.mix_and_pool(streams, update, w_gate, bias, w_pool, gate=gate, normalize=normalize, eps=eps)


def append_and_pool(
    streams: Tensor,
    update: Tensor,
    w_pool: Tensor,
    *,
    normalize: bool = False,
    eps: float = 1e-6,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """One accumulation layer: the update becomes a new stream, without a gate; then pool what the next sublayer reads.

    Args:
        streams: [.., n, C] with n = 1 .. 15; update, w_pool, normalize, eps, backend: as in `mix_and_pool`.

    Returns:
        ``(streams [.., n+1, C], pooled [.., C])``, both stored in the update's dtype; the read uses unrounded values.

    Raises:
        TypeError, ValueError, BackendUnavailable: as in `mix_and_pool`.

    Source: arXiv 2605.23259; equations (1) and (5) to (8) of DERIVATION.md.
    """
    _check_backend(backend)
    n, width = _check_streams(streams)
    if n == MAX_STREAMS:
        raise ValueError(f"append_and_pool got {n} streams, the most a token can have; mix instead.")
    _check_update(update, streams)
    _check_vector("w_pool", w_pool, width, "C", streams)
    _check_options(normalize, eps)
    if resolve_backend(backend, streams, update, w_pool) == "triton":
        return _fused("append", streams, update, None, None, w_pool, normalize, eps)[:2]
    return reference.append_and_pool(streams, update, w_pool, normalize=normalize, eps=eps)


def attn_pool(
    streams: Tensor, w_pool: Tensor, *, normalize: bool = False, eps: float = 1e-6, backend: Backend = "auto"
) -> Tensor:
    """The read alone: a softmax over the streams' scores weighs the streams themselves.

    Args:
        streams: [.., n, C]; w_pool: [C]; normalize, eps, backend: as in `mix_and_pool`.

    Returns:
        pooled [.., C] in the streams' dtype.

    Raises:
        TypeError, ValueError, BackendUnavailable: as in `mix_and_pool`.

    Source: arXiv 2605.23259; equations (1) and (5) to (8) of DERIVATION.md.
    """
    _check_backend(backend)
    _, width = _check_streams(streams)
    _check_vector("w_pool", w_pool, width, "C", streams)
    _check_options(normalize, eps)
    if resolve_backend(backend, streams, w_pool) == "triton":
        return _fused("read", streams, None, None, None, w_pool, normalize, eps)[1]
    return reference.attn_pool(streams, w_pool, normalize=normalize, eps=eps)


def check_mixing(
    streams: Tensor,
    update: Tensor,
    w_gate: Tensor,
    bias: Tensor,
    w_pool: Tensor,
    gate: str,
    normalize: bool,
    eps: float,
    backend: str,
) -> None:
    """TypeError or ValueError in one sentence unless `mix_and_pool` takes these arguments."""
    _check_backend(backend)
    if gate not in GATES:
        raise ValueError(f"gate={gate!r} is unknown; use {' or '.join(map(repr, GATES))}.")
    n, width = _check_streams(streams)
    _check_update(update, streams)
    _check_vector("w_gate", w_gate, width, "C", streams)
    _check_vector("w_pool", w_pool, width, "C", streams)
    if gate == "independent":
        _check_vector("bias", bias, n, "n, one bias a stream for independent gates", streams)
    else:
        _check_vector("bias", bias, 1, "the one forget logit of competitive gates", streams)
    _check_options(normalize, eps)


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; use one of {', '.join(map(repr, BACKENDS))}.")


def _check_options(normalize: bool, eps: float) -> None:
    if not isinstance(normalize, bool):
        raise TypeError(f"normalize must be True or False, got {type(normalize).__name__}.")
    if isinstance(eps, bool) or not isinstance(eps, Real):
        raise TypeError(f"eps must be a number, got {type(eps).__name__}; the default is 1e-6.")
    smallest = torch.finfo(torch.float32).tiny  # below it float32 rounds eps to 0, and an all-zero stream reads as NaN
    if not smallest <= eps < math.inf:
        raise ValueError(f"eps={eps!r} is not a finite number of at least {smallest:.2g}; the default is 1e-6.")


def check_tensor(name: str, x: Tensor) -> None:
    """TypeError in one sentence unless `x` is a dense tensor of float16, bfloat16, float32 or float64."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}; convert it first.")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}; use one of {', '.join(str(d)[6:] for d in DTYPES)}.")
    if x.is_nested:
        raise TypeError(f"{name} is a nested tensor; pad it first.")
    if x.layout != torch.strided:
        raise TypeError(f"{name} has layout {x.layout}; make it dense first.")


def _check_streams(streams: Tensor) -> tuple[int, int]:
    check_tensor("streams", streams)
    if streams.ndim < 2:
        raise ValueError(f"streams has shape {list(streams.shape)}; it needs [.., n, C], so at least two dimensions.")
    n, width = streams.shape[-2:]
    if not 1 <= n <= MAX_STREAMS:
        raise ValueError(f"streams has shape {list(streams.shape)}, so n={n}; a token has 1 to {MAX_STREAMS} streams.")
    if width < 1:
        raise ValueError(f"streams has shape {list(streams.shape)}, so C={width}; a stream is at least 1 wide.")
    return n, width


def _check_update(update: Tensor, streams: Tensor) -> None:
    check_tensor("update", update)
    expected = [*streams.shape[:-2], streams.shape[-1]]
    if list(update.shape) != expected:
        raise ValueError(
            f"update has shape {list(update.shape)}; streams of shape {list(streams.shape)} need {expected}, without n."
        )
    _check_device("update", update, streams)


def _check_vector(name: str, x: Tensor, size: int, meaning: str, streams: Tensor) -> None:
    check_tensor(name, x)
    if list(x.shape) != [size]:
        raise ValueError(f"{name} has shape {list(x.shape)}; it needs [{size}] ({meaning}).")
    _check_device(name, x, streams)


def _check_device(name: str, x: Tensor, streams: Tensor) -> None:
    if x.device != streams.device:
        raise ValueError(f"{name} is on {x.device} and streams on {streams.device}; move them to one device.")
