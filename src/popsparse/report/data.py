"""What the machine report is made of, read from plain data and checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from popsparse.machine import ProgramNode
from popsparse.report.contents import ContentsData, read_contents
from popsparse.report.plain import amount, amounts, figures, listed, need
from popsparse.report.tree import read_program

PARTS = ("compute", "exchange", "sync", "host")
"""What the cycles of a step consist of."""


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
        TypeError, ValueError: not profiles; the message names the key that is missing or wrong.
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
    return [_profile(str(name), one) for name, one in profile.items()]


def _profile(name: str, profile: Any) -> ProfileData:
    what = f"profile of {name}" if name else "profile"
    if hasattr(profile, "to_dict"):
        profile = profile.to_dict(per_tile=True)
    cycles, memory = need(profile, "cycles", what), need(profile, "memory", what)
    rows_of = listed(need(profile, "steps", what), f"{what}, steps")
    steps = [_step(row, f"{what}, step {i}") for i, row in enumerate(rows_of)]
    order, rows = _timeline(profile.get("timeline", ()), len(steps), what)
    target = _target(need(profile, "target", what), f"{what}, target")
    worst = amount(need(memory, "worst_tile", f"{what}, memory"), f"{what}, worst_tile")
    tiles, contents = None, None
    if profile.get("tiles"):
        if worst >= target.get("tiles", 0):
            raise ValueError(f"{what}: worst_tile must be one of its tiles, got {worst:g}")
        size = int(amount(need(target, "tiles", f"{what}, target"), f"{what}, tiles"))
        tiles = _tiles(profile["tiles"], size, what)
        if profile.get("contents"):
            contents = read_contents(profile["contents"], size, len(steps), f"{what}, contents")
    codelets = profile.get("codelets", {})
    if not isinstance(codelets, Mapping):
        raise TypeError(f"{what}, codelets must be a mapping, got {type(codelets).__name__}")
    return ProfileData(
        name=name,
        target=target,
        counts=figures(profile.get("counts", {}), f"{what}, counts"),
        parts={p: amount(need(cycles, p, f"{what}, cycles"), f"{what}, {p}") for p in PARTS},
        cycles=amount(need(cycles, "total", f"{what}, cycles"), f"{what}, cycles"),
        seconds=amount(need(profile, "seconds", what), f"{what}, seconds"),
        limit=int(amount(need(memory, "limit", f"{what}, memory"), f"{what}, limit")),
        max_bytes=int(amount(need(memory, "max_tile_bytes", f"{what}, memory"), f"{what}, bytes")),
        worst_tile=int(worst),
        worst=figures(memory.get("by_category", {}), f"{what}, memory, by_category"),
        steps=steps,
        order=order,
        rows=rows,
        whole=bool(profile.get("timeline_is_whole", True)),
        codelets={str(k): _codelet(v, f"{what}, codelets") for k, v in codelets.items()},
        tiles=tiles,
        contents=contents,
        program=read_program(profile.get("tree", ()), len(steps), f"{what}, tree"),
    )


def _codelet(one: Any, what: str) -> dict[str, float]:
    return {key: amount(need(one, key, what), f"{what}, {key}") for key in ("vertices", "cycles")}


def _target(target: Any, what: str) -> dict[str, Any]:
    """A target's fields, of which the page reads name, tiles and clock."""
    if not isinstance(target, Mapping):
        raise TypeError(f"{what} must be a mapping, got {type(target).__name__}")
    for key in ("tiles", "clock_hz"):
        if key in target:
            amount(target[key], f"{what}, {key}")
    return dict(target)


def _step(row: Any, what: str) -> StepData:
    return StepData(
        name=str(need(row, "name", what)),
        kind=str(need(row, "kind", what)),
        runs=int(amount(need(row, "runs", what), f"{what}, runs")),
        parts={part: amount(need(row, part, what), f"{what}, {part}") for part in PARTS},
        balance=amount(row.get("balance", 0), f"{what}, balance"),
        received=int(amount(row.get("received_bytes", 0), f"{what}, received_bytes")),
        tiles=int(amount(row.get("tiles", 0), f"{what}, tiles")),
        flops=amount(row.get("flops", 0), f"{what}, flops"),
        peak_flops=amount(row.get("peak_flops", 0), f"{what}, peak_flops"),
    )


def _timeline(rows: Any, steps: int, what: str) -> tuple[np.ndarray, np.ndarray]:
    """The step and the cycles [compute, exchange, sync, host] of each run."""
    if not len(rows):
        return np.zeros(0, np.int64), np.zeros((0, len(PARTS)))
    expected = f"{what}: timeline rows must be [step, start, sync, exchange, compute, host]"
    try:
        found = np.asarray(rows, np.float64)
    except (TypeError, ValueError):
        raise ValueError(expected) from None
    if found.ndim != 2 or found.shape[1] != 6:
        raise ValueError(f"{expected}, got the shape {list(found.shape)}")
    if not np.isfinite(found).all() or (found < 0).any():
        raise ValueError(f"{expected}, finite and at least 0")
    order = found[:, 0].astype(np.int64)
    if order.max() >= steps:
        raise ValueError(f"{what}: the timeline names step {order.max()} of {steps}")
    return order, found[:, [4, 3, 2, 5]]


def _tiles(tiles: Any, size: int, what: str) -> Tiles:
    columns = {
        key: amounts(need(tiles, key, f"{what}, tiles"), f"{what}, tiles, {key}", size)
        for key in ("bytes", "cycles", "exchange", "received", "sent")
    }
    by_category = tiles.get("memory") or {"in use": columns["bytes"]}
    if not isinstance(by_category, Mapping):
        raise TypeError(f"{what}, memory must be a mapping, got {type(by_category).__name__}")
    memory = {
        str(key): amounts(value, f"{what}, memory, {key}", size)
        for key, value in by_category.items()
    }
    return Tiles(
        {key: value for key, value in memory.items() if value.any()},
        columns["cycles"],
        columns["exchange"],
        columns["received"],
        columns["sent"],
    )


@dataclass(frozen=True)
class BucketData:
    """How a pattern fills the buckets; keys as of `encoding_data`."""

    partition: tuple[int, int, int]
    groups: int
    nz_used: np.ndarray
    nz_capacity: int
    words_used: np.ndarray
    words_capacity: int
    spilled: int
    propagated: int
    propagation_steps: int
    sub_groups: np.ndarray | None = None
    grad_a_words_used: np.ndarray | None = None
    grad_a_words_capacity: int = 0
    wanted: np.ndarray | None = None
    foreign: np.ndarray | None = None
    ends: tuple[int, int, int] | None = None
    offsets: list[tuple[int, int]] = field(default_factory=list)
    travels: dict[tuple[int, int], int] = field(default_factory=dict)

    @classmethod
    def read(cls, encoding: Any) -> BucketData:
        """Check a mapping.

        Raises:
            TypeError, ValueError: a key missing, or lists whose length is not the partition's.
        """
        what = "encoding"
        partition = _integers(need(encoding, "partition", what), 3, "encoding, partition")
        groups = int(encoding.get("groups", 1))
        if groups < 1 or min(partition) < 1:
            raise ValueError(f"encoding: groups and partition must be 1 or more, got {partition}")
        rectangles = groups * partition[0] * partition[1]
        buckets = rectangles * partition[2]

        def many(key: str, size: int) -> np.ndarray | None:
            values = encoding.get(key)
            return None if values is None else amounts(values, f"encoding, {key}", size)

        def one(key: str) -> int:
            return int(amount(need(encoding, key, what), f"encoding, {key}"))

        ends = encoding.get("ends")
        return cls(
            partition=(partition[0], partition[1], partition[2]),
            groups=groups,
            nz_used=amounts(need(encoding, "nz_used", what), "encoding, nz_used", buckets),
            nz_capacity=one("nz_capacity"),
            words_used=amounts(need(encoding, "words_used", what), "encoding, words_used", buckets),
            words_capacity=one("words_capacity"),
            spilled=one("spilled"),
            propagated=one("propagated"),
            propagation_steps=one("propagation_steps"),
            sub_groups=many("sub_groups", buckets),
            grad_a_words_used=many("grad_a_words_used", buckets),
            grad_a_words_capacity=int(encoding.get("grad_a_words_capacity", 0)),
            wanted=many("wanted", rectangles),
            foreign=many("foreign", buckets),
            ends=None if ends is None else _triple(ends),
            offsets=[_pair(pair) for pair in encoding.get("offsets", ())],
            travels={(int(x), int(y)): int(values) for x, y, values in encoding.get("travels", ())},
        )


def _integers(values: Any, size: int, what: str) -> tuple[int, ...]:
    if not isinstance(values, (Sequence, np.ndarray)) or len(values) != size:
        raise ValueError(f"{what} must be {size} integers, got {values!r}")
    return tuple(int(v) for v in values)


def _triple(values: Any) -> tuple[int, int, int]:
    x, y, z = _integers(values, 3, "encoding, ends")
    return x, y, z


def _pair(values: Any) -> tuple[int, int]:
    x, y = _integers(values, 2, "encoding, offsets")
    return x, y
