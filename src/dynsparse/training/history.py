"""Histories: the gradient that growth uses, of the last step or a momentum of several.

The gradient of absent weights is not stored. Each step records x and dY of every layer, from which
it is computed where it is needed; a momentum is x and dY of several steps, weighted.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dynsparse._core.checks import check_integer, check_within
from dynsparse.ops.conv.patches import are_patches, clone_view, features_of, matrices
from dynsparse.ops.grow.scores import Pair, add_rows
from dynsparse.ops.linear import grad_weight
from dynsparse.ops.linear.cuda.dense import lines_of
from dynsparse.pattern import PatternIndex, SparsePattern
from dynsparse.pattern.index_arrays import slots_of
from dynsparse.ranks import Ranks

ChangeFeatures = Callable[[str, Tensor, int | None, int | None], Tensor]
"""From a layer's name, a tensor, and the dimensions of the tensor that are the layer's out and in
features (or None) to the tensor with other features."""


class History:
    """Keeps x and dY of the steps that count. The base of all histories has no state.

    Attributes:
        window: how many steps count, up to that of the update; None for all.
        options: settings that must agree when a training is resumed; plain types.
    """

    window: int | None = 1

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def observe(self, layer: str, pairs: list[Pair]) -> None:
        """Record (x [batch, in], dY [batch, out]) of one step, one pair per micro-batch."""
        raise NotImplementedError

    def has(self, layer: str) -> bool:
        """Whether any backward pass reached the layer in these steps."""
        raise NotImplementedError

    def pairs(self, layer: str) -> list[Pair]:
        """Pairs whose dY^T X add up to the gradient; the caller may clear the list."""
        raise NotImplementedError

    def at(self, layer: str, pattern: SparsePattern) -> Tensor:
        """That gradient at the blocks of `pattern`: [nnz] or [nnz, b, b]."""
        return gradient_at(self.pairs(layer), pattern)

    def end_update(self) -> None:
        """Forget what the next update must not see. A momentum stays."""

    def snapshot(self) -> Any:
        """The state that `restore` returns to when an update fails."""
        return copy.deepcopy(self.state_dict())

    def restore(self, snapshot: Any) -> None:
        """Return to a `snapshot`."""
        self.load_state_dict(snapshot)

    def state_dict(self) -> dict[str, Any]:
        """The state that the next update needs; tensors and plain types."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""

    def share_of(self, states: Sequence[Any], rank: int, size: int) -> Any:
        """The state of rank `rank` of `size`, where every rank saved one of `states`.

        Each rank has its own samples; together they are the history. Another number of ranks takes
        over states such that the gradient, their mean, stays the same.
        """
        return states[rank] if len(states) == size else states[0]

    def with_features(self, state: Any, change: ChangeFeatures) -> Any:
        """A state whose tensors have other features of their layers."""
        return state

    def check_state(self, state: dict[str, Any], shapes: Mapping[str, tuple[int, int]]) -> None:
        """Raise ValueError unless `state` can be loaded; `shapes` are the layers' (out, in)."""


class LastStep(History):
    """The gradient of the step that ends in the update, as in RigL."""

    def __init__(self) -> None:
        super().__init__()
        self._pairs: dict[str, list[Pair]] = {}

    def observe(self, layer: str, pairs: list[Pair]) -> None:
        self._pairs[layer] = pairs

    def has(self, layer: str) -> bool:
        return bool(self._pairs.get(layer))

    def pairs(self, layer: str) -> list[Pair]:
        return self._pairs.get(layer, [])

    def end_update(self) -> None:
        self._pairs = {}

    def snapshot(self) -> dict[str, list[Pair]]:
        return dict(self._pairs)

    def restore(self, snapshot: dict[str, list[Pair]]) -> None:
        self._pairs = snapshot

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pairs = {}


class WindowMomentum(History):
    """sum over the last `window` steps of momentum^age times the gradient, exact, never dense.

    It holds x and dY of these steps: window * batch * (in + out) numbers per layer, during the
    steps before an update that count. Older steps would add a share of momentum^window.

    Source: Dettmers and Zettlemoyer 2019, "Sparse Networks from Scratch", equation 1, cut off; the
    factor 1 - momentum is left out, since it changes no rank.

    Raises:
        ValueError: a momentum outside [0, 1), a window below 1.
    """

    def __init__(self, momentum: float = 0.9, window: int = 10) -> None:
        self.momentum = float(check_within("momentum", momentum, "[0, 1)"))
        self.window: int = check_integer("window", window, 1)
        self.options = {"momentum": self.momentum, "window": self.window}
        self._steps: dict[str, deque[list[Pair]]] = {}

    def observe(self, layer: str, pairs: list[Pair]) -> None:
        # Copies: a later step may reuse an input buffer, and zero a gradient.
        copies = [(clone_view(x), clone_view(dy)) for x, dy in pairs]
        self._steps.setdefault(layer, self._deque()).append(copies)

    def _deque(self, steps: Any = ()) -> deque[list[Pair]]:
        return deque(steps, maxlen=min(self.window, sys.maxsize))

    def has(self, layer: str) -> bool:
        return any(self._steps.get(layer, ()))

    def pairs(self, layer: str) -> list[Pair]:
        newest_first = [*reversed(self._steps.get(layer, ()))]
        # Pairs loaded from a checkpoint are on the CPU.
        device = next((x.device for pairs in newest_first for x, _ in pairs), None)
        weighted = []
        for age, pairs in enumerate(newest_first):
            for x, dy in pairs:
                x, dy = x.to(device), dy.to(device)
                weighted.append((x, dy * self.momentum**age if age else dy))
        return weighted

    def state_dict(self) -> dict[str, Any]:
        return {"steps": {name: [list(p) for p in steps] for name, steps in self._steps.items()}}

    def share_of(self, states: Sequence[Any], rank: int, size: int) -> Any:
        if len(states) == size:
            return states[rank]
        merged: dict[str, list[list[Pair]]] = {}
        for name, steps in states[0]["steps"].items():
            merged[name] = [[] for _ in steps]
            for state in states[rank::size]:
                for merged_pairs, pairs in zip(merged[name], state["steps"][name], strict=True):
                    merged_pairs += [(x, dy * (size / len(states))) for x, dy in pairs]
        return {"steps": merged}

    def with_features(self, state: Any, change: ChangeFeatures) -> Any:
        return {
            "steps": {
                name: [
                    [(change(name, x, None, 1), change(name, dy, 1, None)) for x, dy in pairs]
                    for pairs in steps
                ]
                for name, steps in state["steps"].items()
            }
        }

    def snapshot(self) -> dict[str, deque[list[Pair]]]:
        return {name: steps.copy() for name, steps in self._steps.items()}

    def restore(self, snapshot: dict[str, deque[list[Pair]]]) -> None:
        self._steps = snapshot

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = {
            name: self._deque([(x, dy) for x, dy in pairs] for pairs in steps)
            for name, steps in state["steps"].items()
        }

    def check_state(self, state: dict[str, Any], shapes: Mapping[str, tuple[int, int]]) -> None:
        for name, steps in _entries(state, "steps", shapes).items():
            features = shapes[name]
            if not isinstance(steps, list) or not all(
                isinstance(pairs, list) and all(_is_pair(pair, features) for pair in pairs)
                for pairs in steps
            ):
                raise ValueError(
                    f"the momentum of layer {name!r} is not a list of steps of x and dY"
                )


class DenseMomentum(History):
    """M <- momentum M + gradient over all steps, in one dense [out, in] matrix per layer.

    This is the momentum of the paper, with the paper's cost: the memory of a dense gradient, and in
    every step the time of a dense product dY^T X. `WindowMomentum` avoids both.

    Source: Dettmers and Zettlemoyer 2019, "Sparse Networks from Scratch", equation 1, without the
    factor 1 - momentum, which changes no rank.

    Raises:
        ValueError: a momentum outside [0, 1).
    """

    window = None

    def __init__(self, momentum: float = 0.9) -> None:
        self.momentum = float(check_within("momentum", momentum, "[0, 1)"))
        self.options = {"momentum": self.momentum, "window": None}
        self._momentum: dict[str, Tensor] = {}

    def observe(self, layer: str, pairs: list[Pair]) -> None:
        if layer in self._momentum:
            self._momentum[layer].mul_(self.momentum)
        for x, dy in pairs:
            dtype = torch.float64 if torch.float64 in (x.dtype, dy.dtype) else torch.float32
            out, in_ = features_of(x, dy)
            fresh = layer not in self._momentum
            if fresh:
                self._momentum[layer] = torch.empty(out, in_, dtype=dtype, device=dy.device)
            # A momentum loaded from a checkpoint is on the CPU.
            self._momentum[layer] = self._momentum[layer].to(dy.device)
            add_rows(self._momentum[layer], [(x, dy)], 0, out, fresh)

    def has(self, layer: str) -> bool:
        return layer in self._momentum

    def pairs(self, layer: str) -> list[Pair]:
        if not self.has(layer):
            return []
        # M = I^T M: the search for the largest positions takes any pair.
        matrix = self._momentum[layer]
        return [(matrix, torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device))]

    def at(self, layer: str, pattern: SparsePattern) -> Tensor:
        matrix = self._momentum[layer]
        index = pattern._index_on(matrix.device)
        lines = lines_of(
            index.row_ptr, index.cols, index.slots, pattern.block_size, pattern.grid[1]
        )
        rows = matrix.view(-1, pattern.block_size).index_select(0, lines)
        return rows.view(pattern.values_shape)

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": dict(self._momentum)}

    def share_of(self, states: Sequence[Any], rank: int, size: int) -> Any:
        if len(states) == size:
            return states[rank]
        merged = {name: torch.zeros_like(m) for name, m in states[0]["momentum"].items()}
        for state in states[rank::size]:
            for name, matrix in state["momentum"].items():
                total = merged.setdefault(name, torch.zeros_like(matrix))
                total.add_(matrix, alpha=size / len(states))
        return {"momentum": merged}

    def with_features(self, state: Any, change: ChangeFeatures) -> Any:
        return {"momentum": {name: change(name, m, 0, 1) for name, m in state["momentum"].items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._momentum = {name: matrix.clone() for name, matrix in state["momentum"].items()}

    def check_state(self, state: dict[str, Any], shapes: Mapping[str, tuple[int, int]]) -> None:
        for name, matrix in _entries(state, "momentum", shapes).items():
            is_float = isinstance(matrix, Tensor) and matrix.is_floating_point()
            if not is_float or tuple(matrix.shape) != shapes[name]:
                raise ValueError(
                    f"the momentum of layer {name!r} must be a matrix {list(shapes[name])}"
                )


def gradient_at(pairs: Sequence[Pair], pattern: SparsePattern) -> Tensor:
    """The sum over `pairs` of dY^T X at the blocks of `pattern`: [nnz] or [nnz, b, b].

    The pattern need not be that of a layer; memory and time are in proportion to its blocks. 16-bit
    activations are accumulated in float32.

    Args:
        pairs: (x [batch, in], dY [batch, out]) of every backward pass; at least one.

    Raises:
        ValueError: no pairs.
    """
    if not pairs:
        raise ValueError("expected at least one pair (x, dY), got none: no backward pass was kept")
    tensors = [tensor for pair in pairs for tensor in pair]
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    device = tensors[0].device
    total = torch.zeros(pattern.values_shape, dtype=dtype, device=device)
    if pattern.nnz == 0:
        return total
    index = pattern._index_on(device)
    for x, dy in pairs:
        for first, left, right in matrices(x, dy, 0, pattern.shape[0]):
            left, right = left.t().to(dtype), right.to(dtype)
            if left.shape[1] == pattern.shape[0]:
                total += grad_weight(left, right, torch.empty_like(total), index)
            else:  # a group of a convolution's channels
                part, slots = _rows_of(pattern, first, left.shape[1], device)
                values = total.new_empty(len(slots), *total.shape[1:])
                total.index_add_(0, slots, grad_weight(left, right, values, part))
    return total


def _rows_of(
    pattern: SparsePattern, first: int, count: int, device: torch.device
) -> tuple[PatternIndex, Tensor]:
    """The index of the pattern's rows [first, first + count), and the slots of its entries."""
    b, width = pattern.block_size, pattern.grid[1]
    begin, end = int(pattern.row_ptr[first // b]), int(pattern.row_ptr[(first + count) // b])
    flat = pattern.sorted_flat[begin:end] - first // b * width
    part = SparsePattern.from_flat(flat, shape=(count, pattern.shape[1]), block_size=b)
    slots = slots_of(torch.arange(begin, end, device="cpu"), pattern.slots)
    return PatternIndex(*(tensor.to(device) for tensor in part.index)), slots.to(device)


def gradient_of(history: History, layer: str, pattern: SparsePattern, ranks: Ranks) -> Tensor:
    """This rank's part of the gradient at the blocks of `pattern`, zeros where only other ranks
    have one; the gradient is the sum over ranks."""
    if ranks.alone or history.has(layer):
        return history.at(layer, pattern)
    return torch.zeros(pattern.values_shape, device=ranks.device)


def _entries(state: Any, key: str, shapes: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `state[key]`, by layer name."""
    entries = state.get(key) if isinstance(state, dict) else None
    if not isinstance(entries, dict) or not entries.keys() <= shapes.keys():
        raise ValueError(f"the history must hold {key!r}, a dictionary by names of layers")
    return entries


def _is_pair(thing: Any, features: tuple[int, int]) -> bool:
    if not isinstance(thing, (list, tuple)) or len(thing) != 2:
        return False
    x, dy = thing
    if not all(isinstance(t, Tensor) and t.is_floating_point() for t in thing):
        return False
    alike = (x.dim() == dy.dim() == 2 and len(x) == len(dy)) or are_patches(x, dy)
    return alike and features_of(x, dy) == features
