"""Whether a model has its layers whole, or only this rank's rectangles of them."""

from __future__ import annotations

from typing import Any

from torch import nn

from dynsparse.nn.linear import SparseLinear
from dynsparse.ranks import Part


def check_whole(model: Any, what: str) -> None:
    """Raise ValueError where a layer is in rectangles, for what would take one for the layer.

    Args:
        what: needs whole layers: "a checkpoint holds".
    """
    if not isinstance(model, nn.Module):
        return  # told of by others
    for name, module in model.named_modules():
        if isinstance(module, SparseLinear) and isinstance(module.executor, Part):
            raise ValueError(
                f"{what} whole layers, and this rank has a rectangle of {name!r}: take "
                "dynsparse.distributed.gather(model), the state of the whole model"
            )
