"""sparsify and densify on whole models."""

import copy
import io
import warnings
from itertools import pairwise

import pytest
import torch
from conv1d_layer import Conv1D
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel

import dynsparse as ds
from dynsparse.nn import SparseLinear, SparseMultiheadAttention, describe


def encoder(d=16, layers=2, **options):
    options = {"dropout": 0.0, "batch_first": True, "activation": "gelu"} | options
    layer = nn.TransformerEncoderLayer(d, 4, 32, **options)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=not options.get("norm_first"))


class Classifier(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.body = encoder(**options)
        self.mix = Conv1D(24, 16)
        self.head = nn.Linear(24, 10)

    def forward(self, tokens, **masks):
        return self.head(self.mix(self.body(self.embed(tokens), **masks)).mean(1))


def model(**options):
    return Classifier(**options).double()


def tokens(*shape):
    return torch.randint(20, shape or (3, 5))


def sparse_names(module):
    return [name for name, m in module.named_modules() if isinstance(m, SparseLinear)]


def sparsified(module=None, density=0.3, **options):
    return ds.sparsify(module or model(), density, verbose=False, **options)


def test_converts_every_kind_of_layer_in_place():
    m = model()
    assert ds.sparsify(m, 0.2, exclude=["head"], verbose=False) is m
    parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj",
             "linear1", "linear2"]  # fmt: skip
    expected = [f"body.layers.{i}.{part}" for i in range(2) for part in parts]
    assert sorted(sparse_names(m)) == sorted([*expected, "mix"])
    assert type(m.head) is nn.Linear
    nnz = sum(m.get_submodule(name).pattern.nnz for name in sparse_names(m))
    elements = 2 * (4 * 16 * 16 + 2 * 16 * 32) + 16 * 24
    assert nnz == round(0.2 * elements)
    assert m(tokens()).shape == (3, 10)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("start", ["random", "magnitude"])
def test_density_one_keeps_modules_and_outputs(start, training):
    m = model().train(training)
    x = tokens()
    modules, expected = list(m.modules()), m(x)
    sparsified(m, 1.0, start=start)
    assert all(a is b for a, b in zip(m.modules(), modules, strict=True))
    assert torch.equal(m(x), expected)


# torch warns of the packed batches that the dense encoder makes of padded ones
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_sparse_encoder_equals_densified_copy(training, grad, norm_first):
    m = sparsified(model(norm_first=norm_first), start="magnitude").train(training)
    dense = ds.densify(copy.deepcopy(m))
    assert not sparse_names(dense)
    x = tokens()
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    causal = torch.ones(5, 5).triu(1).bool()
    with torch.set_grad_enabled(grad):
        for masks in ({}, {"mask": causal}, {"src_key_padding_mask": padding}):
            if not grad and not training and "src_key_padding_mask" in masks:
                # torch's packed batches leave zeros at the padding; compare the rest
                own = m.body(m.embed(x), **masks)
                expected = dense.body(dense.embed(x), **masks)
                torch.testing.assert_close(own[~padding], expected[~padding])
            else:
                torch.testing.assert_close(m(x, **masks), dense(x, **masks))


@pytest.mark.parametrize("keep", ["*.self_attn", "*.linear*"])
def test_partly_sparse_encoder_layer_avoids_the_fused_path(keep):
    m = sparsified(exclude=[keep], start="magnitude").eval()
    dense = ds.densify(copy.deepcopy(m))
    x = tokens()
    with torch.no_grad():
        torch.testing.assert_close(m(x), dense(x))


def test_densify_restores_the_fused_path():
    m = model().eval()
    layer = m.body.layers[0]
    flags = m.body.use_nested_tensor, layer.activation_relu_or_gelu
    assert flags == (True, 2)
    sparsified(m)
    assert (m.body.use_nested_tensor, layer.activation_relu_or_gelu) == (False, 0)
    ds.densify(m)
    assert (m.body.use_nested_tensor, layer.activation_relu_or_gelu) == flags
    assert vars(layer).keys() == vars(encoder().layers[0]).keys()


def test_transformer_with_decoder():
    m = nn.Transformer(16, 4, 1, 1, 32, dropout=0.0, batch_first=True).double()
    sparsified(m, start="magnitude")
    dense = ds.densify(copy.deepcopy(m))
    src, tgt = torch.randn(2, 6, 16).double(), torch.randn(2, 4, 16).double()
    mask = m.generate_square_subsequent_mask(4, dtype=torch.float64)
    for training in (True, False):
        m.train(training), dense.train(training)
        with torch.set_grad_enabled(training):
            own = m(src, tgt, tgt_mask=mask, tgt_is_causal=True)
            torch.testing.assert_close(own, dense(src, tgt, tgt_mask=mask, tgt_is_causal=True))


@given(st.data())
def test_magnitude_start_keeps_the_largest_and_densify_inverts(data):
    b = data.draw(st.sampled_from([1, 2, 4]))
    sizes = [b * data.draw(st.integers(1, 6)) for _ in range(4)]
    layers = [nn.Linear(i, o, bias=i % 2 == 0) for i, o in pairwise(sizes)]
    m = nn.Sequential(*layers, Conv1D(b, sizes[-1]), nn.Identity()).double()
    weights = [x.weight.detach().clone() for x in list(m)[:-1]]
    weights[-1] = weights[-1].t()
    total = sum(w.numel() for w in weights)
    density = data.draw(st.floats(min(1, 4 * b * b / total), 1))
    sparsified(m, density, block_size=b, start="magnitude", allocation="uniform")
    sparse = copy.deepcopy(m)
    x = torch.randn(2, sizes[0]).double()
    expected = m(x)
    if sparse_names(m):
        ds.densify(m)
    assert [type(x) for x in m] == [nn.Linear] * 3 + [Conv1D, nn.Identity]
    torch.testing.assert_close(m(x), expected)
    for layer, own, weight in zip(sparse, m, weights, strict=False):
        dense = own.weight if type(own) is nn.Linear else own.weight.t()
        if not isinstance(layer, SparseLinear):
            assert torch.equal(dense, weight)
            continue
        assert torch.equal(dense, layer.to_dense())
        mask = layer.pattern.to_mask()
        assert torch.equal(dense[mask], weight[mask])
        out, in_ = weight.shape
        score = weight.abs().view(out // b, b, in_ // b, b).sum((1, 3))
        kept = mask.view(out // b, b, in_ // b, b).any(3).any(1)
        if not kept.all():
            assert score[kept].min() >= score[~kept].max()


@given(st.data())
def test_ties_are_broken_as_in_from_dense(data):
    b = data.draw(st.sampled_from([1, 2]))
    linear = nn.Linear(b * data.draw(st.integers(1, 6)), b * data.draw(st.integers(1, 6)))
    with torch.no_grad():
        linear.weight.copy_(torch.randint(-2, 3, linear.weight.shape))
    density = data.draw(st.floats(0.2, 0.99))
    expected = SparseLinear.from_dense(linear, density, b)
    m = sparsified(nn.Sequential(linear), None, densities={"0": density}, block_size=b,
                   start="magnitude")  # fmt: skip
    if isinstance(m[0], SparseLinear):
        assert m[0].pattern == expected.pattern
        assert torch.equal(m[0].values, expected.values)


def test_random_start_scales_the_dense_weights():
    m = nn.Sequential(nn.Linear(40, 30), nn.ReLU()).double()
    weight, bias = m[0].weight.detach().clone(), m[0].bias
    sparsified(m, 0.2, generator=torch.Generator().manual_seed(1))
    mask = m[0].pattern.to_mask()
    connections = mask.sum(1, keepdim=True).clamp(min=1)
    expected = (weight * (40 / connections).sqrt()) * mask
    torch.testing.assert_close(m[0].to_dense(), expected)
    assert m[0].bias is bias
    again = nn.Sequential(nn.Linear(40, 30), nn.ReLU()).double()
    sparsified(again, 0.2, generator=torch.Generator().manual_seed(1))
    assert again[0].pattern == m[0].pattern


@pytest.mark.parametrize("start", ["random", "magnitude"])
@pytest.mark.parametrize("averaged", [False, True])
def test_copy_inside_the_model_gets_the_pattern_of_its_original(start, averaged):
    net = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 20), nn.Linear(20, 30))
    target = AveragedModel(net) if averaged else copy.deepcopy(net)
    m = nn.ModuleDict({"net": net, "target": target, "other": nn.Linear(20, 30)})
    sparsified(m, 0.3371, start=start)
    x = torch.randn(5, 20)
    assert torch.equal(m["net"](x), m["target"](x))
    copied = m["target"].module if averaged else m["target"]
    for i in (0, 2, 3):
        assert m["net"][i].pattern is copied[i].pattern
    assert m["net"][0].pattern != m["other"].pattern


def test_equal_layers_of_an_encoder_get_patterns_of_their_own():
    layer = nn.TransformerEncoderLayer(16, 2, 32)
    m = sparsified(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), 0.3)
    first, second, third = (one.linear1.pattern for one in m.layers)
    assert first != second != third != first
    zeros = nn.ModuleDict({"a": nn.Linear(20, 30), "b": nn.Linear(20, 30)})
    for layer in zeros.values():
        nn.init.zeros_(layer.weight)
    sparsified(zeros, 0.3)
    assert zeros["a"].pattern != zeros["b"].pattern


def test_copy_inside_the_model_keeps_a_density_of_its_own():
    m = nn.ModuleDict({"net": nn.Linear(20, 30)})
    m["target"] = copy.deepcopy(m["net"])
    sparsified(m, 0.3, densities={"target": 0.5})
    assert m["target"].density == 0.5


def test_names_densities_and_block_sizes():
    m = model()
    sparsified(
        m,
        0.4,
        include=["body", "head"],
        exclude="body.layers.1",
        densities={"*.self_attn.q_proj": 0.25, "*.self_attn": 0.5},
        block_sizes={"*.linear1": 8, "head": 2},
        block_size=4,
        allocation="uniform",
    )
    layer = m.body.layers[0]
    assert type(m.mix) is Conv1D
    assert type(m.body.layers[1].self_attn) is nn.MultiheadAttention
    assert type(m.body.layers[1].linear1) is nn.Linear
    assert (layer.self_attn.q_proj.density, layer.self_attn.k_proj.density) == (0.25, 0.5)
    assert (layer.linear1.block_size, m.head.block_size, layer.linear2.block_size) == (8, 2, 4)
    nnz = sum(m.get_submodule(n).values.numel() for n in sparse_names(m))
    assert abs(nnz - 0.4 * (4 * 256 + 2 * 512 + 240)) <= 64


def test_densities_without_overall_density():
    m = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    sparsified(m, None, densities={"0": 0.1, "*": 1})
    assert (m[0].pattern.nnz, type(m[1])) == (10, nn.Linear)


def test_layers_of_density_one_stay_dense_modules():
    m = nn.Sequential(nn.Linear(1000, 100), nn.Linear(100, 2))
    small = m[1]
    sparsified(m, 0.03)  # 102 / 1202 of the 3006 non-zeros are more than the small layer has
    assert m[1] is small
    assert m[0].pattern.nnz == round(0.03 * 100_200) - 200


def test_flags_dtype_and_bias_are_kept():
    m = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.MultiheadAttention(8, 2))
    m = m.to(torch.bfloat16)
    m[0].weight.requires_grad_(False)
    m[2].in_proj_weight.requires_grad_(False)
    m[2].in_proj_bias.requires_grad_(False)
    m[1].eval()
    bias, out_bias = m[0].bias, m[2].out_proj.bias
    sparsified(m, 0.5)

    def check(weights, projection_bias):
        assert [w.requires_grad for w in weights] == [False, True, False, True]
        assert all(p.dtype == torch.bfloat16 for p in m.parameters())
        assert m[0].bias is bias
        assert m[1].bias is None
        assert m[2].out_proj.bias is out_bias
        assert not projection_bias.requires_grad
        assert [x.training for x in m] == [True, False, True]

    check([m[0].values, m[1].values, m[2].q_proj.values, m[2].out_proj.values], m[2].q_proj.bias)
    ds.densify(m)
    check([m[0].weight, m[1].weight, m[2].in_proj_weight, m[2].out_proj.weight], m[2].in_proj_bias)


def test_rigl_on_a_sparsified_encoder():
    m = sparsified(exclude=["head"])
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-3)
    trainer = ds.RigL(m, optimizer, total_steps=100, update_interval=2, drop_fraction=0.3)
    x, y = tokens(8, 5), torch.randint(10, (8,))
    before = {name: m.get_submodule(name).pattern for name in sparse_names(m)}
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(m(x), y)
        loss.backward()
        trainer.step()
        losses.append(loss.item())
    assert trainer.updates == 2
    assert losses[-1] < losses[0]
    for name, pattern in before.items():
        assert m.get_submodule(name).pattern != pattern, name
        assert m.get_submodule(name).pattern.nnz == pattern.nnz


def test_state_dict_and_copies():
    m = sparsified(generator=torch.Generator().manual_seed(1))
    other = sparsified(generator=torch.Generator().manual_seed(2))
    x = tokens()
    assert not torch.equal(m(x), other(x))
    file = io.BytesIO()
    torch.save(m.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(m(x), other(x))
    copied = copy.deepcopy(m)
    assert torch.equal(copied(x), m(x))
    with torch.no_grad():
        copied.mix.values.zero_()
    assert m.mix.values.any()
    ds.densify(copied)
    assert type(copied.mix) is Conv1D


class Tied(nn.Module):
    """Two layers that share a weight; with `own_bias`, each has its own bias."""

    def __init__(self, own_bias=False):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.b.weight = self.a.weight
        if not own_bias:
            self.b.bias = self.a.bias
        self.c = nn.Linear(8, 8)

    def forward(self, x):
        return self.c(self.b(self.a(x).relu()))


def test_tied_layers_stay_tied():
    m = sparsified(Tied(), 0.5, start="magnitude")
    assert m.a is m.b
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    trainer = ds.RigL(m, optimizer, total_steps=10, update_interval=1)
    m(torch.randn(4, 8)).sum().backward()
    trainer.step()
    assert m.a.pattern is m.b.pattern
    ds.densify(m)
    assert m.a.weight is m.b.weight


def test_shared_module_stays_shared():
    shared = nn.MultiheadAttention(8, 2)
    m = nn.ModuleDict({"x": nn.ModuleList([shared]), "y": shared, "z": nn.Linear(8, 8)})
    sparsified(m, 0.5)
    assert isinstance(m["y"], SparseMultiheadAttention)
    assert m["x"][0] is m["y"]
    ds.densify(m)
    assert m["x"][0] is m["y"]


def test_linear_subclasses_are_not_converted():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    m = nn.Sequential(
        nn.Linear(8, 8), Own(8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    )
    sparsified(m)
    assert sparse_names(m) == ["0"]


def test_empty_layers_stay_dense():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of their initialisation
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 0), nn.Linear(0, 8))
    ds.sparsify(model, 0.5, verbose=False)
    assert [type(layer) for layer in model] == [SparseLinear, nn.Linear, nn.Linear]
    with pytest.raises(ValueError, match=r"'1' names '1' \(Linear\), which cannot be made sparse"):
        ds.sparsify(model, 0.5, include="1", verbose=False)


def test_table(capsys):
    m = model()
    dense = sum(p.numel() for p in m.parameters())
    ds.sparsify(m, 0.25, exclude=["head"])
    printed = capsys.readouterr().out
    now = sum(p.numel() for p in m.parameters())
    assert printed.startswith(describe(m))
    lines = printed.splitlines()
    assert lines[0].split() == ["layer", "shape", "block", "density", "non-zeros", "parameters"]
    assert f"the model: {dense:,} -> {now:,} parameters ({now / dense:.1%})" in printed
    assert "density of the 13 selected layers: 0.25 (requested: 0.25)" in printed
    mix = next(line for line in lines if line.startswith("mix"))
    nnz = m.mix.pattern.nnz
    assert mix.split() == ["mix", "24", "x", "16", "1", f"{nnz / 384:.4f}", f"{nnz}", "408", "->",
                           f"{nnz + 24}"]  # fmt: skip
    head = next(line for line in lines if line.startswith("head"))
    assert head.split() == ["head", "10", "x", "24", "-", "dense", "240", "250"]
    assert len({len(line) for line in lines[:15]}) == 1
    assert lines[16] == "1 Embedding: 320 parameters stay dense"
    ds.densify(m)
    assert f"the model: {dense:,} -> {dense:,} parameters (100.0%)" in describe(m)


def test_long_table_joins_numbered_rows():
    blocks = [nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}) for _ in range(20)]
    m = nn.ModuleList(blocks)
    assert len(describe(m).rows) == 40
    ds.sparsify(m, 0.5, verbose=False)
    m.append(nn.ModuleDict({"up": nn.Linear(8, 16)}))
    assert [(row[0], row[-1]) for row in describe(m).rows] == [
        ("*.up (20)", "144 -> 80"),
        ("*.down (20)", "136 -> 72"),
        ("20.up", "144"),
    ]


def test_table_of_a_model_without_linear_layers():
    assert describe(nn.ReLU()).splitlines()[-1] == "the model: 0 -> 0 parameters (0.0%)"


@pytest.mark.parametrize("b", [1, 4])
def test_random_start_with_balanced_rows(b):
    model = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 40))
    ds.sparsify(model, 0.2, b, per_row=True, generator=torch.Generator().manual_seed(0))
    for layer in (model[0], model[2]):
        each = torch.bincount(layer.pattern.rows.long(), minlength=layer.pattern.grid[0])
        assert int(each.max()) - int(each.min()) <= 1
