"""Checkpoints of many ranks: the manifest, and the files of tensors with their right digests."""

from __future__ import annotations

import hashlib
import json

import torch

from dynsparse import distributed
from dynsparse.nn import SparseLinear
from dynsparse.training import RigL
from dynsparse.training.checkpoint import CheckpointError
from targets.common import folder, refused_as

_END = b"|next|"


def _parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    layer = SparseLinear(6, 4, density=0.5, generator=torch.Generator().manual_seed(0))
    return layer, torch.optim.Adam(layer.parameters(), lr=0.1)


def _saved() -> tuple[bytes, bytes]:
    layer, optimizer = _parts()
    trainer = RigL(layer, optimizer, total_steps=10, update_interval=5)
    layer(torch.ones(2, 6)).sum().backward()
    trainer.step()
    path = folder() / "whole"
    extra = {"a": (1, float("inf")), 3: torch.arange(3)}
    distributed.save_checkpoint(
        path, model=layer, optimizer=optimizer, trainer=trainer, extra=extra
    )
    (data,) = path.glob("*.safetensors")
    return (path / "manifest.json").read_bytes(), data.read_bytes()


_MANIFEST, _DATA = _saved()
_TOKEN = json.loads(_MANIFEST)["token"]

SEEDS = [
    b"\0" + _MANIFEST,
    b"\1" + _DATA,
    b"\1" + _DATA[:8] + _DATA[8:].replace(b"F32", b"F16"),
    b"\2" + _MANIFEST + _END + _DATA,
]


def run(data: bytes) -> None:
    way, content = data[0] % 3 if data else 0, data[1:]
    manifest, tensors = _MANIFEST, _DATA
    if way == 0:
        manifest = content
    elif way == 1:
        tensors = content
    else:
        manifest, _, tensors = content.partition(_END)
    if way:
        was, now = (hashlib.sha256(one).hexdigest().encode() for one in (_DATA, tensors))
        manifest = manifest.replace(was, now)
        manifest = manifest.replace(b"%d" % len(_DATA), b"%d" % len(tensors))
    path = folder() / "changed"
    path.mkdir(exist_ok=True)
    (path / "manifest.json").write_bytes(manifest)
    (path / f"{_TOKEN}-0.safetensors").write_bytes(tensors)
    layer, optimizer = _parts()
    before = [tensor.clone() for tensor in layer.state_dict().values()]
    with refused_as(CheckpointError):
        try:
            distributed.load_checkpoint(path, model=layer, optimizer=optimizer, random_state=False)
        except CheckpointError:
            after = layer.state_dict().values()
            assert all(a.equal(b) for a, b in zip(before, after, strict=True))
            assert not optimizer.state_dict()["state"]
            raise
        layer(torch.ones(2, 6))
