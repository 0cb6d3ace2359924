"""The tables of many ranks in the docs, made from the formulas that a counting run is checked by.

python -m dynsparse.apps.rank_tables docs/many-processes.md

fills in what stands between `<!-- ranks: NAME -->` and `<!-- /ranks -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from dynsparse.distributed.paper import Matrix, held, traffic

__all__ = ["fill", "main"]

_MARKED = re.compile(r"(<!-- ranks: (\w+) -->\n).*?(<!-- /ranks -->)", re.S)

# What, its layers, density, ranks, tokens of a step on each.
_MODELS: list[tuple[str, list[Matrix], float, int, int]] = [
    ("GPT-2 small", [Matrix(3072, 768, 36)], 0.1, 8, 8192),
    ("7B", [Matrix(11008, 4096, 144)], 0.1, 64, 4096),
    ("7B", [Matrix(11008, 4096, 144)], 0.1, 1024, 4096),
    ("7B", [Matrix(11008, 4096, 144)], 0.1, 4096, 4096),
    ("7B, blocks of 16", [Matrix(11008, 4096, 144, 16)], 0.1, 1024, 4096),
    ("7B", [Matrix(11008, 4096, 144)], 0.01, 1024, 4096),
    ("70B", [Matrix(28672, 8192, 294)], 0.1, 1024, 4096),
]
_INTERVAL = 100


def _traffic() -> list[str]:
    lines = [
        "| layers of | density | ranks | dense step, GB | sparse step, GB | update, GB "
        "| times less |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, matrices, density, ranks, samples in _MODELS:
        sent = traffic(matrices, density, ranks, samples=samples, itemsize=2, wire=torch.bfloat16)
        figures = (f"{size / 1e9:.2f}" for size in (sent.dense, sent.step, sent.update))
        lines.append(
            f"| {name} | {density:.0%} | {ranks:,} | {' | '.join(figures)} "
            f"| {sent.less(_INTERVAL):.1f} |"
        )
    return lines


def _memory() -> list[str]:
    lines = [
        "| ranks | dense, sharded | elements, sharded | blocks of 16, sharded | elements in "
        "rectangles |",
        "|---|---|---|---|---|",
    ]
    for ranks in (1, 8, 64, 512):
        one, blocks = held(0.1, ranks), held(0.1, ranks, block_size=16)
        figures = (one.dense, one.sharded, blocks.sharded, one.rectangles)
        lines.append(f"| {ranks} | {' | '.join(f'{figure:.3f}' for figure in figures)} |")
    return lines


_TABLES = {"traffic": _traffic, "memory": _memory}


def fill(text: str) -> str:
    """The page with its tables as they are now.

    Raises:
        ValueError: a table that there is not.
    """

    def table(found: re.Match[str]) -> str:
        if found[2] not in _TABLES:
            raise ValueError(f"expected one of {', '.join(_TABLES)}, got {found[2]!r}")
        return "\n".join([found[1], *_TABLES[found[2]](), "", found[3]])

    return _MARKED.sub(table, text)


def main(pages: Sequence[str]) -> None:
    """Fill in these pages."""
    for page in pages:
        path = Path(page)
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
