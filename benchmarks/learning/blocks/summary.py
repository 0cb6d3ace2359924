"""The table and the picture of docs/blocks-and-order.md, from the lines that run.py wrote.

python benchmarks/learning/blocks/summary.py RESULTS.jsonl --block 32 --picture PICTURE.png
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def finals(rows: list[Row], variant: str, block: int) -> dict[int, float]:
    """Seed -> the validation loss at the end."""
    return {r["seed"]: r["final"] for r in rows if (r["variant"], r["block"]) == (variant, block)}


def closed(own: dict[int, float], plain: dict[int, float], single: dict[int, float]) -> str:
    """The share of the gap between plain blocks and elements that is closed, in the mean of the
    seeds that all three have."""
    seeds = [seed for seed in own if seed in plain and seed in single]
    if not seeds:
        return ""
    gap = sum(plain[seed] - single[seed] for seed in seeds)
    share = sum(plain[seed] - own[seed] for seed in seeds) / gap
    return f"{100 * share:.0f} % ({', '.join(map(str, sorted(seeds)))})"


def table(rows: list[Row], block: int) -> str:
    plain, single = finals(rows, "plain", block), finals(rows, "plain", 1)
    lines = [
        "| blocks | seeds | by seed | mean | of the gap closed (seeds) |",
        "|---|---|---|---|---|",
    ]
    named = {"elements": single}
    for row in rows:
        if row["block"] == block:
            named.setdefault(row["variant"], finals(rows, row["variant"], block))
    for name, found in named.items():
        by_seed = ", ".join(f"{found[seed]:.4f}" for seed in sorted(found))
        share = "" if name in ("elements", "plain") else closed(found, plain, single)
        mean = statistics.mean(found.values())
        lines.append(f"| {name} | {len(found)} | {by_seed} | {mean:.4f} | {share} |")
    return "\n".join(lines)


def draw(rows: list[Row], block: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    names = ["plain", *dict.fromkeys(r["variant"] for r in rows if r["block"] == block)]
    names = ["elements", *dict.fromkeys(names)]
    for place, name in enumerate(names):
        one = finals(rows, "plain", 1) if name == "elements" else finals(rows, name, block)
        for seed, loss in one.items():
            axis.plot(loss, place, "o", color=f"C{seed}", label=f"seed {seed}")
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set(xlabel="validation loss at the end, nats", title=f"Blocks of {block}")
    handles, labels = axis.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axis.legend(unique.values(), unique.keys())
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.results.read_text().splitlines()]
    print(table(rows, arguments.block))
    if arguments.picture is not None:
        draw(rows, arguments.block, arguments.picture)


if __name__ == "__main__":
    main()
