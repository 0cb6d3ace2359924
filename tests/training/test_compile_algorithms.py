"""Compiled training equals eager training if layers change size or use an active subset."""

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseLinear

TIMES = {"total_steps": 15, "update_interval": 5}


def train(kind, compiled):
    g = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        SparseLinear(16, 24, density=0.5, generator=g), nn.ReLU(),
        SparseLinear(24, 4, density=0.5, generator=g),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = {
        "gmp": lambda: ds.GMP(model, optimizer, **TIMES, final_density=0.1),
        "snfs": lambda: ds.SNFS(model, optimizer, **TIMES, window=3),
        "topkast": lambda: ds.TopKAST(model, optimizer, **TIMES, seed=0),
    }[kind]()
    forward = torch.compile(model, backend="aot_eager") if compiled else model
    for _ in range(15):
        optimizer.zero_grad()
        forward(torch.randn(8, 16, generator=g)).square().mean().backward()
        trainer.step()
    return model


# Dynamo makes such an instance itself when it traces a torch.autograd.Function.
@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["gmp", "snfs", "topkast"])
def test_compiled_equals_eager(kind):
    torch._dynamo.reset()
    eager, compiled = train(kind, False), train(kind, True)
    for p, q in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert eager[0].pattern == compiled[0].pattern


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_optimizer():
    """A compiled step of the optimizer takes the trainer's, which is not traced."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def run(compiled):
        g = torch.Generator().manual_seed(0)
        layer = SparseLinear(16, 24, density=0.5, generator=g)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        trainer = ds.RigL(layer, optimizer, **TIMES)
        step = torch.compile(lambda: optimizer.step(), backend=backend)
        for _ in range(15):
            optimizer.zero_grad()
            layer(torch.randn(8, 16, generator=g)).square().mean().backward()
            step() if compiled else optimizer.step()
        assert (trainer.steps, trainer.updates) == (15, 2)
        return layer

    eager, compiled = run(False), run(True)
    assert eager.pattern == compiled.pattern
    torch.testing.assert_close(eager.values, compiled.values)
    assert 0 < len(graphs) < 5
