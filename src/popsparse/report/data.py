"""Profiles as the report reads them, of runs and of files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dynsparse._core.checks import check_integer, check_kind, shortened, typed
from dynsparse._core.files.atomic_write import atomic_write_text
from dynsparse._core.files.limits import parse_json
from popsparse.machine import HeldVariable, PlacedVertices, ProgramNode
from popsparse.machine.profile import FORMAT, VERSION, build_document

PARTS = ("compute", "exchange", "sync", "host")
"""The parts of a step's cycles."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn errors of the block into a ValueError that names what is read."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"the key {error} is missing" if type(error) is KeyError else str(error)
        raise ValueError(f"{what}: {reason[:200]}") from None


@dataclass(frozen=True)
class ContentsData:
    """The memory of a program by variables.

    Attributes:
        tiles: of the machine.
        variables: all of them.
        live: by step (a number of `ProfileData.steps`) the numbers of the variables that are
            live while it runs and not always live.
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
        """Bytes of each variable on a tile: int64 [variables].

        Raises:
            ValueError: no such tile.
        """
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
        held = self._all if tile is None else self.bytes_on(tile)
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
        held = self._all if tile is None else self.bytes_on(tile)
        always = np.full(len(steps), int(held[self.always].sum()), np.int64)
        other = [int(held[self.live.get(step, [])].sum()) for step in steps]
        return always, np.array(other, np.int64)

    def _tile(self, tile: int) -> int:
        number = check_integer("tile", tile, 0)
        if number >= self.tiles:
            raise ValueError(f"tile must be 0 to {self.tiles - 1}, got {number}")
        return number

    @cached_property
    def _all(self) -> np.ndarray:
        return np.array([v.bytes for v in self.variables], np.int64)

    @cached_property
    def _stretches(self) -> np.ndarray:
        """int64 [4, stretches]: variable, first tile, tile after the last, bytes."""
        rows = [(i, *stretch) for i, v in enumerate(self.variables) for stretch in v.on]
        return np.array(rows, np.int64).reshape(-1, 4).T


@dataclass(frozen=True)
class StepData:
    """One step of the program, all runs together; cycles by part of `PARTS`.

    Attributes:
        balance: the mean of all tiles' compute over that of the busiest one.
        received: bytes on the exchange.
        tiles: how many compute.
        flops: floating-point operations; peak_flops: what a tile could do of them in a cycle.
    """

    name: str
    kind: str
    runs: int
    parts: dict[str, float]
    balance: float
    received: int
    tiles: int = 0
    flops: float = 0.0
    peak_flops: float = 0.0

    @property
    def cycles(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Tiles:
    """Figures of every tile, float64 [tiles]; `memory` is bytes by category."""

    memory: dict[str, np.ndarray]
    cycles: np.ndarray
    exchange: np.ndarray
    received: np.ndarray
    sent: np.ndarray


@dataclass(frozen=True)
class ProfileData:
    """A run of the machine, as `Profile.to_dict()` gives it.

    `rows` are [runs, 4] cycles in the order of `PARTS`, `order` the step of each, in time.
    """

    name: str
    target: Mapping[str, Any]
    counts: Mapping[str, float]
    parts: dict[str, float]
    cycles: float
    seconds: float
    limit: int
    max_bytes: int
    worst_tile: int
    worst: Mapping[str, float]
    steps: list[StepData]
    order: np.ndarray
    rows: np.ndarray
    whole: bool
    codelets: Mapping[str, Mapping[str, float]]
    tiles: Tiles | None
    contents: ContentsData | None = None
    program: list[ProgramNode] = field(default_factory=list)

    def same_memory(self, other: ProfileData) -> bool:
        """Whether every tile's memory is the other's, as of two passes of one program."""
        if self.tiles is None or other.tiles is None:
            return False
        first, second = self.tiles.memory, other.tiles.memory
        return first.keys() == second.keys() and all(
            np.array_equal(first[k], second[k]) for k in first
        )


def read_profiles(profile: Any) -> list[ProfileData]:
    """One profile, or several by name of the pass.

    Raises:
        TypeError, ValueError: not profiles.
    """
    return [_profile(name, run) for name, run in _plain_runs(profile)]


def _plain_runs(profile: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Each pass and its `Profile.to_dict()`; None has none."""
    if profile is None:
        return []
    if hasattr(profile, "to_dict") or (isinstance(profile, Mapping) and "steps" in profile):
        profile = {"": profile}
    if not isinstance(profile, Mapping):
        raise TypeError(
            "profile must be a Profile, its to_dict(), or a mapping of pass names to those, "
            f"got {type(profile).__name__}"
        )
    runs = []
    for name, run in profile.items():
        plain = run.to_dict() if hasattr(run, "to_dict") else run
        kind = "a Profile or its to_dict()"
        runs.append((str(name), check_kind(f"profile[{shortened(name)}]", plain, Mapping, kind)))
    return runs


def _profile(name: str, profile: Mapping[str, Any]) -> ProfileData:
    with reading(f"profile of {name}" if name else "profile"):
        cycles, memory, target = profile["cycles"], profile["memory"], dict(profile["target"])
        tiles = _tiles(profile["tiles"]) if profile.get("tiles") else None
        contents = profile.get("contents") if tiles else None
        timeline = np.asarray(profile.get("timeline", ()), np.float64).reshape(-1, 6)
        return ProfileData(
            name=name,
            target=target,
            counts=dict(profile.get("counts", {})),
            parts={part: float(cycles[part]) for part in PARTS},
            cycles=float(cycles["total"]),
            seconds=float(profile["seconds"]),
            limit=int(memory["limit"]),
            max_bytes=int(memory["max_tile_bytes"]),
            worst_tile=int(memory["worst_tile"]),
            worst=dict(memory.get("by_category", {})),
            steps=[_step(row) for row in profile["steps"]],
            order=timeline[:, 0].astype(np.int64),
            rows=timeline[:, [4, 3, 2, 5]],
            whole=bool(profile.get("timeline_is_whole", True)),
            codelets=dict(profile.get("codelets", {})),
            tiles=tiles,
            contents=_contents(contents, int(target["tiles"])) if contents else None,
            program=[
                ProgramNode(**{**node, "parts": [tuple(part) for part in node["parts"]]})
                for node in profile.get("tree", ())
            ],
        )


def _step(row: Mapping[str, Any]) -> StepData:
    parts = {part: float(row[part]) for part in PARTS}
    received, tiles = (int(row.get(key, 0)) for key in ("received_bytes", "tiles"))
    balance, flops, peak = (float(row.get(key, 0)) for key in ("balance", "flops", "peak_flops"))
    name, kind, runs = row["name"], row["kind"], int(row["runs"])
    return StepData(name, kind, runs, parts, balance, received, tiles, flops, peak)


def _tiles(tiles: Mapping[str, Any]) -> Tiles:
    by_category = tiles.get("memory") or {"in use": tiles["bytes"]}
    memory = {key: np.asarray(values, np.float64) for key, values in by_category.items()}
    keys = ("cycles", "exchange", "received", "sent")
    columns = (np.asarray(tiles[key], np.float64) for key in keys)
    return Tiles({key: values for key, values in memory.items() if values.any()}, *columns)


def _contents(data: Mapping[str, Any], tiles: int) -> ContentsData:
    """From `machine.Contents.to_dict`, or JSON of it."""

    def stretches(entry: Mapping[str, Any]) -> list[tuple[int, int, int]]:
        return [(first, end, size) for first, end, size in entry["on"]]

    def variable(entry: Mapping[str, Any]) -> HeldVariable:
        on = stretches(entry)
        size = sum((end - first) * each for first, end, each in on)
        return HeldVariable(
            entry["name"], entry["dtype"], entry["kind"], size, entry["made_by"], on
        )

    return ContentsData(
        tiles,
        [variable(entry) for entry in data["variables"]],
        {step: list(held) for step, held in data["live"]},
        [PlacedVertices(v["step"], v["codelet"], stretches(v)) for v in data["vertices"]],
    )


@dataclass(frozen=True)
class StoredProfile:
    """The content of a file.

    Attributes:
        title: as of the page.
        file: where it was read from.
        profiles: of its runs, by the names of their programs.
        page: what `report_html` and `write_report` make a page of, by argument.
    """

    title: str
    file: Path
    profiles: list[ProfileData]
    page: dict[str, Any]


@typed
def save_profile(
    path: str | os.PathLike[str],
    *,
    title: str,
    profile: Any,
    summary: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    predicted: Mapping[str, Any] | None = None,
    encoding: Mapping[str, Any] | None = None,
) -> Path:
    """Write a profile for `dynsparse report` and `load_profile`: JSON.

    Args:
        path: the file, replaced if it exists; its folder must exist.
        title, profile, summary, plan, predicted, encoding: as of `report_html`.

    Returns:
        The path.

    Raises:
        TypeError, ValueError: data of another kind; the message names the key.
        OSError: the file cannot be written.
    """
    runs = _plain_runs(profile)
    for name, run in runs:
        _profile(name, run)
    more = {"plan": plan, "predicted": predicted, "encoding": encoding}
    content = build_document(title, runs, summary=dict(summary or {}), **more)
    try:
        text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected plain data for the file, got something else: {error}") from None
    atomic_write_text(Path(path), text + "\n")
    return Path(path)


@typed
def load_profile(path: str | os.PathLike[str]) -> StoredProfile:
    """Read a file that `save_profile`, `dynsparse matmul --profile` or an engine's `autoReport`
    wrote.

    Raises:
        ValueError: no such profile, or one of a later version.
        OSError: the file cannot be read.
    """
    file = Path(path)
    text = file.read_bytes()
    try:
        content = parse_json(text)
    except ValueError:
        raise ValueError(f"{file}: expected a profile, got no JSON of Unicode text") from None
    if not isinstance(content, Mapping) or content.get("format") != FORMAT:
        raise ValueError(f"{file}: expected a profile, the key 'format' must be {FORMAT!r}")
    if content.get("version") != VERSION:
        raise ValueError(
            f"{file}: version {VERSION} is known here, got {shortened(content.get('version'))}"
        )
    with reading(str(file)):
        runs: dict[str, Any] = {}
        for run in content["runs"]:
            program = run["program"]
            count = sum(name.partition(" (run ")[0] == program for name in runs)
            runs[f"{program} (run {count + 1})" if count else program] = run
        page = {key: content[key] for key in ("title", "summary")}
        page |= {key: content[key] for key in ("plan", "predicted", "encoding") if key in content}
        return StoredProfile(page["title"], file, read_profiles(runs), {**page, "profile": runs})
