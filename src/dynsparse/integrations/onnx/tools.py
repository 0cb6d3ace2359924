"""ONNX files made sparse, and their weights taken out and put back: what `dynsparse onnx` does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse.allocation import allocate
from dynsparse.checks import check_integer
from dynsparse.files.limits import parse_json
from dynsparse.integrations.onnx.exporting import check_form
from dynsparse.integrations.onnx.graph import (
    PARAMETERS,
    LinearNode,
    layer_with,
    linear_weights,
    make_sparse,
    metadata,
    read_model,
    set_values,
    take_sparse,
    to_tensor,
    turned,
    write_model,
)
from dynsparse.nn import SparseLinear, save_safetensors
from dynsparse.nn.init import largest_blocks
from dynsparse.nn.weights_file import read_aliases, read_tensors
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
    """Keep the largest weights of an ONNX model's linear layers and write it anew.

    Args:
        source: an ONNX file of any exporter. Every constant matrix of a MatMul or Gemm takes part
            whose sides block_size divides.
        file: the file to write.
        density, block_size, allocation: as in `dynsparse.sparsify`.
        weights: how they are stored, see `export`.

    Returns:
        Weight -> its density.

    Raises:
        ImportError: onnx is missing.
        ValueError: no linear layer that block_size divides, a damaged file, and what `sparsify`
            raises. OSError: a file cannot be read or written.
    """
    check_form(weights)
    check_integer("block_size", block_size, 1)
    model = read_model(source)
    take_sparse(model)
    tensors = {entry.name: entry for entry in model.graph.initializer}
    chosen = {
        name: one
        for name, one in linear_weights(model.graph).items()
        if all(side % block_size == 0 for side in tensors[name].dims)
    }
    if not chosen:
        raise ValueError(
            f"{source} has no linear layer whose sides block_size={block_size} divides"
        )
    shapes = {name: _shape(tensors[name], one) for name, one in chosen.items()}
    counts = allocate(shapes, density, method=allocation, block_size=block_size)
    patterns: dict[str, SparsePattern] = {}
    for name, one in chosen.items():
        weight = to_tensor(tensors[name])
        upright = weight.T if one.transposed else weight
        pattern = largest_blocks(upright.contiguous(), counts[name], block_size)
        patterns[name] = turned(pattern) if one.transposed else pattern
        set_values(tensors[name], weight * patterns[name].to_mask().to(weight.dtype))
    if weights == "sparse":
        make_sparse(model, patterns)
    write_model(model, file)
    return {name: pattern.density for name, pattern in patterns.items()}


def weights_from_onnx(source: str | os.PathLike[str], file: str | os.PathLike[str]) -> list[str]:
    """Write the weights of an ONNX model into a file of `save_safetensors`.

    Sparse matrices of linear layers are sparse there, as [out, in], under the names of the layers;
    the other parameters are dense. The file of a model that `export` wrote goes into that
    model by `dynsparse.load_pretrained`.

    Returns:
        The layers that are sparse.

    Raises:
        ImportError: onnx or safetensors is missing.
        ValueError: a damaged file, or names of which one is a part of another.
        OSError: a file cannot be read or written.
    """
    model = read_model(source)
    patterns = take_sparse(model)
    linear = linear_weights(model.graph)
    tensors = {entry.name: to_tensor(entry) for entry in model.graph.initializer}
    own = metadata(model, PARAMETERS) or [n for n, t in tensors.items() if t.is_floating_point()]
    tensors = {name: tensor for name, tensor in tensors.items() if name in own}
    root = nn.Module()
    layers = []
    for name in patterns:
        path, _, last = name.rpartition(".")
        if name not in linear or last != "weight":
            continue
        weight, pattern = tensors.pop(name), patterns[name]
        if linear[name].transposed:
            weight, pattern = weight.T, turned(pattern)
        bias = tensors.pop(f"{path}.bias", None)
        layer = layer_with(weight, pattern, None if bias is None else nn.Parameter(bias))
        _put(root, path, layer)
        layers.append(path)
    for name, tensor in tensors.items():
        _put(root, name, tensor)
    save_safetensors(root, file, {"source": Path(source).name})
    return layers


def weights_to_onnx(
    source: str | os.PathLike[str],
    graph: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    weights: str = "sparse",
) -> list[str]:
    """Write the ONNX model `graph` anew with the weights of a file of `save_safetensors`.

    Args:
        source: what `weights_from_onnx` or, for a graph of `export`, `save_safetensors` wrote,
            trained on or pruned since.
        graph: the ONNX file whose operators are kept.
        file: the file to write. weights: how sparse layers are stored, see `export`.

    Returns:
        The layers that are sparse.

    Raises:
        ImportError: onnx or safetensors is missing.
        ValueError: a damaged file, or weights that are not those of the graph: one line that names
            the first. OSError: a file cannot be read or written.
    """
    check_form(weights)
    model = read_model(graph)
    take_sparse(model)
    linear = linear_weights(model.graph)
    source = Path(source)
    header, tensors = read_tensors(source)
    tensors = read_aliases(source, header, tensors)
    patterns = {}
    for entry in model.graph.initializer:
        path, _, last = entry.name.rpartition(".")
        if last == "weight" and f"{path}.rows" in tensors:
            weight, pattern = _dense_of(path, tensors, header, source)
            if entry.name in linear and linear[entry.name].transposed:
                weight, pattern = weight.T.contiguous(), turned(pattern)
            patterns[entry.name] = pattern
        elif entry.name in tensors:
            weight = tensors[entry.name]
        elif entry.name in (metadata(model, PARAMETERS) or ()):
            raise ValueError(f"{source} does not hold {entry.name!r}, a parameter of {graph}")
        else:
            continue
        now = to_tensor(entry)
        if weight.shape != now.shape or weight.dtype != now.dtype:
            raise ValueError(
                f"{entry.name!r} is {_words(now)} in {graph} but {_words(weight)} in {source}"
            )
        set_values(entry, weight)
    if weights == "sparse":
        make_sparse(model, patterns)
    write_model(model, file)
    return [name.removesuffix(".weight") for name in patterns]


def _dense_of(
    path: str, tensors: Mapping[str, Tensor], header: Mapping[str, str], source: Path
) -> tuple[Tensor, SparsePattern]:
    try:
        described = parse_json(header["layers"])[path]
        pattern = SparsePattern(
            tensors[f"{path}.rows"],
            tensors[f"{path}.cols"],
            shape=tuple(described["shape"]),
            block_size=described["block_size"],
        )
        values = tensors[f"{path}.values"]
        height, width = pattern.shape
        layer = SparseLinear(width, height, bias=False, pattern=pattern, dtype=values.dtype)
        with torch.no_grad():
            layer.values.copy_(values)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"the sparse layer {path!r} of {source} is damaged: {reason}") from None
    return layer.to_dense().detach(), pattern


def _shape(entry: Any, one: LinearNode) -> tuple[int, int]:
    height, width = entry.dims
    return (width, height) if one.transposed else (height, width)


def _put(root: nn.Module, name: str, what: nn.Module | Tensor) -> None:
    """Put a layer or a tensor into the tree of modules under `root`, by its dotted name."""
    *path, last = name.split(".")
    owner = root
    for part in path:
        if part not in owner._modules:
            if hasattr(owner, part):
                raise ValueError(f"the graph has a tensor {part!r} and one in it, {name!r}")
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    if hasattr(owner, last):
        raise ValueError(f"the graph has more than one tensor {name!r}")
    if isinstance(what, nn.Module):
        owner.add_module(last, what)
    else:
        owner.register_buffer(last, what)


def _words(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
