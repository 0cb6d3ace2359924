"""Sparse weights as ONNX stores them.

A sparse weight is an entry of the graph's `sparse_initializer`: its values, and their positions in
the matrix read row by row, ascending. ONNX knows no blocks: those of a pattern become their
elements, and the model's metadata keep

    dynsparse.block_sizes    JSON: weight -> edge of its blocks, where it is not 1
    dynsparse.parameters     JSON: the initializers that are the model's own, not made on the way

so that the pattern comes back as it was. Positions in the file count as present even where their
value is zero.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynsparse.files.limits import parse_json
from dynsparse.files.shorten import shortened
from dynsparse.integrations.onnx.library import library
from dynsparse.pattern import SparsePattern

__all__ = [
    "PARAMETERS",
    "SparseWeights",
    "keep_metadata",
    "make_sparse",
    "metadata",
    "set_values",
    "take_sparse",
    "to_tensor",
    "turned",
]

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
