"""Launch one pass of one operation once, for a profiler or a memory checker that watches the process from outside.

    python -m depthlab.kernels.bench.one_launch --tokens 131072 --streams 4 --width 1024 --pass forward

Everything is compiled and warm before the profiler's range starts, so `ncu --profile-from-start off` sees one pass and
nothing else. `--op all` runs every operation and gate, forward and backward: small, for compute-sanitizer.
"""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from depthlab.kernels.bench import inverting
from depthlab.kernels.bench.cases import DTYPES, Case
from depthlab.kernels.bench.subjects import IMPLEMENTATIONS, subject
from depthlab.kernels.bench.traffic import MIXING, OPS, PASSES
from depthlab.theory import GATES


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and launch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, default="triton")
    parser.add_argument("--op", choices=(*OPS, "all"), default="mix")
    parser.add_argument("--gate", choices=GATES, default="competitive")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--pass", dest="which", choices=PASSES, default="both")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args(arguments)
    shape = (given.dtype, given.tokens, given.streams, given.width)
    ops = OPS if given.op == "all" else (given.op,)
    gates = GATES if given.op == "all" else (given.gate,)
    for case in [Case(op, *shape, gate) for op in ops for gate in (gates if op in MIXING else ("",))]:
        how = (given.implementation, given.which, torch.device(given.device))
        launch(case, *how)
        if given.op == "all" and case.op == "mix-inverting":  # also with rows whose addresses come from memory
            launch(case, *how, exact_above=0.5)
        print(f"launched {case.name}/{given.implementation} {given.which}", flush=True)


def launch(case: Case, implementation: str, which: str, device: torch.device, exact_above: float | None = None) -> None:
    """Warm up, then run the pass once inside the profiler's range. exact_above: for `inverting.step`."""
    chosen = subject(case, implementation)
    if exact_above is not None:
        backend = "torch" if implementation == "eager" else implementation
        chosen = replace(chosen, step=inverting.step(case, backend, exact_above))
    generator = torch.Generator(device).manual_seed(0)
    drawn = chosen.inputs(generator)

    def forward() -> tuple[torch.Tensor, ...]:
        return chosen.step(*drawn)[: chosen.graded]

    outputs = forward()
    upstream = [torch.randn(y.shape, generator=generator, dtype=y.dtype, device=device) for y in outputs]
    torch.autograd.grad(outputs, drawn, upstream)
    outputs = forward() if which == "backward" else None
    with profiler_range(device):
        outputs = forward() if outputs is None else outputs
        if which != "forward":
            torch.autograd.grad(outputs, drawn, upstream)


@contextlib.contextmanager
def profiler_range(device: torch.device) -> Iterator[None]:
    """Tell an attached profiler where to look; nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.profiler.start()
    yield
    torch.cuda.synchronize(device)
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
