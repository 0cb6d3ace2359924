"""Keeps what growth needs from a backward pass: the inputs and output gradients of chosen layers.

The key is the storage of a layer's values, and the recording happens inside the backward operator.
So it also works under torch.compile, with activation checkpointing, with gradient accumulation and
for a layer used several times in one forward pass.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from torch import Tensor

__all__ = ["Pairs", "is_open", "start", "stop", "take"]


class Pairs(list[tuple[Tensor, Tensor]]):
    """(x [batch, in], dY [batch, out]) of every backward pass since the capture began."""


# Weak, so that a capture nobody waits for any more ends, and its address may be used again.
_open: WeakValueDictionary[int, Pairs] = WeakValueDictionary()


def start(values: Tensor) -> Pairs:
    """From now on, keep x and dY of every backward pass through the layer that holds `values`.

    The capture lasts until `take` or `stop`, and only as long as the caller holds what is returned
    here. Starting again forgets what was kept so far. An empty tensor has nothing to capture.
    """
    pairs = Pairs()
    if values.numel():
        _open[values.data_ptr()] = pairs
    return pairs


def take(values: Tensor) -> list[tuple[Tensor, Tensor]]:
    """End the capture; the pairs (x [batch, in], dY [batch, out]), one per backward pass since."""
    pairs = _open.pop(values.data_ptr(), None) if values.numel() else None
    if pairs is None:
        return []
    kept = list(pairs)
    pairs.clear()  # so that the memory is free as soon as the caller is done with them
    return kept


def stop(values: Tensor) -> None:
    """End the capture and forget what was kept."""
    take(values)


def is_open(values: Tensor) -> bool:
    """Whether somebody waits for pairs of this layer: lets a backward pass skip making them."""
    return bool(_open) and values.data_ptr() in _open


def record(values: Tensor, x: Tensor, dy: Tensor) -> None:
    """Called by backward passes; the tensors must stay as they are until the capture is taken."""
    if _open and (pairs := _open.get(values.data_ptr())) is not None:
        pairs.append((x, dy))
