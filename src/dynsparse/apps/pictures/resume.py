"""Checkpoints of a training: one file per saved epoch, and the way back from one."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from dynsparse.apps.common.checkpoint_files import latest_checkpoint
from dynsparse.apps.pictures.options import PictureOptions
from dynsparse.apps.pictures.training import Training
from dynsparse.training.checkpoint import load_checkpoint, read_extra, save_checkpoint

__all__ = ["adopt", "find_checkpoint", "restore", "save"]

_Options = TypeVar("_Options", bound=PictureOptions)

_COUNTERS = ("epoch", "step", "seconds", "update_seconds", "replaced")


def save(training: Training, folder: Path) -> Path:
    """Write `folder`/epoch-NNNN.ckpt, whole or not at all."""
    path = folder / f"epoch-{training.epoch:04d}.ckpt"
    save_checkpoint(
        path,
        model=training.network,
        optimizer=training.optimizer,
        trainer=training.trainer,
        generators={"training": training.generator},
        extra={
            "app": training.app,
            "options": training.options.defining(),
            "seed": training.seed,
            **training.drawn(),
            **{name: getattr(training, name) for name in _COUNTERS},
        },
    )
    return path


def find_checkpoint(path: Path) -> Path:
    """`path` itself, or the newest epoch in it if it is a folder.

    Raises:
        FileNotFoundError: nothing there.
    """
    return latest_checkpoint(path, "epoch", 4)


def adopt(
    app: str, options: _Options, path: Path, given: Collection[str] = ()
) -> tuple[_Options, int]:
    """`options` completed by those the checkpoint was trained with, and its seed.

    What is at its default is taken over; what is not, or is named in `given`, must agree.

    Raises:
        ValueError: not a checkpoint of this program, or one of another training.
    """
    extra = read_extra(path)
    if extra.get("app") != app:
        raise ValueError(f"{path}: expected a checkpoint of `dynsparse {app}`, got another one")
    saved: dict[str, Any] = extra["options"]
    defaults = type(options)().defining()
    for name, value in options.defining().items():
        if value != saved[name] and (value != defaults[name] or name in given):
            flag = name.replace("_", "-")
            raise ValueError(
                f"--{flag}: {path} was trained with {saved[name]!r}, got {value!r}: leave "
                f"--{flag} out, or start anew without --restore"
            )
    if options.seed not in (None, extra["seed"]):
        raise ValueError(
            f"--seed: {path} was trained with {extra['seed']}, got {options.seed}: leave --seed "
            "out, or start anew without --restore"
        )
    return dataclasses.replace(options, **saved), extra["seed"]


def restore(training: Training, path: Path) -> None:
    """Put `training` (made with the options of `adopt`) where the checkpoint was saved.

    Raises:
        ValueError: a file that is truncated, foreign, or does not fit.
    """
    extra = load_checkpoint(
        path,
        model=training.network,
        optimizer=training.optimizer,
        trainer=training.trainer,
        generators={"training": training.generator},
    )
    for name, value in training.drawn().items():
        if not value.equal(extra[name]):
            raise ValueError(f"{path}: its {name} is not the one of its seed")
    for name in _COUNTERS:
        setattr(training, name, extra[name])
