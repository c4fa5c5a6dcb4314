"""Many toy networks trained as one: every seed, initial scale and learning rate of one wiring in one stack.

The networks of a stack do not interact: a step adds up N separate losses, so each network gets exactly its own
gradient, and every other operation acts network by network. One that diverges stays non-finite and leaves the others
untouched. Initial draws, batches, forward pass and optimizers are those of the single run (`training.train`); on CUDA a
whole step, the choice of the batch included, is captured once as a CUDA graph and replayed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from depthlab.continuity import optimizers, toy, training

_EAGER_STEPS = 3  # real steps before the capture, in which the libraries and the optimizers set themselves up


@dataclass(frozen=True)
class Net:
    """One network of a stack: what it starts from and how fast it learns."""

    seed: int
    init_scale: float
    rate: float


class Stack:
    """N networks of one wiring in training.

    Attributes:
        params: toy.Params with leading dimension N, changed in place.
        initial: W_0, [N, L, d, d]. gradient_sum: of the raw gradients so far, or None.
        losses: of each step's batch before its update, [N, steps]; NaN where a step is still to come.
        step: steps done.
    """

    def __init__(
        self,
        config: toy.ToyConfig,
        nets: Sequence[Net],
        images: training.Digits,
        *,
        steps: int,
        optimizer: str = "adam",
        batch_size: int = 16,
        device: str | torch.device = "cpu",
        gradient_sum: bool = True,
    ) -> None:
        """The beginning of a run; `images` decides the dtype.

        Args:
            config: the wiring; its `init_scale` is replaced by each net's own.
            steps: the most steps that `advance` may reach.
        """
        if not nets:
            raise ValueError("Stack got no networks; give at least one Net.")
        self.config, self.nets, self.images = config, tuple(nets), training.Digits(*(t.to(device) for t in images))
        begun: dict[tuple[int, float], tuple[toy.Params, Tensor]] = {}
        for key in dict.fromkeys((net.seed, net.init_scale) for net in nets):
            own = replace(config, init_scale=key[1])
            begun[key] = training.start(own, len(images.train_y), batch_size, steps, key[0], images.train_x.dtype)
        starts = [begun[net.seed, net.init_scale][0] for net in nets]
        self.params = toy.Params(*(torch.stack(tensors).to(device) for tensors in zip(*starts, strict=True)))
        seeds = sorted({net.seed for net in nets})
        orders = {seed: order for (seed, _), (_, order) in begun.items()}
        self._order = torch.stack([orders[seed] for seed in seeds]).to(device)  # [seeds, steps, batch]
        self._row_of = torch.tensor([seeds.index(net.seed) for net in nets], device=device)
        self.initial = self.params.weights.clone()
        self.gradient_sum = torch.zeros_like(self.initial) if gradient_sum else None
        self.losses = torch.full((len(nets), steps), torch.nan, dtype=self.initial.dtype, device=device)
        self.step = 0
        self.at = torch.zeros(1, dtype=torch.long, device=device)  # `step` on the device, which a captured step reads
        # Neighbours of equal rate are updated together, as slices of the stacked tensors.
        runs = [(rate, list(run)) for rate, run in groupby(range(len(nets)), key=lambda i: nets[i].rate)]
        self._slices = [slice(run[0], run[-1] + 1) for _, run in runs]
        self._views = [toy.Params(*(p[part] for p in self.params)) for part in self._slices]
        cuda = self.initial.is_cuda
        groups = [(views, rate) for views, (rate, _) in zip(self._views, runs, strict=True)]
        self._optimizers = optimizers.build(optimizer, groups, capturable=cuda)
        self._stream = torch.cuda.Stream(self.initial.device) if cuda else None
        self.intervene(None)

    def intervene(self, after_step: Callable[["Stack"], None] | None) -> None:
        """From now on call `after_step` after each update.

        It changes `params` in place and must be capturable: tensor operations on the device, no decision in Python.
        """
        self._after_step = after_step
        self._graph: torch.cuda.CUDAGraph | None = None
        self._eager_until = self.step + _EAGER_STEPS

    def advance(self, to: int) -> None:
        """Train until `to` steps are done. Raises ValueError where that is in the past or beyond `steps`."""
        if not self.step <= to <= self.losses.shape[1]:
            raise ValueError(f"advance got step {to}; {self.step} are done, give at most {self.losses.shape[1]}.")
        while self.step < to:
            if self._stream is None:
                self._one_step()
            elif self.step < self._eager_until:
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    self._one_step()
                torch.cuda.current_stream().wait_stream(self._stream)
            else:
                if self._graph is None:
                    self._graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(self._graph, stream=self._stream):
                        self._one_step()
                self._graph.replay()
            self.step += 1

    def _one_step(self) -> None:
        rows = self._order.index_select(1, self.at).squeeze(1)[self._row_of]  # [N, batch]
        leaves = toy.Params(*(p.detach().requires_grad_() for p in self.params))
        loss = toy.loss(leaves, self.images.train_x[rows], self.images.train_y[rows], self.config)
        gradients = torch.autograd.grad(loss.sum(), leaves)
        self.losses.index_copy_(1, self.at, loss.detach().unsqueeze(1))
        for part, views in zip(self._slices, self._views, strict=True):
            for view, gradient in zip(views, gradients, strict=True):
                view.grad = gradient[part].contiguous()  # torch's fused Adam reads any other layout wrongly
        for optimizer in self._optimizers:
            optimizer.step()
        if self.gradient_sum is not None:
            self.gradient_sum += gradients[toy.Params._fields.index("weights")]
        if self._after_step is not None:
            self._after_step(self)
        self.at += 1

    def diverged_at(self) -> list[int | None]:
        """The first step of each network whose loss was not finite, counted from 1; None where all were."""
        bad = ~self.losses[:, : self.step].isfinite()
        first = bad.int().argmax(1) + 1
        return [int(step) if any_bad else None for step, any_bad in zip(first, bad.any(1), strict=True)]

    def alive(self) -> Tensor:
        """Which networks are finite now, in every parameter and in the gradient sum: bool [N]."""
        tensors = [*self.params] if self.gradient_sum is None else [*self.params, self.gradient_sum]
        return torch.stack([t.flatten(1).isfinite().all(1) for t in tensors]).all(0)

    def at_points(self, points: Sequence[int]) -> Iterator[int]:
        """Advance to each of the steps `points` in turn and yield it."""
        for point in points:
            self.advance(point)
            yield point
