"""Where to cut a model into the stages of a pipeline, so that each takes as long as the others."""

from __future__ import annotations

import itertools
from collections import OrderedDict

from torch import nn

from dynsparse.checks import check_integer, check_kind
from dynsparse.distributed.cluster import Cluster
from dynsparse.distributed.cuts import cut
from dynsparse.nn import SparseConv1d, SparseConv2d, SparseLinear
from dynsparse.ops.linear.costs import Layer

__all__ = ["stages"]


def stages(
    model: nn.Sequential, n: int, *, batch: int = 1024, cluster: Cluster | None = None
) -> list[nn.Sequential]:
    """`model` as `n` stages in a row, for `torch.distributed.pipelining.PipelineStage`.

    The modules are the model's own and keep their names, so that the stages' state dicts together
    are the model's, and random growth, which goes by the names of layers, is the same as in one
    process. The slowest stage is as fast as it can be, by what the three passes of sparse and dense
    linear layers cost (see `make_plan`); other modules cost nothing.

    Args:
        model: of at least `n` modules; for another kind of model, the `nn.Sequential` of its
            blocks. Name the first of a stage in the `split_spec` of `pipelining.pipeline`.
        batch: samples (tokens) of a micro-batch.
        cluster: what the ranks run on; `Cluster()` if left out.

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
    batch = check_integer("batch", batch, 1)
    cluster = Cluster() if cluster is None else check_kind("cluster", cluster, Cluster, "a Cluster")
    children = list(model._modules.items())
    if len({id(child) for _, child in children}) < len(children):
        raise ValueError(
            "a module is in the model twice, and each stage trains its own: make two of it"
        )
    if len(children) < n:
        raise ValueError(f"a model of {len(children)} modules has no {n} stages: use fewer")
    # In picoseconds, so that whole numbers are fine enough.
    loads = [round(_seconds(child, batch, cluster) * 1e12) for _, child in children]
    borders = cut(loads, n)
    return [
        nn.Sequential(OrderedDict(children[first:last]))
        for first, last in itertools.pairwise(borders)
    ]


def _seconds(module: nn.Module | None, batch: int, cluster: Cluster) -> float:
    """Of the three passes of all linear layers in a module."""
    total = 0.0
    for one in [] if module is None else module.modules():
        if isinstance(one, (SparseConv1d, SparseConv2d)):
            continue
        if isinstance(one, SparseLinear):
            layer = Layer(one.out_features, one.in_features, one.pattern.nnz, one.block_size)
        elif isinstance(one, nn.Linear):
            size = one.out_features * one.in_features
            layer = Layer(one.out_features, one.in_features, size, 1)
        else:
            continue
        total += sum(cluster.pass_seconds(layer, batch, backward=b) for b in (False, True))
    return total
