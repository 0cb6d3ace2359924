"""Compiled models have one graph without breaks, which pattern updates keep."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import dynsparse as ds
from dynsparse import SparsePattern
from dynsparse.nn import SparseLinear, SparseMultiheadAttention

# Dynamo makes such an instance itself when it traces a torch.autograd.Function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = SparseMultiheadAttention(32, 4, density=0.4, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False, is_causal=True)[0]


MODELS = {
    "elements": lambda: nn.Sequential(
        SparseLinear(32, 48, 0.3), nn.GELU(), SparseLinear(48, 32, 0.3)
    ),
    "blocks": lambda: nn.Sequential(
        SparseLinear(32, 64, 0.5, 16), nn.GELU(), SparseLinear(64, 32, 0.5, 4, bias=False)
    ),
    "attention": Attend,
}


@pytest.fixture(params=["cpu", "elsewhere"])
def place(request):
    if request.param == "elsewhere":
        request.getfixturevalue("off_cpu")
    torch._dynamo.reset()
    yield request.param
    torch._dynamo.reset()


def sparse_layers(model):
    return [module for module in model.modules() if isinstance(module, SparseLinear)]


def update(model):
    for layer in sparse_layers(model):
        own = layer.pattern
        layer.set_pattern(SparsePattern.random(own.shape, nnz=own.nnz, block_size=own.block_size))


def train(model, forward, low=False):
    """Return the gradients of steps with an update of all patterns between them."""
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found = []
    for _ in range(3):
        for _ in range(2):
            x = torch.randn(2, 5, 32)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                y = forward(x)
            y.float().square().mean().backward()
            found += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
        update(model)
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "low"), [*((name, False) for name in MODELS), ("blocks", True)])
def test_pattern_updates_do_not_recompile(place, name, low):
    model = MODELS[name]()
    twin = copy.deepcopy(model)
    addresses = [tensor.data_ptr() for layer in sparse_layers(model) for tensor in layer.index]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    got, wanted = train(model, compiled, low), train(twin, twin, low)
    assert counter.frame_count == 1
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2 if low else 1e-4, atol=1e-2)
    after = [tensor.data_ptr() for layer in sparse_layers(model) for tensor in layer.index]
    assert (after == addresses) == (place == "elsewhere")


@pytest.mark.parametrize("name", ["elements", "blocks"])
def test_trainer_does_not_recompile(place, name):
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = ds.RigL(model, optimizer, total_steps=20, update_interval=2, drop_fraction=0.3)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    memory = [p.data_ptr() for p in model.parameters()]
    for _ in range(8):
        optimizer.zero_grad()
        compiled(torch.randn(16, 32)).square().mean().backward()
        trainer.step()
    assert trainer.updates == 4
    assert counter.frame_count == 1
    if place == "elsewhere":
        assert memory == [p.data_ptr() for p in model.parameters()]


def test_captured_steps_may_run_eagerly(place):
    """CUDA graphs need this: their replays keep no x and dY to capture."""
    model = MODELS["elements"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = ds.RigL(model, optimizer, total_steps=20, update_interval=2, drop_fraction=0.3)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(8):
        optimizer.zero_grad()
        last = trainer.schedule.is_due(trainer.steps + 1)
        with torch.compiler.set_stance("force_eager" if last else "default"):
            loss = compiled(torch.randn(16, 32)).square().mean()
        assert last == bool(trainer._captures)
        loss.backward()
        trainer.step()
    assert trainer.updates == 4
    assert counter.frame_count == 1
