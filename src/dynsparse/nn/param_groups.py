"""Which parameters of a model with sparse layers decay."""

from __future__ import annotations

from typing import Any

from torch import nn

from dynsparse.checks import check_not_negative
from dynsparse.nn.sparse_module import SparseModule
from dynsparse.typed import typed


@typed
def param_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimizer: what decays, and what does not.

        optimizer = torch.optim.AdamW(ds.param_groups(model, weight_decay=0.1), lr=1e-3)

    The values of sparse layers and every Parameter of two or more dimensions decay; biases, norms
    and scalars do not. A choice by dimensions alone, as in many recipes, takes the values of
    layers without blocks, which are [nnz], for biases. Parameters that do not require a gradient
    are in neither group.

    Raises:
        ValueError: a weight decay that is negative or not finite.
    """
    decay = check_not_negative("weight_decay", weight_decay)
    values = {id(m.values) for m in model.modules() if isinstance(m, SparseModule)}
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            is_weight = parameter.dim() >= 2 or id(parameter) in values
            (decaying if is_weight else others).append(parameter)
    return [
        {"params": decaying, "weight_decay": decay},
        {"params": others, "weight_decay": 0.0},
    ]
