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
from popsparse.machine.intervals import Runs, union_lengths
from popsparse.machine.program import Execute, Program
from popsparse.machine.target import CONTROL_CODE, HOST_EXCHANGE, STACKS, Target
from popsparse.machine.tensor import Tensor
from popsparse.machine.vertex import Codelet, VertexSet


@dataclass(frozen=True, eq=False)
class Holdings:
    """One element for each piece of a variable that lies on one tile; variables by number."""

    variable: np.ndarray
    tile: np.ndarray
    bytes: np.ndarray
    tiles: int

    @classmethod
    def of(cls, graph: Graph, tiles: int) -> Holdings:
        """Of all variables, numbered type by type as `graph.variables` has them."""
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
    """Sets of variables, as bits: bit i is `variables[i]`. `moments` maps a set that is live at
    once to the name of such a step; `held` has the sets live while a step runs, one for each place
    it is called from if they differ."""

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
    reads: int = 0
    writes: int = 0
    # Completely written, so that the earlier values are not live before.
    replaces: int = 0


class _Analysis:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.variables = [v for group in graph.variables.values() for v in group]
        self.first_bit: dict[DType, int] = {}
        self.starts: dict[DType, np.ndarray] = {}
        bit = 0
        for dtype, group in graph.variables.items():
            self.first_bit[dtype] = bit
            self.starts[dtype] = np.array([v.start for v in group])
            bit += len(group)
        self.effects: dict[programs.Program, _Effect] = {}
        self.moments: dict[int, str] = {}
        self.held: dict[programs.Program, list[int]] = {}

    def touched(self, tensors: Iterable[Tensor], covered: bool = False) -> int:
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
        """Which variables of a type tensors view."""
        extents = [tensor.extents() for tensor in tensors]
        low, high = (np.concatenate(column) for column in zip(*extents, strict=True))
        owner = self._owner(dtype, low)
        # Stretches in one variable need no closer look; handles may list millions of elements.
        apart = owner != self._owner(dtype, high)
        owners = [owner[~apart]]
        if apart.any():
            of = np.repeat(np.arange(len(tensors)), [len(first) for first, _ in extents])
            across = np.unique(of[apart]).tolist()
            owners += [self._owner(dtype, tensors[i].runs().starts) for i in across]
        return np.flatnonzero(np.bincount(np.concatenate(owners))).tolist()

    def _covered(self, dtype: DType, tensors: list[Tensor]) -> list[int]:
        """Which variables of a type tensors cover together."""
        runs = [tensor.runs() for tensor in tensors]
        starts = np.concatenate([r.starts for r in runs])
        lengths = np.concatenate([r.lengths for r in runs])
        # Variables lie apart, so no run crosses from one into the next.
        group = self.graph.variables[dtype]
        covered = union_lengths(starts, lengths, self._owner(dtype, starts), len(group))
        sizes = np.array([v.tensor.numel for v in group])
        return np.flatnonzero((covered == sizes) & (sizes > 0)).tolist()

    def effect(self, leaf: programs.Program) -> _Effect:
        """What a step reads and writes."""
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
            return _Effect(replaces=self.touched([leaf.tensor], covered=True))
        else:
            return _Effect()
        return _Effect(self.touched(read), self.touched(written), self.touched(written, True))

    def before(self, program: programs.Program, after: int) -> int:
        """What is live before a program, given what is live after it."""
        # Branches of Parallel lie on tiles of their own: for each tile they are a sequence too.
        if isinstance(program, (programs.Sequence, programs.Parallel)):
            for part in reversed(program.parts()):
                after = self.before(part, after)
            return after
        if isinstance(program, programs.Call):
            return self.before(program.function, after)
        if isinstance(program, programs.Repeat):
            if not program.count:
                return after
            live = self.before(program.body, after)
            while (again := self.before(program.body, after | live)) != live:
                live = again
            return live
        if isinstance(program, (programs.RepeatWhileTrue, programs.RepeatWhileFalse)):
            test = self.touched([program.predicate])
            live = self.before(program.condition, after | test)
            while True:
                body = self.before(program.body, live)
                self._hold(program, after | body | test)
                again = self.before(program.condition, after | body | test)
                if again == live:
                    return live
                live = again
        if isinstance(program, programs.If):
            branches = [program.then, program.otherwise]
            test = self.touched([program.predicate])
        elif isinstance(program, programs.Switch):
            branches = [*program.cases.values(), program.default]
            test = self.touched([program.value])
        else:
            effect = self.effect(program)
            live = (after & ~effect.replaces) | effect.reads
            if not isinstance(program, (programs.WriteUndef, programs.Sync)):
                # Results and operands are held together while a step runs.
                self.moments.setdefault(live | after | effect.writes, program.name or "copy")
            self._hold(program, live | after | effect.writes)
            return live
        for branch in branches:
            test |= self.before(branch, after)
        self._hold(program, test)
        return test

    def _hold(self, program: programs.Program, live: int) -> None:
        """Note what is live while a step runs; subsets of others come from unfinished rounds."""
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
    always |= analysis.touched([*graph.handles.values(), *(t for t, _ in graph.initial)])
    read, seen = 0, set[programs.Program]()
    for program in several:
        for part in _leaves(program, seen):
            read |= analysis.effect(part).reads
            for control in ("predicate", "value"):
                if hasattr(part, control):
                    read |= analysis.touched([getattr(part, control)])
    always |= ~read & ((1 << len(analysis.variables)) - 1)
    while True:
        analysis.moments.clear()
        more = always
        for program in several:
            more |= analysis.before(program, always)
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
    carried = written & analysis.before(then, 0)
    return [v for i, v in enumerate(analysis.variables) if carried >> i & 1]


# A vertex holds the address of its codelet, for each edge a 32-bit pointer and count (Poplar's
# default vector layout SPAN; smaller ones exist, so this is an upper bound), a word per scalar.
_VERTEX_BYTES = 4
_EDGE_BYTES = 8
_SCALAR_BYTES = 4
# The smallest tiles that were built, the Mk1's. Smaller ones, as tests have, are charged neither
# stacks nor control code: they would hold little else.
REAL_TILE = 256 * 1024


@dataclass(frozen=True, eq=False)
class MemoryUse:
    """Bytes per tile by category, [tiles] each.

    "temporary" is the most that variables which are not always live take at once on each tile, if
    they are packed without gaps.
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
        """Of variables and constants alone, [tiles]."""
        data = ("always live", "temporary", "constants")
        return np.sum([self.by_category[name] for name in data], axis=0)

    @property
    def worst_tile(self) -> int:
        return int(self.per_tile.argmax())


def measure_memory(
    graph: Graph,
    target: Target,
    vertex_sets: list[VertexSet],
    copies: list[CopyPlan],
    liveness: Liveness,
    stack_bytes: int | None = None,
    steps: int = 0,
) -> MemoryUse:
    """The bytes each tile needs.

    Args:
        stack_bytes: of each worker, on tiles with vertices; None: what is typical of real tiles.
        steps: compute sets, copies and decisions, whose control code every tile in use has; where
            there are any, also the code that talks to the host.
    """
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
    # The step at which the fullest tile is fullest, and what it then holds.
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
    """Variables and vertices of a graph under some programs, computed on first access.

    Attributes:
        tiles: of the machine.
        rows: the step of the profile of each program that has one.
    """

    def __init__(
        self, graph: Graph, target: Target, liveness: Liveness, rows: Mapping[Program, int]
    ) -> None:
        self._graph, self._liveness = graph, liveness
        self.tiles = target.tiles
        self.rows = rows

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the computed values, without the graph."""
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
        """By step of the profile: which variables, by number, are live while it runs and are not
        always live. Of a step that several places call, where they take most."""
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
        """Bytes of each variable on a tile, or on all together: int64 [variables].

        Raises:
            ValueError: no such tile.
        """
        if tile is None:
            return np.array([v.bytes for v in self.variables], np.int64)
        owner, first, end, size = self._stretches
        on_tile = (first <= self._tile(tile)) & (tile < end)
        return np.bincount(owner[on_tile], size[on_tile], len(self.variables)).astype(np.int64)

    def variables_on(self, tile: int) -> list[tuple[HeldVariable, int]]:
        """The variables of a tile and their bytes there, the largest first."""
        held = self.bytes_on(tile)
        order = np.argsort(-held, kind="stable")
        return [(self.variables[i], int(held[i])) for i in order.tolist() if held[i]]

    def vertices_on(self, tile: int) -> list[tuple[PlacedVertices, int]]:
        """The vertices of a tile: step and codelet, and how many there are."""
        at = self._tile(tile)
        counts = [
            (vertices, sum(count for first, end, count in vertices.on if first <= at < end))
            for vertices in self.vertices
        ]
        return [(vertices, count) for vertices, count in counts if count]

    def variables_at(self, step: int, tile: int | None = None) -> list[tuple[HeldVariable, int]]:
        """What is live while a step runs and not always live, with its bytes on a tile, or on all
        together: the largest first.

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
        """Bytes that are always live, and those that are not, at each of some steps.

        Args:
            steps: numbers of steps; steps without memory count as 0.
            tile: on this tile; None: on all together.

        Returns:
            Two int64 [steps]. The first is the same everywhere.
        """
        held = self.bytes_on(tile)
        always = np.full(len(steps), int(held[self.always].sum()), np.int64)
        other = [int(held[self.live.get(step, [])].sum()) for step in steps]
        return always, np.array(other, np.int64)

    def _tile(self, tile: int) -> int:
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
        """From what `to_dict` gave, of a machine of so many tiles."""

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
