"""A pattern's index tensors as the passes take them: checked once, sizes at hand.

Reading sizes off tensors and checking them costs more than the products of a small layer, so a
layer prepares its index once per pattern and hands the same object to every call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from dynsparse.checks import check_kind, check_tensor
from dynsparse.encoding import by_columns, slots_of
from dynsparse.pattern import PatternIndex
from dynsparse.pattern.on_device import by_columns as by_columns_there


class LayerIndex:
    """The index of one pattern with blocks of one size. Immutable but for what is derived from it.

    Off the CPU its memory may be written over with the index of the layer's next pattern, so that
    CUDA graphs that read it stay valid. It is another object from then on; who still has this one,
    as a backward pass may, is refused.

    It holds the index tensors, not their addresses: memory that moves, as `share_memory_` moves
    it, is found at every call.

    Args:
        index: the pattern's index tensors, int32, on the device of `values`.
        values: [nnz] or [nnz, b, b]; gives the block size. Not kept.

    Attributes:
        row_ptr, cols, col_ptr, slots: the tensors of the index.
        order: `csc_rows` and `csc_perm`, or None where they were left out: `by_columns` makes them.
        index: all of them, as they were given.
        out_features, in_features, block_size, nnz: of the layer; nnz counts blocks.
        values_shape, bias_shape: what these tensors must look like.
        values_layout: sizes and strides of contiguous values, as plain tuples.
        on_cpu: where the index is.
        masks: what `kernels.masks` makes of the index when it is first needed, or None.
        panels: likewise what `kernels.panels` makes of it, by rows and by columns, each after the
            number of samples from which on it is of use.
        choices: what `choice.route` has decided so far, for float32 and for bfloat16 on a CPU.
            Elsewhere the first holds all.

    Raises:
        RuntimeError: lengths, types or devices that do not fit, which would make the kernels read
            where nothing is.
    """

    __slots__ = (
        "__weakref__",
        "_derived",
        "bias_shape",
        "block_size",
        "choices",
        "col_ptr",
        "cols",
        "in_features",
        "index",
        "masks",
        "nnz",
        "on_cpu",
        "order",
        "out_features",
        "panels",
        "row_ptr",
        "slots",
        "values_layout",
        "values_shape",
    )

    def __init__(self, index: PatternIndex, values: Tensor) -> None:
        if type(index) is not PatternIndex or not all(isinstance(t, Tensor) for t in index):
            check_kind("the index", index, PatternIndex, "the index tensors of a SparsePattern")
            for name, tensor in zip(index._fields, index, strict=True):
                check_tensor(name, tensor)
        check_kind("values", values, Tensor, "a tensor")
        if values.dim() not in (1, 3) or (values.dim() == 3 and values.shape[1] != values.shape[2]):
            raise RuntimeError(
                f"values must be [nnz] or [nnz, b, b], got the shape {list(values.shape)}"
            )
        self.index = index
        self.row_ptr, self.cols, self.col_ptr, *order, self.slots = index
        if any(tensor.dim() != 1 for tensor in index):
            raise RuntimeError(
                "the index tensors must be one-dimensional: take SparsePattern.index"
            )
        self.nnz = nnz = self.cols.shape[0]
        if values.shape[0] != nnz:
            raise RuntimeError(
                f"values hold {values.shape[0]} blocks but the pattern has {nnz}: "
                "pass the values of this pattern"
            )
        left_out = order[0].shape[0] == order[1].shape[0] == 0
        if not left_out and (order[0].shape[0] != nnz or order[1].shape[0] != nnz):
            raise RuntimeError(
                "the index tensors differ in length: take them from SparsePattern.index"
            )
        if len(self.slots) not in (0, nnz):
            raise RuntimeError(
                "the index tensors differ in length: take them from SparsePattern.index"
            )
        for tensor in index:
            if tensor.dtype is not torch.int32 or tensor.device != values.device:
                raise RuntimeError(
                    f"the index tensors must be int32 on {values.device}, where the values are, "
                    f"got {tensor.dtype} on {tensor.device}"
                )
        self.order = None if left_out and nnz else (order[0], order[1])
        self.block_size = b = 1 if values.dim() == 1 else values.shape[1]
        self.out_features = (self.row_ptr.shape[0] - 1) * b
        self.in_features = (self.col_ptr.shape[0] - 1) * b
        self.values_shape = values.shape
        one = values.dim() == 1
        self.values_layout: tuple[tuple[int, ...], tuple[int, ...]] = (
            ((nnz,), (1,)) if one else ((nnz, b, b), (b * b, b, 1))
        )
        self.bias_shape = torch.Size((self.out_features,))
        self.on_cpu = values.is_cpu
        self.masks: Tensor | None = None
        self.panels: list[tuple[int, Tensor | None]] = [(0, None), (0, None)]
        self.choices: tuple[dict[Hashable, str], dict[Hashable, str]] = ({}, {})
        self._derived: dict[Hashable, tuple[Tensor, Callable[[LayerIndex], Tensor]]] = {}

    @property
    def is_full(self) -> bool:
        """Whether the values are a dense weight as they lie there."""
        natural = self.block_size == 1 and not len(self.slots)
        return natural and self.nnz == self.out_features * self.in_features

    def by_rows(self, values: Tensor) -> Tensor:
        """Values in the order of the rows, for kernels that read them as a stream."""
        return values.index_select(0, self.slots) if len(self.slots) else values

    def by_columns(self) -> tuple[Tensor, Tensor]:
        """`csc_rows` and `csc_perm`. Where the index came without them the CPU makes them at each
        call, to be let go of; elsewhere they stay, since CUDA graphs may read them."""
        if self.order is not None:
            return self.order
        if self.on_cpu:
            _, rows, entries = by_columns(self.row_ptr, self.cols, len(self.col_ptr) - 1)
            return rows, slots_of(entries, self.slots)
        rows, slots = self.derived("by columns", _make_order)
        return rows, slots

    def derived(self, name: Hashable, make: Callable[[LayerIndex], Tensor]) -> Tensor:
        """A tensor that kernels make of the index alone, made when it is first asked for."""
        found = self._derived.get(name)
        if found is not None:
            return found[0]
        # Kept, so outside of whatever mode the caller is in.
        with torch.inference_mode(False):
            made = make(self)
        # While a graph is captured nothing is computed: what is made then belongs to the graph.
        if not (made.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._derived[name] = made, make
        return made

    def may_take(self, other: LayerIndex) -> bool:
        """Whether another index may be written over this one."""
        return (
            not self.on_cpu
            and self.values_shape == other.values_shape
            and all(
                own.shape == new.shape and own.device == new.device
                for own, new in zip(self.index, other.index, strict=True)
            )
        )

    def derive_like(self, other: LayerIndex) -> None:
        """Make what has been derived from `other`."""
        for name, (_, make) in other._derived.items():
            self.derived(name, make)

    def take(self, other: LayerIndex) -> LayerIndex:
        """Write another index, after its `derive_like`, over this one; the index of this memory
        from now on."""
        names = list(self._derived)
        torch._foreach_copy_(
            [*self.index, *(self._derived[name][0] for name in names)],
            [*other.index, *(other._derived[name][0] for name in names)],
        )
        fresh = copy.copy(self)
        self.values_shape = torch.Size()
        return fresh

    @property
    def is_overwritten(self) -> bool:
        """Whether this object stands for a pattern that is gone: no values fit it."""
        return not self.values_shape


def _make_order(p: LayerIndex) -> Tensor:
    rows, entries = by_columns_there(p.row_ptr, p.cols, len(p.col_ptr) - 1)
    return torch.stack([rows, slots_of(entries, p.slots)])


class Read(NamedTuple):
    """What forward reads of a layer. Both belong together, whatever other threads do.

    Attributes:
        layer_index: of the pattern.
        memory: the values, which are to be thought of as those that autograd knows.
        plain: whether it is known that these are float32, contiguous, on the CPU and of this index.
    """

    layer_index: LayerIndex
    memory: Tensor
    plain: bool
