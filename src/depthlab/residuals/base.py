"""The interface of every residual scheme: how sublayer outputs are carried through depth.

All seven schemes are linear in what they carry. At sublayer l, with streams S [m, C] and the sublayer's output F [C],

    S' = mix S + write F           mix [m', m], write [m']
    p  = read S'                   read [m'], and the next sublayer reads h = RMSNorm(p)

so a scheme is its three coefficients, which may depend on the token. `write_weights` and `read_weights` state them;
`step` applies them, by a shorter way where there is one. Diagnostics need nothing else.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthlab.kernels.mgr import check_tensor, rms_normalize
from depthlab.kernels.mgr.reference import pool, wide
from depthlab.theory import carry

# Asked once: torch.compile up to 2.11 cannot trace the question and would break every step into pieces.
_AUTOCAST = frozenset(filter(torch.amp.is_autocast_available, ("cpu", "cuda", "hpu", "mps", "mtia", "xla", "xpu")))


class State(NamedTuple):
    """What is carried between sublayers; a scheme returns a new one, it never changes one.

    layer: the first sublayer that may still be stepped.
    streams: one tensor [.., m, C], or a tuple of m tensors [.., C] where a scheme keeps them apart.
    extra: what a scheme keeps beside its streams.
    trail: how the streams were made, for a backward pass that rebuilds them; no step's result depends on it.
    """

    layer: int
    streams: Tensor | tuple[Tensor, ...]
    extra: tuple = ()
    trail: Any = None

    def stacked(self) -> Tensor:
        """The streams as one tensor [.., m, C]."""
        return self.streams if isinstance(self.streams, Tensor) else torch.stack(self.streams, -2)

    def token_shape(self) -> torch.Size:
        """[.., C], the shape of every update."""
        streams = self.streams
        return streams.shape[:-2] + streams.shape[-1:] if isinstance(streams, Tensor) else streams[0].shape

    def device(self) -> torch.device:
        """Where the streams are."""
        return (self.streams if isinstance(self.streams, Tensor) else self.streams[0]).device


class Float32(nn.Module):
    """A module whose parameters follow a move to another device or to float64, but no cast below float32.

    Neither by a cast (``.to``, ``.half``, also of a part alone) nor by a half-precision state dict, ``assign=True``
    included.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Float32":
        def keep_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrow = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(device=moved.device, dtype=torch.float32) if narrow else moved

        return super()._apply(keep_float32, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Children load from the same dictionary after this, so widening it here also covers `assign=True`.
        for name, value in state_dict.items():
            if name.startswith(prefix) and isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
                state_dict[name] = value.float()
        super()._load_from_state_dict(state_dict, prefix, *args)


class Residual(Float32):
    """How sublayer outputs are carried through depth; `depthlab.residuals.build` makes one of the seven schemes.

        h, state = residual.start(x)
        for layer, sublayer in enumerate(sublayers):
            h, state = residual.step(layer, sublayer(h), state)

    The state is stored in the update's dtype (bfloat16 under autocast); arithmetic is float32 or wider, also under
    autocast. Pruning a sublayer is leaving its step out: the state stays, the next reads ``read(layer + 1, state)``.

    Parameters are float32 and stay so under ``.to(bfloat16)``, ``.half()`` and a half-precision checkpoint: a gate bias
    of -4 cannot move by 1e-3 in bfloat16. Each has "residual" in its name, wherever the module hangs, and wants no
    weight decay (`parameter_groups`).

    Under `torch.utils.checkpoint` put ``use_reentrant=False`` around steps. The reentrant kind does not look into
    tuples: around a step it drops the state's gradient in silence; around a sublayer alone it is right.
    """

    eps = 1e-6
    n_streams = 1  # of schemes that keep a fixed number of them

    def __init__(self, d_model: int, n_sublayers: int, *, normalize: bool = True) -> None:
        super().__init__()
        self.d_model, self.n_sublayers, self.normalize = d_model, n_sublayers, normalize
        self.residual_layers = nn.ModuleList()  # one a sublayer, where the scheme has parameters

    # ---- what a scheme defines

    def read_weights(self, layer: int, state: State) -> Tensor:
        """[.., m] weights with which sublayer `layer` reads the streams (`n_sublayers`: the output's read)."""
        raise NotImplementedError

    def write_weights(self, layer: int, state: State) -> tuple[Tensor, Tensor]:
        """``(mix [.., m', m], write [.., m'])`` of sublayer `layer`; leading dimensions may be left out."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Set every parameter to its start value; all are constants, so building draws no random number."""

    def _open(self, x: Tensor) -> State:
        return State(0, x.unsqueeze(-2))

    def _fits(self, state: State) -> bool:
        """Whether the state has the form that this scheme gives it; another scheme's would be summed up in silence."""
        streams = state.streams
        single = isinstance(streams, Tensor) and not state.extra
        return single and streams.shape[-2:] == (self.n_streams, self.d_model)

    def _write(self, layer: int, update: Tensor, state: State) -> State:
        mix, write = self.write_weights(layer, state)
        streams, f, mix, write = wide(state.streams, update, mix, write)
        return State(layer + 1, carry(streams, f, mix, write).to(update.dtype))

    def _read(self, layer: int, state: State) -> Tensor:
        streams, weights = wide(state.streams, self.read_weights(layer, state))
        return self._finish(pool(streams, weights), state.streams.dtype)

    def _advance(self, layer: int, update: Tensor, state: State) -> tuple[Tensor, State]:
        state = self._write(layer, update, state)
        return self._read(layer + 1, state), state

    def _finish(self, pooled: Tensor, dtype: torch.dtype) -> Tensor:
        return (rms_normalize(pooled, self.eps) if self.normalize else pooled).to(dtype)

    # ---- what everybody calls

    def start(self, x: Tensor) -> tuple[Tensor, State]:
        """From the embedding x [B, T, C] (any leading dimensions) to what sublayer 0 reads, and the first state.

        Raises:
            TypeError: x is no tensor of float16, bfloat16, float32 or float64.
            ValueError: the width is not d_model, or x is on another device than the parameters.
        """
        check_tensor("x", x)
        if x.ndim < 1 or x.shape[-1] != self.d_model:
            raise ValueError(f"x has shape {list(x.shape)}; it needs [.., {self.d_model}] (d_model={self.d_model}).")
        if len(self.residual_layers):
            device = next(self.residual_layers[-1].parameters()).device
            if device != x.device:
                raise ValueError(f"x is on {x.device} and the residual on {device}; move one of them.")
        with _full_precision(x.device):
            state = self._open(x)
            return self._read(0, state), state

    def step(self, layer: int, update: Tensor, state: State) -> tuple[Tensor, State]:
        """Carry sublayer `layer`'s output [B, T, C] and return what the next one reads (after the last: the output).

        Raises:
            TypeError: `update` is no floating-point tensor, or `state` is none of ours.
            ValueError: `layer` is outside 0 .. n_sublayers - 1 or already stepped; shape or device is not the state's;
                the state is another scheme's.
        """
        self._check_state(state)
        check_tensor("update", update)
        self._check_layer(layer, state, self.n_sublayers - 1)
        shape, device = state.token_shape(), state.device()
        if update.shape != shape:
            raise ValueError(f"update has shape {list(update.shape)}; this state carries {list(shape)}.")
        if update.device != device:
            raise ValueError(f"update is on {update.device} and the state on {device}; move one of them.")
        with _full_precision(device):
            return self._advance(layer, update, state)

    def read(self, layer: int, state: State) -> Tensor:
        """What sublayer `layer` reads from `state` [B, T, C]; `n_sublayers` is the output's read. Needed for pruning.

        Raises:
            TypeError: `state` is none of ours.
            ValueError: `layer` is outside 0 .. n_sublayers or behind the state, or the state is another scheme's.
        """
        self._check_state(state)
        self._check_layer(layer, state, self.n_sublayers)
        with _full_precision(state.device()):
            return self._read(layer, state)

    def forward(self, x: Tensor, sublayers: Sequence[Callable], skip: Iterable[int] = ()) -> Tensor:
        """The whole loop from the embedding to the output's read [B, T, C], leaving out the sublayers in `skip`.

        Raises:
            ValueError: not n_sublayers sublayers, or a number in `skip` that is none of them.
        """
        if len(sublayers) != self.n_sublayers:
            raise ValueError(f"{len(sublayers)} sublayers were given; this residual was built for {self.n_sublayers}.")
        skip = frozenset(skip)
        if not skip <= set(range(self.n_sublayers)):
            raise ValueError(f"skip={sorted(skip)} names a sublayer outside 0 .. {self.n_sublayers - 1}.")
        h, state = self.start(x)
        for layer, sublayer in enumerate(sublayers):
            if layer in skip:
                h = self.read(layer + 1, state)
            else:
                h, state = self.step(layer, sublayer(h), state)
        return h

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, n_sublayers={self.n_sublayers}, normalize={self.normalize}"

    # ---- checks

    def _check_state(self, state: State) -> None:
        if not isinstance(state, State):
            raise TypeError(f"state is {type(state).__name__}; pass on the state that start or step returned.")
        if not self._fits(state):
            carried, what = state.streams, type(self).__name__
            form = list(carried.shape) if isinstance(carried, Tensor) else f"{len(carried)} tensors"
            raise ValueError(
                f"state holds streams of the form {form}, which no {what} of d_model={self.d_model} makes here; "
                "pass on the state that this residual's start or step returned."
            )

    def _check_layer(self, layer: int, state: State, last: int) -> None:
        if isinstance(layer, bool) or not isinstance(layer, Integral):
            raise TypeError(f"layer must be an integer, got {type(layer).__name__}.")
        if not 0 <= layer <= last:
            raise ValueError(f"layer={layer} is out of range; this residual was built for 0 .. {last}.")
        if layer < state.layer:
            raise ValueError(f"layer={layer} comes too late: the state has passed layer {state.layer - 1}; go upwards.")


def _full_precision(device: torch.device) -> AbstractContextManager:
    """Switch autocast off, where the device has it, so that products stay in float32."""
    return torch.autocast(device.type, enabled=False) if device.type in _AUTOCAST else nullcontext()
