"""Convert a Keras model to sparse layers in place."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import keras
import torch
from torch import nn

from dynsparse.integrations.keras.layers import REGULARIZERS, SparseConv2D, SparseDense, SparseLayer
from dynsparse.nn import SparseLinear
from dynsparse.nn import sparsify as sparsify_module


def many_steps(model: Any) -> None:
    """Let `compile(steps_per_execution=n)` hold: `fit`, `evaluate` and `predict` take n batches
    between two calls of the callbacks' batch hooks, and give what single steps give.

    Keras refuses it with the torch backend. A model where n is 1 goes Keras' own way.
    """
    for name in ("train", "test", "predict"):
        made = MethodType(_maker(name, getattr(type(model), f"make_{name}_function")), model)
        vars(model)[f"make_{name}_function"] = made


def _maker(name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
    def make(model: Any, force: bool = False) -> Any:
        if model.steps_per_execution == 1:
            return usual(model, force)
        if model.jit_compile is True:
            raise ValueError(
                "expected jit_compile=False with steps_per_execution above 1, got True: leave one "
                "of them out"
            )
        step = getattr(model, f"{name}_step")

        def trained(batches: list[Any]) -> Any:
            for batch in batches:
                logs = step(batch)
            return logs

        @torch.no_grad()
        def tested(batches: list[Any]) -> Any:
            return trained(batches)

        @torch.no_grad()
        def predicted(batches: list[Any]) -> Any:
            made = [step(batch) for batch in batches]
            return keras.tree.map_structure(lambda *parts: torch.cat(parts), *made)

        functions = {"train": trained, "test": tested, "predict": predicted}
        setattr(model, f"{name}_function", functions[name])
        return functions[name]

    return make


_TAKEN: dict[Any, Any] = {keras.layers.Dense: SparseDense, keras.layers.Conv2D: SparseConv2D}
_FROM_DENSE = (
    "units", "filters", "kernel_size", "strides", "padding", "data_format", "dilation_rate",
    "groups", "activation", "use_bias", "bias_initializer", "kernel_regularizer",
    "bias_regularizer", "activity_regularizer", "bias_constraint", "name", "dtype", "trainable",
)  # fmt: skip


def sparsify(model: Any, density: float | None = 0.1, **options: Any) -> Any:
    """Turn a Keras model's `Dense` and `Conv2D` layers into sparse ones, in place.

    The layer objects stay, and with them names and graphs, so that it serves functional, Sequential
    and subclassed models. The model must be built, and its optimizer not yet. What is converted and
    what stays dense is printed; layers of a class derived from `Dense` or `Conv2D`, with a
    constraint or a regularizer over the whole kernel, quantised ones and such with LoRA stay.

    Names are those of the layers, within one another with dots: "encoder.dense".

    Args:
        model: a `keras.Model`.
        density, options: as in `dynsparse.sparsify`.

    Returns:
        The model.

    Raises:
        TypeError, ValueError: not a Keras model, one that is not built or has been trained, and
            what `dynsparse.sparsify` refuses. Nothing is changed then.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"expected a keras.Model, got {type(model).__name__}")
    if not all(layer.built for layer in model._flatten_layers()):
        raise ValueError(
            "the model has no shapes yet: build it, or call it on a batch, before sparsify"
        )
    if getattr(model, "optimizer", None) is not None and model.optimizer.built:
        raise ValueError(
            "the model's optimizer holds the variables of dense layers: sparsify the model first "
            "and compile it then"
        )
    likeness, places = _likeness(model)
    sparsify_module(likeness, density, **options)
    made = {
        name: _sparse_layer(places[name], module)
        for name, module in likeness.named_modules()
        if isinstance(module, SparseLinear)
    }
    for name, layer in made.items():
        _become(places[name], layer)
    for layer in model._flatten_layers():
        # Keras' copy of the Parameters' list; it makes it anew.
        layer._modules.pop("_torch_params", None)
    many_steps(model)
    return model


def _likeness(model: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A module of torch with the model's weights in layers of torch, and name -> Keras layer."""
    whole, places = nn.Module(), {}
    seen: set[int] = set()

    def add(inside: nn.Module, layers: Any, prefix: str) -> None:
        for layer in layers:
            if id(layer) in seen:
                continue
            seen.add(id(layer))
            name = layer.name.replace(".", "_")
            if name in inside._modules:
                raise ValueError(f"two layers have the name {prefix + name!r}: name them apart")
            module = _module(layer)
            inside.add_module(name, module)
            places[prefix + name] = layer
            add(module, layer._layers, f"{prefix}{name}.")

    add(whole, model._layers, "")
    return whole, places


def _module(layer: Any) -> nn.Module:
    """A layer of torch with the weights of a Keras layer; of its own class where there is none."""
    if _is_convertible(layer):
        bias = layer.bias is not None
        kernel = layer.kernel.value.detach()
        module: nn.Module
        if isinstance(layer, keras.layers.Dense):
            module = nn.Linear(kernel.shape[0], kernel.shape[1], bias=bias, device="meta")
            module.weight = nn.Parameter(kernel.t())
        else:
            _, _, channels, filters = kernel.shape
            module = nn.Conv2d(
                channels * layer.groups, filters, tuple(layer.kernel_size),
                groups=layer.groups, bias=bias, device="meta",
            )  # fmt: skip
            module.weight = nn.Parameter(kernel.permute(3, 2, 0, 1))
        if bias:
            module.bias = layer.bias.value
        return module
    module = type(type(layer).__name__, (nn.Module,), {})()
    if not isinstance(layer, SparseLayer):
        for i, variable in enumerate(layer._trainable_variables):
            module.register_parameter(str(i), nn.Parameter(variable.value.detach()))
    return module


def _is_convertible(layer: Any) -> bool:
    return (
        type(layer) in _TAKEN
        and layer.kernel_constraint is None
        and isinstance(layer.kernel_regularizer, (type(None), *REGULARIZERS))
        and not layer.lora_enabled
        and getattr(layer, "quantization_mode", None) is None
    )


@torch.no_grad()
def _sparse_layer(layer: Any, sparse: SparseLinear) -> SparseLayer:
    """A sparse Keras layer like a dense one, with the pattern and the values of `sparse`."""
    given = layer.get_config()
    config = {key: given[key] for key in _FROM_DENSE if key in given}
    config |= {"density": sparse.density, "block_size": sparse.block_size}
    made = _TAKEN[type(layer)].from_config(config)
    shape = layer.get_build_config()["input_shape"]
    made.build_from_config({"input_shape": shape, "blocks": sparse.pattern.nnz})
    made.sparse.set_pattern(sparse.pattern, sparse.values)
    if made.bias is not None:
        made.bias.assign(layer.bias.value)
    return made


_STAYS = ("_inbound_nodes", "_outbound_nodes", "_path", "_parent_path", "_called")


def _become(layer: Any, made: SparseLayer) -> None:
    """Let `layer` be what `made` is, in the place that it has in graphs and models."""
    state = vars(made) | {key: vars(layer)[key] for key in _STAYS if key in vars(layer)}
    # Keras wraps these for each object, which would be `made`.
    for name in ("build", "quantize"):
        state.pop(name, None)
    vars(layer).clear()
    vars(layer).update(state)
    layer.__class__ = type(made)
