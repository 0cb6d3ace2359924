"""Data parallel wrappers follow values that have changed their size."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

__all__ = ["follow_sizes", "wrappers_of"]

_known: WeakSet[DistributedDataParallel] = WeakSet()
"""Wrappers that hold values of some trainer."""


def wrappers_of(values: Iterable[Tensor]) -> list[DistributedDataParallel]:
    """All wrappers that sum up gradients of any of these Parameters.

    The wrapper knows its module, and not the other way round; so it is looked for among all
    objects, which takes a tenth of a second, once.
    """
    wanted = {id(one) for one in values}
    found = [ddp for ddp in _known if _holds(ddp, wanted)]
    if not found:
        found = [
            thing
            for thing in gc.get_objects()
            if issubclass(type(thing), DistributedDataParallel) and _holds(thing, wanted)
        ]
        _known.update(found)
    return found


def _holds(ddp: DistributedDataParallel, wanted: set[int]) -> bool:
    return any(
        id(parameter) in wanted and name not in ddp.parameters_to_ignore
        for name, parameter in ddp.module.named_parameters()
    )


def follow_sizes(values: Iterable[Tensor]) -> None:
    """The wrappers of these Parameters sum up gradients of the sizes that the values have now.

    The gradients of the step under way must be whole. A wrapper keeps buffers of the sizes it was
    made for, so what sums up is made anew; its communication hooks stay.
    """
    values = list(values)
    for ddp in wrappers_of(values) if values else []:
        parameters, sparse = ddp._build_params_for_reducer()
        names = ddp._build_debug_param_to_name_mapping(parameters)
        ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
        if ddp.static_graph and ddp.logger is not None:
            ddp._static_graph_delay_allreduce_enqueued = False
            ddp.reducer._set_static_graph()
            ddp.logger._set_static_graph()
        for hook, state in ddp._comm_hooks:
            torch.distributed._register_comm_hook(ddp.reducer, state, hook)
