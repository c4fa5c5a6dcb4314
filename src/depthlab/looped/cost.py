"""What a variant costs: parameters, and matrix work counted from the operations of a pass.

`depthlab runs make looped-cost`.
"""

from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from depthlab.looped.config import LoopedConfig
from depthlab.looped.model import LoopedTransformer
from depthlab.looped.wiring import VARIANTS
from depthlab.runs import Cell, Experiment, Result, grid


class Cost(NamedTuple):
    """Parameters, and FLOPs of matrix products (a multiplication and an addition count two) of one pass each way."""

    parameters: int
    forward_flops: int
    backward_flops: int


def cost(config: LoopedConfig, batch_size: int = 1, n_loops: int | None = None) -> Cost:
    """Counted on batch_size x seq_len tokens, attention over all positions."""
    from torch.utils.flop_counter import FlopCounterMode  # complains on import where triton is not installed

    model = LoopedTransformer(config, torch.Generator().manual_seed(0))
    tokens = torch.zeros(batch_size, config.seq_len, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH):  # plain matrix products, which the counter knows on every device
        with FlopCounterMode(display=False) as forward:
            loss = model.loss(tokens, tokens, n_loops)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    parameters = sum(p.numel() for p in model.parameters())
    return Cost(parameters, forward.get_total_flops(), backward.get_total_flops())


def looped_cost() -> Experiment:
    """FLT-7: parameters and matrix work of every variant at the size of the GPU record, on a few tokens, by loops."""
    config = {"preset": "small", "seq_len": 8, "n_loops": [1, 2, 4]}
    return Experiment("looped-cost", ("FLT-7",), config, grid(variant=list(VARIANTS)), run_cell)


def run_cell(cell: Cell, config: dict[str, Any]) -> list[Result]:
    """One variant beside LT: its counts, and what it has more than LT (`extra_*`), summed over the loop counts."""
    loops = config["n_loops"]
    shapes = [
        LoopedConfig.preset(config["preset"], variant=v, seq_len=config["seq_len"])
        for v in ("lt", cell.settings["variant"])
    ]
    lt, own = ([cost(shape, n_loops=n) for n in loops] for shape in shapes)
    metrics = {
        "parameters": own[0].parameters,
        "flops_per_loop": (own[-1].forward_flops - own[0].forward_flops) / (loops[-1] - loops[0]),
        "extra_parameters": sum(a.parameters - b.parameters for a, b in zip(own, lt, strict=True)),
        "extra_forward_flops": sum(abs(a.forward_flops - b.forward_flops) for a, b in zip(own, lt, strict=True)),
        "extra_backward_flops": sum(abs(a.backward_flops - b.backward_flops) for a, b in zip(own, lt, strict=True)),
    }
    return [Result(cell.settings["variant"], 0, metrics)]
