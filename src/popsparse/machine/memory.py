"""The memory of the tiles: liveness of variables, memory use, and the contents of tiles.

Variables that are never live at the same time can share memory. A variable is live from a step that
writes all of it (or a `WriteUndef`) to the last step that reads it. Always live: constants,
variables with a handle or an initial value, those that a program reads before it writes them (they
carry state from run to run), and those no program reads (results for the host).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dynsparse._core.checks import check_integer
from popsparse.machine import program as programs
from popsparse.machine.dtypes import DType, OutOfMemoryError
from popsparse.machine.exchange import CopyPlan
from popsparse.machine.graph import Graph, Variable, describe_callers
from popsparse.machine.intervals import Runs, equal_runs, union_lengths
from popsparse.machine.program import Execute, Program
from popsparse.machine.target import CONTROL_CODE, HOST_EXCHANGE, STACKS
from popsparse.machine.tensor import Tensor
from popsparse.machine.vertex import Codelet, VertexSet


@dataclass(frozen=True, eq=False)
class Holdings:
    """The pieces of variables on tiles: arrays with one element for each; variables by number."""

    variable: np.ndarray
    tile: np.ndarray
    bytes: np.ndarray
    tiles: int

    @classmethod
    def of(cls, graph: Graph, tiles: int) -> Holdings:
        """Holdings of all variables, numbered type by type as in `graph.variables`."""
        columns: list[list[np.ndarray]] = [[np.zeros(0, np.int64)] for _ in range(3)]
        first = 0
        for dtype, group in graph.variables.items():
            starts = np.array([v.start for v in group], np.int64)
            lengths = np.array([v.tensor.numel for v in group], np.int64)
            filled = np.flatnonzero(lengths)
            pieces = graph.tile_map(dtype).split(Runs(starts[filled], lengths[filled]))
            for column, values in zip(
                columns,
                (filled[pieces.run] + first, pieces.tiles, pieces.lengths * dtype.size),
                strict=True,
            ):
                column.append(values)
            first += len(group)
        variable, tile, size = (np.concatenate(c) for c in columns)
        return cls(variable, tile, size, tiles)

    def per_tile(self, members: np.ndarray) -> np.ndarray:
        """Bytes on each tile of the variables in a set (bool [variables])."""
        chosen = members[self.variable]
        weights = self.bytes[chosen]
        return np.bincount(self.tile[chosen], weights=weights, minlength=self.tiles)

    def on_tile(self, members: np.ndarray, tile: int) -> np.ndarray:
        """Bytes of each variable of a set on one tile, [variables]."""
        chosen = members[self.variable] & (self.tile == tile)
        weights = self.bytes[chosen]
        return np.bincount(self.variable[chosen], weights=weights, minlength=len(members))


@dataclass(frozen=True)
class Liveness:
    """Sets of variables, as bits: bit i is `variables[i]`. `moments` maps a set of variables live
    at once to the name of a step at which they are; `held` has the sets live while a step runs, one
    for each place that calls it if they differ."""

    variables: list[Variable]
    always: int
    moments: dict[int, str]
    held: dict[programs.Program, list[int]]

    def members(self, bits: int) -> np.ndarray:
        """Which variables are in a set: bool [variables]."""
        count = len(self.variables)
        raw = np.frombuffer(bits.to_bytes(count // 8 + 1, "little"), np.uint8)
        return np.unpackbits(raw, bitorder="little")[:count].astype(bool)


@dataclass(frozen=True)
class _Effect:
    """Sets of variables that a step reads and writes, as bits."""

    reads: int = 0
    writes: int = 0
    # Variables that are completely written: their earlier values are not live before the step.
    replaces: int = 0


class _Analysis:
    """Finds the variables that each program reads and writes, and those live while it runs."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.variables = [v for group in graph.variables.values() for v in group]
        self.first_bit: dict[DType, int] = {}
        self.starts: dict[DType, np.ndarray] = {}
        self.sizes: dict[DType, np.ndarray] = {}
        bit = 0
        for dtype, group in graph.variables.items():
            self.first_bit[dtype] = bit
            self.starts[dtype] = np.array([v.start for v in group])
            self.sizes[dtype] = np.array([v.tensor.numel for v in group])
            bit += len(group)
        self.effects: dict[programs.Program, _Effect] = {}
        self.moments: dict[int, str] = {}
        self.held: dict[programs.Program, list[int]] = {}

    def viewed_by(self, tensors: Iterable[Tensor], covered: bool = False) -> int:
        """The variables that tensors view; with `covered`, only those they cover completely."""
        by_type: dict[DType, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel:
                by_type.setdefault(tensor.dtype, []).append(tensor)
        bits = 0
        for dtype, parts in by_type.items():
            numbers = self._covered(dtype, parts) if covered else self._viewed(dtype, parts)
            for i in numbers:
                bits |= 1 << (self.first_bit[dtype] + i)
        return bits

    def _owner(self, dtype: DType, addresses: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.starts[dtype], addresses, "right") - 1

    def _viewed(self, dtype: DType, tensors: list[Tensor]) -> list[int]:
        """The variables of a type that the tensors view."""
        extents = [tensor.extents() for tensor in tensors]
        low, high = (np.concatenate(column) for column in zip(*extents, strict=True))
        owner = self._owner(dtype, low)
        # Stretches in one variable need no further check; handles may list millions of elements.
        apart = owner != self._owner(dtype, high)
        owners = [owner[~apart]]
        if apart.any():
            of = np.repeat(np.arange(len(tensors)), [len(first) for first, _ in extents])
            across = np.unique(of[apart]).tolist()
            owners += [self._owner(dtype, tensors[i].runs().starts) for i in across]
        return np.flatnonzero(np.bincount(np.concatenate(owners))).tolist()

    def _covered(self, dtype: DType, tensors: list[Tensor]) -> list[int]:
        """The variables of a type that the tensors together cover completely."""
        runs = [tensor.runs() for tensor in tensors]
        starts = np.concatenate([r.starts for r in runs])
        lengths = np.concatenate([r.lengths for r in runs])
        # Variables lie apart, so no run crosses from one into the next.
        sizes = self.sizes[dtype]
        covered = union_lengths(starts, lengths, self._owner(dtype, starts), len(sizes))
        return np.flatnonzero((covered == sizes) & (sizes > 0)).tolist()

    def effect(self, leaf: programs.Program) -> _Effect:
        """The variables that a step reads and writes."""
        if leaf not in self.effects:
            self.effects[leaf] = self._effect(leaf)
        return self.effects[leaf]

    def _effect(self, leaf: programs.Program) -> _Effect:
        if isinstance(leaf, programs.Copy):
            read = [s for s, _ in leaf.pairs if isinstance(s, Tensor)]
            written = [d for _, d in leaf.pairs if isinstance(d, Tensor)]
            read += [] if leaf.index is None else [leaf.index]
        elif isinstance(leaf, programs.CrossReplicaCopy):
            # Replicas that receive nothing keep what they have.
            read, written = [t for pair in leaf.pairs for t in pair], []
        elif isinstance(leaf, (programs.PrintTensor, programs.ErrorProgram)):
            read, written = [] if leaf.tensor is None else [leaf.tensor], []
        elif isinstance(leaf, programs.Execute):
            edges = [
                (vertices.codelet.fields[name], tensor)
                for vertices in leaf.compute_set.merged()
                for name, tensor in vertices.edges.items()
            ]
            read = [t for edge, t in edges if edge.reads]
            written = [t for edge, t in edges if edge.writes]
        elif isinstance(leaf, programs.WriteUndef):
            return _Effect(replaces=self.viewed_by([leaf.tensor], covered=True))
        else:
            return _Effect()
        return _Effect(self.viewed_by(read), self.viewed_by(written), self.viewed_by(written, True))

    def live_before(self, program: programs.Program, after: int) -> int:
        """The variables live before a program, given those live after it."""
        # Branches of Parallel use separate tiles: for each tile they are a sequence too.
        if isinstance(program, (programs.Sequence, programs.Parallel, programs.Call)):
            for part in reversed(program.parts()):
                after = self.live_before(part, after)
            return after
        if isinstance(program, programs.Repeat):
            if not program.count:
                return after
            live = self.live_before(program.body, after)
            while (again := self.live_before(program.body, after | live)) != live:
                live = again
            return live
        if isinstance(program, (programs.RepeatWhileTrue, programs.RepeatWhileFalse)):
            test = self.viewed_by([program.predicate])
            live = self.live_before(program.condition, after | test)
            while True:
                body = self.live_before(program.body, live)
                self._record_live(program, after | body | test)
                again = self.live_before(program.condition, after | body | test)
                if again == live:
                    return live
                live = again
        if isinstance(program, (programs.If, programs.Switch)):
            tested = program.predicate if isinstance(program, programs.If) else program.value
            live = self.viewed_by([tested])
            for branch in program.parts():
                live |= self.live_before(branch, after)
            self._record_live(program, live)
            return live
        effect = self.effect(program)
        live = (after & ~effect.replaces) | effect.reads
        if not isinstance(program, (programs.WriteUndef, programs.Sync)):
            # Results and operands are held together while a step runs.
            self.moments.setdefault(live | after | effect.writes, program.name or "copy")
        self._record_live(program, live | after | effect.writes)
        return live

    def _record_live(self, program: programs.Program, live: int) -> None:
        """Record what is live while a step runs; subsets of others come from unfinished rounds."""
        known = self.held.get(program, [])
        if not any(live | other == other for other in known):
            self.held[program] = [*(other for other in known if other | live != live), live]


def _leaves(program: programs.Program, seen: set[programs.Program]) -> Iterable[programs.Program]:
    if program in seen:
        return
    seen.add(program)
    yield program
    for part in program.parts():
        yield from _leaves(part, seen)


def analyse(graph: Graph, several: Iterable[programs.Program]) -> Liveness:
    """The liveness of a graph's variables under programs that run in any order."""
    analysis = _Analysis(graph)
    several = list(several)
    fixed = [v.is_constant for v in analysis.variables]
    always = sum(1 << i for i, is_fixed in enumerate(fixed) if is_fixed)
    always |= analysis.viewed_by([*graph.handles.values(), *(t for t, _ in graph.initial)])
    read, seen = 0, set[programs.Program]()
    for program in several:
        for part in _leaves(program, seen):
            read |= analysis.effect(part).reads
            for control in ("predicate", "value"):
                if hasattr(part, control):
                    read |= analysis.viewed_by([getattr(part, control)])
    always |= ~read & ((1 << len(analysis.variables)) - 1)
    while True:
        analysis.moments.clear()
        more = always
        for program in several:
            more |= analysis.live_before(program, always)
        if more == always:
            return Liveness(analysis.variables, always, analysis.moments, analysis.held)
        always = more


def find_carried(
    graph: Graph, first: Iterable[programs.Program], then: programs.Program
) -> list[Variable]:
    """The variables that some programs write and another reads as they left them."""
    analysis = _Analysis(graph)
    written, seen = 0, set[programs.Program]()
    for program in first:
        for part in _leaves(program, seen):
            written |= analysis.effect(part).writes
    carried = written & analysis.live_before(then, 0)
    return [v for i, v in enumerate(analysis.variables) if carried >> i & 1]


# A vertex holds the address of its codelet, for each edge a 32-bit pointer and count (Poplar's
# default vector layout SPAN; smaller ones exist, so this is an upper bound), a word per scalar.
_VERTEX_BYTES = 4
_EDGE_BYTES = 8
_SCALAR_BYTES = 4
# The smallest tiles that were built, the Mk1's. Smaller ones, as in tests, are charged neither
# stacks nor control code, which would fill most of their memory.
REAL_TILE = 256 * 1024


@dataclass(frozen=True, eq=False)
class MemoryUse:
    """Bytes per tile by category, [tiles] each.

    "temporary" is the peak size, on each tile, of the variables that are not always live, packed
    without gaps.
    """

    by_category: dict[str, np.ndarray]
    limit: int
    peak_step: str = ""
    largest: tuple[tuple[str, int], ...] = ()

    @property
    def per_tile(self) -> np.ndarray:
        return np.sum(list(self.by_category.values()), axis=0)

    @property
    def max_tile_bytes(self) -> int:
        return int(self.per_tile.max())

    @property
    def data_bytes(self) -> np.ndarray:
        """Bytes of variables and constants only, [tiles]."""
        data = ("always live", "temporary", "constants")
        return np.sum([self.by_category[name] for name in data], axis=0)

    @property
    def worst_tile(self) -> int:
        return int(self.per_tile.argmax())


def measure_memory(
    graph: Graph,
    vertex_sets: list[VertexSet],
    copies: list[CopyPlan],
    liveness: Liveness,
    stack_bytes: int | None = None,
    steps: int = 0,
) -> MemoryUse:
    """The bytes each tile needs.

    Args:
        stack_bytes: stack of each worker, on tiles with vertices; None: typical of real tiles.
        steps: number of compute sets, copies and decisions, whose control code every tile in use
            holds; if above 0, the code that talks to the host counts too.
    """
    target = graph.target
    tiles = target.tiles
    state, code = np.zeros(tiles), np.zeros(tiles)
    placed: dict[Codelet, np.ndarray] = {}
    for vertices in vertex_sets:
        codelet = vertices.codelet
        size = _VERTEX_BYTES + _EDGE_BYTES * len(codelet.fields)
        size += _SCALAR_BYTES * len(codelet.scalars)
        count = np.bincount(vertices.tiles, minlength=tiles)
        state += count * size
        placed[codelet] = placed.get(codelet, np.zeros(tiles, bool)) | (count > 0)
    for codelet, where in placed.items():
        code[where] += codelet.code_bytes
    exchange = np.zeros(tiles)
    for plan in copies:
        exchange += plan.code_bytes
    stacks = control = 0.0
    if target.bytes_per_tile >= REAL_TILE:
        stacks = STACKS.typical
        control = CONTROL_CODE.typical * steps + HOST_EXCHANGE.typical * (steps > 0)
    if stack_bytes is not None:
        stacks = float(stack_bytes * target.workers)

    holdings = Holdings.of(graph, tiles)
    always = liveness.members(liveness.always)
    constant = np.array([v.is_constant for v in liveness.variables], bool)
    temporary = np.zeros(tiles)
    sums = {}
    for bits in liveness.moments:
        sums[bits] = holdings.per_tile(liveness.members(bits) & ~always)
        np.maximum(temporary, sums[bits], out=temporary)
    everything = holdings.per_tile(np.ones(len(always), bool))
    in_use = (everything > 0) | (state > 0)
    categories = {
        "always live": holdings.per_tile(always & ~constant),
        "temporary": temporary,
        "constants": holdings.per_tile(constant),
        "vertex state": state,
        "vertex code": code,
        "exchange code": exchange,
        "control code": np.where(in_use, control, 0.0),
        "stacks": np.where(state > 0, stacks, 0.0),
    }
    # The peak step of the fullest tile, and what the tile then holds.
    tile = int(np.sum(list(categories.values()), axis=0).argmax())
    peak = max(sums, key=lambda bits: sums[bits][tile], default=0)
    held = holdings.on_tile(always | liveness.members(peak), tile)
    order = np.argsort(-held, kind="stable")[:5]
    largest = tuple((liveness.variables[i].name, int(held[i])) for i in order if held[i])
    step = liveness.moments.get(peak, "")
    return MemoryUse(categories, target.bytes_per_tile, step, largest)


def check_fit(use: MemoryUse) -> None:
    """Raises OutOfMemoryError, naming the largest variables of the worst tile."""
    need = use.per_tile
    over = int((need > use.limit).sum())
    if not over:
        return
    tile = use.worst_tile
    largest = ", ".join(f"{name!r} {size:,}" for name, size in use.largest)
    when = f" at step {use.peak_step!r}" if use.peak_step else ""
    raise OutOfMemoryError(
        f"tile {tile} needs {int(need[tile]):,} bytes{when} and has {use.limit:,} ({over} of "
        f"{len(need)} tiles are over); its largest variables in bytes: {largest}"
    )


Stretches = list[tuple[int, int, int]]
"""Tiles with equal shares: (first tile, tile after the last, amount on each of them)."""


@dataclass(frozen=True)
class HeldVariable:
    """A variable, and its bytes on each tile.

    Attributes:
        name, dtype: name and element type.
        kind: "constant", "always live" or "not always live".
        bytes: bytes on all tiles together.
        made_by: the calls that made it, the nearest first, each as "file:line function".
        on: ranges of tiles, (first, after the last, bytes on each).
    """

    name: str
    dtype: str
    kind: str
    bytes: int
    made_by: list[str]
    on: Stretches


@dataclass(frozen=True)
class PlacedVertices:
    """The vertices of a codelet in one step; `on` lists (first tile, after the last, vertices on
    each)."""

    step: int
    codelet: str
    on: Stretches


class Contents:
    """Variables and vertices of a graph under some programs, computed on first access.

    Attributes:
        tiles: number of tiles of the machine.
        rows: the step in the profile of each program that has one.
    """

    def __init__(self, graph: Graph, liveness: Liveness, rows: Mapping[Program, int]) -> None:
        self._graph, self._liveness = graph, liveness
        self.tiles = graph.target.tiles
        self.rows = rows

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles: the computed values, without the graph."""
        state = {name: getattr(self, name) for name in ("tiles", "variables", "live", "vertices")}
        return {**state, "rows": {}}

    @cached_property
    def variables(self) -> list[HeldVariable]:
        """Every variable of the graph."""
        liveness = self._liveness
        holdings = Holdings.of(self._graph, self.tiles)
        always = liveness.members(liveness.always)
        on = to_stretches(
            holdings.variable, holdings.tile, holdings.bytes, holdings.tiles, len(always)
        )
        kinds = np.where(always, "always live", "not always live").tolist()
        return [
            HeldVariable(
                variable.name,
                variable.dtype.name,
                "constant" if variable.is_constant else kind,
                variable.bytes,
                describe_callers(variable.made_by),
                where,
            )
            for variable, kind, where in zip(liveness.variables, kinds, on, strict=True)
        ]

    @cached_property
    def live(self) -> dict[int, list[int]]:
        """For each step of the profile the numbers of the variables that are live while it runs but
        not always live. For a step called from several places, the call where they take most."""
        liveness = self._liveness
        sizes = np.array([v.bytes for v in liveness.variables], float)
        always = liveness.members(liveness.always)
        by_step = {}
        for program, row in self.rows.items():
            sets = [liveness.members(bits) & ~always for bits in liveness.held.get(program, [])]
            most = max(sets, key=lambda members: float(sizes[members].sum()), default=always[:0])
            by_step[row] = np.flatnonzero(most).tolist()
        return by_step

    @cached_property
    def vertices(self) -> list[PlacedVertices]:
        """All vertices, by step and codelet."""
        placed = []
        for program, row in self.rows.items():
            if not isinstance(program, Execute):
                continue
            for vertices in program.compute_set.merged():
                tiles = vertices.tiles
                ones = np.ones(len(tiles), np.int64)
                (on,) = to_stretches(0 * ones, tiles, ones, self.tiles, 1)
                placed.append(PlacedVertices(row, vertices.codelet.name, on))
        return placed

    @property
    def always(self) -> list[int]:
        """The numbers of the variables that are always live, constants included."""
        return [i for i, v in enumerate(self.variables) if v.kind != "not always live"]

    def bytes_on(self, tile: int | None) -> np.ndarray:
        """Bytes of each variable on a tile, or on all tiles together: int64 [variables].

        Raises:
            ValueError: no such tile.
        """
        if tile is None:
            return np.array([v.bytes for v in self.variables], np.int64)
        owner, first, end, size = self._stretches
        on_tile = (first <= self._check_tile(tile)) & (tile < end)
        return np.bincount(owner[on_tile], size[on_tile], len(self.variables)).astype(np.int64)

    def variables_on(self, tile: int) -> list[tuple[HeldVariable, int]]:
        """The variables of a tile and their bytes there, the largest first."""
        held = self.bytes_on(tile)
        order = np.argsort(-held, kind="stable")
        return [(self.variables[i], int(held[i])) for i in order.tolist() if held[i]]

    def vertices_on(self, tile: int) -> list[tuple[PlacedVertices, int]]:
        """The vertices of a tile: step and codelet, and their number."""
        at = self._check_tile(tile)
        counts = [
            (vertices, sum(count for first, end, count in vertices.on if first <= at < end))
            for vertices in self.vertices
        ]
        return [(vertices, count) for vertices, count in counts if count]

    def variables_at(self, step: int, tile: int | None = None) -> list[tuple[HeldVariable, int]]:
        """The variables live while a step runs but not always live, with their bytes on a tile, or
        on all tiles together: the largest first.

        Raises:
            ValueError: a step without memory, or a tile that does not exist.
        """
        if step not in self.live:
            raise ValueError(f"step must be one of {len(self.live)} with memory, got {step}")
        held = self.bytes_on(tile)
        rows = [(self.variables[i], int(held[i])) for i in self.live[step] if held[i]]
        return sorted(rows, key=lambda row: -row[1])

    def over_steps(
        self, steps: Sequence[int], tile: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bytes that are always live, and those that are not, at each of the given steps.

        Args:
            steps: numbers of steps; steps without memory count as 0.
            tile: the tile; None: all tiles together.

        Returns:
            Two int64 [steps]. The first is constant.
        """
        held = self.bytes_on(tile)
        always = np.full(len(steps), int(held[self.always].sum()), np.int64)
        other = [int(held[self.live.get(step, [])].sum()) for step in steps]
        return always, np.array(other, np.int64)

    def _check_tile(self, tile: int) -> int:
        number = check_integer("tile", tile, 0)
        if number >= self.tiles:
            raise ValueError(f"tile must be 0 to {self.tiles - 1}, got {number}")
        return number

    @cached_property
    def _stretches(self) -> np.ndarray:
        """int64 [4, stretches]: variable, first tile, tile after the last, bytes."""
        rows = [(i, *stretch) for i, v in enumerate(self.variables) for stretch in v.on]
        return np.array(rows, np.int64).reshape(-1, 4).T

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Keys: `variables` and `vertices` (mappings of their fields), `live`
        (pairs of a step and the numbers of its variables)."""
        return {
            "variables": [vars(entry) for entry in self.variables],
            "live": [[step, numbers] for step, numbers in sorted(self.live.items())],
            "vertices": [vars(entry) for entry in self.vertices],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], tiles: int) -> Contents:
        """The inverse of `to_dict`, for a machine of this many tiles."""

        def of(kind: Any, entry: Mapping[str, Any]) -> Any:
            return kind(**{**entry, "on": [tuple(stretch) for stretch in entry["on"]]})

        contents = cls.__new__(cls)
        contents.__dict__.update(
            tiles=tiles,
            rows={},
            variables=[of(HeldVariable, entry) for entry in data["variables"]],
            live={step: list(held) for step, held in data["live"]},
            vertices=[of(PlacedVertices, entry) for entry in data["vertices"]],
        )
        return contents


def to_stretches(
    owner: np.ndarray, tile: np.ndarray, amount: np.ndarray, tiles: int, owners: int
) -> list[Stretches]:
    """The stretches of tiles of each owner, from single amounts."""
    keys, place = np.unique(owner * tiles + tile, return_inverse=True)
    total = np.bincount(place, weights=amount, minlength=len(keys)).astype(np.int64)
    begin, length = equal_runs(keys - np.arange(len(keys)), keys // tiles, total)
    out: list[Stretches] = [[] for _ in range(owners)]
    for key, count, each in zip(
        keys[begin].tolist(), length.tolist(), total[begin].tolist(), strict=True
    ):
        whose, start = divmod(key, tiles)
        out[whose].append((start, start + count, each))
    return out
