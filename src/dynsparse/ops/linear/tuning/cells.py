"""Which layers are measured, and how long their kernels take."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import NamedTuple

import torch

from dynsparse.ops.linear import choice
from dynsparse.ops.linear.costs import Layer
from dynsparse.ops.linear.kernels import dense, small, sparse
from dynsparse.ops.linear.layer_index import LayerIndex
from dynsparse.pattern import SparsePattern

KINDS = {"sparse": sparse, "small": small, "dense": dense}


class Cell(NamedTuple):
    """A layer [out, in] and a batch."""

    out_features: int
    in_features: int
    block_size: int
    density: float
    batch: int


class Timing(NamedTuple):
    """What the kinds took for a layer: nanoseconds by kind, forward or both gradients."""

    layer: Layer
    batch: int
    backward: bool
    times: dict[str, float]


# Some of every family, small and large, about as many on either side of the break-evens.
QUICK = tuple(
    Cell(*one)
    for one in (
        (256, 256, 1, 0.1, 16), (256, 256, 1, 0.5, 128), (300, 784, 1, 0.2, 64),
        (1024, 1024, 1, 0.05, 8), (1024, 1024, 1, 0.1, 128), (1024, 1024, 1, 0.5, 64),
        (1024, 1024, 1, 0.3, 2), (2048, 2048, 1, 0.1, 16), (512, 512, 1, 0.4, 256),
        (256, 256, 4, 0.3, 16), (512, 512, 4, 0.1, 128), (512, 512, 4, 0.6, 256),
        (1024, 1024, 4, 0.3, 2), (1024, 1024, 8, 0.2, 32),
        (256, 256, 16, 0.3, 16), (512, 512, 16, 0.1, 128), (512, 512, 32, 0.6, 256),
        (1024, 1024, 16, 0.3, 2), (1024, 1024, 32, 0.2, 32),
    )
)  # fmt: skip

_LAYERS = ((256, 256), (300, 784), (1024, 1024), (2048, 2048))
_BLOCKS = (1, 4, 16, 32)
_DENSITIES = (0.03, 0.1, 0.3, 0.6)
_BATCHES = (1, 4, 16, 64, 128, 512)
_MOST_WORK = (
    600_000_000  # multiply-adds of the dense product; larger cells follow from smaller ones
)


def _many() -> tuple[Cell, ...]:
    found = [
        Cell(out, in_, block, density, batch)
        for (out, in_), block, density, batch in product(_LAYERS, _BLOCKS, _DENSITIES, _BATCHES)
        if out % block == in_ % block == 0 and out * in_ * batch <= _MOST_WORK
    ]
    # In an order in which every beginning is a sample of all.
    random.Random(0).shuffle(found)
    return tuple(found)


MANY = _many()


def rounds(cell: Cell, most: int) -> Iterator[list[Timing]]:
    """Time all kinds of a cell in turn, forward and backward, a round at each step.

    Between two steps the caller may do something else. What stands in the way of this process is in
    all kinds alike, and most of it is gone from the least of several rounds.

    Args:
        most: rounds.

    Yields:
        Nothing when all is made, and when each kind has run once, which makes memory and indexes.
        Then the least times so far, on one thread, forward and backward.
    """
    generator = torch.Generator().manual_seed(0)
    with _plainly():
        pattern = SparsePattern.random(
            (cell.out_features, cell.in_features),
            cell.density,
            block_size=cell.block_size,
            generator=generator,
        )
        values = _drawn(pattern.values_shape, generator)
        p = LayerIndex(pattern.index, values)
        x = _drawn((cell.batch, cell.in_features), generator)
        dy = _drawn((cell.batch, cell.out_features), generator)
        bias = _drawn((cell.out_features,), generator)
    layer = Layer(cell.out_features, cell.in_features, pattern.nnz, cell.block_size)
    kinds = choice.candidates(layer, cell.batch)
    if "dense" not in kinds:
        kinds.append("dense")  # its time hardly depends on the density
    calls: list[dict[str, Callable[[], object]]] = [
        {k: lambda m=KINDS[k]: m.forward(x, values, p, bias) for k in kinds},  # type: ignore[misc]
        {
            k: lambda m=KINDS[k]: m.backward(dy, x, values, p, True, True)  # type: ignore[misc]
            for k in kinds
        },
    ]
    yield []
    least: list[dict[str, float]] = [{}, {}]
    for turn in range(most + 1):
        with _plainly():
            for found, by_kind in zip(least, calls, strict=True):
                for kind, call in by_kind.items():
                    begin = time.perf_counter_ns()
                    call()
                    spent = float(time.perf_counter_ns() - begin)
                    if turn:
                        found[kind] = min(spent, found.get(kind, spent))
        yield (
            [
                Timing(layer, cell.batch, bool(backward), dict(found))
                for backward, found in enumerate(least)
            ]
            if turn
            else []
        )


@contextmanager
def _plainly() -> Iterator[None]:
    """On one thread, without gradients and autocast, whatever the training around it has on.

    Several threads wait for each other wherever something else runs, which says nothing of kernels.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_num_threads(threads)


def _drawn(shape: tuple[int, ...] | torch.Size, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
