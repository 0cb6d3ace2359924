"""Small vertices that steer loops: counters, toggles and predicates.

Each handles whole numbers, costs one worker a load, an operation and a store with their addresses,
and is meant for one element. No source gives these estimates; a control vertex is a few dozen
cycles of a superstep that costs hundreds.
"""

from __future__ import annotations

from popsparse.machine.dtypes import BOOL, INT, SHORT, UNSIGNED_INT, UNSIGNED_SHORT
from popsparse.machine.vertex import Codelet, In, InOut, Out, VertexView

_WHOLE = (INT, UNSIGNED_INT, SHORT, UNSIGNED_SHORT)


def _cycles(v: VertexView) -> int:
    # Entry and exit of a worker vertex (3), then load, operate and store for each element.
    first = next(iter(v._writable.values()))
    return 3 + 3 * (first.size // max(v.count, 1))


def _increment(v: VertexView) -> None:
    v.value[...] += 1


def _decrement(v: VertexView) -> None:
    v.value[...] -= 1


def _toggle(v: VertexView) -> None:
    v.value[...] = 1 - v.value


def _not_zero(v: VertexView) -> None:
    v.out[...] = v.value != 0


def _equal_zero(v: VertexView) -> None:
    v.out[...] = v.value == 0


def _logical_not(v: VertexView) -> None:
    v.out[...] = ~v.value


INCREMENT = Codelet("increment", {"value": InOut(*_WHOLE)}, _increment, _cycles)
DECREMENT = Codelet("decrement", {"value": InOut(*_WHOLE)}, _decrement, _cycles)
# 0 becomes 1 and 1 becomes 0: which of two buffers is current.
TOGGLE = Codelet("toggle", {"value": InOut(*_WHOLE)}, _toggle, _cycles)
NOT_ZERO = Codelet("not zero", {"value": In(*_WHOLE), "out": Out(BOOL)}, _not_zero, _cycles)
EQUAL_ZERO = Codelet("equal zero", {"value": In(*_WHOLE), "out": Out(BOOL)}, _equal_zero, _cycles)
LOGICAL_NOT = Codelet("not", {"value": In(BOOL), "out": Out(BOOL)}, _logical_not, _cycles)
