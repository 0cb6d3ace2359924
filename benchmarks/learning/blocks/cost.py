"""What the flags for large blocks cost: steps of trainings with and without them, in turn.

    python benchmarks/learning/blocks/cost.py --data input.txt --block 32 --steps 600

Each round is one step of each training, in a new random order. `plain again` is a second training
like `plain`: the deviation of its ratio from 1 is the measurement error.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

import torch

from dynsparse.apps.common.training import Sums
from dynsparse.apps.lm.corpus import load_corpus
from dynsparse.apps.lm.options import Options
from dynsparse.apps.lm.training import Training

WITH = {"interleave_heads": True, "match_blocks": True, "prune_rounding": "down"}
TRAININGS = {"plain": {}, "plain again": {}, "with the flags": WITH}


def ratio_of_medians(
    times: list[float], others: list[float], draw: random.Random
) -> tuple[float, float, float]:
    """The ratio, and its 95 % bootstrap interval over rounds."""
    pairs = list(zip(times, others, strict=True))

    def ratio(chosen: list[tuple[float, float]]) -> float:
        a, b = zip(*chosen, strict=True)
        return statistics.median(a) / statistics.median(b)

    drawn = sorted(ratio(draw.choices(pairs, k=len(pairs))) for _ in range(1000))
    return ratio(pairs), drawn[25], drawn[-26]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--sequence", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    trainings = {}
    for name, flags in TRAININGS.items():
        options = Options(
            data=arguments.data,
            method="rigl",
            block_size=arguments.block,
            hidden_size=arguments.hidden_size,
            ff_size=4 * arguments.hidden_size,
            batch_size=16,
            sequence_length=arguments.sequence,
            sparsity=0.9,
            **flags,
        )
        trainings[name] = Training(options, load_corpus(options), seed=0)
    sums = {name: Sums() for name in trainings}
    times: dict[str, list[float]] = {name: [] for name in trainings}
    draw = random.Random(0)
    for number in range(arguments.steps + 10):
        for name in draw.sample(list(trainings), len(trainings)):
            begin = time.perf_counter()
            trainings[name]._train_step(sums[name])
            if number >= 10:
                times[name].append(time.perf_counter() - begin)
    for name in list(trainings)[1:]:
        ratio, low, high = ratio_of_medians(times[name], times["plain"], draw)
        whole = sum(times[name]) / sum(times["plain"])
        print(f"{name}: {ratio:.3f} ({low:.3f} to {high:.3f}) of a step, {whole:.3f} of the sum")
    print(f"a plain step: {1000 * statistics.median(times['plain']):.2f} ms")


if __name__ == "__main__":
    main()
