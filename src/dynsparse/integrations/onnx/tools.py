"""Sparsify ONNX files, and move weights between ONNX and safetensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dynsparse._core.checks import check_choice, check_integer
from dynsparse.allocation import allocate
from dynsparse.integrations.onnx.exporting import FORMS
from dynsparse.integrations.onnx.graph import (
    PARAMETERS,
    densify_initializers,
    find_linear_weights,
    make_layer,
    read_metadata,
    read_model,
    set_values,
    store_weights,
    to_tensor,
    transpose_pattern,
    write_model,
)
from dynsparse.nn import save_safetensors
from dynsparse.nn.init import select_largest_blocks
from dynsparse.nn.weights_file import has_pattern, read_pattern, read_weights
from dynsparse.pattern import SparsePattern


def sparsify_onnx(
    source: str | os.PathLike[str],
    file: str | os.PathLike[str],
    density: float,
    *,
    block_size: int = 1,
    allocation: str = "erk",
    weights: str = "sparse",
) -> dict[str, float]:
    """Write an ONNX model with only the largest weights of its linear layers.

    Args:
        source: an ONNX file of any exporter. Every constant matrix of a MatMul or Gemm whose sides
            are multiples of block_size takes part.
        file: the file to write.
        density, block_size, allocation: as in `dynsparse.sparsify`.
        weights: how they are stored, see `export`.

    Returns:
        Weight -> its density.

    Raises:
        ImportError: onnx is missing.
        ValueError: no linear layer that block_size divides, a damaged file, a file of
            `export(weights="operator")`, and what `sparsify` raises.
        OSError: a file cannot be read or written.
    """
    check_choice("weights", weights, FORMS)
    check_integer("block_size", block_size, 1)
    model = _read_with_matrices(source)
    densify_initializers(model)
    tensors = {entry.name: entry for entry in model.graph.initializer}
    selected = {
        name: linear
        for name, linear in find_linear_weights(model.graph).items()
        if all(side % block_size == 0 for side in tensors[name].dims)
    }
    if not selected:
        raise ValueError(
            f"{source} has no linear layer whose sides block_size={block_size} divides"
        )
    shapes = {n: _shape(tensors[n], linear.transposed) for n, linear in selected.items()}
    counts = allocate(shapes, density, method=allocation, block_size=block_size)
    patterns: dict[str, SparsePattern] = {}
    for name, linear in selected.items():
        weight = to_tensor(tensors[name])
        matrix = weight.T.contiguous() if linear.transposed else weight
        pattern = select_largest_blocks(matrix, counts[name], block_size)
        patterns[name] = transpose_pattern(pattern) if linear.transposed else pattern
        set_values(tensors[name], weight * patterns[name].to_mask().to(weight.dtype))
    store_weights(model, patterns, weights)
    write_model(model, file)
    return {name: pattern.density for name, pattern in patterns.items()}


def weights_from_onnx(source: str | os.PathLike[str], file: str | os.PathLike[str]) -> list[str]:
    """Write the weights of an ONNX model to a file of `save_safetensors`.

    Sparse matrices of linear layers are stored sparse, as [out, in], under the names of the layers;
    the other parameters are dense. If `export` wrote the ONNX file, `dynsparse.load_pretrained`
    loads the weights into the model it came from.

    Returns:
        The names of the sparse layers.

    Raises:
        ImportError: onnx or safetensors is missing.
        ValueError: a damaged file, one of `export(weights="operator")`, or a name that is a prefix
            of another.
        OSError: a file cannot be read or written.
    """
    model = _read_with_matrices(source)
    patterns = densify_initializers(model)
    linear = find_linear_weights(model.graph)
    tensors = {entry.name: to_tensor(entry) for entry in model.graph.initializer}
    floating = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
    parameters = read_metadata(model, PARAMETERS) or floating
    tensors = {name: tensor for name, tensor in tensors.items() if name in parameters}
    root = nn.Module()
    layers = []
    for name in patterns:
        path, _, last = name.rpartition(".")
        if name not in linear or last != "weight":
            continue
        weight, pattern = tensors.pop(name), patterns[name]
        if linear[name].transposed:
            weight, pattern = weight.T, transpose_pattern(pattern)
        bias = tensors.pop(f"{path}.bias", None)
        layer = make_layer(weight, pattern, None if bias is None else nn.Parameter(bias))
        _add_to_tree(root, path, layer)
        layers.append(path)
    for name, tensor in tensors.items():
        _add_to_tree(root, name, tensor)
    save_safetensors(root, file, {"source": Path(source).name})
    return layers


def weights_to_onnx(
    source: str | os.PathLike[str],
    graph: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    weights: str = "sparse",
) -> list[str]:
    """Write the ONNX model `graph` with the weights of a file of `save_safetensors`.

    Args:
        source: a file of `weights_from_onnx`, or for a graph of `export` a file of
            `save_safetensors` of that model; values and patterns may differ.
        graph: the ONNX file with the operators.
        file: the file to write.
        weights: how sparse layers are stored, see `export`.

    Returns:
        The names of the sparse layers.

    Raises:
        ImportError: onnx or safetensors is missing.
        ValueError: a damaged file, a graph of `export(weights="operator")`, or weights that do not
            fit the graph; the message names the first.
        OSError: a file cannot be read or written.
    """
    check_choice("weights", weights, FORMS)
    model = _read_with_matrices(graph)
    densify_initializers(model)
    linear = find_linear_weights(model.graph)
    source = Path(source)
    tensors, layers, _ = read_weights(source)
    patterns = {}
    for entry in model.graph.initializer:
        path, _, last = entry.name.rpartition(".")
        if last == "weight" and has_pattern(path, tensors):
            transposed = entry.name in linear and linear[entry.name].transposed
            try:
                pattern = read_pattern(path, tensors, _shape(entry, transposed), layers)
            except ValueError as error:
                raise ValueError(f"{source} does not fit {graph}: {error}") from None
            weight = pattern.to_dense(tensors[f"{path}.values"])
            if transposed:
                weight, pattern = weight.T.contiguous(), transpose_pattern(pattern)
            patterns[entry.name] = pattern
        elif entry.name in tensors:
            weight = tensors[entry.name]
        elif entry.name in (read_metadata(model, PARAMETERS) or ()):
            raise ValueError(f"{source} does not hold {entry.name!r}, a parameter of {graph}")
        else:
            continue
        current = to_tensor(entry)
        if weight.shape != current.shape or weight.dtype != current.dtype:
            raise ValueError(
                f"{entry.name!r} is {_describe(current)} in {graph} but {_describe(weight)} in "
                f"{source}"
            )
        set_values(entry, weight)
    store_weights(model, patterns, weights)
    write_model(model, file)
    return [name.removesuffix(".weight") for name in patterns]


def _read_with_matrices(path: str | os.PathLike[str]) -> Any:
    """Return the `ModelProto` of a file whose weights are matrices of standard operators.

    Raises:
        ValueError: as `read_model`, and for a file of `export(weights="operator")`.
    """
    model = read_model(path)
    if any(node.domain == "dynsparse" for node in model.graph.node):
        raise ValueError(
            f"{path} holds its weights in the operator SparseLinear, where they cannot be read or "
            'replaced: use a file of export(..., weights="sparse")'
        )
    return model


def _shape(entry: Any, transposed: bool) -> tuple[int, int]:
    """[out, in] of a matrix."""
    height, width = entry.dims
    return (width, height) if transposed else (height, width)


def _add_to_tree(root: nn.Module, name: str, entry: nn.Module | Tensor) -> None:
    """Add a layer or a tensor to the tree of modules under `root`, by its dotted name."""
    *path, last = name.split(".")
    owner = root
    for part in path:
        if part not in owner._modules:
            if hasattr(owner, part):
                raise ValueError(f"the graph has a tensor {part!r} and a tensor {name!r}")
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    if hasattr(owner, last):
        raise ValueError(f"the graph has more than one tensor {name!r}")
    if isinstance(entry, nn.Module):
        owner.add_module(last, entry)
    else:
        owner.register_buffer(last, entry)


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
