"""Tensor-parallel layers in checkpoints: stored as full layers, in the order of one process.

Saving redistributes every tensor that has an entry per slot into even chunks, so that no rank holds
all of it; loading takes from the full tensors what lies in this rank's 2-D shard. So shards of any
mesh, replicas, FSDP2 shards and one process read each other's checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse._core.checks import shorten
from dynsparse.nn import SparseLinear
from dynsparse.nn.sharded import gather_full, is_sharded, local_part, primary_range
from dynsparse.pattern import SparsePattern
from dynsparse.pattern.index_arrays import slots_of
from dynsparse.ranks import DimShard, Ranks, ShardSpec, check_consistent, chunk, chunk_of
from dynsparse.training.trainer import SparseTrainer

KeyPath = tuple[Any, ...]
"""The keys that lead from the parts of a checkpoint to an entry in them."""

_STATE = ("optimizer", "state", "state")
_OWN = ("trainer", "own_state")


@dataclass(frozen=True)
class Chunk:
    """This rank's chunk of a tensor, divided by rows among all ranks as `torch.chunk` divides.

    Attributes:
        tensor: the chunk.
        shape: of the full tensor.
    """

    tensor: Tensor
    shape: torch.Size


@dataclass(frozen=True)
class _Layer:
    """A tensor-parallel layer, and where a checkpoint has what belongs to it.

    Attributes:
        spec: this rank's shard.
        prefixes: of its entries in the model's state, one for each name of the layer.
        number: of its values in the optimizer's state; None without an optimizer that holds them.
        trainer_name: its name in the trainer; None where the trainer does not have it.
    """

    module: SparseLinear
    spec: ShardSpec
    prefixes: list[str]
    number: int | None
    trainer_name: str | None

    def find_slots(self, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
        """The slots of the full pattern that are in this shard, and their positions in it.

        Raises:
            ValueError: rows and columns that are not a pattern of the layer.
        """
        b = self.module.block_size
        full = SparsePattern._from_slot_coordinates(rows, cols, shape=self.spec.shape, block_size=b)
        flat = full.sorted_flat
        inside = self.spec.contains(flat, b).nonzero().flatten()
        return slots_of(inside, full.slots), self.spec.to_local(flat, b)


class TensorParallelState:
    """The tensors of a training that are sharded with tensor-parallel layers.

    Args:
        model, optimizer, trainer: of the training.
        groups: of the optimizer's state as it is, or was, saved.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        trainer: SparseTrainer | None,
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        own_groups = [] if optimizer is None else optimizer.param_groups
        parameters = [p for group in own_groups for p in group["params"]]
        numbers = [number for group in groups for number in group["params"]]
        number_of = {id(p): n for p, n in zip(parameters, numbers, strict=False)}
        trainer_names = {} if trainer is None else {id(m): n for n, m in trainer.layers.items()}
        layers: dict[int, _Layer] = {}
        self._dim_shards: dict[KeyPath, tuple[DimShard, int]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            prefix = f"{name}." if name else ""
            for key, cut in getattr(module, "dim_shards", {}).items():
                self._dim_shards["model", prefix + key] = cut
                number = number_of.get(id(getattr(module, key)))
                if number is not None:
                    state_path: KeyPath = (*_STATE, number)
                    self._dim_shards[state_path] = cut
            executor: Any = getattr(module, "executor", None)
            if isinstance(module, SparseLinear) and isinstance(executor, ShardSpec):
                values = number_of.get(id(module.values))
                new = _Layer(module, executor, [], values, trainer_names.get(id(module)))
                layers.setdefault(id(module), new).prefixes.append(prefix)
        self._layers = list(layers.values())
        self.by_slots: set[KeyPath] = set()
        """Where `take_shards` found tensors with an entry per slot."""
        self._by_positions = trainer is not None and trainer.own_state_holds == "positions"

    def to_chunks(self, parts: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
        """`parts` with full tensors for what is sharded: a `Chunk` for what has an entry per slot.

        All ranks call this.

        Args:
            ranks: with other samples for the same shards.
        """
        if not self._layers:
            return parts
        states = parts["optimizer"]["state"]["state"]
        keys = {
            f"what the optimizer keeps of layer {layer.prefixes[0]!r}": repr(
                sorted(states.get(layer.number, {}))
            )
            for layer in self._layers
        }
        check_consistent(ranks.all_ranks, keys, "take as many steps on every rank")
        changes: dict[KeyPath, Any] = {}
        for layer in self._layers:
            changes |= self._layer_chunks(layer, parts, ranks)
        for path, (shard, dim) in self._dim_shards.items():
            for tensor_path, tensor in _tensors(parts, path):
                if tensor.dim():
                    changes[tensor_path] = shard.all_gather(gather_full(tensor.detach()), dim)
        return replace_at(parts, changes)

    def _layer_chunks(
        self, layer: _Layer, parts: dict[str, Any], ranks: Ranks
    ) -> dict[KeyPath, Any]:
        module, b = layer.module, layer.module.block_size
        pattern = module.pattern
        device = local_part(module.values).device
        slots, total = layer.spec.slots(pattern)
        flat = layer.spec.to_full(pattern.flat, b)
        width = layer.spec.shape[1] // b
        local: dict[KeyPath, Tensor] = {
            ("rows",): (flat // width).int().to(device),
            ("cols",): (flat % width).int().to(device),
            ("values",): module.values.detach(),
        }
        for path, tensor in _tensors(parts, (*_STATE, layer.number)):
            if tensor.dim() and len(tensor) == pattern.nnz:
                local[path] = tensor.detach()
        own_state = dict(_tensors(parts, (*_OWN, layer.trainer_name)))
        if not self._by_positions:
            local |= own_state
        chunks = _rebalance(ranks, layer.spec, slots, total, list(local.values()))
        changes: dict[KeyPath, Any] = dict(zip(local, chunks, strict=True))
        for key in ("rows", "cols", "values"):
            chunk = changes.pop((key,))
            changes |= {("model", prefix + key): chunk for prefix in layer.prefixes}
        for prefix in layer.prefixes:
            name = prefix.removesuffix(".")
            if name in parts["patterns"]:
                changes["patterns", name] = [*layer.spec.shape, b, total]
        if self._by_positions:
            for path, positions in own_state.items():
                subset = SparsePattern.from_flat(positions.cpu(), shape=pattern.shape, block_size=b)
                subset_slots, count = layer.spec.slots(subset)
                full = layer.spec.to_full(subset.flat, b).to(device)
                (changes[path],) = _rebalance(ranks, layer.spec, subset_slots, count, [full])
        return changes

    def take_shards(self, parts: dict[str, Any]) -> dict[str, Any]:
        """`parts` with this rank's shards in the place of full tensors.

        Args:
            parts: with tensors, or `StoredTensor`s in their place.

        Raises:
            ValueError: they do not fit.
        """
        changes: dict[KeyPath, Any] = {}
        for layer in self._layers:
            changes |= self._take_layer(layer, parts)
        for path, (shard, dim) in self._dim_shards.items():
            for tensor_path, value in _tensors(parts, path):
                shape = value.shape
                if len(shape) and shape[dim] == shard.borders[-1]:
                    changes[tensor_path] = shard.narrow(_full_tensor(value), dim).clone()
        return replace_at(parts, changes)

    def _take_layer(self, layer: _Layer, parts: dict[str, Any]) -> dict[KeyPath, Any]:
        saved, module, b = parts["model"], layer.module, layer.module.block_size
        first = layer.prefixes[0]
        name = first.removesuffix(".")
        expected = [*layer.spec.shape, b]
        described = parts["patterns"].get(name)
        if described is None or first + "rows" not in saved:
            return {}  # an error follows when names are compared
        fixed = [] if module.resizable else [layer.spec.blocks]
        if not isinstance(described, list) or described[: 3 + len(fixed)] != expected + fixed:
            raise ValueError(
                f"layer {name!r} was saved with [out, in, block size, blocks] = "
                f"{shorten(described)}, the model has {[*expected, layer.spec.blocks]}"
            )
        try:
            rows, cols = (_full_tensor(saved[first + key]) for key in ("rows", "cols"))
            slots, flat = layer.find_slots(rows, cols)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"the pattern of {name!r} is damaged: {error}") from None
        total = saved[first + "rows"].shape[0]
        width = module.in_features // b
        paths = [("model", prefix + "values") for prefix in layer.prefixes]
        paths += [path for path, _ in _tensors(parts, (*_STATE, layer.number))]
        changes: dict[KeyPath, Any] = {}
        for path, value in _tensors(parts, (*_OWN, layer.trainer_name)):
            if self._by_positions:
                changes[path] = layer.spec.to_local(_full_tensor(value), b)
            else:
                paths.append(path)
        for path in paths:
            value = parts
            for key in path:
                value = value[key]
            if len(value.shape) and value.shape[0] == total:
                changes[path] = _read_slots(value, slots)
                self.by_slots.add(path)
        for prefix in layer.prefixes:
            changes["model", prefix + "rows"] = (flat // width).int()
            changes["model", prefix + "cols"] = (flat % width).int()
            if prefix.removesuffix(".") in parts["patterns"]:
                changes["patterns", prefix.removesuffix(".")] = [
                    module.out_features, module.in_features, b, len(flat)
                ]  # fmt: skip
        return changes


def _rebalance(
    ranks: Ranks, spec: ShardSpec, slots: Tensor, total: int, tensors: Sequence[Tensor]
) -> list[Chunk]:
    """Even chunks of what the shards of a layer hold by slots; each entry is sent by one rank."""
    begin, end = 0, len(slots) if ranks.is_lead_rank(spec.axes) else 0
    sharded = next((tensor for tensor in tensors if is_sharded(tensor)), None)
    if sharded is not None and ranks.is_lead_group(spec.axes):
        begin, end = primary_range(sharded)
    local = [
        local_part(t)[: end - begin] if is_sharded(t) else t[begin:end]
        for t in tensors
    ]  # fmt: skip
    chunks = rebalance(ranks.all_ranks, slots[begin:end], total, local)
    return [Chunk(chunk, torch.Size([total, *chunk.shape[1:]])) for chunk in chunks]


@torch.no_grad()
def rebalance(ranks: Ranks, slots: Tensor, total: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    """This rank's chunk of each tensor, from any distribution of slots over ranks.

    One all-to-all for all tensors sends each entry to its rank. All ranks call this, with tensors
    of the same dtypes and inner dimensions.

    Args:
        slots: of the entries on this rank: int64 [n], ascending. Every slot is on one rank.
        total: number of slots.
        tensors: [n, ...] each.

    Raises:
        ValueError: the ranks do not hold `total` slots.
    """
    slots = slots.cpu()
    first, last = chunk_of(ranks, total)
    bounds = torch.tensor(
        [*(chunk(total, ranks.size, r)[0] for r in range(ranks.size)), total], device="cpu"
    )
    leaving = torch.searchsorted(slots, bounds).diff()
    coming = ranks.all_to_all(leaving.to(ranks.device)).tolist()
    if sum(coming) != last - first:
        raise ValueError(f"expected {last - first} slots from all ranks, got {sum(coming)}")
    if not tensors:
        return []
    device = tensors[0].device
    lines = [_as_bytes(tensor.contiguous().to(device)) for tensor in (slots, *tensors)]
    widths = [line.shape[1] for line in lines]
    arrived = ranks.all_to_all(torch.cat(lines, 1), leaving.tolist(), coming).split(widths, 1)
    at = arrived[0].contiguous().view(torch.int64).flatten() - first
    chunks = [tensor.new_empty((last - first, *tensor.shape[1:])) for tensor in tensors]
    for tensor, line in zip(chunks, arrived[1:], strict=True):
        _as_bytes(tensor)[at] = line
    return chunks


def _as_bytes(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor's memory: uint8 [slots, bytes per slot]."""
    return tensor.view(len(tensor), math.prod(tensor.shape[1:])).view(torch.uint8)


def _full_tensor(value: Any) -> Tensor:
    tensor: Tensor = value if isinstance(value, Tensor) else value.full_tensor()
    return tensor


_READ = 1 << 24  # bytes of a stored tensor in memory at a time


def _read_slots(value: Any, slots: Tensor) -> Tensor:
    """The rows of a tensor at `slots`, ascending; a stored one is read in steps."""
    if isinstance(value, Tensor):
        return value[slots.to(value.device)]
    width = max(1, value.shape[1:].numel() * value.dtype.itemsize)
    step = max(1, _READ // width)
    rows = []
    for first in range(0, value.shape[0], step):
        last = min(first + step, value.shape[0])
        begin, end = torch.searchsorted(slots, torch.tensor([first, last], device="cpu")).tolist()
        if begin < end:
            rows.append(value.rows(first, last)[slots[begin:end] - first])
    return torch.cat(rows) if rows else value.rows(0, 0)


def _tensors(parts: Any, path: KeyPath) -> list[tuple[KeyPath, Any]]:
    """The tensors, read or not, at a path or one key beyond it."""
    for key in path:
        if not isinstance(parts, dict) or key not in parts:
            return []
        parts = parts[key]
    if isinstance(parts, dict):
        return [((*path, key), t) for key, t in parts.items() if hasattr(t, "shape")]
    return [(path, parts)] if hasattr(parts, "shape") else []


def replace_at(tree: dict[str, Any], changes: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """A copy of a tree of dictionaries with other values at some paths."""
    copies: dict[KeyPath, dict[Any, Any]] = {(): dict(tree)}
    for path, value in changes.items():
        for depth in range(1, len(path)):
            if path[:depth] not in copies:
                parent, key = copies[path[: depth - 1]], path[depth - 1]
                copies[path[:depth]] = parent[key] = dict(parent[key])
        copies[path[:-1]][path[-1]] = value
    return copies[()]
