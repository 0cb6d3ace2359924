"""The settings of the language model: names, defaults, presets and what may go together.

Names follow the language model of Graphcore's dynamic sparsity application where they mean the
same; docs/language-model.md lists the differences.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynsparse.apps.lm.methods import METHODS
from dynsparse.data.tokenizer import KINDS

__all__ = ["CHOICES", "Options"]

CHOICES: dict[str, tuple[Any, ...]] = {
    "tokens": KINDS,
    "method": (*METHODS, "dense"),
    "block_size": (1, 4, 8, 16, 32),
    "pooling_type": ("NONE", "SUM", "AVG", "MAX"),
    "optimizer": ("GradientDescent", "Momentum", "Adam"),
    "data_type": ("float32", "float64", "bfloat16"),
    "mode": ("all", "train", "test", "sample"),
}

_LARGEST = 1 << 24
_MOST_THREADS = 1024
_SCHEDULE_KEYS = ("zero_steps", "phase_delay", "period")
_AT_LEAST = {
    "layers": 1, "hidden_size": 1, "ff_size": 1, "heads": 1, "qkv_size": 1, "embedding_size": 1,
    "sequence_length": 1, "steps": 1, "batch_size": 1, "gradient_accumulation_count": 1,
    "update_interval": 1, "valid_interval": 1, "checkpoint_freq": 1, "stop_after": 1, "threads": 1,
    "warmup_steps": 0, "cooldown_steps": 1, "autoregression_offset": 0, "seed": 0, "sample": 0,
    "top_k": 1, "vocabulary_size": 257,
    "evaluation_tokens": 1,
}  # fmt: skip


@dataclass(kw_only=True)
class Options:
    """One training. `check` says in one line what is wrong with it.

    The flags of `dynsparse lm` have the same names with dashes, and its help says what each one
    does. The defaults are those of the preset "tiny"; `presets.preset` makes the others. `tokens`
    None means characters, or what a token file holds.
    """

    data: str | Path = "stdlib"
    valid_data: Path | None = None
    test_data: Path | None = None
    valid_share: float = 0.05
    test_share: float = 0.05
    tokens: str | None = None
    bpe_dir: Path | None = None
    vocabulary_size: int | None = None

    layers: int = 2
    hidden_size: int = 128
    ff_size: int = 512
    heads: int = 4
    qkv_size: int | None = None
    embedding_size: int | None = None
    sparse_embeddings: bool = False
    sequence_length: int = 64
    droprate: float = 0.0
    initial_scale: float = 1.0
    data_type: str = "float32"

    method: str = "rigl"
    match_parameters: bool = False
    sparsity: float = 0.9
    block_size: int = 1
    pooling_type: str = "NONE"
    prune_ratio: float = 0.3
    prune_end: float = 0.75
    update_interval: int = 200
    cosine_prune_schedule: dict[str, Any] = field(default_factory=dict)

    steps: int = 4000
    batch_size: int = 16
    gradient_accumulation_count: int = 1
    optimizer: str = "Adam"
    optimizer_arg: dict[str, Any] = field(default_factory=dict)
    peak_learning_rate: float = 1e-2
    min_learning_rate: float = 2e-4
    warmup_steps: int = 100
    cooldown_steps: int | None = None
    decay_power: float = 1.0
    grad_norm_clip: float | None = 1.0
    repetition_weighting: bool = False
    autoregression_offset: int = 0
    seed: int | None = None
    threads: int = 1
    valid_interval: int = 250
    evaluation_tokens: int | None = None
    mode: str = "all"

    sample: int = 0
    prompt: str = "\n"
    temperature: float = 0.8
    top_k: int | None = None

    restore: Path | None = None
    checkpoint_path: Path | None = None
    checkpoint_freq: int = 1000
    stop_after: int | None = None
    records_path: Path | None = None
    json: Path | None = None
    tensorboard: Path | None = None
    use_wandb: bool = False
    wandb_project_name: str | None = None
    wandb_name: str | None = None
    wandb_tags: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise ValueError, naming the flag, for anything that cannot be trained."""
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices and not (name == "tokens" and value is None):
                listed = ", ".join(map(str, choices))
                raise ValueError(f"--{flag(name)}: expected one of {listed}, got {value!r}")
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and not _is_integer(value, least):
                raise ValueError(
                    f"--{flag(name)}: expected an integer of at least {least}, got {value!r}"
                )
        for name in ("layers", "hidden_size", "ff_size", "sequence_length", "batch_size"):
            if getattr(self, name) > _LARGEST:
                raise ValueError(
                    f"--{flag(name)}: expected at most {_LARGEST}, got {getattr(self, name)}"
                )
        if self.threads > _MOST_THREADS:
            raise ValueError(f"--threads: expected at most {_MOST_THREADS}, got {self.threads}")
        if self.seed is not None and self.seed >= 2**63:
            raise ValueError(f"--seed: expected an integer below 2^63, got {self.seed}")
        for name, low, high, open_end in (
            ("droprate", 0, 1, True), ("sparsity", 0, 1, True), ("prune_ratio", 0, 1, False),
            ("prune_end", 0, 1, False), ("valid_share", 0, 1, True), ("test_share", 0, 1, True),
            ("peak_learning_rate", 0, math.inf, True), ("min_learning_rate", 0, math.inf, True),
            ("decay_power", 0, math.inf, True), ("temperature", 0, math.inf, True),
            ("initial_scale", 0, math.inf, True),
        ):  # fmt: skip
            _check_number(flag(name), getattr(self, name), low, high, open_end=open_end)
        if self.grad_norm_clip is not None:
            _check_number("grad-norm-clip", self.grad_norm_clip, 0, math.inf, open_end=True)
        self._check_network()
        self._check_schedules()
        self._check_companions()

    def _check_network(self) -> None:
        if self.qkv_size is None and self.hidden_size % self.heads:
            raise ValueError(
                f"--heads: {self.heads} heads do not divide the hidden size {self.hidden_size}: "
                "choose another number of heads, or give --qkv-size, the features of one head"
            )
        if self.method != "dense" and self.block_size > 1:
            sizes = {
                "hidden-size": self.hidden_size,
                "ff-size": self.ff_size,
                "embedding-size": self.embedding_size,
                "heads": self.inner_size,
            }
            for name, size in sizes.items():
                if size is not None and size % self.block_size:
                    what = "heads times --qkv-size," if name == "heads" else "the size"
                    raise ValueError(
                        f"--{name}: blocks of {self.block_size} do not divide {what} {size}: "
                        f"choose a multiple of {self.block_size}, or another --block-size"
                    )
        if self.autoregression_offset >= self.sequence_length:
            raise ValueError(
                f"--autoregression-offset: expected less than the sequence length "
                f"{self.sequence_length}, got {self.autoregression_offset}"
            )

    def _check_schedules(self) -> None:
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
        if not _is_integer(self.cosine_prune_schedule.get("zero_steps", 0), 0):
            raise ValueError(
                "--cosine-prune-schedule: zero_steps: expected a number of pattern updates, an "
                f"integer of at least 0, got {self.cosine_prune_schedule['zero_steps']!r}"
            )
        if self.prune_end == 0:
            raise ValueError("--prune-end: expected a number in (0, 1], got 0: use --method static")
        if self.min_learning_rate > self.peak_learning_rate:
            raise ValueError(
                f"--min-learning-rate: expected at most the peak of {self.peak_learning_rate:g}, "
                f"got {self.min_learning_rate:g}"
            )
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"--warmup-steps: expected less than the {self.steps} steps of the training, got "
                f"{self.warmup_steps}"
            )

    def _check_companions(self) -> None:
        if self.stop_after is not None and self.stop_after > self.steps:
            raise ValueError(
                f"--stop-after: expected one of the {self.steps} steps, got {self.stop_after}"
            )
        if self.stop_after is not None and self.stop_after % self.valid_interval:
            raise ValueError(
                f"--stop-after: expected a step with a report, a multiple of --valid-interval "
                f"{self.valid_interval}, got {self.stop_after}"
            )
        if self.valid_share + self.test_share >= 1:
            raise ValueError(
                "--valid-share, --test-share: expected less than 1 together, got "
                f"{self.valid_share + self.test_share:g}"
            )
        if self.match_parameters and self.method != "dense":
            raise ValueError(
                "--match-parameters: expected --method dense, which it makes as narrow as the "
                f"sparse network, got --method {self.method}"
            )
        if self.mode in ("test", "sample") and self.restore is None:
            raise ValueError(
                f"--mode {self.mode}: expected a trained model: name a checkpoint with --restore"
            )
        if self.mode == "sample" and not self.sample:
            raise ValueError("--mode sample: expected a number of tokens: add --sample N")
        if self.sample and not self.prompt:
            raise ValueError("--prompt: expected at least one character to go on from, got none")
        for name in ("prompt", "temperature", "top_k"):
            if not self.sample and getattr(self, name) != getattr(type(self), name):
                raise ValueError(f"--{flag(name)}: expected --sample N with it, got none: add it")
        for part in ("valid", "test"):
            share = f"{part}_share"
            given = getattr(self, share) != getattr(type(self), share)
            if given and getattr(self, f"{part}_data") is not None:
                raise ValueError(
                    f"--{part}-share: the {part} part is --{part}-data here: leave one of them out"
                )
        if self.bpe_dir is not None and self.tokens in ("char", "byte"):
            raise ValueError(f"--bpe-dir: expected --tokens bpe with it, got {self.tokens}")
        if self.tokens != "bpe" and self.vocabulary_size is not None:
            raise ValueError(
                "--vocabulary-size: expected --tokens bpe with it: the vocabularies of bytes and "
                "characters are as large as they are"
            )
        named = self.wandb_project_name or self.wandb_name or self.wandb_tags
        if named and not self.use_wandb:
            raise ValueError("--wandb-...: expected --use-wandb with it, got none: add --use-wandb")

    @property
    def changes_pattern(self) -> bool:
        """Whether the method moves connections at all."""
        return self.method not in ("static", "dense")

    @property
    def inner_size(self) -> int:
        """Features of all heads together."""
        return self.hidden_size if self.qkv_size is None else self.heads * self.qkv_size


def flag(name: str) -> str:
    """The flag of the option `name`."""
    return name.replace("_", "-")


def _is_integer(value: Any, least: int) -> bool:
    if isinstance(value, bool):
        return False
    try:
        return operator.index(value) >= least
    except TypeError:
        return False


def _check_number(
    name: str, value: Any, low: float, high: float, *, open_end: bool = False
) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high or (open_end and value == high):
        if math.isinf(high):
            span = f"a finite number of at least {low:g}"
        else:
            span = f"a number in [{low:g}, {high:g}{')' if open_end else ']'}"
        raise ValueError(f"--{name}: expected {span}, got {value!r}")
