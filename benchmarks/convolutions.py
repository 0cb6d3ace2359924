"""Training steps of 3x3 convolutions beside masked dense ones, channels last, float32.

    python benchmarks/convolutions.py [--threads 2] [--batch 32] [--rounds 9] [--layers wrn]
        [--cases 0.1:1 0.02:1 0.1:16] [--json FILE]

A step is forward and all gradients, through autograd. The masked layer is `nn.Conv2d` with its
weight times a mask, in oneDNN's channels-last layout. All contenders take turns in one process.
Figures are medians; the spread of a ratio is the quartiles over rounds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import dynsparse as ds
from dynsparse.bench.timing import Effort, measure

LAYERS = {  # name -> channels, height and width
    "wrn-22-2 32x32": (32, 32),
    "wrn-22-2 16x16": (64, 16),
    "wrn-22-2 8x8": (128, 8),
    "resnet-50 56x56": (64, 56),
    "resnet-50 28x28": (128, 28),
    "resnet-50 14x14": (256, 14),
    "resnet-50 7x7": (512, 7),
}
LAST = torch.channels_last


def masked_step(
    channels: int, density: float, x: torch.Tensor, dy: torch.Tensor
) -> Callable[[], None]:
    layer = nn.Conv2d(channels, channels, 3, padding=1, bias=False).to(memory_format=LAST)
    mask = (torch.rand_like(layer.weight) < density).float()

    def step() -> None:
        x.grad = layer.weight.grad = None
        F.conv2d(x, layer.weight * mask, None, 1, 1).backward(dy)

    return step


def sparse_step(
    channels: int, density: float, block: int, x: torch.Tensor, dy: torch.Tensor
) -> Callable[[], None]:
    layer = ds.nn.SparseConv2d(
        channels, channels, 3, padding=1, bias=False, density=density, block_size=block
    )

    def step() -> None:
        x.grad = layer.values.grad = None
        layer(x).backward(dy)

    return step


def measure_layer(name: str, batch: int, cases: list[tuple[float, int]], rounds: int) -> list[dict]:
    channels, size = LAYERS[name]
    x = torch.randn(batch, channels, size, size).contiguous(memory_format=LAST).requires_grad_()
    dy = torch.randn(batch, channels, size, size).contiguous(memory_format=LAST)
    works = {"masked": masked_step(channels, cases[0][0], x, dy)}
    for density, block in cases:
        works[f"{density}:{block}"] = sparse_step(channels, density, block, x, dy)
    timing = measure(works, "masked", Effort(seconds=0, rounds=rounds))
    rows = []
    for density, block in cases:
        sparse, ratio = (part[f"{density}:{block}"] for part in (timing.times, timing.ratios))
        rows.append({
            "layer": name, "channels": channels, "batch": batch, "density": density,
            "block": block, "masked_ms": 1e3 * timing.times["masked"].median,
            "sparse_ms": 1e3 * sparse.median, "ratio": 1 / ratio.median, "low": 1 / ratio.high,
            "high": 1 / ratio.low,
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", default="", help="only layers whose name starts with this")
    parser.add_argument("--cases", nargs="+", default=["0.1:1", "0.02:1", "0.1:16"],
                        help="density:block")  # fmt: skip
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cases = [(float(d), int(b)) for d, _, b in (case.partition(":") for case in options.cases)]
    found = []
    print("layer            density  block   masked    sparse   ratio")
    for name in (n for n in LAYERS if n.startswith(options.layers)):
        for row in measure_layer(name, options.batch, cases, options.rounds):
            found.append(row)
            print(
                f"{name:16} {row['density']:7} {row['block']:6} {row['masked_ms']:7.1f} ms "
                f"{row['sparse_ms']:6.1f} ms   {row['ratio']:.1f} "
                f"({row['low']:.1f} to {row['high']:.1f})",
                flush=True,
            )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
