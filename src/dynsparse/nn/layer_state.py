"""The state that a layer computes with, replaced as a unit so that readers see all or nothing."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from dynsparse.nn.sharded import device_of, is_sharded
from dynsparse.ops.linear import cuda
from dynsparse.ops.linear.layer_index import LayerIndex, Read, register_index
from dynsparse.pattern import PatternIndex, SparsePattern

# Held while values and pattern of a layer change or are read together. One lock for all layers, as
# it is held only for moments.
changing = threading.RLock()


class LayerState:
    """A pattern, its index on the device of the values, and the memory of the values.

    A layer replaces its state as a unit; readers of the old one continue with it, as it keeps its
    memory alive. On other devices than the CPU the memory stays in place, so that CUDA graphs stay
    valid: the next pattern and values overwrite it, in the order of the device's work.

    Attributes:
        index: the index of the pattern. Its `row_ptr` belongs to this layer only, which
            `ops.capture` identifies by it; the rest may be shared with the pattern.
        memory: the values without their Parameter, whose memory may be replaced.
        read: index and memory as forward needs them.
        address: address of the memory, which tells whether it is still that of the values; -1 for
            sharded values.
        watched, version: a tensor of the index and its version counter, which detect writes to the
            index.
    """

    __slots__ = ("address", "index", "memory", "read", "version", "watched")

    def __init__(
        self,
        pattern: SparsePattern,
        values: Tensor,
        index: LayerIndex | None,
        row_ptr: Tensor | None = None,
    ) -> None:
        # Outside of inference mode, in which tensors have no version counter.
        with torch.inference_mode(False):
            device, sharded = device_of(values), is_sharded(values)
            if index is None or index.cols.device != device or values.shape != index.values_shape:
                # Every rank holds the full index, so keep it small: no order by columns.
                thin = sharded and device.type == "cpu"
                tensors = pattern._thin_index() if thin else pattern._index_on(device)
                if row_ptr is None or row_ptr.device != device:
                    row_ptr = tensors.row_ptr.clone()
                tensors = tensors._replace(row_ptr=row_ptr)
                index = self._make_index(tensors, values, sharded, device)
            if sharded and index.on_cpu and index.order is not None:
                pattern.forget_index()
                tensors = pattern._thin_index()._replace(row_ptr=index.index.row_ptr)
                index = self._make_index(tensors, values, sharded, device)
            if not index.on_cpu:
                cuda.derive(index)
            self.index = index
            self.memory = memory = values.detach()
            plain = index.on_cpu and not sharded and memory.dtype is torch.float32
            self.read = Read(index, memory, plain and memory.is_contiguous())
            self.address = -1 if sharded else values.data_ptr()
            self.watched = (
                index.cols if not index.cols.is_inference() else torch.empty(0, device="cpu")
            )
            self.version = self.watched._version

    @staticmethod
    def _make_index(
        tensors: PatternIndex, values: Tensor, sharded: bool, device: torch.device
    ) -> LayerIndex:
        # The number of values may be about to change.
        shape = len(tensors.cols), *values.shape[1:]
        index = LayerIndex(
            tensors, torch.empty(1, device=device).expand(shape) if sharded else values
        )
        register_index(index)
        return index

    def take(
        self, other: LayerState, pattern: SparsePattern, values: Tensor, moved: Tensor | None
    ) -> LayerState:
        """Overwrite index and values in place, and return the new state of this memory.

        Args:
            other: the state with the new index.
            pattern: the pattern of `other`.
            values: the Parameter with the values.
            moved: the new values; None if the caller sets them.
        """
        if moved is not None:
            torch._foreach_copy_([values], [moved])
        index = self.index.take(other.index)
        register_index(index)
        return LayerState(pattern, values, index)
