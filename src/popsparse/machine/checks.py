"""Checks before a program runs: mapping, locality, constants and races."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from popsparse.machine.dtypes import DType, LocalityError, MappingError, ProgramError, RaceError
from popsparse.machine.graph import Graph
from popsparse.machine.intervals import Runs, equal_runs, expand
from popsparse.machine.vertex import VertexSet


def check_mapping(graph: Graph) -> None:
    """Check that every element of every variable is mapped to a tile.

    Raises:
        MappingError: names the variable and its first elements without a tile.
    """
    for dtype, group in graph.variables.items():
        filled = [v for v in group if v.tensor.numel]
        starts = np.array([v.start for v in filled], np.int64)
        runs = Runs(starts, np.array([v.tensor.numel for v in filled], np.int64))
        pieces = graph.tile_map(dtype).split(runs)
        at = np.flatnonzero(pieces.tiles < 0)
        if len(at):
            variable = filled[int(pieces.run[at[0]])]
            first = int(pieces.starts[at[0]]) - variable.start
            last = first + int(pieces.lengths[at[0]]) - 1
            raise MappingError(
                f"elements {first} to {last} of {variable.name!r} are mapped to no tile: map them "
                "with set_tile_mapping"
            )


def _check_locality(graph: Graph, set_name: str, vertices: VertexSet) -> None:
    for name, tensor in vertices.edges.items():
        runs, vertex = vertices.runs(name)
        if not len(runs.starts):
            continue
        pieces = graph.tile_map(tensor.dtype).split(runs)
        vertex_tiles = vertices.tiles[vertex[pieces.run]]
        wrong = np.flatnonzero(pieces.tiles != vertex_tiles)
        if len(wrong):
            index = wrong[0]
            address = int(pieces.starts[index])
            variable = graph.variable_at(tensor.dtype, address)
            raise LocalityError(
                f"compute set {set_name!r}: vertex {int(vertex[pieces.run[index]])} of "
                f"{vertices.codelet.name!r} on tile {int(vertex_tiles[index])} is connected by "
                f"{name!r} to element {address - variable.start} of {variable.name!r} on tile "
                f"{int(pieces.tiles[index])}: copy it there first"
            )


def _check_constants(graph: Graph, set_name: str, vertices: VertexSet) -> None:
    for name, edge in vertices.codelet.fields.items():
        variable = graph.constant_in(vertices.edges[name]) if edge.writes else None
        if variable is not None:
            raise ProgramError(
                f"compute set {set_name!r}: {vertices.codelet.name!r} writes the constant "
                f"{variable.name!r} through {name!r}"
            )


def _check_races(graph: Graph, set_name: str, sets: Sequence[VertexSet], dtype: DType) -> None:
    """Check that no element is written by one vertex and accessed by another.

    Runs of all vertices are sorted and grouped where they overlap; only groups with a write and
    more than one vertex are checked element by element.
    """
    starts, ends, owners, writes = [], [], [], []
    first = 0
    for vertices in sets:
        for name, tensor in vertices.edges.items():
            if tensor.dtype != dtype:
                continue
            runs, vertex = vertices.runs(name)
            starts.append(runs.starts)
            ends.append(runs.ends)
            owners.append(vertex + first)
            is_write = vertices.codelet.fields[name].writes
            writes.append(np.full(len(runs.starts), is_write))
        first += vertices.count
    if not any(w.any() for w in writes):
        return
    start, end = np.concatenate(starts), np.concatenate(ends)
    owner, write = np.concatenate(owners), np.concatenate(writes)
    order = np.argsort(start, kind="stable")
    start, end, owner, write = start[order], end[order], owner[order], write[order]
    reach = np.maximum.accumulate(end)
    group = np.concatenate([[0], np.cumsum(start[1:] >= reach[:-1])])
    heads = equal_runs(group).starts
    mixed = np.minimum.reduceat(owner, heads) != np.maximum.reduceat(owner, heads)
    written = np.logical_or.reduceat(write, heads)
    suspect = (mixed & written)[group]
    if not suspect.any():
        return
    start, end = start[suspect], end[suspect]
    owner, write = owner[suspect], write[suspect]
    address, run = expand(start, end - start), np.repeat(np.arange(len(start)), end - start)
    order = np.lexsort((owner[run], address))
    address, who, does = address[order], owner[run][order], write[run][order]
    heads = equal_runs(address).starts
    several = np.minimum.reduceat(who, heads) != np.maximum.reduceat(who, heads)
    clash = np.flatnonzero(several & np.logical_or.reduceat(does, heads))
    if len(clash):
        _raise_race(graph, set_name, sets, dtype, int(address[heads[clash[0]]]))


def _raise_race(
    graph: Graph, set_name: str, sets: Sequence[VertexSet], dtype: DType, address: int
) -> None:
    variable = graph.variable_at(dtype, address)
    named, first = [], 0
    for vertices in sets:
        codelet = vertices.codelet
        for name, tensor in vertices.edges.items():
            if tensor.dtype != dtype:
                continue
            runs, vertex = vertices.runs(name)
            does = "writes" if codelet.fields[name].writes else "reads"
            touching = vertex[(runs.starts <= address) & (address < runs.ends)]
            named += [
                f"vertex {v + first} ({codelet.name!r}) {does} it by {name!r}" for v in touching[:2]
            ]
        first += vertices.count
    raise RaceError(
        f"compute set {set_name!r}: a race on element {address - variable.start} of "
        f"{variable.name!r}: {', '.join(named[:3])}"
    )


def check_compute_set(graph: Graph, set_name: str, sets: Sequence[VertexSet]) -> None:
    """Check that vertices access only their tile's memory, write no constant, and do not race.

    Raises:
        LocalityError, RaceError, ProgramError
    """
    dtypes = set()
    for vertices in sets:
        _check_locality(graph, set_name, vertices)
        _check_constants(graph, set_name, vertices)
        dtypes |= {t.dtype for t in vertices.edges.values() if t.numel}
    for dtype in sorted(dtypes, key=str):
        _check_races(graph, set_name, sets, dtype)
