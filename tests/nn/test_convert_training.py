"""Training a sparsified encoder equals training the masked dense encoder, in float64."""

import copy

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseLinear


def encoders(block_size=1):
    """Return (sparse, dense with the same weights, masks by name of the dense parameter)."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    sparse = nn.TransformerEncoder(layer, 2).double()
    for parameter in sparse.parameters():  # the layers are clones: make them differ
        nn.init.normal_(parameter, std=0.2)
    ds.sparsify(sparse, 0.3, block_size, verbose=False)
    return sparse, ds.densify(copy.deepcopy(sparse))


def dense_weights(dense):
    """Return {name of a sparse layer: its part of the dense encoder's parameters}."""
    found = {}
    for name, parameter in dense.named_parameters():
        if name.endswith("in_proj_weight"):
            stem = name.removesuffix("in_proj_weight")
            for part, i in (("q_proj", 0), ("k_proj", 1), ("v_proj", 2)):
                found[stem + part] = (parameter, slice(16 * i, 16 * i + 16))
        elif parameter.dim() == 2:
            found[name.removesuffix(".weight")] = (parameter, slice(None))
    return found


def layers(sparse):
    return {name: m for name, m in sparse.named_modules() if isinstance(m, SparseLinear)}


def loss(model, x):
    return (model(x) - x.flip(1)).square().mean()


@pytest.mark.parametrize("block_size", [1, 4])
def test_rigl_step_by_step(block_size):
    sparse, dense = encoders(block_size)
    a = torch.optim.SGD(sparse.parameters(), lr=0.05, momentum=0.9)
    b = torch.optim.SGD(dense.parameters(), lr=0.05, momentum=0.9)
    trainer = ds.RigL(sparse, a, total_steps=40, update_interval=3, drop_fraction=0.3)
    parts = dense_weights(dense)
    assert parts.keys() == layers(sparse).keys()
    for _ in range(10):
        x = torch.randn(4, 5, 16).double()
        a.zero_grad(), b.zero_grad()
        loss(sparse, x).backward()
        loss(dense, x).backward()
        full = {name: p.grad[rows].clone() for name, (p, rows) in parts.items()}
        masks = {name: layer.pattern.to_mask() for name, layer in layers(sparse).items()}
        for name, (p, rows) in parts.items():
            p.grad[rows] *= masks[name]
        b.step()
        rewirings = trainer.step() or {}
        for name, rewiring in rewirings.items():
            p, rows = parts[name]
            old, new, score = rewiring.before, rewiring.after, full[name].abs()
            size = p[rows].shape[0] // block_size, p[rows].shape[1] // block_size

            def pooled(matrix, size=size):
                return matrix.view(size[0], block_size, size[1], block_size).sum((1, 3)).flatten()

            count = len(rewiring.grown)
            assert count > 0
            free = pooled(score)
            free[old.flat] = -1
            assert torch.equal(new.flat[rewiring.grown], free.topk(count).indices.sort().values)
            kept = pooled(p.detach()[rows].abs())[old.flat]
            lowest = kept.topk(count, largest=False).indices.sort().values
            assert torch.equal(rewiring.dropped, lowest)
            with torch.no_grad():  # what leaves is zero, what joins starts at zero
                stays = old.to_mask() & new.to_mask()
                p[rows] *= stays
                b.state[p]["momentum_buffer"][rows] *= stays
        for name, layer in layers(sparse).items():
            p, rows = parts[name]
            torch.testing.assert_close(layer.to_dense(), p[rows], rtol=0, atol=1e-10)
    assert trainer.updates == 3
