"""Parameter groups for weight decay, and a warning if groups are chosen by dimensions."""

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseLinear


def made():
    return nn.Sequential(
        nn.Embedding(5, 12),
        SparseLinear(12, 16, density=0.3),
        nn.LayerNorm(16),
        SparseLinear(16, 8, density=0.5, block_size=4),
        nn.Linear(8, 2),
    )


def by_dimensions(model, decay=0.1):
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def test_only_values_and_matrices_decay():
    model = made()
    model[4].weight.requires_grad = False
    names = {id(p): name for name, p in model.named_parameters()}
    decaying, others = ds.param_groups(model, weight_decay=0.1)
    assert decaying["weight_decay"] == 0.1
    assert others["weight_decay"] == 0
    assert [names[id(p)] for p in decaying["params"]] == ["0.weight", "1.values", "3.values"]
    assert [names[id(p)] for p in others["params"]] == [
        "1.bias", "2.weight", "2.bias", "3.bias", "4.bias",
    ]  # fmt: skip


def test_shared_weight_is_listed_once():
    layer = SparseLinear(8, 8, density=0.5)
    decaying, others = ds.param_groups(nn.Sequential(layer, nn.ReLU(), layer), weight_decay=1.0)
    assert [len(decaying["params"]), len(others["params"])] == [1, 1]


def test_groups_by_dimensions_warn_once():
    model = made()
    lost = torch.optim.AdamW(by_dimensions(model))
    with pytest.warns(UserWarning, match="the values of layer '1' do not decay, while") as said:
        ds.Static(model, lost)
    assert len(said) == 1
    # Where all layers are sparse, no matrix is left to decay.
    whole = nn.Sequential(SparseLinear(8, 8, density=0.5), SparseLinear(8, 8, density=0.5))
    with pytest.warns(UserWarning, match="layer '0' and of 1 layers more do not decay"):
        ds.Static(whole, torch.optim.AdamW(by_dimensions(whole)))


@pytest.mark.parametrize(
    "groups",
    [
        lambda model: ds.param_groups(model, weight_decay=0.1),
        lambda model: by_dimensions(model, 0.0),  # nothing decays
        lambda model: list(model.parameters()),
        # Somebody chose by name.
        lambda model: [
            {"params": [p for n, p in model.named_parameters() if "values" not in n]},
            {"params": [model[1].values, model[3].values], "weight_decay": 0.0},
        ],
    ],
)
def test_other_groups_do_not_warn(groups):
    model = made()
    ds.Static(model, torch.optim.AdamW(groups(model)))  # a warning would be an error


def test_bad_arguments():
    with pytest.raises(ValueError, match="weight_decay"):
        ds.param_groups(made(), weight_decay=-1.0)
    with pytest.raises(TypeError, match="model"):
        ds.param_groups([1], weight_decay=0.1)


def test_table_mentions_one_dimensional_values():
    said = "if weight decay depends on dimensions, use dynsparse.param_groups"
    assert said in ds.nn.describe(made())
    assert said not in ds.nn.describe(ds.nn.SparseLinear(16, 8, density=0.5, block_size=4))
