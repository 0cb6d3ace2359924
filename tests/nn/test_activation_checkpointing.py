"""Activation checkpointing, reentrant or not, with and without autocast, equals plain training."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dynsparse as ds
from dynsparse.nn import SparseEmbedding, SparseLinear, SparseMultiheadAttention


class Attend(nn.Module):
    def __init__(self, block_size):
        super().__init__()
        self.attention = SparseMultiheadAttention(
            16, 2, density=0.5, block_size=block_size, batch_first=True
        )

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Look(nn.Module):
    def __init__(self, block_size):
        super().__init__()
        self.table = SparseEmbedding(16, 16, 0.5, block_size)

    def forward(self, x):
        return self.table((x.float().flatten(1)[:, :6].sigmoid() * 11).long()) * x.sum()


MODELS = {
    "linear": lambda b: nn.Sequential(SparseLinear(16, 32, 0.5, b), nn.GELU(),
                                      SparseLinear(32, 16, 0.5, b)),
    "attention": Attend,
    "embedding": Look,
}  # fmt: skip


def train(model, how, low):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = ds.RigL(model, optimizer, total_steps=8, update_interval=2, drop_fraction=0.4)
    generator = torch.Generator().manual_seed(0)
    gradients = []
    for _ in range(5):
        x = torch.randn(3, 5, 16, generator=generator, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            y = model(x) if how is None else checkpoint(model, x, use_reentrant=how)
        y.float().square().mean().backward()
        gradients.append(x.grad.clone())
        gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        trainer.step()
        optimizer.zero_grad()
    return gradients, [layer.pattern for layer in trainer.layers.values()]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("kind", MODELS)
def test_checkpointing_equals_plain_training(kind, block_size, low, reentrant):
    torch.manual_seed(0)
    model = MODELS[kind](block_size)
    twin = copy.deepcopy(model)
    expected, patterns = train(model, None, low)
    found, theirs = train(twin, reentrant, low)
    assert patterns == theirs
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
