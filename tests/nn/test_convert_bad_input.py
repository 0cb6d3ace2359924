"""Bad input to sparsify and densify raises a one-line error and leaves the model unchanged."""

import pytest
import torch
from conv1d_layer import Conv1D
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseLinear


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.body = nn.ModuleList([nn.Linear(8, 12), nn.Linear(12, 8)])
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 10)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"density": 0.0}, ValueError, r"density must be a number in \(0, 1\], got 0.0"),
        ({"density": 10}, ValueError, r"density must be a number in \(0, 1\], got 10"),
        ({"density": 1e-6}, ValueError, "the overall density 1e-06 is impossible: one block"),
        ({"allocation": "erdos"}, ValueError, r"allocation must be one of.*got 'erdos'"),
        (
            {"start": "zero"},
            ValueError,
            "start must be one of random, magnitude.* got 'z",
        ),
        ({"start": "nonzero"}, ValueError, "none of the selected layers has 1 % zeros or more"),
        ({"start": "nonzero", "density": 0.1}, ValueError, "density does not apply to start='nonz"),
        (
            {"start": "nonzero", "per_row": True},
            ValueError,
            "per_row does not apply to start='nonz",
        ),
        ({"per_row": "yes"}, TypeError, "per_row must be True or False or None, got 'yes'"),
        ({"start": "wanda"}, ValueError, "start='wanda' needs calibration=, batches for"),
        ({"start": "wanda", "calibration": []}, ValueError, "calibration has no batches"),
        (
            {"start": "wanda", "calibration": torch.ones(2, 8)},
            TypeError,
            "calibration must be batches, such as a DataLoader .* got",
        ),
        (
            {"start": "sparsegpt", "calibration": [torch.ones(2, 8)]},
            ValueError,
            "is for linear layers, and 'attention.q_proj' belongs to a MultiheadAttention",
        ),
        ({"allocation": "global"}, ValueError, "for start='magnitude' and 'wanda', not for 'rand"),
        (
            {"start": "magnitude", "allocation": "global", "densities": {"head": 0.5}},
            ValueError,
            "'global' compares the blocks of all layers: leave densities and block_sizes out",
        ),
        ({"start": "nonzero", "block_size": 3}, ValueError, "3 does not divide the layer 'body.0'"),
        ({"block_size": 3}, ValueError, r"3 does not divide the layer 'body.0' of shape \[12, 8\]"),
        ({"block_size": 0}, ValueError, "block size of 'body.0' must be an integer >= 1, got 0"),
        ({"block_size": 4}, ValueError, r"'head' of shape \[10, 8\]: choose one of \[1, 2\]"),
        ({"block_sizes": {"head": 5}}, ValueError, "block size 5 does not divide the layer 'head'"),
        ({"block_sizes": {"tail": 2}}, ValueError, "block_sizes: the pattern 'tail' is the first"),
        ({"block_sizes": 4}, TypeError, "block_sizes must be a mapping or None, got 4"),
        (
            {"densities": {"head": 2}},
            ValueError,
            r"the density of 'head' must be .*\(0, 1\], got 2",
        ),
        ({"densities": {"norm": 0.5}}, ValueError, "densities: the pattern 'norm' is the first"),
        ({"densities": {"*": 0.1, "head": 1}}, ValueError, "the pattern 'head' is the first match"),
        ({"densities": {0: 0.5}}, TypeError, "densities must be name patterns.*got 0"),
        ({"densities": {"body": 0.9}}, ValueError, "impossible: the layers with a density of"),
        ({"density": 0.1, "densities": {"*": 0.9}}, ValueError, "or pass density=None"),
        ({"include": ["emb*"]}, ValueError, "'emb.' names 'embed' .Embedding., which cannot"),
        (
            {"include": ["embed"], "start": "wanda", "calibration": [0]},
            ValueError,
            "start='wanda' is for linear layers, and 'embed' belongs to a Embedding: exclude it",
        ),
        (
            {"include": ["norm"]},
            ValueError,
            "'norm' .LayerNorm., which cannot be made sparse; nn.L",
        ),
        (
            {"include": ["boddy"]},
            ValueError,
            "include: the pattern 'boddy' matches no module.*'body.0'",
        ),
        ({"include": nn.Linear}, TypeError, "include must be text or an iterable or None"),
        ({"include": [nn.Linear]}, TypeError, "include must be name patterns such as"),
        ({"exclude": ["haed"]}, ValueError, "exclude: the pattern 'haed' matches no module"),
        ({"exclude": None}, TypeError, "exclude must be name patterns such as"),
        ({"exclude": "*"}, ValueError, "include and exclude leave none of the 7 layers"),
        ({"include": ["head"], "exclude": ["head"]}, ValueError, "leave none of the 7 layers"),
    ],
)
def test_bad_arguments(arguments, error, message):
    model = Model()
    modules, state = list(model.modules()), list(model.state_dict())
    with pytest.raises(error, match=message) as caught:
        ds.sparsify(model, verbose=False, **arguments)
    assert "\n" not in str(caught.value)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert list(model.state_dict()) == state


def tie(a, b):
    b.weight = a.weight


def tied(biases=True, kind=nn.Linear):
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": kind(8, 8), "c": nn.Linear(8, 8)})
    tie(model["a"], model["b"])
    if biases and kind is nn.Linear:
        model["b"].bias = model["a"].bias
    return model


def two_tables():
    model = nn.ModuleDict({"a": nn.Embedding(8, 8), "b": nn.Embedding(8, 8, padding_idx=1)})
    tie(model["a"], model["b"])
    return model


def two_attentions():
    model = nn.ModuleDict({name: nn.MultiheadAttention(8, 2) for name in "xy"})
    model["y"].in_proj_weight = model["x"].in_proj_weight
    return model


def hooked():
    layer = nn.Linear(8, 8)
    layer.register_forward_hook(lambda *_: None)
    return nn.Sequential(layer)


def out_proj_elsewhere():
    attention = nn.MultiheadAttention(8, 2)
    return nn.ModuleDict({"x": attention, "y": attention.out_proj})


ALL = {"include": "*"}


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (tied(), {"exclude": ["b"]}, "'a' and 'b' share their weight but would be treated diff"),
        (tied(), {"include": ["b"]}, "'b' and 'a' share their weight but would be treated diff"),
        (tied(), {"densities": {"b": 0.2}}, "'a' and 'b' share their weight but would be treated"),
        (tied(), {"block_sizes": {"b": 4}}, "'a' and 'b' share their weight but would be treated"),
        (tied(biases=False), ALL, "it shares its weight but not its bias: 'a' and 'b'; use one"),
        (tied(kind=nn.Embedding), ALL, "both or neither, an embedding by its full name"),
        (two_tables(), {"include": ["a", "b"]}, "not its padding_idx: 'a' and 'b'; use one module"),
        (tied(kind=Conv1D), ALL, "not its layer: 'a' .Linear. and 'b' .Conv1D.; use one module"),
        (two_attentions(), ALL, "'x.q_proj' .MultiheadAttention. and 'y.q_proj' .MultiheadAtten"),
        (out_proj_elsewhere(), ALL, "'x.out_proj' .MultiheadAttention. and 'y' .NonDynamically"),
        (hooked(), ALL, "'0' cannot be made sparse, it has hooks, which its conversion would lose"),
    ],
)
def test_weights_that_cannot_stay_tied_raise(model, arguments, message):
    modules = list(model.modules())
    with pytest.raises(ValueError, match=message):
        ds.sparsify(model, 0.5, verbose=False, **arguments)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))


def broken(value):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[1].weight[3, 4] = value
    return model


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (broken(float("nan")), ValueError, "the weight of '1' has entries that are NaN or inf"),
        (broken(float("inf")), ValueError, "the weight of '1' has entries that are NaN or inf"),
        (None, TypeError, "model must be a torch.nn.Module, got None"),
        ([nn.Linear(8, 8)], TypeError, "model must be a torch.nn.Module, got \\["),
        (nn.Sequential(nn.ReLU()), ValueError, "the model has no layer that can be made sparse"),
        (nn.Sequential(SparseLinear(8, 8)), ValueError, "sparse already: call dynsparse.densify"),
        (nn.Linear(8, 8), ValueError, "a single Linear, which cannot be replaced in place"),
        (nn.MultiheadAttention(8, 2), ValueError, "a single MultiheadAttention, which cannot be"),
        (nn.Sequential(nn.Linear(8, 8, device="meta")), ValueError, "'0' is on the meta device"),
        (hooked(), ValueError, "none of the 1 layers is left to convert; '0' stays dense: it has"),
    ],
)
def test_unsupported_models_raise(model, error, message):
    with pytest.raises(error, match=message):
        ds.sparsify(model, 0.5, verbose=False)


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_uninitialized_lazy_layers_raise():
    model = nn.Sequential(nn.LazyLinear(8))
    with pytest.raises(ValueError, match="'0' has no shape yet: run one batch"):
        ds.sparsify(model, 0.5, verbose=False)
    model(torch.zeros(1, 4))
    assert isinstance(ds.sparsify(model, 0.5, verbose=False)[0], SparseLinear)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("model", TypeError, "model must be a torch.nn.Module, got str"),
        (nn.Sequential(nn.Linear(8, 8)), ValueError, "the model has no sparse layers"),
        (SparseLinear(8, 8), ValueError, "a single SparseLinear, which cannot be replaced"),
        (ds.nn.SparseMultiheadAttention(8, 2), ValueError, "a single SparseMultiheadAttention"),
    ],
)
def test_densify_of_unsupported_models_raises(model, error, message):
    with pytest.raises(error, match=message):
        ds.densify(model)


@pytest.mark.parametrize("replace", [ds.densify, ds.quantize])
@pytest.mark.parametrize("hook", ["register_forward_pre_hook", "register_full_backward_hook"])
def test_layers_with_hooks_are_not_replaced(replace, hook):
    model = nn.Sequential(SparseLinear(8, 8), SparseLinear(8, 8))
    handle = getattr(model[1], hook)(lambda *_: None)
    with pytest.raises(ValueError, match="has hooks, which would be lost: remove them first"):
        replace(model)
    handle.remove()
    assert not isinstance(replace(model)[1], SparseLinear)


class Partial(nn.Module):
    """A model with a layer that forward does not use."""

    def __init__(self):
        super().__init__()
        self.body, self.rest = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.body(x) + x @ self.rest.weight


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(2, 8), "no calibration batch passes through the layer 'rest': add some"),
        (torch.full((2, 8), torch.nan), "the inputs of the layer 'body' are NaN or infinite"),
    ],
)
def test_calibration_without_inputs_for_a_layer_raises(x, message):
    model = Partial()
    with pytest.raises(ValueError, match=message):
        ds.sparsify(model, 0.5, start="wanda", calibration=[x], verbose=False)
    assert not any(isinstance(m, SparseLinear) for m in model.modules())
    ds.sparsify(
        model, 0.5, start="wanda", calibration=[torch.ones(2, 8)], exclude=["rest"], verbose=False
    )
