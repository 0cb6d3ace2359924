"""ONNX files as `ModelProto`: reading and writing, sparse weights, linear layers.

A sparse weight is an entry of the graph's `sparse_initializer`: its values, and their positions in
the matrix in row-major order, ascending. ONNX has no blocks: the blocks of a pattern are stored as
their elements, and the metadata of the model have

    dynsparse.block_sizes    JSON: weight -> edge of its blocks, where it is not 1
    dynsparse.parameters     JSON: the initializers that are parameters or buffers of the model

so that the pattern can be restored. Positions in the file count as present even where their value
is zero.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dynsparse._core.checks import shorten
from dynsparse._core.files.atomic_write import atomic_write, replace_file
from dynsparse._core.files.limits import (
    HOW_TO_RAISE,
    LimitError,
    check_regular,
    parse_json,
    read_limit,
)
from dynsparse.integrations import require_package
from dynsparse.nn import SparseLinear
from dynsparse.nn.quantized import QuantizedSparseLinear
from dynsparse.pattern import SparsePattern
from dynsparse.pattern.packed import pack

_MAX_BYTES = (1 << 31) - 1
"""Bytes of one protocol buffer, which an ONNX file is, at most."""


def import_library(name: str) -> Any:
    """Import a package, or raise an ImportError with the command that installs it if missing."""
    with require_package(name.partition(".")[0], "ONNX files need"):
        return import_module(name)


@contextmanager
def ignore_warnings() -> Iterator[None]:
    """Ignore deprecation warnings inside the ONNX packages."""
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", kind)
        yield


def read_model(path: str | os.PathLike[str]) -> Any:
    """The `ModelProto` of a file, checked.

    Raises:
        ValueError: not an ONNX file, or not a valid one. OSError: it cannot be read.
    """
    onnx = import_library("onnx")
    path = Path(path)
    check_regular(path)
    path.open("rb").close()
    try:
        model = onnx.load(str(path))
        onnx.checker.check_model(str(path))
    except Exception as error:  # parser and checker have no common class
        raise ValueError(f"{path} is no valid ONNX file: {_first_line(error)}") from None
    return model


def write_model(model: Any, path: str | os.PathLike[str]) -> None:
    """Check the model and write it atomically.

    If it is larger than a protocol buffer can be, its dense weights go into a second file beside
    `path`, which has the same name and the suffix ".data". The model then has no weights anymore.

    Raises:
        ValueError: sparse weights that are too large. OSError: it cannot be written.
    """
    onnx = import_library("onnx")
    path = Path(path)
    if _model_bytes(model) <= _MAX_BYTES:
        onnx.checker.check_model(model)
        atomic_write(path, lambda file: file.write(model.SerializeToString()))
        return
    sparse = sum(_raw_bytes(entry) for entry in _sparse_parts(model))
    if sparse > _MAX_BYTES:
        raise ValueError(
            f"the sparse weights take {sparse:,} bytes, an ONNX file at most {_MAX_BYTES:,}: "
            'write them with weights="dense", which go into a second file'
        )
    data = f"{path.name}.data"
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        written = Path(folder) / path.name
        onnx.save_model(model, str(written), save_as_external_data=True, location=data)
        onnx.checker.check_model(str(written))
        for name in (data, path.name):
            with replace_file(path.with_name(name)) as temporary:
                (Path(folder) / name).replace(temporary)


def _model_bytes(model: Any) -> int:
    """Bytes of the model, which a protocol buffer cannot tell beyond its limit."""
    try:
        return model.ByteSize()
    except import_library("google.protobuf.message").EncodeError:
        return sum(map(_raw_bytes, (*model.graph.initializer, *_sparse_parts(model))))


def _raw_bytes(tensor: Any) -> int:
    return len(tensor.raw_data)


def _sparse_parts(model: Any) -> list[Any]:
    entries = model.graph.sparse_initializer
    return [part for entry in entries for part in (entry.values, entry.indices)]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]


BLOCK_SIZES, PARAMETERS = "dynsparse.block_sizes", "dynsparse.parameters"

SparseWeights = dict[str, SparsePattern]
"""Weight -> its pattern, in the orientation of the file."""


def store_weights(
    model: Any,
    patterns: Mapping[str, SparsePattern],
    form: str,
    quantized: Mapping[str, QuantizedSparseLinear] | None = None,
) -> None:
    """Change the dense weights of `patterns` to the form "dense", "sparse" or "operator", in place.

    Args:
        model: the `ModelProto`.
        patterns: weight -> its pattern, in the orientation of the file.
        form: see `export`.
        quantized: weight -> the layer with int8 weights that it is from, of some of them.

    Raises:
        ValueError: as `use_operator`.
    """
    if form == "sparse":
        sparsify_initializers(model, patterns)
    elif form == "operator":
        use_operator(model, patterns, quantized or {})


def sparsify_initializers(model: Any, patterns: Mapping[str, SparsePattern]) -> None:
    """Convert the initializers of `patterns` to sparse ones at these patterns, in place."""
    graph = model.graph
    entries = [entry for entry in graph.initializer if entry.name in patterns]
    others = [entry for entry in graph.initializer if entry.name not in patterns]
    graph.sparse_initializer.extend(_sparse_tensor(e, patterns[e.name]) for e in entries)
    del graph.initializer[:]
    graph.initializer.extend(others)
    sizes = {name: p.block_size for name, p in patterns.items() if p.block_size != 1}
    write_metadata(model, BLOCK_SIZES, sizes)


def _sparse_tensor(dense: Any, pattern: SparsePattern) -> Any:
    onnx = import_library("onnx")
    flat = _positions(pattern)
    values = to_tensor(dense).flatten()[flat]
    sparse = onnx.SparseTensorProto(dims=list(dense.dims))
    sparse.values.name = dense.name
    for part, tensor, kind in (
        (sparse.values, values, dense.data_type),
        (sparse.indices, flat, onnx.TensorProto.INT64),
    ):
        part.data_type = kind
        part.dims.append(len(flat))
        part.raw_data = _to_bytes(tensor)
    return sparse


def write_metadata(model: Any, key: str, value: Any) -> None:
    """Set `key` of the model's metadata to `value` as JSON; remove it if `value` is empty."""
    properties = {e.key: e.value for e in model.metadata_props if e.key != key}
    if value:
        properties[key] = json.dumps(value)
    import_library("onnx").helper.set_model_props(model, properties)


def read_metadata(model: Any, key: str) -> Any:
    """The value that `write_metadata` wrote, or None."""
    for entry in model.metadata_props:
        if entry.key == key:
            return parse_json(entry.value)
    return None


def densify_initializers(model: Any) -> SparseWeights:
    """Convert every sparse initializer of `model` to a dense one, in place.

    Returns:
        The patterns of the sparse initializers.

    Raises:
        ValueError: positions outside the matrix, or that do not form blocks of the given size;
            matrices that would take more memory than a file of this size may.
    """
    sizes = _block_sizes(model)
    graph = model.graph
    _check_dense_bytes(model)
    patterns: SparseWeights = {}
    for entry in graph.sparse_initializer:
        name = entry.values.name
        shape = tuple(entry.dims)
        flat = to_tensor(entry.indices)
        if flat.ndim == 2:
            flat = torch.from_numpy(np.ravel_multi_index(tuple(flat.T.numpy()), shape))
        values = to_tensor(entry.values)
        dense = torch.zeros(int(np.prod(shape)), dtype=values.dtype, device="cpu")
        dense[flat] = values
        initializer = graph.initializer.add(name=name, data_type=entry.values.data_type, dims=shape)
        initializer.raw_data = _to_bytes(dense)
        if len(shape) == 2:
            patterns[name] = _make_pattern(name, flat, shape, sizes.get(name, 1))
    del graph.sparse_initializer[:]
    return patterns


def _check_dense_bytes(model: Any) -> None:
    """Raise LimitError if the sparse initializers, dense in float32, exceed `read_limit`."""
    entries = model.graph.sparse_initializer
    if any(side < 0 for entry in entries for side in entry.dims):
        raise ValueError("expected sparse initializers with sides of at least 0")
    numbers = sum(math.prod(entry.dims) for entry in entries)
    if 4 * numbers > (most := read_limit(_model_bytes(model))):
        raise LimitError(
            f"expected sparse initializers of at most {most:,} bytes when they are dense, got "
            f"{4 * numbers:,}: {HOW_TO_RAISE}"
        )


def to_tensor(proto: Any) -> Tensor:
    """A copy of a `TensorProto` as a tensor."""
    onnx = import_library("onnx")
    if proto.data_type == onnx.TensorProto.BFLOAT16:
        bits = onnx.TensorProto()
        bits.CopyFrom(proto)
        bits.data_type = onnx.TensorProto.INT16
        return torch.from_numpy(onnx.numpy_helper.to_array(bits).copy()).view(torch.bfloat16)
    return torch.from_numpy(onnx.numpy_helper.to_array(proto).copy())


def set_values(dense: Any, tensor: Tensor) -> None:
    """Set the values of a `TensorProto`; dtype and shape stay the same."""
    for field in ("float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
        dense.ClearField(field)
    dense.raw_data = _to_bytes(tensor)


def transpose_pattern(pattern: SparsePattern) -> SparsePattern:
    """The pattern of the transposed matrix."""
    height, width = pattern.shape
    return SparsePattern(
        pattern.cols, pattern.rows, shape=(width, height), block_size=pattern.block_size
    )


def _positions(pattern: SparsePattern) -> Tensor:
    """Row-major positions of all elements of the blocks, ascending, int64."""
    b, width = pattern.block_size, pattern.shape[1]
    first = pattern.rows.long() * b * width + pattern.cols.long() * b
    inside = torch.arange(b, device="cpu")[:, None] * width + torch.arange(b, device="cpu")
    return (first[:, None] + inside.flatten()).flatten().sort().values


def _make_pattern(name: str, flat: Tensor, shape: tuple[int, ...], edge: int) -> SparsePattern:
    height, width = shape
    rows, cols = flat // width, flat % width
    if edge == 1:
        return SparsePattern(rows, cols, shape=(height, width))
    blocks = torch.unique(rows // edge * (width // edge) + cols // edge)
    try:
        pattern = SparsePattern.from_flat(blocks, shape=(height, width), block_size=edge)
        is_complete = torch.equal(_positions(pattern), flat)
    except ValueError:
        is_complete = False
    if not is_complete:
        raise ValueError(f"the sparse weight {name!r} does not consist of blocks of {edge}")
    return pattern


def _block_sizes(model: Any) -> dict[str, int]:
    sizes = read_metadata(model, BLOCK_SIZES) or {}
    if not isinstance(sizes, dict) or not all(
        type(size) is int and size > 0 for size in sizes.values()
    ):
        raise ValueError(f"{BLOCK_SIZES} must map weights to block sizes, got {shorten(sizes)}")
    return sizes


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@dataclass(frozen=True)
class LinearNode:
    """A MatMul or Gemm with a constant matrix.

    Attributes:
        node: the `NodeProto`.
        weight: name of the initializer.
        transposed: whether the initializer is [in, out] instead of [out, in].
    """

    node: Any
    weight: str
    transposed: bool


def find_linear_weights(graph: Any) -> dict[str, LinearNode]:
    """Initializer -> the first linear node that uses it, in the order of the graph."""
    nodes: dict[str, LinearNode] = {}
    for linear in _linear_nodes(graph):
        nodes.setdefault(linear.weight, linear)
    return nodes


def use_operator(
    model: Any,
    patterns: Mapping[str, SparsePattern],
    quantized: Mapping[str, QuantizedSparseLinear],
) -> None:
    """Replace the MatMul or Gemm of the weights in `patterns` by the operator SparseLinear, in
    place, with the bias and the ReLU after it; by QuantizedSparseLinear if they are in `quantized`.

    The operator's inputs are x, the values, the pattern as `dynsparse.pattern.packed` has it, with
    int8 values their scale, and the bias; csrc/onnxruntime/operator.cpp has its attributes. Weights
    that are also used in other ways are kept as well; those without such a node stay as they are.

    Raises:
        ValueError: a weight that is not float32.
    """
    onnx = import_library("onnx")
    graph = model.graph
    fused = fuse_linears(model, frozenset(patterns))
    dense = {entry.name: entry for entry in graph.initializer}
    stored: dict[str, tuple[SparsePattern, str]] = {}
    nodes = [(node, fused[node.name]) for node in graph.node if node.name in fused]
    for node, linear in nodes:
        if not _is_plain(node, _out_features(linear, dense), dense):
            continue
        name = linear.weight
        if name not in stored:
            stored[name] = _store_values(
                graph, dense[name], patterns[name], linear.transposed, quantized.get(name)
            )
        pattern, form = stored[name]
        relu = _fuse_relu(graph, node)
        inputs = [node.input[0], f"{name}.values", f"{name}.{form}"]
        layer, more = quantized.get(name), {}
        if layer is not None:
            inputs.append(f"{name}.scale")
            more = {"int8_activations": int(layer.activations == "int8")}
        replacement = onnx.helper.make_node(
            "SparseLinear" if layer is None else "QuantizedSparseLinear",
            [*inputs, *node.input[2:]],
            [node.output[0]],
            name=node.name,
            domain="dynsparse",
            out_features=pattern.shape[0],
            in_features=pattern.shape[1],
            block_size=pattern.block_size,
            gaps=int(form == "gaps"),
            relu=int(relu),
            **more,
        )
        node.CopyFrom(replacement)
    used = {name for node in graph.node for name in node.input}
    for name in stored:
        if name not in used:
            graph.initializer.remove(dense[name])
    if stored and "dynsparse" not in {opset.domain for opset in model.opset_import}:
        model.opset_import.extend([onnx.helper.make_opsetid("dynsparse", 1)])


def _is_plain(node: Any, out_features: int, constants: Mapping[str, Any]) -> bool:
    """Whether a Gemm is x W^T + bias, with a bias [out_features] or none."""
    bias = constants.get(node.input[2]) if len(node.input) > 2 else None
    return (
        _get_attribute(node, "alpha", 1.0) == 1
        and _get_attribute(node, "beta", 1.0) == 1
        and (len(node.input) < 3 or (bias is not None and list(bias.dims) == [out_features]))
    )


def _out_features(linear: LinearNode, matrices: Mapping[str, Any]) -> int:
    return matrices[linear.weight].dims[1 if linear.transposed else 0]


def _fuse_relu(graph: Any, node: Any) -> bool:
    """Fuse the Relu that is the only use of the node's output into the node; returns whether there
    is one."""
    value = node.output[0]
    users = [other for other in graph.node if value in other.input]
    if len(users) != 1 or users[0].op_type != "Relu" or value in {v.name for v in graph.output}:
        return False
    node.output[0] = users[0].output[0]
    graph.node.remove(users[0])
    return True


def _store_values(
    graph: Any,
    entry: Any,
    pattern: SparsePattern,
    transposed: bool,
    quantized: QuantizedSparseLinear | None,
) -> tuple[SparsePattern, str]:
    """Add the values of a weight, for int8 also their scale, and its packed pattern to the graph.

    Returns the pattern as [out, in], and the form in which it is packed.
    """
    onnx = import_library("onnx")
    if entry.data_type != onnx.TensorProto.FLOAT:
        kind = onnx.TensorProto.DataType.Name(entry.data_type)
        raise ValueError(
            f"the operator needs float32 weights, got {entry.name!r} in {kind}: call model.float() "
            "before exporting"
        )
    weight = to_tensor(entry)
    if transposed:
        weight, pattern = weight.T.contiguous(), transpose_pattern(pattern)
    block, grid = pattern.block_size, pattern.grid
    pattern = SparsePattern.from_flat(pattern.sorted_flat, shape=pattern.shape, block_size=block)
    form, packed = pack(pattern.sorted_flat, grid[0] * grid[1])
    tensors = [(f"{entry.name}.{form}", packed, onnx.TensorProto.UINT8)]
    if quantized is None:
        tensors += [(f"{entry.name}.values", pattern.values_of(weight), entry.data_type)]
    else:  # as the layer's kernels read them
        tensors += [
            (f"{entry.name}.values", quantized.values, onnx.TensorProto.INT8),
            (f"{entry.name}.scale", quantized.scale, entry.data_type),
        ]
    for name, tensor, kind in tensors:
        initializer = graph.initializer.add(name=name, data_type=kind, dims=tensor.shape)
        initializer.raw_data = _to_bytes(tensor)
    return pattern, form


def fuse_linears(model: Any, weights: Container[str] | None = None) -> dict[str, LinearNode]:
    """Fuse every linear node with its Transpose and Add into one Gemm, in place.

    onnx2torch recognises linear layers by Gemm. The first argument may have more than two
    dimensions here, which ONNX itself does not allow.

    Args:
        weights: only the nodes of these.

    Returns:
        Name of the Gemm -> the linear node before fusion.
    """
    helper = import_library("onnx").helper
    graph = model.graph
    constants = {entry.name: entry for entry in graph.initializer}
    matrices = {entry.values.name: entry for entry in graph.sparse_initializer} | constants
    uses = Counter(name for node in graph.node for name in node.input)
    uses.update(value.name for value in graph.output)
    names: dict[str, LinearNode] = {}
    removed: list[Any] = []
    counts: Counter[str] = Counter()
    for linear in _linear_nodes(graph):
        if weights is not None and linear.weight not in weights:
            continue
        node = linear.node
        if node.op_type == "MatMul":
            node.op_type = "Gemm"
            out_features = _out_features(linear, matrices)
            add = _find_add(graph, node.output[0], out_features, uses, constants)
            if add is not None:
                node.input.append(next(name for name in add.input if name != node.output[0]))
                node.output[0] = add.output[0]
                removed.append(add)
        node.input[1] = linear.weight
        others = [attribute for attribute in node.attribute if attribute.name != "transB"]
        del node.attribute[:]
        node.attribute.extend(
            [*others, helper.make_attribute("transB", int(not linear.transposed))]
        )
        base = linear.weight.removesuffix(".weight")
        counts[base] += 1
        node.name = base if counts[base] == 1 else f"{base}.{counts[base]}"
        names[node.name] = linear
    for node in removed:
        graph.node.remove(node)
    used = {name for node in graph.node for name in node.input}
    for node in [n for n in graph.node if n.op_type == "Transpose" and n.input[0] in constants]:
        if node.output[0] not in used and node.output[0] not in {v.name for v in graph.output}:
            graph.node.remove(node)
    return names


def _linear_nodes(graph: Any) -> list[LinearNode]:
    matrices = {entry.name for entry in graph.initializer if len(entry.dims) == 2}
    matrices |= {e.values.name for e in graph.sparse_initializer if len(e.dims) == 2}
    transposes = {
        node.output[0]: node
        for node in graph.node
        if node.op_type == "Transpose"
        and node.input[0] in matrices
        and list(_get_attribute(node, "perm", [1, 0])) == [1, 0]
    }
    nodes = []
    for node in graph.node:
        if node.op_type not in ("MatMul", "Gemm") or node.domain:
            continue
        matrix = node.input[1]
        transpose = transposes.get(matrix)
        weight = matrix if transpose is None else transpose.input[0]
        if weight not in matrices or _get_attribute(node, "transA", 0):
            continue
        as_stored = node.op_type == "MatMul" or not _get_attribute(node, "transB", 0)
        nodes.append(LinearNode(node, weight, as_stored == (transpose is None)))
    return nodes


def _find_add(
    graph: Any, value: str, out_features: int, uses: Counter[str], constants: dict[str, Any]
) -> Any | None:
    """The Add of a constant [out_features] that is the only use of `value`, or None."""
    if uses[value] != 1:
        return None
    for node in graph.node:
        if value in node.input:
            other = [name for name in node.input if name != value]
            if node.op_type == "Add" and len(other) == 1 and other[0] in constants:
                return node if list(constants[other[0]].dims) == [out_features] else None
    return None


def _get_attribute(node: Any, name: str, default: Any) -> Any:
    for attribute in node.attribute:
        if attribute.name == name:
            return import_library("onnx").helper.get_attribute_value(attribute)
    return default


@torch.no_grad()
def make_layer(weight: Tensor, pattern: SparsePattern, bias: nn.Parameter | None) -> SparseLinear:
    """A sparse layer with the entries of `weight` [out, in] at the pattern."""
    height, width = weight.shape
    layer = SparseLinear(width, height, bias=False, pattern=pattern, dtype=weight.dtype)
    layer.values.copy_(pattern.values_of(weight))
    layer.register_parameter("bias", bias)
    return layer
