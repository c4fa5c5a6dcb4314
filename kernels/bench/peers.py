"""Other projects' public kernels for the same job, where they are installed; nothing here imports them before a use.

liger-mhc       Liger-Kernel's mHC (arXiv 2512.24880): coefficients, read and write of one sublayer. It reads the
                same n streams and update and writes the same n streams and read as `mix_and_pool`, so the same
                bytes are its floor; its read comes without the norm that ours includes.
liger-attnres   Liger-Kernel's AttnRes read (arXiv 2603.15031) over n sources: `attn_pool` with a key weight.
fla-attnres     flash-linear-attention's AttnRes read with its fused output norm.
"""

import importlib.util
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from depthlab.kernels.bench import cases
from depthlab.kernels.bench.cases import EPS, Case, Subject

_MODULES = {"liger": ("liger-kernel", "liger_kernel"), "fla": ("fla-core", "fla")}  # by a peer's first word


class PeerMissing(RuntimeError):
    """An optional peer is not installed."""


def missing(implementations: Iterable[str]) -> list[str]:
    """The packages of those peers among `implementations` that are not installed here."""
    asked = dict.fromkeys(_MODULES[name.split("-")[0]] for name in implementations if name in PEERS)
    return [package for package, module in asked if importlib.util.find_spec(module) is None]


def liger_mhc(case: Case) -> Subject:
    """Source: liger_kernel.transformers.mhc.LigerMHC, with the sublayer's output given."""
    try:
        from liger_kernel.transformers import functional as liger
    except ImportError:
        raise PeerMissing("liger-kernel is not installed") from None

    n, width = case.n_streams, case.width
    coefficients = n * n + 2 * n

    def inputs(generator: torch.Generator) -> tuple[Tensor, ...]:
        device = generator.device
        streams, update = cases.inputs(case, generator)[:2]
        phi = 0.02 * torch.randn(n * width, coefficients, generator=generator, device=device)
        alphas = [torch.ones((), device=device, requires_grad=True) for _ in range(3)]
        bias = torch.zeros(coefficients, device=device, requires_grad=True)
        return streams, update, phi.to(streams.dtype).requires_grad_(), bias, *alphas

    def step(x: Tensor, update: Tensor, phi: Tensor, bias: Tensor, *alphas: Tensor) -> tuple[Tensor, ...]:
        pre, post, mix = liger.liger_mhc_coeffs(x, phi, bias, *alphas, allow_fp32=x.dtype == torch.float32)
        return liger.liger_mhc_post_res(x, update, post, mix), liger.liger_mhc_pre(x, pre)

    return Subject(inputs, step, graded=2)


def liger_attnres(case: Case) -> Subject:
    """Source: liger_kernel.transformers.functional.liger_attn_res; its sources lie apart, [n, B, T, C]."""
    try:
        from liger_kernel.transformers import functional as liger
    except ImportError:
        raise PeerMissing("liger-kernel is not installed") from None

    def inputs(generator: torch.Generator) -> tuple[Tensor, ...]:
        streams, query = cases.inputs(case, generator)
        sources = streams.detach().view(case.n_streams, 1, case.tokens, case.width).requires_grad_()
        norm = torch.ones(case.width, device=query.device, dtype=sources.dtype, requires_grad=True)
        return sources, query.detach().to(sources.dtype).requires_grad_(), norm

    return Subject(inputs, lambda *x: (liger.liger_attn_res(*x, eps=EPS),), graded=1)


def fla_attnres(case: Case) -> Subject:
    """Source: fla.ops.attnres.fused_attnres; its sources are n tensors [T, C]."""
    try:
        from fla.ops.attnres import fused_attnres
    except ImportError:
        raise PeerMissing("flash-linear-attention's fla-core is not installed") from None

    def inputs(generator: torch.Generator) -> tuple[Tensor, ...]:
        streams, query = cases.inputs(case, generator)
        sources = streams.detach().view(case.n_streams, case.tokens, case.width).unbind(0)
        norms = [torch.ones(case.width, device=query.device, requires_grad=True) for _ in range(2)]
        return query, *norms, *(s.clone().requires_grad_() for s in sources)

    def step(query: Tensor, key_norm: Tensor, out_norm: Tensor, *sources: Tensor) -> tuple[Tensor, ...]:
        scale = case.width**-0.5
        return (fused_attnres(query, sources, key_norm, output_rms_weight=out_norm, rms_eps=EPS, scale=scale),)

    return Subject(inputs, step, graded=1)


PEERS: dict[str, Callable[[Case], Subject]] = {
    "liger-mhc": liger_mhc,
    "liger-attnres": liger_attnres,
    "fla-attnres": fla_attnres,
}
