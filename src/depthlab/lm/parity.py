"""Whether MGR trains alike with its kernels and with the plain torch they stand for: the record lm-parity.

Both start from the same weights and read the same batches, so that only rounding tells them apart; rounding grows over
training as any small change does. Other seeds show how much a change of start and order moves the loss.
"""

from typing import Any

import torch

from depthlab.lm.corpus import corpus
from depthlab.lm.evaluation import evaluate
from depthlab.lm.gpt import GPT, GPTConfig
from depthlab.lm.optimizers import build_optimizers
from depthlab.lm.schedules import constant
from depthlab.lm.steps import autocast, gradients
from depthlab.lm.tokens import TokenStream
from depthlab.runs import Cell, Curve, Experiment, Result, grid
from depthlab.runs.record import MAX_CURVE_POINTS

ID = "lm-parity"


def lm_parity() -> Experiment:
    """GPT toy on the bundled text, 200 steps, both gates, both backends, eight seeds."""
    config = {
        "device": "cuda",
        "preset": "toy",
        "changes": {},
        "data": "sotu",
        "precision": "bfloat16",
        "backends": ["torch", "triton"],
        "steps": 200,
        "warm_up": 20,
        "batch_size": 64,
        "lr": 3e-3,
        "last": 20,
        "validation_tokens": 65_536,
    }
    cells = grid(residual=["mgr-independent", "mgr-competitive"], seed=list(range(8)))
    return Experiment(ID, ("MGR-9", "MGR-11"), config, cells, run_cell)


def run_cell(cell: Cell, config: dict[str, Any]) -> list[Result]:
    """One gate and seed with each backend; a variant is RESIDUAL/BACKEND."""
    residual, seed = cell.settings["residual"], cell.settings["seed"]
    return [train_once(residual, backend, seed, config) for backend in config["backends"]]


def train_once(residual: str, backend: str, seed: int, config: dict[str, Any]) -> Result:
    """Losses of one training run: mean of the `last` steps, of the validation text, and all of them as a curve."""
    texts = corpus(config["data"])
    shape = GPTConfig.preset(config["preset"], residual=residual, backend=backend, **config["changes"])
    device = torch.device(config["device"])
    model = GPT(shape, torch.Generator().manual_seed(seed)).to(device)  # drawn on the CPU: one start on all devices
    stream = TokenStream(texts.split("train"), config["batch_size"], shape.seq_len, seed)
    optimizers = build_optimizers(model, lr=config["lr"])
    compute = gradients(model, precision=config["precision"], clip=1.0)
    losses = []
    for step in range(config["steps"]):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * constant(step, config["steps"], config["warm_up"])
        losses.append(compute([stream.next_batch()]).loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    curve = torch.stack(losses).double().tolist()
    with autocast(device, config["precision"]):
        validation = evaluate(model, texts.split("validation").ids, max_tokens=config["validation_tokens"])
    last = curve[-config["last"] :]
    metrics = {"loss": sum(last) / len(last), "first_loss": curve[0], "validation_loss": validation.loss_nats}
    shown = range(0, len(curve), -(-len(curve) // MAX_CURVE_POINTS))
    return Result(f"{residual}/{backend}", seed, metrics, {"loss": Curve(list(shown), [curve[i] for i in shown])})
