"""The settings of the MNIST training: names, defaults and what may go together.

Names and most defaults are those of the program this one descends from, `sparse_mnist.py` of
Graphcore's dynamic sparsity application; docs/mnist.md lists the differences.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynsparse.data import NAMES as DATASETS
from dynsparse.data.pictures import CLASSES, SIDE

__all__ = ["CHOICES", "LayerShape", "Options", "layer_shapes", "picture_side"]

CHOICES: dict[str, tuple[Any, ...]] = {
    "dataset": DATASETS,
    "method": ("rigl", "set", "static", "dense"),
    "block_size": (1, 4, 8, 16, 32),
    "pooling_type": ("NONE", "SUM", "AVG", "MAX"),
    "permute_input": ("none", "block", "random"),
    "optimizer": ("GradientDescent", "Momentum", "Adam"),
    "decay": ("cosine", "steps", "constant"),
    "data_type": ("float32", "float64", "bfloat16"),
    "test_mode": ("all", "training", "tests"),
}

_WIDEST = 1_000_000
_MOST_THREADS = 1024
_SCHEDULE_KEYS = ("zero_steps", "phase_delay", "period")


@dataclass(kw_only=True)
class Options:
    """One training. `check` says in one line what is wrong with it.

    The flags of `dynsparse mnist` have the same names with dashes, and its help says what each
    one does.
    """

    dataset: str = "digits"
    data_dir: Path | None = None
    hold_out: int = 0
    densities: Sequence[float] = (0.1, 0.3)
    hidden_sizes: Sequence[int] = (320,)
    block_size: int = 1
    droprate: float = 0.1
    permute_input: str = "none"
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
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                listed = ", ".join(map(str, choices))
                raise ValueError(f"--{_flag(name)}: expected one of {listed}, got {value!r}")
        for name, least in (
            ("batch_size", 1), ("epochs", 1), ("steps_per_epoch", 1), ("checkpoint_freq", 1),
            ("update_interval", 1), ("threads", 1), ("stop_after", 1), ("hold_out", 0), ("seed", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not _is_integer(value, least):
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
        _check_number("droprate", self.droprate, 0, 1, open_end=True)
        _check_number("prune-ratio", self.prune_ratio, 0, 1)
        if self.learning_rate is not None:
            _check_number("learning-rate", self.learning_rate, 0, math.inf, open_end=True)
        self._check_network()
        self._check_schedule()
        self._check_companions()

    def _check_network(self) -> None:
        for size in self.hidden_sizes:
            if not _is_integer(size, 1) or size > _WIDEST:
                raise ValueError(
                    f"--hidden-sizes: expected integers between 1 and {_WIDEST}, got {size!r}"
                )
        expected = len(self.hidden_sizes) + 1
        if not self.hidden_sizes or len(self.densities) != expected:
            raise ValueError(
                f"--densities: expected one density per layer, {expected} for "
                f"{len(self.hidden_sizes)} hidden layer(s), got {len(self.densities)}: "
                "match --densities and --hidden-sizes"
            )
        for density in self.densities:
            number = isinstance(density, (int, float)) and not isinstance(density, bool)
            if not number or not 0 < density <= 1:
                raise ValueError(
                    "--densities: expected numbers above 0 and up to 1 (1 is a dense layer), "
                    f"got {density!r}"
                )
        first = self.hidden_sizes[0]
        if self.is_sparse(0) and first % self.block_size:
            raise ValueError(
                f"--block-size {self.block_size} does not divide the first hidden size {first}: "
                f"choose a hidden size such as {-(-first // self.block_size) * self.block_size}"
            )

    def _check_schedule(self) -> None:
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
        if not _is_integer(zero_steps, 0):
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
        return self.method in ("rigl", "set")

    def is_sparse(self, layer: int) -> bool:
        return self.method != "dense" and self.densities[layer] < 1


@dataclass(frozen=True)
class LayerShape:
    """One layer of the network as the options give it; sizes in elements, counts in blocks."""

    name: str
    in_features: int
    out_features: int
    density: float
    block_size: int
    sparse: bool

    @property
    def total(self) -> int:
        return self.in_features * self.out_features // self.block_size**2

    @property
    def nnz(self) -> int:
        return max(1, round(self.density * self.total)) if self.sparse else self.total


def layer_shapes(options: Options) -> list[LayerShape]:
    """The layers, first to last: fc1, fc2, ...

    Only the first has blocks.
    """
    block = options.block_size if options.is_sparse(0) else 1
    widths = [picture_side(block) ** 2, *options.hidden_sizes, CLASSES]
    return [
        LayerShape(
            name=f"fc{i + 1}",
            in_features=widths[i],
            out_features=widths[i + 1],
            density=options.densities[i] if options.is_sparse(i) else 1.0,
            block_size=block if i == 0 else 1,
            sparse=options.is_sparse(i),
        )
        for i in range(len(options.densities))
    ]


def picture_side(block_size: int) -> int:
    """Edge of the pictures the network reads: 28, or 32 where blocks do not divide 28 x 28.

    The border of two empty pixels all around keeps the picture square and in the middle.
    """
    return SIDE if SIDE * SIDE % block_size == 0 else 32


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _is_integer(value: Any, least: int) -> bool:
    if isinstance(value, bool):
        return False
    try:
        return operator.index(value) >= least
    except TypeError:
        return False


def _check_number(
    flag: str, value: Any, low: float, high: float, *, open_end: bool = False
) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high or (open_end and value == high):
        if math.isinf(high):
            span = f"a finite number of at least {low:g}"
        else:
            span = f"a number in [{low:g}, {high:g}{')' if open_end else ']'}"
        raise ValueError(f"--{flag}: expected {span}, got {value!r}")
