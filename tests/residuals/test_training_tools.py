"""Every scheme inside what trainers wrap around a model: data parallelism, checkpointing, another backend."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from depthlab.residuals import SCHEMES, build

WIDTH, LAYERS = 8, 4

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(params=SCHEMES)
def scheme(request):
    return request.param


class Model(nn.Module):
    """`layers` shorter than LAYERS means that one sublayer is used again, as in a looped network."""

    def __init__(self, residual, layers):
        super().__init__()
        self.residual, self.layers = residual, layers

    def forward(self, x, reentrant=None):
        h, state = self.residual.start(x)
        for layer in range(LAYERS):
            sublayer = self.layers[layer % len(self.layers)]
            update = sublayer(h) if reentrant is None else checkpoint(sublayer, h, use_reentrant=reentrant)
            h, state = self.residual.step(layer, update, state)
        return h


@pytest.fixture
def model(scheme, shake, network):
    return Model(shake(build(scheme, WIDTH, LAYERS, n_streams=2), size=0.3), network(WIDTH, LAYERS))


def gradients(model, *how):
    model.zero_grad()
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    model(x, *how).pow(3).sum().backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters())]


def all_equal(xs, ys):
    return all(torch.equal(a, b) for a, b in zip(xs, ys, strict=True))


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("shared", [False, True])
def test_data_parallel_gradients_are_the_plain_ones_and_gates_stay_float32(one_process, model, shared):
    if shared:
        model.layers = model.layers[:1]
    expected = gradients(model)
    wrapped = DistributedDataParallel(model)
    for how in ((), (False,)):  # plain, and with the sublayers checkpointed
        assert all_equal(gradients(wrapped, *how), expected)
    assert all(p.dtype == torch.float32 for p in wrapped.to(torch.bfloat16).module.residual.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_the_sublayers_changes_no_gradient(model, reentrant):
    assert all_equal(gradients(model, reentrant), gradients(model))


def test_checkpointed_training_keeps_no_tensor_alive(model):
    def step():
        gradients(model, False)
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    step()
    first = step()
    assert max(step() for _ in range(8)) <= first


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.startswith("mgr")])
def test_the_module_is_the_same_for_every_backend(scheme, shake):
    """One class holds the parameters of all fused operations, so a state dict fits whichever backend runs."""
    saved, loaded = shake(build(scheme, WIDTH, LAYERS, backend="torch")), build(scheme, WIDTH, LAYERS, backend="auto")
    loaded.load_state_dict(saved.state_dict(), strict=True)
    x, layers = torch.randn(2, WIDTH), [torch.tanh] * LAYERS
    assert torch.equal(saved(x, layers), loaded(x, layers))
