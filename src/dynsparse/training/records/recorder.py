"""Write a record while a model trains."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynsparse._core.checks import check_flag, check_integer, check_kind, check_types
from dynsparse._core.files.atomic_write import atomic_write, atomic_write_text
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.training.records.files import (
    FORMAT,
    HEAD,
    LEFT_OVERS,
    TELEMETRY,
    VERSION,
    RecordError,
    list_update_files,
    pending_recorders,
    read_head,
    read_step,
    to_json,
    update_file_name,
)
from dynsparse.training.records.reader import Records


class Recorder:
    """Writes a record while a model trains.

    Args:
        path: the folder of the record; it is created. An existing record is continued after
            `truncate`, or replaced by `start`.
        metadata: anything JSON can hold, kept with the record: data set, seed, flags. Arrays and
            tensors become lists. Images use `pixel_permutation`: input i of the first layer reads
            pixel `pixel_permutation[i]`.

    Files are written atomically, so a training may be killed at any moment. Updates of layers on
    devices are written once they have been copied to the CPU: at the next call, at the latest when
    a trainer's state is taken, a record is read, or the process ends; `flush` waits for them.

    Raises:
        RecordError: the folder holds other files, or a record of another format version.
        TypeError: metadata that JSON cannot hold.
    """

    @check_types
    def __init__(
        self, path: str | os.PathLike[str], metadata: Mapping[str, Any] | None = None
    ) -> None:
        self.path = Path(path)
        self._metadata: dict[str, Any] = json.loads(to_json(dict(metadata or {}), "metadata"))
        self._patterns: dict[str, SparsePattern] = {}
        self._updates = 0
        self._step = -1
        self._pending: deque[tuple[int, dict[str, Rewiring]]] = deque()
        if self.path.exists() and not self.path.is_dir():
            raise RecordError(f"expected a folder for the record, got the file {self.path}")
        self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / HEAD).exists():
            read_head(self.path)  # raises for what is no record
        elif any(file.suffix not in LEFT_OVERS for file in self.path.iterdir()):
            raise RecordError(
                f"{self.path} holds other files: choose another folder for the record"
            )

    @property
    def has_record(self) -> bool:
        """Whether the folder holds a record that `truncate` can continue."""
        return (self.path / HEAD).exists() and (self.path / update_file_name(0)).exists()

    @property
    def holds_updates(self) -> bool:
        """Whether the folder holds more of a training than its first patterns."""
        telemetry = self.path / TELEMETRY
        more = any(file.name != update_file_name(0) for file in self.path.glob("update-*.npz"))
        more = more or bool(self._pending)
        return more or (telemetry.exists() and telemetry.stat().st_size > 0)

    @check_types
    def start(
        self, patterns: Mapping[str, SparsePattern], step: int = 0, *, overwrite: bool = False
    ) -> None:
        """Begin a record with the present patterns.

        Args:
            patterns: by the name of the layer.
            step: optimizer steps taken.
            overwrite: remove an earlier record. Without it a record that holds more than its first
                patterns is an error.

        Raises:
            RecordError: the folder holds an earlier record, which is unchanged.
            ValueError: no layer, or a negative step.
        """
        self.flush()
        step = check_integer("step", step, 0)
        check_flag("overwrite", overwrite)
        if not patterns:
            raise ValueError("expected at least one layer to record, got none")
        _check_layers(patterns, SparsePattern, "a SparsePattern")
        if self.holds_updates and not overwrite:
            raise RecordError(
                f"{self.path} holds the record of an earlier training: continue it with "
                "truncate(step), choose another folder, or replace it with "
                "start(..., overwrite=True)"
            )
        # Newest first, and the head stays: what a killed process leaves is still a record.
        for file in reversed(list_update_files(self.path)):
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
        atomic_write_text(self.path / HEAD, text)
        arrays = {f"positions/{name}": _compact(p.sorted_flat, p) for name, p in patterns.items()}
        self._updates, self._step = 0, -1
        self._write(step, arrays)
        self._patterns = dict(patterns)

    @check_types
    def update(self, step: int, rewirings: Mapping[str, Rewiring]) -> None:
        """Record one pattern update; layers that did not change may be left out.

        Raises:
            RecordError: nothing was started, the step is not after the last recorded one, or a
                rewiring does not begin at the pattern that was recorded last.
            KeyError: a layer that is not in the record.
        """
        step = self._next_step(step)
        _check_layers(rewirings, Rewiring, "a Rewiring")
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
            rewiring._start_host_copy()
        self._write_pending(wait=False)
        if self._pending or not _are_on_host(rewirings):
            self._pending.append((step, dict(rewirings)))
            pending_recorders.add(self)
        else:
            self._write_update(step, rewirings)
        self._step = step
        self._patterns |= {name: rewiring.after for name, rewiring in rewirings.items()}

    def flush(self) -> None:
        """Wait for updates that are being copied from devices, and write them."""
        self._write_pending(wait=True)

    def _write_pending(self, wait: bool) -> None:
        """Write the updates that are on the CPU, or all."""
        while self._pending:
            step, rewirings = self._pending[0]
            if not wait and not _are_on_host(rewirings):
                return
            self._write_update(step, rewirings)
            self._pending.popleft()
        pending_recorders.discard(self)

    def _write_update(self, step: int, rewirings: Mapping[str, Rewiring]) -> None:
        arrays: dict[str, np.ndarray] = {}
        for name, rewiring in rewirings.items():
            before, after = rewiring.before, rewiring.after
            dropped, grown = before.flat[rewiring.dropped], after.flat[rewiring.grown]
            arrays[f"dropped/{name}"] = _compact(dropped.sort().values, before)
            arrays[f"grown/{name}"] = _compact(grown.sort().values, before)
        self._write(step, arrays)

    @check_types
    def log(self, step: int, figures: Mapping[str, Any]) -> None:
        """Add one line of telemetry, such as {"loss": 0.3}. Any step, any keys but "step".

        Raises:
            RecordError: nothing was started.
            TypeError: figures that JSON cannot hold.
        """
        if not self._updates:
            raise RecordError("call start or truncate before log")
        self._write_pending(wait=False)
        if "step" in figures:
            raise ValueError('figures must not hold the key "step": it is the first argument')
        line = to_json({"step": check_integer("step", step, 0), **figures}, "figures")
        with (self.path / TELEMETRY).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    @check_types
    def truncate(self, step: int, patterns: Mapping[str, SparsePattern] | None = None) -> None:
        """Remove everything recorded after `step`, and continue from there.

        For a training that resumes from a checkpoint taken at `step`. An update that cannot be
        read, as after a power cut, is removed, too, if the record leads to `patterns` without it.

        Args:
            patterns: those of the layers at `step`.

        Raises:
            RecordError: the folder holds no record, a damaged one, one that begins later or does
                not lead to `patterns`. It is unchanged.
        """
        step = check_integer("step", step, 0)
        self.flush()
        files = list_update_files(self.path)
        kept, damage = _count_files_up_to(files, step)
        if damage is not None and (patterns is None or not kept):
            raise damage
        if not kept:
            begins = f"begins at step {read_step(files[0])}" if files else "holds no patterns"
            raise RecordError(f"cannot continue the record {self.path} at step {step}: it {begins}")
        records = Records.load(self.path, updates=kept)
        ends = {name: records.pattern(name, -1) for name in records.layers}
        if patterns is not None and ends != dict(patterns):
            why = "it holds other patterns" if damage is None else str(damage)
            raise RecordError(
                f"cannot continue the record {self.path} at step {step}: {why}: restore an earlier "
                "checkpoint, or go on without the record"
            )
        for file in reversed(files[kept:]):
            file.unlink()
        lines = [to_json(r, "figures") for r in records.telemetry if r["step"] <= step]
        if (self.path / TELEMETRY).exists():
            text = "".join(line + "\n" for line in lines)
            atomic_write_text(self.path / TELEMETRY, text)
        self._patterns = ends
        self._updates, self._step = kept, records.steps[-1]

    def _names(self) -> str:
        return ", ".join(map(repr, self._patterns))

    def _next_step(self, step: int) -> int:
        step = check_integer("step", step, 0)
        if not self._updates:
            raise RecordError("call start or truncate before update")
        if step <= self._step:
            raise RecordError(
                f"steps must increase: got step {step} after step {self._step} "
                "(truncate the record when a training resumes)"
            )
        return step

    def _write(self, step: int, arrays: dict[str, np.ndarray]) -> None:
        atomic_write(
            self.path / update_file_name(self._updates),
            lambda file: np.savez_compressed(file, step=np.int64(step), **arrays),  # type: ignore[arg-type]
        )
        self._updates += 1
        self._step = max(step, self._step)  # further updates may be waiting


def _count_files_up_to(files: list[Path], step: int) -> tuple[int, RecordError | None]:
    """How many files are of steps up to `step`, and the error of a damaged one that follows."""
    for kept, file in enumerate(files):
        try:
            if read_step(file) > step:
                return kept, None
        except RecordError as error:
            return kept, error
    return len(files), None


def _are_on_host(rewirings: Mapping[str, Rewiring]) -> bool:
    return all(rewiring._is_on_host for rewiring in rewirings.values())


def _compact(flat: torch.Tensor, pattern: SparsePattern) -> np.ndarray:
    small = pattern.total <= np.iinfo(np.int32).max
    return flat.numpy().astype(np.int32 if small else np.int64)


def _check_layers(layers: Mapping[Any, Any], kind: type, expected: str) -> None:
    for name, value in layers.items():
        check_kind("the name of a layer", name, str, "a text")
        check_kind(f"what is recorded of {name!r}", value, kind, expected)
