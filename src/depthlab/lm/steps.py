"""The gradient of one update, in the precision and with the compilation that a run asks for; never waits for a GPU."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

PRECISIONS = ("float32", "bfloat16")


class Moved(NamedTuple):
    """One update's loss (mean over its batches) and gradient norm of each parameter [P], both still on the device."""

    loss: Tensor
    norms: Tensor

    @property
    def grad_norm(self) -> Tensor:
        """L2 norm over all parameters, before clipping."""
        return torch.linalg.vector_norm(self.norms)


def gradients(
    model: nn.Module, *, precision: str = "float32", clip: float = math.inf, compiled: bool = False
) -> Callable[[Sequence[Tensor]], Moved]:
    """A function that adds the clipped gradient of the mean loss over batches [B, T + 1] to the (zeroed) gradients."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    device = parameters[0].device
    loss_of = torch.compile(model.loss) if compiled else model.loss
    nothing = torch.zeros((), device=device)

    def compute(batches: Sequence[Tensor]) -> Moved:
        total = nothing
        for batch in batches:
            batch = to_device(batch, device)
            with autocast(device, precision):
                loss = loss_of(batch[:, :-1], batch[:, 1:]) / len(batches)
            loss.backward()
            total = total + loss.detach()
        found = iter(torch._foreach_norm([p.grad for p in parameters if p.grad is not None]))
        norms = torch.stack([nothing if p.grad is None else next(found).float() for p in parameters])
        if clip < math.inf:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip, torch.linalg.vector_norm(norms))
        return Moved(total, norms)

    return compute


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Autocast to bfloat16 on `device`, or nothing for "float32"."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")


def to_device(batch: Tensor, device: torch.device) -> Tensor:
    """`batch` on `device`; copied to a GPU without waiting for it."""
    if device.type == "cuda" and batch.device.type == "cpu":
        return batch.pin_memory().to(device, non_blocking=True)
    return batch.to(device)
