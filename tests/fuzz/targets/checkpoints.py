"""Checkpoints: the raw file, its JSON or its tensors with a valid digest."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import load, save

from dynsparse.nn import SparseLinear
from dynsparse.training import RigL
from dynsparse.training.checkpoint import (
    CheckpointError,
    load_checkpoint,
    read_extra,
    save_checkpoint,
)
from dynsparse.training.checkpoint.format import CheckpointReader, to_bytes
from targets.common import folder, refused_as

_WAYS = 3


def _parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    layer = SparseLinear(6, 4, density=0.5, generator=torch.Generator().manual_seed(0))
    return layer, torch.optim.Adam(layer.parameters(), lr=0.1)


def _saved() -> tuple[bytes, dict[str, Any]]:
    layer, optimizer = _parts()
    trainer = RigL(layer, optimizer, total_steps=10, update_interval=5)
    layer(torch.ones(2, 6)).sum().backward()
    trainer.step()
    file = folder() / "seed"
    extra = {"app": "mnist", "a": (1, float("inf")), 3: torch.arange(3)}
    save_checkpoint(file, model=layer, optimizer=optimizer, trainer=trainer, extra=extra)
    header = CheckpointReader(file)._files[0].header
    header.pop("sha256")
    return file.read_bytes(), header


_WHOLE, _HEADER = _saved()
_TENSORS = load(_WHOLE)
_SIZE = sum(tensor.nbytes for tensor in _TENSORS.values())

SEEDS = [
    b"\0" + _WHOLE,
    b"\1" + json.dumps(_HEADER).encode(),
    b"\2" + b"".join(bytes(t.reshape(-1).view(torch.uint8).tolist()) for t in _TENSORS.values()),
]


def with_header(text: bytes) -> bytes:
    """Make a file with other JSON, with a valid digest if possible."""
    try:
        header = json.loads(text)
        return to_bytes({**header, "sha256": None} if "sha256" in header else header, _TENSORS)
    except (TypeError, ValueError, RecursionError):
        return save(_TENSORS, {"dynsparse": text.decode(errors="replace")})


def with_tensors(content: bytes) -> bytes:
    """Make a file with other bytes in its tensors, with a valid digest."""
    content = content[:_SIZE].ljust(_SIZE, b"\0")
    tensors, begin = {}, 0
    for name, tensor in _TENSORS.items():
        raw = torch.tensor(list(content[begin : begin + tensor.nbytes]), dtype=torch.uint8)
        tensors[name] = raw.view(tensor.dtype).reshape(tensor.shape)
        begin += tensor.nbytes
    return to_bytes(_HEADER, tensors)


def run(data: bytes) -> None:
    way, content = data[0] % _WAYS if data else 0, data[1:]
    if way == 1:
        content = with_header(content)
    elif way == 2:
        content = with_tensors(content)
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
