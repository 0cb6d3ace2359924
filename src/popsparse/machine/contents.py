"""What lies where, and when: variables tile by tile, vertices, and what each step holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from popsparse.machine.callers import in_words
from popsparse.machine.graph import Graph
from popsparse.machine.holdings import Holdings
from popsparse.machine.liveness import Liveness
from popsparse.machine.program import Execute, Program
from popsparse.machine.target import Target

Stretches = list[tuple[int, int, int]]
"""Tiles with equal shares: (first tile, tile after the last, amount on each of them)."""


@dataclass(frozen=True)
class HeldVariable:
    """A variable, and what it takes of each tile.

    Attributes:
        name, dtype: its own.
        kind: "constant", "always live" or "not always live".
        bytes: on all tiles together.
        made_by: the calls that made it, the nearest first, each as "file:line function".
        on: stretches of tiles, (first, after the last, bytes on each).
    """

    name: str
    dtype: str
    kind: str
    bytes: int
    made_by: list[str]
    on: Stretches


@dataclass(frozen=True)
class PlacedVertices:
    """The vertices of a codelet in one step: `on` are (first tile, after the last, how many)."""

    step: int
    codelet: str
    on: Stretches


class Contents:
    """Of a graph under some programs; `rows` gives the step of the profile of each program that has
    one. Everything is found when it is asked for.
    """

    def __init__(
        self, graph: Graph, target: Target, liveness: Liveness, rows: Mapping[Program, int]
    ) -> None:
        self._graph, self._target = graph, target
        self._liveness = liveness
        self.rows = rows

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: what is found, without the graph that it is found in."""
        found = {name: getattr(self, name) for name in ("variables", "live", "vertices")}
        return {**found, "rows": {}}

    @cached_property
    def variables(self) -> list[HeldVariable]:
        """Every variable of the graph."""
        liveness = self._liveness
        holdings = Holdings.of(self._graph, self._target.tiles)
        always = liveness.members(liveness.always)
        on = _stretches(
            holdings.variable, holdings.tile, holdings.bytes, holdings.tiles, len(always)
        )
        kinds = np.where(always, "always live", "not always live").tolist()
        return [
            HeldVariable(
                variable.name,
                variable.dtype.name,
                "constant" if variable.is_constant else kind,
                variable.bytes,
                in_words(variable.made_by),
                where,
            )
            for variable, kind, where in zip(liveness.variables, kinds, on, strict=True)
        ]

    @cached_property
    def live(self) -> dict[int, list[int]]:
        """By step of the profile: which variables, by number, are wanted while it runs and are not
        always live. Of a step that several places call, where they take most."""
        liveness = self._liveness
        sizes = np.array([v.bytes for v in liveness.variables], float)
        always = liveness.members(liveness.always)
        found = {}
        for program, row in self.rows.items():
            sets = [liveness.members(bits) & ~always for bits in liveness.held.get(program, [])]
            most = max(sets, key=lambda members: float(sizes[members].sum()), default=always[:0])
            found[row] = np.flatnonzero(most).tolist()
        return found

    @cached_property
    def vertices(self) -> list[PlacedVertices]:
        """All vertices, by step and codelet."""
        found = []
        for program, row in self.rows.items():
            if not isinstance(program, Execute):
                continue
            for vertices in program.compute_set.merged():
                tiles = vertices.tiles
                one = np.ones(len(tiles), np.int64)
                (on,) = _stretches(0 * one, tiles, one, self._target.tiles, 1)
                found.append(PlacedVertices(row, vertices.codelet.name, on))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Keys: `variables` and `vertices` (mappings of their fields), `live`
        (pairs of a step and the numbers of its variables)."""
        return {
            "variables": [vars(one) for one in self.variables],
            "live": [[step, numbers] for step, numbers in sorted(self.live.items())],
            "vertices": [vars(one) for one in self.vertices],
        }


def _stretches(
    owner: np.ndarray, tile: np.ndarray, amount: np.ndarray, tiles: int, owners: int
) -> list[Stretches]:
    """What each owner has on the tiles, from single amounts."""
    keys, place = np.unique(owner * tiles + tile, return_inverse=True)
    total = np.bincount(place, weights=amount, minlength=len(keys)).astype(np.int64)
    first = np.ones(len(keys), bool)
    first[1:] = (keys[1:] != keys[:-1] + 1) | (keys[1:] % tiles == 0) | (total[1:] != total[:-1])
    begin = np.flatnonzero(first)
    length = np.diff(np.append(begin, len(keys)))
    out: list[Stretches] = [[] for _ in range(owners)]
    for key, count, each in zip(
        keys[begin].tolist(), length.tolist(), total[begin].tolist(), strict=True
    ):
        whose, start = divmod(key, tiles)
        out[whose].append((start, start + count, each))
    return out
