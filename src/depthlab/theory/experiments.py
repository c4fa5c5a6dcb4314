"""The theory's two records: a search that never beats the norm bound, and the streams that the gate bias gives.

`depthlab runs make norm-bound`, `depthlab runs make gate-bias`.
"""

from typing import Any

import torch

from depthlab.runs import Cell, Curve, Experiment, Result, grid
from depthlab.theory.gate_bias import GATES, additive_increment, carry_weight, gate_bias, initial_gate, stream_variance
from depthlab.theory.norm_bound import rounding_term
from depthlab.theory.search import SCHEMES, gradient_ascent, random_rounding, random_search, rounding_ratchet
from depthlab.theory.simulate import simulate

SEEDS = [0, 1, 2]
_FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # storage; arithmetic is float32


def norm_bound() -> Experiment:
    """MGR-1 and MGR-2: how far random search, gradient ascent and hostile rounding get, scheme by scheme."""
    config = {
        "n_layers": 24, "n_streams": 4, "width": 16, "tries": 2000, "steps": 200, "restarts": 32,
        "rounding_layers": 381, "open_gate": 0.047,
    }  # fmt: skip
    cells = grid(scheme=list(SCHEMES), seed=SEEDS) + grid(storage=list(_FORMATS), seed=SEEDS)
    return Experiment("norm-bound", ("MGR-1", "MGR-2"), config, cells, run_norm_bound)


def run_norm_bound(cell: Cell, config: dict[str, Any]) -> list[Result]:
    """One scheme's search, or one storage format's rounding."""
    generator = torch.Generator().manual_seed(cell.settings["seed"])
    if "storage" in cell.settings:
        return [_rounding(cell.settings["storage"], cell.settings["seed"], config, generator)]
    scheme, n, width = cell.settings["scheme"], config["n_streams"], config["width"]
    depth = config["n_layers"]
    ascent = gradient_ascent(scheme, config["steps"], config["restarts"], depth, n, width, generator).amax(1)
    metrics = {
        "depth_random": random_search(scheme, config["tries"], depth, n, width, generator).max().item(),
        "depth_ascent": ascent.max().item(),
    }
    if not scheme.startswith("attnres"):  # AttnRes reads from all layers at once; it has no single layer
        streams = 1 if scheme.startswith("mgr") else n  # one old stream and one update
        metrics["layer_random"] = random_search(scheme, config["tries"], 1, streams, width, generator).max().item()
        climbed = gradient_ascent(scheme, config["steps"], config["restarts"], 1, streams, width, generator)
        metrics["layer_ascent"] = climbed.max().item()
    steps = list(range(0, config["steps"] + 1, 2))
    curve = Curve([float(s) for s in steps], ascent[steps].tolist())
    return [Result(scheme, cell.settings["seed"], metrics, {"ascent": curve})]


def _rounding(name: str, seed: int, config: dict[str, Any], generator: torch.Generator) -> Result:
    """Largest (ratio - 1) / rounding_term over all depths up to `rounding_layers`: above 1 would break the bound."""
    arithmetic, storage, depth = torch.float32, _FORMATS[name], config["rounding_layers"]
    open_gate = config["open_gate"]

    def share(ratios: list[float], min_gate: float = 0.0) -> float:
        terms = [rounding_term(layer, arithmetic, storage, min_gate) for layer in range(1, depth + 1)]
        return max((ratio - 1) / term for ratio, term in zip(ratios, terms, strict=True))

    chains = random_rounding(depth, arithmetic, storage, config["tries"], config["width"], generator).tolist()
    closed, opened = (rounding_ratchet(depth, arithmetic, storage, g) for g in (0.0, open_gate))
    metrics = {
        "random_share": share(chains),
        "ratchet_share": share(closed),
        "ratchet_open_share": share(opened, open_gate),
        "ratchet_excess": closed[-1] - 1,
        "ratchet_open_excess": opened[-1] - 1,
    }
    return Result(f"rounding-{name}", seed, metrics)


def gate_bias_over_depth() -> Experiment:
    """MGR-3: additive increment, weight left on x_0 and variance of a stream over depth, for three gate rules."""
    config = {
        "depths": [6, 9, 12, 21, 33, 45, 69, 96, 141, 192, 285, 381, 384], "n_streams": 4, "samples": 20_000,
    }  # fmt: skip
    return Experiment("gate-bias", ("MGR-3",), config, grid(rule=[*GATES, "one-over-depth"], seed=SEEDS), run_gate_rule)


def run_gate_rule(cell: Cell, config: dict[str, Any]) -> list[Result]:
    """All depths with one gate rule: measured moments beside the closed forms."""
    generator = torch.Generator().manual_seed(cell.settings["seed"])
    n, rule = config["n_streams"], cell.settings["rule"]
    rows = []
    for depth in config["depths"]:
        gates = initial_gates(rule, n, depth)
        seen, g = simulate(gates, depth, config["samples"], generator), gates[0].item()
        measured = (seen.increment, seen.carry[0].item(), seen.variance[0].item(), seen.distance)
        exact = (additive_increment(g, depth), carry_weight(g, depth), stream_variance(g, depth))
        rows.append((measured, exact))
    depths = [float(d) for d in config["depths"]]
    names = ("increment", "carry", "variance", "distance")
    curves = {name: [measured[i] for measured, _ in rows] for i, name in enumerate(names)}
    metrics = {
        "increment_ratio": curves["increment"][-1] / curves["increment"][0],
        "carry_ratio": curves["carry"][-1] / curves["carry"][0],
        "variance_ratio": curves["variance"][-1] / curves["variance"][0],
        # Absolute: the noise of a mean over `samples` channels does not shrink with the quantity.
        "worst_gap": max(abs(m - e) for measured, exact in rows for m, e in zip(measured, exact, strict=False)),
    }
    for depth in (6, 21, 381):
        row = config["depths"].index(depth)
        metrics |= {f"{name}_{depth}": curves[name][row] for name in names[:3]}
    return [Result(rule, cell.settings["seed"], metrics, {k: Curve(depths, v) for k, v in curves.items()})]


def initial_gates(rule: str, n_streams: int, n_layers: int) -> torch.Tensor:
    """[n] gates at zero weights, float64: from `gate_bias` through torch's own gates, or c / L for "one-over-depth".

    c makes the last rule agree with the others at 21 mixing layers.
    """
    if rule == "one-over-depth":
        c = 21 * initial_gate("independent", n_streams, -3.0)
        return torch.full((n_streams,), c / n_layers, dtype=torch.float64)
    bias = torch.tensor([gate_bias(rule, n_streams, n_layers)], dtype=torch.float64)
    zeros = torch.zeros(n_streams, dtype=torch.float64)
    return torch.sigmoid(zeros + bias) if rule == "independent" else torch.softmax(torch.cat([bias, zeros]), 0)[1:]
