"""Planning a copy: which bytes cross the exchange, and how long that takes.

Every route is fixed when the program is compiled. A tile receives `exchange_bytes_per_cycle` and
sends as much at the same time; any number of tiles may receive a send at no extra cost; data that
both tiles of a shared bus receive arrives at twice the rate; each contiguous fragment costs its
receiver a few control cycles alongside the payload. (`Target` gives the sources.) Bytes that stay
on their tile are copied by its workers instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from popsparse.machine.dtypes import DType, RaceError
from popsparse.machine.graph import Graph
from popsparse.machine.intervals import Runs, refine, union_lengths
from popsparse.machine.target import (
    CROSS_LINKS,
    EXCHANGE_ENTRY,
    LONG_SEND,
    PAIR_LINKS,
    RAIL_LINKS,
    RECEIVE,
    RECEIVE_POINTER,
    SEND,
    SHORT_WORDS,
    Target,
)
from popsparse.machine.tensor import Tensor


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """Bytes and cycles of one copy; arrays are per tile."""

    received_bytes: np.ndarray
    sent_bytes: np.ndarray
    local_bytes: np.ndarray
    fragments: np.ndarray
    code_bytes: np.ndarray
    exchange_per_tile: np.ndarray
    local_per_tile: np.ndarray
    link_bytes: int = 0
    link_cycles: int = 0

    @property
    def is_exchange(self) -> bool:
        """Whether any byte leaves its tile."""
        return bool(self.received_bytes.any())

    @property
    def exchange_cycles(self) -> int:
        """Cycles of the exchanges on the chips and, at the same time, on the links between them."""
        return max(int(self.exchange_per_tile.max()), self.link_cycles)

    @property
    def local_cycles(self) -> int:
        return int(self.local_per_tile.max())


@dataclass(frozen=True, eq=False)
class _Moves:
    """Stretches of one element type, each from one tile to one tile, sorted by destination."""

    src: np.ndarray
    dst: np.ndarray
    lengths: np.ndarray
    src_tiles: np.ndarray
    dst_tiles: np.ndarray


def _list_moves(graph: Graph, dtype: DType, pairs: list[tuple[Tensor, Tensor]]) -> _Moves:
    parts = [refine(src.runs(), dst.runs()) for src, dst in pairs]
    src, dst, lengths = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    tile_map = graph.tile_map(dtype)
    by_src = tile_map.split(Runs(src, lengths))
    dst = dst[by_src.run] + (by_src.starts - src[by_src.run])
    by_dst = tile_map.split(Runs(dst, by_src.lengths))
    src = by_src.starts[by_dst.run] + (by_dst.starts - dst[by_dst.run])
    order = np.argsort(by_dst.starts, kind="stable")
    return _Moves(
        src[order],
        by_dst.starts[order],
        by_dst.lengths[order],
        by_src.tiles[by_dst.run][order],
        by_dst.tiles[order],
    )


def _check_overlap(graph: Graph, dtype: DType, moves: _Moves, name: str) -> None:
    ends = moves.dst + moves.lengths
    repeated = np.flatnonzero(moves.dst[1:] < ends[:-1])
    if len(repeated):
        variable = graph.variable_at(dtype, int(moves.dst[repeated[0] + 1]))
        raise RaceError(
            f"copy {name!r} writes element {int(moves.dst[repeated[0] + 1]) - variable.start} of "
            f"{variable.name!r} twice"
        )
    # The last destination that starts before a source ends must itself end before the source.
    at = np.searchsorted(moves.dst, moves.src + moves.lengths, "left") - 1
    overlapping = np.flatnonzero((at >= 0) & (ends[np.maximum(at, 0)] > moves.src))
    if len(overlapping):
        variable = graph.variable_at(dtype, int(moves.src[overlapping[0]]))
        raise RaceError(
            f"copy {name!r} reads and writes the same elements of {variable.name!r}: copy through "
            f"a second variable"
        )


def plan_copy(
    graph: Graph, target: Target, pairs: list[tuple[Tensor, Tensor]], name: str
) -> CopyPlan:
    """Bytes and cycles of copying all pairs at once.

    Raises:
        RaceError: a destination overlaps a source or another destination.
    """
    tiles = target.tiles
    received = np.zeros(tiles)
    shared = np.zeros(tiles)
    sent = np.zeros(tiles)
    local = np.zeros(tiles)
    fragments = np.zeros(tiles)
    code = np.zeros(tiles)
    links = np.zeros((target.processors, target.processors))
    by_type: dict[DType, list[tuple[Tensor, Tensor]]] = {}
    for src, dst in pairs:
        if src.numel:
            by_type.setdefault(src.dtype, []).append((src, dst))
    for dtype, group in by_type.items():
        moves = _list_moves(graph, dtype, group)
        _check_overlap(graph, dtype, moves, name)
        far = moves.src_tiles != moves.dst_tiles
        near = ~far
        local += np.bincount(
            moves.dst_tiles[near], weights=moves.lengths[near] * dtype.size, minlength=tiles
        )
        if not far.any():
            continue
        src, dst, lengths = moves.src[far], moves.dst[far], moves.lengths[far]
        src_tiles, dst_tiles = moves.src_tiles[far], moves.dst_tiles[far]
        received += np.bincount(dst_tiles, weights=lengths * dtype.size, minlength=tiles)
        sent += union_lengths(src, lengths, src_tiles, tiles) * dtype.size
        received_runs, first = Runs(dst, lengths).join(dst - src, dst_tiles, src_tiles)
        fragments += np.bincount(dst_tiles[first], minlength=tiles)
        code += _receive_code(received_runs, dst_tiles[first], tiles)
        sent_runs = Runs(src[first], received_runs.lengths)
        code += _send_code(sent_runs, src_tiles[first], tiles, dtype.size)
        if target.processors > 1:
            links += _link_bytes(target, src, lengths, src_tiles, dst_tiles) * dtype.size
        if target.exchange_bus_tiles == 2:
            shared += _common_bytes(src, lengths, dst_tiles, tiles) * dtype.size
    rate = target.exchange_bytes_per_cycle
    payload = np.maximum((received - shared / 2) / rate, sent / rate)
    busy = np.ceil(np.maximum(payload, fragments * target.exchange_fragment_cycles))
    copying = np.ceil(local / target.memcpy_bytes_per_cycle)
    copying[local > 0] += target.local_copy_cycles
    code[code > 0] += EXCHANGE_ENTRY.typical
    return CopyPlan(
        received,
        sent,
        local,
        fragments,
        code,
        busy,
        copying,
        int(links.sum()),
        link_cycles(target, links),
    )


def _receive_code(fragments: Runs, to: np.ndarray, tiles: int) -> np.ndarray:
    """Bytes of the instructions that receive fragments, given in order of their addresses."""
    _, first = fragments.join(to)
    code = RECEIVE.typical * np.bincount(to, minlength=tiles)
    return np.asarray(code + RECEIVE_POINTER.typical * np.bincount(to[first], minlength=tiles))


def _send_code(fragments: Runs, tile: np.ndarray, tiles: int, element: int) -> np.ndarray:
    """Bytes of the instructions that send fragments; data for several tiles is sent once."""
    begin, size = fragments
    _, first = np.unique(begin * (int(size.max()) + 1) + size, return_index=True)
    long = size[first] * element > 4 * SHORT_WORDS
    each = SEND.typical + LONG_SEND.typical * long
    return np.bincount(tile[first], each, minlength=tiles)


def link_cycles(target: Target, links: np.ndarray) -> int:
    """Cycles of moving bytes between processors: links[i, j] from i to j, all at once.

    Bytes cross every link of their route at its rate, so the busiest links count.
    """
    loads: dict[tuple[int, int, bool], float] = {}
    for start, end in np.argwhere(links).tolist():
        for way, count in _route(start, end, len(links)):
            loads[way] = loads.get(way, 0.0) + links[start, end] / count
    worst = max(loads.values(), default=0.0)
    return math.ceil(worst / target.link_bytes_per_second * target.clock_hz)


def _route(start: int, end: int, processors: int) -> list[tuple[tuple[int, int, bool], float]]:
    """The links of the route between two processors of the ladder: (from, to, whether they serve
    only the pair), and how many there are."""
    if start // 2 == end // 2:
        return [((start, end, True), PAIR_LINKS.typical)]
    path = [start]
    # First across the rung, except for the last of an odd number, which has no partner.
    if (start ^ end) & 1 and start ^ 1 < processors:
        path.append(start ^ 1)
    step = 2 if end // 2 > start // 2 else -2
    while path[-1] // 2 != end // 2:
        path.append(path[-1] + step)
    path += [end] if path[-1] != end else []
    return [
        ((a, b, False), CROSS_LINKS.typical if a // 2 == b // 2 else RAIL_LINKS.typical)
        for a, b in itertools.pairwise(path)
    ]


def _link_bytes(
    target: Target,
    src: np.ndarray,
    lengths: np.ndarray,
    src_tiles: np.ndarray,
    dst_tiles: np.ndarray,
) -> np.ndarray:
    """Elements from processor to processor, [processors, processors]. Data for several tiles of one
    processor crosses once."""
    count, each = target.processors, target.processor_tiles
    start, to = src_tiles // each, dst_tiles // each
    far = start != to
    ways = (start * count + to)[far]
    return union_lengths(src[far], lengths[far], ways, count * count).reshape(count, count)


def _common_bytes(
    src: np.ndarray, lengths: np.ndarray, dst_tiles: np.ndarray, tiles: int
) -> np.ndarray:
    """Elements that each tile receives and its neighbour on the bus receives too: [tiles]."""
    received = union_lengths(src, lengths, dst_tiles, tiles)
    buses = -(-tiles // 2)
    both = union_lengths(src, lengths, dst_tiles // 2, buses)
    padded = np.zeros(2 * buses, np.int64)
    padded[:tiles] = received
    common = padded[0::2] + padded[1::2] - both
    return np.repeat(common, 2)[:tiles].astype(float)


def broadcast_cycles(target: Target, tensor: Tensor) -> int:
    """Exchange cycles of sending one control value to every tile: whole 32-bit words."""
    size = -(-tensor.dtype.size * tensor.numel // 4) * 4
    return math.ceil(size / target.exchange_bytes_per_cycle) if target.tiles > 1 else 0


def bind_pair(src: Tensor, dst: Tensor, memory: dict[DType, np.ndarray]) -> Callable[[], None]:
    """A function that moves the data of one pair of a copy."""
    if src.shape != dst.shape:
        # A shape in which both sides are plain views saves a temporary.
        as_dst, as_src = src.reshape(dst.shape), dst.reshape(src.shape)
        if as_src.is_regular and not as_dst.is_regular:
            dst = as_src
        else:
            src = as_dst
    from_, to = src.data(memory), dst.data(memory)
    if from_ is None:
        if to is not None:
            return lambda: np.copyto(to, src.values(memory))
        return lambda: dst.fill(memory, src.values(memory))
    if to is None:
        return lambda: dst.fill(memory, from_)
    return lambda: np.copyto(to, from_)
