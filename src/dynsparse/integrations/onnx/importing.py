"""Import an ONNX file as a module with sparse layers."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn

from dynsparse._core import logs
from dynsparse._core.checks import check_types, describe_error
from dynsparse.integrations.onnx.graph import (
    densify_initializers,
    fuse_linears,
    ignore_warnings,
    import_library,
    make_layer,
    read_model,
    transpose_pattern,
)
from dynsparse.nn.linear import make_linear
from dynsparse.pattern import SparsePattern


class Trilu(nn.Module):
    """The upper or lower triangle of a matrix, zeros elsewhere."""

    def __init__(self, upper: bool) -> None:
        super().__init__()
        self.upper = upper

    def forward(self, x: Tensor, k: Tensor | None = None) -> Tensor:
        diagonal = 0 if k is None else int(k)
        return torch.triu(x, diagonal) if self.upper else torch.tril(x, diagonal)


def import_onnx2torch() -> Any:
    """Import onnx2torch, also where torchvision is missing or was built for another torch.

    It imports torchvision only for the operators NonMaxSuppression and RoiAlign, but loads no
    converter without it.
    """
    try:
        import_module("torchvision")
    except (ImportError, OSError, RuntimeError):
        pass
    else:
        return import_library("onnx2torch")

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"NonMaxSuppression and RoiAlign need a torchvision for torch {torch.__version__}"
        )

    package: Any = ModuleType("torchvision")
    package.ops = ModuleType("torchvision.ops")
    vars(package.ops).update(nms=refuse, box_convert=refuse, roi_align=refuse)
    substitutes = {"torchvision": package, "torchvision.ops": package.ops}
    sys.modules.update(substitutes)
    try:
        return import_library("onnx2torch")
    finally:
        for name in substitutes:
            del sys.modules[name]


def register_trilu() -> None:
    """Register a converter for Trilu, which causal attention is exported with, unless onnx2torch
    has one."""
    registry = import_library("onnx2torch.node_converters.registry")
    common = import_library("onnx2torch.utils.common")
    try:
        registry.get_converter("Trilu", version=14)
    except NotImplementedError:

        @registry.add_converter(operation_type="Trilu", version=14)
        def _(node: Any, graph: Any) -> Any:
            return common.OperationConverterResult(
                torch_module=Trilu(bool(node.attributes.get("upper", 1))),
                onnx_mapping=common.onnx_mapping_from_node(node=node),
            )


@check_types
def import_(file: str | os.PathLike[str]) -> fx.GraphModule:
    """Import an ONNX file of any exporter as a trainable module.

    The package onnx2torch converts the graph. Every MatMul or Gemm with a constant matrix becomes
    an `nn.Linear` with the name of its weight ("layers.0.fc.weight" gives `layers.0.fc`), or a
    `SparseLinear` with the pattern and the values of the file if the matrix is a
    `sparse_initializer`. `sparsify` can convert the dense layers. Other constants of the graph,
    such as embedding tables, become buffers, which are not trained.

    Nodes that use the same matrix in the same way become one layer. If they differ in its
    orientation or in their bias, as in a tied autoencoder, each has its own copy of the matrix,
    which is trained separately; a UserWarning names it.

    Raises:
        ImportError: onnx or onnx2torch is missing.
        ValueError: not an ONNX file, a damaged one, or one with an operator or a dtype (such as
            bfloat16) that onnx2torch does not support. OSError: the file cannot be read.
    """
    converter = import_onnx2torch()
    register_trilu()
    model = read_model(file)
    patterns = densify_initializers(model)
    names = fuse_linears(model)
    _drop_allowzero(model.graph)
    with ignore_warnings():
        try:
            module = converter.convert(model)
        except Exception as error:  # of many classes
            reason = describe_error(error)
            raise ValueError(f"{file}: onnx2torch cannot convert it: {reason}") from error
    layers: dict[str, list[tuple[bool, nn.Linear, nn.Module]]] = {}
    for name, node in names.items():
        try:
            linear = module.get_submodule(_converted_name(name))
        except AttributeError as error:
            raise _name_error(file, name) from error
        if not isinstance(linear, nn.Linear):  # a bias that is not a vector
            continue
        users = layers.setdefault(node.weight, [])
        layer = next(
            (
                existing
                for transposed, first, existing in users
                if transposed == node.transposed and _has_same_bias(first, linear)
            ),
            None,
        )
        if layer is None:
            pattern = patterns.get(node.weight)
            if pattern is not None and node.transposed:
                pattern = transpose_pattern(pattern)
            layer = _copy_layer(linear, pattern)
            users.append((node.transposed, linear, layer))
        try:
            _replace_module(module, _converted_name(name), name, layer)
        except (AttributeError, KeyError) as error:
            raise _name_error(file, name) from error
    copied = [weight for weight, users in layers.items() if len(users) > 1]
    if copied:
        logs.warn(
            f"{file}: nodes use {', '.join(copied)} in different orientations or with different "
            "biases: each has its own copy, which is trained separately",
        )
    module.delete_all_unused_submodules()
    module.recompile()
    return module


def _name_error(file: str | os.PathLike[str], name: str) -> ValueError:
    return ValueError(f"{file}: {name!r} cannot be the name of a module")


def _drop_allowzero(graph: Any) -> None:
    """Drop `allowzero`, which torch's exporter always writes and onnx2torch refuses.

    It only matters for tensors without elements.
    """
    for node in graph.node:
        if node.op_type == "Reshape":
            others = [a for a in node.attribute if a.name != "allowzero"]
            del node.attribute[:]
            node.attribute.extend(others)


def _converted_name(name: str) -> str:
    """The name that onnx2torch gives to the module of a node."""
    return name.replace(".", "/")


@torch.no_grad()
def _copy_layer(linear: nn.Linear, pattern: SparsePattern | None) -> nn.Module:
    weight = linear.weight.detach().clone(memory_format=torch.contiguous_format)
    bias = None
    if linear.bias is not None:  # which may be a single number for all outputs
        bias = nn.Parameter(linear.bias.detach().expand(len(weight)).clone())
    if pattern is None:
        return make_linear(nn.Parameter(weight), bias, training=True)
    return make_layer(weight, pattern, bias)


def _has_same_bias(first: nn.Linear, second: nn.Linear) -> bool:
    if first.bias is None or second.bias is None:
        return first.bias is second.bias
    return torch.equal(first.bias, second.bias)


def _replace_module(module: fx.GraphModule, old: str, new: str, layer: nn.Module) -> None:
    module.add_submodule(new, layer)
    for node in module.graph.nodes:
        if node.op == "call_module" and node.target == old:
            node.target = new
