"""What a graph holds beside tensors: compute sets, streams, remote buffers, and who made them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

from popsparse.machine.dtypes import DType
from popsparse.machine.tensor import Tensor
from popsparse.machine.vertex import VertexSet

Callers = tuple[tuple[CodeType, int], ...]
"""Code and line of calls, the nearest first."""

_ROOM = str(Path(__file__).parent)
_SOURCE = Path(__file__).parents[2]
_PACKAGES = tuple(str(_SOURCE / name) for name in ("popsparse", "dynsparse"))
_TYPED = str(_SOURCE / "dynsparse" / "typed.py")
_NEAREST = 2


def callers() -> Callers:
    """The two nearest calls from outside the tile machine, and the nearest from outside the
    library, unless some installed package made it.

    Nothing but code objects is kept, so no variable lives longer; texts are made when asked for.
    """
    found: list[tuple[CodeType, int]] = []
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        file = code.co_filename
        if file.startswith(_PACKAGES):
            if len(found) < _NEAREST and not file.startswith(_ROOM) and file != _TYPED:
                found.append((code, frame.f_lineno))
        else:
            if not (file.startswith("<frozen") or "site-packages" in file):
                found.append((code, frame.f_lineno))
            break
    return tuple(found)


def describe_callers(made_by: Callers) -> list[str]:
    """Each call as "file:line function"; files of the library by their path in it, others by their
    name, so that a profile does not tell where its maker's files lie."""
    return [f"{_file(code.co_filename)}:{line} {code.co_name}" for code, line in made_by]


def _file(name: str) -> str:
    path = Path(name)
    return path.relative_to(_SOURCE).as_posix() if name.startswith(_PACKAGES) else path.name


def _key(vertices: VertexSet) -> Any:
    """Single vertices with equal keys can run as one set; None keeps a set apart."""
    if vertices.grid.shape != (1,) or vertices.offsets:
        return None
    scalars = tuple(sorted(vertices.scalars.items()))
    if any(np.ndim(value) for _, value in scalars):
        return None
    edges = tuple((name, t.dtype, t.shape) for name, t in sorted(vertices.edges.items()))
    return vertices.codelet, edges, scalars


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors [1, ...] of one shape as one [n, ...]; a regular view if they are evenly apart."""
    first = tensors[0]
    shape = (len(tensors), *first.shape[1:])
    inner = {t._strides[1:] if t._strides is not None else None for t in tensors}
    if len(inner) == 1 and None not in inner:
        gaps = np.unique(np.diff([t._offset for t in tensors]))
        if len(gaps) == 1:
            strides = (int(gaps[0]), *inner.pop())  # type: ignore[misc]
            return Tensor(first.graph, first.dtype, shape, first._offset, strides)
    addresses = np.concatenate([t.addresses() for t in tensors])
    return Tensor(first.graph, first.dtype, shape, addresses=addresses)


def merge_vertices(sets: Sequence[VertexSet]) -> list[VertexSet]:
    """The same vertices in fewer sets."""
    groups: dict[Any, list[VertexSet]] = {}
    for i, vertices in enumerate(sets):
        key = _key(vertices)
        groups.setdefault(i if key is None else key, []).append(vertices)
    out = []
    for group in groups.values():
        first = group[0]
        if len(group) > 1:
            edges = {name: _stack([v.edges[name] for v in group]) for name in first.edges}
            tiles = np.concatenate([v.tiles for v in group])
            first = VertexSet(first.codelet, tiles, edges, {}, first.scalars)
        out.append(first)
    return out


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
