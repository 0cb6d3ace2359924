"""How the connectivity changes during a training, as plain dictionaries for any logger."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynsparse._core.checks import check_types
from dynsparse.nn import SparseLinear
from dynsparse.ops.linear.naive import rows_of
from dynsparse.pattern import Rewiring
from dynsparse.pattern.on_device import fetch_scalars
from dynsparse.training.trainer import SparseTrainer


class Telemetry:
    """Figures of a trainer's updates.

    `figures()` may be called at any time and describes the last update. Keys are "layer/figure",
    and "all/figure" for all layers together; values are ints and floats.

    | figure | meaning |
    |---|---|
    | blocks, density | present now |
    | churn | share of the blocks before the last update that it dropped |
    | jaccard | blocks present before and after it / blocks present before or after it |
    | survival | share of the first pattern's blocks that were never dropped |
    | exploration | share of all positions that were ever present |
    | dead_inputs, dead_outputs | features without any connection |
    | zero_outputs | output features whose incoming weights are all zero, or that have none |

    The exploration rate is Rs of Liu et al. 2021, "Do We Actually Need Dense Over-Parameterization?
    In-Time Over-Parameterization in Sparse Training", section 3. Which positions were ever present
    is kept in one bit per position, a 32nd of a dense float32 matrix.

    An update of layers on devices is counted once it has been copied to the CPU: at a later update,
    or by `figures()`, which waits for it.

    Args:
        trainer: watched from now on, with the patterns its layers have now as the first ones.
    """

    @check_types
    def __init__(self, trainer: SparseTrainer) -> None:
        self._watched = {name: _Layer(layer) for name, layer in trainer.layers.items()}
        trainer.on_update.append(self._update)

    def _update(self, step: int, rewirings: dict[str, Rewiring]) -> None:
        for name, watched in self._watched.items():
            watched.update(rewirings.get(name))
            watched.count_pending(wait=False)

    def figures(self) -> dict[str, int | float]:
        """The figures of every layer and of all together."""
        layers = {name: watched.counts() for name, watched in self._watched.items()}
        zeros = fetch_scalars([_zero_outputs(watched.layer) for watched in self._watched.values()])
        for counts, number in zip(layers.values(), zeros, strict=True):
            counts["zero_outputs"] = int(number)
        total: dict[str, int] = {}
        for counts in layers.values():
            for key, value in counts.items():
                total[key] = total.get(key, 0) + value
        figures: dict[str, int | float] = {}
        for name, counts in {**layers, "all": total}.items():
            figures |= {f"{name}/{key}": value for key, value in _figures(counts).items()}
        return figures

    def state_dict(self) -> dict[str, Any]:
        """The state of survival, exploration and churn; tensors and plain types."""
        return {name: watched.state_dict() for name, watched in self._watched.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; load the model first.

        Raises:
            ValueError: the state of other layers.
        """
        for name, watched in self._watched.items():
            if name not in state:
                raise ValueError(f"the telemetry was saved without the layer {name!r}")
            watched.check(name, state[name])
        for name, watched in self._watched.items():
            watched.load_state_dict(state[name])


class _Layer:
    """The history of one layer."""

    def __init__(self, layer: SparseLinear) -> None:
        self.layer = layer
        pattern = layer.pattern
        self.visited = np.zeros((pattern.total + 7) // 8, np.uint8)
        self.explored = 0
        self._mark_visited(pattern.sorted_flat.numpy())
        self.first = pattern.nnz
        self.from_start = torch.ones(pattern.nnz, dtype=torch.bool, device="cpu")
        self.last = (pattern.nnz, 0, 0)  # blocks before the last update, dropped, grown
        # Updates to be counted; of one that changed nothing the number of blocks.
        self.pending: deque[Rewiring | int] = deque()

    def update(self, rewiring: Rewiring | None) -> None:
        if rewiring is not None:
            rewiring._start_host_copy()
        self.pending.append(self.layer.pattern.nnz if rewiring is None else rewiring)

    def count_pending(self, wait: bool) -> None:
        """Count the pending updates that are on the CPU; with `wait`, all of them."""
        while self.pending and (
            wait or isinstance(self.pending[0], int) or self.pending[0]._is_on_host
        ):
            self._count_update(self.pending.popleft())

    def _count_update(self, rewiring: Rewiring | int) -> None:
        if isinstance(rewiring, int):
            self.last = (rewiring, 0, 0)
            return
        grown = rewiring.grown
        self._mark_visited(rewiring.after.flat[grown].sort().values.numpy())
        self.from_start = rewiring.apply(self.from_start, False)
        kept = rewiring.after.nnz - len(grown)
        self.last = (rewiring.before.nnz, rewiring.before.nnz - kept, len(grown))

    def _mark_visited(self, flat: np.ndarray) -> None:
        """Mark sorted, distinct positions."""
        if not len(flat):
            return
        byte, bit = flat >> 3, np.left_shift(1, flat & 7).astype(np.uint8)
        self.explored += int(((self.visited[byte] & bit) == 0).sum())
        starts = np.flatnonzero(np.diff(byte, prepend=-1))
        self.visited[byte[starts]] |= np.bitwise_or.reduceat(bit, starts)

    def counts(self) -> dict[str, int]:
        """Integers that add up over layers."""
        self.count_pending(wait=True)
        pattern, (before, dropped, grown) = self.layer.pattern, self.last
        b, (height, width) = pattern.block_size, pattern.grid
        return {
            "blocks": pattern.nnz,
            "positions": pattern.total,
            "before": before,
            "dropped": dropped,
            "grown": grown,
            "first": self.first,
            "survived": int(self.from_start.sum()),
            "explored": self.explored,
            "dead_inputs": (width - len(pattern.cols.unique())) * b,
            "dead_outputs": (height - len(pattern.rows.unique())) * b,
        }

    def state_dict(self) -> dict[str, Any]:
        self.count_pending(wait=True)
        return {
            "positions": self.layer.pattern.total,
            "visited": torch.from_numpy(self.visited.copy()),
            "explored": self.explored,
            "first": self.first,
            "from_start": self.from_start.clone(),
            "last": list(self.last),
        }

    def check(self, name: str, state: dict[str, Any]) -> None:
        present = (self.layer.pattern.total, self.layer.pattern.nnz)
        saved = (state["positions"], len(state["from_start"]))
        if present != saved:
            raise ValueError(
                f"the telemetry of layer {name!r} was saved with [positions, blocks] = "
                f"{list(saved)}, the layer has {list(present)}: load the model first"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pending.clear()
        self.visited = state["visited"].cpu().numpy().copy()
        self.explored, self.first = int(state["explored"]), int(state["first"])
        self.from_start = state["from_start"].cpu().clone()
        before, dropped, grown = state["last"]
        self.last = (before, dropped, grown)


def _zero_outputs(layer: SparseLinear) -> Tensor:
    b, height = layer.block_size, layer.pattern.grid[0]
    present = layer.values.detach() != 0
    rows = present[:, None] if b == 1 else present.any(2)  # [nnz, b]
    alive: Tensor = torch.zeros(height, b, dtype=torch.int32, device=rows.device)
    alive.index_add_(0, rows_of(layer.index), rows.int())
    return (alive == 0).sum()


def _figures(counts: dict[str, int]) -> dict[str, int | float]:
    def share(part: int, total: int) -> float:
        return part / total if total else 0.0

    kept = counts["before"] - counts["dropped"]
    union = counts["before"] + counts["grown"]
    return {
        "blocks": counts["blocks"],
        "density": share(counts["blocks"], counts["positions"]),
        "churn": share(counts["dropped"], counts["before"]),
        "jaccard": kept / union if union else 1.0,
        "survival": share(counts["survived"], counts["first"]),
        "exploration": share(counts["explored"], counts["positions"]),
        "dead_inputs": counts["dead_inputs"],
        "dead_outputs": counts["dead_outputs"],
        "zero_outputs": counts["zero_outputs"],
    }
