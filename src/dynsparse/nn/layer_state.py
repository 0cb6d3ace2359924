"""What a layer computes with: the index of its pattern, and the memory of its values."""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse.nn.sharded import device_of, is_sharded
from dynsparse.ops.linear import LayerIndex, cuda
from dynsparse.ops.linear.layer_index import Read, register_index
from dynsparse.ops.torch_internals import is_wrapped
from dynsparse.pattern import PatternIndex, SparsePattern


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
            sharded values and in a transform of torch.func.
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
                tensors = pattern._index_on(device)
                if row_ptr is None or row_ptr.device != device:
                    row_ptr = tensors.row_ptr.clone()
                tensors = tensors._replace(row_ptr=row_ptr)
                index = self._make_index(tensors, values, sharded, device)
            if sharded and index.on_cpu and index.keep:
                index = self._make_index(index.index, values, sharded, device)
            if not index.on_cpu:
                cuda.derive(index)
            self.index = index
            self.memory = memory = values.detach()
            plain = index.on_cpu and not sharded and memory.dtype is torch.float32
            self.read = Read(index, memory, plain and memory.is_contiguous())
            has_address = not sharded and not is_wrapped(values)
            self.address = values.data_ptr() if has_address else -1
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
        # Every rank holds the full index, so it keeps nothing that can be made again.
        index = LayerIndex(
            tensors,
            torch.empty(1, device=device).expand(shape) if sharded else values,
            keep=not sharded,
        )
        register_index(index)
        return index

    def copy_from(
        self, index: LayerIndex, pattern: SparsePattern, values: Tensor, moved: Tensor | None
    ) -> LayerState:
        """Overwrite index and values in place, and return the new state of this memory.

        Args:
            index: the new index.
            pattern: its pattern.
            values: the Parameter with the values.
            moved: the new values; None if the caller sets them.
        """
        if moved is not None:
            torch._foreach_copy_([values], [moved])
        index = self.index.copy_from(index)
        register_index(index)
        return LayerState(pattern, values, index)
