"""Small models, sharded or not, and the batches of their steps."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from dynsparse import nn as sparse

WIDTH, OUT, SAMPLES = 24, 8, 8


class Mixed(nn.Module):
    """An embedding, attention and linear layers, all sparse."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        common = {"generator": g, "dtype": dtype}
        self.table = sparse.SparseEmbedding(30, WIDTH, 0.3, **common)
        self.attention = sparse.SparseMultiheadAttention(
            WIDTH, 2, density=0.3, batch_first=True, **common
        )
        self.blocks = sparse.SparseLinear(WIDTH, 32, 0.4, 4, **common)
        self.head = sparse.SparseLinear(32, OUT, 0.3, **common)

    def forward(self, ids):
        x = self.table(ids)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.blocks(x).tanh()).mean(1)


def shard(model, mesh, **options):
    """Apply `fully_shard` to each sparse layer, then to the rest."""
    for module in model.modules():
        if isinstance(module, sparse.SparseLinear):
            fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def linear_model(block_size=1, density=0.2, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    common = {"block_size": block_size, "generator": g, "dtype": dtype}
    return nn.Sequential(
        sparse.SparseLinear(WIDTH, 32, density, **common),
        nn.Tanh(),
        sparse.SparseLinear(32, OUT, density, **common),
    )


def share(step, rank, size, dtype=torch.float64, samples=SAMPLES):
    """Return this rank's part of a step's samples, which do not depend on the number of ranks."""
    g = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(samples, WIDTH, generator=g, dtype=dtype)
    y = torch.randn(samples, OUT, generator=g, dtype=dtype)
    return tuple(t.chunk(size)[rank] for t in (x, y))


def share_of_ids(step, rank, size, dtype=torch.float64):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 30, (SAMPLES, 5), generator=g)
    y = torch.randn(SAMPLES, OUT, generator=g, dtype=dtype)
    return tuple(t.chunk(size)[rank] for t in (ids, y))


def layers_of(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, sparse.SparseLinear)}


def off_by(model, reference):
    """Return the largest difference of dense weights, which includes the patterns."""
    ours, theirs = layers_of(model), layers_of(reference)
    with torch.no_grad():
        return max(
            float((layer.to_dense() - theirs[name].to_dense()).abs().max())
            for name, layer in ours.items()
        )


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
