"""LeNet-300-100 on MNIST, 99 % / 89 % / 0 % sparse: RigL on sparse storage beside masked RigL.

The network and sparsities of Evci et al. 2020, "Rigging the Lottery", table 2 (there: test error
1.44 % best, 1.48 % final). Both contenders train in one process, an epoch each in turn, with the
same threads, batches and schedule. The masked one does what most sparse training does: it holds
dense weights, multiplies them by a mask and ranks the dense gradient. Prints the test errors, and
the ratio of the training times as median and spread over epochs.

    python benchmarks/lenet.py --data-dir DIR --seeds 0 1 2 3 4 [--epochs 210] [--no-masked]

--method set, static or dense trains that in place of RigL, without a masked twin. With
--hold-out 10000 it trains on the first 50,000 training images and tests on the others; use it to
choose settings.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lenet_images import Bent
from masked_rigl import MaskedRigL
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import dynsparse as ds
from dynsparse.bench.contenders import mask_layers
from dynsparse.bench.timing import spread
from dynsparse.data import DataSet, load

SIZES = (784, 300, 100, 10)
DENSITIES = (0.01, 0.11, 1.0)
BATCH, MOMENTUM = 100, 0.9
METHODS = ("rigl", "set", "static", "dense")
TRAINERS: dict[str, Any] = {"rigl": ds.RigL, "set": ds.SET, "masked": MaskedRigL}


@dataclass(frozen=True)
class Settings:
    """Hyperparameters; each is a flag."""

    rate: float = 0.1
    course: str = "cosine"
    """Learning rate schedule: "cosine", to 0; "drops", to a third after 3/8 of the training and a
    ninth after 19/40, as in the authors' program (75 and 95 of 200 epochs)."""
    decay: float = 2e-4
    dropout: float = 0.05
    interval: int = 600
    share: float = 0.3
    end: float = 0.75
    initial: float = 1.0
    """Scale of the sparse layers' initial values, relative to 1/sqrt(3 * inputs per output)."""
    smoothing: float = 0.0
    """Label smoothing."""
    distort: float = 0.0
    """Distortion of the images in pixels: lenet_images.py."""
    distorted: float = 1.0
    """The share of distorted images in an epoch."""
    clean: float = 0.0
    """The last share of the training, without distortion."""

    def distort_at(self, done: float) -> float:
        """The distortion in pixels after the share `done` of the training."""
        return self.distort if done < 1 - self.clean else 0.0

    def rate_at(self, done: float) -> float:
        """The learning rate after the share `done` of the training."""
        if self.course == "cosine":
            return 0.5 * self.rate * (1 + math.cos(math.pi * done))
        return self.rate / 3 ** ((done >= 75 / 200) + (done >= 95 / 200))


class Average:
    """The average of a network's weights after each epoch from the last pattern update on."""

    def __init__(self, model: nn.Module) -> None:
        self.of = model
        self.taken: AveragedModel | None = None

    @property
    def model(self) -> nn.Module:
        """The network with averaged weights; the network itself before the first average."""
        return self.of if self.taken is None else self.taken

    def take(self, done: float, settings: Settings) -> None:
        """Add the weights after an epoch; `done` is the share of the training."""
        if done > settings.end:
            self.taken = AveragedModel(self.of) if self.taken is None else self.taken
            self.taken.update_parameters(self.of)


class Contender:
    """A network, its optimizer and what one step of it does."""

    def __init__(
        self, network: nn.Sequential, method: str, total_steps: int, settings: Settings
    ) -> None:
        """`method` is one of `TRAINERS`, "static" or "dense"."""
        self.model = network
        if method == "masked":
            mask_layers(network)
            nn.Linear(*SIZES[-2:])  # as many random numbers as in the published runs
        self.settings = settings
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            settings.rate,
            MOMENTUM,
            weight_decay=settings.decay,
            nesterov=True,
            fused=True,
        )
        self.total_steps, self.steps = total_steps, 0
        schedule = ds.training.CosineSchedule(
            total_steps, settings.interval, settings.share, settings.end
        )
        self.trainer: Any = self.optimizer
        if method in TRAINERS:
            self.trainer = TRAINERS[method](self.model, self.optimizer, schedule=schedule)
        self.average = Average(self.model)
        self.seconds: list[float] = []

    @property
    def done(self) -> float:
        """The share of the training that is done."""
        return self.steps / self.total_steps

    def epoch(self, images: Tensor, labels: Tensor, seen: Tensor) -> None:
        """Train on the images with indices `seen`, in order; copies of images share `labels`."""
        self.model.train()
        begin = time.perf_counter()
        for indices in seen.view(-1, BATCH):
            for group in self.optimizer.param_groups:
                group["lr"] = self.settings.rate_at(self.done)
            self.optimizer.zero_grad()
            F.cross_entropy(
                self.model(images[indices]),
                labels[indices % len(labels)],
                label_smoothing=self.settings.smoothing,
            ).backward()
            self.steps += 1
            self.trainer.step()
        self.seconds.append(time.perf_counter() - begin)
        self.average.take(self.done, self.settings)

    @torch.no_grad()
    def error(self, images: Tensor, labels: Tensor, model: nn.Module | None = None) -> float:
        model = self.model if model is None else model
        model.eval()
        return float((model(images).argmax(1) != labels).double().mean())


def build(seed: int, settings: Settings, method: str = "rigl") -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for i, density in enumerate(DENSITIES if method != "dense" else (1.0, 1.0, 1.0)):
        kind = nn.Linear if density == 1 else ds.nn.SparseLinear
        extra = () if density == 1 else (density,)
        layers += [kind(SIZES[i], SIZES[i + 1], *extra), nn.ReLU()]
        if settings.dropout:
            layers.append(nn.Dropout(settings.dropout))
    for layer in layers:
        if isinstance(layer, ds.nn.SparseLinear):
            with torch.no_grad():
                layer.values.mul_(settings.initial)
    after = 2 if settings.dropout else 1  # layers after the logits
    return nn.Sequential(*layers[:-after])


def parser_of(about: str) -> argparse.ArgumentParser:
    """A parser with the flags that lenet.py and lenet_together.py share."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--epochs", type=int, default=210)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--hold-out", type=int, default=0)
    parser.add_argument("--json", type=Path, help="append a line per seed to this file")
    for field in fields(Settings):
        parser.add_argument(
            f"--{field.name}",
            type=type(field.default),
            default=field.default,
            choices=("cosine", "drops") if field.name == "course" else None,
        )
    return parser


def settings_of(arguments: argparse.Namespace) -> Settings:
    return Settings(**{field.name: getattr(arguments, field.name) for field in fields(Settings)})


def data_of(arguments: argparse.Namespace) -> DataSet:
    data = load("mnist", arguments.data_dir)
    return data.hold_out(arguments.hold_out) if arguments.hold_out else data


def report(row: dict[str, Any], arguments: argparse.Namespace) -> None:
    print(json.dumps(row), flush=True)
    if arguments.json:
        with arguments.json.open("a") as file:
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = parser_of(__doc__.splitlines()[0])
    parser.add_argument("--no-masked", action="store_true")
    parser.add_argument("--method", choices=METHODS, default="rigl")
    arguments = parser.parse_args()
    alone = arguments.no_masked or arguments.method != "rigl"
    settings, data = settings_of(arguments), data_of(arguments)
    torch.set_num_threads(arguments.threads)
    train, test = data.train, data.test
    total = arguments.epochs * (len(train) // BATCH)

    def make(seed: int, method: str) -> Contender:
        return Contender(build(seed, settings, method), method, total, settings)

    rows = []
    for seed in arguments.seeds:
        contenders = {"sparse": make(seed, arguments.method)}
        if not alone:
            contenders["masked"] = make(seed, "masked")
        best = dict.fromkeys(contenders, 1.0)
        bent = Bent(train.images, [settings])
        for _ in range(arguments.epochs):
            order = torch.randperm(len(train))[: len(train) // BATCH * BATCH]
            done = contenders["sparse"].done
            seen = bent.epoch(done, order[:, None]).squeeze(1)
            for name, contender in contenders.items():
                contender.epoch(bent.all, train.labels, seen)
                best[name] = min(best[name], contender.error(test.images, test.labels))
        row: dict[str, Any] = {"seed": seed, "epochs": arguments.epochs, **asdict(settings)}
        row |= {"held out": arguments.hold_out, "method": arguments.method}
        for name, contender in contenders.items():
            row[name] = {
                "final": contender.error(test.images, test.labels),
                "best": best[name],
                "training": contender.error(train.images, train.labels),
                "averaged": contender.error(test.images, test.labels, contender.average.model),
            }
        if not alone:
            pairs = zip(contenders["masked"].seconds, contenders["sparse"].seconds, strict=True)
            row["masked / sparse time"] = asdict(spread([a / b for a, b in pairs]))
        rows.append(row)
        report(row, arguments)
    finals = [row["sparse"]["final"] for row in rows]
    print(f"{arguments.method}, final test error: mean {100 * statistics.mean(finals):.2f} %")


if __name__ == "__main__":
    main()
