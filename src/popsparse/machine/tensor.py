"""Views of the machine's variables: slices, reshapes and concatenations that move no data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dynsparse._core.checks import check_integer, check_kind, check_types
from popsparse.machine.dtypes import DType
from popsparse.machine.intervals import Runs

# Number of addresses that `extents` groups into one part.
_PART = 4096

_NOWHERE = np.empty(1, np.int8)


def _axis(axis: Any, dimensions: int) -> int:
    """The dimension from 0; negative ones count from the end."""
    number = check_integer("axis", axis)
    if not -dimensions <= number < dimensions:
        raise ValueError(f"axis must be one of {dimensions} dimensions, got {number}")
    return number % dimensions


def _sizes(shape: Sequence[Any]) -> list[int]:
    """Sizes given one by one or as a sequence."""
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    return [check_integer("a size", size) for size in sizes]


def _reshape_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], new: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The strides of a reshape that needs no list of addresses, or None."""
    if 0 in shape:
        return (0,) * len(new)
    # Runs of dimensions that are contiguous with each other: (size, stride of the innermost).
    blocks: list[list[int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if blocks and blocks[-1][1] == size * stride:
            blocks[-1] = [blocks[-1][0] * size, stride]
        else:
            blocks.append([size, stride])
    out: list[int] = []
    left, stride = 1, 0
    for size in reversed(new):
        if size == 1:
            out.append(0)
            continue
        if left == 1:
            left, stride = blocks.pop()
        if left % size:
            return None
        out.append(stride)
        left //= size
        stride *= size
    return tuple(reversed(out))


class Tensor:
    """A view of a graph's variables: `dtype`, `shape`, and where each element lives.

    Regular views keep an offset and strides, so slicing a large variable costs nothing;
    concatenations and gathers keep one address per element, or only their `runs` if these are long.
    Made by `Graph.add_variable`.
    """

    __slots__ = ("_addresses", "_offset", "_runs", "_strides", "dtype", "graph", "shape")

    def __init__(
        self,
        graph: Any,
        dtype: DType,
        shape: Sequence[int],
        offset: int = 0,
        strides: tuple[int, ...] | None = None,
        addresses: np.ndarray | None = None,
        runs: Runs | None = None,
    ) -> None:
        self.graph = graph.root
        self.dtype = dtype
        self.shape = tuple(int(n) for n in shape)
        self._offset = int(offset)
        self._strides = strides
        self._addresses = addresses
        self._runs = runs

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_regular(self) -> bool:
        """Whether the view is an offset and strides."""
        return self._strides is not None

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a scalar tensor has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Tensor({self.dtype.name} {list(self.shape)} of {self.name})"

    @property
    def name(self) -> str:
        """The names of the variables that the tensor views."""
        return self.graph.names_of(self)

    def addresses(self) -> np.ndarray:
        """The address of every element: int64, of the tensor's shape."""
        if self._addresses is not None:
            return self._addresses
        if self._runs is not None:
            return self._runs.addresses().reshape(self.shape)
        assert self._strides is not None
        addresses = np.array(self._offset, np.int64)
        for size, stride in zip(self.shape, self._strides, strict=True):
            addresses = addresses[..., None] + np.arange(size) * stride
        return addresses

    def runs(self, leading: int = 0) -> Runs:
        """The elements in order, as runs; none crosses the first `leading` dimensions."""
        if self.numel == 0:
            return Runs(np.zeros(0, np.int64), np.zeros(0, np.int64))
        if self._runs is not None and not leading:
            return self._runs
        if self._strides is None:
            flat = self.addresses().reshape(-1)
            new = np.ones(len(flat), bool)
            np.not_equal(np.diff(flat), 1, out=new[1:])
            new[:: math.prod(self.shape[leading:])] = True
            at = np.flatnonzero(new)
            return Runs(flat[at], np.diff(np.append(at, len(flat))))
        length, axis = 1, self.ndim
        while axis > leading and (self.shape[axis - 1] == 1 or self._strides[axis - 1] == length):
            axis -= 1
            length *= self.shape[axis]
        head = Tensor(self.graph, self.dtype, self.shape[:axis], self._offset, self._strides[:axis])
        starts = head.addresses().reshape(-1)
        return Runs(starts, np.full(len(starts), length, np.int64))

    def runs_by_entry(self, leading: int) -> tuple[Runs, np.ndarray]:
        """The runs of each entry of the first `leading` dimensions, and the entry of each run."""
        runs = self.runs(leading)
        size = max(math.prod(self.shape[leading:]), 1)
        return runs, (np.cumsum(runs.lengths) - 1) // size

    def extents(self) -> tuple[np.ndarray, np.ndarray]:
        """The least and the greatest address of parts that together are the tensor: int64 [parts]
        each. Parts may overlap. There are far fewer parts than runs, and they are found faster."""
        if self.numel == 0:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        if self._strides is not None:
            ends = [(n - 1) * s for n, s in zip(self.shape, self._strides, strict=True)]
            low = self._offset + sum(min(end, 0) for end in ends)
            return np.array([low]), np.array([low + sum(map(abs, ends))])
        if self._runs is not None:
            return self._runs.starts, self._runs.ends - 1
        assert self._addresses is not None
        flat = self._addresses.reshape(-1)
        first = np.arange(0, len(flat), _PART)
        return np.minimum.reduceat(flat, first), np.maximum.reduceat(flat, first)

    def data(self, memory: dict[DType, np.ndarray]) -> np.ndarray | None:
        """The elements as a writable NumPy view; None if they are not regular."""
        if self._strides is None:
            return None
        flat = memory[self.dtype]
        if self.numel == 0:
            return np.zeros(self.shape, self.dtype.numpy)
        strides = tuple(s * flat.itemsize for s in self._strides)
        return as_strided(flat[self._offset :], self.shape, strides)

    def values(self, memory: dict[DType, np.ndarray]) -> np.ndarray:
        """A copy of the elements' values."""
        data, flat = self.data(memory), memory[self.dtype]
        if data is not None:
            return data.copy()
        if self._runs is None or not self._runs.are_long:
            return flat[self.addresses()]
        parts = [flat[at : at + size] for at, size in zip(*self._runs, strict=True)]
        return np.concatenate(parts).reshape(self.shape)

    def fill(self, memory: dict[DType, np.ndarray], values: np.ndarray) -> None:
        """Set the elements to values of the tensor's shape, or to a scalar."""
        data, flat = self.data(memory), memory[self.dtype]
        if data is not None:
            data[...] = values
        elif self._runs is None or not self._runs.are_long:
            flat[self.addresses()] = values
        else:
            flat_values, first = np.broadcast_to(values, self.shape).reshape(-1), 0
            for at, size in zip(*self._runs, strict=True):
                flat[at : at + size] = flat_values[first : first + size]
                first += size

    # Views.

    def _empty_view(self) -> np.ndarray:
        """An array without memory, with the shape and strides of a regular view: NumPy computes
        views of it; its elements must not be read."""
        return as_strided(_NOWHERE, self.shape, self._strides)

    def _from_view(self, view: np.ndarray) -> Tensor:
        """The tensor with the layout of a view of `_empty_view`."""
        moved = view.__array_interface__["data"][0] - _NOWHERE.__array_interface__["data"][0]
        return Tensor(self.graph, self.dtype, view.shape, self._offset + moved, view.strides)

    def _from_addresses(self, addresses: np.ndarray) -> Tensor:
        return Tensor(self.graph, self.dtype, addresses.shape, addresses=addresses)

    def __getitem__(self, key: Any) -> Tensor:
        """Index as in NumPy: integers, slices, ..., None; integer arrays make a gather."""
        parts = key if isinstance(key, tuple) else (key,)
        if self._strides is None or any(isinstance(p, (list, np.ndarray)) for p in parts):
            return self._from_addresses(np.asarray(self.addresses()[key]))
        plain = [
            p if p is None or p is ... or isinstance(p, slice) else check_integer("an index", p)
            for p in parts
        ]
        # With ... NumPy returns a view even of a single element.
        index = tuple(plain) if ... in plain else (*plain, ...)
        return self._from_view(self._empty_view()[index])

    def slice(self, start: int, stop: int, axis: int = 0) -> Tensor:
        """Elements [start, stop) of one dimension."""
        axis = _axis(axis, self.ndim)
        start, stop = check_integer("start", start), check_integer("stop", stop)
        if not 0 <= start <= stop <= self.shape[axis]:
            raise IndexError(
                f"slice [{start}, {stop}) is outside dimension {axis} of {list(self.shape)}"
            )
        return self[(slice(None),) * axis + (slice(start, stop),)]

    def reshape(self, *shape: Any) -> Tensor:
        """The same elements in order with another shape; one size may be -1."""
        new = _sizes(shape)
        if new.count(-1) == 1:
            rest = -math.prod(new)
            if rest <= 0 or self.numel % rest:
                raise ValueError(f"{list(self.shape)} does not reshape to {new}")
            new[new.index(-1)] = self.numel // rest
        if math.prod(new) != self.numel or any(n < 0 for n in new):
            raise ValueError(
                f"{list(self.shape)} has {self.numel} elements and does not reshape to {new}"
            )
        if self._strides is not None:
            strides = _reshape_strides(self.shape, self._strides, tuple(new))
            if strides is not None:
                return Tensor(self.graph, self.dtype, new, self._offset, strides)
        if self._runs is not None:
            return Tensor(self.graph, self.dtype, new, runs=self._runs)
        return self._from_addresses(self.addresses().reshape(new))

    def flatten(self) -> Tensor:
        return self.reshape(-1) if self.numel else self.reshape(0)

    def transpose(self, *axes: int) -> Tensor:
        """The dimensions in the order `axes` (reversed when none are given)."""
        order = [_axis(a, self.ndim) for a in axes] if axes else list(range(self.ndim))[::-1]
        if sorted(order) != list(range(self.ndim)):
            raise ValueError(f"axes must name each of {self.ndim} dimensions once, got {axes}")
        if self._strides is None:
            return self._from_addresses(self.addresses().transpose(order))
        return self._from_view(self._empty_view().transpose(order))

    def broadcast_to(self, *shape: int) -> Tensor:
        """Repeat along new leading dimensions and those of size 1. The result is read-only."""
        new = _sizes(shape)
        try:
            if self._strides is None:
                return self._from_addresses(np.broadcast_to(self.addresses(), new))
            return self._from_view(np.broadcast_to(self._empty_view(), new))
        except ValueError:
            raise ValueError(f"{list(self.shape)} does not broadcast to {new}") from None

    def expand_dims(self, axis: int) -> Tensor:
        """Insert a dimension of size 1 before `axis`."""
        axis = _axis(axis, self.ndim + 1)
        return self.reshape([*self.shape[:axis], 1, *self.shape[axis:]])

    def squeeze(self, axis: int) -> Tensor:
        """Remove the dimension `axis`, which must be of size 1."""
        axis = _axis(axis, self.ndim)
        if self.shape[axis] != 1:
            raise ValueError(f"dimension {axis} of {list(self.shape)} is not of size 1")
        return self.reshape([*self.shape[:axis], *self.shape[axis + 1 :]])


@check_types
def concat(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Concatenate tensors along `axis`. Unless long stretches [n] are joined, the result keeps an
    address per element, so for large operands prefer one variable and its slices, or a `Copy` of
    several pairs."""
    tensors = list(tensors)
    if not tensors:
        raise ValueError("concat needs at least one tensor")
    first = check_kind("what is joined", tensors[0], Tensor, "tensors of a graph")
    axis = _axis(axis, first.ndim)
    for other in tensors[1:]:
        check_kind("what is joined", other, Tensor, "tensors of a graph")
        if other.dtype != first.dtype:
            raise TypeError(f"concat of {first.dtype.name} and {other.dtype.name}: cast first")
        if other.graph is not first.graph:
            raise ValueError("concat of tensors of different graphs")
    if len(tensors) == 1:
        return first
    if all(t.ndim == 1 and t._addresses is None for t in tensors):
        columns = zip(*(t.runs() for t in tensors), strict=True)
        runs, _ = Runs(*map(np.concatenate, columns)).join()
        if runs.are_long:
            return Tensor(first.graph, first.dtype, [int(runs.lengths.sum())], runs=runs)
    addresses = np.concatenate([t.addresses() for t in tensors], axis)
    return Tensor(first.graph, first.dtype, addresses.shape, addresses=addresses)


@check_types
def rotation(
    source: Tensor, destination: Tensor, shift: int, axis: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Pairs for a `Copy` that moves entry i + shift of `source` to entry i of `destination`,
    cyclically: how tiles pass a buffer to their neighbours."""
    if source.shape != destination.shape:
        raise ValueError(
            f"a rotation keeps the shape, got {list(source.shape)} and {list(destination.shape)}"
        )
    size = source.shape[_axis(axis, source.ndim)]
    shift %= max(size, 1)
    cuts = [(0, size)] if shift == 0 else [(shift, size), (0, shift)]
    pairs, at = [], 0
    for start, stop in cuts:
        to = destination.slice(at, at + stop - start, axis)
        pairs.append((source.slice(start, stop, axis), to))
        at += stop - start
    return pairs
