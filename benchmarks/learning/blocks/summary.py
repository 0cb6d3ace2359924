"""The tables and the picture of docs/blocks-and-order.md, from the lines that run.py wrote.

python benchmarks/learning/blocks/summary.py RESULTS.jsonl --picture PICTURE.png
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
BOTH = "interleaved, matching"


class Case(NamedTuple):
    """One network and length of training."""

    block: int
    hidden: int = 128
    steps: int = 600
    tokens: int = 512


SHORT = Case(32)
CASES = (Case(16), SHORT, Case(64, hidden=256))


def finals(rows: list[Row], variant: str, case: Case) -> dict[int, float]:
    """Seed -> the validation loss at the end."""
    wanted = (variant, *case)
    names = ("variant", *Case._fields)
    return {r["seed"]: r["final"] for r in rows if tuple(r[name] for name in names) == wanted}


def three(rows: list[Row], variant: str, case: Case) -> tuple[dict[int, float], ...]:
    """The seeds that a variant, plain blocks and elements have, of each."""
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
    """Every way that was tried, a line each."""
    lines = ["| blocks | seeds | mean loss | of the gap closed |", "|---|---|---|---|"]
    names = dict.fromkeys(r["variant"] for r in rows if Case(*(r[n] for n in Case._fields)) == case)
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


def cases_table(rows: list[Row]) -> str:
    """Both flags beside plain blocks and elements, a line per case that was run."""
    lines = [
        "| blocks | hidden features | steps x characters | seeds | plain | with both flags "
        "| elements | of the gap closed | by seed, least to largest | seeds ahead of plain |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        groups = both, plain, single = three(rows, BOTH, case)
        means = (f"{statistics.mean(found.values()):.4f}" for found in (plain, both, single))
        shares = sorted(round(100 * share) for share in closed(*groups))
        ahead = sum(both[seed] < plain[seed] for seed in both)
        cells = [
            str(case.block),
            str(case.hidden),
            f"{case.steps:,} x {case.tokens:,}",
            str(len(both)),
            *means,
            f"{100 * in_the_mean(*groups):.0f} %",
            ", ".join(map(str, shares)),
            f"{ahead} of {len(both)}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = [case for case in CASES if three(rows, BOTH, case)[0]]
    figure, axes = plt.subplots(
        1, len(cases), figsize=(3.2 * len(cases), 3.4), layout="constrained"
    )
    for axis, case in zip(axes, cases, strict=True):
        both, plain, single = three(rows, BOTH, case)
        for seed in both:
            losses = [plain[seed], both[seed], single[seed]]
            axis.plot(range(3), losses, "o-", color="C0", alpha=0.5, linewidth=1)
        means = [statistics.mean(found.values()) for found in (plain, both, single)]
        axis.plot(range(3), means, "k_", markersize=22, markeredgewidth=2)
        axis.set_xticks(range(3), ["plain", "both flags", "elements"])
        axis.set_xlim(-0.4, 2.4)
        network = f"blocks of {case.block}, {case.hidden} features"
        axis.set_title(f"{network}\n{case.steps:,} steps of {case.tokens:,}", fontsize=10)
    axes[0].set_ylabel("validation loss at the end, nats")
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.results.read_text().splitlines()]
    print(cases_table(rows), ways_table(rows), sep="\n\n")
    if arguments.picture is not None:
        draw(rows, arguments.picture)


if __name__ == "__main__":
    main()
