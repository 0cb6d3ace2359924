"""What the YAML file may say, as checked values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dynsparse.bench.cells import Cell
from dynsparse.bench.timing import Effort


@dataclass(frozen=True)
class Measure:
    """A kind of measurement.

    reference: whose time the others are divided by.
    baselines: what a benchmark may name as contenders beside dynsparse; without any, the measure
        times the pieces of one thing.
    """

    reference: str
    baselines: tuple[str, ...] = ()

    @property
    def usual(self) -> tuple[str, ...]:
        """The baselines of a benchmark that names none."""
        return tuple(name for name in self.baselines if name not in _WHERE_ASKED_FOR)


_WHERE_ASKED_FOR = ("masked_medium", "dense_medium", "one_thread")

MEASURES: dict[str, Measure] = {
    "step": Measure("dynsparse", ("masked", "dense", "mkl", *_WHERE_ASKED_FOR)),
    "forward": Measure("dynsparse", ("masked", "dense", "mkl", "bsr", "scipy", "one_thread")),
    "network": Measure("dynsparse", ("masked", "dense")),
    "update": Measure("step"),
    "training": Measure("dynsparse"),
    "model": Measure("dynsparse", ("masked", "dense")),
    "model-memory": Measure("dynsparse", ("masked", "dense")),
}
"""What each is stands at the head of benchmarks.yml."""


@dataclass(frozen=True)
class TrainingOptions:
    """Of a whole training: RigL by SGD with momentum on synthetic data.

    accuracy: to be reached on held-out examples, in (0, 1].
    steps: at most so many; interval: steps between pattern updates; evaluate: between evaluations.
    seeds: how many trainings, with seeds 0, 1, ...
    """

    accuracy: float = 0.9
    steps: int = 400
    interval: int = 100
    evaluate: int = 20
    learning_rate: float = 0.05
    seeds: int = 1


@dataclass(frozen=True)
class Benchmark:
    """One named benchmark: a grid of cells, a command, or the names of others."""

    name: str
    about: str
    measure: str | None = None
    contenders: tuple[str, ...] = ()
    cells: tuple[Cell, ...] = ()
    effort: Effort = field(default_factory=Effort)
    training: TrainingOptions | None = None
    command: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spec:
    """A file of benchmarks, by name."""

    file: str
    benchmarks: dict[str, Benchmark]

    def select(self, names: list[str]) -> list[Benchmark]:
        """The benchmarks of these names, in that order, those that run others resolved.

        Raises:
            ValueError: there is none of that name.
        """
        chosen: dict[str, Benchmark] = {}
        for name in names:
            if name not in self.benchmarks:
                raise ValueError(
                    f"--benchmark: expected one of {', '.join(self.benchmarks)} ({self.file}), "
                    f"got {name!r}"
                )
            benchmark = self.benchmarks[name]
            found = self.select(list(benchmark.runs)) if benchmark.runs else [benchmark]
            chosen.update((one.name, one) for one in found)
        return list(chosen.values())


def with_cells(benchmarks: list[Benchmark], which: list[str]) -> list[Benchmark]:
    """The benchmarks with those cells alone of which one of `which` says all (`Cell.is_said`).

    Raises:
        ValueError: one that says no cell.
    """
    for words in which:
        if not any(cell.is_said(words) for one in benchmarks for cell in one.cells):
            example = next((str(cell) for one in benchmarks for cell in one.cells), "nothing")
            raise ValueError(
                "--cell: expected what is said of a cell of these benchmarks, such as "
                f"{example!r} or a part of it, got {words!r}"
            )
    found = []
    for one in benchmarks:
        cells = tuple(c for c in one.cells if any(c.is_said(words) for words in which))
        if cells:
            found.append(replace(one, cells=cells))
    return found
