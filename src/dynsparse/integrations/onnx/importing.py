"""Import an ONNX file as a module with sparse layers."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import Tensor, fx, nn

from dynsparse.integrations.onnx.graph import (
    join_linears,
    layer_with,
    library,
    quiet,
    read_model,
    take_sparse,
    turned,
)
from dynsparse.nn.convert import make_linear
from dynsparse.pattern import SparsePattern
from dynsparse.typed import typed


class Trilu(nn.Module):
    """The upper or lower triangle of a matrix, zeros elsewhere."""

    def __init__(self, upper: bool) -> None:
        super().__init__()
        self.upper = upper

    def forward(self, x: Tensor, k: Tensor | None = None) -> Tensor:
        diagonal = 0 if k is None else int(k)
        return torch.triu(x, diagonal) if self.upper else torch.tril(x, diagonal)


def know_trilu() -> None:
    """Register it, unless onnx2torch has learned it since."""
    registry = library("onnx2torch.node_converters.registry")
    common = library("onnx2torch.utils.common")
    try:
        registry.get_converter("Trilu", version=14)
    except NotImplementedError:

        @registry.add_converter(operation_type="Trilu", version=14)
        def _(node: Any, graph: Any) -> Any:
            return common.OperationConverterResult(
                torch_module=Trilu(bool(node.attributes.get("upper", 1))),
                onnx_mapping=common.onnx_mapping_from_node(node=node),
            )


@typed
def import_(file: str | os.PathLike[str]) -> fx.GraphModule:
    """The model of an ONNX file, of any exporter, as a module that trains.

    The graph is converted by the package onnx2torch. Every MatMul or Gemm with a constant matrix
    becomes an `nn.Linear` under the name of its weight ("layers.0.fc.weight" gives
    `layers.0.fc`), or, where the file holds the matrix as a `sparse_initializer`, a `SparseLinear`
    with exactly that pattern and those values. `sparsify` takes what is dense. Other constants of
    the graph, such as embedding tables, become buffers, which are not trained.

    Nodes that take the same matrix in the same way become one layer. Where they differ in its
    orientation or in their bias, as in a tied autoencoder, each has a copy of the matrix, which
    training changes by itself; a UserWarning names it.

    Raises:
        ImportError: onnx or onnx2torch is missing.
        ValueError: not an ONNX file, a damaged one, or one with an operator or a type (such as
            bfloat16) that onnx2torch does not know. OSError: the file cannot be read.
    """
    converter = library("onnx2torch")
    know_trilu()
    model = read_model(file)
    patterns = take_sparse(model)
    names = join_linears(model)
    _let_zeros_copy(model.graph)
    with quiet():
        try:
            made = converter.convert(model)
        except Exception as error:  # what it does not know fails in many ways
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"{file}: onnx2torch cannot convert it: {reason}") from error
    layers: dict[str, list[tuple[bool, nn.Linear, nn.Module]]] = {}
    for node, one in names.items():
        linear = made.get_submodule(_as_converted(node))
        if not isinstance(linear, nn.Linear):  # a bias that is no vector
            continue
        alike = layers.setdefault(one.weight, [])
        layer = next(
            (
                own
                for way, first, own in alike
                if way == one.transposed and _same_bias(first, linear)
            ),
            None,
        )
        if layer is None:
            pattern = patterns.get(one.weight)
            if pattern is not None and one.transposed:
                pattern = turned(pattern)
            layer = _layer(linear, pattern)
            alike.append((one.transposed, linear, layer))
        _put(made, _as_converted(node), node, layer)
    copied = [weight for weight, alike in layers.items() if len(alike) > 1]
    if copied:
        warnings.warn(
            f"{file}: nodes take {', '.join(copied)} in other orientations or with other biases: "
            "each has a copy, which training changes by itself",
            stacklevel=3,
        )
    made.delete_all_unused_submodules()
    made.recompile()
    return made


def _let_zeros_copy(graph: Any) -> None:
    """Drop `allowzero`, which torch's exporter always writes and onnx2torch never takes.

    It matters for tensors without elements alone.
    """
    for node in graph.node:
        if node.op_type == "Reshape":
            others = [one for one in node.attribute if one.name != "allowzero"]
            del node.attribute[:]
            node.attribute.extend(others)


def _as_converted(name: str) -> str:
    """The name that onnx2torch gives the module of a node."""
    return name.replace(".", "/")


@torch.no_grad()
def _layer(linear: nn.Linear, pattern: SparsePattern | None) -> nn.Module:
    weight = linear.weight.detach().clone(memory_format=torch.contiguous_format)
    bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())
    if pattern is None:
        return make_linear(nn.Parameter(weight), bias, training=True)
    return layer_with(weight, pattern, bias)


def _same_bias(one: nn.Linear, other: nn.Linear) -> bool:
    if one.bias is None or other.bias is None:
        return one.bias is other.bias
    return torch.equal(one.bias, other.bias)


def _put(made: fx.GraphModule, old: str, new: str, layer: nn.Module) -> None:
    made.add_submodule(new, layer)
    for node in made.graph.nodes:
        if node.op == "call_module" and node.target == old:
            node.target = new
