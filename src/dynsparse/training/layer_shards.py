"""Layers and values that are sharded over ranks: shards of layers, of values, and gradient buckets.

Tensor-parallel layers hold a 2-D shard of the layer on each rank: updates decide about full layers
and change shards. `fully_shard` shards values by slots. DistributedDataParallel keeps buckets of
the sizes that gradients had.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils import swap_tensors

from dynsparse.nn import SparseLinear
from dynsparse.nn.owners import check_owner, drop_references
from dynsparse.nn.sharded import is_sharded, local_part
from dynsparse.pattern import SparsePattern
from dynsparse.ranks import AXES, GrowRequest, RankGrid, Ranks, ShardSpec, gather_sorted, ranks_of


@dataclass(frozen=True)
class LayerSize:
    """The size of a layer and its number of blocks: what budgets look at."""

    shape: tuple[int, int]
    block_size: int
    nnz: int

    @property
    def total(self) -> int:
        """How many blocks the layer has, present or not."""
        return self.shape[0] * self.shape[1] // self.block_size**2

    @property
    def density(self) -> float:
        """Present blocks / all blocks."""
        return self.nnz / self.total


@dataclass(frozen=True)
class LayerShard:
    """The 2-D shard of a layer on this rank, and the shard's pattern.

    Decisions name the blocks of a sharded layer by their positions in the full layer, which are in
    the same order as the slots of other layers.
    """

    spec: ShardSpec
    pattern: SparsePattern

    @property
    def limit(self) -> int:
        """An upper bound of all positions."""
        return self.spec.shape[0] * self.spec.shape[1] // self.pattern.block_size**2

    def positions(self, first: int, last: int) -> Tensor:
        """Positions of this rank's slots first to last - 1."""
        return self.spec.to_full(self.pattern.flat[first:last], self.pattern.block_size)

    def slots(self, positions: Tensor) -> Tensor:
        """This rank's slots among present positions."""
        local = self.spec.to_local(positions, self.pattern.block_size)
        return torch.searchsorted(self.pattern.flat, local)


def find_shards(layers: Mapping[str, SparseLinear]) -> dict[str, LayerShard]:
    """The shards of those layers that are tensor-parallel."""
    executors: dict[str, Any] = {name: layer.executor for name, layer in layers.items()}
    return {
        name: LayerShard(executor, layers[name].pattern)
        for name, executor in executors.items()
        if isinstance(executor, ShardSpec)
    }


def resolve_ranks(choice: Any, model: Any) -> Ranks:
    """The ranks that train a model together: those with other samples for the same weights.

    Args:
        choice: as `ranks_of` takes it; or a mesh with axes among x, y and z, of which the z axis is
            taken.
        model: with tensor-parallel layers, which know their mesh for "auto", or without.

    Raises:
        TypeError, ValueError: ranks that are not those of the layers' mesh; see `ranks_of`.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    layers = {str(i): m for i, m in enumerate(modules) if isinstance(m, SparseLinear)}
    shards = list(find_shards(layers).values())
    if isinstance(choice, RankGrid):
        return choice.z
    names = getattr(choice, "mesh_dim_names", None)
    if not shards:
        several = names is not None and len(names) > 1 and {*names} <= {*AXES}
        return RankGrid.from_mesh(choice).z if several else ranks_of(choice)
    grid = shards[0].spec.grid
    if isinstance(choice, str) and choice == "auto":
        world = ranks_of("auto")
        if world.size in (grid.all_ranks.size, 1):
            return grid.z
    elif names is not None:
        return RankGrid.from_mesh(choice).z
    raise ValueError(
        f"the model has tensor-parallel layers on a mesh of {grid.all_ranks.size} ranks: pass the "
        "whole mesh as ranks, with the axis of the samples named z and the others x and y"
    )


class LocalSlots:
    """The slots of full layers that this rank holds, for draws made for full layers."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[SparsePattern, Tensor, int]] = {}

    def update(self, layers: Mapping[str, SparseLinear]) -> None:
        """Find the slots of layers whose patterns have changed; all ranks call this."""
        for name, shard in find_shards(layers).items():
            if name not in self._known or self._known[name][0] is not shard.pattern:
                self._known[name] = (shard.pattern, *shard.spec.slots(shard.pattern))

    def slots_of(self, name: str, layer: SparseLinear) -> tuple[Tensor | slice, int]:
        """This rank's slots of a layer, and how many slots the full layer has."""
        if name in self._known:
            return self._known[name][1:]
        return slice(None), layer.pattern.nnz


def describe_layer(layer: SparseLinear) -> list[int]:
    """Shape and block size of a full layer, and its number of blocks where that is constant."""
    part: Any = layer.executor
    if isinstance(part, ShardSpec):
        shape, blocks = part.shape, part.blocks
    else:
        shape, blocks = layer.pattern.shape, layer.pattern.nnz
    return [*shape, layer.block_size] + ([] if layer.resizable else [blocks])


def layer_sizes(layers: Mapping[str, SparseLinear], ranks: Ranks) -> dict[str, Any]:
    """The patterns of layers, and a `LayerSize` of tensor-parallel ones."""
    shards = find_shards(layers)
    sizes: dict[str, Any] = {name: layer.pattern for name, layer in layers.items()}
    if shards:
        counts = sum_shards(ranks, [*shards.values()], [s.pattern.nnz for s in shards.values()])
        for (name, shard), nnz in zip(shards.items(), counts, strict=True):
            sizes[name] = LayerSize(shard.spec.shape, shard.pattern.block_size, nnz)
    return sizes


def sum_shards(
    ranks: Ranks, shards: Sequence[LayerShard | None], numbers: Sequence[float]
) -> list[Any]:
    """The sum of a number over the shards of each layer; for layers without shards the number of
    one rank. All ranks call this."""
    local = [
        n if ranks.is_lead_rank(() if shard is None else shard.spec.axes) else 0
        for n, shard in zip(numbers, shards, strict=True)
    ]
    dtype = torch.float64 if any(isinstance(n, float) for n in numbers) else torch.int64
    return ranks.all_ranks.sum(torch.tensor(local, dtype=dtype, device=ranks.device)).tolist()


def gather_full_patterns(requests: Sequence[GrowRequest], ranks: Ranks) -> list[GrowRequest]:
    """Turn requests for shards into requests for full layers, for growth that needs only their
    patterns. All ranks call this."""
    shards = {
        i: LayerShard(r.spec, r.pattern) for i, r in enumerate(requests) if r.spec is not None
    }
    if not shards:
        return list(requests)
    local = [
        s.positions(0, s.pattern.nnz if ranks.is_lead_rank(s.spec.axes) else 0)
        for s in shards.values()
    ]
    flats = gather_sorted(ranks.all_ranks, local, [s.limit for s in shards.values()])
    full = list(requests)
    for (i, s), flat in zip(shards.items(), flats, strict=True):
        pattern = SparsePattern.from_flat(flat, shape=s.spec.shape, block_size=s.pattern.block_size)
        full[i] = dataclasses.replace(full[i], pattern=pattern, spec=None)
    return full


@torch.no_grad()
def resize_shards(layer: SparseLinear, count: int) -> None:
    """Resize sharded values to `count` slots with undefined contents, and drop the gradient. Every
    rank that has a shard calls this, between a backward and the next forward pass.

    torch sets up gathering and reducing once, for the size that a Parameter had; this sets it up
    again. The Parameter stays the same object.

    Raises:
        RuntimeError: torch's object that shards these values is not found, or has gathered them.
    """
    values = layer.values
    if not is_sharded(values) or len(values) == count:
        return
    holder = _fsdp_parameter(layer)
    number = holder._orig_param_uid
    full = local_part(values).new_empty((count, *values.shape[1:]), device=holder.device)
    fresh = nn.Parameter(full, values.requires_grad)
    values.grad = None
    holder._init_sharded_param(fresh, holder.device, None, holder.mesh_info)
    if holder.post_forward_mesh_info:
        holder._init_sharded_post_forward_param_metadata(fresh)
    holder._orig_param_uid = number
    holder.all_gather_outputs = []
    holder.__dict__.pop("_unsharded_param", None)
    drop_references(values)
    drop_references(holder.sharded_param)
    swap_tensors(values, holder.sharded_param)
    holder.sharded_param = values
    holder._setattr_on_modules(values)
    check_owner(layer)


def _fsdp_parameter(layer: SparseLinear) -> Any:
    """torch's object for the sharded Parameter, found through the layer's hook after loading."""
    for hook in layer._load_state_dict_post_hooks.values():
        for cell in getattr(hook, "__closure__", None) or ():
            if getattr(cell.cell_contents, "sharded_param", None) is layer.values:
                return cell.cell_contents
    raise RuntimeError(
        f"torch {torch.__version__} does not reveal how the values of a tensor-parallel layer are "
        "sharded, so their number cannot change: use replicas in place of shards"
    )


def rebuild_reducers(values: Iterable[Tensor]) -> None:
    """Make the DistributedDataParallel wrappers of these Parameters reduce gradients of their
    present sizes.

    The gradients of the present step must be complete. A wrapper's reducer has buckets of the old
    sizes, so it is rebuilt; its communication hooks stay, that of PowerSGD starts over.
    """
    for ddp in _wrappers_of(values):
        parameters, sparse = ddp._build_params_for_reducer()
        names = ddp._build_debug_param_to_name_mapping(parameters)
        ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
        if ddp.static_graph and ddp.logger is not None:
            ddp._static_graph_delay_allreduce_enqueued = False
            ddp.reducer._set_static_graph()
            ddp.logger._set_static_graph()
        for hook, state in ddp._comm_hooks:
            # The state of PowerSGD has the sizes of the previous buckets.
            for field in ("error_dict", "p_memory_dict", "q_memory_dict"):
                getattr(state, field, {}).clear()
            torch.distributed._register_comm_hook(ddp.reducer, state, hook)


def forget_hook_errors(values: Iterable[Tensor]) -> None:
    """Let PowerSGD forget the errors of its last gradients where a wrapper reduces any of these
    Parameters: the entries of reused slots belong to other weights now."""
    for ddp in _wrappers_of(values):
        for _, state in ddp._comm_hooks:
            getattr(state, "error_dict", {}).clear()


def _wrappers_of(values: Iterable[Tensor]) -> list[DistributedDataParallel]:
    ids = {id(value) for value in values}
    if ids:
        _find_wrappers()
    return [wrapper for wrapper in list(_wrappers) if _reduces_any(wrapper, ids)]


_wrappers: WeakSet[DistributedDataParallel] = WeakSet()
"""All wrappers that are alive, after `_find_wrappers`."""


@cache
def _find_wrappers() -> None:
    """Find all wrappers, once, and note those made later. A module does not know its wrapper, so
    this looks through all objects, which takes a tenth of a second."""
    register_module_module_registration_hook(_note_wrapper)
    # By type, since isinstance may run code of objects, such as those that load lazily.
    wrappers = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]
    _wrappers.update(wrappers)


def _note_wrapper(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if isinstance(module, DistributedDataParallel):
        _wrappers.add(module)


def _reduces_any(ddp: DistributedDataParallel, ids: set[int]) -> bool:
    if "module" not in ddp._modules or not hasattr(ddp, "parameters_to_ignore"):
        return False  # its constructor is running, or has failed
    return any(
        id(parameter) in ids and name not in ddp.parameters_to_ignore
        for name, parameter in ddp.module.named_parameters()
    )
