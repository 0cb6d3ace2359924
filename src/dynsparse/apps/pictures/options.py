"""The options that trainings on pictures share, beside those of every training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dynsparse.apps.common.applies import TRAINS
from dynsparse.apps.common.option import FILE, again, choice, integer, number, options_of
from dynsparse.apps.common.options import TrainingOptions, panel
from dynsparse.data import GREY as DATASETS

_data = panel("Data", "training")
_training = panel("Training", "training")


@dataclass(kw_only=True)
class PictureOptions(TrainingOptions):
    """One training on pictures."""

    # First learning rates at a batch of 16; `learning_rate` is what holds if it is given.
    rates: ClassVar[dict[str, float]] = {"GradientDescent": 0.02, "Momentum": 0.02, "Adam": 0.002}
    # Adam's weight decay serves sparsity: a weight on a pixel that is never lit has no gradient,
    # and would otherwise keep its magnitude, and so its place in the pattern, for good.
    decays: ClassVar[dict[str, float]] = {"GradientDescent": 0.0, "Momentum": 0.0, "Adam": 1e-4}

    dataset: str = _data("digits", "What to train on; digits needs no download.", choice(*DATASETS))
    data_dir: Path | None = _data(
        None,
        "Folder with the IDX files of mnist or fashion-mnist, plain or .gz; without it they are "
        "downloaded once.",
        FILE,
        defines="run",
    )
    hold_out: int = _data(
        0, "Test on this many held-out training pictures, to choose settings honestly.", integer(0)
    )
    steps_per_epoch: int = panel("Sparsity", "training")(
        5, "Pattern updates and reports per epoch.", integer(1), needs=(TRAINS,)
    )
    update_interval: int | None = again(
        TrainingOptions,
        "update_interval",
        help="Batches between pattern updates, which then are no longer --steps-per-epoch.",
    )
    epochs: int | None = _training(10, "Length of the training.", integer(1), needs=(TRAINS,))
    learning_rate: float | None = _training(
        None,
        "First learning rate; the default is for a batch of 16 and scales with the batch.",
        number(0),
        by_default="by the optimizer",
        needs=(TRAINS,),
    )
    decay: str = _training(
        "cosine", "Of the learning rate; steps are the original program's.",
        choice("cosine", "steps", "constant"), needs=(TRAINS,),
    )  # fmt: skip
    test_mode: str = _training(
        "all", "Train and test, or only one.", choice("all", "training", "tests"), defines="run"
    )
    log: Path | None = panel("Output", "run")(
        None, "Text file for the training accuracy.", FILE, needs=(TRAINS,)
    )

    def check_together(self) -> None:
        self.check_network()
        if self.stop_after is not None and self.stop_after > self.length:
            raise ValueError(
                f"--stop-after: expected one of the {self.length} epochs, got {self.stop_after}"
            )
        if self.test_mode == "tests" and self.restore is None:
            raise ValueError(
                "--test-mode tests: expected a trained network to test: name a checkpoint with "
                "--restore"
            )
        if self.synthetic_data and self.data_dir is not None:
            raise ValueError(
                "--data-dir: synthetic data comes from no folder: leave it out, or --synthetic-data"
            )
        if self.dataset == "digits" and self.data_dir is not None:
            others = options_of(type(self))["dataset"].kind.names[1:]
            raise ValueError(
                "--data-dir: the digits come with scikit-learn and have no folder: leave it out, "
                f"or choose --dataset {' or '.join(others)}"
            )

    def check_network(self) -> None:
        """The part of `check` that the network's own options need."""

    @property
    def trains(self) -> bool:
        return self.test_mode != "tests"

    @property
    def how_it_runs(self) -> str:
        return f"--test-mode {self.test_mode}"

    @property
    def length(self) -> int:
        """Epochs of the training: as given, or 12 of the small digits, 1 of other pictures."""
        if self.epochs is not None:
            return self.epochs
        return 12 if self.dataset == "digits" else 1

    @property
    def label(self) -> str:
        """What tells this training from others in a log; one word."""
        return self.method
