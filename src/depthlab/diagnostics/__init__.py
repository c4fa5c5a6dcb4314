"""What happens to the signal inside a network: norms, shares, gates, angles and gradients through depth; pruning.

`record` watches one forward pass; the measures read what it kept. All of them work for all seven residual schemes,
because each scheme states its linear form (`Residual.write_weights`, `Residual.read_weights`). When nothing is recorded
there is no hook and no branch in a model: `record` puts three wrappers on one object and takes them off again.

    with torch.no_grad(), record(model.residual) as trace:
        model(tokens)
    norms(trace), embedding_share(trace), gate_statistics(trace), layer_angles(trace)
"""

from depthlab.diagnostics.angles import angular_distance, layer_angles, stream_angles, stream_turns
from depthlab.diagnostics.gradients import gradient_norms, signal_gradient_norms
from depthlab.diagnostics.measures import (
    embedding_share,
    gate_statistics,
    norms,
    pool_statistics,
    raw_reads,
    source_coefficients,
)
from depthlab.diagnostics.pruning import block_pruning
from depthlab.diagnostics.trace import Step, Trace, record

__all__ = [
    "Step",
    "Trace",
    "angular_distance",
    "block_pruning",
    "embedding_share",
    "gate_statistics",
    "gradient_norms",
    "layer_angles",
    "norms",
    "pool_statistics",
    "raw_reads",
    "record",
    "signal_gradient_norms",
    "source_coefficients",
    "stream_angles",
    "stream_turns",
]
