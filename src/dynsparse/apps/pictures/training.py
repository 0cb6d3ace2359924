"""The training itself: network, optimizer, pattern updates, epochs and the test."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynsparse.apps.pictures.methods import begin_denser, build_trainer
from dynsparse.apps.pictures.optimizer import build_optimizer, learning_rate
from dynsparse.apps.pictures.options import PictureOptions
from dynsparse.data import DataSet, Pictures

__all__ = ["Report", "Scores", "Training"]

_TEST_BATCH = 1000


@dataclass(frozen=True)
class Scores:
    """Mean cross-entropy and share of right answers."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class Report:
    """What happened over some steps of one epoch.

    `epoch` (from 1) and `step` say where the training stands; `seconds` are of training alone;
    `replaced` counts the connections that left.
    """

    epoch: int
    step: int
    steps: int
    scores: Scores
    replaced: int
    seconds: float
    learning_rate: float


class Training(ABC):
    """One training run. All its randomness comes from `seed`.

    A program adds its name, its network, and what it tells about itself.

    Raises:
        ValueError: an optimizer argument or a schedule that does not fit.
    """

    app: ClassVar[str]

    def __init__(self, options: PictureOptions, data: DataSet, seed: int) -> None:
        self.options = options
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)  # dropout draws from the global generator
        self.network = self.build_network()
        final = begin_denser(options, self.network, self.generator)
        if options.data_type == "float64":
            self.network.to(torch.float64)
        self.optimizer = build_optimizer(options, self.network)
        self._data = data
        self._arranged: dict[str, Pictures] = {}
        self.batches = -(-len(data.train) // options.batch_size)
        if options.steps_per_epoch > self.batches:
            raise ValueError(
                f"--steps-per-epoch: expected at most the {self.batches} batches of an epoch, "
                f"got {options.steps_per_epoch}: lower it, or lower --batch-size"
            )
        self.report_interval = self.batches // options.steps_per_epoch
        self.trainer = build_trainer(
            options,
            self.network,
            self.optimizer,
            total_steps=self.total_steps,
            update_interval=options.update_interval or self.report_interval,
            final=final,
            generator=self.generator,
        )
        self.epoch = 0
        self.step = 0
        self.seconds = 0.0
        self.update_seconds = 0.0
        self.replaced = 0

    @abstractmethod
    def build_network(self) -> nn.Module:
        """The network, drawn from `generator`: pictures as `arrange` makes them -> [batch, 10]."""

    @abstractmethod
    def headline(self) -> str:
        """The network in a few words."""

    def arrange(self, images: Tensor) -> Tensor:
        """Pictures [n, 784] as the network reads them."""
        return images

    def drawn(self) -> dict[str, Tensor]:
        """What the seed decides besides the network; goes into checkpoints, to be compared."""
        return {}

    def metadata(self) -> dict[str, Any]:
        """What readers of a record need to know of this program."""
        return {}

    @property
    def total_steps(self) -> int:
        return self.batches * self.options.epochs

    @property
    def updates(self) -> int:
        return 0 if self.trainer is None else self.trainer.updates

    def _pictures(self, part: str) -> Pictures:
        """The training or test pictures as the network reads them, arranged on first use."""
        if part not in self._arranged:
            pictures: Pictures = getattr(self._data, part)
            images = self.arrange(pictures.images)
            if self.options.data_type == "float64":
                images = images.to(torch.float64)
            self._arranged[part] = Pictures(images, pictures.labels)
        return self._arranged[part]

    def _precision(self) -> AbstractContextManager[Any]:
        if self.options.data_type == "bfloat16":
            return torch.autocast("cpu", torch.bfloat16)
        return nullcontext()

    def _forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(mean loss, number of right answers)."""
        with self._precision():
            logits = self.network(images)
        # Sixteen bits are too few for the sum of exponentials.
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        return F.cross_entropy(logits, labels), (logits.detach().argmax(1) == labels).sum()

    def run_epoch(self) -> Iterator[tuple[Report, Report | None]]:
        """Train one epoch.

        Yields a report after every 1/steps_per_epoch of it and after its last step; the last comes
        with a report of the whole epoch, the others with None.
        """
        data = self._pictures("train")
        self.network.train()
        order = torch.randperm(len(data), generator=self.generator)
        window, whole = _Sums(), _Sums()
        for number, indices in enumerate(order.split(self.options.batch_size), start=1):
            begin = time.perf_counter()
            rate = learning_rate(self.options, self.step, self.total_steps)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            images, labels = data.images.index_select(0, indices), data.labels[indices]
            loss, correct = self._forward(images, labels)
            self.optimizer.zero_grad()
            loss.backward()
            window.replaced += self._optimise()
            self.step += 1
            window.steps += 1
            window.pictures += len(indices)
            window.loss += loss.detach() * len(indices)
            window.correct += correct
            window.seconds += time.perf_counter() - begin
            ends = number == self.batches
            if ends or number % self.report_interval == 0:
                if not math.isfinite(window.loss):
                    raise ValueError(
                        f"the training diverged: the loss is {float(window.loss)} after step "
                        f"{self.step}: lower --learning-rate"
                    )
                whole.add(window)
                self.seconds += window.seconds
                self.replaced += window.replaced
                now = self.epoch + 1, self.step, rate
                if ends:
                    self.epoch += 1
                yield window.report(*now), whole.report(*now) if ends else None
                window = _Sums()

    def _optimise(self) -> int:
        """The optimizer's step, and the pattern update if one is due: connections that left."""
        if self.trainer is None:
            self.optimizer.step()
            return 0
        begin = time.perf_counter()
        rewirings = self.trainer.step()
        if rewirings is None:
            return 0
        self.update_seconds += time.perf_counter() - begin
        return sum(len(r.dropped) * r.before.block_size**2 for r in rewirings.values())

    @torch.no_grad()
    def test(self) -> Scores:
        """The scores on all test pictures, without dropout."""
        data = self._pictures("test")
        self.network.eval()
        loss, correct = 0.0, 0
        for images, labels in zip(
            data.images.split(_TEST_BATCH), data.labels.split(_TEST_BATCH), strict=True
        ):
            batch_loss, batch_correct = self._forward(images, labels)
            loss += float(batch_loss) * len(labels)
            correct += int(batch_correct)
        return Scores(loss / len(data), correct / len(data))


class _Sums:
    """Sums over some steps. The scores stay tensors until they are asked for."""

    def __init__(self) -> None:
        self.steps = 0
        self.pictures = 0
        self.loss = torch.zeros((), dtype=torch.float64)
        self.correct = torch.zeros((), dtype=torch.int64)
        self.replaced = 0
        self.seconds = 0.0

    def add(self, other: _Sums) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def report(self, epoch: int, step: int, learning_rate: float) -> Report:
        scores = Scores(float(self.loss) / self.pictures, int(self.correct) / self.pictures)
        return Report(epoch, step, self.steps, scores, self.replaced, self.seconds, learning_rate)
