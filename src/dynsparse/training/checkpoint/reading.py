"""Reads the payload of a checkpoint: sizes before memory, the digest, and the type of every part.

docs/checkpoints.md and `training_state.py` say what the parts mean.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynsparse.files.shorten import shortened
from dynsparse.files.torch_archive import check_archive, check_content

MAGIC = b"dynsparse\x00state\n"
VERSION = 1
HEADER = struct.Struct("<16sIQ32s")

# What each part is; None beside a type: the part may be missing, as when it was not saved.
_PARTS: dict[str, tuple[type, ...]] = {
    "model": (dict,),
    "patterns": (dict,),
    "optimizer": (dict,),
    "trainer": (dict, type(None)),
    "lr_scheduler": (dict, type(None)),
    "random": (dict,),
    "generators": (dict,),
    "extra": (dict,),
}


class CheckpointError(ValueError):
    """A file that cannot be used, in one line: truncated, damaged, foreign, or of another model."""


def read_payload(path: Path) -> dict[str, Any]:
    """The parts of a checkpoint, each of its type; what is inside them is for who uses them.

    Raises:
        CheckpointError: the file is truncated, damaged, foreign, or of another format version.
        OSError: the file cannot be read.
    """
    content = _read(path)
    try:
        check_archive(content)
        payload = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        check_content(payload, len(content))
    except Exception as error:
        reason = str(error).partition("\n")[0][:300]
        raise CheckpointError(
            f"{path} cannot be read by torch {torch.__version__}: {reason}"
        ) from None
    try:
        check_parts(payload)
    except ValueError as error:
        raise CheckpointError(f"{path} is no checkpoint of a training: {error}") from None
    return payload


def _read(path: Path) -> bytes:
    with open(path, "rb") as file:
        head = file.read(HEADER.size)
        if head[: len(MAGIC)] != MAGIC[: len(head)] or not head:
            raise CheckpointError(f"{path} is not a dynsparse checkpoint")
        if len(head) < HEADER.size:
            raise CheckpointError(f"{path} is truncated: it ends within the header")
        _, version, length, digest = HEADER.unpack(head)
        if version != VERSION:
            raise CheckpointError(
                f"{path} has format version {version}, this dynsparse reads version {VERSION}: "
                "load it with the dynsparse that wrote it"
            )
        size = os.fstat(file.fileno()).st_size - HEADER.size
        content = file.read() if size == length else b""
    if size != length:
        what = "truncated" if size < length else "damaged"
        raise CheckpointError(f"{path} is {what}: expected {length} bytes of payload, got {size}")
    if hashlib.sha256(content).digest() != digest:
        raise CheckpointError(f"{path} is damaged: its SHA-256 does not match its content")
    return content


def check_parts(payload: Any) -> None:
    """Raise ValueError unless the parts are there, each of its type."""
    if not isinstance(payload, dict):
        raise ValueError(f"expected its parts, got {shortened(type(payload).__name__)}")
    for part, kinds in _PARTS.items():
        if part not in payload or not isinstance(payload[part], kinds):
            got = type(payload[part]).__name__ if part in payload else "nothing"
            raise ValueError(f"expected a dict as its {part}, got {got}")
    for part in ("optimizer", "lr_scheduler", *payload["generators"]):
        saved = payload[part] if part in _PARTS else payload["generators"][part]
        if saved is not None and not (
            isinstance(saved, dict) and isinstance(saved.get("kind"), str) and "state" in saved
        ):
            raise ValueError(f"expected a kind and a state as its {part}, got {shortened(saved)}")
    groups = _entry(payload["optimizer"]["state"], "param_groups")
    if not isinstance(groups, list) or not all(
        isinstance(_entry(group, "params"), list) for group in groups
    ):
        raise ValueError("expected the optimizer's groups of parameters, got others")
    if "ranks" in payload:
        check_own_parts(payload["ranks"])
    for name, tensor in payload["model"].items():
        if not isinstance(name, str):
            raise ValueError(f"expected names of the model's tensors, got {shortened(name)}")
        if isinstance(tensor, Tensor) and tensor.layout != torch.strided:
            raise ValueError(f"expected dense tensors of the model, got {tensor.layout}")


def check_own_parts(ranks: Any) -> None:
    """Raise ValueError unless this is what every rank holds of its own."""
    needed = {"random": dict, "generators": dict, "history": object}
    if not isinstance(ranks, list) or not ranks:
        raise ValueError(f"expected a list of what each rank holds, got {shortened(ranks)}")
    for own in ranks:
        if not all(isinstance(own, dict) and isinstance(own.get(k), t) for k, t in needed.items()):
            raise ValueError(f"expected {', '.join(needed)} of each rank, got {shortened(own)}")
        for saved in own["generators"].values():
            if not isinstance(_entry(saved, "kind"), str) or "state" not in saved:
                raise ValueError(f"expected a kind and a state, got {shortened(saved)}")


def _entry(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None
