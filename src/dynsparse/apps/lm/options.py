"""The options of the language model, and complete settings by name.

Names follow the language model of Graphcore's dynamic sparsity application where they mean the
same; docs/language-model.md lists the differences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dynsparse.apps.common.options import (
    SPARSE,
    TRAINS,
    MachineOptions,
    interleave_option,
    match_option,
    methods_with,
    panel,
)
from dynsparse.data.text import KINDS
from dynsparse.options import (
    FILE,
    SWITCH,
    TEXT,
    Defines,
    Need,
    choice,
    integer,
    number,
    options_of,
    override,
    pairs,
)
from dynsparse.training.algorithms import BY_NAME

_READS = Need("runs that read text", lambda o: o.mode != "sample", lambda o: "--mode sample", False)
_SAMPLES = Need("runs with --sample N", lambda o: o.sample > 0)
_BPE = Need(
    "runs with --tokens bpe", lambda o: o.tokens == "bpe", lambda o: o.tokens or "char tokens"
)
_DRAWS = Need("a temperature above 0", lambda o: o.temperature > 0, lambda o: "--temperature 0")
_SEEDED = Need(
    "runs that train or sample", lambda o: o.trains or o.sample > 0, lambda o: o.how_it_runs, False
)

_ONE_BATCH = Need(
    "one micro-batch per step",
    lambda o: o.gradient_accumulation_count == 1,
    lambda o: f"--gradient-accumulation-count {o.gradient_accumulation_count}",
)
_UNWEIGHTED = Need(
    "runs without --repetition-weighting",
    lambda o: not o.repetition_weighting,
    lambda o: "--repetition-weighting",
)
_DENSE_TABLE = Need(
    "runs without --sparse-embeddings",
    lambda o: not o.sparse_embeddings,
    lambda o: "--sparse-embeddings",
)


def _needs_share(part: str) -> Need:
    return Need(
        f"a {part} part that is a share of --data",
        lambda o: getattr(o, f"{part}_data") is None,
        lambda o: f"--{part}-data",
    )


_LARGE = integer(1, 1 << 24)
_SHARE = number(0, 1, below=True)
_data = panel("Data", "run")
_network = panel("Network", "network")
_sparsity = panel("Sparsity", "training")
_training = panel("Training", "training")
_rate = panel("Learning rate", "training")
_text = panel("Text", "run")
_changed = partial(override, MachineOptions)
_on_machine = options_of(MachineOptions)


@dataclass(kw_only=True)
class Options(MachineOptions):
    """One training; the flags of `dynsparse lm`.

    The defaults are those of the preset "tiny"; `preset` makes the others. `tokens` None
    means characters, or what a token file holds.
    """

    data: str | Path = _data(
        "stdlib",
        "A text file (UTF-8, plain or packed), a token file of `dynsparse encode`, or stdlib: the "
        "source text of Python's standard library.",
        TEXT,
        defines="apart",
        needs=(_READS,),
        also=("dataset",),
    )
    valid_data: Path | None = _data(
        None, "Validate on this text in place of a share of --data.", FILE, needs=(_READS,)
    )
    test_data: Path | None = _data(
        None, "Test on this text in place of a share of --data.", FILE, needs=(_READS,)
    )
    valid_share: float = _data(
        0.05, "Share of --data to validate on, before the test's.", _SHARE, defines="training",
        needs=(_READS, _needs_share("valid")),
    )  # fmt: skip
    test_share: float = _data(
        0.05, "Share of --data, at its end, to test on.", _SHARE, defines="training",
        needs=(_READS, _needs_share("test")),
    )  # fmt: skip
    tokens: str | None = _data(
        None, "What a token is.", choice(*KINDS), defines="network",
        by_default="char, or what a token file holds",
    )  # fmt: skip
    bpe_dir: Path | None = _data(
        None, "Folder with GPT-2's vocab.bpe; without it the file is downloaded once.", FILE
    )
    vocabulary_size: int | None = _data(
        None, "Use only the first merges of GPT-2's, for as many BPE tokens.", integer(257),
        defines="network", needs=(_BPE,),
    )  # fmt: skip

    layers: int = _network(2, "Transformer layers.", _LARGE)
    hidden_size: int = _network(128, "Features of a token.", _LARGE)
    ff_size: int = _network(512, "Features inside the feed-forward part.", _LARGE)
    heads: int = _network(4, "Attention heads.", integer(1))
    qkv_size: int | None = _network(
        None, "Features of one head.", integer(1), by_default="--hidden-size / --heads"
    )
    interleave_heads: bool = interleave_option(_network)
    match_blocks: bool = match_option(_network)
    embedding_size: int | None = _network(
        None, "Width of the token table, with sparse projections up to the hidden size.",
        integer(1), by_default="--hidden-size",
    )  # fmt: skip
    sparse_embeddings: bool = _network(
        False, "Make the token table sparse too.", SWITCH,
        methods=tuple(name for name in BY_NAME if BY_NAME[name].trains_embeddings),
        needs=(SPARSE,),
    )  # fmt: skip
    sequence_length: int = _network(64, "Tokens the model sees at once.", _LARGE)
    droprate: float = _network(0.0, "Dropout, in training.", _SHARE)
    initial_scale: float = _network(
        1.0, "Times the usual size of first weights, 1/sqrt(inputs).", number(0),
        defines="training", needs=(TRAINS,),
    )  # fmt: skip

    match_parameters: bool = _sparsity(
        False, "As narrow as holds the sparse model's number of parameters.", SWITCH,
        defines="network", methods=("dense",),
    )  # fmt: skip
    sparsity: float = _sparsity(
        0.9, "Share of the weights left out.", _SHARE, defines="network",
        methods=tuple(BY_NAME), complement="density",
    )  # fmt: skip
    update_interval: int | None = _changed(
        "update_interval",
        by_default="200, or a tenth of the steps with updates where that is less",
    )
    prune_end: float = _sparsity(
        0.75, "Share of the training after which patterns stay.",
        number(0, 1, above="a number in (0, 1]"),
        methods=methods_with("update_interval"), needs=(SPARSE, TRAINS),
    )  # fmt: skip

    steps: int = _training(4000, "Optimizer steps.", integer(1), needs=(TRAINS,))
    batch_size: int = _changed(
        "batch_size", help="Sequences per micro-batch.", kind=_LARGE, needs=(_READS,)
    )
    gradient_accumulation_count: int = _training(
        1, "Micro-batches per optimizer step.", integer(1), needs=(TRAINS,)
    )
    target: str | None = _changed(
        "target", needs=(*_on_machine["target"].needs, _ONE_BATCH, _UNWEIGHTED, _DENSE_TABLE)
    )
    optimizer: str = _changed("optimizer", help="Adam (AdamW), or SGD without or with momentum.")
    optimizer_arg: dict[str, Any] = _changed(
        "optimizer_arg", help="An argument of the optimizer, such as beta2=0.99.",
        kind=pairs("beta2=0.99"),
    )  # fmt: skip
    grad_norm_clip: float | None = _training(
        1.0, "Largest norm of all gradients together, 0 for no limit.", number(0), optional=True,
        needs=(TRAINS,),
    )  # fmt: skip
    repetition_weighting: bool = _training(
        False, "Train on every distinct token of a sequence alike, however often it is there.",
        SWITCH, needs=(TRAINS,),
    )  # fmt: skip
    autoregression_offset: int = _training(
        0, "First tokens of a sequence that are not scored.", integer(0), needs=(_READS,)
    )
    valid_interval: int = _training(250, "Steps between reports.", integer(1), needs=(TRAINS,))
    evaluation_tokens: int | None = _training(
        None, "Evaluate on this many tokens at the begin of each part.", integer(1),
        by_default="all of it", needs=(_READS,),
    )  # fmt: skip
    mode: str = _training(
        "all", "Train and test, only one, or only --sample.",
        choice("all", "train", "test", "sample"), defines="run",
    )  # fmt: skip

    peak_learning_rate: float = _rate(
        1e-2, "Learning rate after the warm-up.", number(0), needs=(TRAINS,)
    )
    min_learning_rate: float = _rate(2e-4, "After the decay.", number(0), needs=(TRAINS,))
    warmup_steps: int | None = _rate(
        None, "Steps up to the peak.", integer(0),
        by_default="100, or a tenth of --steps where that is less", needs=(TRAINS,),
    )  # fmt: skip
    cooldown_steps: int | None = _rate(
        None, "Steps over which the learning rate decays.", integer(1),
        by_default="all that are left", needs=(TRAINS,),
    )  # fmt: skip
    decay_power: float = _rate(
        1.0, "Of the decay; 1 is a straight line.", number(0), needs=(TRAINS,)
    )

    sample: int = _text(0, "Show this many tokens of text at the end.", integer(0))
    prompt: str = _text("\n", "Text to continue.", TEXT, by_default="a line end", needs=(_SAMPLES,))
    temperature: float = _text(0.8, "0 takes the likeliest token.", number(0), needs=(_SAMPLES,))
    top_k: int | None = _text(
        None, "Draw among this many of the likeliest only.", integer(1), by_default="all",
        needs=(_SAMPLES, _DRAWS),
    )  # fmt: skip

    seed: int | None = _changed("seed", needs=(_SEEDED,))
    checkpoint_freq: int = _changed(
        "checkpoint_freq", default=1000, help="Least steps between checkpoints."
    )
    stop_after: int | None = _changed(
        "stop_after", help="Stop after this step of --steps, to continue with --restore."
    )

    def __post_init__(self) -> None:
        if self.grad_norm_clip == 0:
            self.grad_norm_clip = None

    def check_together(self) -> None:
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
        if self.min_learning_rate > self.peak_learning_rate:
            raise ValueError(
                f"--min-learning-rate: expected at most the peak of {self.peak_learning_rate:g}, "
                f"got {self.min_learning_rate:g}"
            )
        if self.warm_up >= self.steps:
            raise ValueError(
                f"--warmup-steps: expected less than the {self.steps} steps of the training, got "
                f"{self.warm_up}"
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
        if self.mode in ("test", "sample") and self.restore is None:
            raise ValueError(
                f"--mode {self.mode}: expected a trained model: name a checkpoint with --restore"
            )
        if self.mode == "sample" and not self.sample:
            raise ValueError("--mode sample: expected a number of tokens: add --sample N")
        if self.sample and not self.prompt:
            raise ValueError("--prompt: expected at least one character to go on from, got none")

    @property
    def warm_up(self) -> int:
        """Steps up to the peak of the learning rate."""
        return min(100, self.steps // 10) if self.warmup_steps is None else self.warmup_steps

    @property
    def pattern_steps(self) -> int:
        """The number of steps after which patterns stay."""
        return max(1, round(self.prune_end * self.steps))

    @property
    def interval(self) -> int:
        """Steps between pattern updates."""
        if self.update_interval is not None:
            return self.update_interval
        return min(200, max(1, self.pattern_steps // 10))

    @property
    def trains(self) -> bool:
        """Whether anything is trained, rather than a trained model tested or sampled."""
        return self.mode in ("all", "train")

    @property
    def how_it_runs(self) -> str:
        return f"--mode {self.mode}"

    @property
    def has_sparse_layers(self) -> bool:
        return self.method != "dense" and self.sparsity > 0

    @property
    def binding(self) -> tuple[Defines, ...]:
        return ("network", "training") if self.trains else ("network",)

    @property
    def inner_size(self) -> int:
        """Features of all heads together."""
        return self.hidden_size if self.qkv_size is None else self.heads * self.qkv_size


PRESETS: dict[str, dict[str, Any]] = {
    # Characters, minutes on one core: the defaults of Options.
    "tiny": {},
    # The sizes of GPT-2's smallest model (Radford et al. 2019, table 2, as released).
    "small": {
        "tokens": "bpe", "layers": 12, "hidden_size": 768, "ff_size": 3072, "heads": 12,
        "sequence_length": 1024, "droprate": 0.1, "block_size": 16, "pooling_type": "AVG",
        "steps": 100_000, "batch_size": 1, "gradient_accumulation_count": 60,
        "peak_learning_rate": 6e-4, "min_learning_rate": 6e-5, "warmup_steps": 2000,
        "valid_interval": 1000, "checkpoint_freq": 1000,
    },
    # The largest that the README of Graphcore's application trains, on sixteen IPUs; its program's
    # least rate, decay and vocabulary belong to it.
    "large": {
        "tokens": "bpe", "layers": 45, "hidden_size": 1600, "ff_size": 6400, "heads": 16,
        "qkv_size": 32, "embedding_size": 128, "sequence_length": 256, "droprate": 0.1,
        "block_size": 16, "pooling_type": "AVG", "prune_ratio": 0.5, "prune_end": 1.0,
        "steps": 12_000, "batch_size": 1, "gradient_accumulation_count": 376,
        "peak_learning_rate": 2.5e-4, "min_learning_rate": 8e-6, "warmup_steps": 2000,
        "cooldown_steps": 10_000, "decay_power": 0.8, "autoregression_offset": 16,
        "repetition_weighting": True, "valid_interval": 1000, "checkpoint_freq": 1000,
    },
}  # fmt: skip
"""What each preset changes in the defaults of `Options`."""


def preset(name: str, **changes: Any) -> Options:
    """The options of a preset, with `changes`.

    Raises:
        ValueError: an unknown name.
    """
    if name not in PRESETS:
        raise ValueError(f"--preset: expected one of {', '.join(PRESETS)}, got {name!r}")
    return Options(**{**PRESETS[name], **changes})
