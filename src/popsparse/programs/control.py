"""The propagation loop: which buckets pass by, in which order, and when it ends.

The loop walks the offsets (i, j) of the overflow record, and for each all Z partners. At offset
(i, j) the tiles of (x, y) see the buckets whose home is (x - i, y - j); one exchange leads from a
turn to the next, along z, then y, then x, and what went round stays round: the next pass over a
dimension begins where the last one ended. Offsets in X that nothing travels are passed without
computing. All counters are on one tile, and every decision is a control value that it broadcasts.

See section 5.2 of docs/popsparse-formulas.md; the order within a dimension is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from popsparse.encoding.overflow import OverflowInfo
from popsparse.machine import (
    BOOL,
    UNSIGNED_INT,
    UNSIGNED_SHORT,
    Codelet,
    Execute,
    Graph,
    If,
    In,
    InOut,
    Out,
    Program,
    RepeatWhileTrue,
    Sequence,
    Switch,
    Tensor,
    VertexView,
)
from popsparse.planning.control_cycles import CONTROL_INSTRUCTIONS
from popsparse.planning.plan import Plan
from popsparse.programs.weights import SparseTensor, control_tile

IDLE = 4
"""Value of the compute switch when a turn only passes buckets on."""

# Fields of the loop's state.
_X, _ROWS, _TURNS, _LEFT, _BUFFERS, _MOVE, _WORK, _FAR_X, _FAR_Y, _FAR_Z = range(10)
_Z_MOVE, _Y_MOVE, _X_MOVE = 1, 2, 3


class Propagation:
    """Builds the loop for one pass.

    Args:
        graph, weights: where the overflow record is.
        name: of the pass, for the profile.
        first_buffers: which buffers hold data when the loop begins: bit 0 of the first kind of
            data, bit 1 of the second.
        toggles: for each move ("z", "y", "x") the buffers it changes, as bits.
        homing: whether to go on, without computing, until everything is back where it began;
            `last_buffer` then says which buffer holds it.
    """

    def __init__(
        self,
        graph: Graph,
        weights: SparseTensor,
        name: str,
        *,
        first_buffers: int = 0,
        toggles: Mapping[str, int] | None = None,
        homing: bool = False,
    ) -> None:
        self.plan: Plan = weights.plan
        self.weights = weights
        self.graph = graph
        self.name = name
        self.homing = homing
        found = toggles or {"z": 1, "y": 1, "x": 1}
        self.toggles = {_Z_MOVE: found["z"], _Y_MOVE: found["y"], _X_MOVE: found["x"]}
        self.first_buffers = first_buffers
        tile = control_tile(self.plan)

        def add(dtype: Any, shape: list[int], what: str) -> Tensor:
            return graph.add_variable(dtype, shape, f"{name} {what}", tiles=tile)

        self.tile = np.array([tile])
        self.counts = add(UNSIGNED_INT, [weights.overflow.shape[0]], "counts")
        self.state = add(UNSIGNED_INT, [10], "loop state")
        self.any = add(BOOL, [], "spills")
        self.more = add(BOOL, [], "goes on")

    @property
    def first_dim(self) -> str:
        """The dimension of the first move: the loop begins at (0, 1), or at (1, 0)."""
        return "y" if self.plan.partition.y > 1 else "x"

    @property
    def last_buffer(self) -> Tensor:
        """The buffers in use after the loop."""
        return self.state[_BUFFERS]

    def _execute(self, what: str, codelet: Codelet, values: dict[str, Tensor]) -> Execute:
        compute = self.graph.add_compute_set(f"{self.name} {what}")
        self.graph.add_vertices(
            compute, codelet, self.tile, {key: t.expand_dims(0) for key, t in values.items()}
        )
        return Execute(compute, name=what)

    def build(
        self,
        first: Program,
        compute: Mapping[int, Program],
        moves: Mapping[tuple[str, int], Program],
        last: Program | None = None,
    ) -> Sequence:
        """The phase: the test, the first move, and the loop.

        Args:
            first: brings the buckets of the first offset into `first_buffers`.
            compute: by buffers, the step that computes.
            moves: by dimension and buffers before it, the exchange to the other buffers.
            last: what follows the loop, if it runs at all.
        """
        cast = self._execute(
            "cast counts", _CAST, {"words": self.weights.overflow, "counts": self.counts}
        )
        begin = self._execute(
            "begin", self._begin(), {"counts": self.counts, "state": self.state, "any": self.any}
        )
        number = {"z": _Z_MOVE, "y": _Y_MOVE, "x": _X_MOVE}
        cases = {4 * number[dim] + buffers: step for (dim, buffers), step in moves.items()}
        test = self._execute("more?", self._more(), {"state": self.state, "more": self.more})
        advance = self._execute(
            "advance", self._advance(), {"counts": self.counts, "state": self.state}
        )
        toggle = self._execute(
            "toggle", self._toggle(), {"counts": self.counts, "state": self.state}
        )
        body = Sequence(
            Switch(self.state[_WORK], compute, name="by buffer"),
            advance,
            Switch(self.state[_MOVE], cases, name="by direction"),
            toggle,
        )
        loop = RepeatWhileTrue(test, self.more, body, name="loop")
        return Sequence(
            cast,
            begin,
            If(self.any, Sequence(first, loop, last or Sequence()), name="any"),
            name="propagation",
        )

    # The loop's arithmetic, on one tile.

    def _record(self, counts: np.ndarray) -> OverflowInfo:
        parts = self.plan.partition
        return OverflowInfo.from_words(counts[0], (parts.x, parts.y, parts.z))

    def _begin(self) -> Codelet:
        parts = self.plan.partition

        def begin(v: VertexView) -> None:
            info, state = self._record(v.counts), v.state[0]
            state[...] = 0
            state[_X] = 0 if parts.y > 1 else 1
            # Offsets in y to visit at this x, the current one included.
            state[_ROWS] = info.y - 1 if parts.y > 1 else 1
            state[_TURNS] = parts.z
            state[_LEFT] = info.propagation_steps
            state[_BUFFERS] = self.first_buffers
            state[_FAR_Y if parts.y > 1 else _FAR_X] = 1
            v.any[...] = state[_LEFT] > 0
            _choose_work(info, state)

        fields = {"counts": In(UNSIGNED_INT), "state": Out(UNSIGNED_INT), "any": Out(BOOL)}
        return Codelet("begin", fields, begin, CONTROL_INSTRUCTIONS)

    def _more(self) -> Codelet:
        def more(v: VertexView) -> None:
            state = v.state[0]
            v.more[...] = state[_LEFT] > 0 or (self.homing and bool(_way_home(state)))

        return Codelet(
            "more", {"state": In(UNSIGNED_INT), "more": Out(BOOL)}, more, CONTROL_INSTRUCTIONS
        )

    def _advance(self) -> Codelet:
        parts = self.plan.partition
        sizes = {_X_MOVE: (_FAR_X, parts.x), _Y_MOVE: (_FAR_Y, parts.y), _Z_MOVE: (_FAR_Z, parts.z)}

        def advance(v: VertexView) -> None:
            info, state = self._record(v.counts), v.state[0]
            move = self._next_move(info, state)
            if move == _X_MOVE and state[_LEFT]:
                state[_X] += 1
                state[_ROWS] = info.y
                state[_TURNS] = parts.z
            if move:
                far, size = sizes[move]
                state[far] = (state[far] + 1) % size
            state[_MOVE] = 4 * move + int(state[_BUFFERS])

        fields = {"counts": In(UNSIGNED_INT), "state": InOut(UNSIGNED_INT)}
        return Codelet("advance", fields, advance, CONTROL_INSTRUCTIONS)

    def _next_move(self, info: OverflowInfo, state: np.ndarray) -> int:
        """Count the turn that was, and say where the buckets go next; 0: nowhere."""
        if state[_LEFT] and not info.used_x[state[_X]]:
            return _X_MOVE
        if state[_LEFT]:
            state[_LEFT] -= 1
            state[_TURNS] -= 1
            if state[_LEFT] and state[_TURNS]:
                return _Z_MOVE
            if state[_LEFT]:
                state[_TURNS] = self.plan.partition.z
                state[_ROWS] -= 1
                return _Y_MOVE if state[_ROWS] else _X_MOVE
        return _way_home(state) if self.homing else 0

    def _toggle(self) -> Codelet:
        def toggle(v: VertexView) -> None:
            state = v.state[0]
            move = int(state[_MOVE]) // 4
            if move:
                state[_BUFFERS] ^= self.toggles[move]
            _choose_work(self._record(v.counts), state)

        fields = {"counts": In(UNSIGNED_INT), "state": InOut(UNSIGNED_INT)}
        return Codelet("toggle", fields, toggle, CONTROL_INSTRUCTIONS)


def _choose_work(info: OverflowInfo, state: np.ndarray) -> None:
    works = state[_LEFT] > 0 and info.used_x[state[_X]]
    state[_WORK] = state[_BUFFERS] if works else IDLE


def _way_home(state: np.ndarray) -> int:
    """The move that brings the buckets nearer to where they began; 0: they are there."""
    for far, move in ((_FAR_Z, _Z_MOVE), (_FAR_Y, _Y_MOVE), (_FAR_X, _X_MOVE)):
        if state[far]:
            return move
    return 0


def _cast(v: VertexView) -> None:
    v.counts[...] = v.words


_CAST = Codelet(
    "cast counts",
    {"words": In(UNSIGNED_SHORT), "counts": Out(UNSIGNED_INT)},
    _cast,
    CONTROL_INSTRUCTIONS,
)
