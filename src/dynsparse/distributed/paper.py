"""Bytes on the wire and in memory on paper: what many ranks send and hold, beside dense training.

The counts are those of a ring, per rank. A test runs an update with 1,024 ranks of which only one
is there, counts what it sends, and compares.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dynsparse.checks import check_fraction, check_integer
from dynsparse.distributed.search import INDEX_BYTES, THIN_INDEX_BYTES
from dynsparse.ranks import exchanged_bytes

__all__ = ["Held", "Matrix", "Traffic", "held", "ring", "traffic"]

HISTOGRAM = 2048 * 8  # a round of a selection, of one layer: 11 bits, int64
ROUNDS = 3  # of 32-bit scores, where no two are equal


class Matrix(NamedTuple):
    """Some layers of one shape: `copies` of [out, in]."""

    out_features: int
    in_features: int
    copies: int = 1
    block_size: int = 1

    @property
    def weights(self) -> int:
        """Of all copies, dense."""
        return self.out_features * self.in_features * self.copies


class Traffic(NamedTuple):
    """Bytes that a rank sends.

    Attributes:
        dense: a step of a dense model.
        step: a step of the sparse one: the gradients of its values.
        update: a pattern update by gradient.
    """

    dense: float
    step: float
    update: float

    def less(self, interval: int) -> float:
        """How many times less than dense, with an update every `interval` steps."""
        return self.dense / (self.step + self.update / interval)


def ring(size: float, ranks: int) -> float:
    """What a rank sends in an all-reduce of `size` bytes."""
    return 2 * (ranks - 1) / ranks * size


def traffic(
    matrices: list[Matrix],
    density: float,
    ranks: int,
    *,
    samples: int,
    drop_fraction: float = 0.3,
    itemsize: int = 4,
    wire: torch.dtype | None = None,
) -> Traffic:
    """What data parallel training of these layers sends.

    Args:
        density: present blocks / all blocks.
        samples: (tokens) of a step on each rank.
        drop_fraction: share of the blocks that an update replaces.
        itemsize: bytes of a gradient that steps send.
        wire: torch.bfloat16 for pieces of the gradient at half the bytes.
    """
    check_fraction("density", density, zero=False)
    check_integer("ranks", ranks, 1)
    weights = sum(matrix.weights for matrix in matrices)
    update = 0.0
    for matrix in matrices:
        b = matrix.block_size
        shape = matrix.out_features, matrix.in_features
        exchange = min(exchanged_bytes(ranks, shape, samples * ranks, torch.float32, wire))
        blocks = shape[0] * shape[1] / b**2
        moved = drop_fraction * density * blocks
        # Those dropped, and those grown: as numbers, or as bits where these are less.
        positions = sum(min(4 * moved, among / 8) for among in (density * blocks, blocks))
        positions *= (ranks - 1) / ranks
        selections = 2 * ROUNDS * ring(HISTOGRAM, ranks)
        update += matrix.copies * (exchange + positions + selections)
    return Traffic(
        ring(itemsize * weights, ranks), ring(itemsize * density * weights, ranks), update
    )


class Held(NamedTuple):
    """Bytes that a rank holds per weight of the dense layer: values, gradient, optimizer, index.

    Attributes:
        dense: everything sharded over the ranks (FSDP2).
        sharded: the sparse layer, values sharded in the same way and the index whole.
        rectangles: the sparse layer in rectangles, which split the index, too.
    """

    dense: float
    sharded: float
    rectangles: float


def held(density: float, ranks: int, *, block_size: int = 1, states: int = 2) -> Held:
    """What one weight costs a rank in float32.

    Args:
        states: tensors of optimizer state: 2 for Adam.
    """
    check_fraction("density", density, zero=False)
    value = 4 * (2 + states)
    blocks = density / block_size**2
    return Held(
        value / ranks,
        density * value / ranks + blocks * THIN_INDEX_BYTES,
        (density * value + blocks * INDEX_BYTES) / ranks,
    )
