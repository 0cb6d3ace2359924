"""LeNet-300-100 on MNIST, 99 % / 89 % / 0 % sparse: RigL on sparse storage beside masked RigL.

The network and sparsities of Evci et al. 2020, "Rigging the Lottery", table 2 (test error 1.44 %
best and 1.48 % final there). Both contenders train in one process, an epoch each in turn, with the
same threads, batches and schedule; the masked one holds dense weights, multiplies them by a mask
and ranks the dense gradient, as sparse training is mostly done. Prints the test errors, and the
ratio of the training times as median and spread over epochs.

    python benchmarks/lenet.py --data-dir DIR --seeds 0 1 2 [--epochs 210] [--no-masked]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynsparse as ds
from dynsparse.bench.masked import MaskedRigL, masked_twin
from dynsparse.data import load

SIZES = (784, 300, 100, 10)
DENSITIES = (0.01, 0.11, 1.0)
BATCH, RATE, MOMENTUM, DECAY, DROPOUT, DROP, INTERVAL = 100, 0.1, 0.9, 2e-4, 0.05, 0.3, 600


class Contender:
    """A network, its optimizer and what one step of it does."""

    def __init__(self, sparse: nn.Sequential, masked: bool, total_steps: int) -> None:
        self.model = masked_twin(sparse) if masked else sparse
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), RATE, MOMENTUM, weight_decay=DECAY, nesterov=True, fused=True
        )
        self.total_steps, self.steps = total_steps, 0
        schedule = ds.training.CosineSchedule(total_steps, INTERVAL, DROP)
        make = MaskedRigL if masked else ds.RigL
        self.trainer = make(self.model, self.optimizer, schedule=schedule)
        self.seconds: list[float] = []

    def epoch(self, images: Tensor, labels: Tensor, order: Tensor) -> None:
        self.model.train()
        begin = time.perf_counter()
        for indices in order.view(-1, BATCH):
            rate = 0.5 * RATE * (1 + math.cos(math.pi * self.steps / self.total_steps))
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(images[indices]), labels[indices]).backward()
            self.steps += 1
            self.trainer.step()
        self.seconds.append(time.perf_counter() - begin)

    @torch.no_grad()
    def error(self, images: Tensor, labels: Tensor) -> float:
        self.model.eval()
        return float((self.model(images).argmax(1) != labels).double().mean())


def build(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for i, density in enumerate(DENSITIES):
        kind = nn.Linear if density == 1 else ds.nn.SparseLinear
        extra = () if density == 1 else (density,)
        layers += [kind(SIZES[i], SIZES[i + 1], *extra), nn.ReLU(), nn.Dropout(DROPOUT)]
    return nn.Sequential(*layers[:-2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=210)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-masked", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    data = load("mnist", arguments.data_dir)
    train, test = data.train, data.test
    total = arguments.epochs * (len(train) // BATCH)
    rows = []
    for seed in arguments.seeds:
        contenders = {"sparse": Contender(build(seed), False, total)}
        if not arguments.no_masked:
            contenders["masked"] = Contender(build(seed), True, total)
        best = dict.fromkeys(contenders, 1.0)
        for _ in range(arguments.epochs):
            order = torch.randperm(len(train))
            for name, contender in contenders.items():
                contender.epoch(train.images, train.labels, order)
                best[name] = min(best[name], contender.error(test.images, test.labels))
        row = {"seed": seed}
        for name, contender in contenders.items():
            row[name] = {"final": contender.error(test.images, test.labels), "best": best[name]}
        if not arguments.no_masked:
            pairs = zip(contenders["masked"].seconds, contenders["sparse"].seconds, strict=True)
            ratios = sorted(masked / sparse for masked, sparse in pairs)
            row["masked / sparse time"] = {
                "median": statistics.median(ratios),
                "lower quartile": ratios[len(ratios) // 4],
                "upper quartile": ratios[3 * len(ratios) // 4],
            }
        rows.append(row)
        print(json.dumps(row), flush=True)
    finals = [row["sparse"]["final"] for row in rows]
    print(f"sparse, final test error: mean {100 * statistics.mean(finals):.2f} %")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
