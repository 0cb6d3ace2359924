"""Safetensors files: the raw file, the header with valid length, the metadata in it."""

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


_DENSITIES = (0.5, 0.08)  # the pattern as a mask, and as gaps


def _model(density: float) -> torch.nn.Module:
    return SparseLinear(6, 4, density, generator=torch.Generator().manual_seed(0))


def _saved(density: float) -> bytes:
    file = folder() / "seed"
    save_safetensors(_model(density), file, {"step": "3"})
    return file.read_bytes()


def _split(whole: bytes) -> tuple[bytes, bytes]:
    end = 8 + struct.unpack_from("<Q", whole)[0]
    return whole[8:end], whole[end:]


def _seeds(number: int, whole: bytes) -> list[bytes]:
    header, tensors = _split(whole)
    metadata = json.loads(header)["__metadata__"]
    contents = (
        whole,
        header.rstrip(),
        _END.join(metadata[key].encode() for key in _META),
        tensors,
    )
    return [bytes([_WAYS * number + way]) + content for way, content in enumerate(contents)]


_FILES = [_saved(density) for density in _DENSITIES]
SEEDS = [seed for number, whole in enumerate(_FILES) for seed in _seeds(number, whole)]


def _file(header: bytes, tensors: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + tensors


def run(data: bytes) -> None:
    number, way = divmod(data[0] if data else 0, _WAYS)
    number, content = number % len(_FILES), data[1:]
    header, tensors = _split(_FILES[number])
    if way == 1:
        content = _file(content, tensors)
    elif way == 2:
        texts = (part.decode(errors="replace") for part in content.split(_END))
        entries = json.loads(header)
        entries["__metadata__"] |= dict(zip(_META, texts, strict=False))
        content = _file(json.dumps(entries).encode(), tensors)
    elif way == 3:
        content = _file(header, content[: len(tensors)].ljust(len(tensors), b"\0"))
    file = folder() / "weights"
    file.write_bytes(content)
    for load in (load_safetensors, load_pretrained):
        _load(load, file, _model(_DENSITIES[number]))


def _load(load: Callable[..., object], file: Path, model: torch.nn.Module) -> None:
    before = [tensor.clone() for tensor in model.state_dict().values()]
    with refused_as(ValueError):
        try:
            load(model, file)
        except ValueError:
            after = model.state_dict().values()
            assert all(a.equal(b) for a, b in zip(before, after, strict=True))
            raise
        model(torch.ones(2, 6))
