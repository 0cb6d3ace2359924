"""Checkpoints of the language model: one file per saved step, and the way back from one."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dynsparse.apps.common.checkpoint_files import latest_checkpoint
from dynsparse.apps.lm.options import Options, flag
from dynsparse.apps.lm.training import Training
from dynsparse.training.checkpoint import load_checkpoint, read_extra, save_checkpoint

__all__ = ["adopt", "find_checkpoint", "restore", "save", "saved_vocabulary"]

APP = "lm"
# What the model is depends on these, and what a training computes on these and the next.
_MODEL = (
    "layers", "hidden_size", "ff_size", "heads", "qkv_size", "embedding_size",
    "sparse_embeddings", "sequence_length", "droprate", "data_type", "method", "match_parameters",
    "sparsity", "block_size", "tokens", "vocabulary_size",
)  # fmt: skip
_TRAINING = (
    "initial_scale",
    "valid_share", "test_share", "pooling_type", "prune_ratio", "prune_end", "update_interval",
    "cosine_prune_schedule", "steps", "batch_size", "gradient_accumulation_count", "optimizer",
    "optimizer_arg", "peak_learning_rate", "min_learning_rate", "warmup_steps", "cooldown_steps",
    "decay_power", "grad_norm_clip", "repetition_weighting", "autoregression_offset",
    "valid_interval", "evaluation_tokens",
)  # fmt: skip
_COUNTERS = ("step", "seconds", "update_seconds", "replaced", "history")


def save(training: Training, folder: Path, options: Options) -> Path:
    """Write `folder`/step-NNNNNNN.ckpt, whole or not at all; `options` are the user's own."""
    path = folder / f"step-{training.step:07d}.ckpt"
    save_checkpoint(
        path,
        model=training.model,
        optimizer=training.optimizer,
        trainer=training.trainer,
        generators={"batches": training.generator},
        extra={
            "app": APP,
            "options": _defining(options),
            "data": str(options.data),
            "vocabulary": training.corpus.vocabulary,
            "seed": training.seed,
            "train_tokens": len(training.corpus.train),
            "train_digest": training.corpus.digest(),
            **{name: getattr(training, name) for name in _COUNTERS},
        },
    )
    return path


def find_checkpoint(path: Path) -> Path:
    """`path` itself, or the last step in it if it is a folder.

    Raises:
        FileNotFoundError: nothing there.
    """
    return latest_checkpoint(path, "step", 7)


def adopt(options: Options, path: Path, given: Collection[str] = ()) -> tuple[Options, int]:
    """`options` completed by those the checkpoint was trained with, and its seed.

    What is at its default is taken over; what is not, or is named in `given`, must agree. Where
    nothing is trained on, only what the model is has to.

    Raises:
        ValueError: not a checkpoint of this program, or one of another training.
    """
    extra = _extra(path)
    saved: dict[str, Any] = extra["options"]
    defaults = _defining(Options())
    binding = _MODEL + (_TRAINING if options.mode in ("all", "train") else ())
    for name, value in _defining(options).items():
        if name not in binding or value == saved[name]:
            continue
        if value != defaults[name] or name in given:
            raise ValueError(
                f"--{flag(name)}: {path} was trained with {saved[name]!r}, got {value!r}: leave "
                f"--{flag(name)} out, or start anew without --restore"
            )
    trains = options.mode in ("all", "train")
    if trains and options.seed not in (None, extra["seed"]):
        raise ValueError(
            f"--seed: {path} was trained with {extra['seed']}, got {options.seed}: leave --seed "
            "out, or start anew without --restore"
        )
    changes = {
        name: value
        for name, value in saved.items()
        if name in binding or (getattr(options, name) == defaults[name] and name not in given)
    }
    if options.data == Options().data and "data" not in given:
        changes["data"] = extra["data"]
    return dataclasses.replace(options, **changes), extra["seed"]


def saved_vocabulary(path: Path) -> dict[str, Any]:
    """The vocabulary of a checkpoint, as `tokenizer_from_state` reads it."""
    return _extra(path)["vocabulary"]


def restore(training: Training, path: Path) -> None:
    """Put `training` (made with the options of `adopt`) where the checkpoint was saved.

    Raises:
        ValueError: a file that is truncated, foreign, or does not fit; other training data.
    """
    extra = _extra(path)
    corpus = training.corpus
    if training.options.mode in ("all", "train") and extra["train_digest"] != corpus.digest():
        raise ValueError(
            f"--data: {path} was trained on {extra['train_tokens']:,} tokens, got "
            f"{len(corpus.train):,} others: name the same text, and the same shares of it"
        )
    load_checkpoint(
        path,
        model=training.model,
        optimizer=training.optimizer,
        trainer=training.trainer,
        generators={"batches": training.generator},
    )
    for name in _COUNTERS:
        setattr(training, name, extra[name])


def _extra(path: Path) -> dict[str, Any]:
    extra = read_extra(path)
    if extra.get("app") != APP:
        raise ValueError(f"{path}: expected a checkpoint of `dynsparse lm`, got another one")
    return extra


def _defining(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in _MODEL + _TRAINING}
