"""What a graph is made of: variables, compute sets, and what lies beyond the tiles."""

from __future__ import annotations

from typing import Any

from popsparse.machine.callers import Callers
from popsparse.machine.dtypes import DType
from popsparse.machine.merge import merge_vertices
from popsparse.machine.tensor import Tensor
from popsparse.machine.vertex import VertexSet


class Variable:
    """One contiguous stretch of the memory of its type. `tensor` views it whole; `made_by` says
    which calls led to it."""

    def __init__(
        self, name: str, tensor: Tensor, start: int, is_constant: bool, made_by: Callers = ()
    ) -> None:
        self.name = name
        self.tensor = tensor
        self.start = start
        self.is_constant = is_constant
        self.made_by = made_by

    @property
    def stop(self) -> int:
        return self.start + self.tensor.numel

    @property
    def dtype(self) -> DType:
        return self.tensor.dtype

    @property
    def bytes(self) -> int:
        return self.tensor.numel * self.dtype.size


class ComputeSet:
    """Vertices that run at the same time. Made by `Graph.add_compute_set`."""

    def __init__(self, graph: Any, name: str) -> None:
        self.graph = getattr(graph, "root", graph)
        self.name = name
        self.vertex_sets: list[VertexSet] = []
        self._merged: tuple[int, list[VertexSet]] = (0, [])

    def merged(self) -> list[VertexSet]:
        """The vertices with those added one by one joined, as they run."""
        if self._merged[0] != len(self.vertex_sets):
            self._merged = (len(self.vertex_sets), merge_vertices(self.vertex_sets))
        return self._merged[1]


class Stream:
    """Data between host and machine, `numel` elements a time."""

    def __init__(self, name: str, dtype: DType, numel: int, to_device: bool) -> None:
        self.name = name
        self.dtype = dtype
        self.numel = numel
        self.to_device = to_device


class RemoteBuffer:
    """Rows of elements in the memory beside a processor, far larger than that of its tiles and far
    slower. Made by `Graph.add_remote_buffer`; `Copy` moves rows.

    Attributes:
        numel: elements of a row, what one copy moves.
        rows: how many there are.
    """

    def __init__(self, name: str, dtype: DType, numel: int, rows: int) -> None:
        self.name = name
        self.dtype = dtype
        self.numel = numel
        self.rows = rows

    @property
    def bytes(self) -> int:
        return self.numel * self.rows * self.dtype.size
