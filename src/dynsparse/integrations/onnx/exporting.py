"""A model with sparse layers as an ONNX file of standard operators."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dynsparse.files.shorten import shortened
from dynsparse.integrations.onnx.graph import (
    PARAMETERS,
    keep_metadata,
    library,
    make_sparse,
    quiet,
    write_model,
)
from dynsparse.nn import SparseEmbedding, SparseLinear, SparseMultiheadAttention
from dynsparse.nn.conv import SparseConv1d, SparseConv2d, dense_conv
from dynsparse.nn.convert import make_linear
from dynsparse.pattern import SparsePattern
from dynsparse.typed import typed

FORMS = ("dense", "sparse")


@typed
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
    """Write `model`, as it computes now, to an ONNX file that any runtime reads.

    A sparse layer becomes a MatMul or Gemm, a convolution a Conv, a sparse embedding a Gather, with
    standard operators only. The graph is the same for both forms of the weights, which keep their
    names, "layer.weight". In training mode dropout stays in the graph: call `model.eval()` before.

    Args:
        model: its state is not changed.
        args: the positional arguments of a call, a tuple.
        file: written whole or not at all.
        weights: "dense" stores matrices with their zeros, which every runtime takes. "sparse"
            stores the non-zeros and their positions (ONNX's `sparse_initializer`): a smaller file,
            which onnxruntime lays out as it loads, other runtimes may not read it. Weights of
            convolutions are stored with their zeros all the same.
        opset_version, input_names, output_names, dynamic_shapes: as in `torch.onnx.export`;
            dynamic_shapes=({0: "batch"},) leaves the first dimension of the first argument open.

    Raises:
        ImportError: onnx or onnxscript is missing.
        ValueError: a model without sparse layers, another form of weights, a file over 2 GiB, and
            what torch's exporter cannot put into ONNX.
        TypeError: not a module, `args` not a tuple. OSError: the file cannot be written.
    """
    check_form(weights)
    library("onnx")
    library("onnxscript")
    twin, patterns = _dense_twin(model)
    if not any(isinstance(layer, SparseLinear) for layer in model.modules()):
        raise ValueError("the model has no sparse layers: torch.onnx.export takes it as it is")
    made = _exported(twin, args, opset_version, input_names, output_names, dynamic_shapes)
    own = set(twin.state_dict())
    _simplify(made, own)
    with quiet():
        proto = made.model_proto
    for node in proto.graph.node:
        node.ClearField("metadata_props")  # where in whose files each line of the model stands
    present = [entry.name for entry in proto.graph.initializer]
    keep_metadata(proto, PARAMETERS, [name for name in present if name in own])
    if weights == "sparse":
        make_sparse(proto, {name: patterns[name] for name in present if name in patterns})
    write_model(proto, file)


def check_form(weights: str) -> None:
    """Raise ValueError for another form of weights than "dense" and "sparse"."""
    if weights not in FORMS:
        raise ValueError(f"weights must be one of {list(FORMS)}, got {shortened(weights)}")


def _dense_twin(model: nn.Module) -> tuple[nn.Module, dict[str, SparsePattern]]:
    """A copy with dense layers, and the patterns under all names of their weights.

    `densify` is for models to go on with: it refuses attentions that torch's own cannot be, and
    gives back the classes that layers came from. A graph needs neither.
    """
    twin = nn.Sequential()
    twin.add_module("model", copy.deepcopy(model))
    patterns: dict[str, SparsePattern] = {}
    made: dict[int, nn.Module] = {}
    for name, layer in list(twin.named_modules(remove_duplicate=False)):
        if isinstance(layer, SparseMultiheadAttention) and layer.attention_pattern is not None:
            layer.exported_mask = layer.attention_pattern.to_mask()
        if not isinstance(layer, SparseLinear):
            continue
        if not isinstance(layer, (SparseConv1d, SparseConv2d)):
            patterns[f"{name}.weight".removeprefix("model.")] = layer.pattern
        if id(layer) not in made:
            made[id(layer)] = _dense(layer)
        twin.set_submodule(name, made[id(layer)])
    return twin.get_submodule("model"), patterns


def _dense(layer: SparseLinear) -> nn.Module:
    if isinstance(layer, (SparseConv1d, SparseConv2d)):
        return dense_conv(layer)
    weight = layer.to_dense().detach()
    if isinstance(layer, SparseEmbedding):
        return nn.Embedding.from_pretrained(weight)
    return make_linear(nn.Parameter(weight), layer.bias, layer.training)


def _exported(
    model: nn.Module,
    args: tuple[Any, ...],
    opset_version: int,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    dynamic_shapes: Any,
) -> Any:
    """torch's own `ONNXProgram`, not yet simplified."""
    with quiet():
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
        except Exception as error:  # of any class, over many lines
            lines = [line for line in str(error).splitlines() if line.strip()]
            reason = (lines[0] if lines else type(error).__name__)[:300]
            raise ValueError(f"torch.onnx.export cannot export the model: {reason}") from error


def _simplify(made: Any, names: set[str]) -> None:
    """Fold what is constant, but leave the model's own tensors, which keep their names."""
    optimizer = library("onnxscript.optimizer")

    def should_fold(node: Any) -> bool | None:
        taken = (value is not None and value.name in names for value in node.inputs)
        return False if any(taken) else None

    with quiet():
        optimizer.optimize_ir(made.model, should_fold=should_fold)
