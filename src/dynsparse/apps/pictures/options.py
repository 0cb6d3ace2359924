"""The settings that trainings on pictures share: names, defaults and what may go together."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from dynsparse.data import NAMES as DATASETS

__all__ = ["CHOICES", "PictureOptions", "check_number", "is_integer"]

CHOICES: dict[str, tuple[Any, ...]] = {
    "dataset": DATASETS,
    "method": (
        "rigl",
        "set",
        "snfs",
        "mest",
        "deepr",
        "topkast",
        "gmp",
        "granet",
        "static",
        "dense",
    ),
    "block_size": (1, 4, 8, 16, 32),
    "pooling_type": ("NONE", "SUM", "AVG", "MAX"),
    "optimizer": ("GradientDescent", "Momentum", "Adam"),
    "decay": ("cosine", "steps", "constant"),
    "data_type": ("float32", "float64", "bfloat16"),
    "test_mode": ("all", "training", "tests"),
}

_MOST_THREADS = 1024
_SCHEDULE_KEYS = ("zero_steps", "phase_delay", "period")
# What the training computes depends on every other option.
_INCIDENTAL = {
    "data_dir", "stop_after", "seed", "threads", "test_mode", "restore", "checkpoint_path",
    "checkpoint_freq", "records_path", "log", "json", "tensorboard", "use_wandb",
    "wandb_project_name", "wandb_name", "wandb_tags",
}  # fmt: skip


@dataclass(kw_only=True)
class PictureOptions:
    """One training. `check` says in one line what is wrong with it.

    The flags of the command have the same names with dashes, and its help says what each one does.
    """

    choices: ClassVar[dict[str, tuple[Any, ...]]] = CHOICES
    # First learning rates at a batch of 16; `learning_rate` is what holds if it is given.
    rates: ClassVar[dict[str, float]] = {"GradientDescent": 0.02, "Momentum": 0.02, "Adam": 0.002}

    dataset: str = "digits"
    data_dir: Path | None = None
    hold_out: int = 0
    block_size: int = 1
    data_type: str = "float32"
    method: str = "rigl"
    prune_ratio: float = 0.3
    pooling_type: str = "NONE"
    cosine_prune_schedule: dict[str, Any] = field(default_factory=dict)
    steps_per_epoch: int = 5
    update_interval: int | None = None
    batch_size: int = 16
    epochs: int = 10
    stop_after: int | None = None
    optimizer: str = "Adam"
    optimizer_arg: dict[str, Any] = field(default_factory=dict)
    learning_rate: float | None = None
    decay: str = "cosine"
    seed: int | None = None
    threads: int = 1
    test_mode: str = "all"
    restore: Path | None = None
    checkpoint_path: Path | None = None
    checkpoint_freq: int = 1
    records_path: Path | None = None
    log: Path | None = None
    json: Path | None = None
    tensorboard: Path | None = None
    use_wandb: bool = False
    wandb_project_name: str | None = None
    wandb_name: str | None = None
    wandb_tags: Sequence[str] = ()

    def check(self) -> None:
        """Raise ValueError, naming the flag, for anything that cannot be trained."""
        for name, choices in self.choices.items():
            value = getattr(self, name)
            if value not in choices:
                listed = ", ".join(map(str, choices))
                raise ValueError(f"--{_flag(name)}: expected one of {listed}, got {value!r}")
        for name, least in (
            ("batch_size", 1), ("epochs", 1), ("steps_per_epoch", 1), ("checkpoint_freq", 1),
            ("update_interval", 1), ("threads", 1), ("stop_after", 1), ("hold_out", 0), ("seed", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not is_integer(value, least):
                raise ValueError(
                    f"--{_flag(name)}: expected an integer of at least {least}, got {value!r}"
                )
        if self.threads > _MOST_THREADS:
            raise ValueError(
                f"--threads: expected at most {_MOST_THREADS}, got {self.threads}: one is enough "
                "for a network of this size"
            )
        if self.seed is not None and self.seed >= 2**63:
            raise ValueError(f"--seed: expected an integer below 2^63, got {self.seed}")
        check_number("prune-ratio", self.prune_ratio, 0, 1)
        if self.learning_rate is not None:
            check_number("learning-rate", self.learning_rate, 0, math.inf, open_end=True)
        self.check_network()
        self._check_schedule()
        self._check_companions()

    def check_network(self) -> None:
        """The part of `check` that the network's own settings need."""

    def _check_schedule(self) -> None:
        if self.cosine_prune_schedule and self.method in ("gmp", "granet", "deepr"):
            raise ValueError(
                f"--cosine-prune-schedule: expected a method that replaces a share, got "
                f"--method {self.method}, which has a schedule of its own: leave one out"
            )
        for key, value in self.cosine_prune_schedule.items():
            if key not in _SCHEDULE_KEYS:
                raise ValueError(
                    "--cosine-prune-schedule: expected the keys zero_steps, phase_delay, period, "
                    f"got {key!r}"
                )
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not math.isfinite(value):
                raise ValueError(
                    f"--cosine-prune-schedule: {key}: expected a number, got {value!r}"
                )
        zero_steps = self.cosine_prune_schedule.get("zero_steps", 0)
        if not is_integer(zero_steps, 0):
            raise ValueError(
                "--cosine-prune-schedule: zero_steps: expected a number of pattern updates, "
                f"an integer of at least 0, got {zero_steps!r}"
            )

    def _check_companions(self) -> None:
        if self.stop_after is not None and self.stop_after > self.epochs:
            raise ValueError(
                f"--stop-after: expected one of the {self.epochs} epochs, got {self.stop_after}"
            )
        if self.test_mode == "tests" and self.restore is None:
            raise ValueError(
                "--test-mode tests: expected a trained network to test: name a checkpoint with "
                "--restore"
            )
        if self.dataset == "digits" and self.data_dir is not None:
            raise ValueError(
                "--data-dir: the digits come with scikit-learn and have no folder: leave it out, "
                "or choose --dataset mnist or fashion-mnist"
            )
        named = self.wandb_project_name or self.wandb_name or self.wandb_tags
        if named and not self.use_wandb:
            raise ValueError("--wandb-...: expected --use-wandb with it, got none: add --use-wandb")

    @property
    def changes_pattern(self) -> bool:
        """Whether the method moves connections at all."""
        return self.method not in ("static", "dense")

    @property
    def label(self) -> str:
        """What tells this training from others in a log; one word."""
        return self.method

    def defining(self) -> dict[str, Any]:
        """The options that what the training computes depends on, as plain types."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _INCIDENTAL}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def _flag(name: str) -> str:
    return name.replace("_", "-")


def is_integer(value: Any, least: int) -> bool:
    if isinstance(value, bool):
        return False
    try:
        return operator.index(value) >= least
    except TypeError:
        return False


def check_number(flag: str, value: Any, low: float, high: float, *, open_end: bool = False) -> None:
    """Raise ValueError unless `value` is a number in [low, high], or [low, high)."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high or (open_end and value == high):
        if math.isinf(high):
            span = f"a finite number of at least {low:g}"
        else:
            span = f"a number in [{low:g}, {high:g}{')' if open_end else ']'}"
        raise ValueError(f"--{flag}: expected {span}, got {value!r}")
