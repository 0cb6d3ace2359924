"""The tables and the plot of docs/blocks-and-order.md, from the lines that run.py wrote.

python benchmarks/learning/blocks/summary.py RESULTS.jsonl --plot PLOT.png
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
ALL = "interleaved, matching, rounded down"
FLAGS = {
    "interleaved, matching": "interleave, match",
    "matching, rounded down": "match, round down",
    ALL: "all three",
}


class Case(NamedTuple):
    """A network and length of training."""

    block: int
    hidden: int = 128
    steps: int = 600
    tokens: int = 512


SHORT = Case(32)
CASES = (Case(16), SHORT, Case(64, hidden=256))

WAYS = CASES[1:]
"""The cases that compare all ways."""


class Network(NamedTuple):
    """A network on MNIST, and the ways that change its blocks."""

    name: str
    images: int
    epochs: int
    ways: dict[str, str]


TILES = {"tiles, rounded down": "tiles, round down", "dealt, rounded down": "deal out, round down"}
NETWORKS = (
    Network("mlp", 60_000, 2, TILES),
    Network("row transformer", 10_000, 1, FLAGS),
)


def of_text(rows: list[Row]) -> list[Row]:
    """The trainings of the language model."""
    return [row for row in rows if "network" not in row]


def errors(rows: list[Row], network: Network, block: int, variant: str) -> dict[int, float]:
    """Seed -> the final test error in %."""
    names = ("network", "images", "epochs", "block", "variant")
    wanted = (*network[:3], block, variant)
    images = (r for r in rows if "network" in r)
    return {
        r["seed"]: 100 * (1 - r["accuracy"])
        for r in images
        if tuple(r[name] for name in names) == wanted
    }


def finals(rows: list[Row], variant: str, case: Case) -> dict[int, float]:
    """Seed -> the final validation loss."""
    wanted = (variant, *case)
    names = ("variant", *Case._fields)
    return {
        r["seed"]: r["final"] for r in of_text(rows) if tuple(r[name] for name in names) == wanted
    }


def three(rows: list[Row], variant: str, case: Case) -> tuple[dict[int, float], ...]:
    """Final losses of a variant, plain blocks and elements, for the seeds that all have."""
    of = finals(rows, variant, case)
    plain, single = finals(rows, "plain", case), finals(rows, "plain", case._replace(block=1))
    seeds = sorted(of.keys() & plain.keys() & single.keys())
    return tuple({seed: found[seed] for seed in seeds} for found in (of, plain, single))


def closed(of: dict[int, float], plain: dict[int, float], single: dict[int, float]) -> list[float]:
    """The share of the gap between plain blocks and elements that is closed, by seed."""
    return [(plain[seed] - of[seed]) / (plain[seed] - single[seed]) for seed in of]


def in_the_mean(of: dict[int, float], plain: dict[int, float], single: dict[int, float]) -> float:
    gap = sum(plain[seed] - single[seed] for seed in of)
    return sum(plain[seed] - of[seed] for seed in of) / gap


def ways_table(rows: list[Row], case: Case = SHORT) -> str:
    """A line per way."""
    lines = ["| blocks | seeds | mean loss | of the gap closed |", "|---|---|---|---|"]
    same = (r for r in of_text(rows) if Case(*(r[n] for n in Case._fields)) == case)
    names = dict.fromkeys(r["variant"] for r in same)
    for name in ("elements", *names):
        if name in ("elements", "plain"):
            found = finals(rows, "plain", case if name == "plain" else case._replace(block=1))
            share = ""
        else:
            groups = three(rows, name, case)
            found, share = groups[0], f"{100 * in_the_mean(*groups):.0f} %"
        mean = statistics.mean(found.values())
        lines.append(f"| {name} | {len(found)} | {mean:.4f} | {share} |")
    return "\n".join(lines)


def _shared(
    of: dict[int, float], plain: dict[int, float], single: dict[int, float], digits: int
) -> list[str]:
    """The cells of a line, over the seeds that all three have."""
    means = (f"{statistics.mean(found.values()):.{digits}f}" for found in (plain, of, single))
    shares = sorted(round(100 * share) for share in closed(of, plain, single))
    ahead = sum(of[seed] < plain[seed] for seed in of)
    return [
        str(len(of)),
        *means,
        f"{100 * in_the_mean(of, plain, single):.0f} %",
        ", ".join(map(str, shares)),
        f"{ahead} of {len(of)}",
    ]


_HEAD = "seeds | plain | with them | elements | of the gap closed | by seed | ahead of plain |"


def cases_table(rows: list[Row]) -> str:
    """The flags beside plain blocks and elements, a line per case."""
    lines = [
        f"| blocks | hidden features | steps x characters | flags | {_HEAD}",
        "|---" * 11 + "|",
    ]
    for case in CASES:
        for way, flags in FLAGS.items():
            groups = three(rows, way, case)
            if groups[0]:
                length = f"{case.steps:,} x {case.tokens:,}"
                cells = [str(case.block), str(case.hidden), length, flags, *_shared(*groups, 4)]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def images_table(rows: list[Row]) -> str:
    """As `cases_table`, for the networks on MNIST: errors in %."""
    lines = [f"| network | blocks | flags | {_HEAD}", "|---" * 10 + "|"]
    for network in NETWORKS:
        single = errors(rows, network, 1, "plain")
        for block in (16, 32, 64):
            plain = errors(rows, network, block, "plain")
            for way, flags in network.ways.items():
                of = errors(rows, network, block, way)
                seeds = sorted(of.keys() & plain.keys() & single.keys())
                groups = [{seed: found[seed] for seed in seeds} for found in (of, plain, single)]
                if seeds:
                    cells = [network.name, str(block), flags, *_shared(*groups, 2)]
                    lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = [case for case in CASES if three(rows, ALL, case)[0]]
    figure, axes = plt.subplots(
        1, len(cases), figsize=(3.2 * len(cases), 3.4), layout="constrained", squeeze=False
    )
    for axis, case in zip(axes[0], cases, strict=True):
        ways = ("plain", *FLAGS)
        found = [finals(rows, way, case) for way in ways]
        found.append(finals(rows, "plain", case._replace(block=1)))
        for seed in sorted({seed for losses in found for seed in losses}):
            of = [(place, losses[seed]) for place, losses in enumerate(found) if seed in losses]
            axis.plot(*zip(*of, strict=True), "o-", color="C0", alpha=0.4, linewidth=1)
        for place, losses in enumerate(found):
            if losses:
                mean = statistics.mean(losses.values())
                axis.plot(place, mean, "k_", markersize=18, markeredgewidth=2)
        names = ("plain", *FLAGS.values(), "elements")
        axis.set_xticks(
            range(len(names)), [name.replace(", ", ",\n") for name in names], fontsize=7
        )
        network = f"blocks of {case.block}, {case.hidden} features"
        axis.set_title(f"{network}\n{case.steps:,} steps of {case.tokens:,}", fontsize=10)
    axes[0][0].set_ylabel("validation loss at the end, nats")
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.results.read_text().splitlines()]
    tables = cases_table(rows), images_table(rows), *map(partial(ways_table, rows), WAYS)
    print(*tables, sep="\n\n")
    if arguments.plot is not None:
        draw(rows, arguments.plot)


if __name__ == "__main__":
    main()
