"""Values that `fully_shard` shares out change their number; the Parameter stays the same object."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import swap_tensors

from dynsparse.nn import SparseLinear
from dynsparse.nn.sharded import is_sharded, local_part


@torch.no_grad()
def resize_shards(layer: SparseLinear, count: int) -> None:
    """Let sharded values have `count` slots; what they hold then is undefined, and the gradient is
    gone. Every rank that has a shard calls this, between a backward and the next forward pass.

    torch makes what gathers and reduces once, for the size that a Parameter had; it is made anew.

    Raises:
        RuntimeError: who shards these values is not known, or has gathered them.
    """
    values = layer.values
    if not is_sharded(values) or len(values) == count:
        return
    holder = _holder(layer)
    number = holder._orig_param_uid
    whole = local_part(values).new_empty((count, *values.shape[1:]), device=holder.device)
    fresh = nn.Parameter(whole, values.requires_grad)
    values.grad = None
    holder._init_sharded_param(fresh, holder.device, None, holder.mesh_info)
    if holder.post_forward_mesh_info:
        holder._init_sharded_post_forward_param_metadata(fresh)
    holder._orig_param_uid = number
    holder.all_gather_outputs = []
    holder.__dict__.pop("_unsharded_param", None)
    swap_tensors(values, holder.sharded_param)
    holder.sharded_param = values
    holder._setattr_on_modules(values)


def _holder(layer: SparseLinear) -> Any:
    """What torch has beside the Parameter: it hangs on what the layer calls once it has loaded."""
    for hook in layer._load_state_dict_post_hooks.values():
        for cell in getattr(hook, "__closure__", None) or ():
            if getattr(cell.cell_contents, "sharded_param", None) is layer.values:
                return cell.cell_contents
    raise RuntimeError(
        f"this torch, {torch.__version__}, does not tell who shards the values of a layer in a "
        "rectangle, whose number changes: use replicas in place of shards"
    )
