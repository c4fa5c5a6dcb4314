"""Watching for a loss or gradient that is not finite without waiting for the device at every step."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthlab.lm.runlog import TrainingError
from depthlab.residuals import Residual
from depthlab.runs import write_atomic


class NonFiniteError(TrainingError):
    """Training met a loss or gradient norm that is not finite; the message names the step and where the norms are."""


class Sentry:
    """Remembers, on the device, the first step whose loss or gradient norm was not finite, with all its norms."""

    def __init__(self, model: nn.Module) -> None:
        parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        device = parameters[0][1].device
        self.names = [name for name, _ in parameters]
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._loss = torch.zeros((), dtype=torch.float32, device=device)
        self._norms = torch.zeros(len(parameters), dtype=torch.float32, device=device)

    def watch(self, step: int, loss: Tensor, norms: Tensor) -> None:
        """Look at one step: its loss (a scalar) and the gradient norm of each parameter [P]. Never waits."""
        good = loss.isfinite() & norms.isfinite().all()
        first = ~good & (self._step == 0)
        self._step = torch.where(first, step, self._step)
        self._loss = torch.where(first, loss.float(), self._loss)
        self._norms = torch.where(first, norms, self._norms)

    def alarm(self) -> int:
        """The first bad step, 0 if there was none. Waits for the device."""
        return int(self._step)

    def report(self) -> dict[str, Any]:
        """{step, loss, gradient_norms: {module: L2 norm}} of the first bad step."""
        squares: dict[str, float] = {}
        for name, norm in zip(self.names, self._norms.double().tolist(), strict=True):
            module = name.rpartition(".")[0] or name
            squares[module] = squares.get(module, 0.0) + norm * norm
        norms = {module: math.sqrt(total) for module, total in squares.items()}
        return {"step": self.alarm(), "loss": float(self._loss), "gradient_norms": norms}


def non_finite_weight(model: nn.Module) -> str | None:
    """The name of the first parameter that is not finite; an update can overflow although its gradient did not."""
    named = list(model.named_parameters())
    sound = torch.stack([p.detach().sum().isfinite() for _, p in named]).tolist()  # one wait for the device
    suspects = [(name, p) for (name, p), good in zip(named, sound, strict=True) if not good]
    return next((name for name, p in suspects if not p.isfinite().all()), None)


@torch.no_grad()
def signal_norms(model: nn.Module, batch: Tensor) -> list[dict[str, Any]]:
    """What each sublayer reads and puts out on `batch` [B, T + 1], mean and largest norm over tokens.

    Empty for a model without a `Residual` named residual. It must still have the weights of the step in question.
    """
    if not isinstance(getattr(model, "residual", None), Residual):
        return []
    from depthlab import diagnostics  # here, because it loads pandas, and this is needed once in a bad run

    with diagnostics.record(model.residual) as trace:
        model.loss(batch[:, :-1], batch[:, 1:])
    rows = diagnostics.norms(trace)
    rows = rows[rows.signal != "stream"].sort_values(["layer", "signal"])  # a sublayer reads, then puts out
    return rows[["layer", "signal", "mean", "max"]].to_dict("records")


def first_bad_signals(model: nn.Module, batches: Sequence[Tensor]) -> list[dict[str, Any]]:
    """`signal_norms` of the first batch with one that is not finite; of the last batch where all are."""
    rows = []
    for batch in batches:
        rows = signal_norms(model, batch)
        if not all(math.isfinite(row["max"]) for row in rows):
            break
    return rows


def write_report(out_dir: Path, report: dict[str, Any]) -> Path:
    """Keep the norms beside the run; numbers that are not finite become text, which JSON can hold."""
    path = out_dir / f"nonfinite-step-{report['step']:06d}.json"
    write_atomic(path, json.dumps(_as_text(report), indent=1) + "\n")
    return path


def describe(report: dict[str, Any]) -> str:
    """Which norms stand out, in half a sentence."""
    norms = report["gradient_norms"]
    bad = [name for name, value in norms.items() if not math.isfinite(value)]
    words = f"{len(bad)} of {len(norms)} modules have a gradient norm that is not finite"
    if bad:
        words += f", {bad[0]} the first"
    elif norms:
        words = f"the largest gradient norm is that of {max(norms, key=norms.get)}"
    strange = [row for row in report.get("signals", []) if not math.isfinite(row["max"])]
    if strange:
        words += (
            f"; the first signal that is not finite is the {strange[0]['signal']} of sublayer {strange[0]['layer']}"
        )
    return words


def _as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
