"""The profile of a run: cycles, bytes and memory by step, and its file format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from dynsparse._core.checks import check_kind, check_types, shorten
from popsparse.machine import program as programs
from popsparse.machine.intervals import equal_runs
from popsparse.machine.memory import Contents, MemoryUse
from popsparse.machine.target import Target


@dataclass(frozen=True)
class ProgramNode:
    """One program of the tree.

    Attributes:
        kind: the name of its class: "Sequence", "Repeat", "Execute", ...
        name: its name, or "".
        step: its row in `Profile.steps`; None if it costs nothing itself.
        runs: how often it ran, over all places that call it.
        cycles: cycles of all these runs, with the programs inside. A program inside that other
            places call too counts by its share of the runs.
        parts: the programs inside: (label, number of the node, runs from here). Labels are "then"
            and "otherwise", "case 3" and "default", "condition" and "body"; "" otherwise.
    """

    kind: str
    name: str
    step: int | None
    runs: int
    cycles: float
    parts: list[tuple[str, int, int]]


def build_tree(
    root: programs.Program,
    rows: Mapping[programs.Program, int],
    cycles: Sequence[float],
    choices: Mapping[int, Mapping[int, int]],
) -> list[ProgramNode]:
    """The nodes, the root first and each before those inside it.

    Args:
        rows: the step of each program that has one.
        cycles: cycles of each step, all runs together.
        choices: for each step with a control value, how often it had which value.
    """
    order: list[programs.Program] = []
    seen: set[programs.Program] = set()

    def visit(program: programs.Program) -> None:
        if program not in seen:
            seen.add(program)
            for part in program.parts():
                visit(part)
            order.append(program)

    visit(root)
    order.reverse()
    number = {program: i for i, program in enumerate(order)}
    counts = [0] * len(order)
    counts[0] = 1
    parts: list[list[tuple[str, int, int]]] = []
    for i, program in enumerate(order):
        chosen = choices.get(rows.get(program, -1), {})
        inside = [(label, number[p], n) for label, p, n in _parts(program, counts[i], chosen)]
        for _, part, n in inside:
            counts[part] += n
        parts.append(inside)
    spent = [0.0] * len(order)
    for i in reversed(range(len(order))):
        row = rows.get(order[i])
        spent[i] = 0.0 if row is None else cycles[row]
        inner = [spent[part] * n / counts[part] for _, part, n in parts[i] if n]
        spent[i] += max([0.0, *inner]) if isinstance(order[i], programs.Parallel) else sum(inner)
    return [
        ProgramNode(type(p).__name__, p.name or "", rows.get(p), counts[i], spent[i], parts[i])
        for i, p in enumerate(order)
    ]


def _parts(
    program: programs.Program, runs: int, chosen: Mapping[int, int]
) -> list[tuple[str, programs.Program, int]]:
    """The programs inside a program, and how often each ran."""
    tests = sum(chosen.values())
    true = sum(count for value, count in chosen.items() if value)
    if isinstance(program, programs.Repeat):
        return [("", program.body, runs * program.count)]
    if isinstance(program, (programs.RepeatWhileTrue, programs.RepeatWhileFalse)):
        turns = true if program.runs_while else tests - true
        return [("condition", program.condition, tests), ("body", program.body, turns)]
    if isinstance(program, programs.If):
        return [("then", program.then, true), ("otherwise", program.otherwise, tests - true)]
    if isinstance(program, programs.Switch):
        cases = [(f"case {key}", p, chosen.get(key, 0)) for key, p in program.cases.items()]
        rest = tests - sum(count for _, _, count in cases)
        return [*cases, ("default", program.default, rest)]
    return [("", part, runs) for part in program.parts()]


PARTS = ("compute", "exchange", "sync", "host")
"""The parts of a step's cycles."""

# A timeline longer than this is cut off; the totals are complete.
_TIMELINE_ROWS = 100_000


def _total(values: np.ndarray | None) -> int:
    return 0 if values is None else int(values.sum())


@dataclass(eq=False)
class StepProfile:
    """One step of the program and the total cost of its runs.

    `kind` is "compute", "exchange", "control", "sync", "host", "remote" or "links". Cycles: `sync`
    (waiting for all tiles), `exchange` (links included), `compute` (vertices, and copies inside
    tiles), `host` (and remote buffers). `tile_cycles` are the cycles each tile itself computed,
    `tile_exchange` those it exchanged; it waits for the rest of the step. These and the bytes on
    the exchange are [tiles], or None for steps without. `to_host_bytes` and `from_host_bytes` are
    the bytes of all tiles over the host link; "remote" likewise for the memory beside the
    processors; `link_bytes` are those between processors. `flops` are the floating-point operations
    that the codelets declare, `peak_flops` what a tile could do in a cycle on operands of their
    type.
    """

    name: str
    kind: str
    runs: int = 0
    sync: float = 0
    exchange: float = 0
    compute: float = 0
    host: float = 0
    tile_cycles: np.ndarray | None = None
    tile_exchange: np.ndarray | None = None
    received_bytes: np.ndarray | None = None
    sent_bytes: np.ndarray | None = None
    local_bytes: np.ndarray | None = None
    to_host_bytes: int = 0
    from_host_bytes: int = 0
    to_remote_bytes: int = 0
    from_remote_bytes: int = 0
    link_bytes: int = 0
    flops: float = 0
    peak_flops: float = 0

    @property
    def cycles(self) -> float:
        return self.sync + self.exchange + self.compute + self.host

    @property
    def balance(self) -> float:
        """Mean compute cycles of the tiles over those of the busiest tile: 1 is perfectly even."""
        if self.tile_cycles is None or not self.compute:
            return 0.0
        return float(self.tile_cycles.mean()) / self.compute

    @property
    def parts(self) -> dict[str, float]:
        """Cycles by part."""
        return {part: getattr(self, part) for part in PARTS}

    @property
    def tiles(self) -> int:
        """Number of tiles that compute."""
        return 0 if self.tile_cycles is None else int(np.count_nonzero(self.tile_cycles))

    @property
    def received(self) -> int:
        """Bytes that all tiles together receive."""
        return _total(self.received_bytes)

    def _to_dict(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in _FIGURES}
        plain |= {"cycles": self.cycles, "balance": self.balance, "tiles": self.tiles}
        received = self.received_bytes
        plain |= {name: _total(getattr(self, name)) for name in _ARRAYS if name.endswith("bytes")}
        plain["max_received_bytes"] = 0 if received is None else int(received.max())
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        plain["per_tile"] = {n: _shorten(a) for n, a in arrays.items() if a is not None}
        return plain

    @classmethod
    def _from_dict(cls, row: Mapping[str, Any]) -> StepProfile:
        values: dict[str, Any] = {
            name: np.repeat(np.array([v for _, v in runs], float), [n for n, _ in runs])
            for name, runs in row["per_tile"].items()
        }
        values |= {name: convert(row[name]) for name, convert in _FIGURES.items()}
        return cls(**values)


_ARRAYS = ("tile_cycles", "tile_exchange", "received_bytes", "sent_bytes", "local_bytes")
_TYPES: dict[Any, Callable[[Any], Any]] = {"str": str, "int": int, "float": float}
_FIGURES = {f.name: _TYPES[f.type] for f in fields(StepProfile) if f.name not in _ARRAYS}


def _shorten(values: np.ndarray) -> list[list[float]]:
    """Figures of the tiles, run-length encoded: [number of tiles, the figure of each]."""
    first, counts = equal_runs(values)
    return [[n, value] for n, value in zip(counts.tolist(), values[first].tolist(), strict=True)]


class TimelineRow(NamedTuple):
    """One run of one step; `step` indexes `Profile.steps`, times are in cycles."""

    step: int
    start: float
    sync: float
    exchange: float
    compute: float
    host: float


@dataclass
class CodeletProfile:
    """All vertices of a codelet: how many ran and the sum of their estimated cycles."""

    vertices: int = 0
    cycles: float = 0


@dataclass(eq=False)
class Profile:
    """The cost of one run. Fields are plain numbers and NumPy arrays, except `contents` (the memory
    of the tiles over time) and `nodes` (the program that ran). `name` is the program's name in the
    engine.

    `cycles` is the elapsed time. Where processors run at once (`Parallel`), it is less than the sum
    over the steps: `parallel_cycles` of it passed there, in which each processor was busy for
    `busy` cycles, [processors]. `in_branch`: whether a branch is running, for engines.
    """

    target: Target
    memory: MemoryUse
    steps: list[StepProfile]
    contents: Contents
    name: str = ""
    timeline: list[TimelineRow] = field(default_factory=list)
    codelets: dict[str, CodeletProfile] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    cycles: float = 0
    timeline_is_whole: bool = True
    choices: dict[int, dict[int, int]] = field(default_factory=dict)
    nodes: list[ProgramNode] = field(default_factory=list)
    parallel_cycles: float = 0
    in_branch: bool = False
    busy: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if not self.busy.size:
            self.busy = np.zeros(self.target.processors)

    def count_choice(self, step: int, value: int) -> None:
        """Count a tested control value. For engines."""
        counts = self.choices.setdefault(step, {})
        counts[value] = counts.get(value, 0) + 1

    def tree(self) -> list[ProgramNode]:
        """The static program that ran, the root first, each program before those inside it. Empty
        if none ran."""
        return self.nodes

    def record(self, step: int, *, tile_cycles: np.ndarray | None = None, **amounts: float) -> None:
        """Add one run of a step: cycles and bytes by field of `StepProfile`. For engines."""
        row = self.steps[step]
        row.runs += 1
        for name, amount in amounts.items():
            setattr(row, name, getattr(row, name) + amount)
        if tile_cycles is not None:
            row.tile_cycles = (
                tile_cycles.copy() if row.tile_cycles is None else row.tile_cycles + tile_cycles
            )
        parts = {part: amounts.get(part, 0) for part in PARTS}
        if len(self.timeline) < _TIMELINE_ROWS:
            self.timeline.append(TimelineRow(step, self.cycles, **parts))
        else:
            self.timeline_is_whole = False
        self.cycles += sum(parts.values())

    def _total(self, part: str) -> float:
        return sum(getattr(step, part) for step in self.steps)

    @property
    def parts(self) -> dict[str, float]:
        """Cycles of all steps by part."""
        return {part: self._total(part) for part in PARTS}

    @property
    def sync_cycles(self) -> float:
        return self._total("sync")

    @property
    def exchange_cycles(self) -> float:
        return self._total("exchange")

    @property
    def compute_cycles(self) -> float:
        return self._total("compute")

    @property
    def host_cycles(self) -> float:
        return self._total("host")

    @property
    def to_host_bytes(self) -> int:
        """Bytes sent to the host over its link."""
        return int(self._total("to_host_bytes"))

    @property
    def from_host_bytes(self) -> int:
        """Bytes received from the host over its link."""
        return int(self._total("from_host_bytes"))

    @property
    def link_bytes(self) -> int:
        """Bytes sent from one processor to another."""
        return int(self._total("link_bytes"))

    @property
    def overlapped_cycles(self) -> float:
        """Cycles of steps that ran in parallel to the longest branch of a `Parallel`."""
        return sum(self.parts.values()) - self.cycles

    @property
    def idle(self) -> np.ndarray:
        """The share of `parallel_cycles` in which each processor waited, [processors]."""
        return 1 - self.busy / (self.parallel_cycles or np.inf)

    @property
    def seconds(self) -> float:
        return self.target.seconds(self.cycles)

    @property
    def received_bytes(self) -> np.ndarray:
        """Bytes each tile received over the exchange, [tiles]."""
        return self._sum_of("received_bytes")

    @property
    def sent_bytes(self) -> np.ndarray:
        return self._sum_of("sent_bytes")

    @property
    def tile_cycles(self) -> np.ndarray:
        """Cycles each tile computed, [tiles]."""
        return self._sum_of("tile_cycles")

    @property
    def tile_exchange(self) -> np.ndarray:
        """Cycles each tile exchanged, [tiles]."""
        return self._sum_of("tile_exchange")

    def _sum_of(self, part: str) -> np.ndarray:
        out = np.zeros(self.target.tiles)
        for step in self.steps:
            values = getattr(step, part)
            if values is not None:
                out += values
        return out

    def step(self, name: str) -> StepProfile:
        """The step of this name: its full path, or the end of the path if that is unique.

        Raises:
            KeyError: no step of that name, or several.
        """
        check_kind("name", name, str, "the name of a step")
        exact = [s for s in self.steps if s.name == name]
        matching = exact or [s for s in self.steps if s.name.endswith("/" + name)]
        if len(matching) != 1:
            names = ", ".join(s.name for s in (matching or self.steps)[:8])
            raise KeyError(f"{len(matching)} steps are named {shorten(name)}; among: {names}")
        return matching[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON or a report page.

        Keys: `program` (its name); `target`; `counts` (tiles used, variables, vertices, ...);
        `cycles` (total, sync, exchange, compute, host); `seconds`; `memory` (limit,
        max_tile_bytes, worst_tile, and that tile's by_category); `steps` (name, kind, runs, cycles
        by part, balance, bytes; and `per_tile`, figures of the tiles, run-length encoded);
        `timeline` (rows of step, start, sync, exchange, compute, host); `parallel` (cycles, busy);
        `codelets`; `tiles` (bytes, cycles, exchange, received, sent: lists; memory: lists by
        category); `contents` (as in `Contents.to_dict`); `tree` (nodes as of the method `tree`).
        """
        worst = self.memory.worst_tile
        return {
            "program": self.name,
            "target": self.target.to_dict(),
            "counts": dict(self.counts),
            "cycles": {"total": self.cycles, **self.parts},
            "seconds": self.seconds,
            "memory": {
                "limit": self.memory.limit,
                "max_tile_bytes": self.memory.max_tile_bytes,
                "worst_tile": worst,
                "by_category": {k: int(v[worst]) for k, v in self.memory.by_category.items()},
            },
            "steps": [step._to_dict() for step in self.steps],
            "timeline": [list(row) for row in self.timeline],
            "timeline_is_whole": self.timeline_is_whole,
            "parallel": {"cycles": self.parallel_cycles, "busy": self.busy.tolist()},
            "codelets": {name: asdict(codelet) for name, codelet in self.codelets.items()},
            "tiles": {
                "bytes": self.memory.per_tile.astype(int).tolist(),
                "cycles": self.tile_cycles.tolist(),
                "exchange": self.tile_exchange.tolist(),
                "received": self.received_bytes.tolist(),
                "sent": self.sent_bytes.tolist(),
                "memory": {k: v.astype(int).tolist() for k, v in self.memory.by_category.items()},
            },
            "contents": self.contents.to_dict(),
            "tree": [vars(node) for node in self.tree()],
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Profile:
        """The inverse of `to_dict`.

        Raises:
            LookupError, TypeError, ValueError: other data.
        """
        target = Target(**plain["target"])
        memory = {k: np.asarray(v, float) for k, v in plain["tiles"]["memory"].items()}
        tree = [
            ProgramNode(**{**node, "parts": [tuple(part) for part in node["parts"]]})
            for node in plain["tree"]
        ]
        parallel = plain.get("parallel", {})
        return cls(
            target,
            MemoryUse(memory, int(plain["memory"]["limit"])),
            [StepProfile._from_dict(row) for row in plain["steps"]],
            Contents.from_dict(plain["contents"], target.tiles),
            name=plain["program"],
            timeline=[TimelineRow(int(row[0]), *map(float, row[1:])) for row in plain["timeline"]],
            codelets={
                name: CodeletProfile(**plain_codelet)
                for name, plain_codelet in plain["codelets"].items()
            },
            counts=dict(plain["counts"]),
            cycles=float(plain["cycles"]["total"]),
            timeline_is_whole=plain["timeline_is_whole"],
            nodes=tree,
            parallel_cycles=float(parallel.get("cycles", 0)),
            busy=np.asarray(parallel.get("busy", []), float),
        )

    @check_types
    def summary(self, max_steps: int = 30) -> str:
        """A readable text: target, memory, cycles by kind, the costliest steps."""
        target, use = self.target, self.memory
        lines = [
            f"Target: {target.name}, {target.tiles:,} tiles of {target.bytes_per_tile:,} bytes, "
            f"{target.clock_hz / 1e9:g} GHz",
            "Graph: " + ", ".join(f"{n:,} {what}" for what, n in self.counts.items()),
            f"Memory: fullest tile {use.worst_tile} holds {use.max_tile_bytes:,} bytes "
            f"({use.max_tile_bytes / use.limit:.1%})",
        ]
        lines += [
            f"  {name:<14}{int(sizes[use.worst_tile]):>12,}"
            for name, sizes in use.by_category.items()
            if sizes[use.worst_tile]
        ]
        lines.append(f"Cycles: {self.cycles:,.0f} ({self.seconds * 1e6:,.2f} us)")
        for part, spent in self.parts.items():
            if spent:
                share = spent / (self.cycles + self.overlapped_cycles)
                lines.append(f"  {part:<14}{spent:>12,.0f}  {share:6.1%}")
        if self.parallel_cycles:
            shares = ", ".join(f"{share:.0%}" for share in self.idle)
            saved, during = self.overlapped_cycles, self.parallel_cycles
            lines.append(
                f"  {'at once':<14}{-saved:>12,.0f}  of {during:,.0f} in which processors ran at "
                f"once, idle for {shares}"
            )
        for what, out, back in (
            ("Host link", "to_host_bytes", "from_host_bytes"),
            ("Remote buffers", "to_remote_bytes", "from_remote_bytes"),
        ):
            down, up = self._total(out), self._total(back)
            if down or up:
                whom = "to the host" if what == "Host link" else "to them"
                lines.append(f"{what}: {down:,} bytes {whom}, {up:,} back")
        if self.link_bytes:
            lines.append(f"Links between processors: {self.link_bytes:,} bytes")
        ran = sorted((s for s in self.steps if s.runs), key=lambda s: -s.cycles)
        lines.append(
            f"{'Step':<36}{'kind':<9}{'runs':>7}{'cycles':>12}{'compute':>11}{'exchange':>11}"
            f"{'sync':>9}{'balance':>9}"
        )
        for step in ran[:max_steps]:
            balance = f"{step.balance:9.0%}" if step.tile_cycles is not None else f"{'':>9}"
            outside = step.to_host_bytes + step.from_host_bytes
            outside += step.to_remote_bytes + step.from_remote_bytes + step.link_bytes
            if outside:
                balance += f"  {outside:,} B outside"
            lines.append(
                f"{step.name[-35:]:<36}{step.kind:<9}{step.runs:>7,}{step.cycles:>12,.0f}"
                f"{step.compute:>11,.0f}{step.exchange:>11,.0f}{step.sync:>9,.0f}{balance}"
            )
        if len(ran) > max_steps:
            rest = sum(s.cycles for s in ran[max_steps:])
            lines.append(f"... {len(ran) - max_steps} more steps, {rest:,.0f} cycles")
        return "\n".join(lines)


FORMAT, VERSION = "dynsparse-profile", 2


def build_document(title: str, runs: Iterable[Profile], **more: Any) -> dict[str, Any]:
    """Plain data for a file.

    Args:
        title: title of the report page.
        runs: the profiles of the page.
        more: its other contents: "summary", "plan", "predicted", "encoding"; None is omitted.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "title": title,
        "summary": {},
        **{key: value for key, value in more.items() if value is not None},
        "runs": [run.to_dict() for run in runs],
    }
