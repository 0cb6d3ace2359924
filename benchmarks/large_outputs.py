"""Classifiers with many labels: sparse output layers beside a dense bottleneck of equal memory.

    python benchmarks/large_outputs.py calls [--steps 1500] [--seed 0] [--json FILE]
    python benchmarks/large_outputs.py synthetic --labels 670000 --steps 50

Two tasks. `calls`: predict which functions a function of Python's standard library calls (15,000
names, 3.9 per function on average) from the words of its name, arguments and docstring.
`synthetic`: each label has eight words; a sample holds six words of its label and six of others.
Label frequencies follow Zipf's law.

The model is a bag of words, a ReLU of 512 features and the output layer, trained by Adam with the
cross entropy of one of the sample's labels. Output layers:

    fan-in      16 inputs for each output, drawn once
    elements    as many weights, drawn over the whole layer
    RigL        as elements, trained by RigL
    bottleneck  features -> r -> labels without a nonlinearity, dense, with r such that weights,
                gradients and the state of Adam take the memory of fan-in with its index
    dense       a full layer (with `synthetic` only if named)

All take turns, step by step, on the same batches. Precision at k is the share of the k labels with
the highest scores that are right, on test samples.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import sysconfig
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from memory import resident
from torch import Tensor, nn

import dynsparse as ds

WORDS, FEATURES, FAN_IN = 1 << 14, 512, 16
CONTENDERS = ("fan-in", "elements", "RigL", "bottleneck", "dense")


@dataclass
class Samples:
    """Bags of words and sets of labels, concatenated, with the offset of each."""

    words: list[Tensor]
    labels: list[Tensor]

    def batch(self, chosen: list[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
        bags = [self.words[i] for i in chosen]
        starts = torch.tensor([0, *map(len, bags[:-1])]).cumsum(0)
        return torch.cat(bags), starts, [self.labels[i] for i in chosen]


# ---- tasks ----


def calls() -> tuple[Samples, int]:
    """The functions of the standard library, in a fixed random order."""
    part = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
    library = Path(sysconfig.get_paths()["stdlib"])
    names: dict[str, int] = {}
    words, labels = [], []
    for path in sorted(library.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue  # test files broken on purpose
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            called = {_called(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
            called.discard(None)
            text = [node.name, *(arg.arg for arg in node.args.args), ast.get_docstring(node) or ""]
            bag = [_hash(word.lower()) for word in part.findall(" ".join(text))]
            if called and bag:
                words.append(torch.tensor(bag))
                # Sorted, since the order of a set changes from one process to the next.
                found = [names.setdefault(name, len(names)) for name in sorted(called)]
                labels.append(torch.tensor(found))
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(0)).tolist()
    return Samples([words[i] for i in order], [labels[i] for i in order]), len(names)


def _called(function: ast.expr) -> str | None:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None


def _hash(word: str) -> int:
    """A hash that is the same in every process, unlike Python's `hash`."""
    number = 5381
    for byte in word.encode():
        number = (33 * number + byte) % WORDS
    return number


def synthetic(labels: int, count: int) -> tuple[Samples, int]:
    generator = torch.Generator().manual_seed(0)
    own = torch.randint(WORDS, (labels, 8), generator=generator)
    shares = 1 / torch.arange(1, labels + 1, dtype=torch.float64)
    drawn = torch.searchsorted(
        shares.cumsum(0) / shares.sum(), torch.rand(count, generator=generator).double()
    )
    drawn = drawn.clamp_(max=labels - 1)
    kept = torch.rand(count, 8, generator=generator).argsort(1)[:, :6]
    noise = torch.randint(WORDS, (count, 6), generator=generator)
    bags = torch.cat([own[drawn].gather(1, kept), noise], 1)
    return Samples(list(bags), list(drawn[:, None])), labels


# ---- models ----


class Classifier(nn.Module):
    def __init__(self, body: nn.Module, head: nn.Module, between: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.head = body, head
        self.between = nn.Identity() if between is None else between

    def hidden(self, words: Tensor, starts: Tensor) -> Tensor:
        return self.between(self.body(words, starts).relu())


def build(name: str, labels: int, seed: int) -> Classifier:
    torch.manual_seed(seed)
    body = nn.EmbeddingBag(WORDS, FEATURES, mode="mean")
    generator = torch.Generator().manual_seed(seed)
    if name == "dense":
        return Classifier(body, nn.Linear(FEATURES, labels))
    if name == "bottleneck":
        rank = bottleneck_rank(labels)
        return Classifier(body, nn.Linear(rank, labels), nn.Linear(FEATURES, rank))
    pattern = ds.SparsePattern.random(
        (labels, FEATURES),
        density=FAN_IN / FEATURES,
        per_row=name == "fan-in",
        generator=generator,
    )
    return Classifier(body, ds.nn.SparseLinear(FEATURES, labels, pattern=pattern))


def bottleneck_rank(labels: int) -> int:
    """The rank at which the dense weights, 16 bytes each in training, take the sparse layer's
    memory: 16 bytes per weight, and 4 each for its column, and for row and slot by columns."""
    return round(labels * FAN_IN * (16 + 12) / (16 * (labels + FEATURES)))


class Contender:
    """A model with its optimizer, its trainer, and the seconds of its steps."""

    def __init__(self, name: str, labels: int, args: argparse.Namespace) -> None:
        self.model = build(name, labels, args.seed)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.rate, fused=True)
        self.finish: Callable[[], object] = self.optimizer.step
        if name == "RigL":
            interval = max(1, args.steps // 30)
            self.finish = ds.RigL(
                self.model, self.optimizer, total_steps=args.steps, update_interval=interval
            ).step
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, words: Tensor, starts: Tensor, targets: Tensor, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        hidden = self.model.hidden(words, starts)
        loss = ds.nn.linear_cross_entropy(hidden, self.model.head, targets)
        loss.backward()
        self.finish()
        self.seconds.append(time.perf_counter() - begin)
        self.losses.append(loss.item())

    @torch.no_grad()
    def precision(self, samples: Samples, indices: list[int]) -> dict[str, float]:
        right = {1: 0, 5: 0}
        for first in range(0, len(indices), 64):
            words, starts, labels = samples.batch(indices[first : first + 64])
            best = self.model.head(self.model.hidden(words, starts)).topk(5, 1).indices
            for row, truth in zip(best, labels, strict=True):
                for k in right:
                    right[k] += int(torch.isin(row[:k], truth).sum())
        return {f"precision at {k}": n / (k * len(indices)) for k, n in right.items()}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    if args.task == "calls":
        samples, labels = calls()
    else:
        samples, labels = synthetic(args.labels, args.samples)
    tests = list(range(min(args.tests, len(samples.words) // 10)))
    training = range(len(tests), len(samples.words))
    mean = statistics.mean(map(len, samples.labels))
    print(f"{len(samples.words):,} samples, {labels:,} labels, {mean:.1f} a sample", flush=True)
    default = [n for n in CONTENDERS if n != "dense" or args.task == "calls"]
    contenders = {name: Contender(name, labels, args) for name in args.contenders or default}
    generator = torch.Generator().manual_seed(args.seed)
    for step in range(args.steps):
        drawn = torch.randint(len(training), (args.batch,), generator=generator)
        words, starts, sets = samples.batch([training[i] for i in drawn.tolist()])
        # One label of each sample, drawn anew.
        positions = torch.rand(len(sets), generator=generator)
        targets = torch.stack(
            [truth[int(p * len(truth))] for p, truth in zip(positions, sets, strict=True)]
        )
        rate = args.rate * min(1.0, (step + 1) / 20) * (1 - step / args.steps)
        for contender in contenders.values():
            contender.step(words, starts, targets, rate)
        if step % 50 == 49:
            print(
                step + 1,
                {n: round(statistics.mean(c.losses[-50:]), 3) for n, c in contenders.items()},
                flush=True,
            )
    results = {
        name: {
            "weights of the output": sum(
                p.numel() for part in (c.model.between, c.model.head) for p in part.parameters()
            ),
            "loss": statistics.mean(c.losses[-50:]),
            "seconds a step": statistics.median(c.seconds[len(c.seconds) // 4 :]),
            **(c.precision(samples, tests) if tests else {}),
        }
        for name, c in contenders.items()
    }
    return {
        "settings": {
            "task": args.task, "labels": labels, "labels of a sample": mean, "steps": args.steps,
            "batch": args.batch, "seed": args.seed, "threads": torch.get_num_threads(),
            "rank": bottleneck_rank(labels), "samples": len(samples.words), "tests": len(tests),
        },
        "peak memory in GB": resident("VmHWM") / 1e9,
        "results": results,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=["calls", "synthetic"])
    parser.add_argument("--labels", type=int, default=100_000, help="labels of `synthetic`")
    parser.add_argument("--samples", type=int, default=200_000, help="samples of `synthetic`")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--tests", type=int, default=4096, help="test samples")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    measured = measure(args)
    print(json.dumps(measured, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
