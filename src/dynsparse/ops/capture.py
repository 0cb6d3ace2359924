"""Captures what growth needs from backward passes: inputs and output gradients of chosen layers.

A layer is identified by the storage of its `row_ptr`: every operator receives this tensor, no two
layers share it, and nothing shards, gathers or casts it. Recording happens inside the backward
operator. So it works under torch.compile, with activation checkpointing, gradient accumulation, a
layer that is used several times in one forward pass, and under `fully_shard`, which passes other
values to backward than the layer holds.

Pairs belong to the gradient that the values hold. When a backward pass begins and that gradient has
been removed or set to zero, earlier pairs are discarded: passes without a step, as in a
learning-rate finder, do not pile up. With sharded values nothing is discarded before the step,
because `fully_shard` accumulates gradients elsewhere.
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
    """(x [batch, in], dY [batch, out]) of the backward passes that made the current gradient."""

    values: Tensor
    last_pass: int = -1
    # Version of the gradient when the last pass began; -1 if there was none, -2 before any pass.
    writes: int = -2
    storage: StorageWeakRef | None = None  # of that gradient
    added: bool = False  # whether the last pass, if it wrote, added to a gradient other than zero
    before: int = 0  # number of pairs when the last pass began

    def begin(self, backward_pass: int) -> None:
        """Begin another pass: discard pairs of a gradient that no longer exists."""
        if backward_pass == self.last_pass:
            return
        self.last_pass = backward_pass
        values = self.values
        if hasattr(values, "_local_tensor"):
            return  # a DTensor, whose gradient is accumulated elsewhere until the step
        grad = values.grad
        if grad is None:
            self.clear()
            self.writes, self.storage, self.added = -1, None, False
        else:
            # A pass writes once, or never if it is asked for other gradients only; or it makes a
            # new gradient. One of zeros may be the result of a pass, unless it added to another.
            if self._has_same_gradient(grad):
                del self[self.before :]
            elif self.added or self.writes < grad._version - 1:
                self.added = bool(grad.any())
                if not self.added:
                    self.clear()
            self.writes, self.storage = grad._version, StorageWeakRef(grad.untyped_storage())
        self.before = len(self)

    def discard_last_pass_without_gradient(self) -> None:
        """Discard the pairs of a last pass that did not write to the gradient.

        An example is `torch.autograd.grad` between `backward()` and the step.
        """
        grad = self.values.grad
        # Of a DTensor, nothing is known of the gradient: `writes` stays -1.
        if grad is not None and self._has_same_gradient(grad):
            del self[self.before :]

    def _has_same_gradient(self, grad: Tensor) -> bool:
        """Whether `grad` is as it was when the last pass began."""
        return (
            grad._version == self.writes and StorageWeakRef(grad.untyped_storage()) == self.storage
        )


# Weak, so that a capture ends with its last reference and the address may be reused.
_open: WeakValueDictionary[int, Pairs] = WeakValueDictionary()


def start(row_ptr: Tensor, values: Tensor) -> Pairs:
    """Capture x and dY of later backward passes through the layer of `row_ptr`.

    The capture lasts while the caller holds the returned pairs. Starting again discards earlier
    ones.

    Args:
        row_ptr: the row pointers of the index that the layer computes with.
        values: the Parameter of the layer, which gets the gradient.
    """
    pairs = Pairs()
    pairs.values = values
    _open[row_ptr.data_ptr()] = pairs
    return pairs


# Address of a `row_ptr` that its layer no longer computes with: its storage, which must still be
# alive for the entry to hold, and the layer's Parameter.
replaced: dict[int, tuple[StorageWeakRef, weakref.ref[Tensor]]] = {}


def replace(row_ptr: Tensor, new: Tensor, values: Tensor) -> None:
    """Record that a layer's pattern was replaced, and with it the row pointers of its index.

    An open capture continues with the next passes; earlier pairs are discarded. From now on
    `check_program` and `check_backward` refuse programs and autograd graphs that use the layer's
    values with the old row pointers.

    Args:
        row_ptr: the row pointers of the old index.
        new: the row pointers of the new index.
        values: the Parameter of the layer.
    """
    pairs = _open.pop(row_ptr.data_ptr(), None)
    if pairs is not None:
        pairs.clear()
        _open[new.data_ptr()] = pairs
    for address in [address for address, (storage, _) in replaced.items() if storage.expired()]:
        del replaced[address]
    replaced[row_ptr.data_ptr()] = StorageWeakRef(row_ptr.untyped_storage()), weakref.ref(values)
    replaced.pop(new.data_ptr(), None)


def forget_replaced(values: Tensor) -> None:
    """Drop the references to the Parameter `values` that `replace` has made."""
    for address in [a for a, (_, reference) in replaced.items() if reference() is values]:
        del replaced[address]


def _find_replacement_values(row_ptr: Tensor) -> Tensor | None:
    """Return the Parameter of the layer that has replaced `row_ptr`, or None."""
    if type(row_ptr) is not Tensor:  # a tracer's tensor has no memory
        return None
    storage, values = replaced.get(row_ptr.data_ptr(), (None, None))
    return None if storage is None or values is None or storage.expired() else values()


def _shares_memory(a: Tensor, b: Tensor) -> bool:
    return type(a) in (Tensor, torch.nn.Parameter) and a.data_ptr() == b.data_ptr()


def check_program(row_ptr: Tensor, values: Tensor) -> None:
    """Check that a product of a layer's values is not with the index of an earlier pattern.

    Exported and traced programs hold the index as a constant.

    Raises:
        RuntimeError: the pattern has changed since the program was made.
    """
    if not replaced:
        return
    current = _find_replacement_values(row_ptr)
    if current is not None and _shares_memory(values, current):
        raise RuntimeError(
            "the pattern of a sparse layer has changed since this program was exported or traced, "
            "so its values no longer belong to the pattern in the program: export or trace the "
            "model again"
        )


def check_backward(row_ptr: Tensor, values: Tensor, node: Any = None) -> None:
    """Check that a backward pass is not with the index of an earlier pattern.

    Autograd's own check of versions does not see it where checkpointing recomputes tensors or hooks
    replace them.

    Args:
        row_ptr: the row pointers of the forward pass's index.
        values: the values that backward gets.
        node: the autograd node that receives the gradient of the values.

    Raises:
        RuntimeError: the pattern has changed since the forward pass.
    """
    if not replaced:
        return
    current = _find_replacement_values(row_ptr)
    if current is None:
        return
    if _shares_memory(values, current) or getattr(node, "variable", None) is current:
        raise RuntimeError(CHANGED)


def is_open(row_ptr: Tensor) -> bool:
    """Whether pairs of this layer are captured; otherwise a backward pass need not make them."""
    return bool(_open) and row_ptr.data_ptr() in _open


def hide(index: PatternIndex) -> PatternIndex:
    """Return an index whose passes are not recorded, for transforms of `torch.func`."""
    return index._replace(row_ptr=index.row_ptr.clone()) if _open else index


def needs_check(row_ptr: Tensor) -> bool:
    """Whether a backward pass must find out which gradients are needed.

    It must if a capture is open, or if the pass may be one half of the two that torch's pipelines
    make.
    """
    return is_open(row_ptr) or "torch.distributed.pipelining" in sys.modules


def record(row_ptr: Tensor, x: Tensor, dy: Tensor) -> None:
    """Append the pair of a backward pass; the caller must not write to the tensors."""
    if _open and (pairs := _open.get(row_ptr.data_ptr())) is not None:
        pairs.begin(backward_pass())
        pairs.append((x, dy))
