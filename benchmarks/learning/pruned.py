"""A small character GPT, pruned, repaired and fine-tuned with and without moving connections.

    python benchmarks/learning/pruned.py --data input.txt --densities 0.3 0.2 0.1 --seeds 0 1 2 \
        --output results.jsonl

Trains one dense model for each seed, prunes it, and prints a line of JSON for each way from there:
the test perplexity after pruning, after `training.repair`, and after as many steps of fine-tuning
the whole as --steps says. "masked" fine-tunes a dense model with masks of Wanda's pattern, for as
many steps as the repair takes for each block.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import dynsparse as ds

LENGTH = 64
FEATURES = 128
HEADS = 4
LAYERS = 3
BATCH = 16
CALIBRATION = 16  # batches
EPOCHS = 5  # of the repair
RATE = 1e-3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(FEATURES) for _ in range(2)])
        self.qkv, self.out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)
        self.up, self.down = nn.Linear(FEATURES, 4 * FEATURES), nn.Linear(4 * FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], HEADS, FEATURES // HEADS)
        q, k, v = (p.view(heads).transpose(1, 2) for p in self.qkv(self.norms[0](x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, FEATURES)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, FEATURES))
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Text:
    """Characters as tokens; the last tenth is for tests."""

    def __init__(self, path: Path) -> None:
        text = path.read_text()
        characters = {c: i for i, c in enumerate(sorted(set(text)))}
        ids = torch.tensor([characters[c] for c in text])
        self.vocabulary, cut = len(characters), len(ids) * 9 // 10
        self.train, self.test = ids[:cut], ids[cut:]

    def batches(self, count: int, seed: int) -> list[Tensor]:
        """[BATCH, LENGTH + 1] each."""
        g = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self.train) - LENGTH, (count, BATCH), generator=g)
        return [torch.stack([self.train[i : i + LENGTH + 1] for i in row]) for row in starts]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def perplexity(model: nn.Module, text: Text) -> float:
    windows = text.test.unfold(0, LENGTH + 1, LENGTH)[:800]
    losses = [loss_of(model, batch) for batch in windows.split(100)]
    return math.exp(float(torch.stack(losses).mean()))


def train(
    model: nn.Module,
    batches: list[Tensor],
    rate: float,
    after: Callable[[torch.optim.Optimizer], Callable[[], object]] | None = None,
) -> None:
    """Adam with a cosine schedule.

    Args:
        after: makes what takes the optimizer's step.
    """
    optimizer = torch.optim.AdamW(ds.param_groups(model, weight_decay=0.01), rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    step = optimizer.step if after is None else after(optimizer)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        step()
        schedule.step()


def fine_tune(model: nn.Module, batches: list[Tensor], method: str) -> None:
    """With a pattern that stays, or with 20 updates that begin with 5 % of the connections."""
    kinds = {"static": ds.Static, "SET": ds.SET, "RigL": ds.RigL}
    moving = {} if method == "static" else {
        "total_steps": len(batches), "update_interval": max(1, len(batches) // 25),
        "drop_fraction": 0.05,
    }  # fmt: skip
    train(model, batches, RATE, lambda optimizer: kinds[method](model, optimizer, **moving).step)


def fine_tune_masked(model: nn.Module, batches: list[Tensor]) -> None:
    """Dense layers whose absent weights are set to zero after every step."""
    masks = {
        name: layer.pattern.to_mask()
        for name, layer in model.named_modules()
        if isinstance(layer, ds.nn.SparseLinear)
    }
    ds.densify(model)

    def masked(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        def step() -> None:
            optimizer.step()
            with torch.no_grad():
                for name, mask in masks.items():
                    model.get_submodule(name).weight.mul_(mask)

        return step

    train(model, batches, RATE, masked)


def study(text: Text, density: float, seed: int, dense: nn.Module, steps: int) -> list[dict]:
    """What became of the model on each way: {"way", "perplexity", "seconds"}."""
    calibration = text.batches(CALIBRATION, 1000 + seed)
    inputs = [batch[:, :-1] for batch in calibration]
    rows = []

    def note(way: str, model: nn.Module, began: float) -> None:
        seconds = time.perf_counter() - began
        rows.append({"way": way, "perplexity": perplexity(model, text), "seconds": seconds})

    for start in ("magnitude", "wanda", "sparsegpt"):
        began, pruned = time.perf_counter(), copy.deepcopy(dense)
        ds.sparsify(pruned, density, start=start, allocation="uniform", verbose=False,
                    calibration=None if start == "magnitude" else inputs)  # fmt: skip
        note(start, pruned, began)
        began, repaired = time.perf_counter(), copy.deepcopy(pruned)
        ds.training.repair(repaired, dense, inputs, epochs=EPOCHS, lr=3e-3, verbose=False)
        note(f"{start}, repair", repaired, began)
        if start != "wanda":
            continue
        began, masked = time.perf_counter(), copy.deepcopy(pruned)
        fine_tune_masked(masked, calibration * EPOCHS)
        note("wanda, masked fine-tuning on the calibration data", masked, began)
        batches = text.batches(steps, 2000 + seed)
        for method in ("static", "SET", "RigL"):
            began, tuned = time.perf_counter(), copy.deepcopy(repaired)
            fine_tune(tuned, batches, method)
            note(f"wanda, repair, fine-tuning {method}", tuned, began)
    return rows


def report(row: dict[str, object], output: Path | None) -> None:
    """Print a row, and append it to the file if there is one."""
    line = json.dumps(row)
    print(line, flush=True)
    if output is not None:
        with output.open("a") as file:
            file.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="a text file")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.3, 0.2, 0.1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--dense-steps", type=int, default=900)
    parser.add_argument("--steps", type=int, default=200, help="of fine-tuning the whole")
    parser.add_argument("--output", type=Path, help="append the lines of JSON to this file as well")
    options = parser.parse_args()
    text = Text(options.data)
    for seed in options.seeds:
        torch.manual_seed(seed)
        dense = GPT(text.vocabulary)
        began = time.perf_counter()
        train(dense, text.batches(options.dense_steps, seed), 3e-3)
        seconds = time.perf_counter() - began
        found = [(1.0, {"way": "dense", "perplexity": perplexity(dense, text), "seconds": seconds})]
        for density in options.densities:
            rows = study(text, density, seed, dense, options.steps)
            found += [(density, row) for row in rows]
        for density, row in found:
            report({"seed": seed, "density": density, **row}, options.output)


if __name__ == "__main__":
    main()
