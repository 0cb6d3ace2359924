"""Checkpoints: everything a training needs to go on bit for bit, in one file.

Layout of the file: 16 bytes of magic, then little-endian the format version (uint32), the length
of the payload (uint64) and its SHA-256 (32 bytes), then the payload, which is what `torch.save`
writes and `torch.load(weights_only=True)` reads: nothing in it is code.
"""

from __future__ import annotations

import copy
import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from dynsparse.files.shorten import shortened
from dynsparse.files.torch_archive import check_archive, check_content
from dynsparse.files.whole import write_whole
from dynsparse.nn.sparse_module import SparseModule, whole
from dynsparse.pattern import SparsePattern
from dynsparse.training.checkpoint import random_state as rng
from dynsparse.training.checkpoint.optimizing import check_finite, check_scheduler, loaded_optimizer
from dynsparse.training.checkpoint.reading import (
    HEADER,
    MAGIC,
    VERSION,
    CheckpointError,
    check_parts,
    read_payload,
)
from dynsparse.training.trainer import SparseTrainer
from dynsparse.typed import typed

__all__ = ["CheckpointError", "load_checkpoint", "read_extra", "save_checkpoint"]


@typed
def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    trainer: SparseTrainer | None = None,
    lr_scheduler: Any = None,
    generators: Mapping[str, rng.Generator] | None = None,
    extra: Mapping[str, Any] | None = None,
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

    Raises:
        RuntimeError: values of a sparse layer that are sharded.
        TypeError: something that would have to be saved as code (a class, a NumPy array).
        ValueError: something that `load_checkpoint` would refuse: a quantized or sparse tensor, a
            bytearray, optimizer state that holds NaN or infinity. Nothing is written.
        OSError: the folder is missing, or the disk is full; what was at `path` is still there.
    """
    check_finite(optimizer.state, _names(model))
    payload = {
        "patterns": _patterns(model),
        "model": model.state_dict(),
        "optimizer": {"kind": type(optimizer).__name__, "state": optimizer.state_dict()},
        "trainer": None if trainer is None else trainer.state_dict(),
        "lr_scheduler": None,
        "random": rng.global_states(),
        "generators": {n: rng.state_of(g) for n, g in (generators or {}).items()},
        "extra": dict(extra or {}),
    }
    if lr_scheduler is not None:
        payload["lr_scheduler"] = {
            "kind": type(lr_scheduler).__name__,
            "state": lr_scheduler.state_dict(),
        }
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
    _write_whole(Path(path), content)


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    trainer: SparseTrainer | None = None,
    lr_scheduler: Any = None,
    generators: Mapping[str, rng.Generator] | None = None,
    random_state: bool = True,
) -> dict[str, Any]:
    """Put everything back as `save_checkpoint` found it; returns `extra`.

    Everything is checked before anything is changed. What is left out is not loaded: for testing,
    pass the model alone. `random_state=False` leaves the global random generators as they are.

    Layers that are `resizable`, as trainers that prune make them, take the number of blocks that
    was saved.

    Raises:
        CheckpointError: the file is truncated, damaged, foreign, of another format version, lacks
            something asked for, or does not fit the objects given; none of them is changed.
        OSError: the file cannot be read.
    """
    payload = read_payload(Path(path))
    try:
        _check_model(payload, model)
        attributes: dict[str, Any] = {}
        if optimizer is not None:
            _check_optimizer(payload["optimizer"], optimizer)
            attributes = loaded_optimizer(
                optimizer, payload["optimizer"]["state"], _parameter_shapes(payload, model)
            )
            check_finite(attributes["state"], _names(model))
        if random_state:
            rng.check_global_states(payload["random"])
        if trainer is not None:
            _wanted(payload, "trainer")
            trainer.check_state(payload["trainer"], _saved_patterns(payload, model, trainer))
        if lr_scheduler is not None:
            _check_kind(_wanted(payload, "lr_scheduler"), lr_scheduler)
            check_scheduler(payload["lr_scheduler"]["state"], lr_scheduler)
        for name, generator in (generators or {}).items():
            if name not in payload["generators"]:
                raise ValueError(f"it holds no generator {name!r}")
            rng.check(generator, payload["generators"][name], name)
    except Exception as error:  # of any kind: it is what comparing a stranger's values can end in
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        reason = " ".join(f"{kind}{error}".split())[:600]
        raise CheckpointError(f"{path} does not fit: {reason}") from None

    # What only shows while it is loaded is undone: a trainer's own pieces know their states best.
    before = None if trainer is None else copy.deepcopy((model.state_dict(), trainer.state_dict()))
    own = {} if optimizer is None else dict(optimizer.__dict__)
    try:
        model.load_state_dict(payload["model"])
        if optimizer is not None:
            optimizer.__dict__.update(attributes)
        if trainer is not None:
            trainer.load_state_dict(payload["trainer"])
    except Exception as error:  # of any kind: it is what a stranger's file makes them do
        if before is None or trainer is None:
            raise
        model.load_state_dict(before[0])
        if optimizer is not None:
            optimizer.__dict__.update(own)
        trainer.load_state_dict(before[1])
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(f"{path} does not fit: its trainer's state: {reason}") from None
    if lr_scheduler is not None:
        lr_scheduler.load_state_dict(payload["lr_scheduler"]["state"])
    for name, generator in (generators or {}).items():
        rng.restore(generator, payload["generators"][name])
    if random_state:
        rng.restore_global_states(payload["random"])
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


def _patterns(model: nn.Module) -> dict[str, list[int]]:
    """Shape, block size and number of blocks of every module with a pattern."""
    found = {}
    for name, module in model.named_modules():
        pattern = getattr(module, "pattern", None)
        if isinstance(pattern, SparsePattern):
            if isinstance(module, SparseModule):
                whole(module.values)
            found[name] = [*pattern.shape, pattern.block_size, pattern.nnz]
    return found


def _check_model(payload: dict[str, Any], model: nn.Module) -> None:
    saved, own = payload["model"], model.state_dict()
    if odd := sorted(saved.keys() ^ own.keys()):
        where = "file" if odd[0] in saved else "model"
        raise ValueError(
            f"{len(odd)} entries are in only one of file and model, such as {odd[0]!r}, "
            f"which is in the {where}"
        )
    resizable: set[str] = set()  # entries whose length follows the number of blocks
    for name, pattern in _patterns(model).items():
        other = payload["patterns"].get(name)
        module = model.get_submodule(name)
        if (
            getattr(module, "resizable", False)
            and isinstance(other, list)
            and other[:3] == pattern[:3]
        ):
            prefix = f"{name}." if name else ""
            resizable |= {prefix + key for key in ("values", "rows", "cols")}
        elif not isinstance(other, list) or other != pattern:
            raise ValueError(
                f"layer {name!r} was saved with [out, in, block size, blocks] = "
                f"{shortened(other)}, "
                f"the model has {pattern}"
            )
        _check_pattern(name, module, saved)
    for name, tensor in own.items():
        other = saved[name]
        if not isinstance(tensor, Tensor):
            continue
        skip = 1 if name in resizable else 0
        if not isinstance(other, Tensor):
            raise ValueError(f"{name!r} was saved as {type(other).__name__}, not as a tensor")
        if (tensor.shape[skip:], tensor.dtype) != (other.shape[skip:], other.dtype):
            raise ValueError(
                f"{name!r} was saved as {other.dtype} {list(other.shape)}, the model has "
                f"{tensor.dtype} {list(tensor.shape)}"
            )


def _check_pattern(name: str, module: Any, saved: dict[str, Any]) -> None:
    """The layers check this, too, but when the ones before them have changed already."""
    prefix = f"{name}." if name else ""
    rows, cols, values = (saved.get(prefix + key) for key in ("rows", "cols", "values"))
    if rows is None or cols is None:
        return
    own = module.pattern
    try:
        pattern = SparsePattern(rows, cols, shape=own.shape, block_size=own.block_size)
        if not torch.equal(pattern.flat, rows.cpu().long() * pattern.grid[1] + cols.cpu()):
            raise ValueError("rows and cols are not in row-major order")
        if isinstance(values, Tensor) and values.shape != pattern.values_shape:
            raise ValueError(f"{pattern.nnz} blocks with values of {list(values.shape)}")
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the pattern of {name!r} is damaged: {error}") from None


def _saved_patterns(
    payload: dict[str, Any], model: nn.Module, trainer: SparseTrainer
) -> dict[str, SparsePattern] | None:
    """The patterns that the trainer's layers are going to have, after `_check_model`."""
    saved, found = payload["model"], {}
    prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    for name, layer in trainer.layers.items():
        prefix = prefixes.get(id(layer))
        if prefix is None or prefix + "rows" not in saved:
            return None  # a trainer of another model, or layers without a state
        rows, cols = saved[prefix + "rows"], saved[prefix + "cols"]
        found[name] = SparsePattern(
            rows, cols, shape=layer.pattern.shape, block_size=layer.block_size
        )
    return found


def _parameter_shapes(payload: dict[str, Any], model: nn.Module) -> dict[int, torch.Size]:
    """The shape of each parameter of the model, by its `id`, once the payload is loaded."""
    return {
        id(parameter): payload["model"][name].shape
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if isinstance(payload["model"].get(name), Tensor)
    }


def _names(model: nn.Module) -> dict[int, str]:
    """The name of each parameter, by its `id`."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _check_optimizer(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    _check_kind(saved, optimizer)
    sizes = [len(group["params"]) for group in saved["state"]["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != own:
        raise ValueError(f"the optimizer was saved with groups of {sizes} tensors, here {own}")


def _check_kind(saved: dict[str, Any], thing: Any) -> None:
    if saved["kind"] != type(thing).__name__:
        raise ValueError(f"it holds the state of {saved['kind']}, not of {type(thing).__name__}")


def _wanted(payload: dict[str, Any], part: str) -> dict[str, Any]:
    if payload[part] is None:
        raise ValueError(f"it was saved without a {part}: leave it out")
    return payload[part]
