"""Training one toy network: the digits, the order of batches, and the plain path that defines a run.

One network, `torch.optim`, one batch a step. A stack of networks (`batched`) must agree with it.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from depthlab import data
from depthlab.continuity import optimizers, toy

PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081  # of all MNIST training pixels in [0, 1]
_SPLIT_SEED = 0  # the split is one and the same for all runs


class Digits(NamedTuple):
    """Standardised pixels [N, 784] and labels [N] of the three splits."""

    train_x: Tensor
    train_y: Tensor
    val_x: Tensor
    val_y: Tensor
    test_x: Tensor
    test_y: Tensor


class Snapshot(NamedTuple):
    """One moment of a run. The tensors are copies, so they stay what they were."""

    step: int
    params: toy.Params
    initial: Tensor  # W_0, [L, d, d]
    gradient_sum: Tensor  # of the raw gradients of all steps so far, [L, d, d]
    train_loss: float  # mean over the batches since the snapshot before; at step 0 that of the first batch


def digits(train_size: int = 8000, dtype: torch.dtype = torch.float32) -> Digits:
    """The bundled MNIST digits: `train_size` for training, the other training images for validation, the test images.

    Raises:
        ValueError: no image would be left for training or for validation.
    """
    train, test = data.mnist("train"), data.mnist("test")
    n = len(train.labels)
    if not 0 < train_size < n:
        raise ValueError(f"digits got train_size {train_size}; the bundle has {n} training images, give 1 to {n - 1}.")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(_SPLIT_SEED))
    x, y = standardise(train.images, dtype)[order], torch.as_tensor(train.labels).long()[order]
    test_x, test_y = standardise(test.images, dtype), torch.as_tensor(test.labels).long()
    return Digits(x[:train_size], y[:train_size], x[train_size:], y[train_size:], test_x, test_y)


def standardise(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 images [N, 28, 28], or floats in [0, 1], -> standardised pixels [N, 784]."""
    images = torch.as_tensor(images)
    scale = 255 if images.dtype == torch.uint8 else 1
    return (images.flatten(1).to(dtype) / scale - PIXEL_MEAN) / PIXEL_STD


def batch_order(n: int, batch_size: int, steps: int, generator: torch.Generator) -> Tensor:
    """Which samples each step sees, [steps, batch_size]: shuffled passes over n samples, incomplete batches dropped.

    Raises ValueError where a batch is larger than n.
    """
    if not 1 <= batch_size <= n:
        raise ValueError(f"batch_order got batch_size {batch_size} for {n} samples; give 1 to {n}.")
    per_pass = n // batch_size
    passes = [torch.randperm(n, generator=generator) for _ in range(math.ceil(steps / per_pass))]
    rows = [p[: per_pass * batch_size].view(per_pass, batch_size) for p in passes]
    return torch.cat(rows)[:steps] if rows else torch.empty(0, batch_size, dtype=torch.long)


def start(config: toy.ToyConfig, n: int, batch_size: int, steps: int, seed: int, dtype: torch.dtype = torch.float32):
    """The seeded beginning of a run: (params, batch order). One seed gives all variants equal draws and batches."""
    generator = torch.Generator().manual_seed(seed)
    params = toy.init(config, generator, dtype)
    return params, batch_order(n, batch_size, steps, generator)


def train(
    config: toy.ToyConfig,
    images: Digits,
    *,
    seed: int,
    steps: int,
    learning_rate: float = 1e-3,
    batch_size: int = 16,
    optimizer: str = "adam",
    snapshots: Iterable[int] = (),
) -> Iterator[Snapshot]:
    """Train and yield a `Snapshot` at each step of `snapshots` (0 is before any update; `steps` the end).

    `optimizer` is one of `optimizers.NAMES`.

    Raises:
        ValueError: a snapshot outside 0 .. steps, an unknown optimizer.
        FloatingPointError: the loss or a gradient is not finite; the message names the step.
    """
    wanted = set(snapshots)
    if wanted and not 0 <= min(wanted) <= max(wanted) <= steps:
        raise ValueError(f"train got snapshots from {min(wanted)} to {max(wanted)}; give steps between 0 and {steps}.")
    params, order = start(config, len(images.train_y), batch_size, steps, seed, images.train_x.dtype)
    params = toy.Params(*(p.requires_grad_() for p in params))
    updaters = optimizers.build(optimizer, [(params, learning_rate)])
    initial = params.weights.detach().clone()
    gradient_sum = torch.zeros_like(initial)
    recent: list[float] = []

    def snapshot(step: int) -> Snapshot:
        copies = toy.Params(*(p.detach().clone() for p in params))
        mean_loss = sum(recent) / len(recent) if recent else evaluate(params, config, *batch(0))[0]
        recent.clear()
        return Snapshot(step, copies, initial, gradient_sum.clone(), mean_loss)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        return images.train_x[order[step]], images.train_y[order[step]]

    if 0 in wanted:
        yield snapshot(0)
    for step in range(1, steps + 1):
        value = toy.loss(params, *batch(step - 1), config)
        recent.append(value.item())
        if not math.isfinite(recent[-1]):
            raise FloatingPointError(f"the loss is {recent[-1]} at step {step}; lower the learning rate.")
        for updater in updaters:
            updater.zero_grad()
        value.backward()
        _need_finite(params.weights.grad, "gradient", step)
        gradient_sum += params.weights.grad
        for updater in updaters:
            updater.step()
        if step in wanted:
            yield snapshot(step)


def _need_finite(tensor: Tensor, what: str, step: int) -> None:
    if not tensor.sum().isfinite():  # one NaN or inf is enough, and a sum costs a tenth of isfinite().all()
        raise FloatingPointError(
            f"the {what} of the square layers is not finite at step {step}; lower the learning rate."
        )


def evaluate(params: toy.Params, config: toy.ToyConfig, x: Tensor, labels: Tensor) -> tuple[float, float]:
    """(mean cross-entropy, share of right answers) of one network on x [N, 784], labels [N]."""
    value, accuracy = evaluate_each(params, config, x, labels)
    return float(value), float(accuracy)


@torch.no_grad()
def evaluate_each(params: toy.Params, config: toy.ToyConfig, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The same of every network of a stack: each [..], on x [N, 784], labels [N]."""
    right = toy.forward(params, x, config).argmax(-1) == labels
    return toy.loss(params, x, labels, config), right.double().mean(-1)


def weight_gradient(params: toy.Params, config: toy.ToyConfig, x: Tensor, labels: Tensor) -> Tensor:
    """dLoss/dW_l of each square layer on one batch: [.., L, d, d]."""
    weights = params.weights.detach().requires_grad_()
    total = toy.loss(params._replace(weights=weights), x, labels, config).sum()  # stacked networks do not interact
    return torch.autograd.grad(total, weights)[0]


def log_steps(steps: int, points: int) -> list[int]:
    """0, 1, .., steps: at most `points` whole numbers, evenly spread on a log axis."""
    if points < 2 or steps < 1:
        raise ValueError(f"log_steps got {points} points up to step {steps}; give at least 2 points and 1 step.")
    spread = {round(steps ** (i / (points - 2))) for i in range(points - 1)} if points > 2 else {steps}
    return [0, *sorted(spread)]


@torch.no_grad()
def preactivation_norms(params: toy.Params, config: toy.ToyConfig, x: Tensor) -> Tensor:
    """|W_l norm(h_l)|, the length of what each layer's activation is given: x [.., B, inputs] -> [.., L, B]."""
    states = toy.hidden(params, x, config)[:-1]
    norm = toy.NORMS[config.norm]
    sizes = [
        torch.linalg.vector_norm(norm(h) @ w.mT, dim=-1) for h, w in zip(states, params.weights.unbind(-3), strict=True)
    ]
    return torch.stack(sizes, dim=-2)
