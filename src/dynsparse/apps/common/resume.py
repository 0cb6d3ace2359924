"""Checkpoints of a training: one per saved epoch or step, how to resume, whose a folder is.

Each training draws an identity, which its checkpoints keep in `extra` and its record in the
metadata. Of a checkpoint's options only those that define the training are read
(`Option.defines`): it never decides where to write, what to log or how many threads to take.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dynsparse._core.checks import shortened
from dynsparse.apps.common.options import TrainingOptions
from dynsparse.apps.common.training import Training
from dynsparse.options import Defines, flag
from dynsparse.training.checkpoint import load_checkpoint, read_extra, save_checkpoint
from dynsparse.training.checkpoint.format import CheckpointReader
from dynsparse.training.records import Recorder

KEY = "training_id"
"""The name of the identity in `extra` and in a record's metadata."""

_Options = TypeVar("_Options", bound=TrainingOptions)


def save(training: Training, folder: Path) -> Path:
    """Write `folder`/epoch-NNNN.ckpt or step-NNNNNNN.ckpt, atomically.

    A training that stopped inside an epoch: epoch-NNNN+BATCHES.ckpt.
    """
    number = getattr(training, training.unit)
    batches = training.partial.get("batches")
    inside = "" if batches is None else f"+{batches}"
    path = folder / f"{training.unit}-{number:0{training.digits}d}{inside}.ckpt"
    save_checkpoint(
        path,
        model=training.model,
        optimizer=training.optimizer,
        trainer=training.trainer,
        generators={training.generator_name: training.generator},
        extra={
            "app": training.app,
            KEY: training.identity,
            "options": training.options.defining(),
            "seed": training.seed,
            **training.drawn_state(),
            **{name: getattr(training, name) for name in training.counters},
            **({"partial": training.partial} if training.partial else {}),
        },
    )
    return path


def find_checkpoint(kind: type[Training], path: Path) -> Path:
    """`path` itself, or the newest checkpoint of `kind` in it if it is a folder.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: a folder with checkpoints of several trainings.
    """
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(
                f"--restore: expected a checkpoint or a folder of them, got {path}, which does not "
                "exist"
            )
        return path
    found = checkpoints_in(kind, path)
    if not found:
        raise FileNotFoundError(
            f"--restore: expected a folder with checkpoints named "
            f"{kind.unit}-{'N' * kind.digits}.ckpt, got {path} without any"
        )
    # The highest number may be of an earlier training, the latest date of a copy.
    newest = {identity: file for file, identity in read_identities(found).items() if identity}
    if len(newest) > 1:
        names = " and ".join(sorted(file.name for file in newest.values())[:2])
        raise ValueError(
            f"--restore: expected checkpoints of one training, got {path} with those of "
            f"{len(newest)}, such as {names}: name the file to go on from"
        )
    return found[-1]


def checkpoints_in(kind: type[Training], folder: Path) -> list[Path]:
    """The files in `folder` that are named as the checkpoints of `kind` are, the newest last."""
    pattern = rf"{kind.unit}-(\d{{{kind.digits},}})(?:\+(\d+))?\.ckpt"
    found = {
        (int(match[1]), int(match[2] or 0)): file
        for file in folder.iterdir()
        if (match := re.fullmatch(pattern, file.name))
    }
    return [found[number] for number in sorted(found)]


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
        try:
            identity_of(extra)
        except ValueError as error:
            raise ValueError(f"{path}: {error}, got {shortened(extra.get(KEY))}") from None
        return cls(path, extra)

    def __getitem__(self, name: str) -> Any:
        if name not in self.extra:
            raise ValueError(f"{self.path}: expected its {name.replace('_', ' ')}, got none")
        return self.extra[name]


def adopt(options: _Options, checkpoint: Checkpoint, given: Collection[str] = ()) -> _Options:
    """`options` completed by those that define the training of a checkpoint.

    What is at its default is taken over; what is not, or is named in `given`, must agree if it is
    among `options.binding`.

    Raises:
        ValueError: a checkpoint of another training.
    """
    known: tuple[Defines, ...] = ("network", "training", "apart")
    defaults, apart = type(options)().defining(known), options.defining(["apart"])
    saved = defaults | checkpoint["options"] | {name: checkpoint[name] for name in apart}
    binding = options.defining(options.binding)
    if "training" in options.binding:
        binding["seed"] = options.seed
    changes = {}
    for name, value in options.defining(known).items():
        if value == defaults[name] and name not in given:
            changes[name] = saved[name]
        elif name in binding and value != saved[name]:
            raise ValueError(
                f"--{flag(name)}: {checkpoint.path} was trained with {shortened(saved[name])}, got "
                f"{value!r}: leave --{flag(name)} out, or start anew without --restore"
            )
    return dataclasses.replace(options, **changes)


def restore(training: Training, checkpoint: Checkpoint) -> None:
    """Put `training` (made with the options of `adopt`) where the checkpoint was saved.

    Raises:
        ValueError: a file that is truncated, foreign, or does not fit; other training data.
    """
    training.check_drawn_state(
        checkpoint.path, {name: checkpoint[name] for name in training.drawn_state()}
    )
    counters = {name: checkpoint[name] for name in training.counters}
    partial = checkpoint.extra.get("partial", {})
    try:
        training.check_partial(partial)
    except ValueError as error:
        raise ValueError(f"{checkpoint.path}: {error}") from None
    load_checkpoint(
        checkpoint.path,
        model=training.model,
        optimizer=training.optimizer,
        trainer=training.trainer,
        generators={training.generator_name: training.generator},
    )
    vars(training).update(counters, partial=partial)
    training.identity = identity_of(checkpoint.extra)


def identity_of(extra: Any) -> str:
    """The identity of the training in a checkpoint's `extra`.

    Raises:
        ValueError: none, or something else.
    """
    identity = extra.get(KEY) if isinstance(extra, Mapping) else None
    if not isinstance(identity, str) or not re.fullmatch(r"[0-9a-f]{32}", identity):
        raise ValueError("expected the identity of a training, 32 hexadecimal digits")
    return identity


def read_identities(files: Iterable[Path]) -> dict[Path, str | None]:
    """The training of each checkpoint; None for a file that cannot be read as one.

    Raises:
        OSError: a file that may not be read.
    """
    return {file: _read_identity(file) for file in files}


def _read_identity(file: Path) -> str | None:
    try:
        return identity_of(CheckpointReader(file).peek_extra())
    except (TypeError, ValueError):
        return None


def find_others(training: Training, folder: Path, *, overwrite: bool) -> list[Path]:
    """The checkpoints in `folder` that belong to other trainings, the newest last.

    Raises:
        ValueError: there are some, and `overwrite` is not set.
    """
    found = read_identities(checkpoints_in(type(training), folder))
    others = [file for file, identity in found.items() if identity != training.identity]
    if others and not overwrite:
        newest = others[-1]
        if found[newest] is None:
            raise ValueError(
                f"--checkpoint-path: expected checkpoints of this training, got {newest}, which "
                "cannot be read: move it away, or let it be deleted with --overwrite"
            )
        raise ValueError(
            f"--checkpoint-path: expected a folder without checkpoints of another training, got "
            f"{newest}: go on with that one by --restore {folder}, choose another folder, or let "
            "them be deleted with --overwrite"
        )
    return others


def check_new(recorder: Recorder, *, overwrite: bool) -> None:
    """Raise ValueError if a new training would delete the updates that another has recorded."""
    if recorder.holds_updates and not overwrite:
        raise ValueError(
            f"--records-path: expected a folder without the record of another training, got "
            f"{recorder.path} with one: go on with that training by --restore, choose another "
            "folder, or let the record be deleted with --overwrite"
        )


def check_continued(recorder: Recorder, training: Training) -> None:
    """Raise ValueError unless the record belongs to the restored `training`."""
    path = recorder.path
    if not recorder.has_record:
        raise ValueError(
            f"--records-path: expected the record of the restored training, got {path} without "
            "one: name its folder, or leave --records-path out"
        )
    if recorder.earlier.get(KEY) != training.identity:
        raise ValueError(
            f"--records-path: expected the record of the restored training, got {path} with that "
            "of another: name its folder, or leave --records-path out"
        )
