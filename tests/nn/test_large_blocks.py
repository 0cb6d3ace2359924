"""Blocks of 64 and 128 in layers and trainings."""

import copy

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseLinear, SparseMultiheadAttention, SparseTransformerLayer

BLOCKS = [64, 128]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("block_size", BLOCKS)
def test_layer_equals_dense(block_size, dtype, generator):
    layer = SparseLinear(384, 256, 0.4, block_size, generator=generator)
    dense = nn.Linear(384, 256).double()
    with torch.no_grad():
        # What bfloat16 holds exactly, so that only the sums are rounded.
        for parameter in layer.parameters():
            parameter.copy_(parameter.bfloat16())
        dense.weight.copy_(layer.to_dense())
        dense.bias.copy_(layer.bias)
    layer.to(dtype)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 2e-2)
    for batch in (1, 5, 70):
        x = torch.randn(batch, 384, generator=generator).to(dtype).requires_grad_()
        exact = x.detach().double().requires_grad_()
        dy = torch.randn(batch, 256, generator=generator).to(dtype)
        y, expected = layer(x), dense(exact)
        y.backward(dy)
        expected.backward(dy.double())
        for got, wanted in (
            (y, expected),
            (x.grad, exact.grad),
            (layer.values.grad, layer.pattern.values_of(dense.weight.grad)),
            (layer.bias.grad, dense.bias.grad),
        ):
            scale = float(wanted.detach().abs().max())
            torch.testing.assert_close(got.double(), wanted, rtol=0, atol=tolerance * scale)
        layer.zero_grad()
        dense.zero_grad()


@pytest.mark.parametrize("method", [ds.RigL, ds.SET])
@pytest.mark.parametrize("block_size", BLOCKS)
def test_training_updates_patterns(block_size, method, generator):
    model = nn.Sequential(
        SparseLinear(512, 512, 0.5, block_size, generator=generator),
        nn.ReLU(),
        SparseLinear(512, 256, 0.5, block_size, generator=generator),
    )
    layers = model[0], model[2]
    seen = [[layer.pattern] for layer in layers]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = method(model, optimizer, total_steps=30, update_interval=3, drop_fraction=0.5)
    x = torch.randn(64, 512, generator=generator)
    y = torch.randint(256, (64,), generator=generator)
    losses = []
    for _ in range(15):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        trainer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        for patterns, layer in zip(seen, layers, strict=True):
            patterns.append(layer.pattern)
    assert losses[-1] < losses[0]
    for patterns in seen:
        assert any(p != patterns[0] for p in patterns)
        assert {p.nnz for p in patterns} == {patterns[0].nnz}
    dense = ds.densify(copy.deepcopy(model))
    torch.testing.assert_close(model(x), dense(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block_size", BLOCKS)
def test_attention_and_transformers(block_size, generator):
    attention = SparseMultiheadAttention(256, 4, density=0.5, block_size=block_size)
    layer = SparseTransformerLayer(256, 4, 384, dropout=0.0, density=0.5, block_size=block_size)
    x = torch.randn(2, 6, 256, generator=generator)
    (copied,) = ds.densify(nn.Sequential(copy.deepcopy(attention)))
    torch.testing.assert_close(attention(x, x, x)[0], copied(x, x, x)[0])
    torch.testing.assert_close(layer(x), ds.densify(copy.deepcopy(layer))(x))


@pytest.mark.parametrize("block_size", BLOCKS)
def test_sparsify_keeps_the_largest_blocks(block_size):
    model = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))
    weight = model[0].weight.detach().clone()
    ds.sparsify(model, 0.25, block_size, exclude=["2"], start="magnitude", verbose=False)
    layer = model[0]
    assert (layer.block_size, layer.density) == (block_size, 0.25)
    b = block_size
    score = weight.abs().double().view(256 // b, b, 512 // b, b).sum((1, 3)).flatten()
    kept = layer.pattern.flat
    assert kept.tolist() == sorted(score.topk(len(kept)).indices.tolist())
    assert torch.equal(layer.values, layer.pattern.values_of(weight))


def test_indivisible_sizes_raise():
    with pytest.raises(ValueError, match=r"128.*does not divide|does not divide.*128"):
        SparseLinear(192, 256, 0.5, 128)
