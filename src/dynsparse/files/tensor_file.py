"""Tensors in a file of the safetensors format, written whole and read in parts.

8 bytes with the length of the head, little-endian; the head, which is JSON: name -> dtype, shape,
and where its bytes begin and end; the bytes. Nothing in it is code.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from dynsparse.files.json_text import parse_json
from dynsparse.files.shorten import shortened
from dynsparse.files.whole import write_whole

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
"""The format's names of types."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH = struct.Struct("<Q")
_ABOUT = "__metadata__"


def name_of_type(tensor: Tensor) -> str:
    """The format's name of its type.

    Raises:
        TypeError: it has none.
    """
    if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
        raise TypeError(f"a checkpoint holds no tensors of {tensor.dtype}, {tensor.layout}")
    return _NAMES[tensor.dtype]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """Write a file whole, see `files.whole`; its SHA-256.

    Raises:
        TypeError: a type that the format does not have.
        OSError: the file cannot be written.
    """
    head: dict[str, Any] = {_ABOUT: dict(about)}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        kind, shape = name_of_type(tensor), list(tensor.shape)
        head[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(head, allow_nan=False).encode()
    text += b" " * (-len(text) % 8)  # so that all is aligned
    hashed = hashlib.sha256()

    def write(file: BinaryIO) -> None:
        for part in (_LENGTH.pack(len(text)), text):
            file.write(part)
            hashed.update(part)
        for tensor in tensors.values():
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            file.write(raw.data)
            hashed.update(raw.data)

    write_whole(path, write)
    return hashed.hexdigest()


def digest_of(path: Path) -> str:
    """The SHA-256 of a file."""
    hashed = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            hashed.update(part)
    return hashed.hexdigest()


class TensorFile:
    """A file of `write_tensors`, of which parts are read as they are asked for.

    Raises:
        ValueError: it is truncated, or not in the format.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = file.read(_LENGTH.size)
            told = _LENGTH.unpack(length)[0] if len(length) == _LENGTH.size else size
            self._begin = _LENGTH.size + told
            if self._begin > size:
                raise ValueError(f"{path.name} is truncated: it ends within the head")
            head = parse_json(file.read(told))
        self._bytes = size - self._begin
        about = head.pop(_ABOUT, {}) if isinstance(head, dict) else None
        if not isinstance(about, dict) or not isinstance(head, dict):
            raise ValueError(f"{path.name} has no head of the safetensors format")
        self.about: dict[str, Any] = about
        self._head: dict[str, Any] = head

    def _described(self, name: str) -> tuple[torch.dtype, list[int], int]:
        """Type, shape, and where the bytes begin."""
        try:
            told = self._head[name]
            dtype, shape = DTYPES[told["dtype"]], told["shape"]
            begin, end = told["data_offsets"]
            numbers = [*shape, begin, end]
            if not all(type(n) is int and n >= 0 for n in numbers) or end > self._bytes:
                raise ValueError("numbers that point outside")
            if math.prod(shape) * dtype.itemsize != end - begin:
                raise ValueError("a size that is not that of its shape")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self.path.name} is damaged: {shortened(name)}: {type(error).__name__}, {error}"
            ) from None
        return dtype, shape, begin

    def shape(self, name: str) -> tuple[torch.dtype, list[int]]:
        """Type and shape of a tensor; ValueError where there is none."""
        return self._described(name)[:2]

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """A tensor, or its rows [first, last): a new one.

        Raises:
            ValueError: there is none, or its description is damaged.
            OSError: it cannot be read.
        """
        dtype, shape, begin = self._described(name)
        if shape:
            last = shape[0] if last is None else min(last, shape[0])
            shape = [max(0, last - first), *shape[1:]]
            begin += first * math.prod(shape[1:]) * dtype.itemsize
        count = math.prod(shape) * dtype.itemsize
        raw = np.fromfile(self.path, np.uint8, count, offset=self._begin + begin)
        if len(raw) != count:
            raise ValueError(f"{self.path.name} is truncated")
        if not count:
            return torch.empty(shape, dtype=dtype)
        if dtype is torch.bool:
            raw = (raw != 0).view(np.uint8)  # the other bytes mean nothing
        return torch.from_numpy(raw).view(dtype).reshape(shape)
