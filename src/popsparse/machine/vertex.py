"""Codelets and the vertices that run them.

A codelet is a numeric kernel and a cycle estimate, both written for many vertices at once: their
arrays have one leading entry per vertex. So a compute set of 1,472 tiles is one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dynsparse._core.checks import (
    check_array,
    check_integer,
    check_kind,
    check_types,
    is_number,
    shorten,
)
from popsparse.machine.dtypes import HALF, DType, ProgramError, as_dtype
from popsparse.machine.intervals import Runs, refine
from popsparse.machine.tensor import Tensor

_RUNS_ON = ("worker", "workers", "supervisor")
_RESERVED = ("count", "is_wide", "rank", "shape", "tiles", "target", "torch")


@dataclass(frozen=True)
class Field:
    """How a codelet accesses an edge, and the element types it accepts (None: any)."""

    direction: Literal["in", "out", "inout"]
    dtypes: tuple[DType, ...] | None = None

    @property
    def writes(self) -> bool:
        return self.direction != "in"

    @property
    def reads(self) -> bool:
        return self.direction != "out"


def In(*dtypes: Any) -> Field:
    """An edge the codelet only reads, of one of these element types (none given: any)."""
    return Field("in", tuple(as_dtype(d) for d in dtypes) or None)


def Out(*dtypes: Any) -> Field:
    """An edge the codelet only writes."""
    return Field("out", tuple(as_dtype(d) for d in dtypes) or None)


def InOut(*dtypes: Any) -> Field:
    """An edge the codelet reads and writes."""
    return Field("inout", tuple(as_dtype(d) for d in dtypes) or None)


@check_types
@dataclass(frozen=True, eq=False)
class Codelet:
    """What a vertex computes and how long it takes.

    Args:
        name: shown in profiles and errors.
        fields: the edges, e.g. `{"a": In(FLOAT), "out": Out(FLOAT)}`.
        compute: the kernel, `compute(v)`: `v.<field>` is an array [*v.shape, ...] (a `RaggedView`
            for a `Ragged` connection), read-only for `In`, written in place otherwise; `v.shape`
            is [vertices] unless they were added as a grid. Storing into a half array rounds as
            the machine does; the kernel chooses the type it accumulates in. With stochastic
            rounding the half arrays it writes are float32, rounded when it returns.
        cycles: a number, or `cycles(v)` returning a number or [*v.shape]. For "worker" the cycles
            of the one worker that runs the vertex; for "workers" those of the slowest worker; for
            "supervisor" those of the whole tile.
        runs_on: "worker": one of the tile's workers; the vertices of a tile are dealt to them in
            turn (Poplar's Vertex). "workers": all workers together; the codelet divides its own
            work (MultiVertex). "supervisor": the tile's supervisor, which starts workers itself.
            Vertices of the last two run one after another.
        scalars: names of further values, numbers or one per vertex.
        data_dependent: whether `cycles` reads the data, so it is called at every run, before the
            kernel. Otherwise it is called once.
        code_bytes: the codelet's size in the memory of each tile that runs it.
        flops: floating-point operations of a vertex, a multiply-accumulate as two: a number, or
            `flops(v)` returning a number or [*v.shape]. Called after `cycles`, as often. Only
            profiles show them.
    """

    name: str
    fields: Mapping[str, Field]
    compute: Callable[[VertexView], None]
    cycles: float | Callable[[VertexView], Any]
    runs_on: Literal["worker", "workers", "supervisor"] = "worker"
    scalars: Sequence[str] = ()
    data_dependent: bool = False
    code_bytes: int = 0
    flops: float | Callable[[VertexView], Any] = 0

    def __post_init__(self) -> None:
        if not isinstance(self.runs_on, str) or self.runs_on not in _RUNS_ON:
            raise ValueError(
                f"runs_on must be worker, workers or supervisor, got {shorten(self.runs_on)}"
            )
        if isinstance(self.scalars, (str, bytes)):
            raise TypeError(f"scalars must be names, got {shorten(self.scalars)}")
        for name in (*self.fields, *self.scalars):
            if not isinstance(name, str) or name in _RESERVED or not name.isidentifier():
                raise ValueError(f"codelet {self.name!r}: {shorten(name)} cannot name a field")
        for name, field in self.fields.items():
            check_kind(f"field {name!r} of codelet {self.name!r}", field, Field, "In, Out or InOut")
        if not callable(self.cycles) and not is_number(self.cycles):
            raise TypeError(f"cycles must be a number or a function, got {shorten(self.cycles)}")
        if not callable(self.flops) and not is_number(self.flops):
            raise TypeError(f"flops must be a number or a function, got {shorten(self.flops)}")
        check_integer("code_bytes", self.code_bytes, 0)
        shared = set(self.fields) & set(self.scalars)
        if shared:
            raise ValueError(f"codelet {self.name!r}: {sorted(shared)} are both field and scalar")

    def __repr__(self) -> str:
        return f"Codelet({self.name!r})"


@dataclass(frozen=True, eq=False)
class Ragged:
    """Edges of unequal length: vertex i gets `tensor[offsets[i]:offsets[i + 1]]`.

    `tensor` is one-dimensional; `offsets` ascend, [vertices + 1].
    """

    tensor: Tensor
    offsets: np.ndarray

    def __post_init__(self) -> None:
        check_kind("tensor", self.tensor, Tensor, "a Tensor of a graph")
        values = check_array("offsets", self.offsets, expected="integers")
        with np.errstate(invalid="ignore"):
            offsets = values.astype(np.int64)
        if not (offsets == values).all():
            raise TypeError(f"offsets must be integers, got {shorten(self.offsets)}")
        object.__setattr__(self, "offsets", offsets)
        if self.tensor.ndim != 1:
            raise ValueError(f"Ragged takes a tensor [n], got {list(self.tensor.shape)}")
        bad = offsets.ndim != 1 or len(offsets) < 2 or bool((np.diff(offsets) < 0).any())
        if bad or offsets[0] < 0 or offsets[-1] > self.tensor.numel:
            raise ValueError(
                f"offsets must ascend within [0, {self.tensor.numel}], one more than vertices"
            )


class RaggedView:
    """The kernel's side of a `Ragged` edge: `values` [n] and `offsets` [vertices + 1]."""

    def __init__(self, values: np.ndarray, offsets: np.ndarray) -> None:
        self.values = values
        self.offsets = offsets

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def __getitem__(self, vertex: int) -> np.ndarray:
        return self.values[self.offsets[vertex] : self.offsets[vertex + 1]]


class VertexView:
    """The kernel's view: its fields and scalars by name, and `tiles` [*shape], `shape`, `rank`
    (vertex dimensions, 1 for a plain list), `count` (vertices in all), `target`, and `is_wide`,
    whether rounding is stochastic.

    Fields are NumPy arrays; `torch(name)` is the same memory as a torch tensor.
    """

    def __init__(self, tiles: np.ndarray, target: Any) -> None:
        self.tiles = tiles
        self.shape = tiles.shape
        self.rank = tiles.ndim
        self.count = tiles.size
        self.target = target
        self.is_wide = False
        self._writable: dict[str, np.ndarray] = {}

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the codelet has no field or scalar {name!r}")

    def torch(self, name: str) -> Any:
        """A field's memory as a torch tensor (of the flat values, for a `Ragged` edge)."""
        import torch

        return torch.from_numpy(self._writable[name])

    def _set(self, name: str, array: np.ndarray, edge: Field, offsets: Any) -> None:
        self._writable[name] = array
        shown = array
        if not edge.writes:
            shown = array.view()
            shown.flags.writeable = False
        setattr(self, name, shown if offsets is None else RaggedView(shown, offsets))


@dataclass(eq=False)
class VertexSet:
    """Vertices of one codelet in one compute set. Made by `Graph.add_vertices`.

    `grid` holds the tile of each, [*shape].
    """

    codelet: Codelet
    grid: np.ndarray
    edges: dict[str, Tensor]
    offsets: dict[str, np.ndarray]
    scalars: dict[str, Any]

    @property
    def count(self) -> int:
        return self.grid.size

    @property
    def tiles(self) -> np.ndarray:
        """The tile of each vertex in order, [count]."""
        return self.grid.reshape(-1)

    @property
    def read(self) -> list[DType]:
        """The element types that the vertices read."""
        return [t.dtype for name, t in self.edges.items() if self.codelet.fields[name].reads]

    def runs(self, name: str) -> tuple[Runs, np.ndarray]:
        """The runs of memory an edge covers, and the vertex of each."""
        tensor, offsets = self.edges[name], self.offsets.get(name)
        if offsets is None:
            return tensor.runs_by_entry(self.grid.ndim)
        lengths = np.diff(offsets)
        filled = np.flatnonzero(lengths)
        edges = Runs(offsets[filled], lengths[filled])
        starts, at, lengths = refine(tensor[offsets[0] : offsets[-1]].runs(), edges)
        return Runs(starts, lengths), filled[np.searchsorted(edges.starts, at, "right") - 1]


def round_at_random(values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Round float32 to float16 stochastically: to one of the two neighbours, the nearer with the
    larger probability, so that the expected value is exact. Values that overflow when rounded to
    nearest become infinite."""
    nearest = values.astype(np.float16)
    beyond = np.where(values > nearest, np.float16(np.inf), np.float16(-np.inf))
    with np.errstate(all="ignore"):
        other = np.nextafter(nearest, beyond)
        distance = np.abs(values - nearest) / np.abs(other.astype(np.float32) - nearest)
    is_other = generator.random(values.shape, np.float32) < distance
    return np.where(is_other & np.isfinite(other), other, nearest)


class BoundVertices:
    """A vertex set bound to the memory of an engine.

    `generator` is for stochastic rounding of float16 results; None rounds to nearest.
    """

    def __init__(
        self,
        vertices: VertexSet,
        memory: dict[DType, np.ndarray],
        target: Any,
        generator: np.random.Generator | None = None,
    ) -> None:
        self.vertices = vertices
        self.codelet = vertices.codelet
        # Estimates of cycles see the types of the machine; the kernel may see float32 for float16.
        self.view = VertexView(vertices.grid, target)
        self._kernel_view = VertexView(vertices.grid, target)
        self._kernel_view.is_wide = generator is not None
        self._generator = generator
        self._wide: list[tuple[np.ndarray, np.ndarray]] = []
        # Edges that are not regular views are gathered before the kernel and scattered after it.
        self._gathered: list[tuple[np.ndarray, np.ndarray, np.ndarray, bool]] = []
        for name, tensor in vertices.edges.items():
            edge = self.codelet.fields[name]
            data = tensor.data(memory)
            if data is None:
                data = np.empty(tensor.shape, tensor.dtype.numpy)
                entry = (memory[tensor.dtype], tensor.addresses(), data, edge.writes)
                self._gathered.append(entry)
            offsets = vertices.offsets.get(name)
            self.view._set(name, data, edge, offsets)
            if generator is not None and edge.writes and tensor.dtype is HALF:
                self._wide.append((data, np.empty(data.shape, np.float32)))
                data = self._wide[-1][1]
            self._kernel_view._set(name, data, edge, offsets)
        for name, value in vertices.scalars.items():
            setattr(self.view, name, value)
            setattr(self._kernel_view, name, value)

    def load(self) -> None:
        for flat, addresses, data, _ in self._gathered:
            np.take(flat, addresses, out=data)

    def run(self) -> None:
        for data, wide in self._wide:
            wide[...] = data
        self.codelet.compute(self._kernel_view)
        for data, wide in self._wide:
            assert self._generator is not None
            data[...] = round_at_random(wide, self._generator)
        for flat, addresses, data, writes in self._gathered:
            if writes:
                flat[addresses] = data

    def cycles(self) -> np.ndarray:
        """Whole cycles of each vertex, float64 [count]."""
        cycles = np.ceil(self._estimate(self.codelet.cycles)).reshape(-1)
        if not (cycles >= 0).all():
            raise ProgramError(
                f"codelet {self.codelet.name!r} estimates negative or undefined cycles: {cycles}"
            )
        return cycles

    def flops(self) -> float:
        """Floating-point operations of all vertices together."""
        return float(self._estimate(self.codelet.flops).sum())

    def _estimate(self, amount: Any) -> np.ndarray:
        value = amount(self.view) if callable(amount) else amount
        return np.broadcast_to(np.asarray(value, float), self.view.shape)
