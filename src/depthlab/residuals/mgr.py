"""Multi-Gate Residuals: n streams in convex combination, read by attention pooling."""

import torch
from torch import Tensor, nn

from depthlab.kernels.mgr import append_and_pool, attn_pool, mix_and_pool
from depthlab.kernels.mgr.reference import gate_values, pool_weights, wide
from depthlab.residuals.base import Float32, Residual, State
from depthlab.residuals.rebuilding import ForwardPass, MixingLayer, can_rebuild, mix, mix_apart
from depthlab.residuals.recompute import Recompute, RecomputeReport
from depthlab.theory import gate_bias, smallest_valid_depth


class _MGRLayer(Float32):
    """What sublayer l owns: the gate that mixes its output in (mixing layers only), and the query of the next read."""

    def __init__(self, width: int, n_bias: int, has_query: bool) -> None:
        super().__init__()

        def zeros(size: int) -> nn.Parameter | None:
            return nn.Parameter(torch.zeros(size, dtype=torch.float32)) if size else None

        self.register_parameter("w_gate", zeros(width if n_bias else 0))
        self.register_parameter("bias", zeros(n_bias))
        self.register_parameter("w_pool", zeros(width if has_query else 0))


class MultiGateResidual(Residual):
    """Multi-Gate Residuals. Sublayers 0 .. n-2 append their output as a new stream; sublayers n-1 .. L-1 mix:

        beta_i = sigmoid(w . RMSNorm(s_i) / sqrt(C) + b_i)                          gate "independent"
        beta   = softmax([b, z_1 .. z_n])[1:],  z_i = w . RMSNorm(s_i) / sqrt(C)    gate "competitive"
        s_i'   = (1 - beta_i) s_i + beta_i F
        read     alpha = softmax_i(q . RMSNorm(s_i') / sqrt(C)),  p = sum_i alpha_i s_i'

    Only mixing layers own w and b (n biases, or the one forget logit); a query q exists wherever two or more streams
    are read, so none does for n = 1. w and q start at zero, b at `depthlab.theory.gate_bias` of the L - (n - 1) mixing
    layers.

    The state holds streams [.., k, C], k = 1 .. n, and which of the n slots each one fills: x_0 slot 0, sublayer l
    slot l + 1. A pruned accumulation layer leaves its slot empty; the other streams keep their own biases.

    With `recompute` the backward pass rebuilds streams instead of finding them stored, wherever autograd is on; gates,
    reads and states are the same, bit by bit. It has first derivatives only (create_graph=True raises RuntimeError),
    changing an update in place after its step raises one too, and under torch.compile each step breaks the graph. As
    with the kernels, a gradient at a state's streams leaves out what comes through that layer's own read.
    torch.utils.checkpoint belongs around sublayers: around steps it holds the streams itself. Export, function
    transforms, tracers and dispatch modes take the ordinary way.

    Source: arXiv 2605.23259; the equations in code: `depthlab.kernels.mgr.reference`.
    """

    def __init__(
        self,
        d_model: int,
        n_sublayers: int,
        *,
        gate: str,
        n_streams: int = 4,
        normalize: bool = True,
        backend: str = "auto",
        recompute: Recompute | None = None,
    ) -> None:
        super().__init__(d_model, n_sublayers, normalize=normalize)
        self.gate, self.n_streams, self.backend = gate, n_streams, backend
        self.recompute = recompute
        self._pass: ForwardPass | None = None  # the last one that kept streams for a backward, for the report
        self.first_mixing = n_streams - 1
        needed = self.first_mixing + smallest_valid_depth(gate, n_streams)
        if n_sublayers < needed:
            raise ValueError(
                f"'mgr-{gate}' got n_sublayers={n_sublayers} for n_streams={n_streams}: the first {self.first_mixing} "
                f"only append streams, and the gate bias exists from {needed - self.first_mixing} mixing layers on, so "
                f"use at least {needed} sublayers, or fewer streams."
            )
        self.start_bias = gate_bias(gate, n_streams, n_sublayers - self.first_mixing)
        n_bias = n_streams if gate == "independent" else 1
        self.residual_layers = nn.ModuleList(
            _MGRLayer(d_model, n_bias if layer >= self.first_mixing else 0, has_query=n_streams > 1)
            for layer in range(n_sublayers)
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for layer in self.residual_layers:
            for name, parameter in layer.named_parameters():
                parameter.fill_(self.start_bias if name == "bias" else 0.0)

    def read_weights(self, layer: int, state: State) -> Tensor:
        return pool_weights(*wide(state.streams, self._query(layer, state.streams)), self.eps)

    def write_weights(self, layer: int, state: State) -> tuple[Tensor, Tensor]:
        if layer < self.first_mixing:
            eye = torch.eye(state.streams.shape[-2] + 1, device=state.streams.device)
            return eye[:, :-1], eye[:, -1]
        own = self.residual_layers[layer]
        beta = gate_values(state.streams, own.w_gate, self._bias(layer, state), gate=self.gate, eps=self.eps)
        return torch.diag_embed(1 - beta), beta

    def recompute_report(self) -> RecomputeReport:
        """What the last forward pass kept for its backward; no layer where none did."""
        if self._pass is None:
            return RecomputeReport(())
        self._pass.settle()
        kept = self._pass.kept
        return RecomputeReport(tuple(kept[layer] for layer in sorted(kept)))

    @property
    def recompute(self) -> Recompute | None:
        """What to keep of the streams of the next forward pass; None stores them all. TypeError for anything else."""
        return self._recompute

    @recompute.setter
    def recompute(self, value: Recompute | None) -> None:
        if value is not None and not isinstance(value, Recompute):
            raise TypeError(f"recompute must be a depthlab.residuals.Recompute or None, got {type(value).__name__}.")
        self._recompute = value

    def _open(self, x: Tensor) -> State:
        if self.recompute is not None and torch.is_grad_enabled():
            self._pass = None
        return State(0, x.unsqueeze(-2), (0,))

    def _fits(self, state: State) -> bool:
        streams, slots = state.streams, state.extra
        known = isinstance(streams, Tensor) and set(slots) <= set(range(self.n_streams))
        return known and streams.shape[-2:] == (len(slots), self.d_model)

    def _advance(self, layer: int, update: Tensor, state: State) -> tuple[Tensor, State]:
        query = self._query(layer + 1, update)
        how = {"normalize": self.normalize, "eps": self.eps, "backend": self.backend}
        if layer < self.first_mixing:
            streams, h = append_and_pool(state.streams, update, query, **how)
            return h, State(layer + 1, streams, (*state.extra, layer + 1))
        own = self.residual_layers[layer]
        tensors = (state.streams, update, own.w_gate, self._bias(layer, state), query)
        if self.recompute is not None and can_rebuild(*tensors):
            self._pass = forward_pass = state.trail.forward_pass if state.trail else ForwardPass()
            new = MixingLayer(layer, self.recompute, {"gate": self.gate, **how}, forward_pass)
            streams, h, trail = (mix_apart if torch.compiler.is_compiling() else mix)(new, tensors, state.trail)
            if layer == self.n_sublayers - 1:
                forward_pass.settle()
            return h, State(layer + 1, streams, state.extra, trail)
        streams, h, _ = mix_and_pool(*tensors, gate=self.gate, **how)
        return h, State(layer + 1, streams, state.extra)

    def _read(self, layer: int, state: State) -> Tensor:
        query = self._query(layer, state.streams)
        return attn_pool(state.streams, query, normalize=self.normalize, eps=self.eps, backend=self.backend)

    def _query(self, layer: int, like: Tensor) -> Tensor:
        """The query of sublayer `layer`'s read; zeros where a single stream is read and none exists."""
        own = self.residual_layers[layer - 1].w_pool if layer else None
        return torch.zeros(self.d_model, device=like.device) if own is None else own

    def _bias(self, layer: int, state: State) -> Tensor:
        bias = self.residual_layers[layer].bias
        complete = self.gate == "competitive" or len(state.extra) == self.n_streams
        return bias if complete else bias[list(state.extra)]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, n_streams={self.n_streams}, gate={self.gate!r}, backend={self.backend!r}"


class RebuildingMultiGateResidual(MultiGateResidual):
    """`MultiGateResidual` as `build` makes it with `recompute`: a compiler leaves its steps alone.

    What is around them is compiled. Else each layer's step would be compiled anew, up to the break in its middle.
    """

    @torch.compiler.disable
    def step(self, layer: int, update: Tensor, state: State) -> tuple[Tensor, State]:
        """As `Residual.step`."""
        return super().step(layer, update, state)
