"""Export a model with sparse layers to an ONNX file of standard operators."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dynsparse._core.checks import check_choice, check_types
from dynsparse.integrations.onnx.graph import (
    PARAMETERS,
    ignore_warnings,
    import_library,
    store_weights,
    write_metadata,
    write_model,
)
from dynsparse.nn import SparseEmbedding, SparseLinear, SparseMultiheadAttention
from dynsparse.nn.conv import SparseConv1d, SparseConv2d
from dynsparse.nn.embedding import TiedHead
from dynsparse.nn.linear import make_linear
from dynsparse.nn.quantized import QuantizedSparseLinear
from dynsparse.pattern import SparsePattern

FORMS = ("dense", "sparse", "operator")


@check_types
def export(
    model: nn.Module,
    args: tuple[Any, ...],
    file: str | os.PathLike[str],
    weights: str = "dense",
    *,
    opset_version: int = 18,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_shapes: Any = None,
) -> None:
    """Write `model` in its current state to an ONNX file that any runtime reads.

    A sparse layer becomes a MatMul or Gemm, a convolution a Conv, a sparse embedding a Gather,
    whose weight the MatMul of a tied head shares. The graph does not depend on the form of the
    weights, which keep their names, "layer.weight". In training mode dropout stays in the graph:
    call `model.eval()` before.

    Args:
        model: the model, which is not changed.
        args: the positional arguments of a call, a tuple.
        file: the file, written atomically. Dense weights of a model of more than 2 GiB go into a
            second file beside it, with the suffix ".data".
        weights: "dense" stores matrices with their zeros, which every runtime reads. "sparse"
            stores the non-zeros and their positions (ONNX's `sparse_initializer`): a smaller file,
            which onnxruntime expands on loading and other runtimes may not read. "operator" turns
            linear layers, with their bias and ReLU, into nodes of the operator SparseLinear, which
            onnxruntime computes sparsely after `dynsparse.integrations.onnxruntime.register`;
            float32, or int8 after `dynsparse.quantize`, whose weights are float32 in the other
            forms. Weights of convolutions and embeddings are always dense.
        opset_version, input_names, output_names, dynamic_shapes: as in `torch.onnx.export`;
            dynamic_shapes=({0: "batch"},) makes the first dimension of the first argument dynamic.

    Raises:
        ImportError: onnx or onnxscript is missing.
        ValueError: a model without sparse layers, an unknown form of weights, more than 2 GiB of
            sparse weights, weights of another dtype for the operator, or a model that torch's
            exporter cannot export.
        TypeError: not a module, `args` not a tuple. OSError: the file cannot be written.
    """
    check_choice("weights", weights, FORMS)
    import_library("onnx")
    import_library("onnxscript")
    kinds = SparseLinear, QuantizedSparseLinear
    if not any(isinstance(layer, kinds) for layer in model.modules()):
        raise ValueError("the model has no sparse layers: use torch.onnx.export")
    dense_model, patterns, quantized = _dense_copy(model)
    program = _export(dense_model, args, opset_version, input_names, output_names, dynamic_shapes)
    names = set(dense_model.state_dict())
    _simplify(program, names)
    with ignore_warnings():
        proto = program.model_proto
    for node in proto.graph.node:
        node.ClearField("metadata_props")  # source files and lines of the model
    present = [entry.name for entry in proto.graph.initializer]
    write_metadata(proto, PARAMETERS, [name for name in present if name in names])
    stored = {name: patterns[name] for name in present if name in patterns}
    store_weights(proto, stored, weights, quantized)
    write_model(proto, file)


def _dense_copy(
    model: nn.Module,
) -> tuple[nn.Module, dict[str, SparsePattern], dict[str, QuantizedSparseLinear]]:
    """A copy with dense layers, and by all names of their weights the patterns, and the layers with
    int8 weights.

    Unlike `densify` it keeps the sparse attention class, with dense projections.
    """
    root = nn.Sequential()
    root.add_module("model", copy.deepcopy(model))
    patterns: dict[str, SparsePattern] = {}
    dense: dict[int, nn.Module] = {}
    heads: dict[str, TiedHead] = {}
    quantized: dict[str, QuantizedSparseLinear] = {}
    for name, layer in list(root.named_modules(remove_duplicate=False)):
        if isinstance(layer, SparseMultiheadAttention) and layer.attention_pattern is not None:
            layer.exported_mask = layer.attention_pattern.to_mask()
        if isinstance(layer, TiedHead):
            heads[name] = layer
        if not isinstance(layer, (SparseLinear, QuantizedSparseLinear)):
            continue
        weight_name = f"{name}.weight".removeprefix("model.")
        if isinstance(layer, QuantizedSparseLinear):
            quantized[weight_name] = layer
        if not isinstance(layer, (SparseConv1d, SparseConv2d)):
            patterns[weight_name] = layer.pattern
        if id(layer) not in dense:
            dense[id(layer)] = _dense_layer(layer)
        root.set_submodule(name, dense[id(layer)])
    for name, head in heads.items():
        weight: Any = dense[id(head.table)].weight
        root.set_submodule(name, make_linear(weight, head.bias, head.training))
        patterns[f"{name}.weight".removeprefix("model.")] = head.table.pattern
    return root.get_submodule("model"), patterns, quantized


def _dense_layer(layer: SparseLinear | QuantizedSparseLinear) -> nn.Module:
    if isinstance(layer, (SparseConv1d, SparseConv2d)):
        return layer.to_dense_layer()
    weight = layer.to_dense().detach()
    if isinstance(layer, SparseEmbedding):
        return nn.Embedding.from_pretrained(weight)
    bias = layer.bias
    if bias is not None and not isinstance(bias, nn.Parameter):
        bias = nn.Parameter(bias)
    return make_linear(nn.Parameter(weight), bias, layer.training)


def _export(
    model: nn.Module,
    args: tuple[Any, ...],
    opset_version: int,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    dynamic_shapes: Any,
) -> Any:
    """The `ONNXProgram` of torch, not yet simplified."""
    # The exporter mistakes the strides of the outputs of the fused attention with a mask.
    with ignore_warnings(), sdpa_kernel(SDPBackend.MATH):
        try:
            return torch.onnx.export(
                model,
                args,
                dynamo=True,
                optimize=False,
                verbose=False,
                opset_version=opset_version,
                input_names=input_names,
                output_names=output_names,
                dynamic_shapes=dynamic_shapes,
            )
        except Exception as error:  # of many classes, with messages of many lines
            raise ValueError(
                f"torch.onnx.export cannot export the model: {_describe_error(error)}"
            ) from error


def _describe_error(error: BaseException) -> str:
    """The cause of an error, which torch's exporter wraps in advice, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    described = f"{type(error).__name__}: {lines[0]}"[:300]
    if re.search(r"<class '[^']*Cache'> in output", lines[0]):  # of a model of transformers
        return f"set model.config.use_cache = False before exporting ({described})"
    return described


def _simplify(program: Any, names: set[str]) -> None:
    """Fold constants except for parameters and buffers of the model, which keep their names."""
    optimizer = import_library("onnxscript.optimizer")

    def should_fold(node: Any) -> bool | None:
        uses = (value is not None and value.name in names for value in node.inputs)
        return False if any(uses) else None

    with ignore_warnings():
        optimizer.optimize_ir(program.model, should_fold=should_fold)
