"""A data parallel model whose sparse layers begin alike on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynsparse.ranks import ranks_of
from dynsparse.training.rank_consistency import broadcast_layers
from dynsparse.typed import typed


@typed
def replicate(model: nn.Module, *, ranks: Any = "auto", **options: Any) -> DistributedDataParallel:
    """`torch.nn.parallel.DistributedDataParallel` of a model with sparse layers.

    An ordinary wrapper broadcasts the values of the first rank, and not where they belong: ranks
    that drew their patterns from other seeds would train wrong until a trainer is made. Here
    patterns come along. The index of a layer stays at home in either case, since it is no buffer,
    and trainers see to it that gradients are summed up in the sizes that values have. So with a
    trainer `DistributedDataParallel(model)` does as well; this is for trainings without one, and
    for those who would rather not depend on the order.

    Args:
        model: with or without sparse layers, on the device it trains on.
        ranks: among which it is replicated: "auto", a process group, or a device mesh of one
            dimension.
        options: of `DistributedDataParallel`, but for `process_group` and `device_mesh`.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        TypeError: no module; a group or mesh among the options.
        ValueError: layers that differ in number, name or shape; the same line on all ranks.
    """
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        raise RuntimeError(
            "replicate needs torch.distributed: call torch.distributed.init_process_group() first, "
            "and start the program with torchrun"
        )
    for name in ("process_group", "device_mesh"):
        if name in options:
            raise TypeError(f"{name} must be given as ranks")
    broadcast_layers(ranks_of(ranks), model)
    group = None
    if ranks != "auto":
        group = ranks.get_group() if hasattr(ranks, "get_group") else ranks
    return DistributedDataParallel(model, process_group=group, **options)
