"""How much of a trained matrix a tenth of its blocks holds, by the order of rows and columns.

python benchmarks/learning/blocks/run.py --block 1 --variants plain --seeds 0 --save weights.pt ...
python benchmarks/learning/blocks/clusters.py weights.pt --blocks 16 32
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from cuts import best_cut, block_sums, by_size
from torch import Tensor


def held(scores: Tensor, block: int, share: float) -> dict[str, float]:
    """Name of an order -> the share of `scores` in the best blocks."""
    count = max(1, round(share * scores.numel() / block**2))
    draw = torch.Generator().manual_seed(0)
    shuffled = scores.flatten()[torch.randperm(scores.numel(), generator=draw)].view_as(scores)
    random = scores[torch.randperm(len(scores), generator=draw)]
    random = random[:, torch.randperm(scores.shape[1], generator=draw)]
    inputs, outputs = by_size(scores)

    def of(matrix: Tensor) -> float:
        return float(block_sums(matrix, block).flatten().topk(count).values.sum() / scores.sum())

    single = scores.flatten().topk(count * block**2).values.sum() / scores.sum()
    return {
        "single weights": float(single),
        "as they come": of(scores),
        "random order": of(random),
        "by size": of(scores[outputs][:, inputs]),
        "best cut": best_cut(scores, block, count)[2] / float(scores.sum()),
        "best cut, shuffled weights": best_cut(shuffled, block, count)[2] / float(scores.sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--density", type=float, default=0.1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    weights = torch.load(arguments.weights)
    for block in arguments.blocks:
        rows = [held(w.abs(), block, arguments.density) for w in weights.values()]
        for name in rows[0]:
            print(f"| {block} | {name} | {statistics.mean(row[name] for row in rows):.3f} |")


if __name__ == "__main__":
    main()
