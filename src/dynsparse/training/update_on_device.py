"""Plan an update of layers on devices, without making the host wait.

The devices get all choices of all layers first. Where an update changes sizes, its numbers must be
right; the host then waits once, for all layers together, to check them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynsparse.nn import SparseLinear
from dynsparse.nn.backends import scores_of
from dynsparse.nn.sharded import is_sharded
from dynsparse.ops.grow import select
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.pattern.on_device import fetch_scalars, remove_slots, to_device
from dynsparse.ranks import GrowRequest, Ranks
from dynsparse.tracing import span
from dynsparse.training.budgets import Counts
from dynsparse.training.deferred_checks import (
    any_not_finite,
    check_one_per_block,
    defer_check,
    layer_errors,
)
from dynsparse.training.grow import GradientStep
from dynsparse.training.history import LastStep
from dynsparse.training.optimizer_state import learning_rate_of
from dynsparse.training.update import Change, UpdateRequest, check_fill


@dataclass
class DeviceSelection:
    """The choices of a device for one layer.

    Attributes:
        drop: the slots that leave, int64; grow: the positions that join, int64.
        invalid: bool []: whether numbers that it ranked held NaN or infinity.
        all_new: whether nothing joins that has just left.
    """

    name: str
    layer: SparseLinear
    counts: Counts
    drop: Tensor
    grow: Tensor
    invalid: Tensor
    all_new: bool

    @property
    def keeps_size(self) -> bool:
        return self.counts.drop == self.counts.grow

    def rewiring(self, invalid: Tensor) -> Rewiring:
        """Make the rewiring to the next pattern; one that keeps the size changes nothing where
        `invalid` holds."""
        return Rewiring._from_device(
            self.layer.pattern,
            self.drop,
            self.grow,
            invalid if self.keeps_size else None,
            self.all_new,
            row_major=not self.layer.keeps_slots,
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
    selections = []
    for name, count in counts.items():
        with layer_errors(name):
            selections.append(select_on_device(request, name, count))
    return build_changes(request, selections)


def select_on_device(request: UpdateRequest, name: str, counts: Counts) -> DeviceSelection:
    """Choose the blocks of a layer that leave and that join; the host does not wait."""
    layer, history = request.layers[name], request.history
    pattern, values = layer.pattern, layer.values
    with span("drop", layer=name):
        scores = request.scores(name, layer)
        check_one_per_block(scores, pattern.nnz)
        drop = select(scores, counts.drop, largest=False)
    regrows = request.regrow_dropped and counts.drop > 0
    if regrows:
        flat = remove_slots(pattern._flat_on(drop.device), drop)
    else:
        flat = pattern._sorted_flat_on(drop.device)
    occupied = SparsePattern._from_device(flat, pattern)
    pairs = history.pairs(name)
    on_target = scores_of(layer) if isinstance(history, LastStep) else None
    ranked = [scores, *(t for pair in pairs for t in pair)]
    growth = GrowRequest(name, pairs, occupied, counts.grow, scores=on_target, ranked=ranked)
    with span("grow", layer=name):
        (grow,) = request.growth.choose([growth], request.step, request.ranks)
    grow = to_device(grow, drop.device) if grow.is_cpu else grow.to(drop.device)
    if values.grad is not None:
        ranked.append(values.grad)
    return DeviceSelection(name, layer, counts, drop, grow, any_not_finite(ranked), not regrows)


def build_changes(
    request: UpdateRequest, selections: Sequence[DeviceSelection]
) -> dict[str, Change]:
    """The changes that devices have chosen; see `plan_on_device`."""
    changes: dict[str, Change] = {}
    checks: list[tuple[DeviceSelection, Tensor, str]] = []
    for selection in selections:
        layer, invalid = selection.layer, selection.invalid
        with layer_errors(selection.name):
            rewiring = selection.rewiring(invalid)
            fill = _initial_value(request, selection, rewiring)
            checks.append((selection, invalid, _RANKED.format(step=request.step)))
            if isinstance(fill, Tensor):
                fill = check_fill(fill, rewiring, layer.values)
            if isinstance(fill, Tensor):
                invalid_fill = any_not_finite([fill])
                rewiring = selection.rewiring(invalid.logical_or(invalid_fill))
                only_fill = invalid_fill.logical_and(invalid.logical_not())
                checks.append((selection, only_fill, _STARTED.format(step=request.step)))
            changes[selection.name] = Change.plan(layer, rewiring, fill, request.optimizer)
    at_once = [check for check in checks if not check[0].keeps_size]
    for (selection, _, line), is_wrong in zip(
        at_once, fetch_scalars([c[1] for c in at_once]), strict=True
    ):
        if is_wrong:
            raise ValueError(f"layer {selection.name!r}: {line}")
    for selection, invalid, line in checks:
        if selection.keeps_size:
            defer_check(selection.layer, invalid, line)
    return changes


_NOT_HAPPENED = "at step {step}, whose pattern update therefore did not happen: the training has "
_RANKED = (
    "x, dY, the gradient of its weights, their drop scores or the growth scores held NaN or "
    f"infinity {_NOT_HAPPENED}diverged, or the loss is scaled too far"
)
_STARTED = f"what grown weights start with held NaN or infinity {_NOT_HAPPENED}diverged"


def _initial_value(
    request: UpdateRequest, selection: DeviceSelection, rewiring: Rewiring
) -> object:
    """Initial values of grown weights: for a `GradientStep` one entry per slot, as the host does
    not know which slots were grown."""
    value, layer = request.initial_value, selection.layer
    if not isinstance(value, GradientStep):
        return value(layer, rewiring) if callable(value) else value
    if not len(selection.grow):
        return 0.0
    joining = selection.grow.sort().values
    pattern = SparsePattern._from_device(joining, layer.pattern)
    rate = learning_rate_of(request.optimizer, layer.values)
    steps = value.of(request.history.at(selection.name, pattern), rate)
    place = torch.searchsorted(joining, rewiring.after._flat_on(joining.device))
    return steps.index_select(0, place.clamp_(max=len(joining) - 1))
