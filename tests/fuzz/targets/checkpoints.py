"""Checkpoints: the file, a payload with its digest, the data within a right archive."""

from __future__ import annotations

import hashlib
import io
import struct
import zipfile

import torch

from dynsparse.nn import SparseLinear
from dynsparse.training import RigL
from dynsparse.training.checkpoint import (
    CheckpointError,
    load_checkpoint,
    read_extra,
    save_checkpoint,
)
from targets.common import folder, refused_as

_WAYS = 4
_END = b"|next|"


def _parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    layer = SparseLinear(6, 4, density=0.5, generator=torch.Generator().manual_seed(0))
    return layer, torch.optim.Adam(layer.parameters(), lr=0.1)


def _saved() -> bytes:
    layer, optimizer = _parts()
    trainer = RigL(layer, optimizer, total_steps=10, update_interval=5)
    layer(torch.ones(2, 6)).sum().backward()
    trainer.step()
    file = folder() / "seed"
    extra = {"app": "mnist", "options": {"epochs": 1}, "seed": 0}
    save_checkpoint(file, model=layer, optimizer=optimizer, trainer=trainer, extra=extra)
    return file.read_bytes()


def _member(content: bytes, ending: str) -> str:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return next(name for name in archive.namelist() if name.endswith(ending))


_WHOLE = _saved()
_PAYLOAD = _WHOLE[60:]
_DATA = _member(_PAYLOAD, "/data.pkl")
_TENSORS = [_member(_PAYLOAD, f"/data/{i}") for i in range(4)]
with zipfile.ZipFile(io.BytesIO(_PAYLOAD)) as _archive:
    _MEMBERS = {name: _archive.read(name) for name in _archive.namelist()}


def _content(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    with zipfile.ZipFile(stream) as archive:
        return archive.read(_member(stream.getvalue(), "/data.pkl"))


SEEDS = [
    b"\0" + _WHOLE,
    b"\1" + _PAYLOAD,
    b"\2" + _MEMBERS[_DATA],
    b"\2" + _content({"model": {}, "extra": {"a": [1, (2.5, None)]}}),
    b"\2" + _content({part: {} for part in ("model", "patterns", "random", "generators", "extra")}),
    b"\3" + _END.join(_MEMBERS[name] for name in _TENSORS),
]


def with_digest(payload: bytes) -> bytes:
    digest = hashlib.sha256(payload).digest()
    return struct.pack("<16sIQ32s", b"dynsparse\0state\n", 1, len(payload), digest) + payload


def with_members(changed: dict[str, bytes]) -> bytes:
    """The checkpoint with other members in a right archive, and its digest."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in {**_MEMBERS, **changed}.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return with_digest(stream.getvalue())


def run(data: bytes) -> None:
    way, content = data[0] % _WAYS if data else 0, data[1:]
    if way == 1:
        content = with_digest(content)
    elif way == 2:
        content = with_members({_DATA: content})
    elif way == 3:
        content = with_members(dict(zip(_TENSORS, content.split(_END), strict=False)))
    file = folder() / "checkpoint"
    file.write_bytes(content)
    with refused_as(CheckpointError):
        read_extra(file)
        layer, optimizer = _parts()
        before = [tensor.clone() for tensor in layer.state_dict().values()]
        try:
            load_checkpoint(file, model=layer, optimizer=optimizer, random_state=False)
        except CheckpointError:
            after = layer.state_dict().values()
            assert all(a.equal(b) for a, b in zip(before, after, strict=True))
            assert not optimizer.state_dict()["state"]
            raise
        layer(torch.ones(2, 6))
