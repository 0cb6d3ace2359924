"""The options that all trainings share, and how a set of options is checked."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynsparse.apps.common.kinds import (
    Choice,
    File,
    Integer,
    Json,
    Many,
    Number,
    Pairs,
    Switch,
    Text,
)
from dynsparse.apps.common.option import METHODS, Defines, option, options_of, taking
from dynsparse.training.algorithms import BY_NAME

__all__ = ["TrainingOptions"]


def _check_prune_schedule(name: str, settings: dict[str, Any]) -> None:
    for key, value in settings.items():
        if key not in ("zero_steps", "phase_delay", "period"):
            raise ValueError(
                f"--{name}: expected the keys zero_steps, phase_delay, period, got {key!r}"
            )
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise ValueError(f"--{name}: {key}: expected a number, got {value!r}")
    zero_steps = settings.get("zero_steps", 0)
    if not Integer(0).fits(zero_steps):
        raise ValueError(
            f"--{name}: zero_steps: expected a number of pattern updates, an integer of at least "
            f"0, got {zero_steps!r}"
        )


@dataclass(kw_only=True)
class TrainingOptions:
    """One training. `check` says in one line what is wrong with it.

    The flags of the commands have the same names with dashes. An application adds its own options,
    and changes these where it must (`again`).
    """

    data_type: str = option(
        "float32",
        "Of weights and products; bfloat16 is autocast.",
        Choice(("float32", "float64", "bfloat16")),
        "Network",
        defines="network",
    )

    method: str = option(
        "rigl",
        "How the pattern changes (docs/algorithms.md): by gradient (rigl), at random (set), or as "
        "the other papers have it; gmp and granet begin denser and end at the density asked for, "
        "topkast uses half of it in the forward pass; static never changes; dense makes every "
        "layer dense.",
        Choice(METHODS),
        "Sparsity",
        defines="network",
    )
    block_size: int = option(
        1, "Edge of the blocks.", Choice((1, 4, 8, 16, 32)), "Sparsity", defines="network",
        methods=tuple(BY_NAME),
    )  # fmt: skip
    pooling_type: str = option(
        "NONE",
        "How the gradients of a block become its growth score; NONE ranks as SUM.",
        Choice(("NONE", "SUM", "AVG", "MAX")),
        "Sparsity",
        defines="training",
        methods=taking("pooling"),
    )
    prune_ratio: float = option(
        0.3,
        "Largest share of a layer that an update replaces; it falls to 0.",
        Number(0, 1),
        "Sparsity",
        defines="training",
        methods=taking("drop_fraction"),
    )
    update_interval: int | None = option(
        None, "Steps between pattern updates.", Integer(1), "Sparsity", defines="training",
        methods=taking("update_interval"),
    )  # fmt: skip
    cosine_prune_schedule: dict[str, Any] = option(
        {},
        'JSON such as {"zero_steps": 5, "phase_delay": 0, "period": 0.5}: updates without '
        "replacements at first, radians, turns.",
        Json(),
        "Sparsity",
        defines="training",
        methods=taking("schedule"),
        check=_check_prune_schedule,
    )

    batch_size: int = option(
        16, "Pictures per optimizer step.", Integer(1), "Training", defines="training"
    )
    optimizer: str = option(
        "Adam",
        "Adam, or SGD without or with momentum.",
        Choice(("GradientDescent", "Momentum", "Adam")),
        "Training",
        defines="training",
    )
    optimizer_arg: dict[str, Any] = option(
        {},
        "An argument of the optimizer, such as momentum=0.9.",
        Pairs("momentum=0.9"),
        "Training",
        defines="training",
    )
    seed: int | None = option(
        None,
        "Of all randomness; drawn and shown if left out.",
        Integer(0, 2**63 - 1, "an integer below 2^63"),
        "Training",
        defines="apart",
    )
    threads: int = option(
        1,
        "CPU threads; small batches gain nothing from more than one.",
        Integer(1, 1024),
        "Training",
    )

    restore: Path | None = option(
        None,
        "Continue from this checkpoint, or from the newest in this folder. Flags left out are "
        "those it was trained with.",
        File(),
        "Checkpoints",
    )
    checkpoint_path: Path | None = option(
        None, "Folder for checkpoints; none are written without it.", File(), "Checkpoints"
    )
    checkpoint_freq: int = option(1, "Epochs between checkpoints.", Integer(1), "Checkpoints")
    stop_after: int | None = option(
        None,
        "Stop after this epoch of --epochs, to continue with --restore.",
        Integer(1),
        "Checkpoints",
    )

    records_path: Path | None = option(
        None, "Folder for the record that `dynsparse visualise` draws.", File(), "Output"
    )
    json: Path | None = option(None, "File for the final figures.", File(), "Output")
    tensorboard: Path | None = option(
        None, "Folder for TensorBoard (needs tensorboard).", File(), "Output"
    )
    use_wandb: bool = option(False, "Log to Weights & Biases (needs wandb).", Switch(), "Output")
    wandb_project_name: str | None = option(None, "Project at wandb.", Text(), "Output")
    wandb_name: str | None = option(None, "Name of the run at wandb.", Text(), "Output")
    wandb_tags: Sequence[str] = option((), "Tags at wandb.", Many(Text(), "texts"), "Output")

    def check(self) -> None:
        """Raise ValueError, naming the flag, for anything that cannot be trained."""
        for name, known in options_of(type(self)).items():
            known.check_value(name, getattr(self, name))
        if self.cosine_prune_schedule and self.method in ("gmp", "granet", "deepr"):
            raise ValueError(
                f"--cosine-prune-schedule: expected a method that replaces a share, got "
                f"--method {self.method}, which has a schedule of its own: leave one out"
            )
        self.check_together()
        named = self.wandb_project_name or self.wandb_name or self.wandb_tags
        if named and not self.use_wandb:
            raise ValueError("--wandb-...: expected --use-wandb with it, got none: add --use-wandb")

    def check_together(self) -> None:
        """The part of `check` that is about several of the application's options together."""

    @property
    def binding(self) -> tuple[Defines, ...]:
        """Which options must agree with those of a checkpoint to restore."""
        return ("network", "training")

    def defining(self, kinds: Collection[Defines] = ("network", "training")) -> dict[str, Any]:
        """The options that define the network, or the training, as plain types."""
        values = {
            name: getattr(self, name)
            for name, known in options_of(type(self)).items()
            if known.defines in kinds
        }
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
