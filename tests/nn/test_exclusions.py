"""Layers that sparsify excludes by default, and how it reports them."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import dynsparse as ds
from dynsparse.nn import SparseLinear, describe


def sparse_names(module):
    return [name for name, m in module.named_modules() if isinstance(m, SparseLinear)]


class LanguageModel(nn.Module):
    """A model with a tied head, an adapter, and layers that share a weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.mid = nn.Linear(8, 8)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2)})
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8)
        self.two.weight = self.one.weight
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight


class Tuned(nn.Module):
    """A layer with adapters, marked as by PEFT."""

    adapter_layer_names = ("down", "up")

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(8, 8)
        self.down = nn.ModuleDict({"default": nn.Linear(8, 2)})
        self.up = nn.ModuleDict({"default": nn.Linear(2, 8)})


def test_unsupported_layers_stay_dense_and_are_reported(capsys):
    m = LanguageModel()
    ds.sparsify(m, 0.5)
    assert sparse_names(m) == ["mid"]
    assert m.head.weight is m.embed.weight
    assert m.one.weight is m.two.weight
    printed = capsys.readouterr().out
    assert "density of the selected layer: 0.5" in printed
    last = printed.split(" parameters (")[1].splitlines()[1:-2]
    assert last == [
        "'lora_A.default' stays dense: it is the adapter of another layer",
        "'one' (and 1 more like it) stays dense: it shares its weight but not its bias: 'one' and "
        "'two'; use one module in both places",
        "'head' stays dense: it shares its weight with 'embed' (Embedding)",
        "warning: sparsify cannot convert 72.7% of the parameters, so the model gains little",
    ]
    dense = 20 * 8 + 8 * 8 + 8 * 2
    total = sum(p.numel() for p in LanguageModel().parameters())
    assert f"{dense / total:.1%}" == "72.7%"


def test_exclude_may_match_layers_that_stay_dense():
    assert sparse_names(ds.sparsify(LanguageModel(), exclude=["head"], verbose=False)) == ["mid"]


def test_adapters_are_converted_if_included():
    m = nn.Sequential(Tuned())
    assert sparse_names(ds.sparsify(m, 0.5, verbose=False)) == ["0.base_layer"]
    ds.sparsify(m, 0.5, include=["*.down"], verbose=False)
    assert sparse_names(m) == ["0.base_layer", "0.down.default"]


def test_layers_with_hooks_stay_dense():
    m = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.MultiheadAttention(8, 2))
    m[0].register_forward_hook(lambda *_: None)
    m[2].out_proj.register_full_backward_hook(lambda *_: None)
    ds.sparsify(m, 0.5, verbose=False)
    assert sparse_names(m) == ["1", "2.q_proj", "2.k_proj", "2.v_proj"]
    assert m[2].out_proj._backward_hooks


def test_hooks_of_parameters_stay():
    m = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    m[0].weight.register_hook(lambda _: None)
    ds.sparsify(m, 0.5, verbose=False)
    assert sparse_names(m) == ["1"]


class Gated(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.gate = nn.Parameter(torch.ones(8))


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


def test_layers_with_other_state_stay_dense():
    m = nn.Sequential(Gated(), nn.Linear(8, 8), nn.Linear(8, 8))
    nn.utils.parametrize.register_parametrization(m[1], "bias", Double())
    names = list(m.state_dict())[:-2]
    ds.sparsify(m, 0.5, verbose=False)
    assert sparse_names(m) == ["2"]
    assert list(m.state_dict())[: len(names)] == names


@pytest.mark.parametrize(
    "change",
    [
        lambda attention: nn.utils.parametrizations.weight_norm(attention.out_proj),
        lambda attention: prune.l1_unstructured(attention, "in_proj_weight", 0.5),
    ],
)
def test_attention_with_computed_weights_stays_dense(change):
    m = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    change(m[0].self_attn)
    x = torch.randn(2, 3, 8)
    ds.sparsify(m, 0.5, verbose=False)
    assert sparse_names(m) == ["0.linear1", "0.linear2"]
    m(x).sum().backward()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.zeros(4, 16, 8))
        self.bias = nn.Parameter(torch.zeros(16))


def test_table_lists_unconverted_layers_by_type():
    m = nn.Sequential(
        nn.Conv3d(16, 256, 10), nn.Conv3d(3, 8, 3), nn.LSTM(8, 8), nn.GRU(8, 4), Experts(),
        nn.LayerNorm(8), nn.Linear(8, 8), nn.Embedding(5, 8),
    )  # fmt: skip
    lines = describe(m).splitlines()
    assert lines[3:] == [
        "2 Conv3d: 4.1 M parameters stay dense",
        "1 LSTM: 512 parameters stay dense",
        "1 Experts: 512 parameters stay dense",
        "1 GRU: 144 parameters stay dense",
        "1 Embedding: 40 parameters stay dense",
        "warning: sparsify cannot convert 100.0% of the parameters, so the model gains little",
    ]
    assert describe(m[6:7]).splitlines()[-1].startswith("the model: 72 -> 72")


def test_layer_of_density_one_may_become_sparse():
    m = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.MultiheadAttention(6, 2)).double()
    x = torch.randn(3, 8).double()
    before = m[:2](x)
    ds.sparsify(m, 1.0, keep_sparse=True, verbose=False)
    assert sparse_names(m) == ["0", "2.q_proj", "2.k_proj", "2.v_proj", "2.out_proj"]
    assert m[0].density == 1
    torch.testing.assert_close(m[:2](x), before)


@pytest.mark.parametrize("algorithm", [ds.GMP, ds.GraNet])
def test_gradual_pruning_starts_dense_and_reaches_its_density(algorithm):
    m = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 4))
    ds.sparsify(m, 1.0, keep_sparse=True, verbose=False)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    trainer = algorithm(m, optimizer, final_density=0.1, total_steps=10, update_interval=1)
    for _ in range(10):
        optimizer.zero_grad()
        m(torch.randn(8, 20)).square().mean().backward()
        trainer.step()
    assert sum(m[i].values.numel() for i in (0, 2)) == 96  # a tenth of 800 + 160
    with pytest.raises(TypeError, match="keep_sparse must be True or False"):
        ds.sparsify(nn.Sequential(nn.Linear(4, 4)), keep_sparse="yes")
