"""An update of layers on devices, which decide by themselves and tell the host nothing.

What all layers choose is given to their devices first. Where updates change sizes these must be
right, so the host then asks once, for all layers together, whether the numbers were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynsparse.nn import SparseLinear
from dynsparse.nn.backends import scores_of
from dynsparse.ops.grow import select
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.pattern.on_device import sent, told, without
from dynsparse.ranks import GrowRequest
from dynsparse.tracing import span
from dynsparse.training.budgets import Counts
from dynsparse.training.change import Change, check_fill, check_one_per_block, naming
from dynsparse.training.doubts import ask, not_finite
from dynsparse.training.grow import Growth
from dynsparse.training.history import History, LastStep
from dynsparse.training.initial import GradientStep, GrownValue, learning_rate_of


@dataclass
class Decided:
    """What a device has chosen for one layer.

    Attributes:
        drop: the slots that leave, int64; grow: the positions that join, int64.
        wrong: bool []: whether numbers that it went by held NaN or infinity.
        all_new: whether nothing joins that has just left.
    """

    name: str
    layer: SparseLinear
    counts: Counts
    drop: Tensor
    grow: Tensor
    wrong: Tensor
    all_new: bool

    @property
    def keeps_size(self) -> bool:
        return self.counts.drop == self.counts.grow


def decided(
    name: str,
    layer: SparseLinear,
    counts: Counts,
    scores: Callable[[str, SparseLinear], Tensor],
    growth: Growth,
    history: History,
    step: int,
    regrow_dropped: bool,
) -> Decided:
    """Which blocks of a layer leave, and which join; nothing waits."""
    pattern, values = layer.pattern, layer.values
    with span("drop", layer=name):
        ranked = scores(name, layer)
        check_one_per_block(ranked, pattern.nnz)
        drop = select(ranked, counts.drop, largest=False)
    if regrow_dropped and counts.drop:
        flat = without(pattern._flat_on(drop.device), drop)
    else:
        flat = pattern._sorted_flat_on(drop.device)
    taken = SparsePattern._on_device(flat, pattern)
    pairs = history.pairs(name)
    on_target = scores_of(layer) if isinstance(history, LastStep) else None
    seen = [ranked, *(t for pair in pairs for t in pair)]
    asked = GrowRequest(name, pairs, taken, counts.grow, scores=on_target, ranked=seen)
    with span("grow", layer=name):
        (grow,) = growth.choose_all([asked], step)
    grow = sent(grow, drop.device) if grow.is_cpu else grow.to(drop.device)
    if values.grad is not None:
        seen.append(values.grad)
    new = not (regrow_dropped and counts.drop)
    return Decided(name, layer, counts, drop, grow, not_finite(seen), new)


def carried_out(
    found: Sequence[Decided],
    *,
    initial_value: GrownValue,
    history: History,
    optimizer: torch.optim.Optimizer,
    step: int,
) -> dict[str, Change]:
    """The changes by layer name. An update that keeps sizes, and went by NaN or infinity, leaves
    its layer as it is, and the host hears of it later.

    Raises:
        ValueError: with the layer's name, one that changes sizes and did so; what grown weights
            start with does not fit.
    """
    changes: dict[str, Change] = {}
    doubts: list[tuple[Decided, Tensor, str]] = []
    for one in found:
        with naming(one.name):
            rewiring = _rewired(one, one.wrong)
            start = _start(one, rewiring, initial_value, history, optimizer)
            doubts.append((one, one.wrong, _RANKED.format(step=step)))
            if isinstance(start, Tensor):
                start = check_fill(start, rewiring, one.layer.values)
            if isinstance(start, Tensor):
                odd = not_finite([start])
                rewiring = _rewired(one, one.wrong.logical_or(odd))
                only = odd.logical_and(one.wrong.logical_not())
                doubts.append((one, only, _STARTED.format(step=step)))
            changes[one.name] = Change.planned(one.layer, rewiring, start, optimizer)
    at_once = [doubt for doubt in doubts if not doubt[0].keeps_size]
    for (one, _, line), wrong in zip(at_once, told([d[1] for d in at_once]), strict=True):
        if wrong:
            raise ValueError(f"layer {one.name!r}: {line}")
    for one, wrong_there, line in doubts:
        if one.keeps_size:
            ask(one.layer, wrong_there, line)
    return changes


_NOT_HAPPENED = "at step {step}, whose pattern update therefore did not happen: the training has "
_RANKED = (
    "x, dY, the gradient of its weights, their drop scores or the growth scores held NaN or "
    f"infinity {_NOT_HAPPENED}diverged, or the loss is scaled too far"
)
_STARTED = f"what grown weights start with held NaN or infinity {_NOT_HAPPENED}diverged"


def _rewired(one: Decided, wrong: Tensor) -> Rewiring:
    unless = wrong if one.keeps_size else None
    sorts = not one.layer.keeps_slots
    return Rewiring._on_device(
        one.layer.pattern, one.drop, one.grow, unless, one.all_new, row_major=sorts
    )


def _start(
    one: Decided,
    rewiring: Rewiring,
    given: GrownValue,
    history: History,
    optimizer: torch.optim.Optimizer,
) -> object:
    """What grown weights start with: of a step against their gradient one entry for each slot, as
    which slots were grown the host does not know."""
    if not isinstance(given, GradientStep):
        return given(one.layer, rewiring) if callable(given) else given
    if not len(one.grow):
        return 0.0
    joining = one.grow.sort().values
    pattern = SparsePattern._on_device(joining, one.layer.pattern)
    rate = learning_rate_of(optimizer, one.layer.values)
    steps = given.values(history, one.name, pattern, rate)
    place = torch.searchsorted(joining, rewiring.after._flat_on(joining.device))
    return steps.index_select(0, place.clamp_(max=len(joining) - 1))
