"""Gradient norms through depth."""

from collections.abc import Iterable

import torch
from torch import nn

from depthlab.diagnostics.trace import Trace


def gradient_norms(modules: Iterable[nn.Module]) -> list[float]:
    """L2 norm of all parameter gradients of each module, after `backward`; one number a module, for example a sublayer.

    Raises:
        ValueError: a module has parameters but no gradient at all.
    """
    norms = []
    for index, module in enumerate(modules):
        parameters = list(module.parameters())
        squares = [p.grad.double().square().sum() for p in parameters if p.grad is not None]
        if parameters and not squares:
            raise ValueError(
                f"Module {index} has no gradient; call backward first, without zeroing gradients after it."
            )
        norms.append(sum(squares, torch.zeros(())).sqrt().item())
    return norms


def signal_gradient_norms(trace: Trace) -> dict[int, float]:
    """Sublayer -> L2 norm of the loss's gradient at its output, over all tokens.

    Raises:
        ValueError: the trace was recorded without ``gradients=True``, or `backward` has not run.
    """
    updates = {step.layer: step.update for step in trace.require().steps}
    missing = [layer for layer, update in updates.items() if update.grad is None]
    if missing:
        raise ValueError(
            f"Sublayer {missing[0]} has no gradient; use `record(residual, gradients=True)` and call backward first."
        )
    return {layer: update.grad.double().norm().item() for layer, update in updates.items()}
