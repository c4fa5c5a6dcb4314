"""What a training step costs in time and memory when streams are stored, rebuilt, or checkpointed: recompute-cost.

The ways take turns in one process on one model, so that the machine's state is the same for all.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils.checkpoint import checkpoint

from depthlab.lm.gpt import GPT, GPTConfig
from depthlab.lm.speed import Speed, training_speed
from depthlab.residuals import Recompute, RecomputeReport, State
from depthlab.runs import Cell, Experiment, Result

ID = "recompute-cost"
# name -> (the residual's `recompute`, whether blocks are checkpointed)
WAYS: dict[str, tuple[Recompute | None, bool]] = {
    "stored": (None, False),
    "rebuilt": (Recompute(), False),
    "checkpointed": (None, True),
}
_GIB = 2**30


class CheckpointedGPT(GPT):
    """GPT that can keep of each block only what goes in: torch.utils.checkpoint around attention, MLP and their steps.

    The state goes in and comes out, so that one state a block is kept; all that is inside is computed twice.
    """

    checkpoints_blocks = False

    def hidden(self, tokens: Tensor, skip: Iterable[int] = ()) -> Tensor:
        """As `GPT.hidden`; nothing can be left out of checkpointed blocks."""
        if not self.checkpoints_blocks:
            return super().hidden(tokens, skip)
        residual = self.residual

        def block(first: int, h: Tensor, state: State) -> tuple[Tensor, State]:
            for layer in (first, first + 1):
                h, state = residual.step(layer, self.sublayers[layer](h), state)
            return h, state

        h, state = residual.start(self.embed(tokens))
        for first in range(0, residual.n_sublayers, 2):
            h, state = checkpoint(block, first, h, state, use_reentrant=False)
        return h


def recompute_cost() -> Experiment:
    """S, M and L on one H200 with 4 and 8 streams, batches of 16 x 1024, eager; M also compiled, and with 32 x 1024.

    With 16 sequences the host is about as slow as the device, which a compiler does not change; with 32 the device
    decides alone.
    """
    config = {
        "device": "cuda",
        "precision": "bfloat16",
        "residual": "mgr-competitive",
        "backend": "triton",
        "warm_up": 1,
        "steps": 5,
        "rounds": 3,
        "changes": {},
    }
    one = {"preset": "M", "n_streams": 4, "batch_size": 16, "compiled": False}
    settings = [one, one | {"compiled": True}, one | {"batch_size": 32}]
    settings += [one | {"preset": p, "n_streams": n} for n in (4, 8) for p in "SML" if (p, n) != ("M", 4)]
    return Experiment(ID, ("MGR-10",), config, [Cell(name_of(one), one) for one in settings], run_cell)


def name_of(settings: dict[str, Any]) -> str:
    """PRESET/n-N/batch-SIZE/eager or compiled."""
    how = "compiled" if settings["compiled"] else "eager"
    return f"{settings['preset']}/n-{settings['n_streams']}/batch-{settings['batch_size']}/{how}"


def run_cell(cell: Cell, config: dict[str, Any]) -> list[Result]:
    """All ways of one setting, in turns; a variant is `name_of`/WAY, and the seed counts the rounds.

    Metrics: those of `Speed`; time_ratio and memory_ratio, to the stored way of the same round; of the ways that the
    report knows about, streams_gib, kept (over all streams) and kept_with_updates (sublayers' outputs on both sides).
    What does not fit in memory is recorded so.
    """
    chosen = cell.settings
    shape = GPTConfig.preset(
        chosen["preset"],
        residual=config["residual"],
        n_streams=chosen["n_streams"],
        backend=config["backend"],
        **config["changes"],
    )
    torch.compiler.reset()
    with torch.device(config["device"]):
        model = CheckpointedGPT(shape, Generator(config["device"]).manual_seed(0))
    if chosen["compiled"]:
        for sublayer in model.sublayers:
            sublayer.compile()
    how = {"batch_size": chosen["batch_size"], "precision": config["precision"]}
    for way in WAYS:
        measure(model, way, steps=1, warm_up=1, **how)  # kernels are compiled
    results = []
    for turn in range(config["rounds"]):
        speeds = {way: measure(model, way, steps=config["steps"], warm_up=config["warm_up"], **how) for way in WAYS}
        report = model.residual.recompute_report()
        results += [_result(f"{name_of(chosen)}/{way}", turn, way, speeds, report) for way in WAYS]
    return results


def measure(model: CheckpointedGPT, way: str, **how: Any) -> Speed | None:
    """`training_speed` one way; None where it does not fit in memory."""
    model.residual.recompute, model.checkpoints_blocks = WAYS[way]
    model.zero_grad(set_to_none=True)
    try:
        return training_speed(model, **how)
    except torch.OutOfMemoryError:
        return None


def _result(variant: str, turn: int, way: str, speeds: dict[str, Speed | None], report: RecomputeReport) -> Result:
    speed, stored = speeds[way], speeds["stored"]
    if speed is None or stored is None:
        nothing = dict.fromkeys(Speed._fields, float("nan")) if speed is None else speed._asdict()
        return Result(variant, turn, nothing, diverged="This way, or storing, does not fit in the device's memory.")
    metrics = speed._asdict() | {"time_ratio": speed.ms_per_step / stored.ms_per_step}
    if stored.memory_gib:
        metrics["memory_ratio"] = speed.memory_gib / stored.memory_gib
    kept = {"stored": report.all_bytes, "rebuilt": report.kept_bytes}.get(way)
    if kept is not None:
        metrics["streams_gib"] = kept / _GIB
        metrics["kept"] = kept / report.all_bytes
        metrics["kept_with_updates"] = (kept + report.update_bytes) / (report.all_bytes + report.update_bytes)
    return Result(variant, turn, metrics)
