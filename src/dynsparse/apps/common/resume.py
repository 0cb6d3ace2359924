"""Checkpoints of a training: one per saved epoch or step, and how to resume.

Of a checkpoint's options only those that define the training are read (`Option.defines`): it never
decides where to write, what to log or how many threads to take.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dynsparse._core.checks import is_number, shorten
from dynsparse.apps.common.options import TrainingOptions
from dynsparse.apps.common.training import Training
from dynsparse.options import Defines, flag
from dynsparse.training.checkpoint import load_checkpoint, read_extra, save_checkpoint

_Options = TypeVar("_Options", bound=TrainingOptions)


def save(training: Training, folder: Path) -> Path:
    """Write `folder`/epoch-NNNN.ckpt or step-NNNNNNN.ckpt, atomically.

    A training that stopped inside an epoch: epoch-NNNN+BATCHES.ckpt.
    """
    number = getattr(training, training.unit)
    batches = training.partial.get("batches")
    inside = "" if batches is None else f"+{batches}"
    training.collect_weights()
    path = folder / f"{training.unit}-{number:0{training.digits}d}{inside}.ckpt"
    save_checkpoint(
        path,
        model=training.model,
        optimizer=training.optimizer,
        trainer=training.trainer,
        generators={training.generator_name: training.generator},
        extra={
            "app": training.app,
            "options": training.options.definition(),
            "seed": training.seed,
            "scaler": training.scaler.state_dict(),
            **training.extra_state(),
            **{name: getattr(training, name) for name in training.counters},
            **({"partial": training.partial} if training.partial else {}),
        },
    )
    return path


def find_checkpoint(kind: type[Training], path: Path) -> Path:
    """`path` itself, or the newest checkpoint of `kind` in it if it is a folder.

    Raises:
        FileNotFoundError: nothing there.
    """
    if path.is_dir():
        checkpoints = list_checkpoints(kind, path)
        if not checkpoints:
            raise FileNotFoundError(
                f"--restore: expected a folder with checkpoints named "
                f"{kind.unit}-{'N' * kind.digits}.ckpt, got {path} without any"
            )
        return checkpoints[-1]
    if not path.exists():
        raise FileNotFoundError(
            f"--restore: expected a checkpoint or a folder of them, got {path}, which does not "
            "exist"
        )
    return path


def list_checkpoints(kind: type[Training], folder: Path) -> list[Path]:
    """The files in `folder` that are named as the checkpoints of `kind` are, the newest last."""
    pattern = rf"{kind.unit}-(\d{{{kind.digits},}})(?:\+(\d+))?\.ckpt"
    checkpoints = {
        (int(match[1]), int(match[2] or 0)): file
        for file in folder.iterdir()
        if (match := re.fullmatch(pattern, file.name))
    }
    return [checkpoints[number] for number in sorted(checkpoints)]


@dataclass(frozen=True)
class Checkpoint:
    """The path of a checkpoint, and its `extra`."""

    path: Path
    extra: dict[str, Any]

    @classmethod
    def read(cls, app: str, path: Path) -> Checkpoint:
        """The checkpoint of `dynsparse APP` at `path`.

        Raises:
            ValueError: not a checkpoint, or not one of this application.
        """
        extra = read_extra(path)
        if extra.get("app") != app:
            raise ValueError(f"{path}: expected a checkpoint of `dynsparse {app}`, got another one")
        if not isinstance(extra.get("options"), dict) or not isinstance(extra.get("seed"), int):
            raise ValueError(f"{path}: expected the options and the seed of a training, got none")
        return cls(path, extra)

    def __getitem__(self, name: str) -> Any:
        if name not in self.extra:
            raise ValueError(f"{self.path}: expected its {name.replace('_', ' ')}, got none")
        return self.extra[name]


def fill_in(options: _Options, checkpoint: Checkpoint, given: Collection[str] = ()) -> _Options:
    """`options` completed by those that define the training of a checkpoint.

    What is at its default is taken over; what is not, or is named in `given`, must agree if it is
    among `options.binding`.

    Raises:
        ValueError: a checkpoint of another training.
    """
    known: tuple[Defines, ...] = ("network", "training", "apart")
    defaults, apart = type(options)().definition(known), options.definition(["apart"])
    saved = defaults | checkpoint["options"] | {name: checkpoint[name] for name in apart}
    binding = options.definition(options.binding)
    if "training" in options.binding:
        binding["seed"] = options.seed
    changes = {}
    for name, value in options.definition(known).items():
        if value == defaults[name] and name not in given:
            changes[name] = saved[name]
        elif name in binding and value != saved[name]:
            raise ValueError(
                f"--{flag(name)}: {checkpoint.path} was trained with {shorten(saved[name])}, got "
                f"{value!r}: leave --{flag(name)} out, or start over without --restore"
            )
    return dataclasses.replace(options, **changes)


def restore(training: Training, checkpoint: Checkpoint) -> None:
    """Put `training` (made with the options of `fill_in`) where the checkpoint was saved.

    Raises:
        ValueError: a file that is truncated, foreign, or does not fit; other training data.
    """
    training.check_extra_state(
        checkpoint.path, {name: checkpoint[name] for name in training.extra_state()}
    )
    counters = {name: checkpoint[name] for name in training.counters}
    scaler, known = checkpoint["scaler"], training.scaler.state_dict()
    is_state = isinstance(scaler, dict) and scaler.keys() == known.keys()
    if not is_state or not all(map(is_number, scaler.values())):
        raise ValueError(f"{checkpoint.path}: expected the state of a scaler, got another one")
    partial = checkpoint.extra.get("partial", {})
    if not isinstance(partial, dict) or set(partial) not in (set(), {*training.partial_names}):
        raise ValueError(
            f"{checkpoint.path}: expected {', '.join(training.partial_names)} of a training that "
            f"stopped, got {shorten(partial)}"
        )
    load_checkpoint(
        checkpoint.path,
        model=training.model,
        optimizer=training.optimizer,
        trainer=training.trainer,
        generators={training.generator_name: training.generator},
    )
    training.scaler.load_state_dict(scaler)
    vars(training).update(counters, partial=partial)


def find_foreign(training: Training, folder: Path) -> list[Path]:
    """The checkpoints in `folder`, the newest last, unless `training` goes on from one of them.

    Raises:
        ValueError: there are some, and the options do not say to overwrite them.
    """
    options = training.options
    if options.restore is not None:
        restored = options.restore.resolve()
        if folder.resolve() == (restored if restored.is_dir() else restored.parent):
            return []
    others = list_checkpoints(type(training), folder)
    if others and not options.overwrite:
        raise ValueError(
            f"--checkpoint-path: expected a folder without checkpoints of another training, got "
            f"{others[-1]}: go on with that one by --restore {folder}, choose another folder, or "
            "let them be deleted with --overwrite"
        )
    return others
