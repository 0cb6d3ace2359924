"""Peak memory of one large sparse layer in training, pattern update included.

    python benchmarks/memory.py [--size 16384] [--density 0.01] [--batch 256] [--method rigl]

Each measurement runs in a fresh process: how far the peak of the resident memory (VmHWM) rises
above what is resident once everything is imported and a tiny layer has trained. Linux only. A dense
float32 weight of the same size, of which dense training holds four (weight, gradient, two moments
of Adam), is given beside.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
from pathlib import Path
from typing import Any

import torch

import dynsparse as ds

MB = 1e6


def resident(field: str) -> int:
    """A field of this process's status, in bytes: VmRSS now, VmHWM at its peak."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def warm_up() -> None:
    """What torch imports and starts only when it is first used: optimizers, threads, products."""
    layer = ds.nn.SparseLinear(64, 64)
    trainer = ds.RigL(layer, torch.optim.Adam(layer.parameters()), total_steps=4, update_interval=1)
    for _ in range(2):
        layer(torch.randn(8, 64)).square().mean().backward()
        trainer.step()


def train(args: argparse.Namespace) -> dict[str, Any]:
    """A few steps, some of which end in a pattern update; the peak after each."""
    if args.warm_up:
        warm_up()
    base = resident("VmRSS")
    layer = ds.nn.SparseLinear(
        args.size, args.size, density=args.density, block_size=args.block_size
    )
    optimizer = torch.optim.Adam(layer.parameters())
    options: dict[str, Any] = {"total_steps": 100, "update_interval": 2, "drop_fraction": 0.3}
    kinds = {"rigl": ds.RigL, "set": ds.SET}
    if args.method == "static":
        trainer: Any = ds.Static(layer, optimizer)
    else:
        trainer = kinds[args.method](layer, optimizer, **options)
    peaks = {"layer": resident("VmHWM") - base}
    x = torch.randn(args.batch, args.size, requires_grad=True)
    dy = torch.randn(args.batch, args.size)
    for step in range(1, 1 + args.steps):
        optimizer.zero_grad()
        x.grad = None
        layer(x).backward(dy)
        updated = trainer.step() is not None
        peaks[f"step {step}{' with update' * updated}"] = resident("VmHWM") - base
    return {"peaks": peaks, "updates": trainer.updates, "nnz": layer.pattern.nnz}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=16384)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--block-size", type=int, default=1)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--method", choices=["rigl", "set", "static"], default="rigl")
    parser.add_argument(
        "--no-warm-up",
        dest="warm_up",
        action="store_false",
        help="count the modules too that torch imports with the first optimizer (about 70 MB)",
    )
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result = pool.apply(train, (args,))
    for name, peak in result["peaks"].items():
        print(f"{name:24s} {peak / MB:8.1f} MB")
    dense = 4 * args.size**2
    peak = max(result["peaks"].values())
    print(f"peak growth {peak / MB:.1f} MB; one dense weight alone {dense / MB:.1f} MB")
    if args.json:
        args.json.write_text(json.dumps({**result, "dense_weight": dense, "peak": peak}, indent=1))


if __name__ == "__main__":
    main()
