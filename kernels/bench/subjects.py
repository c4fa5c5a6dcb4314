"""The implementations that are timed side by side: eager torch, torch.compile, the fused kernels, optional peers."""

import functools
from functools import partial

from depthlab.kernels.bench import cases, inverting
from depthlab.kernels.bench.cases import Case, Step, Subject
from depthlab.kernels.bench.peers import PEERS
from depthlab.kernels.mgr import reference

OURS = ("eager", "compile", "triton")
IMPLEMENTATIONS = (*OURS, *PEERS)


def subject(case: Case, implementation: str) -> Subject:
    """The implementation by name, ready to draw inputs and run.

    "eager" and "triton" are the public functions with that backend, "compile" is torch.compile of the reference.

    Raises:
        PeerMissing: an optional peer that is not installed. ValueError: an unknown name.
    """
    if implementation in PEERS:
        return PEERS[implementation](case)
    if implementation not in OURS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"There is no implementation {implementation!r} to time; use one of {known}.")
    if case.op == "mix-inverting" and implementation == "compile":
        raise ValueError("torch.compile has no mixing that rebuilds its streams; time 'eager' or 'triton'.")
    public_step = inverting.step if case.op == "mix-inverting" else cases.public_step
    step = {
        "eager": lambda: public_step(case, "torch"),
        "compile": lambda: _compiled_step(case),
        "triton": lambda: public_step(case, "triton"),
    }[implementation]()
    return Subject(partial(cases.inputs, case), step, graded=1 if case.op == "pool" else 2)


@functools.cache
def _compiled_step(case: Case) -> Step:
    """torch.compile, default mode, static shapes; kept, since the three repetitions share it."""
    import torch._dynamo.config
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # else a saved graph cannot run backward twice, as timing does
    torch._dynamo.config.recompile_limit = 64  # one a shape; fullgraph raises at the limit, where eager would step in
    function = {"mix": reference.mix_and_pool, "append": reference.append_and_pool, "pool": reference.attn_pool}
    compiled = torch.compile(function[case.op], dynamic=False, fullgraph=True)
    options = {"normalize": True, "eps": cases.EPS} | ({"gate": case.gate} if case.op == "mix" else {})
    if case.op == "pool":
        return lambda *x: (compiled(*x, **options),)
    return lambda *x: compiled(*x, **options)
