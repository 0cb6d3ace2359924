"""Values that ranks share out among each other, as `fully_shard` does: DTensors."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

__all__ = ["device_of", "gathered", "is_sharded", "local_part", "shard_dimension", "whole"]


def is_sharded(tensor: Any) -> bool:
    """Whether this is a DTensor, of which a rank holds a part."""
    # Whoever shards has loaded that module, which takes a second.
    sharding = sys.modules.get("torch.distributed.tensor")
    return sharding is not None and isinstance(tensor, sharding.DTensor)


def whole(values: Tensor) -> Tensor:
    """The values, unless they are sharded: products need all of them.

    Raises:
        RuntimeError: they are.
    """
    if is_sharded(values):
        raise RuntimeError(
            "the values of a sparse layer are sharded (a DTensor, as fully_shard makes them) where "
            "all of them are needed: call the module that fully_shard was given, which gathers them"
        )
    return values


def gathered(values: Tensor) -> Tensor:
    """The values; where they are sharded, all ranks must call this, and gather them."""
    return values.full_tensor() if is_sharded(values) else values  # type: ignore[attr-defined]


def local_part(tensor: Tensor) -> Tensor:
    """The part that this rank holds, of what is sharded: its memory. All of it otherwise."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def shard_dimension(values: Tensor) -> int:
    """Along which dimension of their mesh sharded values are cut, as `torch.chunk` cuts slots.

    Raises:
        RuntimeError: they are cut in another way.
    """
    placements = values.placements  # type: ignore[attr-defined]
    cut = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    if len(cut) != 1 or not placements[cut[0]].is_shard(0):
        raise RuntimeError(
            "the values of a sparse layer must be sharded by slots, along one dimension of the "
            f"mesh, as fully_shard does it, got the placements {placements}"
        )
    return cut[0]


def device_of(values: Tensor) -> torch.device:
    """Where the products are computed: not where shards wait that are kept off the device."""
    if not is_sharded(values):
        return values.device
    kind = values.device_mesh.device_type  # type: ignore[attr-defined]
    if kind == values.device.type:
        return values.device
    return torch.device(kind, torch.get_device_module(kind).current_device())
