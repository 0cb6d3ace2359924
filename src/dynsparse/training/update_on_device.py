"""Plan an update of layers on devices, without making the host wait.

The devices get all choices of all layers first. Where an update changes sizes, its numbers must be
right; the host then waits once, for all layers together, to check them.

A layer of blocks is small: the host takes longer to launch its operators than the device to compute
them. So layers of equal sizes are stacked, and each operator is called once for all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynsparse.nn import SparseLinear
from dynsparse.nn.backends import scores_of
from dynsparse.nn.sharded import is_sharded
from dynsparse.nn.sparse_module import make_next_indexes
from dynsparse.ops.grow.selection import select_on_device
from dynsparse.ops.linear import LayerIndex
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.pattern.on_device import fetch_scalars, to_device
from dynsparse.pattern.stack import PatternStack
from dynsparse.ranks import GrowRequest, Ranks
from dynsparse.tracing import span
from dynsparse.training.budgets import Counts
from dynsparse.training.deferred_checks import (
    any_not_finite,
    check_one_per_block,
    defer_checks,
    layer_errors,
)
from dynsparse.training.grow import GradientStep
from dynsparse.training.history import LastStep
from dynsparse.training.optimizer_state import learning_rate_of
from dynsparse.training.update import Change, UpdateRequest, check_fill, check_growth

# Slots of layers that are stacked, which bounds the memory of their tensors.
SLOTS_AT_ONCE = 1 << 20


@dataclass
class DeviceSelection:
    """The choices of a device for layers of equal sizes.

    Attributes:
        layers: by name.
        stack: their patterns.
        drop: the slots that leave, int64 [layers, any].
        grow: the positions that join, int64 [layers, any].
        invalid: whether numbers that it ranked held NaN or infinity, bool [layers].
        all_new: whether nothing joins that has just left.
    """

    layers: dict[str, SparseLinear]
    stack: PatternStack
    drop: Tensor
    grow: Tensor
    invalid: Tensor
    all_new: bool

    @property
    def keeps_size(self) -> bool:
        return self.drop.shape[-1] == self.grow.shape[-1]

    def rewire(self, invalid: Tensor) -> tuple[list[Rewiring], PatternStack]:
        """Make the rewirings to the next patterns, and these; those that keep the size change
        nothing where `invalid` holds."""
        layers = [*self.layers.values()]
        return self.stack.rewire(
            [layer.pattern for layer in layers],
            self.drop,
            self.grow,
            invalid if self.keeps_size else None,
            all_new=self.all_new,
            row_major=not layers[0].keeps_slots,
        )


def can_update_on_device(layer: SparseLinear, ranks: Ranks) -> bool:
    """Whether the device of a layer decides about it: it is not the CPU, and no other rank takes
    part."""
    return ranks.alone and layer.is_on_device and not is_sharded(layer.values)


def plan_on_device(request: UpdateRequest, counts: Mapping[str, Counts]) -> dict[str, Change]:
    """The changes by layer name, decided on the layers' devices.

    An update that keeps sizes and ranked NaN or infinity leaves its layer as it is; the trainer
    raises the error at a later update.

    Raises:
        ValueError: with the layer's name: NaN or infinity in an update that changes sizes; initial
            values of grown weights that do not fit.
    """
    changes: dict[str, Change] = {}
    checks: list[Check] = []
    for layers in group_layers(request, counts):
        for selection in select_blocks(request, layers, counts[next(iter(layers))]):
            changes |= plan_changes(request, selection, checks)
    _raise_or_defer(checks)
    return {name: changes[name] for name in counts}


def group_layers(
    request: UpdateRequest, counts: Mapping[str, Counts]
) -> Iterator[dict[str, SparseLinear]]:
    """Yield the layers by name, those of equal sizes and counts together."""
    groups: dict[Hashable, dict[str, SparseLinear]] = {}
    for name, count in counts.items():
        layer = request.layers[name]
        values, pattern = layer.values, layer.pattern
        order = layer.keeps_slots, pattern._is_row_major
        key = count, pattern.shape, values.shape, values.dtype, values.device, order
        groups.setdefault(key, {})[name] = layer
    for group in groups.values():
        names = list(group)
        step = max(1, SLOTS_AT_ONCE // max(1, group[names[0]].pattern.nnz))
        for first in range(0, len(names), step):
            yield {name: group[name] for name in names[first : first + step]}


def select_blocks(
    request: UpdateRequest, layers: dict[str, SparseLinear], counts: Counts
) -> list[DeviceSelection]:
    """Choose the blocks that leave and join layers of equal sizes.

    Returns one selection of all, or one of each layer if the growth does not return as many
    positions for all.
    """
    history, together = request.history, ", ".join(layers)
    first = next(iter(layers.values()))
    nnz, device = first.pattern.nnz, first.values.device
    ranked: list[list[Tensor]] = []
    with span("drop", layer=together):
        for name, layer in layers.items():
            with layer_errors(name):
                scores = request.scores(name, layer)
                check_one_per_block(scores, nnz)
                if not 0 <= counts.drop <= nnz:
                    raise ValueError(f"cannot drop {counts.drop} of {nnz} blocks")
            ranked.append([scores])
        scores = torch.stack([tensors[0] for tensors in ranked])
        drop = select_on_device(scores, counts.drop, largest=False)
    patterns = [layer.pattern for layer in layers.values()]
    stack = PatternStack.of(patterns, device)
    regrows = request.regrow_dropped and counts.drop > 0
    if regrows:
        patterns = stack.remove(drop).unbind()
    growth = []
    for (name, layer), pattern, tensors in zip(layers.items(), patterns, ranked, strict=True):
        pairs = history.pairs(name)
        tensors += [tensor for pair in pairs for tensor in pair]
        if layer.values.grad is not None:
            tensors.append(layer.values.grad)
        on_target = scores_of(layer) if isinstance(history, LastStep) else None
        growth.append(
            GrowRequest(name, pairs, pattern, counts.grow, scores=on_target, ranked=tensors)
        )
    with span("grow", layer=together):
        chosen = request.growth.choose(growth, request.step, request.ranks)
    for (name, layer), flat in zip(layers.items(), chosen, strict=True):
        with layer_errors(name):
            check_growth(layer, len(flat), counts.grow)
    grow = [to_device(flat, device) if flat.is_cpu else flat.to(device) for flat in chosen]
    if len({len(flat) for flat in grow}) > 1:
        return [
            DeviceSelection(
                {name: layer},
                PatternStack.of([layer.pattern], device),
                drop.narrow(0, i, 1),
                grow[i].unsqueeze(0),
                any_not_finite([ranked[i]]),
                not regrows,
            )
            for i, (name, layer) in enumerate(layers.items())
        ]
    invalid = any_not_finite(ranked)
    return [DeviceSelection(layers, stack, drop, torch.stack(grow), invalid, not regrows)]


class Check(NamedTuple):
    """Which layers have failed, bool [layers], and the message."""

    selection: DeviceSelection
    failed: Tensor
    line: str


def plan_changes(
    request: UpdateRequest, selection: DeviceSelection, checks: list[Check]
) -> dict[str, Change]:
    """Make the changes of the layers of a selection, and append what remains to be checked."""
    layers, invalid = [*selection.layers.values()], selection.invalid
    rewirings, after = selection.rewire(invalid)
    checks.append(Check(selection, invalid, _RANKED.format(step=request.step)))
    fills: list[Any] = []
    for i, (name, layer) in enumerate(selection.layers.items()):
        with layer_errors(name):
            fill = _initial_value(request, name, selection.grow.select(0, i), rewirings[i])
            if isinstance(fill, Tensor):
                fill = check_fill(fill, rewirings[i], layer.values)
        fills.append(fill)
    tensors = [[fill] if isinstance(fill, Tensor) else [] for fill in fills]
    if any(tensors):
        invalid_fill = any_not_finite(tensors)
        rewirings, after = selection.rewire(invalid.logical_or(invalid_fill))
        only_fill = invalid_fill.logical_and(invalid.logical_not())
        checks.append(Check(selection, only_fill, _STARTED.format(step=request.step)))
    made = make_next_indexes(layers, after.index) if selection.keeps_size else None
    indexes: Sequence[LayerIndex | None] = made or [None] * len(layers)
    changes = {}
    for name, layer, rewiring, fill, index in zip(
        selection.layers, layers, rewirings, fills, indexes, strict=True
    ):
        with layer_errors(name):
            changes[name] = Change.plan(layer, rewiring, fill, request.state_holders, index)
    return changes


def _raise_or_defer(checks: Sequence[Check]) -> None:
    """Raise the errors of layers that change their sizes, and defer those of others."""
    at_once = [check for check in checks if not check.selection.keeps_size]
    failed = fetch_scalars([one for check in at_once for one in check.failed.unbind()])
    lines = [(name, check.line) for check in at_once for name in check.selection.layers]
    for (name, line), has_failed in zip(lines, failed, strict=True):
        if has_failed:
            raise ValueError(f"layer {name!r}: {line}")
    for selection, invalid, line in checks:
        if selection.keeps_size:
            defer_checks([*selection.layers.values()], invalid, line)


_NOT_HAPPENED = "at step {step}, whose pattern update therefore did not happen: the training has "
_RANKED = (
    "x, dY, the gradient of its weights, their drop scores or the growth scores held NaN or "
    f"infinity {_NOT_HAPPENED}diverged, or the loss is scaled too far"
)
_STARTED = f"what grown weights start with held NaN or infinity {_NOT_HAPPENED}diverged"


def _initial_value(request: UpdateRequest, name: str, grow: Tensor, rewiring: Rewiring) -> object:
    """Initial values of grown weights: for a `GradientStep` one entry per slot, as the host does
    not know which slots were grown."""
    value, layer = request.initial_value, request.layers[name]
    if not isinstance(value, GradientStep):
        return value(layer, rewiring) if callable(value) else value
    if not len(grow):
        return 0.0
    joining = grow.sort().values
    pattern = SparsePattern._from_device(joining, layer.pattern)
    rate = learning_rate_of(request.optimizer, layer.values)
    steps = value.of(request.history.at(name, pattern), rate)
    place = torch.searchsorted(joining, rewiring.after._flat_on(joining.device))
    return steps.index_select(0, place.clamp_(max=len(joining) - 1))
