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
    """Whether this is a DTensor, of which a rank holds a part."""
    kind = type(tensor)
    if kind is Parameter or kind is Tensor:  # compilers cannot look through the loaded modules
        return False
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


def rows_dimension(tensor: Tensor) -> int | None:
    """Along which dimension of its mesh a DTensor is cut by rows, as `torch.chunk` cuts; None where
    it is cut in another way, or not at all."""
    placements = tensor.placements  # type: ignore[attr-defined]
    cut = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    return cut[0] if len(cut) == 1 and placements[cut[0]].is_shard(0) else None


def shard_dimension(values: Tensor) -> int:
    """Along which dimension of their mesh sharded values are cut.

    Raises:
        RuntimeError: they are not cut by slots.
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
    """The rows [first, last) that this rank holds of a DTensor that is cut by rows; or would hold,
    of `count` rows."""
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    dimension = shard_dimension(tensor)
    count = len(tensor) if count is None else count
    return chunk(count, mesh.size(dimension), mesh.get_local_rank(dimension))


def own_rows(tensor: Tensor) -> tuple[int, int]:
    """The rows of a DTensor that this rank speaks for: those it holds, unless another rank holds
    them, too, and comes first."""
    mesh, dimension = tensor.device_mesh, shard_dimension(tensor)  # type: ignore[attr-defined]
    first, last = local_range(tensor)
    leads = all(mesh.get_local_rank(i) == 0 for i in range(mesh.ndim) if i != dimension)
    return first, last if leads else first


def sharded_like(
    own: Tensor,
    dtype: torch.dtype,
    rows: Callable[[int, int], Tensor],
    count: int | None = None,
) -> Tensor:
    """A DTensor of `dtype`, sharded as `own` is, of its rows [first, last), which `rows` makes on
    the CPU; of `count` rows, if not of as many."""
    from torch.distributed.tensor import DTensor, distribute_tensor  # whoever shards has loaded it

    mesh, placements = own.device_mesh, own.placements  # type: ignore[attr-defined]
    if rows_dimension(own) is None:
        whole = rows(0, len(own) if own.dim() else 1).to(own.device, dtype)
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)
    local = rows(*local_range(own, count)).to(local_part(own).device, dtype)
    shape = own.shape if count is None else torch.Size([count, *own.shape[1:]])
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=shape, stride=own.stride()
    )


def device_of(values: Tensor) -> torch.device:
    """Where the products are computed: not where shards wait that are kept off the device."""
    if not is_sharded(values):
        return values.device
    kind = values.device_mesh.device_type  # type: ignore[attr-defined]
    if kind == values.device.type:
        return values.device
    return torch.device(kind, torch.get_device_module(kind).current_device())
