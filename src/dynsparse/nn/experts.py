"""Mixtures of experts of Hugging Face transformers, with one linear layer per expert."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse._core.checks import check_kind
from dynsparse.nn.linear import make_linear
from dynsparse.nn.transformers_import import set_quantizers

IMPLEMENTATION = "dynsparse"
"""The name of `forward` among the experts' implementations of transformers."""

_LAYERS = {
    "gate_up_proj": "gate_up_layers",
    "up_proj": "up_layers",
    "down_proj": "down_layers",
}
"""Parameter [experts, ...] -> the `nn.ModuleList` that takes its place. The names differ, since
transformers renames and converts tensors by theirs."""


@torch.no_grad()
def split_experts(model: nn.Module) -> nn.Module:
    """Store the experts of a transformers model as one `nn.Linear` each, in place.

    Models such as Mixtral, Qwen3-MoE, DeepSeek-V3, OLMoE and gpt-oss store the weights of all
    experts in one three-dimensional parameter, which `sparsify` leaves dense. Afterwards
    `experts.gate_up_proj` [experts, ...] is `experts.gate_up_layers.0`, `experts.gate_up_layers.1`
    and so on, and `experts.down_proj` is `experts.down_layers.0` and so on: layers to prune, train
    and save as any others. The model computes the same, except for rounding.

    An expert that receives no tokens is not called, and gets no gradient.

    Args:
        model: a model of transformers 5 or later, or one that contains such a model. Weights are
            copied module by module; the Parameters are new, so create the optimizer afterwards.

    Returns:
        The model.

    Raises:
        TypeError: not an `nn.Module`.
        ValueError: no experts in three-dimensional parameters, or experts that are distributed over
            ranks. The model is then unchanged.
    """
    experts = find_experts(model)
    if not experts:
        raise ValueError(
            "the model has no experts in three-dimensional parameters, as models of transformers 5 "
            "store them"
        )
    for name, module in experts.items():
        if getattr(module, "_is_expert_parallel", False):
            raise ValueError(f"{name!r} is distributed over ranks: split the experts before that")
    for module in experts.values():
        for source, target in _LAYERS.items():
            if hasattr(module, source):
                _split(module, source, target)
        # A copy: models made from one config share it, and others keep their implementation.
        module.dense_config, module.config = module.config, copy.deepcopy(module.config)
        module.config._experts_implementation = IMPLEMENTATION
        module._is_hf_initialized = True  # initialisation would look for the old parameters
    set_quantizers(model)
    return model


@torch.no_grad()
def merge_experts(model: nn.Module) -> nn.Module:
    """Undo `split_experts`, in place: for files with the names and shapes that others read.

    Args:
        model: a model with experts that `split_experts` split, all dense; `densify` makes them so.

    Returns:
        The model; its Parameters of experts are new.

    Raises:
        TypeError: not an `nn.Module`.
        ValueError: no experts that were split, or sparse ones. The model is then unchanged.
    """
    experts = find_experts(model, split=True)
    if not experts:
        raise ValueError("the model has no experts that split_experts split")
    for name, module in experts.items():
        for target in _LAYERS.values():
            if any(type(layer) is not nn.Linear for layer in getattr(module, target, ())):
                raise ValueError(f"{name!r} has sparse experts: call densify first")
    for module in experts.values():
        for source, target in _LAYERS.items():
            if hasattr(module, target):
                _merge(module, source, target)
        module.config = module.dense_config
        del module.dense_config
    set_quantizers(model)
    return model


def find_experts(model: nn.Module, split: bool = False) -> dict[str, Any]:
    """Return name -> module of experts in three-dimensional parameters, or of split experts."""
    check_kind("model", model, nn.Module, "a torch.nn.Module")
    weights, kind = ("down_layers", nn.ModuleList) if split else ("down_proj", nn.Parameter)
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "is_transposed") and isinstance(getattr(module, weights, None), kind)
    }


def forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute the output of split experts.

    Args:
        module: the experts.
        hidden_states: [tokens, hidden].
        top_k_index: int64 [tokens, k], the experts of each token.
        top_k_weights: [tokens, k], their weights in the sum.

    Returns:
        [tokens, hidden], the dtype of `hidden_states`.
    """
    if not len(hidden_states):
        return torch.zeros_like(hidden_states)
    k = top_k_index.shape[-1]
    chosen = top_k_index.flatten()
    order = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=len(module.down_layers)).tolist()
    first = module.gate_up_layers if module.has_gate else module.up_layers
    results = []
    parts = hidden_states[order // k].split(counts)
    for x, up, down in zip(parts, first, module.down_layers, strict=True):
        if len(x):
            h = up(x)
            results.append(down(module._apply_gate(h) if module.has_gate else module.act_fn(h)))
    y = torch.cat(results)[order.argsort()]
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y)
    # Sums in the order of `top_k_index`: the same bits on every run.
    y = (y.unflatten(0, (-1, k)) * top_k_weights.unsqueeze(-1)).sum(1)
    return y.to(hidden_states.dtype)


def _split(module: Any, source: str, target: str) -> None:
    weights, biases = getattr(module, source), getattr(module, f"{source}_bias", None)
    layers = nn.ModuleList()
    for i, weight in enumerate(weights.mT if module.is_transposed else weights):
        copied = weight.clone(memory_format=torch.contiguous_format)
        bias = None if biases is None else nn.Parameter(biases[i].clone(), biases.requires_grad)
        parameter = nn.Parameter(copied, weights.requires_grad)
        layers.append(make_linear(parameter, bias, module.training))
    delattr(module, source)
    if biases is not None:
        delattr(module, f"{source}_bias")
    setattr(module, target, layers)


def _merge(module: Any, source: str, target: str) -> None:
    layers = getattr(module, target)
    weights = torch.stack([layer.weight for layer in layers])
    if module.is_transposed:
        weights = weights.mT.contiguous()
    setattr(module, source, nn.Parameter(weights, layers[0].weight.requires_grad))
    if layers[0].bias is not None:
        biases = torch.stack([layer.bias for layer in layers])
        setattr(module, f"{source}_bias", nn.Parameter(biases, layers[0].bias.requires_grad))
    delattr(module, target)
