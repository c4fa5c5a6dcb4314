"""Norms, shares, gates and pools through depth, one table each."""

from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from depthlab.diagnostics.trace import Trace, full_precision
from depthlab.residuals import State


def norms(trace: Trace) -> pd.DataFrame:
    """Sizes of all signals. One row a signal and depth: layer, signal, stream, mean, max, massive.

    signal: "read" (what reader `layer` reads, before its RMSNorm), "update" (what sublayer `layer` puts out), or
    "stream" (number `stream` of the state that reader `layer` reads). mean, max: of the L2 norm over tokens. massive:
    the massive-activation ratio, max |v| / median |v| over all tokens and channels (Sun et al., arXiv 2402.17762), the
    median of an even count being the mean of the middle two; infinite when more than half of the values are zero, NaN
    when all are.

    Raises:
        ValueError: nothing was recorded, or there is no token (so do all measures).
    """
    rows = []
    for layer, read in raw_reads(trace).items():
        rows.append({"layer": layer, "signal": "read", "stream": -1, **_size(read)})
        for i, stream in enumerate(full_precision(trace.reads[layer].stacked()).unbind(-2)):
            rows.append({"layer": layer, "signal": "stream", "stream": i, **_size(stream)})
    for step in trace.steps:
        rows.append({"layer": step.layer, "signal": "update", "stream": -1, **_size(full_precision(step.update))})
    return pd.DataFrame(rows).sort_values(["signal", "stream", "layer"], ignore_index=True)


def raw_reads(trace: Trace) -> dict[int, Tensor]:
    """Reader -> what it reads [.., C] before the RMSNorm, in float32 or wider; reader n_sublayers is the output."""
    result = {}
    for layer, weights in read_weights(trace).items():
        streams = full_precision(trace.reads[layer].stacked())
        result[layer] = (weights.to(streams.dtype).unsqueeze(-1) * streams).sum(-2)
    return result


def source_coefficients(trace: Trace) -> dict[int, Tensor]:
    """Reader -> weights [.., 1 + L] of (x_0, F_0, .., F_(L-1)) in its raw read; pruned sublayers weigh 0.

    Exact, by linearity: once a scheme's coefficients are known, its streams are linear in what the sublayers put out,
    so the weights of all sources are carried through depth just as the streams are. No gradient, no approximation; with
    half-precision states the rounding of each store is left out.
    """
    first, n_sources = trace.require().reads[0].stacked(), 1 + trace.residual.n_sublayers
    weights, steps = read_weights(trace), {step.layer: step for step in trace.steps}
    shares = torch.zeros(*first.shape[:-1], n_sources, dtype=torch.float64, device=first.device)
    shares[..., 0] = 1  # every scheme starts from x_0 alone, or from copies of it
    result = {}
    for layer in range(n_sources):
        if layer in weights:
            result[layer] = (weights[layer].double().unsqueeze(-1) * shares).sum(-2)
        if layer in steps:
            mix, write = (w.double() for w in _weights(trace.residual.write_weights, layer, steps[layer].before))
            source = torch.zeros(n_sources, dtype=torch.float64, device=first.device)
            source[1 + layer] = 1
            shares = mix @ shares + write.unsqueeze(-1) * source
    return result


def embedding_share(trace: Trace) -> pd.DataFrame:
    """How much of x_0 is left in every raw read. One row a reader: layer, coefficient, share (means over tokens).

    coefficient: the weight c_0 of x_0 (`source_coefficients`). share: |c_0 x_0| / sum_j |c_j v_j| over x_0 and all
    updates, L2 norms; the part that x_0 has in the sum of what was put together, 1 before the first sublayer, and NaN
    where a token consists of zeros alone.
    """
    embedding = full_precision(trace.require().embedding).double()
    sizes = torch.zeros(*embedding.shape[:-1], 1 + trace.residual.n_sublayers, dtype=torch.float64)
    sizes = sizes.to(embedding.device)
    sizes[..., 0] = embedding.norm(dim=-1)
    for step in trace.steps:
        sizes[..., 1 + step.layer] = full_precision(step.update).double().norm(dim=-1)
    rows = []
    for layer, weights in source_coefficients(trace).items():
        parts = weights.abs() * sizes
        share = parts[..., 0] / parts.sum(-1)
        rows.append({"layer": layer, "coefficient": _mean(weights[..., 0]), "share": _mean(share)})
    return pd.DataFrame(rows)


def gate_statistics(trace: Trace) -> pd.DataFrame:
    """Weights with which each stream takes an update: layer, stream, mean, std, min, max over tokens.

    In MGR's mixing layers that is the gate beta; in an accumulation layer 1 for the new stream and 0 for the others. In
    prenorm it is 1; in hc and mhc-lite the write weight.
    """
    rows = []
    for step in trace.require().steps:
        _, write = _weights(trace.residual.write_weights, step.layer, step.before)
        rows += [{"layer": step.layer, "stream": i, **_spread(w)} for i, w in enumerate(write.unbind(-1))]
    return pd.DataFrame(rows)


def pool_statistics(trace: Trace) -> pd.DataFrame:
    """Weights with which each reader reads the streams: layer, stream, mean, std, min, max over tokens."""
    rows = []
    for layer, weights in read_weights(trace).items():
        rows += [{"layer": layer, "stream": i, **_spread(w)} for i, w in enumerate(weights.unbind(-1))]
    return pd.DataFrame(rows)


def read_weights(trace: Trace) -> dict[int, Tensor]:
    """Reader -> its weights [.., m] over the streams it reads."""
    reads = sorted(trace.require().reads.items())
    return {layer: _weights(trace.residual.read_weights, layer, state) for layer, state in reads}


@torch.no_grad()
def _weights(rule: Callable, layer: int, state: State) -> Any:
    """A scheme's coefficients from `state`, in the precision that its own step uses."""
    with torch.autocast(state.device().type, enabled=False):
        return rule(layer, state)


def _size(v: Tensor) -> dict[str, float]:
    token_norms, values = v.norm(dim=-1), v.abs().flatten()
    low, high = (values.kthvalue(k).values for k in ((v.numel() + 1) // 2, v.numel() // 2 + 1))
    massive = values.max() / ((low + high) / 2)
    return {"mean": _mean(token_norms), "max": token_norms.max().item(), "massive": massive.item()}


def _spread(w: Tensor) -> dict[str, float]:
    w = w.double()
    std = w.std(correction=0).item()
    return {"mean": _mean(w), "std": std, "min": w.min().item(), "max": w.max().item()}


def _mean(v: Tensor) -> float:
    return v.double().mean().item()
