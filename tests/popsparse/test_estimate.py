"""The estimate of a model's sparse layers on the tile machine."""

import json

import pytest
import torch
from torch import nn

import dynsparse as ds
from popsparse import Layer, estimate, plan
from popsparse.machine import Target

TARGET = Target.bow(tiles=16)


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        ds.nn.SparseLinear(64, 96, density=0.2, block_size=8),
        nn.BatchNorm1d(96),
        nn.Dropout(0.5),
        ds.nn.SparseLinear(96, 32, density=0.3),
    )


def test_figures_equal_the_simulated_machine():
    network = model()
    found = estimate(network, torch.randn(24, 64), TARGET)
    assert [layer.name for layer in found.layers] == ["0", "3"]
    first = found.layers[0]
    assert (first.out, first.in_, first.batch, first.block_size) == (96, 64, 24, 8)
    assert set(first.passes) == {"forward", "grad_input", "grad_weight"}
    pattern = network[0].pattern
    chosen = plan(96, 64, 24, pattern.density, 8, "float16", TARGET, passes=tuple(first.passes))
    assert [first.plan[dim] for dim in "xyz"] == list(chosen.partition[1:])
    layer = Layer(chosen, numerics=False)
    layer.set_pattern(pattern)
    for name, one in first.passes.items():
        assert one.cycles == layer.run(name).cycles
        assert one.fits
    assert found.cycles == sum(layer.cycles for layer in found.layers)
    assert found.seconds == pytest.approx(found.cycles / 1.85e9)
    json.dumps(found.to_dict())
    assert "grad_weight" in found.summary()


def test_model_is_unchanged():
    network = model()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    state = torch.get_rng_state()
    estimate(network, torch.randn(24, 64, generator=torch.Generator()), TARGET, passes="forward")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in network.modules())
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert not any(module._forward_pre_hooks for module in network.modules())


def test_leading_dimensions_are_the_batch_and_every_use_counts():
    layer = ds.nn.SparseLinear(32, 32, density=0.5)
    found = estimate(nn.Sequential(layer, layer), torch.randn(2, 3, 32), TARGET, passes="forward")
    assert [one.batch for one in found.layers] == [6, 6]


def test_look_ups_in_tables_are_not_products():
    network = nn.Sequential(
        ds.nn.SparseEmbedding(48, 32, density=0.5), ds.nn.SparseLinear(32, 16, density=0.5)
    )
    found = estimate(network, torch.randint(48, (8, 8)), TARGET, passes="forward")
    assert [(one.name, one.batch) for one in found.layers] == [("1", 64)]


def test_tied_heads_count():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(64, 32)
            self.head = nn.Linear(32, 64, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    model = ds.sparsify(Model(), 0.5, include=["embed", "head"], verbose=False)
    (layer,) = estimate(model, torch.zeros(2, 4, dtype=torch.int64), TARGET).layers
    assert (layer.name, layer.out, layer.in_, layer.batch) == ("head", 64, 32, 8)


def test_logits_of_tables_count():
    model = ds.nn.TiedEmbedding(64, 32, table_density=0.5)

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = model

        def forward(self, ids):
            return self.tokens.logits(self.tokens(ids))

    (layer,) = estimate(Whole(), torch.zeros(2, 4, dtype=torch.int64), TARGET).layers
    assert (layer.name, layer.out, layer.in_, layer.batch) == ("tokens.table", 64, 32, 8)
    assert "logits" not in vars(model.table)


def test_layers_called_by_keyword_count():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = ds.nn.SparseLinear(32, 16, density=0.5)

        def forward(self, x):
            return self.layer(x=x)

    found = estimate(Network(), torch.randn(6, 32), TARGET, passes="forward")
    assert [(one.name, one.batch) for one in found.layers] == [("layer", 6)]


def test_bad_input():
    with pytest.raises(ValueError, match="no sparse layer ran"):
        estimate(nn.Linear(4, 4), torch.randn(2, 4), TARGET)
    with pytest.raises(ValueError, match=r"layer '0': .*float16 or float32"):
        estimate(model(), torch.randn(2, 64), TARGET, dtype="int8")
    grouped = nn.Sequential(ds.nn.SparseConv2d(8, 8, 3, groups=2, density=0.5))
    with pytest.raises(ValueError, match="layer '0': a convolution with groups is not a single"):
        estimate(grouped, torch.randn(2, 8, 6, 6), TARGET)
    with pytest.raises(ValueError, match="passes must be among"):
        estimate(model(), torch.randn(2, 64), TARGET, passes="backward")
