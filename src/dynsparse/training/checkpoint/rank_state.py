"""What belongs to one rank in a checkpoint, and which rank continues from it.

Ranks with other samples lie along z of a mesh, the tensor-parallel shards of a layer along x and y.
Random generators go to the rank with the same coordinates or, on another mesh, to all ranks with
the same samples; the history of gradients is divided again among the ranks that have samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from dynsparse._core.checks import shorten
from dynsparse.ranks import Ranks, ShardSpec
from dynsparse.training.layer_shards import find_shards
from dynsparse.training.trainer import SparseTrainer

Coordinates = tuple[int, int, int]


def gather_coordinates(ranks: Ranks) -> list[Coordinates]:
    """The coordinates of every rank along x, y and z. All ranks call this."""
    all_ranks = ranks.all_ranks
    local = torch.tensor([ranks.coordinates], device=all_ranks.device)
    rows = torch.cat(all_ranks.all_gather(local, [1] * all_ranks.size)).tolist()
    return [(x, y, z) for x, y, z in rows]


class Sources:
    """The ranks of a saved checkpoint whose generators and histories this rank continues with.

    Attributes:
        random: the rank whose generators this one continues with; None if it keeps its own.
        histories: the ranks that have histories, in the order of their samples.
        z, size: which of how many parts of the histories this rank takes.

    Args:
        saved: coordinates of the ranks that saved.
        count: number of ranks that saved.
        now: coordinates of the ranks that load.
        rank: number of this rank among them.

    Raises:
        ValueError: these are not coordinates.
    """

    def __init__(self, saved: Any, count: int, now: Sequence[Coordinates], rank: int) -> None:
        is_list = isinstance(saved, list) and len(saved) == count
        if not is_list or not all(map(_are_coordinates, saved)):
            raise ValueError(f"expected the coordinates of each rank, got {shorten(saved)}")
        firsts = {place[2]: i for i, place in enumerate(saved) if place[:2] == (0, 0)}
        if sorted(firsts) != list(range(len(firsts))) or not firsts:
            raise ValueError(f"expected ranks with samples, got {shorten(saved)}")
        self.histories = [firsts[z] for z in range(len(firsts))]
        self.z, self.size = now[rank][2], 1 + max(place[2] for place in now)
        self.random: int | None = None
        if saved == list(now):
            self.random = rank
        elif self.z < len(self.histories):
            self.random = self.histories[self.z]

    @property
    def ranks_to_read(self) -> Set[int]:
        """The ranks whose own state must be read."""
        local = set() if self.random is None else {self.random}
        if len(self.histories) == self.size:
            return local | {self.histories[self.z]}
        return local | {self.histories[0], *self.histories[self.z :: self.size]}


def _are_coordinates(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 3
        and all(type(number) is int and number >= 0 for number in value)
    )


def gather_history(trainer: SparseTrainer, ranks: Ranks) -> Any:
    """The state of the history with all features of tensor-parallel layers, on the first rank of
    those with the same samples; None on the others. All ranks call this."""
    join = _change_features(trainer, lambda shard, tensor, dim: shard.all_gather(tensor, dim))
    state = trainer.history.with_features(trainer.history.state_dict(), join)
    return state if ranks.is_lead_group() else None


def add_rank_state(
    parts: dict[str, Any],
    rank_parts: Sequence[Mapping[str, Any]],
    trainer: SparseTrainer | None,
    sources: Sources,
) -> None:
    """Add this rank's generators and history to the parts, in place.

    Args:
        rank_parts: the `collect_rank_state` of every rank that saved; only those of
            `sources.ranks_to_read` are read.
    """
    local = None if sources.random is None else rank_parts[sources.random]
    parts["random"] = None if local is None else local["random"]
    parts["generators"] = None if local is None else local["generators"]
    saved = parts["trainer"]
    if trainer is not None and isinstance(saved, dict) and "history_state" in saved:
        histories = [rank_parts[i]["history"] for i in sources.histories]
        state = trainer.history.share_of(histories, sources.z, sources.size)
        cut = _change_features(
            trainer, lambda shard, tensor, dim: shard.narrow(tensor, dim).clone()
        )
        parts["trainer"] = {**saved, "history_state": trainer.history.with_features(state, cut)}


def _change_features(trainer: SparseTrainer, change: Callable[[Any, Tensor, int], Tensor]) -> Any:
    """A `ChangeFeatures` that calls `change` for each sharded dimension."""
    shards: dict[str, ShardSpec] = {name: s.spec for name, s in find_shards(trainer.layers).items()}

    def changed(name: str, tensor: Tensor, out: int | None, into: int | None) -> Tensor:
        if name in shards:
            for shard, dim in zip(shards[name].dim_shards, (out, into), strict=True):
                if dim is not None:
                    tensor = change(shard, tensor, dim)
        return tensor

    return changed
