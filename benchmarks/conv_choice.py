"""The cost model that chooses how a convolution is computed (dynsparse.ops.conv.choice).

    python benchmarks/conv_choice.py measure times.jsonl        # about two minutes; adds lines
    python benchmarks/conv_choice.py fit times.jsonl            # prints the constants
    python benchmarks/conv_choice.py check times.jsonl          # the choice against the faster way

Times are medians of CPU time on one thread, both ways in turn, without autograd, channels last. CPU
time is little affected by other work on the machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from dynsparse import SparsePattern
from dynsparse.ops.conv import choice
from dynsparse.ops.conv.geometry import Geometry
from dynsparse.ops.conv.products import KERNELS
from dynsparse.ops.linear import LayerIndex
from dynsparse.ops.linear.cost_table import Layer

LAST = torch.channels_last
# Channels in and out, kernel, stride, height and width of the input.
LAYERS = {
    "WRN-22-2 3x3": (32, 32, (3, 3), 1, (32, 32)),
    "WRN-22-2 3x3 late": (128, 128, (3, 3), 1, (8, 8)),
    "ResNet-50 3x3 a": (64, 64, (3, 3), 1, (56, 56)),
    "ResNet-50 3x3 b": (128, 128, (3, 3), 1, (28, 28)),
    "ResNet-50 3x3 b, stride 2": (128, 128, (3, 3), 2, (28, 28)),
    "ResNet-50 3x3 c": (256, 256, (3, 3), 1, (14, 14)),
    "ResNet-50 3x3 d": (512, 512, (3, 3), 1, (7, 7)),
    "ResNet-50 1x1 a": (64, 256, (1, 1), 1, (56, 56)),
    "ResNet-50 1x1 b": (512, 128, (1, 1), 1, (28, 28)),
    "ResNet-50 1x1 c": (256, 1024, (1, 1), 1, (14, 14)),
    "ResNet-50 1x1 d": (2048, 512, (1, 1), 1, (7, 7)),
    "1-D, 64 channels": (64, 64, (1, 3), 1, (1, 256)),
    "1-D, 256 channels": (256, 256, (1, 3), 1, (1, 512)),
    "1-D, 512 channels, stride 2": (512, 512, (1, 3), 2, (1, 400)),
}
BATCHES = [1, 2, 8, 32]
DENSITIES = [0.02, 0.1, 0.3, 0.6, 0.9]
BLOCKS = [1, 16]
MOST_WORK = 3e8  # multiply-adds of the dense product; larger cells follow from smaller ones


def medians(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Nanoseconds of CPU time of each call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.process_time() + seconds
    while min(map(len, times.values())) < 3 or time.process_time() < end:
        for name, call in calls.items():
            start = time.process_time_ns()
            call()
            times[name].append(time.process_time_ns() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def geometry_of(kernel: tuple[int, int], stride: int) -> Geometry:
    top, left = kernel[0] // 2, kernel[1] // 2
    steps = (stride if kernel[0] > 1 else 1, stride)
    return Geometry(kernel, steps, (top, left, top, left), (1, 1), 1)


def cell(name: str, block: int, density: float, batch: int, seconds: float) -> dict[str, Any]:
    wide, out, kernel, stride, size = LAYERS[name]
    g = geometry_of(kernel, stride)
    pattern = SparsePattern.random((out, wide * g.taps), density, block_size=block)
    values = torch.randn(pattern.values_shape)
    p = LayerIndex(pattern.index, values)
    x = torch.randn(batch, wide, *size).contiguous(memory_format=LAST)
    dy = torch.randn(batch, out, *g.output_size(*size)).contiguous(memory_format=LAST)
    forward = {k: partial(f.forward, x, values, p, None, g) for k, f in KERNELS.items()}
    backward = {k: partial(f.backward, dy, x, values, p, g, size, True) for k, f in KERNELS.items()}
    return {
        "name": name,
        "layer": [out, wide * g.taps, pattern.nnz, block],
        "batch": batch,
        "times": [medians(forward, seconds), medians(backward, seconds)],
    }


def measure(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with args.file.open("a") as file:
        for name, block, density, batch in itertools.product(
            args.layers, args.blocks, args.densities, args.batches
        ):
            wide, out, kernel, stride, size = LAYERS[name]
            places = geometry_of(kernel, stride).output_size(*size)
            work = wide * out * kernel[0] * kernel[1] * places[0] * places[1] * batch
            if work <= args.most_work or batch == 1:
                print(json.dumps(cell(name, block, density, batch, args.seconds)), file=file)
                file.flush()


def read(path: Path) -> list[dict[str, Any]]:
    cells = [json.loads(line) for line in path.read_text().splitlines()]
    for found in cells:
        found["layer"] = Layer(*found["layer"])
        _, _, kernel, stride, size = LAYERS[found["name"]]
        found["geometry"] = geometry_of(kernel, stride)
        found["size"] = found["geometry"].output_size(*size)
    return cells


def place(found: dict[str, Any]) -> tuple[Layer, Geometry, int, tuple[int, int]]:
    return found["layer"], found["geometry"], found["batch"], found["size"]


def fit(args: argparse.Namespace) -> None:
    rows: dict[tuple[str, int], list[tuple[tuple[float, ...], float]]] = defaultdict(list)
    for found in read(args.file):
        for backward, times in enumerate(found["times"]):
            for kind, t in times.items():
                at = choice.terms(kind, *place(found), bool(backward), choice.vector_width())
                rows[choice.family(kind, found["layer"].block_size), backward].append((at, t))
    for (name, backward), cells in sorted(rows.items()):
        # Relative errors: every row is divided by its time.
        matrix = np.array([np.divide(at, t) for at, t in cells])
        found, _ = nnls(matrix, np.ones(len(cells)))
        error = np.abs(np.log(np.maximum(matrix @ found, 1e-9))).mean()
        way = "backward" if backward else "forward"
        print(f"{name:16} {way:9} {tuple(float(f'{c:.3g}') for c in found)}  # error {error:.0%}")


def check(args: argparse.Namespace) -> None:
    for backward, way in enumerate(("forward", "backward")):
        found = []
        for c in read(args.file):
            kind = choice.cheapest_kind(*place(c), bool(backward), choice.vector_width())
            times = c["times"][backward]
            found.append((times[kind] / min(times.values()), kind, c))
        above = np.array([f[0] for f in found])
        print(
            f"{way}: over the faster way {above.mean() - 1:.1%} on average, at most "
            f"{above.max() - 1:.0%}; by more than 10 % in {(above > 1.1).sum()} of {len(found)}"
        )
        for ratio, kind, c in sorted(found, key=lambda f: -f[0])[: args.worst]:
            layer, times = c["layer"], c["times"][backward]
            density = layer.nnz * layer.block_size**2 / (layer.out_features * layer.in_features)
            print(
                f"  {ratio:5.2f}  {c['name']} block {layer.block_size} density {density:.2f} batch "
                f"{c['batch']}: {kind}, "
                + ", ".join(f"{k} {t / 1e3:.0f} us" for k, t in times.items())
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["measure", "fit", "check"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", nargs="*", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--blocks", nargs="*", type=int, default=BLOCKS)
    parser.add_argument("--densities", nargs="*", type=float, default=DENSITIES)
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES)
    parser.add_argument("--most-work", type=float, default=MOST_WORK, help="skip larger cells")
    parser.add_argument("--seconds", type=float, default=0.03, help="time per cell and pass")
    parser.add_argument("--worst", type=int, default=10, help="how many cells `check` lists")
    args = parser.parse_args()
    {"measure": measure, "fit": fit, "check": check}[args.action](args)


if __name__ == "__main__":
    main()
