"""Lines for docs/pictures/cifar-short.jsonl, from files of `dynsparse cifar --json`.

    python benchmarks/learning/cifar_lines.py METHOD-DENSITY-SEED.json ... > cifar-short.jsonl

The requested density is taken from the file name: the density in the file includes layers that stay
dense.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

KEPT = ("method", "seed", "epochs", "steps", "updates", "accuracy", "loss", "train_accuracy",
        "train_loss")  # fmt: skip


def line(path: Path) -> dict[str, Any]:
    """The figures of one training for the table, and a few more."""
    figures = json.loads(path.read_text())
    method, density, seed = path.stem.split("-")
    if (method, int(seed), "cifar-10") != tuple(figures[k] for k in ("method", "seed", "dataset")):
        raise SystemExit(
            f"expected {path} to be named METHOD-DENSITY-SEED.json after its training on cifar-10, "
            f"got {figures['method']}, seed {figures['seed']}, {figures['dataset']}"
        )
    return {
        "density": float(density),
        "weights": sum(layer["weights"] for layer in figures["layers"]),
        "parameters": figures["parameters"]["sparse"],
        **{key: figures[key] for key in KEPT},
    }


def main() -> None:
    found = [line(Path(name)) for name in sys.argv[1:]]
    order = {"static": 0, "set": 1, "rigl": 2}
    for made in sorted(found, key=lambda m: (-m["density"], order[m["method"]], m["seed"])):
        print(json.dumps(made))


if __name__ == "__main__":
    main()
