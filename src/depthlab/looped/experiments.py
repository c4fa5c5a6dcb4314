"""The recorded runs of looped transformers: where the plain one breaks, and what does not.

`depthlab runs make looped-instability`, `looped-rates`, `looped-low-rate` (GPU); `looped-toy`, `looped-toy-search`.
`looped_controls` and `looped_variants` (GPU) are not recorded yet; `depthlab.runs.make(looped_controls())` runs one.
"""

import math
import multiprocessing
import re
from typing import Any

import torch

from depthlab.lm import evaluate
from depthlab.lm.corpus import corpus
from depthlab.lm.steps import autocast
from depthlab.lm.tokens import Tokens, TokenStream
from depthlab.looped.config import LoopedConfig
from depthlab.looped.following import Followed, follow
from depthlab.looped.measures import oscillation, part_norms
from depthlab.looped.model import LoopedTransformer
from depthlab.runs import Cell, Curve, Experiment, Result, grid

SEEDS = [0, 1, 2]
CLAIMS = ("FLT-1", "FLT-2", "FLT-3", "FLT-6")
POINTS, PART_POINTS = 200, 50  # of a curve over steps, and of the gradient norm of one part of the model
FINAL_SHARE = 0.05  # of training, over which the final loss is a mean
PLATEAU_NATS = 0.4  # a run that ends less than this below the byte frequencies' entropy has learned nothing else
_GPU = {
    "data": "sotu",
    "n_layers": 6,
    "d_model": 384,
    "n_heads": 3,
    "seq_len": 512,
    "batch_size": 32,
    "steps": 1000,
    "optimizer": "flt",
    "validation_tokens": 2**18,
    "precision": "bfloat16",
    "compiled": True,
}
TOY_RATE = 2.0  # times the published rates
_TOY = {
    "data": "sotu",
    "n_heads": 2,
    "seq_len": 32,
    "batch_size": 4,
    "steps": 150,
    "optimizer": "flt",
    "precision": "float32",
    "compiled": False,
}
_SHAPE = ("n_layers", "n_loops", "d_model", "n_heads", "seq_len", "tied", "backprop_loops")


def looped_instability() -> Experiment:
    """LT and FLT at 12 and 6 loops."""
    cells = grid(variant=["lt", "flt"], n_loops=[12, 6], rate=[1.0], seed=SEEDS)
    return Experiment("looped-instability", CLAIMS, _GPU, cells, run_cell)


def looped_rates() -> Experiment:
    """LT and FLT at 12 loops and other rates, one seed: is LT's collapse a badly chosen rate?"""
    cells = grid(n_loops=[12], rate=[0.25, 0.5, 2.0], variant=["lt", "flt"], seed=[0])
    return Experiment("looped-rates", ("FLT-3", "FLT-6"), _GPU, cells, run_cell)


def looped_low_rate() -> Experiment:
    """LT and FLT at 12 loops and a quarter of the published rates, with as many seeds as at those."""
    cells = grid(n_loops=[12], rate=[0.25], variant=["lt", "flt"], seed=SEEDS)
    return Experiment("looped-low-rate", ("FLT-3", "FLT-6"), _GPU, cells, run_cell)


def looped_controls() -> Experiment:
    """LT at 12 loops with untied blocks, and with gradients through its last loops alone."""
    untied = grid(variant=["lt"], n_loops=[12], rate=[1.0], tied=[False], seed=SEEDS)
    truncated = grid(variant=["lt"], n_loops=[12], rate=[1.0], backprop_loops=[3], seed=SEEDS)
    return Experiment("looped-controls", ("FLT-3", "FLT-12"), _GPU, [*untied, *truncated], run_cell)


def looped_variants() -> Experiment:
    """The three variants between LT and FLT at 12 loops: which part of the cure does what."""
    cells = grid(variant=["lt-input", "lt-attn", "flt-res"], n_loops=[12], rate=[1.0], seed=SEEDS)
    return Experiment("looped-variants", ("FLT-4", "FLT-5"), _GPU, cells, run_cell)


def looped_toy() -> Experiment:
    """The same contrast on a CPU: LT and FLT by loops and by rates, controls, and the other variants.

    Size and rate are from `looped_toy_search`: of its settings the one in which LT's validation loss is furthest above
    FLT's. There LT with 12 loops learns no more than how common each byte is.
    """
    config = {**_TOY, "n_layers": 2, "d_model": 64, "validation_tokens": 2**14}
    loops = grid(variant=["lt", "flt"], n_loops=[1, 3, 6, 12], rate=[TOY_RATE], seed=SEEDS)
    rates = grid(variant=["lt", "flt"], n_loops=[12], rate=[0.25, 1.0], seed=SEEDS)
    untied = grid(variant=["lt"], n_loops=[12], rate=[TOY_RATE], tied=[False], seed=SEEDS)
    truncated = grid(variant=["lt"], n_loops=[12], rate=[TOY_RATE], backprop_loops=[3], seed=SEEDS)
    others = grid(variant=["lt-input", "lt-attn", "flt-res"], n_loops=[12], rate=[TOY_RATE], seed=SEEDS)
    cells = [*loops, *rates, *untied, *truncated, *others]
    return Experiment("looped-toy", CLAIMS, config, cells, run_cell)


def looped_toy_search() -> Experiment:
    """Where does LT break on a CPU and FLT does not? One seed, 12 loops; blocks, width, rate and variant."""
    config = {**_TOY, "n_loops": 12, "validation_tokens": 2**12, "curves": ["loss", "norms_end"]}
    cells = grid(n_layers=[1, 2], d_model=[32, 64], rate=[1.0, 2.0, 4.0], variant=["lt", "flt"], seed=[0])
    return Experiment("looped-toy-search", ("FLT-3",), config, cells, run_cell)


def run_cell(cell: Cell, config: dict[str, Any]) -> list[Result]:
    """One training run with everything that was followed in it."""
    chosen = {**config, **cell.settings, "searched": "n_layers" in cell.settings}
    seed, source = chosen["seed"], corpus(chosen["data"], "bytes")
    shape = {name: chosen[name] for name in _SHAPE if name in chosen}
    vocab_size = source.split("train").vocab_size
    torch.compiler.reset()
    model = LoopedTransformer(
        LoopedConfig(variant=chosen["variant"], vocab_size=vocab_size, **shape), torch.Generator().manual_seed(seed)
    ).to(device())
    stream = TokenStream(source.split("train"), chosen["batch_size"], chosen["seq_len"], seed)
    followed = follow(
        model,
        stream,
        chosen["steps"],
        optimizer=chosen["optimizer"],
        rate=chosen["rate"],
        precision=chosen["precision"],
        compiled=chosen["compiled"],
    )
    metrics = metrics_of(followed, byte_entropy(source.split("train")))
    metrics["val_loss"] = validation_loss(model, source.split("validation"), chosen)
    metrics["ms_per_step"] = followed.ms_per_step
    bad = [name for name, value in metrics.items() if not math.isfinite(value)]
    why = f"The loss or a gradient was not finite at step {followed.stopped}." if followed.stopped else ""
    if bad and not why:
        why = f"Its {bad[0]} was not finite."
    curves = curves_of(followed, model, chosen["steps"])
    kept = {name: curve for name, curve in curves.items() if name in chosen.get("curves", curves)}
    return [Result(variant(chosen), seed, metrics, kept, why)]


def variant(chosen: dict[str, Any]) -> str:
    """VARIANT/K=LOOPS/rate=FACTOR, the control's name, and /L=BLOCKS,C=WIDTH where a search varies them.

    `chosen`: a cell's settings, and its experiment's config.
    """
    name = f"{chosen['variant']}/K={chosen['n_loops']}/rate={chosen['rate']:g}"
    name += f"/L={chosen['n_layers']},C={chosen['d_model']}" if chosen["searched"] else ""
    name += "" if chosen.get("tied", True) else "/untied"
    return name + (f"/backprop={chosen['backprop_loops']}" if chosen.get("backprop_loops") else "")


def metrics_of(followed: Followed, entropy: float) -> dict[str, float]:
    """One run's numbers.

    loss: mean over the last 5 % of steps, nats. plateau: 1 where that is less than 0.4 nats below `byte_nats`, the
    entropy of the bytes' frequencies. oscillation, loss_oscillation: `measures.oscillation` of gradient norm and loss
    over all steps. norm_first, norm_last: the state's norm at the end of the first and last loop, mean over the last
    5 %; norm_growth their ratio. norm_peak: the largest over all loops and steps. gradient_peak, gradient_median.
    """
    losses, norms = followed.losses, torch.linalg.vector_norm(followed.gradient_norms, dim=-1)
    last = max(1, round(FINAL_SHARE * len(losses)))
    loss, loops = float(losses[-last:].mean()), followed.loop_norms[-last:].mean(0)
    sound = not followed.stopped
    return {
        "loss": loss,
        "byte_nats": entropy,
        "plateau": float(loss > entropy - PLATEAU_NATS),
        "oscillation": oscillation(norms) if sound else math.nan,
        "loss_oscillation": oscillation(losses) if sound else math.nan,
        "norm_first": float(loops[0]),
        "norm_last": float(loops[-1]),
        "norm_growth": float(loops[-1] / loops[0]),
        "norm_peak": float(followed.loop_norms.max()),
        "gradient_peak": float(norms.max()),
        "gradient_median": float(norms.median()),
    }


def curves_of(followed: Followed, model: LoopedTransformer, steps: int) -> dict[str, Curve]:
    """Over the run's `steps`: loss, gradient_norm and that of each part, norm_last; over loops: norms_early, .., _end.

    Over steps every k-th is kept. A run that stopped has shorter curves over the same steps.
    """
    curves = {}

    def keep(name: str, series: torch.Tensor, points: int) -> None:
        at = range(0, len(series), -(-steps // points))
        curves[name] = Curve([step + 1 for step in at], [float(series[step]) for step in at])

    keep("loss", followed.losses, POINTS)
    keep("norm_last", followed.loop_norms[:, -1], POINTS)
    keep("gradient_norm", torch.linalg.vector_norm(followed.gradient_norms, dim=-1), POINTS)
    for part, series in part_norms(followed.gradient_norms, model).items():
        keep(f"gradient_norm/{part.replace('.', '-')}", series, PART_POINTS)
    loops = list(range(1, followed.loop_norms.shape[1] + 1))
    for name, share in (("early", 0.1), ("middle", 0.5), ("end", 1.0)):
        row = followed.loop_norms[max(0, round(share * len(followed.losses)) - 1)]
        curves[f"norms_{name}"] = Curve(loops, row.tolist())
    return curves


def byte_entropy(tokens: Tokens) -> float:
    """Entropy in nats of the frequencies of `tokens`: the loss of a model that knows only how common each one is."""
    shares = torch.bincount(tokens.tensor(), minlength=tokens.vocab_size).double() / len(tokens)
    return float(torch.special.entr(shares).sum())


def validation_loss(model: LoopedTransformer, tokens: Tokens, chosen: dict[str, Any]) -> float:
    """Loss in nats of the first `validation_tokens` tokens at the trained loop count; NaN where it is not finite."""
    try:
        with autocast(next(model.parameters()).device, chosen["precision"]):
            how = {"batch_size": chosen["batch_size"], "max_tokens": chosen["validation_tokens"]}
            return evaluate(model, tokens.ids, **how).loss_nats
    except FloatingPointError:
        return math.nan


def device() -> torch.device:
    """A GPU where there is one, worker processes taking turns among several; else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = re.search(r"\d+$", multiprocessing.current_process().name)
    return torch.device("cuda", (int(number[0]) if number else 0) % torch.cuda.device_count())
