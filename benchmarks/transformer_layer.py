"""One training step of a whole transformer layer: sparse, against the same layer masked and dense.

A step is forward, backward (including the input's gradient) and Adam, of `SparseTransformerLayer`
with attention, norms, gelu, dropout and biases. Interleaved with it, in the same process with the
same threads, run:

- masked: the same layer with six matrices W * M and dense Adam;
- dense: the same layer without masks.

Each figure is the median over rounds of (other time / sparse time), with the quartiles.

    python benchmarks/transformer_layer.py --threads 1 --block-sizes 1 16
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from dynsparse.apps.common.training import replace_sparse
from dynsparse.bench.contenders import MaskedLinear, dense_layer
from dynsparse.bench.timing import spread
from dynsparse.nn import SparseTransformerLayer

Step = Callable[[], object]


def training_step(layer: nn.Module, x: Tensor, dy: Tensor, optimise: bool) -> Step:
    optimizer = torch.optim.Adam(layer.parameters(), fused=True)

    def step() -> object:
        x.grad = None
        layer(x).backward(dy)
        if optimise:
            optimizer.step()
        optimizer.zero_grad()
        return None

    return step


def contenders(arguments: argparse.Namespace, block_size: int) -> dict[str, Step]:
    def make() -> SparseTransformerLayer:
        return SparseTransformerLayer(
            arguments.features,
            arguments.heads,
            arguments.hidden,
            dropout=arguments.dropout,
            density=arguments.density,
            block_size=block_size,
            generator=torch.Generator().manual_seed(0),
        )

    shape = (arguments.tokens // arguments.length, arguments.length, arguments.features)
    dy = torch.randn(shape) / 100
    layers = {
        "sparse": make(),
        "masked": replace_sparse(make(), MaskedLinear),
        "dense": replace_sparse(make(), dense_layer),
    }
    return {
        name: training_step(
            layer, torch.randn(shape, requires_grad=True), dy, not arguments.no_optimizer
        )
        for name, layer in layers.items()
    }


def measure(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender in each round; the rounds interleave them.

    In a round each takes three steps in a row. The first is not counted: it reallocates memory that
    the previous contender returned to the system, which does not happen in training.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            step()
            begin = time.perf_counter()
            step()
            step()
            seconds[name].append((time.perf_counter() - begin) / 2)
    return seconds


def summary(seconds: dict[str, list[float]]) -> dict[str, object]:
    result: dict[str, object] = {"ms": round(1000 * statistics.median(seconds["sparse"]), 1)}
    for name, times in seconds.items():
        if name != "sparse":
            ratio = spread([t / own for t, own in zip(times, seconds["sparse"], strict=True)])
            quartiles = [round(ratio.low, 2), round(ratio.high, 2)]
            result[name] = {"ratio": round(ratio.median, 2), "quartiles": quartiles}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--features", type=int, default=768)
    parser.add_argument("--hidden", type=int, default=3072)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of all sequences together")
    parser.add_argument("--length", type=int, default=128, help="tokens of one sequence")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-optimizer", action="store_true", help="skip Adam's step")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.tokens % arguments.length:
        parser.error(f"--length must divide --tokens {arguments.tokens}, got {arguments.length}")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    results = {}
    for block_size in arguments.block_sizes:
        result = summary(measure(contenders(arguments, block_size), arguments.rounds))
        results[f"block {block_size}"] = result
        print(f"block {block_size:2d}: sparse {result['ms']} ms; masked {result['masked']}, "
              f"dense {result['dense']}", flush=True)  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
