"""Keeps what growth needs from a backward pass: the inputs and output gradients of chosen layers.

The key is the storage of `row_ptr`, the one tensor of a layer that every operator is given and that
nothing shards, gathers or casts; each layer has one of its own. The recording happens inside the
backward operator. So it also works under torch.compile, with activation checkpointing, with
gradient accumulation, for a layer used several times in one forward pass, and where `fully_shard`
hands backward other values than those that the layer holds.

Pairs belong to the gradient that the values hold. When a backward pass begins and that has been
taken away or set to zero, the earlier passes count for nothing any more, and what they left is
forgotten: passes without a step, as those of a learning-rate finder, do not pile up. Where values
are sharded nothing is forgotten before the step, as `fully_shard` adds up gradients out of sight.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dynsparse.ops.torch_internals import backward_pass
from dynsparse.pattern import PatternIndex

CHANGED = (
    "the values or the pattern of a sparse layer have changed between forward and backward (were "
    "modified by an inplace operation): call backward before the optimizer's step and the update"
)


class Pairs(list[tuple[Tensor, Tensor]]):
    """(x [batch, in], dY [batch, out]) of the backward passes that made the present gradient."""

    values: weakref.ref[Tensor]
    last_pass: int = -1
    writes: int = -1  # to the gradient, when the last pass began; -1 where there was none
    before: int = 0  # pairs, when the last pass began

    def begin(self, backward_pass: int) -> None:
        """Forget what belongs to a gradient that is gone, when another pass begins."""
        if backward_pass == self.last_pass:
            return
        self.last_pass = backward_pass
        values = self.values()
        if hasattr(values, "_local_tensor"):
            return  # a DTensor: where its gradient is added up until then, nobody is told
        grad = None if values is None else values.grad
        if grad is None:
            self.clear()
            self.writes = -1
        else:
            # A pass writes once, or not at all where it was asked for other gradients. A gradient
            # of zeros may be one that came out as zeros.
            if grad._version == self.writes:
                del self[self.before :]
            elif 0 <= self.writes < grad._version - 1 and not bool(grad.any()):
                self.clear()
            self.writes = grad._version
        self.before = len(self)


# Weak, so that a capture nobody waits for any more ends, and its address may be used again.
_open: WeakValueDictionary[int, Pairs] = WeakValueDictionary()


def start(row_ptr: Tensor, values: Tensor) -> Pairs:
    """From now on, keep x and dY of the backward passes through the layer of `row_ptr`.

    The capture lasts until `take` or `stop`, and only as long as the caller holds what is returned
    here. Starting again forgets what was kept so far.

    Args:
        row_ptr: of the index that the layer computes with.
        values: the Parameter of the layer, which gets the gradient.
    """
    pairs = Pairs()
    pairs.values = weakref.ref(values)
    _open[row_ptr.data_ptr()] = pairs
    return pairs


def take(row_ptr: Tensor) -> list[tuple[Tensor, Tensor]]:
    """End the capture; the pairs (x [batch, in], dY [batch, out]), one per backward pass since."""
    pairs = _open.pop(row_ptr.data_ptr(), None)
    if pairs is None:
        return []
    kept = list(pairs)
    pairs.clear()  # so that the memory is free as soon as the caller is done with them
    return kept


# Address of a `row_ptr` that its layer no longer computes with: its storage, which must still be
# alive for the entry to hold, and the layer's Parameter.
_replaced: dict[int, tuple[StorageWeakRef, weakref.ref[Tensor]]] = {}


def replace(row_ptr: Tensor, new: Tensor, values: Tensor) -> None:
    """The layer with the Parameter `values` has another pattern, whose index has the row pointers
    `new`. An open capture goes on with the passes to come; pairs kept so far are forgotten.

    Programs and autograd graphs that still hold `row_ptr` are refused from now on where they use
    the layer's values: see `check_program` and `check_backward`.
    """
    pairs = _open.pop(row_ptr.data_ptr(), None)
    if pairs is not None:
        pairs.clear()
        _open[new.data_ptr()] = pairs
    for address in [address for address, (storage, _) in _replaced.items() if storage.expired()]:
        del _replaced[address]
    _replaced[row_ptr.data_ptr()] = StorageWeakRef(row_ptr.untyped_storage()), weakref.ref(values)
    _replaced.pop(new.data_ptr(), None)


def _values_after_replacement(row_ptr: Tensor) -> Tensor | None:
    """The Parameter of the layer that has replaced `row_ptr`; None where no layer has."""
    if type(row_ptr) is not Tensor:  # of a tracer: it has no memory
        return None
    storage, values = _replaced.get(row_ptr.data_ptr(), (None, None))
    return None if storage is None or values is None or storage.expired() else values()


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return type(a) in (Tensor, torch.nn.Parameter) and a.data_ptr() == b.data_ptr()


def check_program(row_ptr: Tensor, values: Tensor) -> None:
    """Refuse a product of a layer's present values with an index of an earlier pattern, which an
    exported or traced program holds as a constant.

    Raises:
        RuntimeError: the pattern has changed since the program was made.
    """
    if not _replaced:
        return
    current = _values_after_replacement(row_ptr)
    if current is not None and _share_memory(values, current):
        raise RuntimeError(
            "the pattern of a sparse layer has changed since this program was exported or traced, "
            "so its values no longer belong to the pattern in the program: export or trace the "
            "model again"
        )


def check_backward(row_ptr: Tensor, values: Tensor, node: Any = None) -> None:
    """Refuse a backward pass with an index of an earlier pattern. Autograd's own check of versions
    does not see it where checkpointing recomputes tensors or hooks replace them.

    Args:
        row_ptr: of the index of the forward pass.
        values: as backward gets them.
        node: of autograd, which receives the gradient of the values.

    Raises:
        RuntimeError: the pattern has changed since the forward pass.
    """
    if not _replaced:
        return
    current = _values_after_replacement(row_ptr)
    if current is None:
        return
    if _share_memory(values, current) or getattr(node, "variable", None) is current:
        raise RuntimeError(CHANGED)


def stop(row_ptr: Tensor) -> None:
    """End the capture and forget what was kept."""
    take(row_ptr)


def is_open(row_ptr: Tensor) -> bool:
    """Whether somebody waits for pairs of this layer: lets a backward pass skip making them."""
    return bool(_open) and row_ptr.data_ptr() in _open


def hide(index: PatternIndex) -> PatternIndex:
    """An index whose passes are not recorded; transforms of `torch.func` use it."""
    return index._replace(row_ptr=index.row_ptr.clone()) if _open else index


def needs_check(row_ptr: Tensor) -> bool:
    """Whether a backward pass must find out which gradients it is asked for: a capture is open, or
    the pass may be one of two halves, which only torch's pipelines ask for."""
    return (
        bool(_open) and row_ptr.data_ptr() in _open
    ) or "torch.distributed.pipelining" in sys.modules


def record(row_ptr: Tensor, x: Tensor, dy: Tensor) -> None:
    """Called by backward passes; the tensors must stay as they are until the capture is taken."""
    if _open and (pairs := _open.get(row_ptr.data_ptr())) is not None:
        pairs.begin(backward_pass())
        pairs.append((x, dy))
