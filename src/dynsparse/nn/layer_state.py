"""What a layer computes with at one time, as one object: a reader sees all of it or none."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from dynsparse.nn.sharded import device_of, is_sharded
from dynsparse.ops.linear import cuda
from dynsparse.ops.linear.layer_index import LayerIndex, Read, register_index
from dynsparse.pattern import PatternIndex, SparsePattern

# Held where values and pattern of a layer change, or are looked at afresh. One for all layers: it
# is held for moments.
changing = threading.RLock()


class LayerState:
    """A pattern, its index on the device of the values, and the memory of the values.

    A layer replaces its state whole. Who took the old one goes on with it: it keeps alive what it
    points to. Off the CPU the memory stays, so that CUDA graphs that read it stay valid: the next
    pattern and values are written over those before, in the order of the device's work.

    Attributes:
        index: of the pattern. Its `row_ptr` is this layer's alone, by which `ops.capture` knows it;
            the rest may be the pattern's own memory.
        memory: the values without their Parameter, which may be given other memory meanwhile.
        read: index and memory as forward takes them.
        address: of the memory, by which the layer knows that it still is that of its values; -1
            where these are sharded, until they are gathered.
        watched, version: a tensor of the index, and how often it had been written to: patterns do
            not change, and an index that somebody writes to is refused.
    """

    __slots__ = ("address", "index", "memory", "read", "version", "watched")

    def __init__(
        self,
        pattern: SparsePattern,
        values: Tensor,
        index: LayerIndex | None,
        row_ptr: Tensor | None = None,
    ) -> None:
        # Outside of inference mode, where tensors do not count how often they are written to.
        with torch.inference_mode(False):
            device, sharded = device_of(values), is_sharded(values)
            if index is None or index.cols.device != device or values.shape != index.values_shape:
                # What each rank holds whole shall be little: backward makes the order by columns.
                thin = sharded and device.type == "cpu"
                tensors = pattern._thin_index() if thin else pattern._index_on(device)
                if row_ptr is None or row_ptr.device != device:
                    row_ptr = tensors.row_ptr.clone()
                tensors = tensors._replace(row_ptr=row_ptr)
                index = self._of(tensors, values, sharded, device)
            if sharded and index.on_cpu and index.order is not None:
                pattern.forget_index()
                tensors = pattern._thin_index()._replace(row_ptr=index.index.row_ptr)
                index = self._of(tensors, values, sharded, device)
            if not index.on_cpu:
                cuda.derive(index)
            self.index = index
            self.memory = memory = values.detach()
            plain = index.on_cpu and not sharded and memory.dtype is torch.float32
            self.read = Read(index, memory, plain and memory.is_contiguous())
            self.address = -1 if sharded else values.data_ptr()
            self.watched = index.cols if not index.cols.is_inference() else torch.empty(0)
            self.version = self.watched._version

    @staticmethod
    def _of(
        tensors: PatternIndex, values: Tensor, sharded: bool, device: torch.device
    ) -> LayerIndex:
        # Their number may be about to change.
        shape = len(tensors.cols), *values.shape[1:]
        index = LayerIndex(
            tensors, torch.empty(1, device=device).expand(shape) if sharded else values
        )
        register_index(index)
        return index

    def take(
        self, other: LayerState, pattern: SparsePattern, values: Tensor, moved: Tensor | None
    ) -> LayerState:
        """Write the index of another state over this one's, and other values over the values; the
        state of this memory from now on.

        Args:
            pattern: of the other state.
            values: the Parameter that holds the values.
            moved: what they become; None where others see to them.
        """
        if moved is not None:
            torch._foreach_copy_([values], [moved])
        index = self.index.take(other.index)
        register_index(index)
        return LayerState(pattern, values, index)
