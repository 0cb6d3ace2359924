"""ONNX export equals the model in onnxruntime, and import restores patterns."""

import json
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseEmbedding, SparseLinear, SparseMultiheadAttention

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of their own imports
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    importing = pytest.importorskip("dynsparse.integrations.onnx.importing")
    try:
        importing.import_onnx2torch()
    except ImportError as error:
        pytest.skip(str(error), allow_module_level=True)

from dynsparse.apps.lm.model import build_model
from dynsparse.apps.lm.options import Options
from dynsparse.integrations.onnx import (
    export,
    graph,
    import_,
    sparsify_onnx,
    weights_from_onnx,
    weights_to_onnx,
)

pytestmark = pytest.mark.filterwarnings("default")  # the packages warn of themselves


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class Attention(nn.Module):
    def __init__(self, block_size):
        super().__init__()
        self.attention = SparseMultiheadAttention(
            32, 4, density=0.3, block_size=block_size, batch_first=True, generator=generator()
        )

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


def mlp(block_size=1):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5)
    )
    return ds.sparsify(model, density=0.2, block_size=block_size, exclude=["4"], verbose=False)


def transformer(block_size):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    return ds.sparsify(model, density=0.3, block_size=block_size, verbose=False)


def language_model(block_size):
    options = Options(
        layers=2, hidden_size=32, heads=2, ff_size=64, sequence_length=12, sparsity=0.7,
        block_size=block_size, embedding_size=16,
    )  # fmt: skip
    return build_model(options, 40, generator())


KINDS = {
    "mlp": (mlp, lambda: torch.randn(6, 24, generator=generator(1)), {0: "batch"}),
    "attention": (Attention, lambda: torch.randn(2, 7, 32, generator=generator(1)), {0: "batch"}),
    "transformer": (
        transformer,
        lambda: torch.randn(2, 7, 32, generator=generator(1)),
        {0: "batch", 1: "tokens"},
    ),
    "language model": (
        language_model,
        lambda: torch.randint(40, (3, 12), generator=generator(1)),
        {0: "batch", 1: "tokens"},
    ),
}


def sparse_layers(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, SparseLinear)}


def computed(file, x):
    session = onnxruntime.InferenceSession(str(file))
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


@pytest.mark.parametrize(("weights", "block_size"), [("dense", 4), ("sparse", 1), ("sparse", 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_export_equals_the_model_and_round_trips(kind, weights, block_size, tmp_path):
    make, draw, dynamic = KINDS[kind]
    model, x = make(block_size).eval(), draw()
    first = next(iter(sparse_layers(model).values()))
    with torch.no_grad():
        first.values.view(-1)[0] = 0  # present, though it is zero
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    file = tmp_path / "model.onnx"
    ds.integrations.onnx.export(model, (x,), file, weights, dynamic_shapes=(dynamic,))
    with torch.no_grad():
        for part in (x, x[:1], x[:, :5] if kind == "language model" else x):
            np.testing.assert_allclose(computed(file, part), model(part), rtol=1e-5, atol=1e-5)
    proto = onnx.load(str(file))
    assert {entry.domain for entry in proto.opset_import} == {""}, "standard operators only"
    assert {node.domain for node in proto.graph.node} == {""}
    names = {f"{name}.weight" for name in sparse_layers(model)}
    held = {entry.values.name for entry in proto.graph.sparse_initializer}
    assert held == (names if weights == "sparse" else set())
    assert names <= held | {entry.name for entry in proto.graph.initializer}
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    if weights == "sparse":
        check_round_trip(file, model, x)


def check_round_trip(file, model, x):
    again = ds.integrations.onnx.import_(file).eval()
    for name, layer in sparse_layers(model).items():
        if isinstance(layer, SparseEmbedding):
            continue
        other = again.get_submodule(name)
        assert other.pattern == layer.pattern
        assert torch.equal(other.values, layer.values)
        assert layer.bias is None or torch.equal(other.bias, layer.bias)
    with torch.no_grad():
        torch.testing.assert_close(again(x), model(x), rtol=1e-5, atol=1e-5)


def test_imported_model_trains_and_exports_again(tmp_path):
    model, x = mlp(4), KINDS["mlp"][1]()
    ds.integrations.onnx.export(model, (x,), tmp_path / "a.onnx", "sparse")
    again = ds.integrations.onnx.import_(tmp_path / "a.onnx")
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    trainer = ds.RigL(again, optimizer, total_steps=8, update_interval=2)
    for _ in range(8):
        optimizer.zero_grad()
        again(x).square().mean().backward()
        trainer.step()
    assert trainer.updates > 0
    assert again.get_submodule("0").pattern != model[0].pattern
    ds.integrations.onnx.export(again.eval(), (x,), tmp_path / "b.onnx", "sparse")
    with torch.no_grad():
        np.testing.assert_allclose(computed(tmp_path / "b.onnx", x), again(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_round_trip(dtype, tmp_path):
    model = mlp().to(dtype).eval()
    file = tmp_path / "model.onnx"
    export(model, (torch.randn(2, 24, dtype=dtype),), file, "sparse")
    if dtype == torch.bfloat16:
        with pytest.raises(ValueError, match="onnx2torch cannot convert it"):
            import_(file)
        weights_from_onnx(file, tmp_path / "w.safetensors")
        again = ds.load_pretrained(ds.densify(mlp()).to(dtype), tmp_path / "w.safetensors")
    else:
        again = import_(file)
    for name in ("0", "2"):
        assert again.get_submodule(name).pattern == model.get_submodule(name).pattern
        assert torch.equal(again.get_submodule(name).values, model.get_submodule(name).values)


def foreign(path, gemm=False):
    """Write a model like another exporter: x W + b, W [in, out]."""
    rng = np.random.default_rng(0)
    helper, numpy_helper = onnx.helper, onnx.numpy_helper
    w1, w2 = (rng.normal(size=size).astype(np.float32) for size in ((8, 12), (12, 6)))
    bias = rng.normal(size=12).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "fc1.weight"], ["a"]),
        helper.make_node("Add", ["fc1.bias", "a"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", "fc2.weight"], ["y"]),
    ]
    values = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", size])
        for name, size in (("x", 8), ("y", 6))
    ]
    held = [
        numpy_helper.from_array(array, name)
        for name, array in (("fc1.weight", w1), ("fc1.bias", bias), ("fc2.weight", w2))
    ]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, str(path))
    return w1, bias, w2


def test_import_keeps_the_largest_weights_of_a_foreign_model(tmp_path):
    w1, bias, w2 = foreign(tmp_path / "m.onnx")
    densities = sparsify_onnx(tmp_path / "m.onnx", tmp_path / "s.onnx", 0.25, allocation="uniform")
    assert densities == {"fc1.weight": 0.25, "fc2.weight": 0.25}

    def pruned(w):
        least = np.sort(np.abs(w).ravel())[-w.size // 4]
        return np.where(np.abs(w) >= least, w, 0)

    x = np.random.default_rng(1).normal(size=(3, 8)).astype(np.float32)
    expected = np.maximum(x @ pruned(w1) + bias, 0) @ pruned(w2)
    np.testing.assert_allclose(
        computed(tmp_path / "s.onnx", torch.from_numpy(x)), expected, rtol=1e-5, atol=1e-6
    )
    made = import_(tmp_path / "s.onnx")
    layer = made.get_submodule("fc1")
    assert isinstance(layer, SparseLinear)
    np.testing.assert_array_equal(layer.to_dense().detach(), pruned(w1).T)
    np.testing.assert_array_equal(layer.bias.detach(), bias)
    np.testing.assert_allclose(made(torch.from_numpy(x)).detach(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block_size", [1, 2])
def test_weights_round_trip(block_size, tmp_path):
    model = mlp(block_size).eval()
    x = KINDS["mlp"][1]()
    a, b, c, w = (str(tmp_path / name) for name in ("a.onnx", "b.onnx", "c.onnx", "w.safetensors"))
    ds.integrations.onnx.export(model, (x,), a, "sparse")
    ds.integrations.onnx.export(mlp(block_size), (x,), b, "dense")
    assert sorted(weights_from_onnx(a, w)) == ["0", "2"]
    fresh = ds.load_pretrained(ds.densify(mlp(block_size)), w)
    for name, layer in sparse_layers(model).items():
        assert fresh.get_submodule(name).pattern == layer.pattern
        assert torch.equal(fresh.get_submodule(name).values, layer.values)
    assert torch.equal(fresh[4].weight, model[4].weight)
    assert sorted(weights_to_onnx(w, b, c)) == ["0", "2"]
    assert np.array_equal(computed(c, x), computed(a, x))
    sparsify_onnx(b, c, 0.1, weights="dense")
    assert not onnx.load(c).graph.sparse_initializer


def test_trained_weights_are_written_into_the_graph(tmp_path):
    model, x = mlp(), KINDS["mlp"][1]()
    ds.integrations.onnx.export(model, (x,), tmp_path / "a.onnx")
    with torch.no_grad():
        model[0].set_pattern(
            ds.SparsePattern.random((64, 24), nnz=model[0].pattern.nnz, generator=generator(5))
        )
    free = (~model[0].pattern.to_mask()).flatten().nonzero().flatten()
    first = torch.tensor([0])  # the grown weight comes last, in the slot of the first
    model[0].rewire(ds.pattern.Rewiring.make(model[0].pattern, drop=first, grow=free[-1:]))
    ds.save_safetensors(model, tmp_path / "w.safetensors")
    assert weights_to_onnx(
        tmp_path / "w.safetensors", tmp_path / "a.onnx", tmp_path / "b.onnx"
    ) == ["0", "2"]
    np.testing.assert_allclose(
        computed(tmp_path / "b.onnx", x), model(x).detach(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("weights", ["dense", "sparse"])
def test_convolutions(weights, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(
        ds.nn.SparseConv2d(3, 8, 3, density=0.5, padding=1, stride=2),
        nn.ReLU(),
        ds.nn.SparseConv2d(8, 4, (1, 3), density=0.3, groups=2, bias=False),
        nn.Flatten(2),
        ds.nn.SparseConv1d(4, 6, 2, density=0.5),
    ).eval()
    x = torch.randn(2, 3, 9, 9)
    export(model, (x,), tmp_path / "a.onnx", weights)
    y = torch.as_tensor(computed(tmp_path / "a.onnx", x))
    torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-5)
    names = {entry.name for entry in onnx.load(str(tmp_path / "a.onnx")).graph.initializer}
    assert {"0.weight", "2.weight", "4.weight"} <= names
    again = import_(tmp_path / "a.onnx")
    torch.testing.assert_close(again(x), model(x), rtol=1e-5, atol=1e-5)


def test_shared_layer_is_exported_once(tmp_path):
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    model = ds.sparsify(nn.Sequential(layer, nn.Tanh(), layer), density=0.3, verbose=False).eval()
    x = torch.randn(3, 8)
    ds.integrations.onnx.export(model, (x,), tmp_path / "a.onnx", "sparse")
    assert len(onnx.load(str(tmp_path / "a.onnx")).graph.sparse_initializer) == 1
    again = import_(tmp_path / "a.onnx")
    assert len({id(m) for m in again.modules() if isinstance(m, SparseLinear)}) == 1
    torch.testing.assert_close(again(x), model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", ["dense", "sparse"])
def test_tied_head_is_exported_once(weights, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 16), nn.Linear(16, 40))
    model[2].weight = model[0].weight
    ds.sparsify(model, 0.3, include=["0", "1", "2"], verbose=False).eval()
    ids = torch.randint(40, (3, 12), generator=generator(1))
    export(model, (ids,), tmp_path / "a.onnx", weights)
    entries = onnx.load(str(tmp_path / "a.onnx")).graph
    stored = [e.values.name for e in entries.sparse_initializer] if weights == "sparse" else [
        e.name for e in entries.initializer if e.dims == [40, 16]
    ]  # fmt: skip
    assert len({"0.weight", "2.weight"} & set(stored)) == 1
    np.testing.assert_allclose(
        computed(tmp_path / "a.onnx", ids), model(ids).detach(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("weights", ["dense", "sparse"])
def test_large_weights_are_stored_in_a_second_file(weights, tmp_path, monkeypatch):
    monkeypatch.setattr(graph, "_MAX_BYTES", 20_000)
    layers = [nn.Linear(24, 400), nn.ReLU(), nn.Linear(400, 5)]
    model = ds.sparsify(nn.Sequential(*layers), 0.1, exclude=["2"], verbose=False).eval()
    x, file = torch.randn(3, 24), tmp_path / "a.onnx"
    for _ in range(2):  # over what was there
        export(model, (x,), file, weights)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.onnx", "a.onnx.data"]
    assert file.stat().st_size < 20_000
    np.testing.assert_allclose(computed(file, x), model(x).detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(import_(file)(x).detach(), model(x).detach(), rtol=1e-5, atol=1e-6)
    ds.save_safetensors(model, tmp_path / "w.safetensors")
    weights_to_onnx(tmp_path / "w.safetensors", file, tmp_path / "b.onnx", weights=weights)
    np.testing.assert_allclose(
        computed(tmp_path / "b.onnx", x), model(x).detach(), rtol=1e-5, atol=1e-6
    )
    monkeypatch.setattr(graph, "_MAX_BYTES", 2_000)
    with pytest.raises(ValueError, match="the sparse weights take"):
        export(model, (x,), tmp_path / "c.onnx", "sparse")
    assert not (tmp_path / "c.onnx").exists()


def test_attention_with_additive_mask(tmp_path):
    """torch's exporter does not support the fused form."""

    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
            self.bias = nn.Parameter(torch.randn(5, 5, 4))

        def forward(self, x):
            q, k, v = (p(x).view(2, 5, 4, 4).transpose(1, 2) for p in (self.q, self.k, self.v))
            mask = self.bias.permute(2, 0, 1)[None]
            y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return self.out(y.transpose(1, 2).reshape(2, 5, 16))

    model, x = ds.sparsify(Biased(), 0.3, verbose=False).eval(), torch.randn(2, 5, 16)
    export(model, (x,), tmp_path / "a.onnx")
    np.testing.assert_allclose(
        computed(tmp_path / "a.onnx", x), model(x).detach(), rtol=1e-5, atol=1e-6
    )


class TestRefused:
    def test_models_and_arguments(self, tmp_path):
        file, x = tmp_path / "m.onnx", torch.randn(1, 24)
        with pytest.raises(ValueError, match="no sparse layers"):
            export(nn.Linear(24, 3), (x,), file)
        with pytest.raises(ValueError, match="weights must be one of"):
            export(mlp(), (x,), file, "csr")
        with pytest.raises(TypeError, match="args must be a tuple"):
            export(mlp(), x, file)
        with pytest.raises(ValueError, match="cannot export the model"):
            export(mlp(), (torch.randn(1, 3),), file)
        assert not file.exists()

    def test_model_that_returns_its_cache(self, tmp_path):
        class DynamicCache:
            pass

        class Cached(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = SparseLinear(24, 3, density=0.5)

            def forward(self, x):
                return self.layer(x), DynamicCache()

        with pytest.raises(ValueError, match=r"use_cache = False before exporting .*DynamicCache"):
            export(Cached(), (torch.randn(1, 24),), tmp_path / "m.onnx")

    def test_file_that_is_not_onnx(self, tmp_path):
        file = tmp_path / "m.onnx"
        file.write_bytes(b"\x07 no model")
        with pytest.raises(ValueError, match="no valid ONNX file"):
            import_(file)
        with pytest.raises(FileNotFoundError):
            weights_from_onnx(tmp_path / "none.onnx", tmp_path / "w")

    def test_invalid_blocks(self, tmp_path):
        file = tmp_path / "m.onnx"
        export(mlp(2), (torch.randn(1, 24),), file, "sparse")
        proto = onnx.load(str(file))
        for text, words in (
            (json.dumps({"0.weight": 8}), "does not consist of blocks of 8"),
            (json.dumps({"0.weight": 5}), "does not consist of blocks of 5"),
            ("[1]", "must map weights to block sizes"),
        ):
            onnx.helper.set_model_props(proto, {"dynsparse.block_sizes": text})
            onnx.save(proto, str(file))
            with pytest.raises(ValueError, match=words):
                import_(file)

    def test_weights_of_the_operator(self, tmp_path):
        file = tmp_path / "m.onnx"
        export(mlp(), (torch.randn(1, 24),), file, "operator")
        ds.save_safetensors(mlp(), tmp_path / "w")
        for change in (
            lambda: weights_to_onnx(tmp_path / "w", file, tmp_path / "b.onnx"),
            lambda: weights_from_onnx(file, tmp_path / "v"),
            lambda: sparsify_onnx(file, tmp_path / "b.onnx", 0.1),
        ):
            with pytest.raises(ValueError, match="in the operator SparseLinear"):
                change()
        assert not any((tmp_path / name).exists() for name in ("b.onnx", "v"))

    def test_positions_outside_the_matrix(self, tmp_path):
        file = tmp_path / "m.onnx"
        export(mlp(), (torch.randn(1, 24),), file, "sparse")
        proto = onnx.load(str(file))
        entry = proto.graph.sparse_initializer[0]
        flat = onnx.numpy_helper.to_array(entry.indices).copy()
        flat[-1] = 10**9
        entry.indices.raw_data = flat.tobytes()
        file.write_bytes(proto.SerializeToString())
        with pytest.raises(ValueError, match="no valid ONNX file"):
            import_(file)

    def test_weights_of_another_model(self, tmp_path):
        export(mlp(), (torch.randn(1, 24),), tmp_path / "a.onnx")
        other = ds.sparsify(nn.Sequential(nn.Linear(24, 8)), density=0.3, verbose=False)
        ds.save_safetensors(other, tmp_path / "w.safetensors")
        with pytest.raises(ValueError, match="'0' has the shape"):
            weights_to_onnx(tmp_path / "w.safetensors", tmp_path / "a.onnx", tmp_path / "b.onnx")
        assert not (tmp_path / "b.onnx").exists()

    def test_models_that_cannot_be_sparse(self, tmp_path):
        foreign(tmp_path / "m.onnx")
        with pytest.raises(ValueError, match="no linear layer whose sides block_size=5 divides"):
            sparsify_onnx(tmp_path / "m.onnx", tmp_path / "s.onnx", 0.1, block_size=5)


def one_matrix(path, nodes, square, sparse):
    """Write a file whose nodes share one matrix W, each with its (orientation, bias)."""
    helper, numpy_helper = onnx.helper, onnx.numpy_helper
    torch.manual_seed(0)
    width = 6 if square else 4
    matrix = torch.randn(6, width) * (torch.rand(6, width) < 0.5)
    made, biases, last = [], [], "x"
    for i, (transposed, bias) in enumerate(nodes):
        inputs = [last, "W"] + ([f"b{i}"] if bias else [])
        made.append(helper.make_node("Gemm", inputs, [f"y{i}"], transB=transposed))
        last = f"y{i}"
        if bias:
            b = torch.randn(6 if transposed else width)
            biases.append(numpy_helper.from_array(b.numpy(), f"b{i}"))
    whole = numpy_helper.from_array(matrix.numpy(), "W")
    graph = helper.make_graph(
        made,
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 6])],
        [helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT, ["n", 6])],
        [whole, *biases],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    if sparse:
        values = matrix[matrix != 0]
        places = matrix.flatten().nonzero().flatten()
        entry = helper.make_sparse_tensor(
            numpy_helper.from_array(values.numpy(), "W"),
            numpy_helper.from_array(places.numpy(), "W_places"),
            [6, width],
        )
        del proto.graph.initializer[0]
        proto.graph.sparse_initializer.append(entry)
    onnx.save(proto, str(path))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    ("nodes", "square"),
    [
        ([(0, True), (1, True)], False),
        ([(0, True), (1, True)], True),
        ([(0, True), (0, True)], True),
        ([(0, False), (0, True), (1, False)], True),
    ],
)
def test_nodes_that_share_a_matrix_in_different_orientations(nodes, square, sparse, tmp_path):
    one_matrix(tmp_path / "a.onnx", nodes, square, False)
    x = torch.randn(5, 6)
    expected = computed(tmp_path / "a.onnx", x)
    one_matrix(tmp_path / "b.onnx", nodes, square, sparse)
    with pytest.warns(
        UserWarning, match="nodes use W in different orientations or with different biases"
    ):
        model = import_(tmp_path / "b.onnx")
    torch.testing.assert_close(model(x), torch.as_tensor(expected), rtol=1e-5, atol=1e-5)
    assert len(sparse_layers(model)) == (len(nodes) if sparse else 0)
    for layer in sparse_layers(model).values():
        assert layer.pattern.nnz == len(layer.values) == int((layer.values != 0).sum())


@pytest.mark.parametrize("sparse", [False, True])
def test_gemm_with_one_number_as_its_bias(sparse, tmp_path):
    one_matrix(tmp_path / "m.onnx", [(1, True)], True, sparse)
    proto = onnx.load(str(tmp_path / "m.onnx"))
    entry = next(e for e in proto.graph.initializer if e.name == "b0")
    entry.CopyFrom(onnx.numpy_helper.from_array(np.array([3.0], np.float32), "b0"))
    onnx.save(proto, str(tmp_path / "m.onnx"))
    x = torch.randn(5, 6)
    expected = torch.as_tensor(computed(tmp_path / "m.onnx", x))
    torch.testing.assert_close(import_(tmp_path / "m.onnx")(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["../../x.weight", "a..weight"])
def test_invalid_module_names_raise(name, tmp_path):
    make, floats = onnx.helper, onnx.TensorProto.FLOAT
    inside, outside = (make.make_tensor_value_info(n, floats, [1, 4]) for n in ("x", "y"))
    weight = make.make_tensor(name, floats, [4, 4], np.ones(16, np.float32))
    node = make.make_node("MatMul", ["x", name], ["y"])
    model = make.make_model(make.make_graph([node], "g", [inside], [outside], [weight]))
    onnx.save(model, tmp_path / "names.onnx")
    with pytest.raises(ValueError, match="cannot be the name of a module"):
        import_(tmp_path / "names.onnx")


def test_small_file_with_a_huge_matrix_raises(tmp_path):
    make = onnx.helper
    floats = onnx.TensorProto.FLOAT
    values = make.make_tensor("w", floats, [1], [1.0])
    indices = make.make_tensor("positions", onnx.TensorProto.INT64, [1], [5])
    inside, outside = (
        make.make_tensor_value_info(name, floats, [1, 200_000]) for name in ("x", "y")
    )
    graph = make.make_graph([make.make_node("MatMul", ["x", "w"], ["y"])], "g", [inside], [outside])
    graph.sparse_initializer.append(make.make_sparse_tensor(values, indices, [200_000] * 2))
    onnx.save(make.make_model(graph), tmp_path / "large.onnx")
    with pytest.raises(ValueError, match="at most 268,435,456 bytes when they are dense, got 160,"):
        import_(tmp_path / "large.onnx")


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (lambda: SparseLinear(8, 8, 0.5), torch.randn(2, 8)),
        (lambda: ds.nn.SparseConv2d(2, 4, 3, density=0.5), torch.randn(1, 2, 8, 8)),
        (lambda: SparseEmbedding(10, 8, 0.5), torch.tensor([1, 2])),
    ],
)
def test_torch_exporter_error_points_to_this_one(layer, x, dynamo, tmp_path):
    with pytest.raises(
        Exception, match=r"sparse layers: use dynsparse\.integrations\.onnx\.export"
    ):
        torch.onnx.export(layer(), (x,), tmp_path / "a.onnx", dynamo=dynamo)


@pytest.mark.parametrize("torchvision", ["of another torch", "missing"])
def test_import_needs_no_torchvision(torchvision, tmp_path):
    model, x = mlp(), torch.randn(2, 24)
    export(model, (x,), tmp_path / "a.onnx", "sparse")
    if torchvision == "of another torch":
        (tmp_path / "torchvision.py").write_text(
            "raise RuntimeError('no operator torchvision::nms')"
        )
    else:
        (tmp_path / "torchvision.py").write_text("raise ModuleNotFoundError")
    code = (
        "import sys, torch; from dynsparse.integrations.onnx import import_\n"
        "torch.save(import_(sys.argv[1]).state_dict(), sys.argv[2])\n"
        "assert 'torchvision' not in sys.modules"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, tmp_path / "a.onnx", tmp_path / "state"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    values = torch.load(tmp_path / "state")["0.values"]
    assert torch.equal(values, model[0].values)
