"""Seven ways to carry a signal through depth, behind one interface.

`build` makes a scheme, `Residual` says how it is used.
"""

from numbers import Integral
from typing import Any

from torch import nn

from depthlab.kernels.mgr import BACKENDS, MAX_STREAMS, resolve_backend
from depthlab.residuals.additive import PreNorm
from depthlab.residuals.attention import AttnRes, BlockAttnRes
from depthlab.residuals.base import Residual, State
from depthlab.residuals.hyper import HyperConnections, MHCLite
from depthlab.residuals.mgr import MultiGateResidual, RebuildingMultiGateResidual
from depthlab.residuals.rebuilt import RebuiltStreams, rebuild
from depthlab.residuals.recompute import LayerKept, Recompute, RecomputeReport

SCHEMES = ("prenorm", "hc", "mhc-lite", "attnres", "attnres-block", "mgr-independent", "mgr-competitive")

__all__ = [
    "SCHEMES",
    "AttnRes",
    "BlockAttnRes",
    "HyperConnections",
    "LayerKept",
    "MHCLite",
    "MultiGateResidual",
    "PreNorm",
    "RebuildingMultiGateResidual",
    "RebuiltStreams",
    "Recompute",
    "RecomputeReport",
    "Residual",
    "State",
    "build",
    "parameter_groups",
    "rebuild",
]


def build(
    scheme: str,
    d_model: int,
    n_sublayers: int,
    *,
    n_streams: int = 4,
    normalize: bool = True,
    backend: str = "auto",
    recompute: Recompute | None = None,
) -> Residual:
    """Make a residual scheme for `n_sublayers` sublayers (attention and MLP count one each) of width `d_model`.

    Args:
        scheme: "prenorm", "hc", "mhc-lite", "attnres", "attnres-block", "mgr-independent" or "mgr-competitive".
        n_streams: n of hc, mhc-lite (at most 5) and mgr (at most 16); the other three ignore it.
        normalize: True: what a sublayer reads comes RMS-normalised, so sublayers carry no norm of their own in front;
            False: the raw read (theory, tests).
        backend: of mgr's kernels: "auto" (Triton on GPUs that can run it), "torch", or "triton", which raises where it
            cannot run and for the schemes that have no kernels.
        recompute: of mgr: what to keep of the streams where the backward rebuilds the others; None stores them all.

    Returns:
        The scheme, float32, at its start values. Building draws no random numbers.

    Raises:
        ValueError: an unknown scheme or backend, a count out of range, mgr without a mixing layer, or a
            `recompute` with another scheme.
        TypeError: a count that is no integer, a `normalize` that is no bool, or a `recompute` that is no Recompute.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"scheme={scheme!r} is unknown; use one of {', '.join(SCHEMES)}.")
    for name, count in (("d_model", d_model), ("n_sublayers", n_sublayers), ("n_streams", n_streams)):
        if isinstance(count, bool) or not isinstance(count, Integral):
            raise TypeError(f"{name} must be an integer, got {type(count).__name__}.")
        if count < 1:
            raise ValueError(f"{name}={count} is not allowed; use at least 1.")
    if not isinstance(normalize, bool):
        raise TypeError(f"normalize must be True or False, got {type(normalize).__name__}.")
    d_model, n_sublayers, n_streams = int(d_model), int(n_sublayers), int(n_streams)
    if scheme.startswith("mgr") and n_streams > MAX_STREAMS:
        raise ValueError(f"n_streams={n_streams} is not allowed with {scheme!r}; use 1 to {MAX_STREAMS}.")
    if backend not in BACKENDS or scheme.startswith("mgr"):
        resolve_backend(backend)
    elif backend == "triton":
        raise ValueError(f"scheme={scheme!r} has no Triton kernels; use backend='auto' or 'torch'.")
    if recompute is not None and not scheme.startswith("mgr"):
        raise ValueError(f"scheme={scheme!r} keeps no streams to rebuild; use recompute=None, or an mgr scheme.")
    how: dict[str, Any] = {"normalize": normalize}
    match scheme:
        case "prenorm":
            return PreNorm(d_model, n_sublayers, **how)
        case "hc":
            return HyperConnections(d_model, n_sublayers, n_streams=n_streams, **how)
        case "mhc-lite":
            return MHCLite(d_model, n_sublayers, n_streams=n_streams, **how)
        case "attnres":
            return AttnRes(d_model, n_sublayers, **how)
        case "attnres-block":
            return BlockAttnRes(d_model, n_sublayers, **how)
    gate = scheme.removeprefix("mgr-")
    how |= {"n_streams": n_streams, "backend": backend, "recompute": recompute}
    kind = MultiGateResidual if recompute is None else RebuildingMultiGateResidual
    return kind(d_model, n_sublayers, gate=gate, **how)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups, ``[decayed, not decayed]``: every parameter that requires a gradient, in exactly one.

    Not decayed: all parameters of every `Residual` in `model` (decay opens a closed gate and closes an open query), and
    all with fewer than two dimensions (norm weights, biases). Each group is ``{"params": [..], "weight_decay": ..}``.
    """
    residual = {id(p) for module in model.modules() if isinstance(module, Residual) for p in module.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2 and id(p) not in residual]
    chosen = {id(p) for p in decayed}
    plain = [p for p in trained if id(p) not in chosen]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
