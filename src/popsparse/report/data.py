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

from dynsparse.checks import check_integer
from dynsparse.files.json_text import parse_json
from dynsparse.files.shorten import shortened
from dynsparse.files.whole import write_text_whole
from dynsparse.typed import typed
from popsparse.machine import HeldVariable, PlacedVertices, ProgramNode
from popsparse.machine.profile import FORMAT, VERSION, document

PARTS = ("compute", "exchange", "sync", "host")
"""What the cycles of a step consist of."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Let errors of the block be a ValueError that names what is read."""
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
        mine, its = self.tiles.memory, other.tiles.memory
        return mine.keys() == its.keys() and all(np.array_equal(mine[k], its[k]) for k in mine)


def read_profiles(profile: Any) -> list[ProfileData]:
    """One profile, or several by name of the pass.

    Raises:
        TypeError, ValueError: not profiles.
    """
    if profile is None:
        return []
    if hasattr(profile, "to_dict") or (isinstance(profile, Mapping) and "steps" in profile):
        return [_profile("", profile)]
    if not isinstance(profile, Mapping):
        raise TypeError(
            "profile must be a Profile, its to_dict(), or a mapping of pass names to those, "
            f"got {type(profile).__name__}"
        )
    for name, run in profile.items():
        if not (hasattr(run, "to_dict") or isinstance(run, Mapping)):
            raise TypeError(
                f"profile[{shortened(name)}] must be a Profile or its to_dict(), got "
                f"{shortened(run)}"
            )
    return [_profile(str(name), run) for name, run in profile.items()]


def _profile(name: str, profile: Any) -> ProfileData:
    if hasattr(profile, "to_dict"):
        profile = profile.to_dict(per_tile=True)
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
    return StepData(
        name=row["name"],
        kind=row["kind"],
        runs=int(row["runs"]),
        parts={part: float(row[part]) for part in PARTS},
        balance=float(row.get("balance", 0)),
        received=int(row.get("received_bytes", 0)),
        tiles=int(row.get("tiles", 0)),
        flops=float(row.get("flops", 0)),
        peak_flops=float(row.get("peak_flops", 0)),
    )


def _tiles(tiles: Mapping[str, Any]) -> Tiles:
    by_category = tiles.get("memory") or {"in use": tiles["bytes"]}
    memory = {key: np.asarray(values, np.float64) for key, values in by_category.items()}
    columns = (np.asarray(tiles[key], np.float64) for key in ("cycles", "exchange"))
    moved = (np.asarray(tiles[key], np.float64) for key in ("received", "sent"))
    return Tiles({key: one for key, one in memory.items() if one.any()}, *columns, *moved)


def _contents(data: Mapping[str, Any], tiles: int) -> ContentsData:
    """From `machine.Contents.to_dict`, or JSON of it."""

    def stretches(one: Mapping[str, Any]) -> list[tuple[int, int, int]]:
        return [(first, end, size) for first, end, size in one["on"]]

    def variable(one: Mapping[str, Any]) -> HeldVariable:
        on = stretches(one)
        size = sum((end - first) * each for first, end, each in on)
        return HeldVariable(one["name"], one["dtype"], one["kind"], size, one["made_by"], on)

    return ContentsData(
        tiles,
        [variable(one) for one in data["variables"]],
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
    names = [one.name for one in read_profiles(profile)]
    several = {} if profile is None else {"": profile}
    if isinstance(profile, Mapping) and "steps" not in profile:
        several = dict(profile)
    runs = [
        (name, one.to_dict() if hasattr(one, "to_dict") else one)
        for name, one in zip(names, several.values(), strict=True)
    ]
    more = {"plan": plan, "predicted": predicted, "encoding": encoding}
    content = document(title, runs, summary=dict(summary or {}), **more)
    try:
        text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected plain data for the file, got something else: {error}") from None
    write_text_whole(Path(path), text + "\n")
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
