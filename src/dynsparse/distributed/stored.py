"""Reads the folder of a checkpoint of many ranks; `checkpoint.py` says what is in it."""

from __future__ import annotations

import re
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynsparse.files.json_text import parse_json
from dynsparse.files.limits import read_limit
from dynsparse.files.plain_tree import from_tree
from dynsparse.files.shorten import shortened
from dynsparse.files.tensor_file import DTYPES, TensorFile, digest_of
from dynsparse.ranks import chunk
from dynsparse.training.checkpoint.reading import (
    CheckpointError,
    check_own_parts,
    check_parts,
)

MANIFEST = "manifest.json"
"""A folder with this file holds a whole checkpoint."""

_FORMAT, _VERSION = "dynsparse checkpoint of ranks", 1


def file_name(token: str, rank: int) -> str:
    """The file of a rank."""
    return f"{token}-{rank}.safetensors"


class StoredCheckpoint:
    """A checkpoint in a folder, of which only the manifest has been read.

    Raises:
        CheckpointError: there is none, or it is damaged or foreign.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        manifest = path / MANIFEST
        if path.is_dir() and not manifest.exists():
            raise CheckpointError(
                f"{path} holds no whole checkpoint: expected a folder with {MANIFEST}, which is "
                "written last"
            )
        limit = read_limit() // 16
        with open(manifest, "rb") as file:
            text = file.read(limit + 1)
        try:
            told = parse_json(text)
            if told["format"] != _FORMAT:
                raise ValueError(
                    f"expected the format {_FORMAT!r}, got {shortened(told['format'])}"
                )
            if told["version"] != _VERSION:
                raise ValueError(
                    f"expected version {_VERSION}, got {shortened(told['version'])}: load it with "
                    "the dynsparse that wrote it"
                )
            if not re.fullmatch(r"[0-9a-f]{8}", told["token"]):
                raise ValueError(f"expected a token of 8 digits, got {shortened(told['token'])}")
            self._token: str = told["token"]
            self._files: list[tuple[int, str]] = [(f["bytes"], f["sha256"]) for f in told["files"]]
            self._groups: list[list[int]] = told["groups"]
            numbers = range(len(self._files))
            if not numbers or not all(
                type(n) is int and n in numbers for group in self._groups for n in group
            ):
                raise ValueError("its groups name ranks that it has no files of")
            self._entries: dict[str, dict[str, Any]] = told["entries"]
            self._tree = told["parts"]
            if not isinstance(self._entries, dict) or not isinstance(self._tree, dict):
                raise ValueError("expected entries and parts")
        except Exception as error:  # of any kind: it is what a stranger's JSON can end in
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            reason = " ".join(f"{kind}{error}".split())[:300]
            raise CheckpointError(f"{manifest} is damaged or foreign: {reason}") from None
        self._open: dict[int, TensorFile] = {}
        self._taken: set[tuple[int | None, str]] = set()

    def __len__(self) -> int:
        """How many ranks saved it."""
        return len(self._files)

    def check_files(self, rank: int, size: int) -> None:
        """Compare the digests of every `size`-th file from `rank` on: together, ranks see to all.

        Raises:
            CheckpointError: one is missing, truncated or damaged.
        """
        for number in range(rank, len(self), size):
            expected, digest = self._files[number]
            file = self.path / file_name(self._token, number)
            if not file.is_file() or file.stat().st_size != expected:
                got = f"{file.stat().st_size} bytes" if file.is_file() else "no file"
                raise CheckpointError(
                    f"{file} is truncated or missing: expected {expected} bytes, got {got}"
                )
            if digest_of(file) != digest:
                raise CheckpointError(f"{file} is damaged: its SHA-256 does not match its content")

    def parts(self) -> dict[str, Any]:
        """What all ranks hold alike, with `StoredTensor`s in the place of tensors.

        Raises:
            ValueError: they are not what a training's checkpoint has.
        """
        parts: dict[str, Any] = from_tree(self._tree, self._entry)
        check_parts(parts | {"random": {}, "generators": {}})
        return parts

    def own_parts(self, wanted: Set[int]) -> list[dict[str, Any]]:
        """What every rank had of its own; read is only that of the `wanted`.

        Raises:
            ValueError: it is not what a rank has.
        """
        found: list[dict[str, Any]] = [{"random": {}, "generators": {}, "history": None}] * len(
            self
        )
        for number in wanted:
            file = self._file(number)

            def tensor(name: str, file: TensorFile = file, number: int = number) -> Tensor:
                self._take_once(number, name)
                return file.read(name)

            found[number] = from_tree(parse_json(file.about["own"]), tensor)
            check_own_parts([found[number]])
        return found

    def _file(self, number: int) -> TensorFile:
        if number not in self._open:
            self._open[number] = TensorFile(self.path / file_name(self._token, number))
        return self._open[number]

    def _take_once(self, number: int | None, name: str) -> None:
        """A small file must not stand for the same large tensor many times."""
        if (number, name) in self._taken:
            raise ValueError(f"the tensor {shortened(name)} is named twice")
        self._taken.add((number, name))

    def _entry(self, name: str) -> StoredTensor:
        self._take_once(None, name)
        told = self._entries[name]
        shape, dtype, group = told["shape"], DTYPES[told["dtype"]], self._groups[told["group"]]
        if not group or not all(type(n) is int and 0 <= n < 2**62 for n in shape):
            raise ValueError(
                f"{shortened(name)}: expected a shape and ranks, got {shortened(told)}"
            )
        return StoredTensor(name, torch.Size(shape), dtype, [self._file(n) for n in group])


class StoredTensor:
    """A tensor in pieces, in the files of several ranks."""

    def __init__(
        self, name: str, shape: torch.Size, dtype: torch.dtype, files: list[TensorFile]
    ) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
        self._files = files
        # Looked at before anything is made of that size: the pieces are there, each in its file.
        for i, file in enumerate(files):
            own, expected = list(shape), dtype
            if shape:
                first, last = chunk(shape[0], len(files), i)
                own[0] = last - first
            if file.shape(name) != (expected, own):
                raise ValueError(
                    f"{shortened(name)}: expected a piece of {dtype} {own} in {file.path.name}, "
                    f"got {file.shape(name)}"
                )

    def rows(self, first: int, last: int) -> Tensor:
        """Rows [first, last), from the files that have some of them."""
        pieces = []
        for i, file in enumerate(self._files):
            begin, end = chunk(self.shape[0], len(self._files), i)
            if max(first, begin) < min(last, end):
                pieces.append(
                    file.read(self.name, max(first, begin) - begin, min(last, end) - begin)
                )
        if not pieces:
            return torch.empty((0, *self.shape[1:]), dtype=self.dtype)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def whole(self) -> Tensor:
        """All of it."""
        return self.rows(0, self.shape[0]) if self.shape else self._files[0].read(self.name)
