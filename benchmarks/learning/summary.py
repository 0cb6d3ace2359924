"""The tables and the picture of docs/why-rigl.md, from the lines that run.py wrote.

python benchmarks/learning/summary.py RESULTS.jsonl --picture PICTURE.png
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def loss(row: Row) -> float:
    """The validation loss at the end."""
    return row["valid"][-1][1]


def label(name: str) -> str:
    """As people write it."""
    method, comma, changes = name.partition(", ")
    return {"rigl": "RigL", "set": "SET"}.get(method, method) + comma + changes


def table(rows: list[Row], against: str) -> str:
    """Markdown: the mean at the end, and the difference to a variant, seed by seed."""
    base = losses_by_seed(rows, against)
    lines = [
        "| variant | seeds | validation loss, mean (least to largest) "
        f"| less {label(against)}'s, by seed | test loss |",
        "|---|---|---|---|---|",
    ]
    names = list(dict.fromkeys(row["variant"] for row in rows))
    for name in sorted(names, key=lambda n: statistics.mean(_losses(rows, n))):
        own = sorted((r for r in rows if r["variant"] == name), key=lambda r: r["seed"])
        found = [loss(row) for row in own]
        less = [
            f"{loss(row) - base[row['seed']]:+.4f} ({row['seed']})"
            for row in own
            if row["seed"] in base and name != against
        ]
        lines.append(
            f"| {label(name)} | {len(own)} | {statistics.mean(found):.4f} "
            f"({min(found):.4f} to {max(found):.4f}) | {', '.join(less)} | "
            f"{statistics.mean(row['test'] for row in own):.4f} |"
        )
    return "\n".join(lines)


def _losses(rows: list[Row], name: str) -> list[float]:
    return list(losses_by_seed(rows, name).values())


def losses_by_seed(rows: list[Row], name: str) -> dict[int, float]:
    return {row["seed"]: loss(row) for row in rows if row["variant"] == name}


def verdict(gains: list[float], gap: float) -> str:
    """Whether a change explains why RigL ends above SET, by a rule that was written down before
    the runs.

    Args:
        gains: RigL's loss less that with the change, by seed; at least two.
        gap: RigL's mean loss less SET's.

    "not refuted": the mean gain is half the gap or more, and above 0 by more than its standard
    error. "refuted": it is below half the gap by more than its standard error. Else "undecided".
    """
    mean = statistics.mean(gains)
    error = statistics.stdev(gains) / len(gains) ** 0.5
    if mean >= gap / 2 and mean > error:
        return "not refuted"
    return "refuted" if mean + error < gap / 2 else "undecided"


def verdicts(rows: list[Row], base: str = "rigl", aim: str = "set") -> str:
    """Markdown: what every change of RigL gains, and its verdict."""
    own, other = losses_by_seed(rows, base), losses_by_seed(rows, aim)
    gap = statistics.mean(own[seed] - other[seed] for seed in own.keys() & other.keys())
    found = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        changed = losses_by_seed(rows, name)
        gains = [own[seed] - changed[seed] for seed in sorted(own.keys() & changed.keys())]
        if name.startswith(f"{base}, ") and len(gains) > 1:
            found.append((statistics.mean(gains), name.partition(", ")[2], gains))
    lines = ["| change | gain, mean and its standard error | seeds that gain | verdict |",
             "|---|---|---|---|"]  # fmt: skip
    for mean, change, gains in sorted(found, reverse=True):
        error = statistics.stdev(gains) / len(gains) ** 0.5
        below = sum(gain > 0 for gain in gains)
        lines.append(
            f"| {change} | {mean:+.4f} ({error:.4f}) | {below} of {len(gains)} | "
            f"{verdict(gains, gap)} |"
        )
    return "\n".join(lines)


def noise(rows: list[Row]) -> dict[str, list[list[float]]]:
    """From the number of batches to [share of the growth that is the same, rank correlation], a
    pair per measured update; the mean over layers."""
    found: dict[str, list[list[float]]] = {}
    for row in rows:
        layers = 12 * row["layers"] // 2
        for begin in range(0, len(row["noise"]), layers):
            group = row["noise"][begin : begin + layers]
            for count in group[0]:
                pair = [statistics.mean(layer[count][i] for layer in group) for i in (0, 1)]
                found.setdefault(str(count), []).append(pair)
    return found


def updates(rows: list[Row], name: str, key: str) -> tuple[list[int], list[float]]:
    """A figure of the updates over the training, the mean over seeds."""
    own = [row["updates"] for row in rows if row["variant"] == name]
    steps = [update["step"] for update in own[0]]
    return steps, [statistics.mean(u[i][key] for u in own) for i in range(len(steps))]


def draw(rows: list[Row], against: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    longest = max(row["steps"] for row in rows)
    long = [row for row in rows if row["steps"] == longest]
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")

    seen = noise(rows)
    counts = sorted((int(n) for n in seen if n != "0"), key=int)
    for at in range(len(seen["0"])):
        when = ("after 5 %", "20 %", "40 %", "60 % of the steps")[at % 4]
        axes[0, 0].plot(counts, [seen[str(n)][at][0] for n in counts], "o-", label=when)
    axes[0, 0].set(
        title="Share of the growth that 64 batches choose, too",
        xlabel="batches of 1,024 characters", ylabel="share", ylim=(0, 1), xscale="log",
    )  # fmt: skip
    axes[0, 0].set_xticks(counts, [str(n) for n in counts])

    for name in ("rigl", "set"):
        for key, style, words in (
            ("wasted", "-", "leaves at the next update"),
            ("known", "--", "had been there before"),
        ):
            steps, values = updates(long, name, key)
            steps, values = (steps, values) if key == "known" else (steps[1:], values[1:])
            axes[0, 1].plot(steps, values, style, label=f"{label(name)}: {words}")
    axes[0, 1].set(
        title="What becomes of the grown weights", xlabel="step", ylabel="share", ylim=(0, 1.3)
    )

    for name in ("rigl", "rigl, correlation", "set"):
        for key, style in (("inputs", "-"), ("outputs", "--")):
            steps, values = updates(long, name, key)
            axes[1, 0].plot(steps, values, style, label=f"{label(name)}: {key}")
    axes[1, 0].set(
        title="Features that the grown weights of an update spread over",
        xlabel="step", ylabel="effective share of all",
    )  # fmt: skip

    base = {row["seed"]: loss(row) for row in long if row["variant"] == against}
    names = [n for n in dict.fromkeys(row["variant"] for row in long) if n != against]
    for place, name in enumerate(names):
        less = [
            loss(row) - base[row["seed"]]
            for row in long
            if row["variant"] == name and row["seed"] in base
        ]
        axes[1, 1].plot(less, [place] * len(less), "o", alpha=0.7)
        axes[1, 1].plot([statistics.mean(less)] * 2, [place - 0.25, place + 0.25], "k-")
    axes[1, 1].axvline(0, color="grey", linewidth=1)
    axes[1, 1].set_yticks(range(len(names)), [label(name) for name in names])
    axes[1, 1].set(
        title=f"Validation loss, less {label(against)}'s by seed",
        xlabel="nats; left is better",
    )
    for axis in axes.flat[:3]:
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--against", default="set")
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.results.read_text().splitlines()]
    for steps in sorted({row["steps"] for row in rows}, reverse=True):
        print(f"\n{steps} steps\n")
        for percent in ("99 %", "97 %", ""):
            some = [
                row
                for row in rows
                if row["steps"] == steps
                and not row["noise"]
                and (percent in row["variant"] if percent else "%" not in row["variant"])
            ]
            if some:
                name = f"{arguments.against}, {percent}" if percent else arguments.against
                print(table(some, name), "\n")
    for count, pairs in noise(rows).items():
        print(count, "batches:", ", ".join(f"{share:.2f} ({rank:.2f})" for share, rank in pairs))
    if arguments.picture is not None:
        draw(rows, arguments.against, arguments.picture)


if __name__ == "__main__":
    main()
