"""SparseEmbedding and the tied embedding of a language model."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import dynsparse as ds
from dynsparse.nn import SparseEmbedding, SparseLinear, TiedEmbedding


def test_is_a_drop_in_for_embedding():
    layer = SparseEmbedding(20, 8, 0.3, block_size=2)
    dense = nn.Embedding.from_pretrained(layer.to_dense().detach())
    ids = torch.randint(20, (3, 5))
    assert torch.equal(layer(ids), dense(ids))
    assert layer.values.shape == (round(0.3 * 40), 2, 2)
    assert (layer.num_embeddings, layer.embedding_dim, layer.bias) == (20, 8, None)
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(layer.logits(x), x @ dense.weight.t())


def test_from_dense_and_back():
    dense = nn.Embedding(12, 8)
    layer = SparseEmbedding.from_dense(dense, 0.25, block_size=4)
    assert layer.pattern.nnz == 2  # of 6 blocks: 1.5 rounds to the even neighbour
    mask = layer.pattern.to_mask()
    assert torch.equal(layer.to_dense()[mask], dense.weight[mask])
    model = ds.densify(nn.Sequential(layer))
    assert type(model[0]) is nn.Embedding
    assert torch.equal(model[0].weight, layer.to_dense())
    assert model[0].weight.requires_grad


@pytest.mark.parametrize("padding_idx", [0, 3, -1])
def test_padding_gets_no_gradient(padding_idx):
    torch.manual_seed(0)
    table = nn.Embedding(6, 4, padding_idx=padding_idx, dtype=torch.float64)
    with torch.no_grad():
        table.weight[padding_idx] = 2.0  # a vector, as of a pretrained table
    layer = SparseEmbedding.from_dense(table, 0.5)
    mask = layer.pattern.to_mask()
    assert mask[padding_idx].any()
    with torch.no_grad():
        table.weight.mul_(mask)
    ids, dy = torch.tensor([[0, 3, 5], [5, 1, 3]]), torch.randn(2, 3, 4, dtype=torch.float64)
    for embed in (table, layer):
        embed(ids).backward(dy)
    torch.testing.assert_close(layer(ids), table(ids))
    expected = layer.pattern.values_of(table.weight.grad)
    torch.testing.assert_close(layer.values.grad, expected)
    assert ds.densify(nn.Sequential(layer))[0].padding_idx == table.padding_idx


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_unsupported_options_raise(option):
    with pytest.raises(ValueError, match=f"the table has {next(iter(option))}"):
        SparseEmbedding.from_dense(nn.Embedding(6, 4, **option), 0.5)


class Bigram(nn.Module):
    """Next-token logits through one table, sparse or dense."""

    def __init__(self, tied):
        super().__init__()
        self.table = SparseEmbedding(16, 8, 0.25).double()
        self.out = None if tied else nn.Linear(8, 16).double()

    def forward(self, ids):
        rows = self.table(ids)
        return self.table.logits(rows) if self.out is None else self.out(rows)


@pytest.mark.parametrize("tied", [True, False])
def test_growth_sees_the_full_gradient(tied):
    model = Bigram(tied)
    dense = model.table.to_dense().detach().requires_grad_()
    before = model.table.pattern
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    trainer = ds.RigL(model, optimizer, total_steps=100, update_interval=1, drop_fraction=0.3)
    ids, labels = torch.randint(16, (2, 40))
    cross_entropy(model(ids), labels).backward()
    out = dense if model.out is None else model.out.weight
    bias = None if model.out is None else model.out.bias
    logits = nn.functional.linear(nn.functional.embedding(ids, dense), out, bias)
    cross_entropy(logits, labels).backward()
    torch.testing.assert_close(model.table.values.grad, before.values_of(dense.grad))
    rewiring = trainer.step()["table"]
    grown = rewiring.after.flat[rewiring.grown]
    score = dense.grad.abs().flatten()
    score[before.flat] = -1
    expected = score.topk(len(grown)).indices.sort().values
    assert len(grown) > 0
    assert torch.equal(grown, expected)


@pytest.mark.parametrize("features", [None, 24])
@pytest.mark.parametrize("table_density", [1.0, 0.25])
def test_tied_embedding(table_density, features):
    g = torch.Generator().manual_seed(1)
    layer = TiedEmbedding(
        20, 8, features, table_density=table_density, density=0.5, block_size=4, generator=g
    ).double()
    kind = nn.Embedding if table_density == 1 else SparseEmbedding
    assert type(layer.table) is kind
    ids = torch.randint(20, (2, 3))
    table = layer.table.weight if table_density == 1 else layer.table.to_dense()
    rows = table[ids]
    x = torch.randn(2, 3, features or 8).double()
    y = x
    if features:
        rows = rows @ layer.up.to_dense().t() + layer.up.bias
        y = layer.norm(gelu(x @ layer.down.to_dense().t() + layer.down.bias))
        assert layer.up.block_size == layer.down.block_size == 4
    torch.testing.assert_close(layer(ids), rows)
    torch.testing.assert_close(layer.logits(x), y @ table.t())
    expected = layer(ids), layer.logits(x)
    if features or table_density < 1:
        ds.densify(layer)
        assert not any(isinstance(m, SparseLinear) for m in layer.modules())
        torch.testing.assert_close((layer(ids), layer.logits(x)), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"density": 0}, r"density must be a number in \(0, 1\], got 0"),
        ({"block_size": 3}, "block_size 3 does not divide"),
        ({"table_density": 1.5}, r"density must be a number in \(0, 1\], got 1.5"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        TiedEmbedding(20, 8, 24, **arguments)


@pytest.mark.parametrize("padding_idx", [20, -21])
def test_padding_outside_the_table_raises(padding_idx):
    with pytest.raises(ValueError, match="padding_idx must be"):
        SparseEmbedding(20, 8, padding_idx=padding_idx)
