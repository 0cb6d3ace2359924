"""The training on pictures: its epochs and the test."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynsparse.apps import common
from dynsparse.apps.common.methods import begin_denser
from dynsparse.apps.common.training import Scores, Stopped, Sums, precision
from dynsparse.apps.pictures.optimizer import build_optimizer, learning_rate
from dynsparse.apps.pictures.options import PictureOptions
from dynsparse.data import DataSet, Pictures
from dynsparse.tracing import span, spanned


class Training(common.Training):
    """One training run on pictures.

    A program adds its name, its network, and what it tells about itself.

    Raises:
        ValueError: an optimizer argument or a schedule that does not fit.
    """

    unit = "epoch"
    digits = 4
    generator_name = "training"
    counters = ("epoch", "step", "seconds", "update_seconds", "replaced")
    rate_flag = "learning-rate"
    options: PictureOptions

    def __init__(self, options: PictureOptions, data: DataSet, seed: int) -> None:
        self.options = options
        self._data = data
        self._arranged: dict[str, Pictures] = {}
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
    def test_batch(self) -> int:
        """How many test pictures the network sees at once."""
        return 1000

    @property
    def pattern_steps(self) -> int:
        """After how many steps patterns stay."""
        return self.total_steps

    @property
    def pattern_interval(self) -> int:
        """Steps between pattern updates."""
        return self.options.update_interval or self.report_interval

    @abstractmethod
    def build_network(self) -> nn.Module:
        """The network, drawn from `generator`: pictures as `arrange` makes them -> [batch, 10]."""

    @abstractmethod
    def headline(self) -> str:
        """The network in a few words."""

    def arrange(self, images: Tensor) -> Tensor:
        """Pictures as the data set has them, as the network reads them."""
        return images

    def vary(self, images: Tensor, batch: Tensor) -> Tensor:
        """This rank's share of the pictures of `batch` [n] as they are trained on this time.

        What is drawn is drawn for the whole batch: all ranks draw alike.
        """
        return images

    def build_model(self, initial: torch.Generator) -> tuple[nn.Module, dict[str, float]]:
        network = self.build_network()
        final = begin_denser(self.options.method, network, initial)
        if self.options.data_type == "float64":
            network.to(torch.float64)
        return network, final

    def build_optimizer(self) -> torch.optim.Optimizer:
        return build_optimizer(self.options, self.model)

    def check_drawn(self, path: Path, saved: dict[str, Any]) -> None:
        for name, value in self.drawn().items():
            if not isinstance(saved[name], Tensor) or not value.equal(saved[name]):
                raise ValueError(f"{path}: its {name} is not the one of its seed")

    def metadata(self) -> dict[str, Any]:
        options = self.options
        return {"dataset": options.dataset, "epochs": options.length, "steps": self.total_steps}

    def _pictures(self, part: str) -> Pictures:
        """The training or test pictures as the network reads them, arranged on first use."""
        if part not in self._arranged:
            pictures: Pictures = getattr(self._data, part)
            images = self.arrange(pictures.images)
            if self.options.data_type == "float64":
                images = images.to(torch.float64)
            labels = pictures.labels.to(self.device)
            self._arranged[part] = Pictures(images.to(self.device), labels)
        return self._arranged[part]

    def _forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(mean loss, number of right answers)."""
        network = self.replica if self.model.training else self.model
        with precision(self.options.data_type, self.device):
            logits = network(images)
        # Sixteen bits are too few for the sum of exponentials.
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        return F.cross_entropy(logits, labels), (logits.detach().argmax(1) == labels).sum()

    def run_epoch(self) -> Iterator[tuple[Sums, Sums | None]]:
        """Train one epoch.

        Yields the sums after every 1/steps_per_epoch of it and after its last step; the last come
        with those of the whole epoch, the others with None.

        Raises:
            Stopped: where `stop_asked` says so.
        """
        with span("data"):
            data = self._pictures("train")
            self.model.train()
            order, done, window, whole = self._begun()
            batches = order.to(self.device).split(self.options.batch_size)
        for number, indices in enumerate(batches[done:], start=done + 1):
            if self.stop_asked and number > done + 1:
                sums = {"window": window.state(), "whole": whole.state()}
                self.partial = {"order": order, "batches": number - 1, **sums}
                raise Stopped
            begin = time.perf_counter()
            with span("data"):
                self.set_rate(learning_rate(self.options, self.step, self.total_steps))
                own, weight = self.share(indices)
                if self.options.synthetic_data:  # always the same
                    images, labels = data.images[: len(own)], data.labels[: len(own)]
                else:
                    images, labels = data.images.index_select(0, own), data.labels[own]
                    images = self.vary(images, indices)
            with span("forward"):
                loss, correct = self._forward(images, labels)
                if weight:
                    window.add(loss.detach() * len(own), correct, len(own))
            with span("backward"):
                self.optimizer.zero_grad()
                (loss if weight == 1 else loss * weight).backward()
            self.optimise(window)
            window.seconds += time.perf_counter() - begin
            ends = number == self.batches
            if ends or number % self.report_interval == 0:
                self.settle(window)
                whole.include(window)
                self.epoch += ends
                yield window, whole if ends else None
                window = Sums()

    def _begun(self) -> tuple[Tensor, int, Sums, Sums]:
        """The order of an epoch's pictures, its batches done, and the sums of its last and all."""
        if self.stop_asked:
            raise Stopped
        partial, self.partial = self.partial, {}
        if partial:
            sums = [Sums.from_state(partial[name]) for name in ("window", "whole")]
            return partial["order"], partial["batches"], sums[0], sums[1]
        order = torch.randperm(len(self._data.train), generator=self.generator)
        return order, 0, Sums(), Sums()

    def check_partial(self, partial: Any) -> None:
        super().check_partial(partial)
        if not partial:
            return
        order, batches = partial.get("order"), partial.get("batches")
        every = torch.arange(len(self._data.train))
        right = isinstance(order, Tensor) and order.dtype == every.dtype and order.dim() == 1
        right = right and torch.equal(order.sort().values, every) and type(batches) is int
        if not right or not 0 < batches < self.batches or not {"window", "whole"} <= partial.keys():
            raise ValueError("expected the order of an epoch's pictures, and how far it went")

    @spanned("evaluation")
    @torch.no_grad()
    def test(self) -> Scores:
        """The scores on all test pictures, without dropout."""
        data = self._pictures("test")
        self.model.eval()
        sums = Sums()
        batches = zip(
            *(each.split(self.test_batch) for each in (data.images, data.labels)), strict=True
        )
        for images, labels in list(batches)[self.ranks.rank :: self.ranks.size]:
            loss, correct = self._forward(images, labels)
            sums.add(loss.double() * len(labels), correct, len(labels))
        self.collect(sums)
        return sums.scores()
