"""The fused kernels beside the float64 reference, on a GPU or, with TRITON_INTERPRET=1, on the CPU (`make kernels`).

What is allowed for one value y of a result:

    unit * |y|  +  k * 2^-24 * (the largest value of the result in y's token)

- unit: half the spacing of the result's dtype, since a result is rounded once, when it is stored; twice that for
  bfloat16 in the interpreter, which truncates instead of rounding.
- k = 128 float32 roundoffs, so 8e-6: a score is a sum of C products and reaches 10, and softmax and sigmoid pass its
  absolute error on as a relative one. Measured: up to 21 here, up to 40 in torch's own float32 over 2,000 tokens.
- k = 512 for the gradients of streams and update, which pass two softmaxes and three norms, each the difference of
  larger terms. Measured: up to 28 here, up to 226 in torch's own float32 over 2,000 tokens. Every mutant: above 2,000.
- a stream that is rebuilt from what a layer made of it has the rounding of that, |s'| unit, times 1 / (1 - beta), so
  k = 128 times 1 / (1 - beta) for it.
- the gradient of a weight is one sum over all tokens, so its own largest value counts; a bias' is a single number that
  may cancel, so the root of the sum of its terms' squares counts as well (over 2,000 tokens on a GPU one such number
  had 1.6 times what its own size allows); and no scale is below 1, the size of the inputs and of the upstream
  gradients, since a gradient may vanish.
"""

import os
from types import SimpleNamespace

import pytest
import torch

from depthlab.kernels import mgr
from depthlab.kernels.mgr import launch, ops, reference

K = {"d_streams": 512, "d_update": 512}  # all others: 128
KINDS = ("independent", "competitive", "append", "read")
INPUTS = ("streams", "update", "w_gate", "bias", "w_pool")
USED = {"append": (0, 1, 4), "read": (0, 4)}
OUTPUTS = {"append": ("mixed", "pooled"), "read": ("pooled",)}


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    pytest.importorskip("triton")
    if interpreted():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, or Triton's interpreter: `make kernels`")
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    torch.cuda.set_device(worker % torch.cuda.device_count())  # workers take turns among the GPUs
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def memory_goes_back():
    """A GPU is shared by many workers: what a large case took is free for the others' afterwards."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


@pytest.fixture(scope="session", autouse=True)
def patched_once():
    """Halve the interpreter's time: at each call of a function it looks through all of triton.language for what to
    replace, although after the first call from a module, in a launch, nothing is left to replace."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if not interpreted() or not hasattr(interpreter, "_patch_lang"):
        yield
        return
    execute, patch, done = interpreter.GridExecutor.__call__, interpreter._patch_lang, set()

    def launch_once(self, *args, **kwargs):
        done.clear()
        return execute(self, *args, **kwargs)

    def patch_once(fn):
        if id(fn.__globals__) not in done:
            done.add(id(fn.__globals__))
            return patch(fn)

    with pytest.MonkeyPatch.context() as replaced:
        replaced.setattr(interpreter.GridExecutor, "__call__", launch_once)
        replaced.setattr(interpreter, "_patch_lang", patch_once)
        yield


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """In the interpreter three tokens are then enough for a program to walk over two and another to help it."""
    monkeypatch.setattr(ops, "INTERPRETED_PROGRAMS", 1)


def used(kind: str) -> tuple[int, ...]:
    """Which of the five inputs a kind takes."""
    return USED.get(kind, (0, 1, 2, 3, 4))


def run(kind: str, inputs, *, backend: str = "triton", module=mgr, **how):
    """The public function of a kind on the inputs that it takes: those of (mixed, pooled, beta) that it makes."""
    if backend == "reference":
        module = reference
    elif module is mgr:
        how["backend"] = backend
    how.setdefault("normalize", False)
    if kind == "read":
        return (module.attn_pool(*inputs, **how),)
    if kind == "append":
        return module.append_and_pool(*inputs, **how)
    return module.mix_and_pool(*inputs, gate=kind, **how)


def draw(kind: str, tokens, n: int, width: int, dtypes=torch.float32, *, device, seed: int = 0):
    """Random inputs of sizes 0.3 to 3, no gate near its start value; `dtypes`: one, or one each for streams, update and
    weights. `tokens`: a number, or leading dimensions."""
    g = torch.Generator().manual_seed(seed)
    lead = [tokens] if isinstance(tokens, int) else list(tokens)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    size = torch.rand(*lead, n, 1, generator=g, dtype=torch.float64) * 2.7 + 0.3
    bias = normal(1 if kind == "competitive" else n)
    every = (normal(*lead, n, width) * size, normal(*lead, width), 3 * normal(width), bias, 3 * normal(width))
    each = dtypes if isinstance(dtypes, tuple) else (dtypes,) * 3
    each = (*each, each[2], each[2])
    return [every[i].to(each[i]).to(device) for i in used(kind)]


def upstream_of(outputs, seed: int = 1):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype).to(x.device) for x in outputs]


def with_gradients(function, inputs, upstream=None, which=None):
    """Outputs and the gradients of all inputs; `which`: the outputs that anybody uses (None: all)."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(leaves)
    upstream = (
        upstream_of(outputs)
        if upstream is None
        else [x if x is None else x.to(y.dtype) for x, y in zip(upstream, outputs, strict=True)]
    )
    chosen = range(len(outputs)) if which is None else which
    grads = torch.autograd.grad(
        [outputs[i] for i in chosen],
        leaves,
        [upstream[i] for i in chosen],
        allow_unused=True,
        materialize_grads=True,
    )
    return [x.detach() for x in outputs], list(grads)


def names(kind: str) -> list[str]:
    return [*OUTPUTS.get(kind, ("mixed", "pooled", "beta")), *(f"d_{INPUTS[i]}" for i in used(kind))]


def excess(name: str, found, true, floor: float = 1.0, spare: float = 0.0) -> float:
    """The largest error of a result, in units of what is allowed; infinite for another shape or where not finite.

    `spare` of the largest value is allowed besides."""
    if found.shape != true.shape:
        return float("inf")
    if found.numel() == 0:
        return 0.0
    found, true, dtype = found.detach().double().cpu(), true.detach().double().cpu(), found.dtype
    unit = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0
    unit *= 2 if dtype == torch.bfloat16 and interpreted() else 1
    weight = name in ("d_w_gate", "d_bias", "d_w_pool")
    if weight:
        scale = true.abs().max()
    else:
        keep = 2 if name in ("mixed", "d_streams") else 1
        scale = true.abs().amax(tuple(range(-keep, 0)), keepdim=True)
    share = K.get(name, 128) * 2.0**-24 + spare
    allowed = unit * true.abs().clamp_min(torch.finfo(dtype).tiny) + share * scale.clamp_min(floor)
    worst = ((found - true).abs() / allowed).max().item()
    return worst if worst == worst else float("inf")


def truth(kind: str, inputs, upstream, which=None, **how):
    """Outputs and gradients of the float64 reference, and the size of the bias' gradient were nothing cancelled."""
    wide = [x.double() for x in inputs]
    upstream = [None if x is None else x.double() for x in upstream]
    gated = kind not in USED
    if gated:
        wide[3] = wide[3].expand(*inputs[1].shape[:-1], -1)  # a bias for each token
    outputs, grads = with_gradients(lambda x: run(kind, x, backend="reference", **how), wide, upstream, which)
    if not gated:
        return outputs, grads, 0.0
    terms = grads[3].reshape(-1, grads[3].shape[-1])
    grads[3] = terms.sum(0)
    return outputs, grads, terms.norm(dim=0).max().item()


def errors(kind: str, inputs, *, which=None, floor: float = 1.0, function=None, **how) -> dict[str, float]:
    """For every output and every gradient the error of the kernels beside the float64 reference, 1 being allowed."""
    function = function or (lambda x: run(kind, x, **how))
    outputs, grads = with_gradients(function, inputs, which=which)
    true, true_grads, size = truth(kind, inputs, upstream_of(outputs), which, **how)
    stored = inputs[0 if kind == "read" else 1].dtype
    assert [x.dtype for x in outputs] == [stored, stored, torch.float32][: len(outputs)]
    assert [g.dtype for g in grads] == [x.dtype for x in inputs]
    pairs = zip(names(kind), [*outputs, *grads], [*true, *true_grads], strict=True)
    return {name: excess(name, x, y, max(floor, size if name == "d_bias" else 0.0)) for name, x, y in pairs}


def check(kind: str, inputs, **how) -> None:
    found = errors(kind, inputs, **how)
    assert max(found.values()) <= 1, found


def keep_rows(streams, beta, above: float | None) -> mgr.ExactRows | None:
    """The rows of [.., n, C] whose gate is above a number, last ones first; None for no rows given at all."""
    if above is None:
        return None
    chosen = beta > above
    slots = torch.full(beta.shape, -1, dtype=torch.int32, device=beta.device)
    slots[chosen] = torch.arange(int(chosen.sum()), dtype=torch.int32, device=beta.device).flip(0)
    return mgr.ExactRows(slots, streams[chosen].flip(0))


def invert(gate: str, inputs, *, above: float | None = 0.5, which=None, backend="triton", **how):
    """A layer that keeps only the rows with gates above a number: ((mixed, beta), upstream, streams and gradients)."""
    how.setdefault("normalize", False)
    with torch.no_grad():
        mixed, pooled, beta, kept = mgr.mix_and_pool_forward(*inputs, gate=gate, backend=backend, **how)
    upstream = upstream_of((mixed, pooled, beta))
    upstream = [x if which is None or i in which else None for i, x in enumerate(upstream)]
    exact = keep_rows(inputs[0], beta, above)
    known = (mixed, exact, *inputs[1:], beta, kept, *upstream)
    return (mixed, beta), upstream, mgr.mix_and_pool_backward(*known, gate=gate, backend=backend, **how)


def rebuilding_error(streams, true, made, above) -> float:
    """Of rebuilt streams in units of what is allowed; infinite where an exact row is not bit-equal to the true one."""
    mixed, beta = made
    if not torch.equal(streams[beta > above], true[beta > above]):
        return float("inf")
    wide = [x.detach().double() for x in (streams, true, mixed)]
    unit = torch.finfo(streams.dtype).eps / 2
    unit *= 2 if streams.dtype == torch.bfloat16 and interpreted() else 1
    left = 1 / (1 - beta.double()).unsqueeze(-1)
    allowed = unit * (wide[1].abs() + left * wide[2].abs()) + 128 * 2.0**-24 * left * wide[1].abs().amax(
        (-1, -2), keepdim=True
    )
    far = ((wide[0] - wide[1]).abs() / allowed)[beta <= above]
    worst = far.max().item() if far.numel() else 0.0
    return worst if worst == worst else float("inf")


def inverting_errors(
    gate: str, inputs, *, above=0.5, which=None, backend="triton", spare=0.0, **how
) -> dict[str, float]:
    """Errors of the rebuilt streams, and of the gradients beside those of the float64 layer at the true streams."""
    made, upstream, (streams, *grads) = invert(gate, inputs, above=above, which=which, backend=backend, **how)
    _, true, size = truth(gate, inputs, upstream, which, **how)
    assert [g.dtype for g in grads] == [made[0].dtype, *(x.dtype for x in inputs[1:])]
    found = {
        f"d_{name}": excess(f"d_{name}", x, y, max(1.0, size if name == "bias" else 0.0), spare)
        for name, x, y in zip(INPUTS, grads, true, strict=True)
    }
    return {"streams": rebuilding_error(streams, inputs[0], made, float("inf") if above is None else above), **found}


@pytest.fixture
def fused(device):
    """The helpers above for one device."""

    def place(kind, tokens, n, width, dtypes=torch.float32, seed=0):
        """`tokens` None: so many that every program walks over several."""
        tokens = (3 if interpreted() else 2003) if tokens is None else tokens
        return draw(kind, tokens, n, width, dtypes, device=device, seed=seed)

    return SimpleNamespace(
        run=run, draw=place, check=check, errors=errors, excess=excess, names=names, device=device,
        with_gradients=with_gradients, upstream_of=upstream_of, interpreted=interpreted(),
        invert=invert, inverting_errors=inverting_errors, rebuilding_error=rebuilding_error, keep_rows=keep_rows,
    )  # fmt: skip


@pytest.fixture
def force(monkeypatch):
    """force(BLOCK_C=.., HELD=..): launches with these constants in place of the chosen ones."""
    chosen = launch.launch_choice

    def install(**constants) -> None:
        def choice(*args, **how):
            choice = chosen(*args, **how)
            return choice._replace(constants=choice.constants | constants)

        monkeypatch.setattr(launch, "launch_choice", choice)

    return install
