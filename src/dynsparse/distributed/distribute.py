"""How a model is distributed over ranks: replicas, tensor-parallel shards, stages of a pipeline."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dynsparse._core.checks import check_integer, check_not_negative, check_types
from dynsparse.distributed.placement import (
    Borders,
    Chain,
    balance,
    find_chains,
    place_layers,
)
from dynsparse.distributed.sharded_layer import (
    ShardBackend,
    gather_layer,
    keep_shard,
    spec_of,
    split_heads,
)
from dynsparse.nn import SparseConv1d, SparseConv2d, SparseLinear, SparseMultiheadAttention
from dynsparse.nn.sharded import gather_full, local_part
from dynsparse.ranks import (
    AXES,
    Placement,
    RankGrid,
    check_consistent,
    collective_errors,
    digest,
    ranks_of,
)
from dynsparse.training.rank_consistency import broadcast_layers


@check_types
def replicate(model: nn.Module, *, ranks: Any = "auto", **options: Any) -> DistributedDataParallel:
    """`torch.nn.parallel.DistributedDataParallel` of a model with sparse layers.

    `DistributedDataParallel` broadcasts the values of the first rank without their patterns; here
    patterns are broadcast as well. A trainer does the same when it is made, so you need this only
    for models without a trainer.

    Args:
        model: with or without sparse layers, on the device it trains on.
        ranks: among which it is replicated: "auto", a process group, or a device mesh of one
            dimension.
        options: of `DistributedDataParallel`, but for `process_group` and `device_mesh`.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        TypeError: not a module; a group or mesh among the options.
        ValueError: layers that differ in number, name or shape; the same on all ranks.
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
    if ranks is None:
        raise TypeError('ranks must be "auto", a process group or a device mesh, got None')
    broadcast_layers(ranks_of(ranks), model)
    group = None
    if ranks != "auto":
        group = ranks.get_group() if hasattr(ranks, "get_group") else ranks
    return DistributedDataParallel(model, process_group=group, **options)


def split(model: nn.Module, mesh: Any) -> nn.Module:
    """Keep this rank's shard of every sparse layer of `model`, in place; returns the model.

    In a chain of layers, such as those of an `nn.Sequential` with elementwise functions in between,
    the projections of an attention, or the feed-forward part of a `SparseTransformerLayer`, the
    first layer is sharded by rows over x and by columns over y, the next the other way round, and
    so on. With x alone, two layers need one all-reduce. Layers with too few blocks are not sharded.

    The model computes as before: modules outside a chain see all features. Each rank sees the
    samples of its z. The gradients of the weights are those of these samples: make the model data
    parallel over z with `replicate(model, ranks=mesh["z"])`. Create the optimizer afterwards: the
    Parameters of the layers are new. Modules that are not split compute the same on all ranks along
    x and y, whose random numbers (dropout) must then be the same; inside a chain each shard draws
    its own.

    Shards hold about equal numbers of non-zeros and end where blocks do. Their borders stay
    while patterns change inside.

    Args:
        model: not sharded, and the same on all ranks.
        mesh: a `DeviceMesh` with axes among "x", "y" and "z".

    Raises:
        TypeError: not a module, not a mesh.
        ValueError: a model without sparse layers or with sparse convolutions, layers that are split
            already or computed by something else, ranks that hold different models.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    grid = RankGrid.from_mesh(mesh)
    shards: dict[str, ShardBackend] = {}
    with collective_errors(grid.all_ranks):
        layers, chains = find_chains(model)
        for name, layer in layers.items():
            check_unsharded(name, layer)
        for chain in chains:
            placements = place_layers(chain, Borders(layers, chain), grid)
            shards.update(make_shards(layers, chain, placements, grid))
    check_same_layers(grid, layers)
    for name, shard in shards.items():
        keep_shard(layers[name], shard)
    for module in model.modules():
        if isinstance(module, SparseMultiheadAttention):
            split_heads(module)
    return model


def make_shards(
    layers: Mapping[str, SparseLinear],
    chain: Chain,
    placements: Mapping[str, Placement],
    grid: RankGrid,
) -> dict[str, ShardBackend]:
    """This rank's shards of the layers of a chain, by name.

    Raises:
        ValueError: too few blocks or heads for so many shards.
    """
    borders = Borders(layers, chain)
    shards = {}
    for position, bundle in enumerate(chain):
        for name in bundle.names:
            placement = placements[name]
            rows, cols = (grid.ranks_along(axis).size for axis in placement[:2])
            inputs = grid.ranks_along(placement.input).size
            shards[name] = ShardBackend(
                grid,
                placement,
                layers[name].pattern.shape,
                borders.before(position + 1, name, rows),
                borders.before(position, name, cols),
                borders.before(position, name, inputs),
                layers[name].pattern.nnz,
            )
    return shards


def check_unsharded(name: str, layer: SparseLinear) -> None:
    """Raise ValueError unless a layer is not sharded, and computed by the operator."""
    if spec_of(layer) is not None:
        raise ValueError(f"the layer {name!r} is split already")
    if layer.executor is not None:
        raise ValueError(
            f"the layer {name!r} is computed by {layer.kernel(1)}, which computes no shards: "
            "split layers without a target and without an active subset"
        )


def check_same_layers(grid: RankGrid, layers: Mapping[str, SparseLinear]) -> None:
    """Raise ValueError where the ranks' layers differ."""
    check_consistent(
        grid.all_ranks,
        {
            f"layer {name!r}": digest(layer.pattern.rows, layer.pattern.cols, layer.values)
            for name, layer in layers.items()
        },
        "make the model with the same seed on all ranks, or load the same state",
        shown=False,
    )


@torch.no_grad()
def gather(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the full model, on every rank: a model that is not split loads it.

    All ranks call it at the same time. For checks and small models: each rank holds all of it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    state: dict[str, Tensor] = dict(model.state_dict())
    for name, module in model.named_modules():
        tensors = gather_layer(module) if isinstance(module, SparseLinear) else {}
        for key, (shard, dim) in getattr(module, "dim_shards", {}).items():
            tensors[key] = shard.all_gather(gather_full(getattr(module, key).detach()), dim)
        state.update({f"{name}.{key}" if name else key: t for key, t in tensors.items()})
    return {key: gather_full(tensor) for key, tensor in state.items()}


@check_types
@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scales the gradients of a split model so that their norm is at most `max_norm`.

    `torch.nn.utils.clip_grad_norm_` sees the shards of one rank, and would scale by another factor
    on each. This function computes the norm of the gradients of the full model, with one
    collective of all ranks of the mesh, and one for each gradient that `fully_shard` shards. All
    ranks call it at the same time, with gradients that are already averaged over samples, as
    `replicate` and `fully_shard` leave them.

    Args:
        model: with or without layers that are split.
        max_norm: at least 0.

    Returns:
        The 2-norm of all gradients before, float64 []; 0 without gradients.

    Raises:
        TypeError: not a module, or not a number.
        ValueError: a negative or infinite `max_norm`.
    """
    limit = check_not_negative("max_norm", max_norm)
    layers = [module for module in model.modules() if isinstance(module, SparseLinear)]
    specs = [(layer, spec) for layer in layers if (spec := spec_of(layer)) is not None]
    grid = specs[0][1].grid if specs else RankGrid()
    axes_of: dict[int, Collection[str]] = {id(layer.values): spec.axes for layer, spec in specs}
    for module in model.modules():
        for key, (shard, _) in getattr(module, "dim_shards", {}).items():
            axes = [axis for axis in AXES if grid.ranks_along(axis) is shard.ranks]
            axes_of[id(getattr(module, key))] = axes
    square = torch.zeros((), dtype=torch.float64, device=grid.z.device)
    gradients = {id(p): p.grad for p in model.parameters() if p.grad is not None}
    for parameter, grad in gradients.items():
        # Of a DTensor, this is the norm of all its shards.
        norm = gather_full(torch.linalg.vector_norm(grad, dtype=torch.float64))
        if grid.z.is_lead_rank(axes_of.get(parameter, ())):
            square += norm.to(square.device).square()
    norm = grid.all_ranks.sum(square).sqrt()
    factor = (limit / (norm + 1e-6)).clamp(max=1)
    for grad in gradients.values():
        local_part(grad).mul_(factor.to(grad.device))
    return norm


def stages(model: nn.Sequential, n: int) -> list[nn.Sequential]:
    """`model` as `n` consecutive stages, for `torch.distributed.pipelining.PipelineStage`.

    The modules are the model's own and keep their names, so that the stages' state dicts together
    are the model's, and random growth, which depends on the names of layers, is the same as in one
    process. The largest stage is as small as possible, by the number of weights of linear layers
    (of sparse ones, those present); other modules do not count.

    Args:
        model: of at least `n` modules; for another kind of model, the `nn.Sequential` of its
            blocks. Name the first of a stage in the `split_spec` of `pipelining.pipeline`.
        n: how many stages.

    Raises:
        TypeError: not an `nn.Sequential`.
        ValueError: fewer modules than stages, or a module that occurs twice.
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
            "a module is in the model twice, and stages share no modules: use two copies"
        )
    if len(children) < n:
        raise ValueError(f"a model of {len(children)} modules cannot have {n} stages: use fewer")
    borders = balance([_count_weights(child) for _, child in children], n)
    return [
        nn.Sequential(OrderedDict(children[first:last]))
        for first, last in itertools.pairwise(borders)
    ]


def _count_weights(module: nn.Module | None) -> int:
    """Count the weights of all linear layers in a module."""
    total = 0
    for submodule in [] if module is None else module.modules():
        if isinstance(submodule, SparseLinear) and not isinstance(
            submodule, (SparseConv1d, SparseConv2d)
        ):
            total += submodule.values.numel()
        elif isinstance(submodule, nn.Linear):
            total += submodule.weight.numel()
    return total
