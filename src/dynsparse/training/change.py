"""The change of one layer in an update: checked, prepared, and only then applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from dynsparse.pattern.on_device import to_device
from dynsparse.ranks import (
    ALONE,
    DeferredError,
    Ranks,
    ShardSpec,
    chunk_of,
    collective_errors,
    ranks_of,
)
from dynsparse.tracing import span
from dynsparse.training.deferred_checks import is_finite, layer_errors
from dynsparse.training.layer_shards import resize_shards
from dynsparse.training.memory import release_memory
from dynsparse.training.optimizer_state import (
    StateEntry,
    prepare_tensors,
    state_entries,
)
from dynsparse.training.rank_consistency import PatternComparison


@dataclass(frozen=True)
class Change:
    """The checked change of one layer.

    Attributes:
        layer: in its state before the update.
        rewiring: from its pattern to the next.
        fill: initial values of grown blocks: a number, or [grown] or [grown, b, b].
        entries: the optimizer's state with an entry per block.
    """

    layer: SparseLinear
    rewiring: Rewiring
    fill: float | Tensor
    entries: list[StateEntry]

    @classmethod
    def plan(
        cls,
        layer: SparseLinear,
        rewiring: Rewiring,
        fill: object,
        optimizer: torch.optim.Optimizer,
    ) -> Change:
        """Check a change; nothing is changed.

        Raises:
            RuntimeError: values that are sharded in another way than by slots, or whose number
                would change; values that the optimizer does not hold.
            TypeError, ValueError: initial values of grown weights that do not fit.
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
        checked = check_fill(fill, rewiring, values)
        return cls(layer, rewiring, checked, state_entries(optimizer, values, rewiring))

    @property
    def changes_size(self) -> bool:
        return not self.rewiring.keeps_size

    def prepare(self) -> PreparedChange:
        """Allocate everything beside the present state; nothing is changed."""
        values, rewiring = self.layer.values, self.rewiring
        if is_sharded(values):
            return self._prepare_shards()
        grads: dict[Any, Tensor] = {} if values.grad is None else {"grad": values.grad}
        of_grads = [StateEntry(grads, key, grad, 0.0) for key, grad in grads.items()]
        entries = [*self.entries, *of_grads]
        parts = [self.layer.prepare(rewiring, self.fill), prepare_tensors(entries, rewiring)]

        def apply() -> None:
            for part in parts:
                part()
            values.grad = grads.get("grad")

        return PreparedChange(values, [apply])

    def _prepare_shards(self) -> PreparedChange:
        """As `prepare`, where each rank holds some slots."""
        values, rewiring = self.layer.values, self.rewiring
        following: list[tuple[Tensor, float | Tensor]] = [(values, self.fill)]
        if values.grad is not None:
            following.append((values.grad, 0.0))
        following += [(entry.tensor, entry.fill) for entry in self.entries]
        if rewiring.keeps_slots:
            return self._prepare_refill(following)
        group = values.device_mesh.get_group(shard_dimension(values))  # type: ignore[attr-defined]
        first, last = chunk_of(ranks_of(group), rewiring.after.nnz)

        @torch.no_grad()
        def move_then_apply() -> Callable[[], None]:
            shards = [
                rewiring.apply(gathered(tensor.detach()), fill)[first:last].clone()
                for tensor, fill in following
            ]

            @torch.no_grad()
            def apply() -> None:
                if not rewiring.keeps_size:
                    self._resize_shards(shards)
                    return
                for (tensor, _), shard in zip(following, shards, strict=True):
                    local_part(tensor).copy_(shard)

            return apply

        return PreparedChange(values, [self.layer.prepare_moved(rewiring.after)], move_then_apply)

    def _prepare_refill(self, following: Sequence[tuple[Tensor, float | Tensor]]) -> PreparedChange:
        """As `_prepare_shards`, where survivors stay: each rank fills its own grown slots."""
        values, rewiring = self.layer.values, self.rewiring
        first, last = local_range(values)
        grown = rewiring.grown
        is_local = (grown >= first) & (grown < last)
        local_slots = grown[is_local] - first
        writes = []
        for tensor, fill in following:
            local = local_part(tensor)
            if isinstance(fill, Tensor) and fill.dim() == values.dim():
                index = grown[is_local] if len(fill) == len(values) else is_local
                fill = fill[index.to(fill.device)]
            writes.append((local, local_slots.to(local.device), fill))

        @torch.no_grad()
        def apply() -> None:
            for local, slots, fill in writes:
                local[slots] = fill

        return PreparedChange(values, [self.layer.prepare_moved(rewiring.after), apply])

    def _resize_shards(self, shards: Sequence[Tensor]) -> None:
        """Apply shards of another length: of the values, the gradient where there is one, and the
        optimizer's state."""
        values = self.layer.values
        had_grad = values.grad is not None
        resize_shards(self.layer, self.rewiring.after.nnz)
        local_part(values.detach()).copy_(shards[0])
        full = [
            sharded_like(values, shard.dtype, lambda first, last, shard=shard: shard)  # type: ignore[misc]
            for shard in shards[1:]
        ]
        if had_grad:
            values.grad = full.pop(0)
        for entry, tensor in zip(self.entries, full, strict=True):
            entry.state[entry.key] = tensor


def _check_shards(layer: SparseLinear, rewiring: Rewiring) -> None:
    shard_dimension(layer.values)
    if not rewiring.keeps_size and not isinstance(layer.executor, ShardSpec):
        raise RuntimeError(
            "the values are sharded, so their number must stay, but the update leads from "
            f"{rewiring.before.nnz} to {rewiring.after.nnz} blocks: use an algorithm that keeps "
            "it, or replicas in place of shards"
        )


@dataclass
class PreparedChange:
    """A change that needs no more memory, so that it cannot fail halfway.

    Attributes:
        values: of the layer.
        parts: functions that apply values, pattern, optimizer state and gradient; to be called
            within `uninterrupted`.
        move: for sharded values whose survivors change their slots: gathers them, and returns one
            part more; all ranks of the shards call it.
    """

    values: Tensor
    parts: list[Callable[[], None]]
    move: Callable[[], Callable[[], None]] | None = None


def prepare_changes(
    changes: Mapping[str, Change],
    ranks: Ranks = ALONE,
    comparison: PatternComparison | None = None,
) -> Callable[[], None]:
    """Returns the function that applies the changes of all layers; errors name the layer, and are
    the same on all ranks.

    Args:
        comparison: of the new patterns over ranks, in the same collective.
    """
    prepared: list[PreparedChange] = []
    with collective_errors(ranks, None if comparison is None else comparison.numbers):
        for name, change in changes.items():
            with layer_errors(name), span("rewire", layer=name):
                prepared.append(change.prepare())
    if comparison is not None:
        comparison.compare()
    moving = [change for change in prepared if change.move is not None]
    failed = DeferredError()
    for moved in moving:
        with failed:
            assert moved.move is not None
            moved.parts.append(moved.move())
    if moving:
        with collective_errors(ranks):
            failed.raise_pending()

    def apply() -> None:
        for ready in prepared:
            with span("rewire"):
                for part in ready.parts:
                    part()
                release_memory(ready.values)

    return apply


def check_fill(fill: object, rewiring: Rewiring, values: Tensor) -> float | Tensor:
    """Initial values of grown blocks, as a number or as a tensor like `values`.

    Raises:
        TypeError: neither a number nor a tensor of real numbers.
        ValueError: a tensor of another shape, NaN or infinity.
    """
    if isinstance(fill, Tensor):
        fill = gathered(fill.detach())
        if fill.is_complex() or fill.dtype == torch.bool:
            raise TypeError(f"grown weights must start with real numbers, got {fill.dtype}")
        block = list(values.shape[1:])
        per_slot = list(fill.shape) == [rewiring.after.nnz, *block]
        if fill.dim() and not per_slot and list(fill.shape) != [rewiring._grown_count, *block]:
            raise ValueError(
                "grown weights must start with a number or a tensor "
                f"{[rewiring._grown_count, *block]}, got {list(fill.shape)}"
            )
        local = local_part(values)
        fill, on_host = fill.to(local.dtype), fill.is_cpu
        # A device checks values for its own update (`update_on_device.py`).
        if (on_host or "_device_source" not in vars(rewiring)) and not is_finite(fill):
            raise ValueError("grown weights must start with finite numbers, got NaN or infinity")
        if on_host and not fill.dim():
            return float(fill)
        return to_device(fill, local.device) if on_host else fill.to(local.device)
    if not isinstance(fill, (int, float)) or isinstance(fill, bool):
        raise TypeError(f"grown weights must start with a number or a tensor, got {fill!r}")
    if not torch.isfinite(torch.tensor(fill, dtype=values.dtype, device="cpu")):
        raise ValueError(f"grown weights must start with finite numbers, got {fill!r}")
    return fill
