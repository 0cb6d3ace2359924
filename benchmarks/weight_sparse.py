"""A training step of examples/weight_sparse_gpt.py: the rule of Gao et al. 2025 on dense matrices
beside RigL in sparse storage, in turn in one process.

    python benchmarks/weight_sparse.py --widths 1024 4096 --densities 0.01 0.001
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import weight_sparse_gpt as example


def step_of(method: str, density: float, width: int, layers: int) -> Callable[[], None]:
    """A step late in the training, at the final density."""
    torch.manual_seed(0)
    model, trainer = example.make(method, density, 1000, width, layers, 16, 0.25)
    if method == "keep":
        trainer.steps = 900
    tokens = torch.randint(256, (example.BATCH, example.LENGTH + 1))

    def step() -> None:
        loss = model(tokens)
        trainer.optimizer.zero_grad()
        loss.backward()
        trainer.step()

    return step


def compare(width: int, layers: int, density: float, rounds: int) -> dict[str, float]:
    """Median milliseconds of both; smallest and largest ratio of a round."""
    steps = {method: step_of(method, density, width, layers) for method in ("keep", "rigl")}
    times: dict[str, list[float]] = {method: [] for method in steps}
    for i in range(rounds + 1):
        for method, step in steps.items():
            begin = time.perf_counter()
            step()
            if i:
                times[method].append((time.perf_counter() - begin) * 1e3)
    ratios = [a / b for a, b in zip(times["keep"], times["rigl"], strict=True)]
    return {
        "width": width, "density": density, "threads": torch.get_num_threads(),
        **{f"{method}_ms": statistics.median(t) for method, t in times.items()},
        "ratio": statistics.median(ratios), "least": min(ratios), "largest": max(ratios),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--densities", type=float, nargs="+", default=[0.01, 0.001])
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for width in args.widths:
        for density in args.densities:
            rows.append(compare(width, args.layers, density, args.rounds))
            print(json.dumps(rows[-1]), flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
