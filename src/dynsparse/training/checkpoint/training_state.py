"""Checkpoints: everything a training needs to go on bit for bit, in one file.

Layout of the file: 16 bytes of magic, then little-endian the format version (uint32), the length
of the payload (uint64) and its SHA-256 (32 bytes), then the payload, which is what `torch.save`
writes and `torch.load(weights_only=True)` reads: nothing in it is code.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from dynsparse.files.torch_archive import check_archive, check_content
from dynsparse.files.whole import write_whole
from dynsparse.ranks import Ranks, collective_errors
from dynsparse.tracing import spanned
from dynsparse.training.checkpoint import random_state as rng
from dynsparse.training.checkpoint.parts import Training, all_gathered, misfit, together
from dynsparse.training.checkpoint.places import Sources, places, take_own
from dynsparse.training.checkpoint.reading import (
    HEADER,
    MAGIC,
    VERSION,
    check_parts,
    read_payload,
)
from dynsparse.training.spread import ranks_for
from dynsparse.training.trainer import SparseTrainer
from dynsparse.typed import typed

_log = logging.getLogger(__name__)


@typed
@spanned("checkpoint")
def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    trainer: SparseTrainer | None = None,
    lr_scheduler: Any = None,
    generators: Mapping[str, rng.Generator] | None = None,
    extra: Mapping[str, Any] | None = None,
    ranks: Any = "auto",
) -> None:
    """Write model and patterns, optimizer, trainer, and all random generators to `path`.

    The file appears whole or not at all: it is written beside `path`, brought to the disk, and
    then takes the place of what was there.

    Args:
        path: the file; its folder must exist.
        model, optimizer: saved by their `state_dict`.
        trainer: step counter, schedule and the generator of random growth.
        lr_scheduler: anything with `state_dict` and `load_state_dict`.
        generators: further generators by name, of torch, NumPy or Python; the global ones of all
            three are saved in any case.
        extra: whatever else, made of tensors, numbers, strings, lists, tuples and dicts.
        ranks: those that train together, as trainers take them. All of them call this: the first
            writes the file, with every rank's random generators and with what is sharded gathered.
            `distributed.save_checkpoint` gathers nothing.

    Raises:
        TypeError: something that would have to be saved as code (a class, a NumPy array).
        ValueError: something that `load_checkpoint` would refuse: a quantized or sparse tensor, a
            bytearray, optimizer state that holds NaN or infinity. Nothing is written.
        OSError: the folder is missing, or the disk is full; what was at `path` is still there. On
            several ranks a RuntimeError, the same on all.
    """
    line = ranks_for(ranks, model)
    together_with = line.all_ranks
    training = Training(model, optimizer, trainer, lr_scheduler, generators or {})
    training.check(line)
    parts, own = training.parts(extra, line), training.own_part(line)
    first = together_with.rank == 0
    parts = all_gathered(parts, together_with, first)
    everyone = _own_of_all(own, together_with)
    payload = parts | {name: everyone[0][name] for name in ("random", "generators")}
    if together_with.alone:
        del payload["places"]
    else:
        payload["ranks"] = everyone
    with collective_errors(together_with):
        if first:
            _write(Path(path), payload)


def _own_of_all(own: dict[str, Any], ranks: Ranks) -> list[dict[str, Any]]:
    """What is each rank's own, in the order of ranks."""
    if ranks.alone:
        return [own]
    buffer = io.BytesIO()
    torch.save(own, buffer)
    line = torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)
    lines = [one.cpu().numpy().tobytes() for one in ranks.all_gather(line.to(ranks.device))]
    return [torch.load(io.BytesIO(one), weights_only=True) for one in lines]


def _write(path: Path, payload: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(payload, buffer)
    buffer.seek(0)
    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(buffer):
        raise TypeError(
            f"a checkpoint holds only tensors, numbers, strings and containers of them; found "
            f"{', '.join(sorted(unsafe))}: convert it first"
        )
    content = buffer.getvalue()
    try:
        check_archive(content)
        check_content(payload, len(content))
        check_parts(payload)
    except ValueError as error:
        raise ValueError(f"load_checkpoint could not read this checkpoint: {error}") from None
    _write_whole(path, content)


@spanned("checkpoint")
def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    trainer: SparseTrainer | None = None,
    lr_scheduler: Any = None,
    generators: Mapping[str, rng.Generator] | None = None,
    random_state: bool = True,
    ranks: Any = "auto",
) -> dict[str, Any]:
    """Put everything back as `save_checkpoint` found it; returns `extra`.

    Everything is checked before anything is changed. What is left out is not loaded: for testing,
    pass the model alone. `random_state=False` leaves the global random generators as they are.

    On several ranks (see `save_checkpoint`) all call this, and each gets what was its own; ranks
    that were not there keep their random generators. Sharded tensors take their part.

    Layers that are `resizable`, as trainers that prune make them, take the number of blocks that
    was saved.

    Raises:
        CheckpointError: the file is truncated, damaged, foreign, of another format version, lacks
            something asked for, or does not fit the objects given; none of them is changed.
        OSError: the file cannot be read; on several ranks a CheckpointError, the same on all.
    """
    line = ranks_for(ranks, model)
    together_with = line.all_ranks
    training = Training(model, optimizer, trainer, lr_scheduler, generators or {})
    now = places(line)
    with together(together_with):
        payload = read_payload(Path(path))
        try:
            saved = payload.get("ranks", [payload])
            sources = Sources(payload.pop("places", None), len(saved), now, together_with.rank)
            take_own(payload, saved, trainer, sources)
            payload = training.taken(payload)
        except Exception as error:  # of any kind: it is what a stranger's values can end in
            raise misfit(str(path), error) from None
    if not random_state:
        payload["random"] = None
    training.put_back(payload, str(path), together_with)
    _log.info("loaded %s", path)
    return payload["extra"]


def read_extra(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The `extra` of a checkpoint, for settings that are needed before there is a model.

    Raises:
        CheckpointError: the file is truncated, damaged, foreign, or of another format version.
        OSError: the file cannot be read.
    """
    return read_payload(Path(path))["extra"]


def _write_whole(path: Path, payload: bytes) -> None:
    header = HEADER.pack(MAGIC, VERSION, len(payload), hashlib.sha256(payload).digest())

    def write(file: BinaryIO) -> None:
        file.write(header)
        file.write(payload)

    write_whole(path, write)
    _log.info("saved %s, %d bytes", path, len(payload))
