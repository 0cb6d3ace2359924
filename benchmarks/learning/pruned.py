"""A GPT, pruned, repaired and fine-tuned with and without pattern updates.

    python benchmarks/learning/pruned.py --data input.txt --densities 0.3 0.2 0.1 --seeds 0 1 2 \
        --output results.jsonl
    python benchmarks/learning/pruned.py --data novels.txt --bpe gpt2-bpe --size 10M \
        --dense-steps 2500 --checkpoint dense.pt --seeds 0 --output results.jsonl

Trains one dense model per seed, prunes it, and prints a line of JSON for each method: the test
perplexity after pruning, after `training.repair`, and after --steps steps of fine-tuning the whole
model. "masked" fine-tunes a dense model with masks of Wanda's pattern, for as many steps as the
repair takes per block. --times compares the times of fine-tuning steps instead: a line per density
with the time of a masked and of a dense step relative to a sparse one.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import dynsparse as ds
from dynsparse.bench.timing import Effort, measure
from dynsparse.data.text import load_gpt2

CALIBRATION = 16  # batches
EPOCHS = 5  # of the repair
TEST_TOKENS = 51_200


@dataclass(frozen=True)
class Size:
    """Sizes of a model and its batches; learning rates of dense training and fine-tuning."""

    features: int
    heads: int
    layers: int
    length: int
    batch: int
    rate: float
    tuning_rate: float


SIZES = {"0.6M": Size(128, 4, 3, 64, 16, 3e-3, 1e-3), "10M": Size(320, 5, 8, 256, 4, 1e-3, 3e-4)}


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        features, self.heads = size.features, size.heads
        self.norms = nn.ModuleList([nn.LayerNorm(features) for _ in range(2)])
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.up, self.down = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], self.heads, x.shape[2] // self.heads)
        q, k, v = (p.view(heads).transpose(1, 2) for p in self.qkv(self.norms[0](x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, size: Size) -> None:
        super().__init__()
        features = size.features
        self.tokens = nn.Embedding(vocabulary, features)
        self.positions = nn.Parameter(0.02 * torch.randn(size.length, features))
        self.blocks = nn.ModuleList([Block(size) for _ in range(size.layers)])
        self.norm, self.head = nn.LayerNorm(features), nn.Linear(features, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Text:
    """Tokens: characters, or GPT-2's first BPE merges. The last tenth is the test set."""

    def __init__(self, path: Path, size: Size, bpe: Path | None = None, merges: int = 4096) -> None:
        text = path.read_text()
        if bpe is None:
            characters = {c: i for i, c in enumerate(sorted(set(text)))}
            ids, self.vocabulary = torch.tensor([characters[c] for c in text]), len(characters)
        else:
            ids = torch.from_numpy(load_gpt2(bpe, merges).encode(text).astype("int64"))
            self.vocabulary = merges
        cut = len(ids) * 9 // 10
        self.size, self.train, self.test = size, ids[:cut], ids[cut:]

    def batches(self, count: int, seed: int) -> list[Tensor]:
        """[batch, length + 1] each."""
        g, length = torch.Generator().manual_seed(seed), self.size.length
        starts = torch.randint(len(self.train) - length, (count, self.size.batch), generator=g)
        return [torch.stack([self.train[i : i + length + 1] for i in row]) for row in starts]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def perplexity(model: nn.Module, text: Text) -> float:
    length = text.size.length
    windows = text.test.unfold(0, length + 1, length)[: TEST_TOKENS // length]
    losses = [loss_of(model, batch) for batch in windows.split(6400 // length)]
    return math.exp(float(torch.stack(losses).mean()))


def train(
    model: nn.Module,
    batches: list[Tensor],
    rate: float,
    after: Callable[[torch.optim.Optimizer], Callable[[], object]] | None = None,
) -> None:
    """Train by AdamW with a cosine schedule.

    Args:
        after: makes the function that replaces the optimizer's step.
    """
    optimizer = torch.optim.AdamW(ds.param_groups(model, weight_decay=0.01), rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    step = optimizer.step if after is None else after(optimizer)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        step()
        schedule.step()


def fine_tune(model: nn.Module, batches: list[Tensor], method: str, rate: float) -> None:
    """Fine-tune with a fixed pattern, or with about 20 updates that start at 5 % of the weights."""
    kinds = {"static": ds.Static, "SET": ds.SET, "RigL": ds.RigL}
    moving = {} if method == "static" else {
        "total_steps": len(batches), "update_interval": max(1, len(batches) // 25),
        "drop_fraction": 0.05,
    }  # fmt: skip
    train(model, batches, rate, lambda optimizer: kinds[method](model, optimizer, **moving).step)


def masked_step(model: nn.Module) -> Callable[[torch.optim.Optimizer], Callable[[], None]]:
    """Make the layers dense; the returned factory makes steps that zero the absent weights."""
    masks = {
        name: layer.pattern.to_mask()
        for name, layer in model.named_modules()
        if isinstance(layer, ds.nn.SparseLinear)
    }
    ds.densify(model)

    def after(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            optimizer.step()
            with torch.no_grad():
                for name, mask in masks.items():
                    model.get_submodule(name).weight.mul_(mask)

        return step

    return after


def step_times(text: Text, density: float, dense: nn.Module) -> dict[str, list[float]]:
    """Time of a masked and a dense step relative to a sparse one: quartiles and median."""
    models = {name: copy.deepcopy(dense) for name in ("sparse", "masked", "dense")}
    for name in ("sparse", "masked"):
        ds.sparsify(models[name], density, start="magnitude", allocation="uniform", verbose=False)
    after = {"masked": masked_step(models["masked"])}
    batch = text.batches(1, 0)[0]

    def work(name: str) -> Callable[[], None]:
        model = models[name]
        optimizer = torch.optim.AdamW(
            ds.param_groups(model, weight_decay=0.01), text.size.tuning_rate
        )
        step = after[name](optimizer) if name in after else optimizer.step

        def run() -> None:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            step()

        return run

    ratios = measure({name: work(name) for name in models}, "sparse", Effort(seconds=20)).ratios
    return {name: [r.low, r.median, r.high] for name, r in ratios.items()}


def study(
    text: Text, density: float, seed: int, dense: nn.Module, steps: int
) -> Iterator[dict[str, object]]:
    """The result of each method: {"way", "perplexity", "seconds"}."""
    calibration = text.batches(CALIBRATION, 1000 + seed)
    inputs, rate = [batch[:, :-1] for batch in calibration], text.size.tuning_rate

    def row(way: str, model: nn.Module, began: float) -> dict[str, object]:
        seconds = time.perf_counter() - began
        return {"way": way, "perplexity": perplexity(model, text), "seconds": seconds}

    for start in ("magnitude", "wanda", "sparsegpt"):
        began, pruned = time.perf_counter(), copy.deepcopy(dense)
        ds.sparsify(pruned, density, start=start, allocation="uniform", verbose=False,
                    calibration=None if start == "magnitude" else inputs)  # fmt: skip
        yield row(start, pruned, began)
        began, repaired = time.perf_counter(), copy.deepcopy(pruned)
        ds.training.repair(repaired, dense, inputs, epochs=EPOCHS, lr=3e-3, verbose=False)
        yield row(f"{start}, repair", repaired, began)
        if start != "wanda":
            continue
        began, masked = time.perf_counter(), copy.deepcopy(pruned)
        train(masked, calibration * EPOCHS, rate, masked_step(masked))
        yield row("wanda, masked fine-tuning on the calibration data", masked, began)
        batches = text.batches(steps, 2000 + seed)
        for method in ("static", "SET", "RigL"):
            began, tuned = time.perf_counter(), copy.deepcopy(repaired)
            fine_tune(tuned, batches, method, rate)
            yield row(f"wanda, repair, fine-tuning {method}", tuned, began)


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
    parser.add_argument("--bpe", type=Path, help="a folder with GPT-2's vocab.bpe, or characters")
    parser.add_argument("--size", choices=SIZES, default="0.6M", help="parameters in the blocks")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.3, 0.2, 0.1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--dense-steps", type=int, default=900)
    parser.add_argument("--steps", type=int, default=200, help="steps of fine-tuning")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="one dense model for all seeds: read if it exists, otherwise written",
    )
    parser.add_argument("--times", action="store_true", help="measure step times instead")
    parser.add_argument("--output", type=Path, help="also append the JSON lines to this file")
    options = parser.parse_args()
    size = SIZES[options.size]
    text = Text(options.data, size, options.bpe)
    if options.times:
        for density in options.densities:
            row = step_times(text, density, GPT(text.vocabulary, size))
            report({"density": density, **row}, options.output)
        return
    for seed in options.seeds:
        torch.manual_seed(seed)
        dense = GPT(text.vocabulary, size)
        began = time.perf_counter()
        if options.checkpoint and options.checkpoint.exists():
            dense.load_state_dict(torch.load(options.checkpoint))
        else:
            train(dense, text.batches(options.dense_steps, seed), size.rate)
            if options.checkpoint:
                torch.save(dense.state_dict(), options.checkpoint)
        seconds = time.perf_counter() - began
        row = {"way": "dense", "perplexity": perplexity(dense, text), "seconds": seconds}
        report({"seed": seed, "density": 1.0, **row}, options.output)
        for density in options.densities:
            for row in study(text, density, seed, dense, options.steps):
                report({"seed": seed, "density": density, **row}, options.output)


if __name__ == "__main__":
    main()
