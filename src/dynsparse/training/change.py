"""What an update does to one layer: all that can fail is checked before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynsparse.nn import SparseLinear
from dynsparse.nn.sharded import (
    gathered,
    is_sharded,
    local_part,
    local_range,
    shard_dimension,
    sharded_like,
)
from dynsparse.pattern import Rewiring
from dynsparse.pattern.on_device import sent
from dynsparse.ranks import (
    ALONE,
    DeferredError,
    Part,
    Ranks,
    collective_errors,
    follow_over_ranks,
    ranks_of,
)
from dynsparse.tracing import span
from dynsparse.training.doubts import settle
from dynsparse.training.memory import release_memory
from dynsparse.training.optimizer_state import (
    follow_later,
    moving_state,
    prepare_state,
    state_of,
)
from dynsparse.training.shards import resize_shards
from dynsparse.training.together import PatternsAfter


@dataclass(frozen=True)
class Change:
    """What an update does to one layer: everything has been checked when there is one.

    Attributes:
        layer: as it is before the update.
        rewiring: from its pattern to the next.
        fill: what grown blocks start with: a number, or [grown] or [grown, b, b].
    """

    layer: SparseLinear
    rewiring: Rewiring
    fill: float | Tensor

    @classmethod
    def planned(
        cls,
        layer: SparseLinear,
        rewiring: Rewiring,
        fill: object,
        optimizer: torch.optim.Optimizer,
    ) -> Change:
        """Raise what would raise on the way; nothing is changed.

        Raises:
            RuntimeError: sharded values that are cut in another way than by slots, or whose number
                would change.
            TypeError, ValueError: what grown weights start with does not fit.
            ValueError: optimizer state that does not follow the pattern.
        """
        values = layer.values
        if is_sharded(values):
            _check_shards(layer, rewiring)
        elif not any(values is p for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(
                "its values are not those that the optimizer holds: where fully_shard leaves them "
                "gathered after backward, call reshard() before trainer.step()"
            )
        start = check_fill(fill, rewiring, values)
        moving_state(optimizer, values, rewiring)
        return cls(layer, rewiring, start)

    @property
    def changes_size(self) -> bool:
        return not self.rewiring.keeps_size

    def prepare(self, optimizer: torch.optim.Optimizer) -> Prepared:
        """All that takes memory is made beside what is there; nothing is changed."""
        values, rewiring = self.layer.values, self.rewiring
        if is_sharded(values):
            return self._prepare_shards(optimizer)
        grads: dict[Any, Tensor] = {} if values.grad is None else {"grad": values.grad}
        parts = [
            self.layer.prepare(rewiring, self.fill),
            prepare_state(optimizer, values, rewiring),
            follow_later(grads, {0.0: list(grads)}, rewiring),
        ]

        def change_over() -> None:
            for part in parts:
                part()
            values.grad = grads.get("grad")

        return Prepared(values, [change_over])

    def _prepare_shards(self, optimizer: torch.optim.Optimizer) -> Prepared:
        """As `prepare`, where each rank holds some slots."""
        values, rewiring = self.layer.values, self.rewiring
        following: list[tuple[Tensor, float | Tensor]] = [(values, self.fill)]
        if values.grad is not None:
            following.append((values.grad, 0.0))
        state = state_of(optimizer, values)
        keys = [
            (key, fill)
            for fill, names in moving_state(optimizer, values, rewiring).items()
            for key in names
        ]
        following += [(state[key], fill) for key, fill in keys]
        if rewiring.keeps_slots:
            return self._prepare_refill(following)
        shards = [(local_part(tensor), fill) for tensor, fill in following]
        group = values.device_mesh.get_group(shard_dimension(values))  # type: ignore[attr-defined]
        tensors, fills = zip(*shards, strict=True)
        before = rewiring.before.nnz
        move = follow_over_ranks(ranks_of(group), rewiring.source, tensors, fills, before)

        def moved() -> Callable[[], None]:
            write = move()

            @torch.no_grad()
            def change_over() -> None:
                made = write()
                if not rewiring.keeps_size:
                    self._resize_shards(made, keys, state)

            return change_over

        return Prepared(values, [self.layer.prepare_moved(rewiring.after)], moved)

    def _prepare_refill(self, following: Sequence[tuple[Tensor, float | Tensor]]) -> Prepared:
        """As `_prepare_shards`, where survivors stay: each rank writes what grew in its slots."""
        values, rewiring = self.layer.values, self.rewiring
        first, last = local_range(values)
        grown = rewiring.grown
        mine = (grown >= first) & (grown < last)
        own = grown[mine] - first
        writes = []
        for tensor, fill in following:
            local = local_part(tensor)
            if isinstance(fill, Tensor) and fill.dim() == values.dim():
                fill = fill[(grown[mine] if len(fill) == len(values) else mine).to(fill.device)]
            writes.append((local, own.to(local.device), fill))

        @torch.no_grad()
        def change_over() -> None:
            for local, slots, fill in writes:
                local[slots] = fill

        return Prepared(values, [self.layer.prepare_moved(rewiring.after), change_over])

    def _resize_shards(
        self, made: Sequence[Tensor], keys: Sequence[tuple[str, float]], state: dict[Any, Any]
    ) -> None:
        """Take over shards of another length: of the values, the gradient where there is one, and
        the optimizer's state."""
        values = self.layer.values
        had_grad = values.grad is not None
        resize_shards(self.layer, self.rewiring.after.nnz)
        local_part(values.detach()).copy_(made[0])
        likes = [
            sharded_like(values, one.dtype, lambda first, last, one=one: one)  # type: ignore[misc]
            for one in made[1:]
        ]
        if had_grad:
            values.grad = likes.pop(0)
        for (key, _), one in zip(keys, likes, strict=True):
            state[key] = one


def _check_shards(layer: SparseLinear, rewiring: Rewiring) -> None:
    shard_dimension(layer.values)
    if not rewiring.keeps_size and not isinstance(layer.executor, Part):
        raise RuntimeError(
            "the values are sharded, so their number must stay, but the update leads from "
            f"{rewiring.before.nnz} to {rewiring.after.nnz} blocks: use an algorithm that keeps "
            "it, or replicas in place of shards"
        )


@dataclass
class Prepared:
    """A change that takes no more memory, so that it cannot fail in between.

    Attributes:
        values: of the layer.
        parts: what lets values, pattern, optimizer state and gradient change over; to be called
            within `uninterrupted`.
        move: of sharded values, what brings survivors to their new rank and returns one part more;
            all ranks that share them call it.
    """

    values: Tensor
    parts: list[Callable[[], None]]
    move: Callable[[], Callable[[], None]] | None = None


def prepared(
    changes: Mapping[str, Change],
    optimizer: torch.optim.Optimizer,
    ranks: Ranks = ALONE,
    patterns: PatternsAfter | None = None,
) -> Callable[[], None]:
    """What makes all layers change over; errors name the layer, and are the same on all ranks.

    Args:
        patterns: that the ranks compare on the way.
    """
    ready: list[Prepared] = []
    with collective_errors(ranks, None if patterns is None else patterns.ends):
        for name, change in changes.items():
            with naming(name), span("rewire", layer=name):
                ready.append(change.prepare(optimizer))
    if patterns is not None:
        patterns.compare()
    moving = [one for one in ready if one.move is not None]
    failed = DeferredError()
    for one in moving:
        with failed:
            assert one.move is not None
            one.parts.append(one.move())
    if moving:
        with collective_errors(ranks):
            failed.raise_pending()

    def change_over() -> None:
        for one in ready:
            with span("rewire"):
                for part in one.parts:
                    part()
                release_memory(one.values)

    return change_over


def check_fill(fill: object, rewiring: Rewiring, values: Tensor) -> float | Tensor:
    """What grown blocks start with, as a number or as a tensor like `values`.

    Raises:
        TypeError: neither a number nor a tensor of real numbers.
        ValueError: a tensor of another shape, NaN or infinity.
    """
    if isinstance(fill, Tensor):
        fill = gathered(fill.detach())
        if fill.is_complex() or fill.dtype == torch.bool:
            raise TypeError(f"grown weights must start with real numbers, got {fill.dtype}")
        block = list(values.shape[1:])
        for_all = list(fill.shape) == [rewiring.after.nnz, *block]
        if fill.dim() and not for_all and list(fill.shape) != [rewiring._grown_count, *block]:
            raise ValueError(
                "grown weights must start with a number or a tensor "
                f"{[rewiring._grown_count, *block]}, got {list(fill.shape)}"
            )
        own = local_part(values)
        fill, here = fill.to(own.dtype), fill.is_cpu
        # What a device has made for its own update is looked at there (`plan_there.py`).
        if (here or "_held" not in vars(rewiring)) and not _finite(fill):
            raise ValueError("grown weights must start with finite numbers, got NaN or infinity")
        if here and not fill.dim():
            return float(fill)
        return sent(fill, own.device) if here else fill.to(own.device)
    if not isinstance(fill, (int, float)) or isinstance(fill, bool):
        raise TypeError(f"grown weights must start with a number or a tensor, got {fill!r}")
    if not torch.isfinite(torch.tensor(fill, dtype=values.dtype)):
        raise ValueError(f"grown weights must start with finite numbers, got {fill!r}")
    return fill


def check_one_per_block(scores: Tensor, nnz: int) -> None:
    """Raise ValueError unless there is one score per block."""
    if not isinstance(scores, Tensor) or list(scores.shape) != [nnz]:
        got = list(scores.shape) if isinstance(scores, Tensor) else repr(scores)
        raise ValueError(f"expected one drop score per block, [{nnz}], got {got}")


def check_scores(scores: Tensor, nnz: int) -> Tensor:
    """Raise ValueError unless there is one score per block, and none is NaN."""
    check_one_per_block(scores, nnz)
    own = local_part(scores)
    if len(own) and bool(torch.isnan(own.min())):
        raise ValueError("drop scores hold NaN, so blocks cannot be ranked: the training diverged")
    return scores


def check_gradients(
    layers: Mapping[str, SparseLinear],
    pairs: Mapping[str, Iterable[tuple[Tensor, Tensor]]],
    alone: bool = False,
) -> None:
    """Raise ValueError, with the layer's name, where a gradient holds NaN or infinity.

    Args:
        layers: whose weights are ranked.
        pairs: x and dY by layer name, of which other gradients are made.
        alone: whether no other rank decides with this one. Then what is not on the CPU is looked at
            when it is ranked, without waiting, and told of here the next time (`doubts.py`).
    """
    settle(layers)
    for name, layer in layers.items():
        if alone and layer.is_elsewhere:
            continue
        grad = layer.values.grad
        if grad is not None and not _finite(local_part(grad)):
            raise ValueError(_NOT_FINITE.format(name=name, what="the gradient of its weights"))
        for pair in pairs.get(name, ()):
            for what, tensor in zip(("x", "dY"), pair, strict=True):
                if not _finite(tensor):
                    raise ValueError(_NOT_FINITE.format(name=name, what=what))


_NOT_FINITE = (
    "layer {name!r}: {what} holds NaN or infinity, and this step ends in a pattern update, which "
    "would rank by it: the training has diverged, or the loss is scaled too far"
)


def _finite(tensor: Tensor) -> bool:
    # The sum of finite numbers may overflow; then each is looked at. It mostly spares a pass.
    total = tensor.sum(dtype=torch.float32 if tensor.itemsize < 4 else None)
    return bool(total.isfinite()) or bool(tensor.isfinite().all())


@contextmanager
def naming(layer: str) -> Iterator[None]:
    """Errors get the name of the layer that was looked at.

    They become the cause of a ValueError, a TypeError or a RuntimeError that has it.
    """
    try:
        yield
    except Exception as error:
        if f"layer {layer!r}" in str(error):
            raise
        for kind in (ValueError, TypeError, RuntimeError):
            if isinstance(error, kind):
                raise kind(f"layer {layer!r}: {error}") from error
        raise RuntimeError(f"layer {layer!r}: {type(error).__name__}: {error}") from error
