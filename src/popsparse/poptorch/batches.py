"""A combined batch in parts, and the outputs of its parts as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from popsparse.poptorch.modes import OutputMode
from popsparse.poptorch.options import Options

__all__ = ["Outputs", "parts_of", "synthetic"]


def parts_of(arguments: Any, count: int, meaning: str) -> list[Any]:
    """`arguments`, any tree of tensors with one first dimension, in `count` equal parts.

    Raises:
        ValueError: no tensor, tensors of different lengths, a length that `count` does not divide;
            `meaning` says what count is made of.
    """
    leaves, tree = pytree.tree_flatten(arguments)
    sizes = sorted({leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim})
    if not sizes:
        raise ValueError("expected a combined batch of tensors with samples, got none")
    if len(sizes) > 1:
        raise ValueError(
            f"the tensors of a combined batch must have one length, got {sizes[0]} and {sizes[1]}"
        )
    if sizes[0] == 0 or sizes[0] % count:
        raise ValueError(
            f"a combined batch must be a multiple of {meaning}, got {sizes[0]} samples: set these "
            "options, or take batches from poptorch.DataLoader"
        )
    size = sizes[0] // count
    columns = [
        leaf.split(size) if isinstance(leaf, Tensor) and leaf.ndim else (leaf,) * count
        for leaf in leaves
    ]
    return [pytree.tree_unflatten(list(row), tree) for row in zip(*columns, strict=True)]


def synthetic(arguments: Any) -> Any:
    """Normally distributed numbers in place of floating-point data, zeros in place of others."""

    def other(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.randn_like(leaf) if leaf.is_floating_point() else torch.zeros_like(leaf)

    return pytree.tree_map(other, arguments)


class Outputs:
    """What a call returns of the outputs of its batches, which come one by one.

    Tensors with samples are joined along them, in the order of the data; a single number becomes
    one per batch that is returned, or stays one where that is the only batch.
    """

    def __init__(self, options: Options, mode: OutputMode, per_iteration: int) -> None:
        self._mode = mode
        self._every = options.output_every if mode is OutputMode.EveryN else 1
        self._iterations = options.device_iterations
        self._replicas = options.replication_factor
        self._per_iteration = per_iteration
        self._seen = 0
        self._kept: list[Any] = []

    def add(self, output: Any) -> None:
        """The output of the next batch, without its graph where it is kept."""
        iteration, inside = divmod(self._seen, self._per_iteration)
        self._seen += 1
        if self._mode is OutputMode.Sum and self._kept:
            self._kept[0] = pytree.tree_map(torch.add, self._kept[0], _detached(output))
        elif self._mode is OutputMode.Final:
            # The last batch of every replica.
            share = self._per_iteration // self._replicas
            if iteration == self._iterations - 1 and inside % share == share - 1:
                self._kept.append(_detached(output))
        elif self._mode is not OutputMode.EveryN or (iteration + 1) % self._every == 0:
            self._kept.append(_detached(output))

    def joined(self) -> Any:
        return self._kept[0] if len(self._kept) == 1 else _joined(self._kept)


def _detached(output: Any) -> Any:
    return pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, output)


def _joined(outputs: Sequence[Any]) -> Any:
    trees = [pytree.tree_flatten(output) for output in outputs]
    columns = zip(*(leaves for leaves, _ in trees), strict=True)
    return pytree.tree_unflatten([_column(column) for column in columns], trees[0][1])


def _column(column: Sequence[Any]) -> Any:
    if not isinstance(column[0], Tensor):
        return list(column)
    return torch.cat(tuple(column)) if column[0].ndim else torch.stack(tuple(column))
