"""What rebuilt streams cost a layer besides its kernels, in launches: counted, so that they do not grow back unnoticed.

The kernels are stood in for by functions that hand out what was made before, and so launch nothing.
"""

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from depthlab.kernels import mgr
from depthlab.kernels.mgr import rounding
from depthlab.residuals import Recompute, build, rebuilding

WIDTH, LAYERS, STREAMS, TOKENS = 8, 20, 4, 3
# what only makes, reshapes or looks at a tensor, and launches nothing on a GPU
FREE = {"detach", "empty", "view", "select", "slice", "as_strided", "new_empty", "flatten"}
FREE |= {"resolve_conj", "resolve_neg"}  # tolist, of numbers that have come to the host
MIXING = LAYERS - STREAMS + 1


def hand_out(monkeypatch, open_gates=0.0):
    """No kernel runs: every layer gets the same streams, gates and numbers, some of which were above the ceiling."""
    streams, row = torch.ones(TOKENS, STREAMS, WIDTH), torch.ones(TOKENS, WIDTH)
    beta, kept = torch.rand(TOKENS, STREAMS), torch.ones(TOKENS, 4 * STREAMS + 1)
    carried = mgr.Carried(torch.ones(4, TOKENS, STREAMS), torch.tensor([1e-5, open_gates, 0]))
    weights = torch.ones(WIDTH), torch.ones(1), torch.ones(WIDTH)

    def forward(*_, **__):
        return streams.detach(), row.detach(), beta, kept

    monkeypatch.setattr(rebuilding, "mix_and_pool_forward", forward)
    monkeypatch.setattr(rebuilding, "carry_rounding", lambda *_, **__: carried)
    monkeypatch.setattr(rebuilding, "mix_and_pool_backward", lambda *_, **__: (streams, streams, row, *weights))
    monkeypatch.setattr(rebuilding, "mix_and_pool_gradients", lambda *_, **__: (streams, row, *weights))


def launches(recompute) -> tuple[Counter, Counter]:
    """What mixing layers launch forward and backward: operators of torch, by name, over all layers."""
    residual = build("mgr-competitive", WIDTH, LAYERS, n_streams=STREAMS, recompute=recompute)
    updates = [torch.ones(TOKENS, WIDTH, requires_grad=True) for _ in range(LAYERS)]
    h, state = residual.start(torch.ones(TOKENS, WIDTH, requires_grad=True))
    for layer in range(STREAMS - 1):
        h, state = residual.step(layer, updates[layer], state)

    def forward():
        at = h, state
        for layer in range(STREAMS - 1, LAYERS):
            at = residual.step(layer, updates[layer], at[1])
        return at[0]

    out, going_up = counted(forward)
    leaves = updates[STREAMS - 1 :]
    _, going_down = counted(lambda: torch.autograd.grad(out, leaves, torch.ones_like(out)))
    return going_up, going_down


def counted(run):
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        result = run()
    outermost = [x for x in seen.events() if is_operator(x) and not is_operator(x.cpu_parent)]
    names = [event.name.removeprefix("aten::") for event in outermost]
    return result, Counter(name for name in names if name not in FREE)


def is_operator(event) -> bool:
    return event is not None and event.name.startswith("aten::")


@pytest.mark.parametrize("recompute", [Recompute(), Recompute(anchor_every=None), Recompute(anchor_every=4)])
def test_where_no_row_is_kept_a_layer_launches_nothing_but_its_kernels(monkeypatch, recompute):
    hand_out(monkeypatch)
    up, down = launches(recompute)
    assert not up, up
    assert sum(down.values()) <= 1, down


def test_kept_rows_cost_a_few_launches_a_layer(monkeypatch):
    hand_out(monkeypatch, open_gates=2.0)
    for recompute, most in ((Recompute(), 5), (Recompute(top_p=0.2), 7)):
        up, _ = launches(recompute)
        assert MIXING <= sum(up.values()) <= most * MIXING, up


def test_the_count_sees_what_is_launched(monkeypatch):
    hand_out(monkeypatch)
    measure = rebuilding.MixingLayer._measure

    def wasteful(self, mixed):
        self.wasted = mixed.square()
        measure(self, mixed)

    monkeypatch.setattr(rebuilding.MixingLayer, "_measure", wasteful)
    assert sum(launches(Recompute())[0].values()) >= MIXING


def test_what_rounding_adds_up_to_takes_two_launches(monkeypatch):
    pytest.importorskip("triton")
    from depthlab.kernels.mgr import rounding_kernels

    launched = []

    class Launch:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *_, **__: launched.append(self.name)

    for name in ("carry_kernel", "decide_kernel"):
        monkeypatch.setattr(rounding_kernels, name, Launch(name))
    beta, kept = torch.rand(TOKENS, STREAMS), torch.ones(TOKENS, 4 * STREAMS + 1)
    how = {"max_gate": 0.5, "sigma": 1e-3, "tolerance": 1e-2}
    first, others = counted(lambda: rounding.carry_rounding(beta, kept, None, None, **how))
    _, more = counted(lambda: rounding.carry_rounding(beta, kept, None, first, **how))
    assert launched == ["carry_kernel", "decide_kernel"] * 2 and not others and not more
