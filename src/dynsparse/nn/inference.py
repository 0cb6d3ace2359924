"""Models for inference only."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from dynsparse._core.checks import check_types
from dynsparse.nn.exclusions import has_hooks
from dynsparse.nn.quantized import QuantizedSparseLinear
from dynsparse.nn.sharded import is_sharded
from dynsparse.nn.sparse_module import SparseModule


@check_types
@torch.no_grad()
def freeze(model: nn.Module) -> nn.Module:
    """Prepare a trained model for inference, in place.

    Sets the model to evaluation mode and `requires_grad` of its parameters to False. Sparse layers
    free everything that only training needs: gradients, the order of the pattern by columns, and
    the slots of pattern updates; 4 bytes per block of the pattern remain. Layers that are sharded,
    or computed on a target or with an active subset of `TopKAST`, keep theirs. Each `nn.ReLU` that
    follows a sparse layer in an `nn.Sequential` computes in place. Layers in int8 stay as they are.

    A frozen model computes, saves, loads, copies and compiles as before. To train it again, call
    `model.train().requires_grad_()`; its optimizer and trainer continue where they stopped, but for
    the noise of `DeepR`, which is drawn by slot.

    Returns:
        The model.

    Raises:
        TypeError: not a module.
        ValueError: a model without sparse layers.
    """
    layers = [module for module in model.modules() if isinstance(module, SparseModule)]
    if not layers and not any(isinstance(m, QuantizedSparseLinear) for m in model.modules()):
        raise ValueError("the model has no sparse layers")
    model.eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.grad = None
    for layer in layers:
        if layer.executor is None and not is_sharded(layer.values):
            pattern = layer.pattern
            values = pattern.by_rows(layer.values.detach())
            layer._install(pattern._to_row_major(), values, keep_size=False)
    for module in model.modules():
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            _compute_in_place(module)
    return model


def _compute_in_place(sequence: nn.Sequential) -> None:
    """Let each ReLU that follows a sparse layer overwrite its output, which nothing else reads."""
    members = list(sequence._modules.items())
    for (_, layer), (name, activation) in pairwise(members):
        is_plain = type(activation) is nn.ReLU and not has_hooks(activation)
        if is_plain and isinstance(layer, SparseModule) and not layer._forward_hooks:
            # A new one: the module may have other places in the model.
            setattr(sequence, name, nn.ReLU(inplace=True).eval())
