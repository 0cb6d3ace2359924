"""Keeps what growth needs from a backward pass: the inputs and output gradients of chosen layers.

The key is the storage of a layer's values, and the recording happens inside the backward operator.
So it also works under torch.compile, with activation checkpointing, with gradient accumulation and
for a layer used several times in one forward pass.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["start", "stop", "take"]

_open: dict[int, list[tuple[Tensor, Tensor]]] = {}


def start(values: Tensor) -> None:
    """From now on, keep x and dY of every backward pass through the layer that holds `values`.

    Starting again forgets what was kept so far. An empty tensor has nothing to capture.
    """
    if values.numel():
        _open[values.data_ptr()] = []


def take(values: Tensor) -> list[tuple[Tensor, Tensor]]:
    """End the capture; the pairs (x [batch, in], dY [batch, out]), one per backward pass since."""
    return _open.pop(values.data_ptr(), []) if values.numel() else []


def stop(values: Tensor) -> None:
    """End the capture and forget what was kept."""
    take(values)


def record(values: Tensor, x: Tensor, dy: Tensor) -> None:
    """Called by the backward operator. Copies, since compiled code may reuse both buffers."""
    if _open and (pairs := _open.get(values.data_ptr())) is not None:
        pairs.append((x.detach().clone(), dy.detach().clone()))
