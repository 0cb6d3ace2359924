"""Whole trainings side by side: the time to reach the same accuracy.

    python benchmarks/whole_trainings.py [--block 16] [--seeds 3] [--threads 2] [--json FILE]

RigL by SGD with momentum, on the sparse network and on its masked twin, on synthetic data of
CIFAR-10's shape.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from masked_rigl import MaskedRigL
from torch import Tensor, nn

from dynsparse.bench.cells import Cell
from dynsparse.bench.contenders import mask_layers, mlp
from dynsparse.bench.host import CpuTimes, foreign_share, read_cpu_times
from dynsparse.nn import sparsify
from dynsparse.training import CosineSchedule, RigL

CHANNELS, SIDE = 3, 32
PIXELS = CHANNELS * SIDE * SIDE
CLASSES = 10
"""Sizes of an example."""

_COARSE = 8


@dataclass(frozen=True)
class Settings:
    """Settings of both trainings.

    accuracy: the target on held-out examples; steps: the maximum; interval, evaluate: steps between
    pattern updates, and between evaluations.
    """

    accuracy: float = 0.9
    steps: int = 1000
    interval: int = 100
    evaluate: int = 20
    learning_rate: float = 0.05


@dataclass(frozen=True)
class Task:
    """Examples [n, 3072] float32 of mean 0 and variance about 1, and labels [n] int64."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def make_task(
    *,
    train: int = 20000,
    test: int = 2000,
    prototypes: int = 4,
    signal: float = 0.25,
    seed: int = 0,
) -> Task:
    """The task of a seed.

    Args:
        train, test: number of examples.
        prototypes: number per class.
        signal: amplitude of a prototype relative to the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(CLASSES * prototypes, CHANNELS, _COARSE, _COARSE, generator=generator)
    fields = F.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear").flatten(1)
    fields = fields / fields.std(1, keepdim=True)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        which = torch.randint(len(fields), (count,), generator=generator)
        sign = 2.0 * torch.randint(2, (count, 1), generator=generator) - 1
        noise = torch.randn(count, fields.shape[1], generator=generator)
        examples = noise.addcmul_(fields[which], sign, value=signal)
        return examples.div_((1 + signal**2) ** 0.5), which // prototypes

    return Task(*draw(train), *draw(test))


@dataclass
class Runner:
    """One contender: its network, the function that ends a step, and its results so far.

    seconds: of training, without evaluations; update_seconds: those of steps with a pattern update;
    accuracies: (step, seconds, accuracy) at each evaluation.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    finish: Callable[[], object]
    seconds: float = 0.0
    update_seconds: float = 0.0
    updates: int = 0
    accuracies: list[tuple[int, float, float]] = field(default_factory=list)

    def train(self, batches: list[tuple[Tensor, Tensor]], due: list[bool]) -> None:
        """Take a step per batch; `due` marks those that end in a pattern update."""
        self.model.train()
        for (x, labels), is_due in zip(batches, due, strict=True):
            begin = time.perf_counter()
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), labels).backward()
            self.finish()
            taken = time.perf_counter() - begin
            self.seconds += taken
            if is_due:
                self.update_seconds += taken
                self.updates += 1

    @torch.no_grad()
    def evaluate(self, step: int, examples: Tensor, labels: Tensor) -> float:
        """Record and return the accuracy, in [0, 1]."""
        self.model.eval()
        accuracy = float((self.model(examples).argmax(1) == labels).double().mean())
        self.accuracies.append((step, self.seconds, accuracy))
        return accuracy

    def reached(self, accuracy: float) -> tuple[int, float] | None:
        """(step, training seconds) of the first evaluation at `accuracy` or above."""
        for step, seconds, got in self.accuracies:
            if got >= accuracy:
                return step, seconds
        return None


def _runners(cell: Cell, options: Settings, seed: int) -> dict[str, Runner]:
    torch.manual_seed(seed)
    sparse = mlp(cell.features, nn.Linear)
    fits = [f"{i}" for i, m in enumerate(sparse) if isinstance(m, nn.Linear) and not _fits(m, cell)]
    sparsify(sparse, cell.density, cell.block, exclude=fits, verbose=False)
    masked = mask_layers(copy.deepcopy(sparse))
    schedule = CosineSchedule(options.steps, options.interval)

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9)

    own, other = optimizer_of(sparse), optimizer_of(masked)
    return {
        "dynsparse": Runner(sparse, own, RigL(sparse, own, schedule=schedule).step),
        "masked": Runner(masked, other, MaskedRigL(masked, other, schedule).step),
    }


def _fits(layer: nn.Linear, cell: Cell) -> bool:
    return layer.in_features % cell.block == 0 and layer.out_features % cell.block == 0


def train_side_by_side(
    cell: Cell,
    options: Settings,
    seed: int = 0,
    *,
    task: Task | None = None,
    read: Callable[[], CpuTimes | None] = read_cpu_times,
) -> dict[str, Any]:
    """Train the sparse network and its masked twin in turn, some steps each, on the same batches.

    Both start from the same weights and patterns and follow the same schedule; a contender stops
    when it reaches the accuracy. The result has plain types, ready for JSON; times are in seconds,
    without evaluations. torch's global generator keeps its state.
    """
    if task is None:
        task = make_task(seed=seed)
    with torch.random.fork_rng():
        runners = _runners(cell, options, seed)
    density = _density(runners["masked"].model)
    schedule = CosineSchedule(options.steps, options.interval)
    generator = torch.Generator().manual_seed(seed)
    before = read()
    done = 0
    while done < options.steps:
        count = min(options.evaluate, options.steps - done)
        due = [schedule.is_due(done + 1 + i) for i in range(count)]
        batches = []
        for _ in range(count):
            chosen = torch.randint(len(task.train), (cell.batch,), generator=generator)
            batches.append((task.train[chosen], task.train_labels[chosen]))
        done += count
        for runner in runners.values():
            if runner.reached(options.accuracy) is None:
                runner.train(batches, due)
                runner.evaluate(done, task.test, task.test_labels)
        if all(runner.reached(options.accuracy) for runner in runners.values()):
            break
    results = {name: _summary(runner, options.accuracy) for name, runner in runners.items()}
    return {
        "seed": seed,
        "density": density,
        "accuracy": options.accuracy,
        "contenders": results,
        "foreign": foreign_share(before, read()),
    }


def _summary(runner: Runner, accuracy: float) -> dict[str, object]:
    reached = runner.reached(accuracy)
    return {
        "steps": None if reached is None else reached[0],
        "seconds": None if reached is None else reached[1],
        "updates": runner.updates,
        "update_seconds": runner.update_seconds,
        "curve": [list(point) for point in runner.accuracies],
    }


def _density(model: nn.Module) -> float:
    """The density over all weights."""
    present = total = 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            mask = getattr(module, "mask", None)
            total += module.weight.numel()
            present += module.weight.numel() if mask is None else int(mask.sum())
    return present / total


def main() -> None:
    parser = argparse.ArgumentParser(description="Sparse and masked trainings side by side.")
    parser.add_argument("--hidden", nargs="+", type=int, default=[2048, 2048])
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--block", type=int, default=1)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=1, help="number of trainings, from seed 0")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    cell = Cell((PIXELS, *asked.hidden, CLASSES), asked.batch, asked.density, asked.block)
    trainings = []
    for seed in range(asked.seeds):
        training = train_side_by_side(cell, Settings(), seed)
        trainings.append(training)
        runs = training["contenders"].items()
        parts = [
            f"{who} {run['seconds'] or '-'} s, {run['steps'] or '-'} steps" for who, run in runs
        ]
        print(f"{cell}, seed {seed}: {'; '.join(parts)}", flush=True)
    if asked.json is not None:
        sizes = asdict(cell) | {"features": list(cell.features)}
        found = {"layer": cell.layer, **sizes, "training": trainings}
        asked.json.write_text(json.dumps({"cells": [found], "refused": []}))


if __name__ == "__main__":
    main()
