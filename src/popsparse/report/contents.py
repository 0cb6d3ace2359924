"""Which variable and which vertices lie on which tile, and what each step of a program holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dynsparse.checks import check_choice, check_integer
from popsparse.machine import HeldVariable, PlacedVertices
from popsparse.report.plain import listed, need, table_of

_KINDS = ("constant", "always live", "not always live")
_MOST_CALLS = 8


@dataclass(frozen=True)
class ContentsData:
    """The memory of a program by variables.

    Attributes:
        tiles: of the machine.
        variables: all of them.
        live: by step (a number of `ProfileData.steps`) the numbers of the variables that are
            wanted while it runs and are not always live.
        vertices: of each step and codelet.
    """

    tiles: int
    variables: list[HeldVariable]
    live: dict[int, list[int]]
    vertices: list[PlacedVertices]

    @property
    def always(self) -> list[int]:
        """The numbers of the variables that are always live, constants included."""
        return [i for i, v in enumerate(self.variables) if v.kind != "not always live"]

    def bytes_on(self, tile: int) -> np.ndarray:
        """What each variable takes of a tile: int64 [variables].

        Raises:
            ValueError: no such tile.
        """
        owner, first, end, size = self._stretches
        here = (first <= self._tile(tile)) & (tile < end)
        return np.bincount(owner[here], size[here], len(self.variables)).astype(np.int64)

    def variables_on(self, tile: int) -> list[tuple[HeldVariable, int]]:
        """The variables of a tile and their bytes there, the largest first."""
        held = self.bytes_on(tile)
        order = np.argsort(-held, kind="stable")
        return [(self.variables[i], int(held[i])) for i in order.tolist() if held[i]]

    def vertices_on(self, tile: int) -> list[tuple[PlacedVertices, int]]:
        """The vertices of a tile: step and codelet, and how many there are."""
        at = self._tile(tile)
        found = [
            (one, sum(count for first, end, count in one.on if first <= at < end))
            for one in self.vertices
        ]
        return [(one, count) for one, count in found if count]

    def variables_at(self, step: int, tile: int | None = None) -> list[tuple[HeldVariable, int]]:
        """What is live while a step runs and not always live, with its bytes on a tile, or on all
        together: the largest first.

        Raises:
            ValueError: a step that holds nothing of its own, as those without memory; no such tile.
        """
        if step not in self.live:
            raise ValueError(f"step must be one of {len(self.live)} with memory, got {step}")
        held = self._all if tile is None else self.bytes_on(tile)
        rows = [(self.variables[i], int(held[i])) for i in self.live[step] if held[i]]
        return sorted(rows, key=lambda row: -row[1])

    def over_steps(
        self, steps: Sequence[int], tile: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bytes that are always live, and those that are not, at each of some steps.

        Args:
            steps: numbers of steps; such without memory count as if they held nothing.
            tile: on this one; on all together without.

        Returns:
            Two int64 [steps]. The first is the same everywhere.
        """
        held = self._all if tile is None else self.bytes_on(tile)
        always = np.full(len(steps), int(held[self.always].sum()), np.int64)
        other = [int(held[self.live.get(step, [])].sum()) for step in steps]
        return always, np.array(other, np.int64)

    def _tile(self, tile: int) -> int:
        found = check_integer("tile", tile, 0)
        if found >= self.tiles:
            raise ValueError(f"tile must be 0 to {self.tiles - 1}, got {found}")
        return found

    @cached_property
    def _all(self) -> np.ndarray:
        return np.array([v.bytes for v in self.variables], np.int64)

    @cached_property
    def _stretches(self) -> np.ndarray:
        """int64 [4, stretches]: variable, first tile, tile after the last, bytes."""
        rows = [(i, *one) for i, v in enumerate(self.variables) for one in v.on]
        return np.array(rows, np.int64).reshape(-1, 4).T


def read_contents(data: Any, tiles: int, steps: int, what: str) -> ContentsData:
    """From `machine.Contents.to_dict`, or JSON of it.

    Raises:
        TypeError, ValueError: something else; the message says where.
    """
    variables = [
        _variable(one, tiles, f"{what}, variable {i}")
        for i, one in enumerate(listed(need(data, "variables", what), f"{what}, variables"))
    ]
    live: dict[int, list[int]] = {}
    for pair in listed(need(data, "live", what), f"{what}, live"):
        place = f"{what}, live"
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise ValueError(f"{place} must be pairs of a step and its variables")
        step = _number(pair[0], steps, f"{place}, a step")
        live[step] = [
            _number(n, len(variables), f"{place}, a variable") for n in listed(pair[1], place)
        ]
    vertices = []
    for one in listed(need(data, "vertices", what), f"{what}, vertices"):
        step = _number(need(one, "step", f"{what}, vertices"), steps, f"{what}, vertices, step")
        codelet = str(need(one, "codelet", f"{what}, vertices"))
        on = _stretches_of(one, tiles, f"{what}, vertices")
        vertices.append(PlacedVertices(step, codelet, on))
    return ContentsData(tiles, variables, live, vertices)


def _variable(one: Any, tiles: int, what: str) -> HeldVariable:
    kind = check_choice(f"{what}: kind", need(one, "kind", what), _KINDS)
    on = _stretches_of(one, tiles, what)
    made_by = [str(call) for call in listed(need(one, "made_by", what), f"{what}, made_by")]
    return HeldVariable(
        str(need(one, "name", what)),
        str(need(one, "dtype", what)),
        kind,
        sum((end - first) * size for first, end, size in on),
        made_by[:_MOST_CALLS],
        on,
    )


def _stretches_of(one: Any, tiles: int, what: str) -> list[tuple[int, int, int]]:
    found = table_of(need(one, "on", what), 3, f"{what}, on")
    if len(found) and ((found[:, 0] >= found[:, 1]) | (found[:, 1] > tiles)).any():
        raise ValueError(f"{what}, on: expected stretches of tiles 0 to {tiles - 1}")
    return [(a, b, c) for a, b, c in found.tolist()]


def _number(value: Any, below: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < below:
        raise ValueError(f"{what} must be a number below {below}, got {str(value)[:40]!r}")
    return value
