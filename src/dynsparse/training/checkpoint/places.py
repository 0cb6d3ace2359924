"""What is a rank's own in a checkpoint, and which rank goes on from it.

Ranks lie along z with their samples, and those of a grid of rectangles also along x and y. Random
generators go to who is at the same place, or, on another grid, to all that have the same samples;
the history of gradients is shared out anew among those that have samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from dynsparse.files.shorten import shortened
from dynsparse.ranks import Part, Ranks
from dynsparse.training.layer_shards import find_shards
from dynsparse.training.trainer import SparseTrainer

Place = tuple[int, int, int]


def places(ranks: Ranks) -> list[Place]:
    """Where every rank of everyone is, along x, y and z. All of them call this."""
    everyone = ranks.all_ranks
    own = torch.tensor([ranks.coordinates], device=everyone.device)
    rows = torch.cat(everyone.all_gather(own, [1] * everyone.size)).tolist()
    return [(x, y, z) for x, y, z in rows]


class Sources:
    """From which of the ranks that saved each part of what was theirs is taken.

    Args:
        saved: places of the ranks that saved; None: all are replicas.
        count: how many saved.
        now: places of those that load.
        rank: this one of them.

    Raises:
        ValueError: no places.
    """

    def __init__(self, saved: Any, count: int, now: Sequence[Place], rank: int) -> None:
        there = [(0, 0, z) for z in range(count)] if saved is None else saved
        if not isinstance(there, list) or len(there) != count or not all(map(_is_place, there)):
            raise ValueError(f"expected a place in a grid of each rank, got {shortened(there)}")
        firsts = {place[2]: i for i, place in enumerate(there) if place[:2] == (0, 0)}
        if sorted(firsts) != list(range(len(firsts))) or not firsts:
            raise ValueError(f"expected ranks with samples, got {shortened(there)}")
        first_of = [firsts[z] for z in range(len(firsts))]
        z = now[rank][2]
        self.size = 1 + max(place[2] for place in now)
        """How many share out the histories now; `z` is this one."""
        self.z = z
        self.histories = first_of
        """The ranks that have them, in the order of their samples."""
        self.random: int | None = first_of[z] if z < len(first_of) else None
        """Whose generators this rank goes on with; None: with its own."""
        if there == list(now):
            self.random = rank

    @property
    def wanted(self) -> Set[int]:
        """Whose part must be read."""
        own = set() if self.random is None else {self.random}
        if len(self.histories) == self.size:
            return own | {self.histories[self.z]}
        return own | {self.histories[0], *self.histories[self.z :: self.size]}


def _is_place(thing: Any) -> bool:
    return (
        isinstance(thing, tuple)
        and len(thing) == 3
        and all(type(number) is int and number >= 0 for number in thing)
    )


def whole_history(trainer: SparseTrainer, ranks: Ranks) -> Any:
    """The state of the history with all features of layers in rectangles, on the first rank of
    those with the same samples; None on the others. All ranks call this."""
    joined = _features(trainer, lambda slab, tensor, dim: slab.joined(tensor, dim))
    state = trainer.history.with_features(trainer.history.state_dict(), joined)
    return state if ranks.is_lead_group() else None


def _features(trainer: SparseTrainer, change: Callable[[Any, Tensor, int], Tensor]) -> Any:
    """A `ChangeFeatures` that asks `change` for each dimension that is cut into slabs."""
    parts: dict[str, Part] = {name: s.part for name, s in find_shards(trainer.layers).items()}

    def changed(name: str, tensor: Tensor, out: int | None, into: int | None) -> Tensor:
        if name in parts:
            for slab, dim in zip(parts[name].slabs, (out, into), strict=True):
                if dim is not None:
                    tensor = change(slab, tensor, dim)
        return tensor

    return changed


def take_own(
    parts: dict[str, Any],
    everyone: Sequence[Mapping[str, Any]],
    trainer: SparseTrainer | None,
    sources: Sources,
) -> None:
    """Put what is a rank's own among the parts.

    Args:
        parts: changed in place.
        everyone: what every rank's `own_part` was when they were saved; what is not among
            `sources.wanted` may be anything.
    """
    own = None if sources.random is None else everyone[sources.random]
    parts["random"] = None if own is None else own["random"]
    parts["generators"] = None if own is None else own["generators"]
    saved = parts["trainer"]
    if trainer is not None and isinstance(saved, dict) and "history_state" in saved:
        histories = [everyone[i]["history"] for i in sources.histories]
        state = trainer.history.share_of(histories, sources.z, sources.size)
        cut = _features(trainer, lambda slab, tensor, dim: slab.cut(tensor, dim).clone())
        parts["trainer"] = {**saved, "history_state": trainer.history.with_features(state, cut)}
