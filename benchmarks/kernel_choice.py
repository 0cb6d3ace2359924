"""The cost model that chooses kernels (dynsparse.ops.linear.cost_table): measure, fit, check.

    python benchmarks/kernel_choice.py measure times.jsonl      # about five minutes; adds lines
    python benchmarks/kernel_choice.py fit times.jsonl          # prints the constants
    python benchmarks/kernel_choice.py check times.jsonl        # the choice against best and dense

Times are medians in one process, all kinds in turn, without autograd; dense is torch's own products
with a dense weight. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import nnls
from torch.nn.functional import linear

from dynsparse import SparsePattern
from dynsparse.ops.linear import LayerIndex, cost_table
from dynsparse.ops.linear.cost_table import Cost, Layer, family
from dynsparse.ops.linear.cpu import KERNELS
from dynsparse.ops.linear.tuning import terms

PASSES = {kind: KERNELS[kind] for kind in ("sparse", "small", "dense")}
LAYERS = [(64, 64), (10, 320), (256, 256), (300, 784), (1024, 1024), (4096, 4096)]
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 512, 2048]
DENSITIES = [0.01, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0]
BLOCKS = [1, 4, 8, 16, 32, 64, 128]
MOST_WORK = 6e9  # multiply-adds of the dense product; larger cells follow from smaller ones


def medians(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Nanoseconds of each call. Calls far slower than the fastest run only three times."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 3 or (time.perf_counter() < end and rounds < 100):
        best = min((min(t) for t in times.values() if t), default=0.0)
        for name, call in calls.items():
            if rounds >= 3 and min(times[name]) > 4 * best:
                continue
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
        rounds += 1
    return {name: statistics.median(t) * 1e9 for name, t in times.items()}


def cell(out: int, width: int, block: int, density: float, batch: int, seconds: float) -> dict:
    pattern = SparsePattern.random((out, width), density, block_size=block)
    values = torch.randn(pattern.values_shape)
    weight = pattern.to_dense(values).contiguous()
    p, bias = LayerIndex(pattern.index, values), torch.randn(out)
    x, dy = torch.randn(batch, width), torch.randn(batch, out)
    kinds = {
        k: m
        for k, m in PASSES.items()
        if k != "small" or (block in cost_table.SMALL_BLOCKS and batch <= cost_table.MOST_SAMPLES)
    }
    forward = {k: lambda m=m: m.forward(x, values, p, bias) for k, m in kinds.items()}
    backward = {k: lambda m=m: m.backward(dy, x, values, p, True, True) for k, m in kinds.items()}
    forward["torch"] = lambda: linear(x, weight, bias)
    backward["torch"] = lambda: (dy @ weight, dy.t() @ x)
    return {
        "layer": [out, width, pattern.nnz, block],
        "batch": batch,
        "threads": torch.get_num_threads(),
        "times": [medians(forward, seconds), medians(backward, seconds)],
    }


def measure(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    layers = [tuple(map(int, text.split("x"))) for text in args.layers] or LAYERS
    with args.file.open("a") as file:
        for (out, width), block, density, batch in itertools.product(
            layers, args.blocks, args.densities, args.batches
        ):
            if out % block or width % block or out * width * batch > MOST_WORK:
                continue
            print(json.dumps(cell(out, width, block, density, batch, args.seconds)), file=file)
            file.flush()


def read(path: Path) -> list[dict]:
    cells = [json.loads(line) for line in path.read_text().splitlines()]
    for found in cells:
        found["layer"] = Layer(*found["layer"])
    return cells


def fit(args: argparse.Namespace) -> None:
    rows: dict[tuple[str, int], list[tuple[Layer, int, float]]] = defaultdict(list)
    for found in read(args.file):
        if found["threads"] != 1:
            continue
        for backward, times in enumerate(found["times"]):
            for kind, t in times.items():
                # A full pattern is not converted to dense, so it needs no model.
                if kind != "torch" and not (kind == "dense" and cost_table.is_full(found["layer"])):
                    name = family(kind, found["layer"].block_size)
                    rows[name, backward].append((found["layer"], found["batch"], t))
    for (name, backward), cells in sorted(rows.items()):
        fits = []
        for least in (0, 2, 4, 8, 16, 32):
            # Relative errors: every row is divided by its time.
            matrix = np.array([np.divide(terms(name, at, b, least), t) for at, b, t in cells])
            found, _ = nnls(matrix, np.ones(len(cells)))
            error = np.abs(np.log(np.maximum(matrix @ found, 1e-9)))
            fits.append((error.mean(), least, found))
        error, least, (call, feature, entry, sample, far) = min(fits, key=lambda f: f[0])
        feature, entry, sample, far = (round(float(c), 4) for c in (feature, entry, sample, far))
        made = Cost(round(call), feature, entry, sample, least, far)
        print(f"{name:12} {'backward' if backward else 'forward':9} {made}  # error {error:.0%}")


def check(args: argparse.Namespace) -> None:
    for backward, name in enumerate(("forward", "backward")):
        found = []
        for c in read(args.file):
            times, layer = c["times"][backward], c["layer"]
            kind = cost_table.choose(layer, c["batch"], bool(backward))
            best = min(t for k, t in times.items() if k != "torch")
            taken = times.get(kind, float("inf"))  # small is not measured for large batches
            found.append((taken / best, taken / times["torch"], kind, c))
        above = np.array([f[0] for f in found])
        against = np.array([f[1] for f in found])
        print(
            f"{name}: over the best kind {above.mean() - 1:.1%} on average, at most "
            f"{above.max() - 1:.0%}; slower than dense by more than 10 % in "
            f"{(against > 1.1).sum()} of {len(found)} cells"
        )
        for _, ratio, kind, c in sorted(found, key=lambda f: -f[1])[: args.worst]:
            layer = c["layer"]
            density = layer.nnz * layer.block_size**2 / (layer.out_features * layer.in_features)
            print(
                f"  {ratio:5.2f} of dense  {layer.out_features}x{layer.in_features} block "
                f"{layer.block_size} density {density:.2f} batch {c['batch']} "
                f"threads {c['threads']}: {kind}, "
                + ", ".join(f"{k} {t / 1e3:.0f} us" for k, t in c["times"][backward].items())
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["measure", "fit", "check"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", nargs="*", default=[], help="OUTxIN")
    parser.add_argument("--blocks", nargs="*", type=int, default=BLOCKS)
    parser.add_argument("--densities", nargs="*", type=float, default=DENSITIES)
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.02, help="time per cell and pass")
    parser.add_argument("--worst", type=int, default=10, help="how many cells `check` lists")
    args = parser.parse_args()
    {"measure": measure, "fit": fit, "check": check}[args.action](args)


if __name__ == "__main__":
    main()
