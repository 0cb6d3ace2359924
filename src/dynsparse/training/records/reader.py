"""Read a record: the patterns, how they changed, and figures of the connectivity."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dynsparse._core.checks import check_types
from dynsparse.pattern import SparsePattern
from dynsparse.training.records.files import (
    RecordedLayer,
    RecordError,
    list_update_files,
    open_arrays,
    read_array,
    read_head,
    read_step,
    read_telemetry,
    write_pending_updates,
)


class DeadUnits(NamedTuple):
    """How many inputs and outputs of a layer have no connection: int64 [steps] each."""

    inputs: np.ndarray
    outputs: np.ndarray


class Records:
    """A record. Index 0 is the first pattern, index i the one after update i.

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
    @check_types
    def load(cls, path: str | os.PathLike[str], *, updates: int | None = None) -> Records:
        """Read a record; positions are read when they are needed.

        Args:
            updates: how many of its `update-*.npz` files to read, from the first; None reads all.

        Raises:
            RecordError: no such folder, not a record, another version, or a damaged file.
        """
        write_pending_updates()
        records = cls()
        records.path = Path(path)
        records.layers, records.metadata = read_head(records.path)
        records._files = list_update_files(records.path)[:updates]
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

    @check_types
    def initial(self, layer: str) -> np.ndarray:
        """The flat block positions at index 0: sorted int64 [nnz]."""
        return self._positions(0, f"positions/{layer}", self._layer(layer))

    @check_types
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

    @check_types
    def patterns(self, layer: str) -> Iterator[tuple[int, SparsePattern]]:
        """(step, pattern) for every index, each made from the one before it.

        Raises:
            RecordError: an update drops what is not there or grows what is.
        """
        info = self._layer(layer)
        flat = self.initial(layer)
        yield self.steps[0], _make_pattern(flat, info)
        for index, (dropped, grown) in enumerate(self.changes(layer), start=1):
            kept = np.setdiff1d(flat, dropped, assume_unique=True)
            after = np.union1d(kept, grown)
            if len(kept) + len(dropped) != len(flat) or len(kept) + len(grown) != len(after):
                raise RecordError(
                    f"{self._files[index]}: the update of {layer!r} does not fit the pattern before"
                )
            flat = after
            yield self.steps[index], _make_pattern(flat, info)

    @check_types
    def pattern(self, layer: str, index: int) -> SparsePattern:
        """The pattern at one index, counted from the end when negative.

        It reads all updates before it; `patterns` gives all at the cost of the last.

        Raises:
            IndexError: no such index.
        """
        target = operator.index(index) + (len(self) if index < 0 else 0)
        if not 0 <= target < len(self):
            raise IndexError(f"the record has {len(self)} patterns, got the index {index}")
        _, pattern = next(islice(self.patterns(layer), target, None))
        return pattern

    @check_types
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

    @check_types
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

    @check_types
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
        with open_arrays(file) as archive:
            if index and key not in archive:
                return np.zeros(0, np.int64)
            flat = read_array(file, archive, key)
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


def _make_pattern(flat: np.ndarray, info: RecordedLayer) -> SparsePattern:
    return SparsePattern.from_flat(
        torch.from_numpy(flat), shape=info.shape, block_size=info.block_size
    )
