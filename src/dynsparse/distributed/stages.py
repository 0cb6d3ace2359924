"""Where to cut a model into the stages of a pipeline, so that they hold about as many weights."""

from __future__ import annotations

import itertools
from collections import OrderedDict

from torch import nn

from dynsparse.checks import check_integer
from dynsparse.distributed.placement import balance
from dynsparse.nn import SparseConv1d, SparseConv2d, SparseLinear


def stages(model: nn.Sequential, n: int) -> list[nn.Sequential]:
    """`model` as `n` stages in a row, for `torch.distributed.pipelining.PipelineStage`.

    The modules are the model's own and keep their names, so that the stages' state dicts together
    are the model's, and random growth, which goes by the names of layers, is the same as in one
    process. The largest stage is as small as it can be, by the weights of linear layers, of sparse
    ones those that are present; other modules count nothing.

    Args:
        model: of at least `n` modules; for another kind of model, the `nn.Sequential` of its
            blocks. Name the first of a stage in the `split_spec` of `pipelining.pipeline`.
        n: how many stages.

    Raises:
        TypeError: no `nn.Sequential`.
        ValueError: fewer modules than stages, or one that is there twice: two stages would hold it.
    """
    if not isinstance(model, nn.Sequential):
        raise TypeError(
            "stages cut an nn.Sequential, such as that of a model's blocks, got "
            f"{type(model).__name__}"
        )
    check_integer("n", n, 1)
    children = list(model._modules.items())
    if len({id(child) for _, child in children}) < len(children):
        raise ValueError(
            "a module is in the model twice, and each stage trains its own: make two of it"
        )
    if len(children) < n:
        raise ValueError(f"a model of {len(children)} modules has no {n} stages: use fewer")
    borders = balance([_weights(child) for _, child in children], n)
    return [
        nn.Sequential(OrderedDict(children[first:last]))
        for first, last in itertools.pairwise(borders)
    ]


def _weights(module: nn.Module | None) -> int:
    """Of all linear layers in a module."""
    total = 0
    for one in [] if module is None else module.modules():
        if isinstance(one, SparseLinear) and not isinstance(one, (SparseConv1d, SparseConv2d)):
            total += one.values.numel()
        elif isinstance(one, nn.Linear):
            total += one.weight.numel()
    return total
