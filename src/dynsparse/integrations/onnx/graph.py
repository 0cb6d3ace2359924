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
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dynsparse.files.atomic_write import atomic_write
from dynsparse.files.limits import parse_json
from dynsparse.files.shorten import shortened
from dynsparse.nn import SparseLinear
from dynsparse.pattern import SparsePattern

_LARGEST = (1 << 31) - 1
"""Bytes of one protocol buffer, which an ONNX file is."""


def library(name: str) -> Any:
    """The package, or an ImportError that says how to get it."""
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise ImportError(
            f"ONNX files need the package {package}: pip install 'dynsparse[onnx]'"
        ) from None


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings with which the packages speak to their own authors."""
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", kind)
        yield


def read_model(path: str | os.PathLike[str]) -> Any:
    """The `ModelProto` of a file, checked.

    Raises:
        ValueError: not an ONNX file, or not a valid one. OSError: it cannot be read.
    """
    onnx = library("onnx")
    path = Path(path)
    path.open("rb").close()
    try:
        model = onnx.load(str(path))
        onnx.checker.check_model(model)
    except Exception as error:  # the parser's and the checker's have no class in common
        raise ValueError(f"{path} is no valid ONNX file: {_first_line(error)}") from None
    return model


def write_model(model: Any, path: str | os.PathLike[str]) -> None:
    """Check the model and write it, whole or not at all.

    Raises:
        ValueError: larger than a protocol buffer can be. OSError: it cannot be written.
    """
    onnx = library("onnx")
    size = model.ByteSize()
    if size > _LARGEST:
        raise ValueError(
            f"the model takes {size:,} bytes, an ONNX file at most {_LARGEST:,}: "
            'export it with weights="sparse", or in a 16-bit type'
        )
    onnx.checker.check_model(model)
    atomic_write(Path(path), lambda file: file.write(model.SerializeToString()))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]


BLOCK_SIZES, PARAMETERS = "dynsparse.block_sizes", "dynsparse.parameters"

SparseWeights = dict[str, SparsePattern]
"""Weight -> where its values lie, as the matrix stands in the file."""


def make_sparse(model: Any, patterns: Mapping[str, SparsePattern]) -> None:
    """Store the initializers that `patterns` names by their values at the pattern, in place."""
    graph = model.graph
    entries = [entry for entry in graph.initializer if entry.name in patterns]
    others = [entry for entry in graph.initializer if entry.name not in patterns]
    graph.sparse_initializer.extend(_entry(one, patterns[one.name]) for one in entries)
    del graph.initializer[:]
    graph.initializer.extend(others)
    sizes = {name: one.block_size for name, one in patterns.items() if one.block_size != 1}
    keep_metadata(model, BLOCK_SIZES, sizes)


def _entry(dense: Any, pattern: SparsePattern) -> Any:
    onnx = library("onnx")
    flat = _positions(pattern)
    values = to_tensor(dense).flatten()[flat]
    made = onnx.SparseTensorProto(dims=list(dense.dims))
    made.values.name = dense.name
    for part, tensor, kind in (
        (made.values, values, dense.data_type),
        (made.indices, flat, onnx.TensorProto.INT64),
    ):
        part.data_type = kind
        part.dims.append(len(flat))
        part.raw_data = _bytes(tensor)
    return made


def keep_metadata(model: Any, key: str, value: Any) -> None:
    """Write `value` into the model's metadata as JSON; nothing where it is empty."""
    kept = {entry.key: entry.value for entry in model.metadata_props if entry.key != key}
    if value:
        kept[key] = json.dumps(value)
    library("onnx").helper.set_model_props(model, kept)


def metadata(model: Any, key: str) -> Any:
    """What `keep_metadata` has written, or None."""
    for entry in model.metadata_props:
        if entry.key == key:
            return parse_json(entry.value)
    return None


def take_sparse(model: Any) -> SparseWeights:
    """Make every sparse initializer of `model` a dense one, in place.

    Returns:
        The patterns they had.

    Raises:
        ValueError: positions that are no positions of the matrix, or block sizes that they do not
            have.
    """
    sizes = _block_sizes(model)
    graph = model.graph
    patterns: SparseWeights = {}
    for entry in graph.sparse_initializer:
        name = entry.values.name
        shape = tuple(entry.dims)
        flat = to_tensor(entry.indices)
        if flat.ndim == 2:
            flat = torch.from_numpy(np.ravel_multi_index(tuple(flat.T.numpy()), shape))
        values = to_tensor(entry.values)
        dense = torch.zeros(int(np.prod(shape)), dtype=values.dtype)
        dense[flat] = values
        kept = graph.initializer.add(name=name, data_type=entry.values.data_type, dims=shape)
        kept.raw_data = _bytes(dense)
        if len(shape) == 2:
            patterns[name] = _pattern(name, flat, shape, sizes.get(name, 1))
    del graph.sparse_initializer[:]
    return patterns


def to_tensor(proto: Any) -> Tensor:
    """The tensor of a `TensorProto`, in memory of its own."""
    onnx = library("onnx")
    if proto.data_type == onnx.TensorProto.BFLOAT16:
        as_bits = onnx.TensorProto()
        as_bits.CopyFrom(proto)
        as_bits.data_type = onnx.TensorProto.INT16
        return torch.from_numpy(onnx.numpy_helper.to_array(as_bits).copy()).view(torch.bfloat16)
    return torch.from_numpy(onnx.numpy_helper.to_array(proto).copy())


def set_values(dense: Any, tensor: Tensor) -> None:
    """Give the `TensorProto` other values of the same type and shape."""
    for field in ("float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
        dense.ClearField(field)
    dense.raw_data = _bytes(tensor)


def turned(pattern: SparsePattern) -> SparsePattern:
    """The pattern of the transposed matrix."""
    height, width = pattern.shape
    return SparsePattern(
        pattern.cols, pattern.rows, shape=(width, height), block_size=pattern.block_size
    )


def _positions(pattern: SparsePattern) -> Tensor:
    """Row-major positions of all elements, ascending, int64."""
    b, width = pattern.block_size, pattern.shape[1]
    first = pattern.rows.long() * b * width + pattern.cols.long() * b
    inside = torch.arange(b)[:, None] * width + torch.arange(b)
    return (first[:, None] + inside.flatten()).flatten().sort().values


def _pattern(name: str, flat: Tensor, shape: tuple[int, ...], edge: int) -> SparsePattern:
    height, width = shape
    rows, cols = flat // width, flat % width
    if edge == 1:
        return SparsePattern(rows, cols, shape=(height, width))
    blocks = torch.unique(rows // edge * (width // edge) + cols // edge)
    try:
        pattern = SparsePattern.from_flat(blocks, shape=(height, width), block_size=edge)
        whole = torch.equal(_positions(pattern), flat)
    except ValueError:
        whole = False
    if not whole:
        raise ValueError(f"the sparse weight {name!r} is not made of blocks of {edge}, as it says")
    return pattern


def _block_sizes(model: Any) -> dict[str, int]:
    sizes = metadata(model, BLOCK_SIZES) or {}
    if not isinstance(sizes, dict) or not all(
        type(size) is int and size > 0 for size in sizes.values()
    ):
        raise ValueError(f"{BLOCK_SIZES} must map weights to block sizes, got {shortened(sizes)}")
    return sizes


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@dataclass(frozen=True)
class LinearNode:
    """A MatMul or Gemm with a constant matrix.

    Attributes:
        node: the `NodeProto`.
        weight: the initializer's name.
        transposed: whether the initializer is [in, out] instead of [out, in].
        turn: the Transpose between the initializer and the node, if there is one.
    """

    node: Any
    weight: str
    transposed: bool
    turn: Any | None


def linear_weights(graph: Any) -> dict[str, LinearNode]:
    """Initializer -> the first linear node that takes it, in the order of the graph."""
    found: dict[str, LinearNode] = {}
    for one in _linear_nodes(graph):
        found.setdefault(one.weight, one)
    return found


def join_linears(model: Any) -> dict[str, LinearNode]:
    """Make every linear node, with the Transpose before it and the Add after it, one Gemm.

    In place; for a converter that knows linear layers by Gemm, whose first argument here may have
    more than two dimensions, which ONNX itself does not allow.

    Returns:
        Name of the node -> the node as it was found.
    """
    helper = library("onnx").helper
    graph = model.graph
    constants = {entry.name: entry for entry in graph.initializer}
    uses = Counter(name for node in graph.node for name in node.input)
    uses.update(value.name for value in graph.output)
    names: dict[str, LinearNode] = {}
    gone: list[Any] = []
    taken: Counter[str] = Counter()
    for one in _linear_nodes(graph):
        node = one.node
        if node.op_type == "MatMul":
            node.op_type = "Gemm"
            add = _add_after(graph, node.output[0], uses, constants)
            if add is not None:
                node.input.append(next(name for name in add.input if name != node.output[0]))
                node.output[0] = add.output[0]
                gone.append(add)
        node.input[1] = one.weight
        others = [attribute for attribute in node.attribute if attribute.name != "transB"]
        del node.attribute[:]
        node.attribute.extend([*others, helper.make_attribute("transB", int(not one.transposed))])
        base = one.weight.removesuffix(".weight")
        taken[base] += 1
        node.name = base if taken[base] == 1 else f"{base}.{taken[base]}"
        names[node.name] = one
    for node in gone:
        graph.node.remove(node)
    used = {name for node in graph.node for name in node.input}
    for node in [n for n in graph.node if n.op_type == "Transpose" and n.input[0] in constants]:
        if node.output[0] not in used and node.output[0] not in {v.name for v in graph.output}:
            graph.node.remove(node)
    return names


def _linear_nodes(graph: Any) -> list[LinearNode]:
    matrices = {entry.name for entry in graph.initializer if len(entry.dims) == 2}
    matrices |= {e.values.name for e in graph.sparse_initializer if len(e.dims) == 2}
    turned = {
        node.output[0]: node
        for node in graph.node
        if node.op_type == "Transpose"
        and node.input[0] in matrices
        and list(_attribute(node, "perm", [1, 0])) == [1, 0]
    }
    found = []
    for node in graph.node:
        if node.op_type not in ("MatMul", "Gemm") or node.domain:
            continue
        matrix = node.input[1]
        turn = turned.get(matrix)
        weight = matrix if turn is None else turn.input[0]
        if weight not in matrices or _attribute(node, "transA", 0):
            continue
        as_stored = node.op_type == "MatMul" or not _attribute(node, "transB", 0)
        found.append(LinearNode(node, weight, as_stored == (turn is None), turn))
    return found


def _add_after(graph: Any, value: str, uses: Counter[str], constants: dict[str, Any]) -> Any | None:
    """The Add of a constant vector that alone takes `value`."""
    if uses[value] != 1:
        return None
    for node in graph.node:
        if value in node.input:
            other = [name for name in node.input if name != value]
            if node.op_type == "Add" and len(other) == 1 and other[0] in constants:
                return node if len(constants[other[0]].dims) == 1 else None
    return None


def _attribute(node: Any, name: str, default: Any) -> Any:
    for attribute in node.attribute:
        if attribute.name == name:
            return library("onnx").helper.get_attribute_value(attribute)
    return default


@torch.no_grad()
def layer_with(weight: Tensor, pattern: SparsePattern, bias: nn.Parameter | None) -> SparseLinear:
    """A layer of what `weight` [out, in] has at the pattern."""
    height, width = weight.shape
    layer = SparseLinear(width, height, bias=False, pattern=pattern, dtype=weight.dtype)
    b = pattern.block_size
    blocks = weight.reshape(height // b, b, width // b, b).transpose(1, 2)
    values = blocks[pattern.rows.long(), pattern.cols.long()]
    layer.values.copy_(values.reshape(layer.values.shape))
    layer.register_parameter("bias", bias)
    return layer
