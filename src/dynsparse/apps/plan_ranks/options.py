"""What `dynsparse plan-ranks` is asked for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from dynsparse.apps.common.option import (
    FILE,
    Need,
    choice,
    flag,
    integer,
    number,
    option,
    options_of,
)
from dynsparse.apps.common.options import panel

__all__ = ["Options"]

_network = panel("Network", "run")
_ranks = panel("Ranks", "run")
_output = panel("Output", "run")
_GUESSED = Need(
    "plans without --measure, which finds it out", lambda o: o.measure is None,
    lambda o: "--measure", False,
)  # fmt: skip
_NODES = Need(
    "several nodes, --ranks-per-node below --ranks",
    lambda o: o.ranks_per_node is not None and o.ranks_per_node < o.ranks,
    lambda o: "one node",
)
_TABLE = Need("the table, without --json -", lambda o: str(o.json) != "-", lambda o: "--json -")
_POSITIVE = number(0, 1e21, above="more than 0")

MOST_BLOCKS = 1 << 28
"""Of all patterns together: they are drawn."""


@dataclass(kw_only=True)
class Options:
    """What is to be planned. `check` says in one line what is wrong with it."""

    features: tuple[int, ...] = _network(
        (1024, 4096, 1024),
        "Features before, between and behind the layers of a row.",
        dataclasses.replace(integer(1, 1 << 24, "at most 16,777,216"), several=True),
    )
    heads: int | None = _network(
        None, "Put an attention of so many heads before them.", integer(1, 1 << 20)
    )
    density: float = option(
        0.1, "Present blocks over all blocks.", number(0, 1, above="more than 0"), "Sparsity"
    )
    block_size: int = option(1, "Edge of the blocks.", choice(1, 4, 8, 16, 32, 64, 128), "Sparsity")
    batch_size: int = _ranks(
        1024, "Samples (tokens) of a step, over all ranks.", integer(1, 1 << 40)
    )
    ranks: int = _ranks(
        8, "How many; with --measure those of torchrun.", integer(1, 1 << 20),
        needs=(_GUESSED,),
    )  # fmt: skip
    ranks_per_node: int | None = _ranks(
        None, "Ranks of one node; all of them where left out.", integer(1, 1 << 20),
        needs=(_GUESSED,),
    )  # fmt: skip
    memory: float | None = _ranks(None, "Bytes that a rank has for these layers.", _POSITIVE)
    states: int = _ranks(2, "Tensors of optimizer state per weight: 2 for Adam.", integer(0, 100))
    latency: float | None = _ranks(
        None,
        "Seconds before anything of a message arrives, inside a node.",
        _POSITIVE,
        by_default="20e-6",
        needs=(_GUESSED,),
    )
    bandwidth: float | None = _ranks(
        None, "Bytes a second that a rank sends inside a node.", _POSITIVE,
        by_default="10e9", needs=(_GUESSED,),
    )  # fmt: skip
    outer_latency: float | None = _ranks(
        None, "As --latency, between nodes.", _POSITIVE,
        by_default="as inside", needs=(_GUESSED, _NODES),
    )  # fmt: skip
    outer_bandwidth: float | None = _ranks(
        None, "As --bandwidth, between nodes.", _POSITIVE,
        by_default="as inside", needs=(_GUESSED, _NODES),
    )  # fmt: skip
    flops: float | None = _ranks(
        None,
        "Operations on non-zeros a second, for ranks that are no CPUs as this one.",
        _POSITIVE,
        needs=(_GUESSED,),
    )
    threads: int | None = _ranks(
        None, "Threads of a rank that computes on a CPU.", integer(1, 1 << 20), by_default="1",
        needs=(_GUESSED,),
    )  # fmt: skip
    cluster: Path | None = _ranks(None, "Figures that --measure has written.", FILE)
    measure: Path | None = _ranks(
        None,
        "Measure the ranks that torchrun has started, in two seconds, and write the figures here.",
        FILE,
    )
    top: int = _output(10, "How many grids are shown.", integer(1, 1 << 20), needs=(_TABLE,))
    json: Path | None = _output(None, "Write all figures here; - prints them.", FILE)

    def check(self) -> None:
        """Raise ValueError for what makes no sense, alone or together."""
        for name, known in options_of(Options).items():
            value = getattr(self, name)
            if value is not None or not known.optional:
                known.kind.check(flag(name), value)
        if len(self.features) < 2:
            raise ValueError(
                f"--features: expected two or more, such as 1024 4096 1024, got {self.features}"
            )
        b = self.block_size
        sizes = list(pairwise(self.features))
        if self.heads is not None:
            first = self.features[0]
            if first % self.heads:
                raise ValueError(
                    f"--heads: expected a divisor of {first} features, got {self.heads}"
                )
            sizes += 4 * [(first, first)]
        for size in self.features:
            if size % b:
                raise ValueError(f"--features: expected multiples of --block-size {b}, got {size}")
        blocks = sum(round(self.density * (i // b) * (o // b)) for i, o in sizes)
        if blocks > MOST_BLOCKS:
            raise ValueError(
                f"--features: expected at most {MOST_BLOCKS:,} blocks in all, got {blocks:,}: plan "
                "with a lower --density, larger blocks, or one layer in place of many"
            )
        if self.cluster is not None:
            names = ("measure", *_FIGURES)
            given = [name for name in names if getattr(self, name) is not None]
            if given:
                raise ValueError(
                    f"--cluster: the file has these figures: leave out --{flag(given[0])}"
                )


_FIGURES = (
    "latency", "bandwidth", "outer_latency", "outer_bandwidth", "flops", "threads",
    "ranks_per_node",
)  # fmt: skip
