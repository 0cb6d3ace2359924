"""Finds the layers that a trainer looks after."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynsparse.nn import SparseLinear


def sparse_layers(model: nn.Module) -> dict[str, SparseLinear]:
    """name -> layer, in the order of `model.named_modules()`.

    Raises:
        TypeError: not a module.
        ValueError: no sparse layer, or two that share their values but not their pattern.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, DistributedDataParallel):
        model = model.module  # names are those of the model
    layers = {name: m for name, m in model.named_modules() if isinstance(m, SparseLinear)}
    if not layers:
        raise ValueError(
            "the model has no sparse layers: use dynsparse.nn.SparseLinear, or dynsparse.sparsify"
        )
    owners: dict[int, str] = {}
    for name, layer in layers.items():
        other = owners.setdefault(id(layer.values), name)
        if other != name:
            raise ValueError(
                f"the layers {other!r} and {name!r} share their values but not their pattern: "
                "use one module in both places"
            )
    return layers
