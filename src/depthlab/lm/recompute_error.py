"""How far gradients from rebuilt streams are from those of stored ones: the records recompute-error and -gpu.

One GPT with two sublayers a block, its gates at the start, opened at random, or trained; the same weights and the same
batch for every manner of keeping streams. The forward pass is equal, so that all differences are the rebuilding's.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from depthlab.diagnostics import record
from depthlab.lm.corpus import corpus
from depthlab.lm.gpt import GPT, GPTConfig
from depthlab.lm.optimizers import build_optimizers
from depthlab.lm.schedules import constant
from depthlab.lm.steps import autocast, gradients, to_device
from depthlab.lm.tokens import TokenStream
from depthlab.residuals import MultiGateResidual, RebuiltStreams, Recompute, rebuild
from depthlab.runs import Cell, Experiment, Result, grid

# parts of parameters' names -> the group whose error is given apart; the first that fits
GROUPS = {"w_gate": "gates", "bias": "biases", "w_pool": "queries", "sublayers": "sublayers", "embed": "embeddings"}
NOTICEABLE = 1e-2
SCHEMES = ["mgr-competitive", "mgr-independent"]
_CONFIG: dict[str, Any] = {
    "data": "sotu",
    "n_streams": 4,
    "precisions": ["float32", "bfloat16"],
    "top_p": [0.0, 0.01, 0.05, 0.1],
    "anchors": [None, 4, 8, "auto"],
    "top_p_with_anchors": [0.0, 0.05],
    "spread": 1.0,
    "lr": 3e-3,
    "warm_up": 20,
}


def recompute_error() -> Experiment:
    """Twelve to 72 sublayers of width 64 on a CPU, both gates, three seeds; trained ones for 100 steps."""
    config = _CONFIG | {
        "device": "cpu",
        "backend": "torch",
        "shape": {"vocab_size": 256, "seq_len": 64, "n_heads": 4, "d_model": 64},
        "batch_size": 2,
        "train_steps": 100,
        "train_batch_size": 4,
    }
    cells = grid(depth=[12, 24, 72], residual=SCHEMES, gates=["start", "-3", "-1", "0", "trained"], seed=[0, 1, 2])
    return Experiment("recompute-error", ("MGR-10",), config, cells, run_cell)


def recompute_error_gpu() -> Experiment:
    """The same with the kernels: 72 sublayers of width 256, trained for 300 steps."""
    config = _CONFIG | {
        "device": "cuda",
        "backend": "triton",
        "shape": {"vocab_size": 256, "seq_len": 256, "n_heads": 4, "d_model": 256},
        "batch_size": 16,
        "train_steps": 300,
        "train_batch_size": 16,
    }
    cells = grid(depth=[72], residual=SCHEMES, gates=["trained"], seed=[0, 1, 2])
    return Experiment("recompute-error-gpu", ("MGR-10",), config, cells, run_cell)


def run_cell(cell: Cell, config: dict[str, Any]) -> list[Result]:
    """Every manner, in every precision, on one network; a variant is DEPTH/RESIDUAL/GATES/PRECISION/top-P/anchors-K.

    DEPTH/RESIDUAL/GATES/PRECISION/stored says what to compare with: how far the stored streams' gradients are from
    those in the first precision, and how open the gates are.
    """
    chosen, seed = cell.settings, cell.settings["seed"]
    shape = config["shape"] | {"n_layers": chosen["depth"] // 2, "n_streams": config["n_streams"]}
    shape = GPTConfig(**shape, residual=chosen["residual"], backend=config["backend"])
    device = torch.device(config["device"])
    model = GPT(shape, Generator().manual_seed(seed)).to(device)
    if chosen["gates"] == "trained":
        train(model, seed, config)
    elif chosen["gates"] != "start":
        open_gates(model.residual, float(chosen["gates"]), config["spread"], Generator().manual_seed(seed))
    batch = TokenStream(corpus(config["data"]).split("validation"), config["batch_size"], shape.seq_len, seed)
    batch = to_device(batch.next_batch(), device)
    results, first = [], None
    for precision in config["precisions"]:
        where = f"{chosen['depth']}/{chosen['residual']}/{chosen['gates']}/{precision}"
        model.residual.recompute = None
        exact, _, _ = backward(model, batch, precision)
        first = first or exact
        stored = gradient_errors(exact, first) | gates_of(model, batch, precision)
        results.append(Result(f"{where}/stored", seed, stored))
        for top_p, anchors in manners(config):
            model.residual.recompute = Recompute(top_p=top_p, anchor_every=anchors)
            found, streams, true = backward(model, batch, precision)
            report = model.residual.recompute_report()
            metrics = {**gradient_errors(found, exact), **stream_errors(streams, true, model.residual.eps)}
            metrics |= {"predicted": report.predicted, "kept": report.share, "anchors": len(report.anchors)}
            bad = sorted(name for name, value in metrics.items() if not abs(value) < float("inf"))
            diverged = f"Errors grew beyond all numbers: {', '.join(bad)}." if bad else ""
            results.append(Result(f"{where}/top-{top_p:g}/anchors-{anchors}", seed, metrics, diverged=diverged))
    return results


def manners(config: dict[str, Any]) -> Iterator[tuple[float, int | str | None]]:
    """Every choice of anchors; every top_p without anchors, some with them."""
    for anchors in config["anchors"]:
        for top_p in config["top_p" if anchors is None else "top_p_with_anchors"]:
            yield top_p, anchors


def train(model: GPT, seed: int, config: dict[str, Any]) -> None:
    """Adam on the training text, in the last of the precisions, with stored streams."""
    tokens = corpus(config["data"]).split("train")
    stream = TokenStream(tokens, config["train_batch_size"], model.config.seq_len, seed)
    optimizers = build_optimizers(model, lr=config["lr"])
    compute = gradients(model, precision=config["precisions"][-1], clip=1.0)
    for step in range(config["train_steps"]):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * constant(step, config["train_steps"], config["warm_up"])
        compute([stream.next_batch()])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def open_gates(residual: MultiGateResidual, logit: float, spread: float, generator: Generator) -> None:
    """Gates whose logits have this mean and, over tokens and streams, about this spread; a forget logit turns its sign.

    Queries are drawn too, from N(0, 1).
    """
    for own in residual.residual_layers:
        own.w_pool.copy_(torch.randn(own.w_pool.shape, generator=generator))
        if own.bias is not None:
            own.bias.fill_(logit if residual.gate == "independent" else -logit)
            own.w_gate.copy_(spread * torch.randn(own.w_gate.shape, generator=generator))


def backward(
    model: GPT, batch: Tensor, precision: str
) -> tuple[dict[str, Tensor], list[RebuiltStreams], dict[int, Tensor]]:
    """Gradients by name of batch [B, T + 1]; the rebuilt streams, and the true ones by layer (with recompute)."""
    model.zero_grad(set_to_none=True)
    with record(model.residual, gradients=True) as trace, autocast(batch.device, precision):
        loss = model.loss(batch[:, :-1], batch[:, 1:])
    rebuilt = rebuild(trace.steps[-1].after) if model.residual.recompute else []
    true = {step.layer: step.before.stacked().detach() for step in trace.steps} if rebuilt else {}
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, rebuilt, true


def gradient_errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """norm(found - exact) / norm(exact): of all parameters together, of each group, and the worst single ones.

    worst_error: of the parameters whose gradient has at least `NOTICEABLE` of the RMS of all; worst_any_error: of all
    whose gradient is not zero. One that nearly vanishes is the difference of larger terms, and rounding is most of it,
    however streams are kept.
    """
    squares: dict[str, list[float]] = {}
    single = []
    for name, true in exact.items():
        error, size = (float(x.double().square().sum()) for x in (found[name] - true, true))
        for group in ("gradient_error", f"{group_of(name)}_error"):
            total = squares.setdefault(group, [0.0, 0.0])
            total[0] += error
            total[1] += size
        if size:
            single.append(((error / size) ** 0.5, (size / true.numel()) ** 0.5))
    rms = (squares["gradient_error"][1] / sum(true.numel() for true in exact.values())) ** 0.5
    return {group: (error / size) ** 0.5 if error else 0.0 for group, (error, size) in squares.items()} | {
        "worst_error": max(error for error, own in single if own >= NOTICEABLE * rms),
        "worst_any_error": max(error for error, _ in single),
    }


def group_of(name: str) -> str:
    """The group of `GROUPS` that a parameter belongs to."""
    return next(group for part, group in GROUPS.items() if part in name)


def stream_errors(rebuilt: list[RebuiltStreams], true: dict[int, Tensor], eps: float) -> dict[str, float]:
    """The largest relative error of a layer's stream and its largest relative bound, RMS over its rows' own; and the
    largest share of its bound that the error of a row came to. A row's size is what RMSNorm divides by, with `eps`."""
    worst = {"stream_error": 0.0, "bound": 0.0, "share_of_bound": 0.0}
    for one in rebuilt:
        t = true[one.layer].double()
        error, size = (x.square().mean(-1) for x in (one.streams.double() - t, t))  # [.., n]
        relative, bound = ((x / (size + eps)).flatten(0, -2).mean(0) for x in (error, one.bound.square()))  # [n]
        share = torch.where(error > 0, error.sqrt() / one.bound, 0)
        found = relative.max().sqrt(), bound.max().sqrt(), share.max()
        worst = {name: max(value, float(new)) for (name, value), new in zip(worst.items(), found, strict=True)}
    return worst


@torch.no_grad()
def gates_of(model: GPT, batch: Tensor, precision: str) -> dict[str, float]:
    """Mean and largest gate over all mixing layers, tokens and streams of batch [B, T + 1]."""
    residual = model.residual
    with record(residual) as trace, autocast(batch.device, precision):
        model.loss(batch[:, :-1], batch[:, 1:])
    mixing = [step for step in trace.steps if step.layer >= residual.first_mixing]
    gates = torch.stack([residual.write_weights(step.layer, step.before)[1] for step in mixing])
    return {"gate_mean": float(gates.mean()), "gate_max": float(gates.max())}
