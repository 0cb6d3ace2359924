"""Several trainings side by side, from the JSON files of `dynsparse lm`: a table, and curves.

python docs/tools/compare_trainings.py *.json
python docs/tools/compare_trainings.py rigl.json static.json dense.json --output curves.png
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynsparse._core.files.limits import parse_json
from dynsparse.report.figure import figure, need_matplotlib, save

_CURVES = ("step", "loss", "valid_loss")
_COLOURS = ("#0b6e99", "#d1495b", "#e0a030", "#3a7d44", "#7a5195", "#666666")


def read_figures(file: Path) -> dict[str, Any]:
    """Read a file that `dynsparse lm --json` wrote.

    Raises:
        ValueError: not such a file.
        OSError: a file that cannot be read.
    """
    try:
        figures = parse_json(file.read_bytes())
        numbers = [entry[key] for entry in figures["history"] for key in _CURVES]
        numbers += [figures[key] for key in ("loss", "accuracy", "valid_loss", "steps")]
        if not figures["history"] or not all(isinstance(n, (int, float)) for n in numbers):
            raise KeyError
        figures["method"], figures["data"], figures["vocabulary"], figures["parameters"]["held"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{file}: expected the figures of a whole training by `dynsparse lm --json`, got "
            "another file"
        ) from None
    return figures


def draw_losses(runs: Sequence[dict[str, Any]], path: Path, title: str = "") -> Path:
    """Plot training loss (dashed) and validation loss (solid) over the steps, one color per run.

    Training losses are means over the steps since the previous report.
    """
    with figure(9.0, 5.0) as page:
        axes = page.subplots()
        for run, colour in zip(runs, itertools.cycle(_COLOURS), strict=False):
            steps = [entry["step"] for entry in run["history"]]
            valid = [entry["valid_loss"] for entry in run["history"]]
            train = [entry["loss"] for entry in run["history"]]
            held = run["parameters"]["held"]
            label = f"{run['method']}, {held:,} parameters: {valid[-1]:.3f}"
            axes.plot(steps, valid, color=colour, label=label)
            axes.plot(steps, train, color=colour, lw=1.3, ls=(0, (3, 2)))
        # The first report is far above the others, which are the ones to compare.
        later = [
            entry[key] for run in runs for entry in run["history"][1:] or run["history"]
            for key in ("loss", "valid_loss")
        ]  # fmt: skip
        span = max(later) - min(later) or 1.0
        axes.set_ylim(min(later) - 0.06 * span, max(later) + 0.06 * span)
        axes.set_xlim(left=0)
        axes.set_xlabel("training step")
        axes.set_ylabel("loss, nats per token")
        axes.set_title(title or runs[0]["data"], fontweight="bold", pad=10)
        axes.plot([], [], color="#666666", lw=1.3, ls=(0, (3, 2)), label="training")
        axes.legend(title="validation at the end")
        save(page, path)
    return path


def loss_table(runs: Sequence[dict[str, Any]]) -> str:
    """Markdown, one line per method in order of mean validation loss.

    Final losses in nats per token: mean (smallest to largest) over the seeds.

    Raises:
        ValueError: runs of different length or data, which are not comparable.
    """
    kinds = {(run["data"], run["steps"], run["vocabulary"]) for run in runs}
    if len(kinds) > 1:
        first, second = sorted(kinds)[:2]
        raise ValueError(
            f"expected trainings on one text with equally many steps, got {first} and {second}"
        )
    methods: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        methods.setdefault(run["method"], []).append(run)
    ordered = sorted(methods.items(), key=lambda item: _mean(item[1], "valid_loss"))
    lines = [
        "| method | seeds | parameters | validation loss | test loss | test accuracy |",
        "|---|---|---|---|---|---|",
    ]
    for method, group in ordered:
        held = ", ".join(sorted({f"{run['parameters']['held']:,}" for run in group}))
        accuracy = 100 * _mean(group, "accuracy")
        lines.append(
            f"| {method} | {len(group)} | {held} | {_spread(group, 'valid_loss')} | "
            f"{_spread(group, 'loss')} | {accuracy:.2f} % |"
        )
    return "\n".join(lines)


def _mean(group: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.fmean(run[key] for run in group)


def _spread(group: Sequence[dict[str, Any]], key: str) -> str:
    values = [run[key] for run in group]
    return f"{_mean(group, key):.4f} ({min(values):.4f} to {max(values):.4f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or draw the curves; user errors give one line and status 2."""
    parser = argparse.ArgumentParser(description="A table or curves of several trainings.")
    parser.add_argument("files", nargs="+", type=Path, help="written by dynsparse lm --json")
    parser.add_argument("--output", type=Path, help="draw curves to this image file, such as a.png")
    parser.add_argument("--title", default="", help="title of the figure")
    given = parser.parse_args(arguments)
    try:
        runs = [read_figures(file) for file in given.files]
        if given.output is None:
            print(loss_table(runs))
        else:
            need_matplotlib()
            draw_losses(runs, given.output, given.title)
    except (ValueError, OSError, ImportError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
