"""The onnxruntime operator of sparse layers equals float64, and rejects bad files."""

import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.pattern import SparsePattern
from dynsparse.pattern.packed import pack

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of their own imports
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper

from dynsparse.integrations.onnx import (
    export,
    import_,
    sparsify_onnx,
    weights_from_onnx,
    weights_to_onnx,
)
from dynsparse.integrations.onnxruntime import library, register

pytestmark = [
    pytest.mark.filterwarnings("default"),  # the packages warn of themselves
    pytest.mark.skipif(ds._core.native.load() is None, reason="needs the compiled kernels"),
]


PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"


def session(model, threads=1):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    register(options)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def file_of(
    layer,
    *,
    relu=0,
    changes=None,
    inputs=("x", "values", "pattern", "bias"),
    kind="SparseLinear",
    **tensors,
):
    """Make an ONNX file with one node, with changed attributes or tensors."""
    pattern = layer.pattern
    form, packed = pack(pattern.sorted_flat, pattern.grid[0] * pattern.grid[1])
    tensors = {
        "values": layer.values.detach().numpy(),
        "pattern": packed.numpy(),
        "bias": layer.bias.detach().numpy(),
    } | tensors
    attributes = {
        "out_features": layer.out_features,
        "in_features": layer.in_features,
        "block_size": pattern.block_size,
        "gaps": int(form == "gaps"),
        "relu": relu,
    } | (changes or {})
    node = helper.make_node(kind, inputs, ["y"], domain="dynsparse", **attributes)
    graph = helper.make_graph(
        [node],
        "one layer",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, None),
            *(
                helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
                for name in inputs[1:]
                if name not in tensors
            ),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            onnx.numpy_helper.from_array(value, name)
            for name, value in tensors.items()
            if name in inputs
        ],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("dynsparse", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


def layer_of(out, in_, density, block_size):
    torch.manual_seed(0)
    layer = SparseLinear(in_, out, density, block_size=block_size)
    nn.init.normal_(layer.bias)
    return layer


@pytest.mark.parametrize(
    ("out", "in_", "density", "block_size"),
    [
        (5, 7, 0.5, 1),
        (1, 300, 0.01, 1),  # gaps of more than a byte
        (768, 512, 0.1, 1),
        (2048, 96, 0.3, 1),
        (64, 32, 0.3, 4),
        (256, 512, 0.1, 16),
        (384, 256, 0.2, 128),
        (12, 18, 0.5, 3),
        (40, 24, 1.0, 1),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_products_of_any_batch(out, in_, density, block_size, threads):
    layer = layer_of(out, in_, density, block_size)
    weight = layer.to_dense().detach().double()
    for bias in (True, False):
        for relu in (0, 1):
            inputs = ("x", "values", "pattern", "bias")[: 3 + bias]
            run = session(file_of(layer, relu=relu, inputs=inputs), threads)
            for sizes in ((), (0,), (2,), (3, 11), (32,), (1, 63), (64,), (5, 40)):
                x = torch.randn(*sizes, in_)
                expected = x.double() @ weight.T + (layer.bias.detach().double() if bias else 0)
                expected = expected.relu() if relu else expected
                (y,) = run.run(None, {"x": x.numpy()})
                assert y.shape == tuple(expected.shape)
                torch.testing.assert_close(
                    torch.from_numpy(y).double(), expected, rtol=1e-4, atol=1e-4
                )


def test_layer_without_blocks():
    layer = layer_of(6, 9, 0.5, 1)
    none = np.zeros(0, np.float32)
    run = session(file_of(layer, values=none, pattern=np.zeros(0, np.uint8), changes={"gaps": 1}))
    (y,) = run.run(None, {"x": np.ones((3, 9), np.float32)})
    assert np.array_equal(y, np.tile(layer.bias.detach().numpy(), (3, 1)))


@pytest.mark.parametrize(
    ("out", "in_", "density", "block_size"),
    [(5, 7, 0.5, 1), (1024, 512, 0.2, 1), (64, 32, 0.3, 4), (768, 1536, 0.3, 16), (40, 24, 0.6, 8)],
)
@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_int8_equals_the_layer(tmp_path, out, in_, density, block_size, activations):
    model = nn.Sequential(layer_of(out, in_, density, block_size), nn.ReLU())
    ds.quantize(model, activations)
    file = tmp_path / "model.onnx"
    x = torch.randn(2, in_)
    export(model, (x,), file, weights="operator", dynamic_shapes=({0: "batch"},))
    assert [node.op_type for node in onnx.load(file).graph.node] == ["QuantizedSparseLinear"]
    assert file.stat().st_size < 2 * density * out * in_ + 4 * out + 2500
    runs = [session(str(file), threads) for threads in (1, 2)]
    for batch in (0, 1, 7, 31, 32, 100):
        x = torch.randn(batch, in_)
        for run in runs:
            (y,) = run.run(None, {run.get_inputs()[0].name: x.numpy()})
            torch.testing.assert_close(torch.from_numpy(y), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights", ["dense", "sparse"])
def test_int8_layers_export_as_float32(tmp_path, weights):
    model = ds.quantize(nn.Sequential(layer_of(48, 32, 0.4, 16)))
    x = torch.randn(3, 32)
    export(model, (x,), tmp_path / "model.onnx", weights=weights)
    run = session(str(tmp_path / "model.onnx"))
    (y,) = run.run(None, {run.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": np.ones(4, np.float32)}, "scale must be [out_features]"),
        ({"values": np.zeros((2, 8, 8), np.int8)}, "values must be [nnz, block_size, block_size]"),
        ({"values": np.zeros((2, 2, 8, 8), np.int8)}, "values must be"),
        ({"values": np.zeros((3, 2, 8, 4), np.int8)}, "the pattern is not one of as many blocks"),
    ],
)
def test_bad_int8_files_raise(changes, message):
    inputs = "x", "values", "pattern", "scale"
    tensors = {"values": np.zeros((2, 2, 8, 4), np.int8), "scale": np.ones(16, np.float32)}
    layer = layer_of(16, 16, 0.5, 8)
    node = {"int8_activations": 1}
    assert session(
        file_of(layer, inputs=inputs, kind="QuantizedSparseLinear", changes=node, **tensors)
    )
    with pytest.raises(Exception, match=re.escape(message)):
        session(
            file_of(
                layer,
                inputs=inputs,
                kind="QuantizedSparseLinear",
                changes=node,
                **tensors | changes,
            )
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pattern": np.array([0, 0], np.uint8)}, "the pattern is not one of as many blocks"),
        ({"pattern": np.array([200, 0, 0], np.uint8)}, "the pattern is not one of as many"),
        ({"pattern": np.array([0, 0, 255], np.uint8)}, "the pattern is not one of as many"),
        ({"pattern": np.array([0, 0, 0, 0], np.uint8)}, "the pattern is not one of as many"),
        (
            {"pattern": np.array([7], np.uint8), "changes": {"gaps": 0}},
            "the pattern is not one of as many blocks",
        ),
        (
            {"pattern": np.array([7, 0, 0, 128], np.uint8), "changes": {"gaps": 0}},
            "the pattern is not one of as many blocks",
        ),
        ({"pattern": np.zeros((1, 3), np.uint8)}, "values must be [nnz, block_size, block_size]"),
        ({"values": np.zeros((3, 2, 2), np.float32)}, "values must be [nnz, block_size, block"),
        ({"values": np.float32(3)}, "values must be [nnz, block_size, block_size]"),
        ({"bias": np.zeros(4, np.float32)}, "bias must be [out_features]"),
        ({"changes": {"block_size": 4}}, "must be positive multiples of block_size"),
        ({"changes": {"block_size": 0}}, "must be positive multiples of block_size"),
        ({"changes": {"out_features": -5}}, "must be positive multiples of block_size"),
        ({"changes": {"in_features": 1 << 40}}, "must be positive multiples of block_size"),
        ({"inputs": ("x", "other", "pattern")}, "all inputs but x must be initializers"),
    ],
)
def test_bad_files_raise(given, message):
    pattern = SparsePattern([0, 2, 4], [1, 0, 4], shape=(5, 5))
    layer = SparseLinear(5, 5, pattern=pattern)
    with pytest.raises(Exception, match=re.escape(message)):  # of onnxruntime's own classes
        session(file_of(layer, **given))


def test_wrong_width_of_x_raises():
    run = session(file_of(layer_of(5, 7, 0.5, 1)))
    for x in (np.zeros((2, 8), np.float32), np.array(1, np.float32)):
        with pytest.raises(Exception, match=r"x must be \[\.\.\., 7\]"):
            run.run(None, {"x": x})


class Shared(nn.Module):
    """A layer used twice, another that shares its weight, and a ReLU of a value used twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        self.b.weight, self.b.bias = self.a.weight, self.a.bias

    def forward(self, x):
        y = self.b(self.a(x))
        return self.a(y.relu() + y)


def network(kind):
    torch.manual_seed(0)
    if kind == "shared":
        model, x = Shared(), torch.randn(4, 5, 32)
    elif kind == "convolution":
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32))
        x = torch.randn(2, 3, 8, 8)
    elif kind == "tied head":
        model, x = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 40)), torch.arange(8)
        model[1].weight = model[0].weight
        return ds.sparsify(model, 0.2, include=["0", "1"], verbose=False).eval(), x
    elif kind == "transformer":
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        x = torch.randn(2, 9, 64)
    else:
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16, bias=False))
        x = torch.randn(8, 64)
    return ds.sparsify(model, 0.2, verbose=False).eval(), x


@pytest.mark.parametrize(
    ("kind", "count", "relus"),
    [
        ("mlp", 2, 1),
        ("shared", 3, 0),
        ("convolution", 1, 0),
        ("transformer", 12, 2),
        ("tied head", 1, 0),
    ],
)
def test_networks_export_with_the_operator(tmp_path, kind, count, relus):
    model, x = network(kind)
    file = tmp_path / "model.onnx"
    export(model, (x,), file, weights="operator")
    nodes = [node for node in onnx.load(file).graph.node if node.op_type == "SparseLinear"]
    assert len(nodes) == count
    assert sum(a.i for node in nodes for a in node.attribute if a.name == "relu") == relus
    run = session(file)
    (y,) = run.run(None, {run.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(x).detach(), rtol=1e-5, atol=1e-5)
    with pytest.raises(Exception, match="SparseLinear"):
        onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])


class Shifted(nn.Module):
    """A layer without bias, and a single number added to its outputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 8, bias=False)
        self.shift = nn.Parameter(torch.full((1,), 3.0))

    def forward(self, x):
        return self.layer(x) + self.shift


@pytest.mark.parametrize("shape", [(4, 16), (2, 4, 16)])
@pytest.mark.parametrize("weights", ["sparse", "operator"])
def test_number_added_to_all_outputs_is_no_bias(tmp_path, shape, weights):
    torch.manual_seed(0)
    model, x = ds.sparsify(Shifted().eval(), 0.3, verbose=False), torch.randn(shape)
    expected = model(x).detach()
    export(model, (x,), tmp_path / "model.onnx", weights=weights)
    run = session(tmp_path / "model.onnx")
    (y,) = run.run(None, {run.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), expected)
    if weights == "sparse":
        torch.testing.assert_close(import_(tmp_path / "model.onnx")(x), expected)


def test_files_are_as_small_as_their_weights(tmp_path):
    model = ds.sparsify(nn.Sequential(nn.Linear(512, 512)), 0.1, verbose=False)
    export(model, (torch.randn(1, 512),), tmp_path / "model.onnx", weights="operator")
    assert (tmp_path / "model.onnx").stat().st_size < 0.14 * 4 * 512 * 512


def test_dynamic_batch_and_updated_pattern(tmp_path):
    model, x = network("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = ds.SET(model, optimizer, total_steps=10, update_interval=1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        trainer.step()
    assert not model[0].pattern._is_row_major
    export(model, (x,), tmp_path / "m.onnx", weights="operator", dynamic_shapes=({0: "batch"},))
    run = session(tmp_path / "m.onnx")
    for batch in (1, 100):
        x = torch.randn(batch, 64)
        (y,) = run.run(None, {run.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), model(x).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not part of a wheel")
def test_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = PAGE.read_text().partition("## onnxruntime\n")[2].partition("\n## ")[0]
    exec("\n".join(re.findall(r"```py\n(.*?)```", code, re.S)), {})


def test_other_dtypes_raise(tmp_path):
    model, x = network("mlp")
    with pytest.raises(ValueError, match=r"float32 weights, got .* in DOUBLE: call model.float"):
        export(model.double(), (x.double(),), tmp_path / "m.onnx", weights="operator")


def test_files_of_other_exporters(tmp_path):
    model, x = network("mlp")
    dense = ds.densify(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(dense, (x,), tmp_path / "dense.onnx", dynamo=True, verbose=False)
    sparsify_onnx(tmp_path / "dense.onnx", tmp_path / "a.onnx", 0.1, weights="operator")
    sparsify_onnx(tmp_path / "dense.onnx", tmp_path / "b.onnx", 0.1)
    weights_from_onnx(tmp_path / "b.onnx", tmp_path / "b.safetensors")
    weights_to_onnx(
        tmp_path / "b.safetensors", tmp_path / "dense.onnx", tmp_path / "c.onnx", weights="operator"
    )
    name = {onnx.load(tmp_path / "b.onnx").graph.input[0].name: x.numpy()}
    a, b, c = (session(tmp_path / f"{file}.onnx").run(None, name)[0] for file in "abc")
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(a, c)


def test_library_is_selected_and_registered(monkeypatch):
    assert library().name.startswith("libdynsparse_onnxruntime_")
    monkeypatch.setenv("DYNSPARSE_ISA", "v9")
    with pytest.raises(ValueError, match="DYNSPARSE_ISA must be one of"):
        library()
    with pytest.raises(TypeError, match=r"must be onnxruntime\.SessionOptions\(\), got str"):
        register("options")
