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


def enable_many_steps(model: Any) -> None:
    """Support `compile(steps_per_execution=n)`, which Keras refuses with the torch backend.

    `fit`, `evaluate` and `predict` then process n batches between two calls of the callbacks' batch
    hooks, with the results of single steps. With n = 1 Keras' own functions are used.
    """
    for name in ("train", "test", "predict"):
        default = getattr(type(model), f"make_{name}_function")
        maker = MethodType(_make_function_maker(name, default), model)
        vars(model)[f"make_{name}_function"] = maker


def _make_function_maker(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
    def make(model: Any, force: bool = False) -> Any:
        if model.steps_per_execution == 1:
            return default(model, force)
        if model.jit_compile is True:
            raise ValueError(
                "expected jit_compile=False with steps_per_execution above 1, got True: leave one "
                "of them out"
            )
        step = getattr(model, f"{name}_step")

        def train(batches: list[Any]) -> Any:
            for batch in batches:
                logs = step(batch)
            return logs

        @torch.no_grad()
        def test(batches: list[Any]) -> Any:
            return train(batches)

        @torch.no_grad()
        def predict(batches: list[Any]) -> Any:
            outputs = [step(batch) for batch in batches]
            return keras.tree.map_structure(lambda *parts: torch.cat(parts), *outputs)

        functions = {"train": train, "test": test, "predict": predict}
        setattr(model, f"{name}_function", functions[name])
        return functions[name]

    return make


_SPARSE_CLASSES: dict[Any, Any] = {
    keras.layers.Dense: SparseDense,
    keras.layers.Conv2D: SparseConv2D,
}
_DENSE_OPTIONS = (
    "units", "filters", "kernel_size", "strides", "padding", "data_format", "dilation_rate",
    "groups", "activation", "use_bias", "bias_initializer", "kernel_regularizer",
    "bias_regularizer", "activity_regularizer", "bias_constraint", "name", "dtype", "trainable",
)  # fmt: skip


def sparsify(model: Any, density: float | None = None, **options: Any) -> Any:
    """Convert the `Dense` and `Conv2D` layers of a Keras model to sparse ones, in place.

    The layer objects, their names and the graph stay the same, so it works for functional,
    Sequential and subclassed models. The model must be built, its optimizer must not. A table of
    converted and dense layers is printed. Layers stay dense if their class is derived from `Dense`
    or `Conv2D`, if they have a constraint or a regularizer over the full kernel, if they are
    quantised, or if they use LoRA.

    Names are those of the layers, nested with dots: "encoder.dense".

    Args:
        model: a `keras.Model`.
        density, options: as in `dynsparse.sparsify`.

    Returns:
        The model.

    Raises:
        TypeError, ValueError: not a Keras model, one that is not built or has been trained; as
            `dynsparse.sparsify`. The model is then unchanged.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"expected a keras.Model, got {type(model).__name__}")
    if not all(layer.built for layer in model._flatten_layers()):
        raise ValueError(
            "the model has no shapes yet: build it, or call it on a batch, before sparsify"
        )
    if getattr(model, "optimizer", None) is not None and model.optimizer.built:
        raise ValueError(
            "the model's optimizer holds the variables of dense layers: sparsify the model "
            "before you compile it"
        )
    skeleton, keras_layers = _make_skeleton(model)
    sparsify_module(skeleton, density, **options)
    sparse_layers = {
        name: _make_sparse_layer(keras_layers[name], module)
        for name, module in skeleton.named_modules()
        if isinstance(module, SparseLinear)
    }
    for name, layer in sparse_layers.items():
        _replace_in_place(keras_layers[name], layer)
    for layer in model._flatten_layers():
        # Keras' list of Parameters, which it rebuilds.
        layer._modules.pop("_torch_params", None)
    enable_many_steps(model)
    return model


def _make_skeleton(model: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A torch module with the weights of a Keras model in torch layers, and name -> Keras layer."""
    root, keras_layers = nn.Module(), {}
    seen: set[int] = set()

    def add(parent: nn.Module, layers: Any, prefix: str) -> None:
        for layer in layers:
            if id(layer) in seen:
                continue
            seen.add(id(layer))
            name = layer.name.replace(".", "_")
            if name in parent._modules:
                raise ValueError(
                    f"two layers have the name {prefix + name!r}: give them different names"
                )
            module = _make_module(layer)
            parent.add_module(name, module)
            keras_layers[prefix + name] = layer
            add(module, layer._layers, f"{prefix}{name}.")

    add(root, model._layers, "")
    return root, keras_layers


def _make_module(layer: Any) -> nn.Module:
    """A torch layer with the weights of a Keras layer, or a module with the name of its class."""
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
        type(layer) in _SPARSE_CLASSES
        and layer.kernel_constraint is None
        and isinstance(layer.kernel_regularizer, (type(None), *REGULARIZERS))
        and not layer.lora_enabled
        and getattr(layer, "quantization_mode", None) is None
    )


@torch.no_grad()
def _make_sparse_layer(layer: Any, sparse: SparseLinear) -> SparseLayer:
    """A sparse Keras layer with the options of `layer`, and pattern and values of `sparse`."""
    options = layer.get_config()
    config = {key: options[key] for key in _DENSE_OPTIONS if key in options}
    config |= {"density": sparse.density, "block_size": sparse.block_size}
    converted = _SPARSE_CLASSES[type(layer)].from_config(config)
    shape = layer.get_build_config()["input_shape"]
    converted.build_from_config({"input_shape": shape, "blocks": sparse.pattern.nnz})
    converted.sparse.set_pattern(sparse.pattern, sparse.values)
    if converted.bias is not None:
        converted.bias.assign(layer.bias.value)
    return converted


_KEPT_ATTRIBUTES = ("_inbound_nodes", "_outbound_nodes", "_path", "_parent_path", "_called")


def _replace_in_place(layer: Any, converted: SparseLayer) -> None:
    """Turn `layer` into `converted` and keep its connections in graphs and models."""
    state = vars(converted) | {
        key: vars(layer)[key] for key in _KEPT_ATTRIBUTES if key in vars(layer)
    }
    # Keras wraps these methods for each object, here `converted`.
    for name in ("build", "quantize"):
        state.pop(name, None)
    vars(layer).clear()
    vars(layer).update(state)
    layer.__class__ = type(converted)
