"""The tables and the picture of docs/why-rigl.md, from the lines that run.py wrote.

python benchmarks/learning/summary.py RESULTS.jsonl --picture PICTURE.png
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# What RigL and SET both were trained with. The last ones make another network of it, so that
# their losses do not go beside those of the others.
NETWORKS = (", erk", ", 97 %")
SETTINGS = ("", ", interval x 3", ", share 0.1", *NETWORKS)


def usual_network(row: Row) -> bool:
    return not row["variant"].endswith(NETWORKS)


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
    mean, error = statistics.mean(gains), _error(gains)
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
        below = sum(gain > 0 for gain in gains)
        lines.append(
            f"| {change} | {mean:+.4f} ({_error(gains):.4f}) | {below} of {len(gains)} | "
            f"{verdict(gains, gap)} |"
        )
    return "\n".join(lines)


def settings(rows: list[Row], base: str = "rigl", aim: str = "set") -> str:
    """Markdown: how far RigL ends above SET where both are trained with the same change.

    What a setting takes off the gap has the same verdict as what a change of RigL alone gains.
    """
    names = {row["variant"] for row in rows}
    changes = [c for c in SETTINGS if {f"{base}{c}", f"{aim}{c}"} <= names]
    gaps = {}
    for change in changes:
        own, other = (losses_by_seed(rows, f"{method}{change}") for method in (base, aim))
        gaps[change] = {seed: own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())}
    usual = gaps[""]
    lines = [
        "| both with | seeds | RigL | SET | static | RigL less SET, by seed "
        "| mean and its standard error | off the gap | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for change in changes:
        found = gaps[change]
        less = [usual[seed] - found[seed] for seed in sorted(usual.keys() & found.keys())]
        # A static pattern is the same whatever is said of updates.
        static = f"static{change}" if change in NETWORKS else "static"
        if len(less) < 2 or not found.keys() <= losses_by_seed(rows, static).keys():
            continue
        means = [
            f"{statistics.mean(_losses([r for r in rows if r['seed'] in found], name)):.4f}"
            for name in (f"{base}{change}", f"{aim}{change}", static)
        ]
        by_seed = ", ".join(f"{gap:+.4f} ({seed})" for seed, gap in found.items())
        mean, error = statistics.mean(found.values()), _error(list(found.values()))
        off, says = "", ""
        if change:
            off = f"{statistics.mean(less):+.4f} ({_error(less):.4f})"
            says = verdict(less, statistics.mean(usual.values()))
        lines.append(
            f"| {change.removeprefix(', ') or 'the usual'} | {len(found)} | {' | '.join(means)} | "
            f"{by_seed} | {mean:+.4f} ({error:.4f}) | {off} | {says} |"
        )
    return "\n".join(lines)


def changed_weights(rows: list[Row]) -> str:
    """Markdown: what updates did, over a whole training, the mean over seeds."""
    lines = [
        "| variant | grown, in all | leave at the next update | had been there before "
        "| inputs, outputs they spread over | positions tried |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["variant"] for row in rows):
        runs = [r["updates"] for r in rows if r["variant"] == name and r["updates"]]
        if not runs:
            continue
        grown = statistics.mean(sum(u["grown"] for u in run) for run in runs)
        # What an update finds gone of the one before counts as often as that one grew weights.
        leave = [(b["wasted"], a["grown"]) for run in runs for a, b in pairwise(run)]
        cells = [_weighted(leave)] + [
            _weighted([(u[key], u["grown"]) for run in runs for u in run])
            for key in ("known", "inputs", "outputs")
        ]
        tried = statistics.mean(run[-1]["ever"] for run in runs)
        lines.append(
            f"| {label(name)} | {grown:,.0f} | {cells[0]:.2f} | {cells[1]:.2f} | "
            f"{cells[2]:.2f}, {cells[3]:.2f} | {tried:.2f} |"
        )
    return "\n".join(lines)


def _weighted(pairs: list[tuple[float, float]]) -> float:
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)


def _error(found: list[float]) -> float:
    """The standard error of the mean."""
    return statistics.stdev(found) / len(found) ** 0.5


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


def _less(rows: list[Row], name: str, against: str) -> list[float]:
    """Losses less those of another variant with the same seed."""
    own, base = losses_by_seed(rows, name), losses_by_seed(rows, against)
    return [own[seed] - base[seed] for seed in sorted(own.keys() & base.keys())]


def draw(rows: list[Row], against: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    longest = max(row["steps"] for row in rows)
    long = [
        row
        for row in rows
        if row["steps"] == longest
        and usual_network(row)
        and not row["variant"].startswith("masked")
    ]
    figure, axes = plt.subplots(2, 2, figsize=(11, 8.5), layout="constrained")

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

    names = sorted(
        {row["variant"] for row in long if row["variant"] != against},
        key=lambda name: statistics.mean(_less(long, name, against)),
    )
    for place, name in enumerate(reversed(names)):
        less = _less(long, name, against)
        axes[1, 1].plot(less, [place] * len(less), "o", alpha=0.7)
        axes[1, 1].plot([statistics.mean(less)] * 2, [place - 0.35, place + 0.35], "k-")
    axes[1, 1].axvline(0, color="grey", linewidth=1)
    axes[1, 1].set_yticks(range(len(names)), [label(name) for name in reversed(names)], fontsize=8)
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
