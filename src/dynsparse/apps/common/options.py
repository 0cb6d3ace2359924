"""The options that all trainings share, and how a set of options is checked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from dynsparse._core.checks import is_number
from dynsparse.options import (
    FILE,
    OUTPUT_FILE,
    SWITCH,
    TEXT,
    Defines,
    Kind,
    Need,
    check_values,
    choice,
    flag,
    integer,
    list_of,
    number,
    option,
    options_of,
    pairs,
)
from dynsparse.training.algorithms import BY_NAME

METHODS = (*BY_NAME, "dense")
"""The values of `--method`: every algorithm, and the same network dense."""


def methods_with(argument: str) -> tuple[str, ...]:
    """The methods whose trainers have that argument."""
    return tuple(name for name, algorithm in BY_NAME.items() if argument in algorithm.arguments)


SPARSE = Need(
    "networks with sparse layers",
    lambda o: o.has_sparse_layers,
    lambda o: "dense layers alone",
    is_shown=False,
)
# Options that define a training are compared with those of the checkpoint instead.
TRAINS = Need(
    "runs that train",
    lambda o: o.trains,
    lambda o: o.how_it_runs,
    is_shown=False,
    is_waived=lambda o, option: option.defines in o.binding,
)
_HALF = Need(
    "--data-type float16",
    lambda o: o.data_type == "float16",
    lambda o: f"--data-type {o.data_type}",
)
_CHECKPOINTS = Need("runs with --checkpoint-path", lambda o: o.checkpoint_path is not None)
_FOLDERS = Need(
    "runs with --checkpoint-path or --records-path",
    lambda o: o.checkpoint_path is not None or o.records_path is not None,
)


def panel(name: str, defines: Defines) -> Callable[..., Any]:
    """`option` for the options of one panel, most of which define the same."""

    def add(default: Any, help: str, kind: Kind, **more: Any) -> Any:
        return option(default, help, kind, name, **{"defines": defines} | more)

    return add


def _is_schedule(settings: Any) -> bool:
    name = flag("cosine_prune_schedule")
    if not isinstance(settings, dict):
        return False
    for key, value in settings.items():
        if key not in ("zero_steps", "phase_delay", "period"):
            raise ValueError(
                f"--{name}: expected the keys zero_steps, phase_delay, period, got {key!r}"
            )
        if not is_number(value) or not math.isfinite(value):
            raise ValueError(f"--{name}: {key}: expected a number, got {value!r}")
        if key == "zero_steps" and (isinstance(value, float) or value < 0):
            raise ValueError(
                f"--{name}: {key}: expected a number of pattern updates, an integer of at least "
                f"0, got {value!r}"
            )
    return True


def _is_device(value: Any) -> bool:
    if not isinstance(value, str) or not re.fullmatch(r"cpu|cuda(:\d{1,3})?", value):
        return False
    if value == "cpu":
        return True
    count = torch.cuda.device_count()
    if not count:
        raise ValueError(
            f"--device: expected a machine with a CUDA device and a torch that knows it, got "
            f"{value!r} without one: use --device cpu"
        )
    if int(value.partition(":")[2] or 0) >= count:
        names = ", ".join(f"cuda:{number}" for number in range(count))
        raise ValueError(f"--device: expected a device of this machine ({names}), got {value!r}")
    return True


def interleave_option(panel: Callable[..., Any]) -> Any:
    """The option `interleave_heads` of networks with attention, in a panel."""
    return panel(
        False, "Deal the features out to the heads in turn, so that large blocks reach all heads.",
        SWITCH, methods=tuple(BY_NAME),
    )  # fmt: skip


def match_option(panel: Callable[..., Any]) -> Any:
    """The option `match_blocks`; methods that prune do not have it, as they draw patterns anew."""
    return panel(
        False, "Begin with blocks that read what the layer before writes.", SWITCH,
        methods=tuple(name for name in BY_NAME if BY_NAME[name].least_first is None),
    )  # fmt: skip


# The other methods look at gradients or weights on the host.
_ON_TARGETS = ("rigl", "set", "gmp", "granet", "static", "dense")
_TARGET = Need("runs with --target", lambda o: o.target is not None)
_SINGLE = Need(
    "--data-type float32",
    lambda o: o.data_type == "float32",
    lambda o: f"--data-type {o.data_type}",
)
_ON_HOST = Need("--device cpu", lambda o: o.device == "cpu", lambda o: f"--device {o.device}")


_sparsity = panel("Sparsity", "training")
_training = panel("Training", "training")
_checkpoints = panel("Checkpoints", "run")
_output = panel("Output", "run")


@dataclass(kw_only=True)
class TrainingOptions:
    """One training. `check` raises a one-line error for options that are not valid.

    The flags of the commands have the same names with dashes. An application adds its own options,
    and changes these where it must (`override`).
    """

    panels: ClassVar = (
        "Data", "Network", "Sparsity", "Ranks", "Training", "Learning rate", "Text", "Checkpoints",
        "Output",
    )  # fmt: skip

    data_type: str = option(
        "float32",
        "Data type of weights and products; bfloat16 and float16 are autocast over float32 "
        "weights, float16 with a scaled loss.",
        choice("float32", "float64", "bfloat16", "float16"), "Network", defines="network",
    )  # fmt: skip

    method: str = _sparsity(
        "rigl",
        "How the pattern changes (docs/algorithms.md): by gradient (rigl), at random (set), or as "
        "the other papers have it; gmp and granet begin denser and end at the density asked for, "
        "topkast uses half of it in the forward pass; static never changes; dense makes every "
        "layer dense.",
        choice(*METHODS),
        defines="network",
    )
    block_size: int = _sparsity(
        1, "Edge of the blocks.", choice(1, 4, 8, 16, 32, 64, 128), defines="network",
        methods=tuple(BY_NAME), needs=(SPARSE,),
    )  # fmt: skip
    pooling_type: str = _sparsity(
        "NONE",
        "How the gradients of a block become its growth score; NONE ranks as SUM.",
        choice("NONE", "SUM", "AVG", "MAX"),
        methods=methods_with("pooling"),
        needs=(SPARSE, TRAINS),
    )
    prune_ratio: float = _sparsity(
        0.3, "Largest share of a layer that an update replaces; it falls to 0.", number(0, 1),
        methods=methods_with("drop_fraction"), needs=(SPARSE, TRAINS),
    )  # fmt: skip
    prune_rounding: str = _sparsity(
        "up",
        "How the number that an update replaces is rounded; of two large blocks, up always "
        "replaces one.",
        choice("up", "down"),
        methods=methods_with("schedule"),
        needs=(SPARSE, TRAINS),
    )
    update_interval: int | None = _sparsity(
        None, "Steps between pattern updates.", integer(1), methods=methods_with("update_interval"),
        needs=(SPARSE, TRAINS),
    )  # fmt: skip
    cosine_prune_schedule: dict[str, Any] = _sparsity(
        {},
        'JSON such as {"zero_steps": 5, "phase_delay": 0, "period": 0.5}: updates without '
        "replacements at first, radians, turns.",
        Kind(dict, (("a JSON object", _is_schedule),), example='{"period": 0.5}'),
        methods=methods_with("schedule"),
        needs=(SPARSE, TRAINS),
    )

    batch_size: int = _training(16, "Images per optimizer step.", integer(1))
    optimizer: str = _training(
        "Adam", "Adam, or SGD without or with momentum.",
        choice("GradientDescent", "Momentum", "Adam"), needs=(TRAINS,),
    )  # fmt: skip
    optimizer_arg: dict[str, Any] = _training(
        {}, "An argument of the optimizer, such as momentum=0.9.", pairs("momentum=0.9"),
        needs=(TRAINS,),
    )  # fmt: skip
    loss_scale: float | None = _training(
        None, "Multiply the loss by this for the backward pass; gradients are divided by it.",
        number(0, above="a number above 0"), by_default="65536, halved when gradients overflow and "
        "doubled after 2,000 steps without", needs=(TRAINS, _HALF),
    )  # fmt: skip
    device: str = _training(
        "cpu", "Where it computes: cpu, cuda or cuda:N.",
        Kind(str, (("cpu, cuda or cuda:N", _is_device),)), defines="run",
    )  # fmt: skip
    seed: int | None = _training(
        None, "Seed of all random choices; if omitted, one is drawn and printed.",
        integer(0, 2**63 - 1, "an integer below 2^63"), defines="apart",
    )  # fmt: skip
    threads: int = _training(
        1, "CPU threads; small batches gain nothing from more than one.", integer(1, 1024),
        defines="run",
    )  # fmt: skip

    synthetic_data: bool = _training(
        False,
        "Random data made once on the device in place of real data: times compute without input.",
        SWITCH,
    )

    restore: Path | None = _checkpoints(
        None,
        "Continue from this checkpoint, or from the newest in this folder. Flags left out are "
        "those it was trained with.",
        FILE,
    )
    checkpoint_path: Path | None = _checkpoints(
        None, "Folder for checkpoints; none are written without it.", FILE, needs=(TRAINS,),
        also=("checkpoint",),
    )  # fmt: skip
    overwrite: bool = _checkpoints(
        False,
        "Delete what an earlier training has left in --checkpoint-path and --records-path; without "
        "it such folders are refused.",
        SWITCH,
        needs=(TRAINS, _FOLDERS),
    )
    checkpoint_freq: int = _checkpoints(
        1, "Epochs between checkpoints.", integer(1), needs=(TRAINS, _CHECKPOINTS)
    )
    stop_after: int | None = _checkpoints(
        None, "Stop after this epoch of --epochs, to continue with --restore.", integer(1),
        needs=(TRAINS,),
    )  # fmt: skip

    records_path: Path | None = _output(
        None, "Folder for the record that `dynsparse visualise` draws.", FILE,
        needs=(TRAINS,),
    )  # fmt: skip
    json: Path | None = _output(None, "File for the final figures.", OUTPUT_FILE)
    trace: Path | None = _output(
        None,
        "File for a trace of where the time goes, which ui.perfetto.dev and chrome://tracing open.",
        OUTPUT_FILE,
    )
    tensorboard: Path | None = _output(
        None, "Folder for TensorBoard (needs tensorboard).", FILE, needs=(TRAINS,)
    )
    use_wandb: bool = _output(
        False, "Log to Weights & Biases (needs wandb).", SWITCH, needs=(TRAINS,)
    )
    wandb_project_name: str | None = _output(None, "Project at wandb.", TEXT, needs=(TRAINS,))
    wandb_name: str | None = _output(None, "Name of the run at wandb.", TEXT, needs=(TRAINS,))
    wandb_tags: Sequence[str] = _output(
        (), "Tags at wandb.", list_of(TEXT, "texts"), needs=(TRAINS,)
    )

    def check(self) -> None:
        """Raise ValueError, naming the flag, for anything that cannot be trained."""
        check_values(self)
        self.check_together()
        named = self.wandb_project_name or self.wandb_name or self.wandb_tags
        if named and not self.use_wandb:
            raise ValueError("--wandb-...: expected --use-wandb with it, got none: add --use-wandb")

    def check_together(self) -> None:
        """The checks of `check` that compare several options of the application."""

    @property
    def trains(self) -> bool:
        """Whether anything is trained, rather than a trained network tested."""
        return True

    @property
    def how_it_runs(self) -> str:
        """The flag by which nothing is trained, for error messages."""
        return ""

    @property
    def has_sparse_layers(self) -> bool:
        """Whether the method has anything to do."""
        return self.method != "dense"

    @property
    def binding(self) -> tuple[Defines, ...]:
        """The kinds of options that must agree with those of a checkpoint to restore."""
        return ("network", "training")

    def definition(self, kinds: Collection[Defines] = ("network", "training")) -> dict[str, Any]:
        """The options that define the network, or the training, as plain types."""
        values = {
            name: getattr(self, name)
            for name, option in options_of(type(self)).items()
            if option.defines in kinds
        }
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


@dataclass(kw_only=True)
class MachineOptions(TrainingOptions):
    """The options of applications that can train on the tile machine."""

    tiles: int | None = _training(
        None, "Use this many tiles of --target.", integer(1), methods=_ON_TARGETS,
        needs=(_TARGET, TRAINS), by_default="all",
    )  # fmt: skip
    target: str | None = _training(
        None, "Train on a simulated tile machine, all of a step one program; slow.",
        choice("bow", "mk2"), methods=_ON_TARGETS, needs=(_SINGLE, _ON_HOST, TRAINS),
    )  # fmt: skip
