"""The settings of the training on CIFAR-10; the defaults are those of the RigL paper.

Source: Evci et al. 2020, "Rigging the Lottery", section 4.2, and the authors' program: 250 epochs
of batches of 128, momentum 0.9 (Nesterov's), weight decay 5e-4, rate 0.1, a fifth of it after every
30,000 steps, updates of the patterns every 100 steps up to step 75,000 of 97,656.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dynsparse.allocation import METHODS as ALLOCATIONS
from dynsparse.apps.common.applies import SPARSE, TRAINS
from dynsparse.apps.common.option import again, between, choice, number, taking
from dynsparse.apps.common.options import panel
from dynsparse.apps.pictures.options import PictureOptions
from dynsparse.training.algorithms import BY_NAME

_network = panel("Network", "network")
_training = panel("Training", "training")


@dataclass(kw_only=True)
class Options(PictureOptions):
    """One training; the flags of `dynsparse cifar`."""

    # 0.1 with momentum at a batch of 128.
    rates: ClassVar[dict[str, float]] = {
        "GradientDescent": 0.1 / 8,
        "Momentum": 0.1 / 8,
        "Adam": 0.001 / 8**0.5,
    }
    decays: ClassVar[dict[str, float]] = {
        "GradientDescent": 5e-4,
        "Momentum": 5e-4,
        "Adam": 1e-4,
    }

    dataset: str = again(
        PictureOptions,
        "dataset",
        default="cifar-10",
        help="What to train on; digits needs no download: they are brought to the same form.",
        kind=choice("digits", "cifar-10"),
    )
    data_dir: Path | None = again(
        PictureOptions,
        "data_dir",
        help="Folder with cifar-10-binary.tar.gz or the files in it; without it that is downloaded "
        "once.",
    )
    depth: int = _network(22, "Layers of the network: 6 n + 4.", between(10, 1_000))
    width: int = _network(2, "Channels, as a multiple of 16, 32 and 64.", between(1, 1_000))
    sparsity: float = _network(
        0.9, "Share of the weights left out, the first convolution's not counted.",
        number(0, 1, below=True), methods=tuple(BY_NAME), complement="density",
    )  # fmt: skip
    allocation: str = _network(
        "erk", "How the density is shared among the layers.", choice(*ALLOCATIONS),
        methods=tuple(BY_NAME), needs=(SPARSE,),
    )  # fmt: skip
    block_size: int = again(
        PictureOptions,
        "block_size",
        help="Edge of the blocks, over channels; with blocks the last layer stays dense.",
        kind=choice(1, 4, 8, 16),
    )
    update_interval: int | None = again(
        PictureOptions,
        "update_interval",
        help="Steps between pattern updates.",
        by_default="100, or a tenth of the steps with updates where that is less",
    )
    prune_end: float = panel("Sparsity", "training")(
        0.768, "Share of the training after which patterns stay.",
        number(0, 1, above="a number in (0, 1]"), methods=taking("update_interval"),
        needs=(SPARSE, TRAINS),
    )  # fmt: skip
    steps_per_epoch: int = again(PictureOptions, "steps_per_epoch", help="Reports per epoch.")
    batch_size: int = again(PictureOptions, "batch_size", default=128)
    optimizer: str = again(PictureOptions, "optimizer", default="Momentum")
    epochs: int | None = again(
        PictureOptions, "epochs", default=None, by_default="250 of CIFAR-10, 20 of the digits"
    )
    learning_rate: float | None = again(
        PictureOptions,
        "learning_rate",
        help="First learning rate; the default is for a batch of 128 and scales with the batch.",
        by_default="0.1, with Adam 0.001",
    )
    decay: str = again(
        PictureOptions,
        "decay",
        default="drops",
        help="Of the learning rate; drops are the paper's: a fifth, three times in the training.",
        kind=choice("drops", "cosine", "constant"),
    )
    augment: str | None = _training(
        None,
        "Which pictures the training sees: moved by up to 4 pixels, and mirrored at random "
        "(move-mirror), moved only, or as they are.",
        choice("move-mirror", "move", "none"),
        by_default="move-mirror of CIFAR-10, none of the digits",
    )
    checkpoint_freq: int = again(PictureOptions, "checkpoint_freq", default=10)
    threads: int = again(PictureOptions, "threads", help="CPU threads.")

    def check_network(self) -> None:
        if (self.depth - 4) % 6:
            raise ValueError(
                f"--depth: expected 6 n + 4, such as 10, 16, 22 or 28, got {self.depth}"
            )

    @property
    def has_sparse_layers(self) -> bool:
        return self.method != "dense" and self.sparsity > 0

    @property
    def length(self) -> int:
        if self.epochs is not None:
            return self.epochs
        return 20 if self.dataset == "digits" else 250

    @property
    def augmentation(self) -> str:
        """ "move-mirror", "move" or "none"."""
        if self.augment is not None:
            return self.augment
        return "none" if self.dataset == "digits" else "move-mirror"

    @property
    def label(self) -> str:
        return f"Sparsity_{self.sparsity:g}"
