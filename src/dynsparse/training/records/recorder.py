"""What the connectivity of a model did during a training: patterns, not dense masks.

A record is a folder: `record.json` says which layers there are, `update-000000.npz` holds the first
patterns, every later `update-*.npz` what one pattern update dropped and grew, and
`telemetry.jsonl` any figures logged on the way. docs/records.md describes the format for readers
without this package.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dynsparse.checks import check_integer
from dynsparse.files.whole import write_text_whole, write_whole
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.training.records.files import (
    FORMAT,
    HEAD,
    LEFT_OVERS,
    TELEMETRY,
    VERSION,
    RecordedLayer,
    RecordError,
    missing,
    opened,
    read_head,
    read_step,
    read_telemetry,
    to_json,
    update_files,
    update_name,
)

__all__ = ["DeadUnits", "RecordError", "RecordedLayer", "Recorder", "Records"]


class DeadUnits(NamedTuple):
    """How many inputs and outputs of a layer have no connection: int64 [steps] each."""

    inputs: np.ndarray
    outputs: np.ndarray


class Recorder:
    """Writes a record while a model trains.

    Args:
        path: the folder of the record. It is made if it does not exist. A record that is already
            there is replaced by `start` or continued after `truncate`.
        metadata: anything JSON can hold, to be kept with the record: data set, seed, flags. Arrays
            and tensors become lists. `pixel_permutation` is known to the pictures: input i of the
            first layer reads pixel `pixel_permutation[i]`.

    Every file appears whole or not at all, so a training may be killed at any moment.

    Raises:
        RecordError: the folder holds other files, or a record of another format version.
        TypeError: metadata that JSON cannot hold.
    """

    def __init__(
        self, path: str | os.PathLike[str], metadata: Mapping[str, Any] | None = None
    ) -> None:
        self.path = Path(path)
        self._metadata: dict[str, Any] = json.loads(to_json(dict(metadata or {}), "metadata"))
        self._patterns: dict[str, SparsePattern] = {}
        self._updates = 0
        self._step = -1
        if self.path.exists() and not self.path.is_dir():
            raise RecordError(f"expected a folder for the record, got the file {self.path}")
        self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / HEAD).exists():
            read_head(self.path)
        elif any(file.suffix not in LEFT_OVERS for file in self.path.iterdir()):
            raise RecordError(
                f"{self.path} holds other files: choose another folder for the record"
            )

    @property
    def has_record(self) -> bool:
        """Whether the folder holds a record that `truncate` can continue."""
        return (self.path / HEAD).exists() and (self.path / update_name(0)).exists()

    def start(self, patterns: Mapping[str, SparsePattern], step: int = 0) -> None:
        """Begin a record with the patterns the layers have now; an earlier one is removed.

        Raises:
            ValueError: no layer, or a negative step.
        """
        step = _step(step)
        if not patterns:
            raise ValueError("expected at least one layer to record, got none")
        # Newest first, and the head stays: whatever is left after a kill is still a record.
        for file in reversed(update_files(self.path)):
            file.unlink()
        (self.path / TELEMETRY).unlink(missing_ok=True)
        head = {
            "format": FORMAT,
            "version": VERSION,
            "layers": {
                name: {"shape": list(p.shape), "block_size": p.block_size}
                for name, p in patterns.items()
            },
            "metadata": self._metadata,
        }
        text = json.dumps(head, indent=2) + "\n"
        write_text_whole(self.path / HEAD, text)
        arrays = {f"positions/{name}": _compact(p.flat, p) for name, p in patterns.items()}
        self._updates, self._step = 0, -1
        self._write(step, arrays)
        self._patterns = dict(patterns)

    def update(self, step: int, rewirings: Mapping[str, Rewiring]) -> None:
        """Record one pattern update; layers that were not rewired may be left out.

        Raises:
            RecordError: nothing was started, the step is not after the last recorded one, or a
                rewiring does not begin at the pattern that was recorded last.
            KeyError: a layer that is not in the record.
        """
        step = self._next_step(step)
        arrays: dict[str, np.ndarray] = {}
        for name, rewiring in rewirings.items():
            if name not in self._patterns:
                raise KeyError(f"layer {name!r} is not in the record, which has {self._names()}")
            last, before = self._patterns[name], rewiring.before
            if before is not last and before != last:
                raise RecordError(
                    f"the rewiring of {name!r} at step {step} does not begin at the pattern "
                    "recorded last: record every update, or truncate the record to the "
                    "checkpoint's step"
                )
            arrays[f"dropped/{name}"] = _compact(before.flat[rewiring.dropped], before)
            arrays[f"grown/{name}"] = _compact(rewiring.after.flat[rewiring.grown], before)
        self._write(step, arrays)
        self._patterns |= {name: rewiring.after for name, rewiring in rewirings.items()}

    def log(self, step: int, figures: Mapping[str, Any]) -> None:
        """Add one line of telemetry, such as {"loss": 0.3}. Any step, any keys but "step".

        Raises:
            RecordError: nothing was started.
            TypeError: figures that JSON cannot hold.
        """
        if not self._updates:
            raise RecordError("call start or truncate before log")
        line = to_json({"step": _step(step), **_without_step(figures)}, "figures")
        with (self.path / TELEMETRY).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def truncate(self, step: int) -> None:
        """Forget what was recorded after `step`, and continue from there.

        For a training that resumes from a checkpoint taken at `step`.

        Raises:
            RecordError: the folder holds no record, a damaged one, or one that begins later.
        """
        step = _step(step)
        files = update_files(self.path)
        kept = len(files)
        while kept and read_step(files[kept - 1]) > step:
            kept -= 1
        if not kept:
            begins = f"begins at step {read_step(files[0])}" if files else "holds no patterns"
            raise RecordError(f"cannot continue the record {self.path} at step {step}: it {begins}")
        for file in reversed(files[kept:]):
            file.unlink()
        lines = [to_json(r, "figures") for r in read_telemetry(self.path) if r["step"] <= step]
        if (self.path / TELEMETRY).exists():
            text = "".join(line + "\n" for line in lines)
            write_text_whole(self.path / TELEMETRY, text)
        records = Records.load(self.path)
        self._patterns = {name: records.pattern(name, -1) for name in records.layers}
        self._updates, self._step = kept, records.steps[-1]

    def _names(self) -> str:
        return ", ".join(map(repr, self._patterns))

    def _next_step(self, step: int) -> int:
        step = _step(step)
        if not self._updates:
            raise RecordError("call start or truncate before update")
        if step <= self._step:
            raise RecordError(
                f"steps must increase: got step {step} after step {self._step} "
                "(truncate the record when a training resumes)"
            )
        return step

    def _write(self, step: int, arrays: dict[str, np.ndarray]) -> None:
        write_whole(
            self.path / update_name(self._updates),
            lambda file: np.savez_compressed(file, step=np.int64(step), **arrays),  # type: ignore[arg-type]
        )
        self._updates += 1
        self._step = step


class Records:
    """A record that was read. Index 0 is the first pattern, index i the one after update i.

    Attributes:
        path: the folder.
        layers: {name: RecordedLayer}, in the model's order.
        metadata: what the recorder was given.
        steps: the training step of each index, int [1 + updates], increasing.
        telemetry: the logged figures, one dict each, with its "step".
    """

    path: Path
    layers: dict[str, RecordedLayer]
    metadata: dict[str, Any]
    steps: list[int]
    telemetry: list[dict[str, Any]]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Records:
        """Read a record; the positions themselves are read when they are asked for.

        Raises:
            RecordError: no such folder, not a record, another version, or a damaged file.
        """
        records = cls()
        records.path = Path(path)
        records.layers, records.metadata = read_head(records.path)
        records._files = update_files(records.path)
        if not records._files:
            raise RecordError(f"the record {path} holds no patterns yet: run the training again")
        records.steps = [read_step(file) for file in records._files]
        for file, (before, after) in zip(records._files[1:], pairwise(records.steps), strict=True):
            if after <= before:
                raise RecordError(f"{file}: expected a step after {before}, got {after}")
        records.telemetry = read_telemetry(records.path)
        return records

    _files: list[Path]

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        return f"Records({str(self.path)!r}, layers={list(self.layers)}, patterns={len(self)})"

    def initial(self, layer: str) -> np.ndarray:
        """The flat block positions at index 0: sorted int64 [nnz]."""
        return self._positions(0, f"positions/{layer}", self._layer(layer))

    def changes(self, layer: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """What each update dropped and grew: two arrays of sorted flat positions, int64.

        A layer that an update left alone gives two empty arrays.
        """
        info = self._layer(layer)
        for index in range(1, len(self)):
            yield (
                self._positions(index, f"dropped/{layer}", info),
                self._positions(index, f"grown/{layer}", info),
            )

    def patterns(self, layer: str) -> Iterator[tuple[int, SparsePattern]]:
        """(step, pattern) for every index, each made from the one before it.

        Raises:
            RecordError: an update drops what is not there or grows what is.
        """
        info = self._layer(layer)
        flat = self.initial(layer)
        yield self.steps[0], _pattern(flat, info)
        for index, (dropped, grown) in enumerate(self.changes(layer), start=1):
            kept = np.setdiff1d(flat, dropped, assume_unique=True)
            after = np.union1d(kept, grown)
            if len(kept) + len(dropped) != len(flat) or len(kept) + len(grown) != len(after):
                raise RecordError(
                    f"{self._files[index]}: the update of {layer!r} does not fit the pattern before"
                )
            flat = after
            yield self.steps[index], _pattern(flat, info)

    def pattern(self, layer: str, index: int) -> SparsePattern:
        """The pattern at one index, counted from the end when negative.

        It costs all the updates before it; `patterns` gives them all at the cost of the last.

        Raises:
            IndexError: no such index.
        """
        wanted = operator.index(index) + (len(self) if index < 0 else 0)
        if not 0 <= wanted < len(self):
            raise IndexError(f"the record has {len(self)} patterns, got the index {index}")
        for at, (_, pattern) in enumerate(self.patterns(layer)):
            if at == wanted:
                return pattern
        raise AssertionError("unreachable: every index below len(self) is visited")

    def churn(self, layer: str) -> np.ndarray:
        """The share of the connections each update replaced: float64 [updates].

        A connection that an update dropped and grew again counts as kept.
        """
        nnz = len(self.initial(layer))
        shares = []
        for dropped, grown in self.changes(layer):
            left = len(np.setdiff1d(dropped, grown, assume_unique=True))
            shares.append(left / nnz if nnz else 0.0)
            nnz += len(grown) - len(dropped)
        return np.array(shares, np.float64)

    def exploration(self, layer: str) -> np.ndarray:
        """The share of all positions that were active at that index or before: float64 [indices].

        The exploration rate Rs of Liu et al., "Do We Actually Need Dense Over-Parameterization?
        In-Time Over-Parameterization in Sparse Training" (2021), section 3.
        """
        arrivals = [self.initial(layer), *(grown for _, grown in self.changes(layer))]
        index = np.repeat(np.arange(len(arrivals)), [len(a) for a in arrivals])
        _, first = np.unique(np.concatenate(arrivals), return_index=True)
        new = np.bincount(index[first], minlength=len(arrivals))
        return np.cumsum(new) / self._layer(layer).total

    def dead_units(self, layer: str) -> DeadUnits:
        """How many inputs and outputs have no connection at each index."""
        info = self._layer(layer)
        height, width = info.grid

        def degrees(flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return np.bincount(flat // width, minlength=height), np.bincount(
                flat % width, minlength=width
            )

        by_row, by_col = degrees(self.initial(layer))
        inputs, outputs = [int((by_col == 0).sum())], [int((by_row == 0).sum())]
        for dropped, grown in self.changes(layer):
            (lost_row, lost_col), (new_row, new_col) = degrees(dropped), degrees(grown)
            by_row = by_row - lost_row + new_row
            by_col = by_col - lost_col + new_col
            inputs.append(int((by_col == 0).sum()))
            outputs.append(int((by_row == 0).sum()))
        b = info.block_size
        return DeadUnits(np.array(inputs, np.int64) * b, np.array(outputs, np.int64) * b)

    def _layer(self, layer: str) -> RecordedLayer:
        if layer not in self.layers:
            names = ", ".join(map(repr, self.layers))
            raise KeyError(f"no layer {layer!r} in the record, which has {names}")
        return self.layers[layer]

    def _positions(self, index: int, key: str, info: RecordedLayer) -> np.ndarray:
        file = self._files[index]
        with opened(file) as archive:
            if key not in archive:
                if index:
                    return np.zeros(0, np.int64)
                raise missing(file, key, archive)
            flat = archive.read(key)
        if flat.ndim != 1 or flat.dtype not in (np.int32, np.int64):
            raise RecordError(f"{file}: {key!r} must be int32 or int64 [n], got {flat.dtype}")
        flat = flat.astype(np.int64)
        if len(flat) and not (
            flat[0] >= 0 and flat[-1] < info.total and (flat[1:] > flat[:-1]).all()
        ):
            raise RecordError(
                f"{file}: {key!r} must be sorted, distinct and within [0, {info.total})"
            )
        return flat


def _compact(flat: torch.Tensor, pattern: SparsePattern) -> np.ndarray:
    small = pattern.total <= np.iinfo(np.int32).max
    return flat.numpy().astype(np.int32 if small else np.int64)


def _pattern(flat: np.ndarray, info: RecordedLayer) -> SparsePattern:
    return SparsePattern.from_flat(
        torch.from_numpy(flat), shape=info.shape, block_size=info.block_size
    )


def _step(step: Any) -> int:
    number = check_integer("step", step)
    if number < 0:
        raise ValueError(f"step must be at least 0, got {number}")
    return number


def _without_step(figures: Mapping[str, Any]) -> dict[str, Any]:
    if "step" in figures:
        raise ValueError('figures must not hold the key "step": it is the first argument')
    return dict(figures)
