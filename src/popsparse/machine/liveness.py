"""Which variables hold data that is still wanted, at each step of a program.

Variables that are never wanted at the same time can share memory. A variable is wanted from a step
that writes all of it (or a `WriteUndef`) to the last step that reads it. Wanted throughout:
constants, variables with a handle or an initial value, those that a program reads before it writes
them (they carry state from run to run), and those no program reads (results for the host).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from popsparse.machine import program as programs
from popsparse.machine.dtypes import DType
from popsparse.machine.graph import Graph
from popsparse.machine.intervals import union_lengths
from popsparse.machine.objects import Variable
from popsparse.machine.tensor import Tensor


@dataclass(frozen=True)
class Liveness:
    """Sets of variables, as bits: bit i is `variables[i]`. `moments` maps a set that is wanted
    at once to the name of a step where it is; `held` has the sets wanted while a step runs, one for
    each place it is called from if they differ."""

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
    # Written whole, so that what was there before is not wanted.
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
        self.effects: dict[int, _Effect] = {}
        self.moments: dict[int, str] = {}
        self.held: dict[programs.Program, list[int]] = {}

    def touched(self, tensors: Iterable[Tensor], whole: bool = False) -> int:
        """The variables that tensors view; with `whole`, only those they cover together."""
        by_type: dict[DType, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel:
                by_type.setdefault(tensor.dtype, []).append(tensor)
        bits = 0
        for dtype, parts in by_type.items():
            found = self._covered(dtype, parts) if whole else self._viewed(dtype, parts)
            for i in found:
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
        if id(leaf) not in self.effects:
            self.effects[id(leaf)] = self._effect(leaf)
        return self.effects[id(leaf)]

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
            return _Effect(replaces=self.touched([leaf.tensor], whole=True))
        else:
            return _Effect()
        return _Effect(self.touched(read), self.touched(written), self.touched(written, True))

    def before(self, program: programs.Program, after: int) -> int:
        """What is wanted before a program, given what is wanted after it."""
        if isinstance(program, programs.Sequence):
            for one in reversed(program.programs):
                after = self.before(one, after)
            return after
        if isinstance(program, programs.Call):
            return self.before(program.function, after)
        if isinstance(program, programs.Repeat):
            if not program.count:
                return after
            found = self.before(program.body, after)
            while (again := self.before(program.body, after | found)) != found:
                found = again
            return found
        if isinstance(program, (programs.RepeatWhileTrue, programs.RepeatWhileFalse)):
            test = self.touched([program.predicate])
            found = self.before(program.condition, after | test)
            while True:
                body = self.before(program.body, found)
                self._hold(program, after | body | test)
                again = self.before(program.condition, after | body | test)
                if again == found:
                    return found
                found = again
        if isinstance(program, programs.If):
            branches = [program.then, program.otherwise]
            test = self.touched([program.predicate])
        elif isinstance(program, programs.Switch):
            branches = [*program.cases.values(), program.default]
            test = self.touched([program.value])
        else:
            effect = self.effect(program)
            found = (after & ~effect.replaces) | effect.reads
            if not isinstance(program, (programs.WriteUndef, programs.Sync)):
                # Results and operands are held together while a step runs.
                self.moments.setdefault(found | after | effect.writes, program.name or "copy")
            self._hold(program, found | after | effect.writes)
            return found
        for branch in branches:
            test |= self.before(branch, after)
        self._hold(program, test)
        return test

    def _hold(self, program: programs.Program, wanted: int) -> None:
        """Note what is wanted while a step runs; sets inside others come from unfinished rounds."""
        others = self.held.get(program, [])
        if not any(wanted | one == one for one in others):
            kept = [one for one in others if one | wanted != wanted]
            self.held[program] = [*kept, wanted]


def _leaves(program: programs.Program, seen: set[int]) -> Iterable[programs.Program]:
    if id(program) in seen:
        return
    seen.add(id(program))
    yield program
    for part in program.parts():
        yield from _leaves(part, seen)


def analyse(graph: Graph, several: Iterable[programs.Program]) -> Liveness:
    """The liveness of a graph's variables under programs that run in any order."""
    found = _Analysis(graph)
    several = list(several)
    fixed = [v.is_constant for v in found.variables]
    always = sum(1 << i for i, is_fixed in enumerate(fixed) if is_fixed)
    always |= found.touched([*graph.handles.values(), *(t for t, _ in graph.initial)])
    read, seen = 0, set[int]()
    for program in several:
        for part in _leaves(program, seen):
            read |= found.effect(part).reads
            for control in ("predicate", "value"):
                if hasattr(part, control):
                    read |= found.touched([getattr(part, control)])
    always |= ~read & ((1 << len(found.variables)) - 1)
    while True:
        found.moments.clear()
        more = always
        for program in several:
            more |= found.before(program, always)
        if more == always:
            return Liveness(found.variables, always, found.moments, found.held)
        always = more
