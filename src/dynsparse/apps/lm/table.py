"""A table of several trainings from their JSON files: mean and spread over the seeds of a method.

python -m dynsparse.apps.lm.table *.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynsparse.apps.lm.curves import read_figures


def loss_table(runs: Sequence[dict[str, Any]]) -> str:
    """Markdown, one line per method in the order of its mean validation loss.

    Losses are those at the end, in nats per token: mean (least to largest) over the seeds.

    Raises:
        ValueError: runs of different length or data, which cannot stand side by side.
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
    """Print the table; one line and status 2 for what a user can mend."""
    parser = argparse.ArgumentParser(description="A table of several trainings.")
    parser.add_argument("files", nargs="+", type=Path, help="written by dynsparse lm --json")
    given = parser.parse_args(arguments)
    try:
        print(loss_table([read_figures(file) for file in given.files]))
    except (ValueError, OSError) as error:
        print(f"table: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
