"""Curves of the loss from the JSON files of several trainings.

python -m dynsparse.apps.lm.curves rigl.json static.json dense.json --output curves.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynsparse.files.limits import parse_json
from dynsparse.report.figure import figure, need_matplotlib, save

_CURVES = ("step", "loss", "valid_loss")
_COLOURS = ("#0b6e99", "#d1495b", "#e0a030", "#3a7d44", "#7a5195", "#666666")


def read_figures(file: Path) -> dict[str, Any]:
    """What `dynsparse lm --json` wrote.

    Raises:
        ValueError: another file.
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
    """Training loss (dashed) and validation loss (drawn through) over the steps, one colour a run.

    Training losses are means over the steps since the report before.
    """
    with figure(9.0, 5.0) as page:
        axes = page.subplots()
        for run, colour in zip(runs, _cycled(len(runs)), strict=True):
            steps = [entry["step"] for entry in run["history"]]
            valid = [entry["valid_loss"] for entry in run["history"]]
            train = [entry["loss"] for entry in run["history"]]
            held = run["parameters"]["held"]
            label = f"{run['method']}, {held:,} parameters: {valid[-1]:.3f}"
            axes.plot(steps, valid, color=colour, label=label)
            axes.plot(steps, train, color=colour, lw=1.3, ls=(0, (3, 2)))
        # The first report is far above the rest, which is what one wants to compare.
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


def _cycled(count: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw; one line and status 2 for what a user can mend."""
    parser = argparse.ArgumentParser(description="Curves of the loss of several trainings.")
    parser.add_argument("files", nargs="+", type=Path, help="written by dynsparse lm --json")
    parser.add_argument("--output", type=Path, required=True, help="the picture, such as a.png")
    parser.add_argument("--title", default="")
    given = parser.parse_args(arguments)
    try:
        need_matplotlib()
        draw_losses([read_figures(file) for file in given.files], given.output, given.title)
    except (ValueError, OSError, ImportError) as error:
        print(f"curves: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
