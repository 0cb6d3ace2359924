"""The training on images: options, optimizer, epochs and the test."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynsparse.apps import common
from dynsparse.apps.common.options import TRAINS, TrainingOptions, panel
from dynsparse.apps.common.training import (
    Groups,
    Scores,
    Stopped,
    Sums,
    make_optimizer,
    precision,
    start_denser,
    widen,
)
from dynsparse.data import GREY as DATASETS
from dynsparse.data import DataSet, LabelledImages
from dynsparse.options import FILE, choice, integer, number, options_of, override
from dynsparse.tracing import span, spanned

_data = panel("Data", "training")
_training = panel("Training", "training")


@dataclass(kw_only=True)
class ImageOptions(TrainingOptions):
    """One training on images."""

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
        0, "Test on this many held-out training images, to choose settings honestly.", integer(0)
    )
    steps_per_epoch: int = panel("Sparsity", "training")(
        5, "Pattern updates and reports per epoch.", integer(1), needs=(TRAINS,)
    )
    update_interval: int | None = override(
        TrainingOptions,
        "update_interval",
        help="Batches between pattern updates, which then are no longer --steps-per-epoch.",
    )
    epochs: int | None = _training(10, "Number of epochs.", integer(1), needs=(TRAINS,))
    learning_rate: float | None = _training(
        None,
        "First learning rate; the default is for a batch of 16 and scales with the batch.",
        number(0),
        by_default="by the optimizer",
        needs=(TRAINS,),
    )
    decay: str = _training(
        "cosine", "How the learning rate falls; steps is the schedule of Graphcore's program.",
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
            others = options_of(type(self))["dataset"].kind.choices[1:]
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
        """Epochs of the training: as given, or 12 of the small digits, 1 of other images."""
        if self.epochs is not None:
            return self.epochs
        return 12 if self.dataset == "digits" else 1

    @property
    def label(self) -> str:
        """The name of this training in a log; one word."""
        return self.method


# name: (how the learning rate grows with the batch, arguments with their defaults)
_OPTIMIZERS: dict[str, tuple[float, dict[str, Any]]] = {
    "GradientDescent": (1.0, {}),
    "Momentum": (1.0, {"momentum": 0.9, "nesterov": True}),
    "Adam": (0.5, {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}),
}
_BATCH = 16
_TEST_BATCH = 1000
# The original's rates after each fifth of the training, as shares of the first.
_FIFTHS = (1.0, 0.5, 0.25, 0.05, 0.005)
# Evci et al. 2020, "Rigging the Lottery", section 4.2: a fifth after every 30,000 of 97,656 steps.
_DROP, _DROP_EVERY = 0.2, 30_000 / 97_656


def build_optimizer(options: ImageOptions, network: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of `options` over all parameters.

    Raises:
        ValueError: an argument the optimizer does not have, or a value it does not take.
    """

    def groups(weight_decay: float) -> Groups:
        return [{"params": list(network.parameters()), "weight_decay": weight_decay}]

    _, arguments = _OPTIMIZERS[options.optimizer]
    defaults = {**arguments, "weight_decay": options.decays[options.optimizer]}
    return make_optimizer(options, defaults, groups, first_learning_rate(options), torch.optim.Adam)


def first_learning_rate(options: ImageOptions) -> float:
    """The rate the training starts with: as given, or the default scaled to the batch size.

    In proportion to the batch for the SGD family (Goyal et al. 2017, arXiv:1706.02677), to its
    square root for Adam (Malladi et al. 2022, arXiv:2205.10287).
    """
    if options.learning_rate is not None:
        return options.learning_rate
    power, _ = _OPTIMIZERS[options.optimizer]
    return options.rates[options.optimizer] * (options.batch_size / _BATCH) ** power


def learning_rate(options: ImageOptions, step: int, total_steps: int) -> float:
    """The rate of step `step` in [0, total_steps): stateless, so a resumed training agrees."""
    first = first_learning_rate(options)
    passed = step / total_steps
    if options.decay == "cosine":
        return first * 0.5 * (1 + math.cos(math.pi * passed))
    if options.decay == "drops":
        return first * _DROP ** int(passed / _DROP_EVERY)
    if options.decay == "steps":
        return first * _FIFTHS[int(passed * len(_FIFTHS))]
    return first


class Training(common.Training):
    """One training run on images.

    An application adds its name, its network and its headline.

    Raises:
        ValueError: an optimizer argument or a schedule that does not fit.
    """

    unit = "epoch"
    digits = 4
    generator_name = "training"
    counters = ("epoch", "step", "seconds", "update_seconds", "replaced", "skipped")
    partial_names = ("order", "batches", "window", "whole")
    rate_flag = "learning-rate"
    options: ImageOptions

    def __init__(self, options: ImageOptions, data: DataSet, seed: int) -> None:
        self.options = options
        self._data = data
        self._arranged: dict[str, LabelledImages] = {}
        self.batches = -(-len(data.train) // options.batch_size)
        if options.steps_per_epoch > self.batches:
            raise ValueError(
                f"--steps-per-epoch: expected at most the {self.batches} batches of an epoch, "
                f"got {options.steps_per_epoch}: lower it, or lower --batch-size"
            )
        self.report_interval = self.batches // options.steps_per_epoch
        self.total_steps = self.batches * options.length
        self.epoch = 0
        super().__init__(
            options,
            seed,
            total_steps=self.pattern_steps,
            update_interval=self.pattern_interval,
        )

    @property
    def pattern_steps(self) -> int:
        """The number of steps after which patterns stay."""
        return self.total_steps

    @property
    def pattern_interval(self) -> int:
        """Steps between pattern updates."""
        return self.options.update_interval or self.report_interval

    @abstractmethod
    def build_network(self) -> nn.Module:
        """The network, drawn from `generator`: images as `arrange` makes them -> [batch, 10]."""

    @abstractmethod
    def headline(self) -> str:
        """The network in a few words."""

    def arrange(self, images: Tensor) -> Tensor:
        """Bring images of the data set into the form that the network reads."""
        return images

    def augment_images(self, images: Tensor, batch: Tensor) -> Tensor:
        """This rank's share of the images of `batch` [n] as they are trained on this time.

        What is drawn is drawn for the whole batch: all ranks draw alike.
        """
        return images

    def build_model(self, initial: torch.Generator) -> tuple[nn.Module, dict[str, float]]:
        network = self.build_network()
        final = start_denser(self.options.method, network, initial)
        if self.options.data_type == "float64":
            network.to(torch.float64)
        return network, final

    def build_optimizer(self) -> torch.optim.Optimizer:
        return build_optimizer(self.options, self.model)

    def check_extra_state(self, path: Path, saved: dict[str, Any]) -> None:
        for name, value in self.extra_state().items():
            if not isinstance(saved[name], Tensor) or not value.equal(saved[name]):
                raise ValueError(f"{path}: its {name} is not the one of its seed")

    def metadata(self) -> dict[str, Any]:
        options = self.options
        return {"dataset": options.dataset, "epochs": options.length, "steps": self.total_steps}

    def _images(self, part: str) -> LabelledImages:
        """The training or test images as the network reads them, arranged on first use."""
        if part not in self._arranged:
            read: LabelledImages = getattr(self._data, part)
            images = self.arrange(read.images)
            if self.options.data_type == "float64":
                images = images.to(torch.float64)
            labels = read.labels.to(self.device)
            self._arranged[part] = LabelledImages(images.to(self.device), labels)
        return self._arranged[part]

    def _forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss, and the number of right answers."""
        network = self.replica if self.model.training else self.model
        with precision(self.options.data_type, self.device):
            logits = network(images)
        logits = widen(logits)
        return F.cross_entropy(logits, labels), (logits.detach().argmax(1) == labels).sum()

    def machine_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    def run_epoch(self) -> Iterator[tuple[Sums, Sums | None]]:
        """Train one epoch.

        Yields the sums after every 1/steps_per_epoch of it and after its last step; the last come
        with those of the whole epoch, the others with None.

        Raises:
            Stopped: after `stop_asked` was set.
        """
        with span("data"):
            data = self._images("train")
            self.model.train()
            order, completed, window, epoch_sums = self._start_epoch()
            batches = order.to(self.device).split(self.options.batch_size)
        for batch, indices in enumerate(batches[completed:], start=completed + 1):
            if self.stop_asked and batch > completed + 1:
                sums = {"window": window.state(), "whole": epoch_sums.state()}
                self.partial = {"order": order, "batches": batch - 1, **sums}
                raise Stopped
            begin = time.perf_counter()
            with span("data"):
                self.set_rate(learning_rate(self.options, self.step, self.total_steps))
                local, weight = self.rank_share(indices)
                if self.options.synthetic_data:  # always the same
                    images, labels = data.images[: len(local)], data.labels[: len(local)]
                else:
                    images, labels = data.images.index_select(0, local), data.labels[local]
                    images = self.augment_images(images, indices)
            if self.machine is not None:
                loss, logits = self.step_on_machine(window, images, labels)
                window.add(loss * len(local), (logits.argmax(1) == labels).sum(), len(local))
            else:
                with span("forward"):
                    loss, correct = self._forward(images, labels)
                    if weight:
                        window.add(loss.detach() * len(local), correct, len(local))
                with span("backward"):
                    self.optimizer.zero_grad()
                    self.scaler.scale(loss if weight == 1 else loss * weight).backward()
                self.optimise(window)
            window.seconds += time.perf_counter() - begin
            ends = batch == self.batches
            if ends or batch % self.report_interval == 0:
                self.finish_window(window)
                epoch_sums.include(window)
                self.epoch += ends
                yield window, epoch_sums if ends else None
                window = Sums()

    def _start_epoch(self) -> tuple[Tensor, int, Sums, Sums]:
        """Begin or resume an epoch: the order of its images, its completed batches, and the sums of
        the present window and of the epoch."""
        if self.stop_asked:
            raise Stopped
        partial, self.partial = self.partial, {}
        if partial:
            sums = [Sums.from_state(partial[name]) for name in ("window", "whole")]
            return partial["order"], partial["batches"], sums[0], sums[1]
        order = torch.randperm(len(self._data.train), generator=self.generator)
        return order, 0, Sums(), Sums()

    @spanned("evaluation")
    @torch.no_grad()
    def test(self) -> Scores:
        """The scores on all test images, without dropout, on the host."""
        self.collect_weights()
        data = self._images("test")
        self.model.eval()
        sums = Sums()
        parts = (each.split(_TEST_BATCH) for each in (data.images, data.labels))
        batches = zip(*parts, strict=True)
        for images, labels in list(batches)[self.ranks.rank :: self.ranks.size]:
            loss, correct = self._forward(images, labels)
            sums.add(loss.double() * len(labels), correct, len(labels))
        self.sum_over_ranks(sums)
        return sums.scores()
