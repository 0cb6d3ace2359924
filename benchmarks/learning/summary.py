"""The tables and the plot of docs/why-rigl.md, from the lines that run.py wrote.

python benchmarks/learning/summary.py RESULTS.jsonl --plot PLOT.png
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# Changes with which both RigL and SET were trained. The last ones change the network, so their
# losses are not comparable with the others.
NETWORKS = (", erk", ", 97 %")
SETTINGS = ("", ", interval x 3", ", share 0.1", ", late start", *NETWORKS)


def usual_network(row: Row) -> bool:
    return not row["variant"].endswith(NETWORKS)


def loss(row: Row) -> float:
    """The final validation loss."""
    return row["valid"][-1][1]


# The training loss is the mean over the last quarter of the steps; all variants of a seed have the
# same batches.
LOSSES: dict[str, Callable[[Row], float]] = {
    "validation": loss,
    "training": lambda row: row["train"][-1][1],
    "test": lambda row: row["test"],
}


def label(name: str) -> str:
    """The name as shown in tables."""
    method, comma, changes = name.partition(", ")
    return {"rigl": "RigL", "set": "SET"}.get(method, method) + comma + changes


def table(rows: list[Row], against: str) -> str:
    """Markdown: the final mean, and the difference to a variant by seed."""
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


def losses_by_seed(
    rows: list[Row], name: str, of: Callable[[Row], float] = loss
) -> dict[int, float]:
    return {row["seed"]: of(row) for row in rows if row["variant"] == name}


def _differences(own: dict[int, float], other: dict[int, float]) -> list[float]:
    return [own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())]


def verdict(gains: list[float], gap: float) -> str:
    """Whether a change explains why RigL ends above SET, by a rule fixed before the runs.

    Args:
        gains: RigL's loss minus that with the change, by seed; at least two.
        gap: RigL's mean loss minus SET's.

    "not refuted": the mean gain is half the gap or more, and above 0 by more than its standard
    error. "refuted": it is below half the gap by more than its standard error. Else "undecided".
    """
    mean, error = statistics.mean(gains), _error(gains)
    if mean >= gap / 2 and mean > error:
        return "not refuted"
    return "refuted" if mean + error < gap / 2 else "undecided"


def verdicts(rows: list[Row], base: str = "rigl", aim: str = "set") -> str:
    """Markdown: what each change of RigL gains in each loss, and its verdict."""
    changes = [
        name
        for name in dict.fromkeys(row["variant"] for row in rows)
        if name.startswith(f"{base}, ")
        and len(_differences(losses_by_seed(rows, base), losses_by_seed(rows, name))) > 1
    ]
    gains = {
        name: [
            _differences(losses_by_seed(rows, base, of), losses_by_seed(rows, name, of))
            for of in LOSSES.values()
        ]
        for name in (aim, *changes)
    }
    gaps = [statistics.mean(found) for found in gains[aim]]
    lines = [
        f"| change | seeds | {' | '.join(f'{of} loss | verdict' for of in LOSSES)} |",
        "|---|---|" + "---|---|" * len(LOSSES),
    ]
    changes.sort(key=lambda name: -statistics.mean(gains[name][0]))
    for name in (aim, *changes):
        cells = [
            f"{_with_error(found)} | {verdict(found, gap) if name != aim else ''}"
            for found, gap in zip(gains[name], gaps, strict=True)
        ]
        what = name.partition(", ")[2] or f"the gap to {label(aim)}"
        lines.append(f"| {what} | {len(gains[name][0])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def settings(rows: list[Row], base: str = "rigl", aim: str = "set") -> str:
    """Markdown: how far RigL ends above SET if both are trained with the same change.

    The verdict treats a reduction of the gap like a gain of a change to RigL alone.
    """
    lines = [
        "| both with | loss | seeds | RigL | SET | static | RigL less SET | off the gap "
        "| verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for change in SETTINGS:
        # Settings of updates do not affect a static pattern.
        static = f"static{change}" if change in NETWORKS else "static"
        names = (f"{base}{change}", f"{aim}{change}", static)
        seeds = set.intersection(*({*losses_by_seed(rows, name)} for name in names))
        if len(seeds) < 2:
            continue
        for measure, of in LOSSES.items():
            found = [
                {seed: losses_by_seed(rows, name, of)[seed] for seed in sorted(seeds)}
                for name in names
            ]
            gaps = _differences(found[0], found[1])
            usual = losses_by_seed(rows, base, of), losses_by_seed(rows, aim, of)
            before = [usual[0][seed] - usual[1][seed] for seed in sorted(seeds)]
            off = [a - b for a, b in zip(before, gaps, strict=True)]
            gap = statistics.mean(_differences(*usual))
            says = f"{_with_error(off)} | {verdict(off, gap)}" if change else " | "
            means = " | ".join(f"{statistics.mean(one.values()):.4f}" for one in found)
            lines.append(
                f"| {change.removeprefix(', ') or 'the usual'} | {measure} | {len(seeds)} | "
                f"{means} | {_with_error(gaps)} | {says} |"
            )
    return "\n".join(lines)


def quarters(rows: list[Row], against: str = "set") -> str:
    """Markdown: the training loss between each two reports, minus that of a variant."""
    reports = [step for step, _ in rows[0]["train"]]
    spans = [f"{a + 1:,} to {b:,}" for a, b in pairwise([0, *reports])]
    lines = [f"| variant | seeds | {' | '.join(spans)} |", "|---|---|" + "---|" * len(spans)]
    for name in dict.fromkeys(row["variant"] for row in rows):
        less = [
            _less(rows, name, against, lambda row, at=at: row["train"][at][1])
            for at in range(len(reports))
        ]
        if name != against and len(less[0]) > 1:
            cells = " | ".join(_with_error(found) for found in less)
            lines.append(f"| {label(name)} | {len(less[0])} | {cells} |")
    return "\n".join(lines)


def _with_error(found: list[float]) -> str:
    return f"{statistics.mean(found):+.4f} ({_error(found):.4f})"


def changed_weights(rows: list[Row]) -> str:
    """Markdown: statistics of updates over a whole training, mean over seeds."""
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
        # The share that an update drops is weighted by what the previous one grew.
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
    """Number of batches -> [shared part of the growth, rank correlation] of each measured update,
    mean over layers."""
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
    """A figure of each update in the training, mean over seeds."""
    own = [row["updates"] for row in rows if row["variant"] == name]
    steps = [update["step"] for update in own[0]]
    return steps, [statistics.mean(u[i][key] for u in own) for i in range(len(steps))]


def _less(
    rows: list[Row], name: str, against: str, of: Callable[[Row], float] = loss
) -> list[float]:
    """Losses minus those of another variant with the same seed."""
    return _differences(losses_by_seed(rows, name, of), losses_by_seed(rows, against, of))


def _differences_of_all(axis: Any, rows: list[Row], against: str, measure: str) -> None:
    """A line per variant, a dot per seed, the smallest mean validation loss at the top."""
    names = sorted(
        {row["variant"] for row in rows if row["variant"] != against},
        key=lambda name: -statistics.mean(_less(rows, name, against)),
    )
    for place, name in enumerate(names):
        less = _less(rows, name, against, LOSSES[measure])
        axis.plot(less, [place] * len(less), "o", alpha=0.7)
        axis.plot([statistics.mean(less)] * 2, [place - 0.35, place + 0.35], "k-")
    axis.axvline(0, color="grey", linewidth=1)
    axis.set_yticks(range(len(names)), [label(name) for name in names], fontsize=8)
    axis.set(
        title=f"{measure.capitalize()} loss at the end, less {label(against)}'s by seed",
        xlabel="nats; left is better",
    )


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
    figure, axes = plt.subplots(3, 2, figsize=(11, 12.5), layout="constrained")

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
        xlabel="step", ylabel="effective share of all", ylim=(0, 1),
    )  # fmt: skip

    for name in ("static", "rigl", "rigl, 16 batches", "rigl, late start"):
        steps = [step for step, _ in long[0]["train"]]
        gaps = [
            _less(long, name, against, lambda row, at=at: row["train"][at][1])
            for at in range(len(steps))
        ]
        errors = [_error(found) for found in gaps]
        means = [statistics.mean(found) for found in gaps]
        axes[1, 1].errorbar(steps, means, errors, fmt="o-", capsize=3, label=label(name))
    axes[1, 1].axhline(0, color="grey", linewidth=1)
    axes[1, 1].set(
        title=f"Training loss of the last 500 steps, less {label(against)}'s",
        xlabel="step", ylabel="nats; mean and standard error",
    )  # fmt: skip

    for axis, measure in zip(axes[2], ("validation", "training"), strict=True):
        _differences_of_all(axis, long, against, measure)
    for axis in axes.flat[:4]:
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--against", default="set")
    parser.add_argument("--plot", type=Path)
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
    if arguments.plot is not None:
        draw(rows, arguments.against, arguments.plot)


if __name__ == "__main__":
    main()
