"""Weights in safetensors: the file, the header with its length, the metadata within it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import torch

from dynsparse.nn import SparseLinear
from dynsparse.nn.weights_file import load_pretrained, load_safetensors, save_safetensors
from targets.common import folder, refused_as

_WAYS = 4
_END = b"|next|"
_META = ("layers", "aliases", "user")


def _model() -> torch.nn.Module:
    return SparseLinear(6, 4, density=0.5, generator=torch.Generator().manual_seed(0))


def _saved() -> bytes:
    file = folder() / "seed"
    save_safetensors(_model(), file, {"step": "3"})
    return file.read_bytes()


_WHOLE = _saved()
_LENGTH = struct.unpack_from("<Q", _WHOLE)[0]
_HEADER, _TENSORS = _WHOLE[8 : 8 + _LENGTH], _WHOLE[8 + _LENGTH :]
_ENTRIES = json.loads(_HEADER)

SEEDS = [
    b"\0" + _WHOLE,
    b"\1" + _HEADER.rstrip(),
    b"\2" + _END.join(_ENTRIES["__metadata__"][key].encode() for key in _META),
    b"\3" + _TENSORS,
]


def _file(header: bytes, tensors: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + tensors


def run(data: bytes) -> None:
    way, content = data[0] % _WAYS if data else 0, data[1:]
    if way == 1:
        content = _file(content, _TENSORS)
    elif way == 2:
        texts = (part.decode(errors="replace") for part in content.split(_END))
        metadata = _ENTRIES["__metadata__"] | dict(zip(_META, texts, strict=False))
        content = _file(json.dumps({**_ENTRIES, "__metadata__": metadata}).encode(), _TENSORS)
    elif way == 3:
        content = _file(_HEADER, content[: len(_TENSORS)].ljust(len(_TENSORS), b"\0"))
    file = folder() / "weights"
    file.write_bytes(content)
    _load(load_safetensors, file)
    _load(load_pretrained, file)


def _load(load: Callable[..., object], file: Path) -> None:
    model = _model()
    before = [tensor.clone() for tensor in model.state_dict().values()]
    with refused_as(ValueError):
        try:
            load(model, file)
        except ValueError:
            after = model.state_dict().values()
            assert all(a.equal(b) for a, b in zip(before, after, strict=True))
            raise
        model(torch.ones(2, 6))
