"""Loss against training time: one transformer trained dense, masked and sparse.

    python benchmarks/loss_against_time.py --data input.txt --json FILE.json --output FILE.png
    python benchmarks/loss_against_time.py --from FILE.json --output FILE.png

A byte-level GPT learns a text. Masked and sparse train by RigL from the same weights and patterns,
on the same batches; all use AdamW with the same rate. The three take turns step by step, in one
process with the same threads, so that other load on the machine affects all. Times exclude
evaluations.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_parts.model import GPT
from masked_rigl import MaskedRigL
from torch import Tensor, nn

import dynsparse as ds
from dynsparse.bench.contenders import mask_layers
from dynsparse.data.text import read_text
from dynsparse.report.figure import figure, save
from dynsparse.training import CosineSchedule

LENGTH, BATCH, EVALUATED = 128, 16, 4
COLOURS = {"sparse": "#0b6e99", "masked": "#d1495b", "dense": "#e0a030"}


class Contender:
    """A model, the function that steps it, and its losses so far: (step, seconds, test loss)."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, finish: Callable[[], object]
    ) -> None:
        self.model, self.optimizer, self.finish = model, optimizer, finish
        self.seconds, self.losses = 0.0, []

    def train(self, tokens: Tensor, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(tokens).backward()
        self.finish()
        self.seconds += time.perf_counter() - begin

    @torch.no_grad()
    def evaluate(self, step: int, batches: list[Tensor]) -> float:
        loss = sum(float(self.model(tokens)) for tokens in batches) / len(batches)
        self.losses.append((step, self.seconds, loss))
        return loss


def contenders(args: argparse.Namespace) -> dict[str, Contender]:
    torch.manual_seed(args.seed)
    dense = GPT(256, LENGTH, args.width, args.heads, args.layers)
    sparse = ds.sparsify(
        copy.deepcopy(dense),
        args.density,
        allocation="uniform",
        exclude=["loss.head"],
        verbose=False,
    )
    masked = mask_layers(copy.deepcopy(sparse))
    schedule = CosineSchedule(args.steps, args.interval)

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), weight_decay=0.1, fused=True)

    own, other, plain = adam(sparse), adam(masked), adam(dense)
    return {
        "sparse": Contender(sparse, own, ds.RigL(sparse, own, schedule=schedule).step),
        "masked": Contender(masked, other, MaskedRigL(masked, other, schedule).step),
        "dense": Contender(dense, plain, plain.step),
    }


def train(args: argparse.Namespace) -> dict[str, Any]:
    data = torch.frombuffer(bytearray(read_text(args.data).encode()), dtype=torch.uint8)
    parts = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    generator = torch.Generator().manual_seed(args.seed)

    def batch(part: Tensor) -> Tensor:
        starts = torch.randint(len(part) - LENGTH, (BATCH, 1), generator=generator)
        return part[starts + torch.arange(LENGTH + 1)].long()

    tests = [batch(parts[1]) for _ in range(EVALUATED)]
    all_of_them = contenders(args)
    for contender in all_of_them.values():
        contender.evaluate(0, tests)
    for step in range(1, args.steps + 1):
        tokens = batch(parts[0])
        rate = args.rate * min(1.0, step / 20) * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        for contender in all_of_them.values():
            contender.train(tokens, rate)
        if step % args.evaluate == 0 or step == args.steps:
            told = {name: f"{c.evaluate(step, tests):.3f} after {c.seconds:.0f} s"
                    for name, c in all_of_them.items()}  # fmt: skip
            print(step, told, flush=True)
    weights = {name: sum(p.numel() for p in c.model.parameters())
               for name, c in all_of_them.items()}  # fmt: skip
    settings = {k: v for k, v in vars(args).items() if isinstance(v, (int, float))}
    return {
        "settings": settings | {"threads": torch.get_num_threads()},
        "parameters": weights,
        "losses": {name: c.losses for name, c in all_of_them.items()},
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the losses over time; the unit is the dense training's total time."""
    whole = found["losses"]["dense"][-1][1]
    with figure(7.0, 3.6) as page:
        axes = page.subplots()
        for name, losses in found["losses"].items():
            times = [seconds / whole for _, seconds, _ in losses]
            values = [loss for *_, loss in losses]
            label = f"{name}: {values[-1]:.2f} after {times[-1]:.2f}"
            axes.plot(times, values, color=COLOURS[name], label=label)
        axes.set_ylim(top=3.2)
        axes.set_xlabel("training time, that of the dense training is 1")
        axes.set_ylabel("test loss, nats per byte")
        axes.legend()
        save(page, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a text file")
    parser.add_argument("--from", dest="found", type=Path, help="only draw these results")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--interval", type=int, default=20)
    parser.add_argument("--evaluate", type=int, default=20)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.found is None and args.data is None:
        parser.error("expected --data or --from")
    found = train(args) if args.found is None else json.loads(args.found.read_text())
    if args.json is not None:
        args.json.write_text(json.dumps(found))
    if args.output is not None:
        draw(found, args.output)


if __name__ == "__main__":
    main()
