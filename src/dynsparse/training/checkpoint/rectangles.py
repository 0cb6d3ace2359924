"""Layers in rectangles, as checkpoints hold them: whole layers, in the order of one process.

Whoever saves brings every tensor that goes by slots into even pieces, so that no rank has the whole
of it, and whoever loads takes out of the whole what lies in his rectangle. So rectangles of any
grid, replicas, shards and one process read each other's checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse.encoding import slots_of
from dynsparse.files.shorten import shortened
from dynsparse.nn import SparseLinear
from dynsparse.nn.sharded import gathered, is_sharded, local_part, own_rows
from dynsparse.pattern import SparsePattern
from dynsparse.ranks import Part, Ranks, Slab, check_consistent, rebalance
from dynsparse.training.trainer import SparseTrainer

Way = tuple[Any, ...]
"""From the parts of a checkpoint to something in them."""

_STATE = ("optimizer", "state", "state")
_OWN = ("trainer", "own_state")


@dataclass(frozen=True)
class Piece:
    """This rank's even piece of a tensor, cut by rows as `torch.chunk` cuts over all ranks.

    Attributes:
        tensor: the piece.
        shape: of the whole.
    """

    tensor: Tensor
    shape: torch.Size


@dataclass(frozen=True)
class _Layer:
    """A layer in rectangles, and where in a checkpoint what belongs to it is.

    Attributes:
        prefixes: of its entries in the model's state, one for each place where the model has it.
        number: of its values in the optimizer's state; None without an optimizer that holds them.
        known_as: its name in the trainer; None where the trainer does not have it.
    """

    layer: SparseLinear
    part: Part
    prefixes: list[str]
    number: int | None
    known_as: str | None

    def own(self, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
        """Of the rows and columns of the whole pattern: the slots in the rectangle, and the
        positions in it.

        Raises:
            ValueError: they are no pattern of the layer.
        """
        b = self.layer.block_size
        whole = SparsePattern._in_order(rows, cols, shape=self.part.shape, block_size=b)
        flat = whole.sorted_flat
        inside = self.part.inside(flat, b).nonzero().flatten()
        return slots_of(inside, whole.slots), self.part.to_part(flat, b)


class Rectangles:
    """What of a training this rank has in rectangles.

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
        held = [] if optimizer is None else optimizer.param_groups
        parameters = [p for group in held for p in group["params"]]
        numbers = [number for group in groups for number in group["params"]]
        number_of = {id(p): n for p, n in zip(parameters, numbers, strict=False)}
        known_as = {} if trainer is None else {id(m): n for n, m in trainer.layers.items()}
        layers: dict[int, _Layer] = {}
        self._slabs: dict[Way, tuple[Slab, int]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            prefix = f"{name}." if name else ""
            for key, cut in getattr(module, "slabs", {}).items():
                self._slabs["model", prefix + key] = cut
                number = number_of.get(id(getattr(module, key)))
                if number is not None:
                    state_way: Way = (*_STATE, number)
                    self._slabs[state_way] = cut
            executor: Any = getattr(module, "executor", None)
            if isinstance(module, SparseLinear) and isinstance(executor, Part):
                values = number_of.get(id(module.values))
                fresh = _Layer(module, executor, [], values, known_as.get(id(module)))
                layers.setdefault(id(module), fresh).prefixes.append(prefix)
        self._layers = list(layers.values())
        self.by_slots: set[Way] = set()
        """Of what was `taken`, the tensors with an entry for each slot of a rectangle."""
        self._by_positions = trainer is not None and trainer.own_state_holds == "positions"

    def brought_together(self, parts: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
        """`parts` with whole tensors for what is in rectangles: a `Piece` for what goes by slots.

        All ranks call this.

        Args:
            ranks: with other samples for the same rectangles; everyone of their mesh moves.
        """
        if not self._layers:
            return parts
        found: dict[Way, Any] = {}
        states = parts["optimizer"]["state"]["state"]
        said = {
            f"what the optimizer keeps of layer {one.prefixes[0]!r}": repr(
                sorted(states.get(one.number, {}))
            )
            for one in self._layers
        }
        check_consistent(ranks.all_ranks, said, "take as many steps on every rank")
        for one in self._layers:
            found |= self._pieces(one, parts, ranks)
        for way, (slab, dim) in self._slabs.items():
            for deeper, tensor in _tensors(parts, way):
                if tensor.dim():
                    found[deeper] = slab.joined(gathered(tensor.detach()), dim)
        return at_ways(parts, found)

    def _pieces(self, one: _Layer, parts: dict[str, Any], ranks: Ranks) -> dict[Way, Any]:
        layer, b = one.layer, one.layer.block_size
        pattern = layer.pattern
        device = local_part(layer.values).device
        slots, total = one.part.slots(pattern)
        flat = one.part.to_whole(pattern.flat, b)
        width = one.part.shape[1] // b
        going: dict[Way, Tensor] = {
            ("rows",): (flat // width).int().to(device),
            ("cols",): (flat % width).int().to(device),
            ("values",): layer.values.detach(),
        }
        for deeper, tensor in _tensors(parts, (*_STATE, one.number)):
            if tensor.dim() and len(tensor) == pattern.nnz:
                going[deeper] = tensor.detach()
        signs = dict(_tensors(parts, (*_OWN, one.known_as)))
        if not self._by_positions:
            going |= signs
        made = _even(ranks, one.part, slots, total, list(going.values()))
        found: dict[Way, Any] = dict(zip(going, made, strict=True))
        for key in ("rows", "cols", "values"):
            piece = found.pop((key,))
            found |= {("model", prefix + key): piece for prefix in one.prefixes}
        for prefix in one.prefixes:
            name = prefix.removesuffix(".")
            if name in parts["patterns"]:
                found["patterns", name] = [*one.part.shape, b, total]
        if self._by_positions:
            for way, own in signs.items():
                chosen = SparsePattern.from_flat(own.cpu(), shape=pattern.shape, block_size=b)
                at, count = one.part.slots(chosen)
                line = one.part.to_whole(chosen.flat, b).to(device)
                (found[way],) = _even(ranks, one.part, at, count, [line])
        return found

    def taken(self, parts: dict[str, Any]) -> dict[str, Any]:
        """`parts` with what lies in this rank's rectangles in the place of whole tensors.

        Args:
            parts: with tensors, or `StoredTensor`s in their place.

        Raises:
            ValueError: they do not fit.
        """
        found: dict[Way, Any] = {}
        for one in self._layers:
            found |= self._taken(one, parts)
        for way, (slab, dim) in self._slabs.items():
            for deeper, value in _tensors(parts, way):
                shape = value.shape
                if len(shape) and shape[dim] == slab.borders[-1]:
                    found[deeper] = slab.cut(_whole(value), dim).clone()
        return at_ways(parts, found)

    def _taken(self, one: _Layer, parts: dict[str, Any]) -> dict[Way, Any]:
        saved, layer = parts["model"], one.layer
        first = one.prefixes[0]
        name = first.removesuffix(".")
        expected = [*one.part.shape, layer.block_size]
        other = parts["patterns"].get(name)
        if other is None or first + "rows" not in saved:
            return {}  # told of when names are compared
        fixed = [] if layer.resizable else [one.part.blocks]
        if not isinstance(other, list) or other[: 3 + len(fixed)] != expected + fixed:
            raise ValueError(
                f"layer {name!r} was saved with [out, in, block size, blocks] = "
                f"{shortened(other)}, the model has {[*expected, one.part.blocks]}"
            )
        try:
            slots, flat = one.own(*(_whole(saved[first + key]) for key in ("rows", "cols")))
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"the pattern of {name!r} is damaged: {error}") from None
        total = saved[first + "rows"].shape[0]
        width = layer.in_features // layer.block_size
        ways = [("model", prefix + "values") for prefix in one.prefixes]
        ways += [deeper for deeper, _ in _tensors(parts, (*_STATE, one.number))]
        found: dict[Way, Any] = {}
        own = _tensors(parts, (*_OWN, one.known_as))
        for way, value in own:
            if self._by_positions:
                found[way] = one.part.to_part(_whole(value), layer.block_size)
            else:
                ways.append(way)
        for way in ways:
            value = _at(parts, way)
            if len(value.shape) and value.shape[0] == total:
                found[way] = _rows(value, slots)
                self.by_slots.add(way)
        for prefix in one.prefixes:
            found["model", prefix + "rows"] = (flat // width).int()
            found["model", prefix + "cols"] = (flat % width).int()
            if prefix.removesuffix(".") in parts["patterns"]:
                found["patterns", prefix.removesuffix(".")] = [
                    layer.out_features, layer.in_features, layer.block_size, len(flat)
                ]  # fmt: skip
        return found


def _even(
    ranks: Ranks, part: Part, slots: Tensor, total: int, tensors: Sequence[Tensor]
) -> list[Piece]:
    """Even pieces of what the rectangles of a layer hold by slots: each entry comes from one."""
    begin, end = 0, len(slots) if ranks.is_lead_rank(part.axes) else 0
    sharded = next((tensor for tensor in tensors if is_sharded(tensor)), None)
    if sharded is not None and ranks.is_lead_group(part.axes):
        begin, end = own_rows(sharded)
    own = [
        local_part(t)[: end - begin] if is_sharded(t) else t[begin:end]
        for t in tensors
    ]  # fmt: skip
    pieces = rebalance(ranks.all_ranks, slots[begin:end], total, own)
    return [Piece(piece, torch.Size([total, *piece.shape[1:]])) for piece in pieces]


def _whole(value: Any) -> Tensor:
    found: Tensor = value if isinstance(value, Tensor) else value.full_tensor()
    return found


# Of a stored tensor, at a time.
_READ = 1 << 24


def _rows(value: Any, slots: Tensor) -> Tensor:
    """These rows of a tensor, or of a stored one, of which no more is in memory at a time."""
    if isinstance(value, Tensor):
        return value[slots.to(value.device)]
    width = max(1, value.shape[1:].numel() * value.dtype.itemsize)
    step = max(1, _READ // width)
    made = []
    for first in range(0, value.shape[0], step):
        last = min(first + step, value.shape[0])
        begin, end = torch.searchsorted(slots, torch.tensor([first, last])).tolist()
        if begin < end:
            made.append(value.rows(first, last)[slots[begin:end] - first])
    return torch.cat(made) if made else value.rows(0, 0)


def _at(parts: Any, way: Way) -> Any:
    for key in way:
        parts = parts[key]
    return parts


def _tensors(parts: Any, way: Way) -> list[tuple[Way, Any]]:
    """The tensors, read or not, at the end of a way or one step beyond it; none where there is no
    such way."""
    for key in way:
        if not isinstance(parts, dict) or key not in parts:
            return []
        parts = parts[key]
    if isinstance(parts, dict):
        return [((*way, k), one) for k, one in parts.items() if hasattr(one, "shape")]
    return [(way, parts)] if hasattr(parts, "shape") else []


def at_ways(tree: dict[str, Any], found: Mapping[Way, Any]) -> dict[str, Any]:
    """A tree of dictionaries with other things at some ways; nothing of it is changed."""
    copies: dict[Way, dict[Any, Any]] = {(): dict(tree)}
    for way, thing in found.items():
        for depth in range(1, len(way)):
            if way[:depth] not in copies:
                parent, key = copies[way[: depth - 1]], way[depth - 1]
                copies[way[:depth]] = parent[key] = dict(parent[key])
        copies[way[:-1]][way[-1]] = thing
    return copies[()]
