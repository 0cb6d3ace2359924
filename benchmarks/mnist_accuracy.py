"""Accuracy tables of docs/results.md and docs/mnist.md: `dynsparse mnist` by setting and seed.

    python benchmarks/mnist_accuracy.py --data-dir DIR [--seeds 0 1 2] [--table NAME ...] [--jobs 2]

Each run is one call of the command, with one thread. Prints a Markdown table per group with the
mean test accuracy over the seeds, and the smallest and largest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BLOCK = ("--block-size", "16", "--densities", "0.1", "1", "--pooling-type", "SUM")

TABLES: dict[str, dict[str, tuple[str, ...]]] = {
    "two sparse layers": {
        "RigL, densities 0.1 / 0.3": ("--densities", "0.1", "0.3"),
        "dense": ("--method", "dense"),
    },
    "methods at densities 0.01 / 0.1": {
        name: ("--densities", "0.01", "0.1", "--method", name) for name in ("rigl", "set", "static")
    },
    "blocks of 16 in the first layer, densities 0.1 / 1": {
        f"--permute-input {kind}": (*BLOCK, "--permute-input", kind)
        for kind in ("none", "block", "random")
    },
    "data types, densities 0.1 / 0.3, 3 epochs": {
        kind: ("--epochs", "3", "--data-type", kind) for kind in ("float32", "bfloat16", "float16")
    },
}


def run(flags: tuple[str, ...], seed: int, data_dir: Path) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, "-m", "dynsparse.cli", "mnist", "--dataset", "mnist",
                   "--data-dir", str(data_dir), "--seed", str(seed), "--threads", "1",
                   "--json", str(result), *flags]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--table", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    everything = {}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for title in arguments.table:
            runs = {
                name: [pool.submit(run, flags, s, arguments.data_dir) for s in arguments.seeds]
                for name, flags in TABLES[title].items()
            }
            print(f"\n{title}, {len(arguments.seeds)} seeds\n")
            print("| | test accuracy, mean | smallest and largest | density |\n|---|---|---|---|")
            for name, futures in runs.items():
                results = [future.result() for future in futures]
                values = [100 * result["accuracy"] for result in results]
                print(
                    f"| {name} | {statistics.mean(values):.2f} % "
                    f"| {min(values):.2f} to {max(values):.2f} % | {results[0]['density']:.3f} |",
                    flush=True,
                )
                everything[f"{title}: {name}"] = results
    if arguments.json:
        arguments.json.write_text(json.dumps(everything, indent=2) + "\n")


if __name__ == "__main__":
    main()
