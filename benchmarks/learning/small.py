"""Small experiments behind docs/recipes.md: one choice varied at a time, on MNIST, with seeds.

    python benchmarks/learning/small.py --data-dir DIR --experiments interval share \
        --seeds 0 1 2 --output results.jsonl

Writes a line of JSON per training. Errors are those on the last 10,000 training images, which are
held out; the test set is not used. small_trials.py defines the trials, tables.py makes the tables.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pieces import LateCosine
from small_trials import EXPERIMENTS, Trial
from torch import Tensor, nn

import dynsparse as ds
from dynsparse.data import DataSet, load

BATCH = 100


def network(kind: str) -> nn.Sequential:
    """784-300-100-10, or four convolutions with batch norm and global average pooling."""
    if kind == "mlp":
        return nn.Sequential(
            nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)
        )
    parts: list[nn.Module] = [nn.Unflatten(1, (1, 28, 28))]
    for wide, out, stride in ((1, 16, 2), (16, 32, 1), (32, 64, 2), (64, 64, 1)):
        parts += [nn.Conv2d(wide, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def layers_of(model: nn.Module) -> list[str]:
    """Names of the linear and convolution layers, in order."""
    kinds = (nn.Linear, nn.Conv2d)
    return [name for name, module in model.named_modules() if isinstance(module, kinds)]


def make_sparse(model: nn.Module, trial: Trial, seed: int) -> None:
    """Sparsify; with `count_all` the density is over all layers, including dense ones."""
    names = layers_of(model)
    if trial.count_all:
        sizes = {name: model.get_submodule(name).weight.numel() for name in names}
        dense = [names[at] for at in trial.left_dense]
        left = sum(sizes.values()) * trial.density - sum(sizes[name] for name in dense)
        density = left / sum(size for name, size in sizes.items() if name not in dense)
    else:
        dense, density = [names[at] for at in trial.left_dense], trial.density
    ds.sparsify(
        model,
        density,
        allocation=trial.allocation,
        exclude=dense,
        start=trial.start,
        generator=torch.Generator().manual_seed(seed),
        keep_sparse=trial.method == "gmp",
        verbose=False,
    )


def make_trainer(
    model: nn.Module, optimizer: torch.optim.Optimizer, trial: Trial, steps: int, seed: int
) -> Any:
    if trial.method in ("dense", "static"):
        return ds.Static(model, optimizer) if trial.method == "static" else None
    if trial.method == "gmp":
        return ds.GMP(
            model,
            optimizer,
            final_density=trial.final_density,
            allocation=trial.allocation,
            total_steps=steps,
        )
    schedule = LateCosine(
        steps, trial.interval, trial.share, trial.end, first=round(trial.first * steps)
    )
    if trial.method == "set":
        return ds.SET(model, optimizer, schedule=schedule, seed=seed)
    return ds.RigL(model, optimizer, schedule=schedule)


@dataclass
class Run:
    """Training with one seed; the data order is the same in every trial."""

    data: DataSet
    seed: int

    def train(self, model: nn.Module, trial: Trial) -> int:
        """Train; return the number of pattern updates."""
        steps = trial.epochs * (len(self.data.train) // BATCH)
        optimizer = torch.optim.Adam(model.parameters(), trial.rate)
        trainer = make_trainer(model, optimizer, trial, steps, self.seed)
        warm = round(trial.warm_up * steps)
        chance = torch.Generator().manual_seed(self.seed)
        model.train()
        step = 0
        for _ in range(trial.epochs):
            order = torch.randperm(len(self.data.train), generator=chance)
            for indices in order[: len(order) // BATCH * BATCH].view(-1, BATCH):
                rate = trial.rate * 0.5 * (1 + math.cos(math.pi * step / steps))
                for group in optimizer.param_groups:
                    group["lr"] = rate * min(1.0, (step + 1) / (warm + 1))
                optimizer.zero_grad()
                images = self.data.train.images[indices]
                F.cross_entropy(model(images), self.data.train.labels[indices]).backward()
                (optimizer if trainer is None else trainer).step()
                step += 1
        return 0 if trainer is None else trainer.updates

    @torch.no_grad()
    def error(self, model: nn.Module) -> float:
        """The error on the held-out images, in percent."""
        model.eval()
        test = self.data.test
        found = torch.cat([model(part).argmax(1) for part in test.images.split(1000)])
        return 100 * float((found != test.labels).double().mean())


class Dense:
    """Trained dense networks, one per seed and kind, as starts of fine-tuning."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, int, int], dict[str, Tensor]] = {}

    def state(self, run: Run, trial: Trial) -> dict[str, Tensor]:
        key = (trial.network, trial.dense_epochs, run.seed)
        if key not in self.found:
            torch.manual_seed(run.seed)
            model = network(trial.network)
            before = Trial(trial.network, "dense", epochs=trial.dense_epochs)
            run.train(model, before)
            self.found[key] = model.state_dict()
        return self.found[key]


def train(run: Run, trial: Trial, dense: Dense) -> dict[str, Any]:
    """Run one trial with one seed; return the figures."""
    begin = time.process_time()
    torch.manual_seed(run.seed)
    model = network(trial.network)
    if trial.dense_epochs:
        model.load_state_dict(dense.state(run, trial))
    if trial.method != "dense":
        make_sparse(model, trial, run.seed)
    updates = run.train(model, trial) if trial.epochs else 0
    matrices = [m.values if hasattr(m, "values") else m.weight for m in model.modules()
                if hasattr(m, "pattern") or isinstance(m, (nn.Linear, nn.Conv2d))]  # fmt: skip
    return {
        "error": round(run.error(model), 2),
        "weights": sum(values.numel() for values in matrices),
        "updates": updates,
        "cpu seconds": round(time.process_time() - begin, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = load("mnist", arguments.data_dir).hold_out(10_000)
    for seed in arguments.seeds:
        run, dense = Run(data, seed), Dense()
        done: dict[Trial, dict[str, Any]] = {}  # some are part of several experiments
        for name in arguments.experiments:
            for label, trial in EXPERIMENTS[name].trials.items():
                if trial not in done:
                    done[trial] = train(run, trial, dense)
                row = {"experiment": name, "trial": label, "seed": seed, **done[trial]}
                with arguments.output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(name, label, seed, row["error"], row["cpu seconds"], flush=True)


if __name__ == "__main__":
    main()
