"""Codelets that programs share: elementary arithmetic, and control.

Arithmetic, except `DOT`, shares its elements among a tile's workers (`runs_on="workers"`, so a tile
spends workers x the figure). Sums are computed in float32 and rounded once when stored.

Control codelets handle integers and are meant for one element: they cost one worker a load, an
operation and a store with their addresses. No source gives these estimates; a control vertex takes
a few dozen cycles of a superstep that costs hundreds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from popsparse.machine.dtypes import BOOL, FLOAT, HALF, INT, SHORT, UNSIGNED_INT, UNSIGNED_SHORT
from popsparse.machine.target import SUM_CODE
from popsparse.machine.vertex import Codelet, In, InOut, Out, VertexView

_REAL = (HALF, FLOAT)


def _elements(v: VertexView, array: np.ndarray) -> int:
    """Number of elements of one vertex."""
    return array.size // max(v.count, 1)


def _share(v: VertexView, count: int) -> int:
    """Number of elements of the busiest worker."""
    return -(-count // v.target.workers)


def _fill(v: VertexView) -> None:
    v.out[...] = v.value


def _store_cycles(v: VertexView) -> int:
    # Section 3.6 of docs/popsparse-formulas.md: one store of the data path each cycle.
    words = -(-_elements(v, v.out) * v.out.itemsize * 8 // v.target.data_path_bits)
    return 12 + _share(v, words)


FILL = Codelet("fill", {"out": Out()}, _fill, _store_cycles, "workers", scalars=("value",))


def _cast(v: VertexView) -> None:
    v.out[...] = v.src


def _cast_cycles(v: VertexView) -> int:
    # Section 3.4 of docs/popsparse-formulas.md.
    share = _share(v, _elements(v, v.out))
    width = min(map(v.target.vector_width, (v.src.dtype, v.out.dtype)))
    return 26 + -(-share // width)


CAST = Codelet("cast", {"src": In(), "out": Out()}, _cast, _cast_cycles, "workers")


def _add(v: VertexView) -> None:
    np.add(v.a, v.b, out=v.out, dtype=np.float32, casting="same_kind")


def _add_scaled(v: VertexView) -> None:
    scale = np.asarray(v.scale, np.float32)
    scale = scale.reshape(scale.shape + (1,) * (v.a.ndim - v.rank)) if scale.ndim else scale
    v.a[...] = v.a.astype(np.float32) + scale * v.b


def _add_cycles(v: VertexView) -> int:
    # Section 7.3 of docs/popsparse-formulas.md: 11 + workers x (58 + 3 for each vector); the
    # supervisor's 11 cycles are spread over the workers' 6 slots, rounded up.
    return 58 + 2 + 3 * -(-_share(v, _elements(v, v.a)) // v.target.vector_width(v.a.dtype))


ADD = Codelet(
    "add",
    {"a": In(*_REAL), "b": In(*_REAL), "out": Out(*_REAL)},
    _add,
    _add_cycles,
    "workers",
    flops=lambda v: _elements(v, v.out),
)
# a += scale * b
ADD_SCALED = Codelet(
    "add scaled",
    {"a": InOut(*_REAL), "b": In(*_REAL)},
    _add_scaled,
    _add_cycles,
    "workers",
    scalars=("scale",),
    flops=lambda v: 2 * _elements(v, v.b),
)


def sum_codelet(name: str, cycles: Any, flops: Any) -> Codelet:
    """A codelet that adds a tile's own partial sums, `own` [..., p, n], and those of others,
    `others` [..., q, n], into `out` [..., n]. Cycles are the supervisor's."""

    def add(v: VertexView) -> None:
        total = v.others.sum(axis=-2, dtype=np.float32)
        v.out[...] = total + v.own.sum(axis=-2, dtype=np.float32)

    fields = {"own": In(), "others": In(), "out": Out()}
    code = int(SUM_CODE.typical)
    return Codelet(name, fields, add, cycles, "supervisor", flops=flops, code_bytes=code)


def _dot(v: VertexView) -> None:
    v.out[...] = np.einsum("...n,...n->...", v.a, v.b, dtype=np.float32).reshape(v.out.shape)


def _dot_cycles(v: VertexView) -> int:
    # The estimate of Poplar's tutorial on matrix-vector products: 5 + (n + 1) / 2 for float, twice
    # as wide for half.
    return 5 + -(-v.a.shape[-1] // v.target.vector_width(v.a.dtype))


# One worker's dot product of two [n] rows.
DOT = Codelet(
    "dot product",
    {"a": In(*_REAL), "b": In(*_REAL), "out": Out(*_REAL)},
    _dot,
    _dot_cycles,
    flops=lambda v: 2 * v.a.shape[-1],
)


_INTEGERS = (INT, UNSIGNED_INT, SHORT, UNSIGNED_SHORT)


def _control_cycles(v: VertexView) -> int:
    # Entry and exit of a worker vertex (3), then load, operate and store for each element.
    return 3 + 3 * _elements(v, v.value)


def _increment(v: VertexView) -> None:
    v.value[...] += 1


def _decrement(v: VertexView) -> None:
    v.value[...] -= 1


def _not_zero(v: VertexView) -> None:
    v.out[...] = v.value != 0


INCREMENT = Codelet("increment", {"value": InOut(*_INTEGERS)}, _increment, _control_cycles)
DECREMENT = Codelet("decrement", {"value": InOut(*_INTEGERS)}, _decrement, _control_cycles)
NOT_ZERO = Codelet(
    "not zero", {"value": In(*_INTEGERS), "out": Out(BOOL)}, _not_zero, _control_cycles
)
