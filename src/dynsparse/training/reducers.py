"""Data parallel wrappers follow values that have changed their size."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from functools import cache
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

_known: WeakSet[DistributedDataParallel] = WeakSet()
"""All wrappers that are alive, once somebody has asked."""


def wrappers_of(values: Iterable[Tensor]) -> list[DistributedDataParallel]:
    """All wrappers that sum up gradients of any of these Parameters.

    The wrapper knows its module, and not the other way round; so wrappers are looked for among all
    objects, which takes a tenth of a second, once, and from then on noted when they are made.
    """
    _look_once()
    wanted = {id(one) for one in values}
    return [ddp for ddp in list(_known) if _holds(ddp, wanted)]


@cache
def _look_once() -> None:
    register_module_module_registration_hook(_note)
    # The type, for asking an object may do something, as with one that is loaded when asked.
    found = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]
    _known.update(found)


def _note(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if isinstance(module, DistributedDataParallel):
        _known.add(module)


def _holds(ddp: DistributedDataParallel, wanted: set[int]) -> bool:
    if "module" not in ddp._modules or not hasattr(ddp, "parameters_to_ignore"):
        return False  # it is being made, or could not be
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
