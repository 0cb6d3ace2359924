"""Values that are sharded over ranks, as `fully_shard` does: DTensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dynsparse.ranks import chunk


def is_sharded(tensor: Any) -> bool:
    """Whether this is a DTensor, of which each rank holds a shard."""
    kind = type(tensor)
    if kind is Parameter or kind is Tensor:  # torch.compile cannot trace sys.modules
        return False
    # A program that shards has imported that module, which takes a second.
    sharding = sys.modules.get("torch.distributed.tensor")
    return sharding is not None and isinstance(tensor, sharding.DTensor)


def require_unsharded(values: Tensor) -> Tensor:
    """Return `values`, after checking that they are not sharded.

    Raises:
        RuntimeError: they are sharded.
    """
    if is_sharded(values):
        raise RuntimeError(
            "the values of a sparse layer are sharded (a DTensor, as fully_shard makes them) where "
            "all of them are needed: call the module that fully_shard was given, which gathers them"
        )
    return values


def gather_full(values: Tensor) -> Tensor:
    """Return the full tensor; if it is sharded, this is a collective of all ranks."""
    return values.full_tensor() if is_sharded(values) else values  # type: ignore[attr-defined]


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard, which shares memory; the tensor itself if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def rows_dimension(tensor: Tensor) -> int | None:
    """Return the mesh dimension along which a DTensor is sharded by rows, as by `torch.chunk`.

    None if it is sharded otherwise or not at all.
    """
    placements = tensor.placements  # type: ignore[attr-defined]
    sharded = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    return sharded[0] if len(sharded) == 1 and placements[sharded[0]].is_shard(0) else None


def shard_dimension(values: Tensor) -> int:
    """Return the mesh dimension along which values are sharded.

    Raises:
        RuntimeError: they are not sharded by slots.
    """
    dimension = rows_dimension(values)
    if dimension is None:
        raise RuntimeError(
            "the values of a sparse layer must be sharded by slots, along one dimension of the "
            "mesh, as fully_shard does it, got the placements "
            f"{values.placements}"  # type: ignore[attr-defined]
        )
    return dimension


def local_range(tensor: Tensor, count: int | None = None) -> tuple[int, int]:
    """Return the rows [first, last) that this rank holds of a DTensor that is sharded by rows.

    Args:
        count: the number of rows; defaults to that of the tensor.
    """
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    dimension = shard_dimension(tensor)
    count = len(tensor) if count is None else count
    return chunk(count, mesh.size(dimension), mesh.get_local_rank(dimension))


def primary_range(tensor: Tensor) -> tuple[int, int]:
    """Return the rows [first, last) of a DTensor of which this rank holds the first replica.

    These are the rows of `local_range`, or none if another rank holds the first replica of them.
    Over all ranks every row is in one range.
    """
    mesh, dimension = tensor.device_mesh, shard_dimension(tensor)  # type: ignore[attr-defined]
    first, last = local_range(tensor)
    leads = all(mesh.get_local_rank(i) == 0 for i in range(mesh.ndim) if i != dimension)
    return first, last if leads else first


def shard_like(
    like: Tensor,
    dtype: torch.dtype,
    rows: Callable[[int, int], Tensor],
    count: int | None = None,
) -> Tensor:
    """Return a DTensor of `dtype` that is sharded as `like`.

    Args:
        rows: called with first and last; returns the rows [first, last) on the CPU.
        count: number of rows; defaults to that of `like`.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor  # takes a second to import

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    if rows_dimension(like) is None:
        full = rows(0, len(like) if like.dim() else 1).to(like.device, dtype)
        return distribute_tensor(full, mesh, placements, src_data_rank=None)
    local = rows(*local_range(like, count)).to(local_part(like).device, dtype)
    shape = like.shape if count is None else torch.Size([count, *like.shape[1:]])
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=shape, stride=like.stride()
    )


def device_of(values: Tensor) -> torch.device:
    """Return the device that computes the products, even if shards are offloaded to the CPU."""
    if not is_sharded(values):
        return values.device
    kind = values.device_mesh.device_type  # type: ignore[attr-defined]
    if kind == values.device.type:
        return values.device
    return torch.device(kind, torch.get_device_module(kind).current_device())
