"""What the YAML file may say, as checked values."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynsparse.bench.cells import Cell
from dynsparse.bench.timing import Effort

__all__ = ["MEASURES", "Benchmark", "Measure", "Spec", "TrainingOptions"]


@dataclass(frozen=True)
class Measure:
    """A kind of measurement: whose times are taken, and which of them the others are divided by.

    A measure with `parts` times pieces of one thing; `baselines` are what a benchmark may name as
    its contenders, in the order of the tables.
    """

    about: str
    reference: str
    baselines: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()

    @property
    def usual(self) -> tuple[str, ...]:
        """The baselines of a benchmark that names none."""
        return tuple(name for name in self.baselines if name != "one_thread")


MEASURES: dict[str, Measure] = {
    "step": Measure(
        "forward with bias and all gradients of a layer, through autograd",
        "dynsparse",
        ("masked", "dense", "mkl", "one_thread"),
    ),
    "forward": Measure(
        "forward of a layer, without gradients",
        "dynsparse",
        ("masked", "dense", "mkl", "bsr", "scipy", "one_thread"),
    ),
    "network": Measure(
        "training step of a network with relu, cross entropy and SGD, every layer sparse",
        "dynsparse",
        ("masked", "dense"),
    ),
    "update": Measure(
        "pattern update of a layer beside its training step, with Adam",
        "step",
        parts=("step_with_update", "drop", "growth", "dense_topk", "rewiring", "encoding"),
    ),
    "training": Measure(
        "whole training by RigL until an accuracy is reached, beside the same on masked dense",
        "dynsparse",
        ("masked",),
    ),
}


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
