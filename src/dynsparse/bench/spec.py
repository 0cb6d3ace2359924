"""The benchmarks of a YAML file such as `benchmarks.yml`, as checked values."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from dynsparse._core.checks import check_types, shorten
from dynsparse.bench.cells import DTYPES, Cell
from dynsparse.bench.timing import Effort
from dynsparse.options import TEXT, Kind, choice, integer, list_of, number, options_of


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
    def default_baselines(self) -> tuple[str, ...]:
        """The baselines of a benchmark that names none."""
        return tuple(name for name in self.baselines if name not in _ON_REQUEST)


_ON_REQUEST = ("masked_medium", "dense_medium", "one_thread")

MEASURES: dict[str, Measure] = {
    "step": Measure("dynsparse", ("masked", "dense", "mkl", *_ON_REQUEST)),
    "forward": Measure("dynsparse", ("masked", "dense", "mkl", "bsr", "scipy", "one_thread")),
    "network": Measure("dynsparse", ("masked", "dense")),
    "update": Measure("step"),
}
"""The head of benchmarks.yml describes each of them."""


@dataclass(frozen=True)
class Benchmark:
    """One named benchmark: a grid of cells, a command, or the names of others."""

    name: str
    about: str
    measure: str | None = None
    contenders: tuple[str, ...] = ()
    cells: tuple[Cell, ...] = ()
    effort: Effort = field(default_factory=Effort)
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
            selected = self.select(list(benchmark.runs)) if benchmark.runs else [benchmark]
            chosen.update((named.name, named) for named in selected)
        return list(chosen.values())


def select_cells(benchmarks: list[Benchmark], which: list[str]) -> list[Benchmark]:
    """The benchmarks, with only the cells that match one of `which` (`Cell.matches`).

    Raises:
        ValueError: one that matches no cell.
    """
    for words in which:
        if not any(cell.matches(words) for benchmark in benchmarks for cell in benchmark.cells):
            example = next(
                (str(cell) for benchmark in benchmarks for cell in benchmark.cells), "nothing"
            )
            raise ValueError(
                "--cell: expected properties of a cell of these benchmarks, such as "
                f"{example!r} or a part of it, got {words!r}"
            )
    selected = []
    for benchmark in benchmarks:
        cells = tuple(c for c in benchmark.cells if any(c.matches(words) for words in which))
        if cells:
            selected.append(replace(benchmark, cells=cells))
    return selected


def read_yaml(file: Path) -> Any:
    """The content of a YAML file, plain types only; 1024-10-10 is a network here, not a date.

    Raises:
        ValueError: not YAML, or a tag of something other than plain types.
        OSError: the file cannot be read.
        ImportError: the package pyyaml is missing.
    """
    try:
        import yaml
    except ImportError:
        raise ImportError(
            "reading benchmarks needs the package pyyaml: pip install pyyaml"
        ) from None

    class Loader(yaml.SafeLoader):
        """A loader that reads no dates."""

    Loader.yaml_implicit_resolvers = {
        letter: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    content = file.read_bytes()
    try:
        return Loader(content).get_single_data()
    except Exception as error:  # values that do not fit their tag raise errors of any type
        raise ValueError(
            f"{file.name}: expected a YAML file, got an error: {str(error)[:500]}"
        ) from None


_GRID: dict[str, tuple[Kind, Any]] = {
    "batch": (integer(1), None),
    "density": (number(0, 1, above="a number above 0 and up to 1"), None),
    "block": (integer(1), 1),
    "threads": (integer(1), 1),
    "dtype": (choice(*DTYPES), "float32"),
}
"""Key of a grid beside the layer -> the kind of its values, and the default."""

_MOST_CELLS = 10_000
_PACKAGE = Path(__file__).resolve().parent


def find_spec() -> Path:
    """The benchmarks of this installation: of its source tree, or those that came with the wheel.

    Raises:
        FileNotFoundError: neither is there.
    """
    for file in (
        _PACKAGE.parents[2] / "benchmarks" / "benchmarks.yml",
        _PACKAGE / "benchmarks.yml",
    ):
        if file.is_file():
            return file
    raise FileNotFoundError(
        "no benchmarks.yml came with this installation of dynsparse: name one with --spec FILE"
    )


@check_types
def read_spec(file: Path) -> Spec:
    """The checked benchmarks of a YAML file.

    Raises:
        ValueError: not YAML, or an entry that is unknown, missing or out of range.
        OSError: the file cannot be read.
        ImportError: the package pyyaml is missing.
    """
    content = read_yaml(file)
    top = _Entries(file.name, content, "the file")
    top.allow("defaults", "benchmarks")
    defaults = _Entries(file.name, content.get("defaults") or {}, "defaults")
    defaults.allow(*options_of(Effort))
    effort = _read_effort(defaults, Effort())
    listed = content.get("benchmarks")
    if not isinstance(listed, dict) or not listed:
        top.fail("benchmarks", "a mapping from names to benchmarks", listed)
    benchmarks = {}
    for name, entries in listed.items():
        if not isinstance(name, str):
            top.fail("benchmarks", "names that are text", name)
        benchmarks[name] = _read_benchmark(
            _Entries(file.name, entries, f"benchmark {shorten(name)}"), name, effort
        )
    for benchmark in benchmarks.values():
        for other in benchmark.runs:
            if other not in benchmarks or benchmarks[other].runs:
                _Entries(file.name, {}, f"benchmark {shorten(benchmark.name)}").fail(
                    "runs", "names of benchmarks of this file that run no others", other
                )
    return Spec(file.name, benchmarks)


class _Entries:
    """A mapping of the file, and where it stands there."""

    def __init__(self, file: str, content: Any, where: str) -> None:
        self.file, self.where = file, where
        if not isinstance(content, dict):
            raise ValueError(f"{file}, {where}: expected a mapping, got {shorten(content)}")
        self.content = content

    def fail(self, key: str, expected: str, got: object) -> NoReturn:
        raise ValueError(
            f"{self.file}, {self.where}, {shorten(key)[1:-1]}: expected {expected}, got "
            f"{shorten(got)}"
        )

    def allow(self, *keys: str) -> None:
        for key in self.content:
            if key not in keys:
                self.fail(str(key), f"one of the keys {', '.join(keys)}", key)

    def check(self, key: str, kind: Kind, value: Any) -> Any:
        """The value if it is of the kind."""
        if violation := kind.find_violation(value):
            self.fail(key, *violation)
        return kind.type(value)

    def values(self, key: str, kind: Kind | None, default: Any = None) -> list[Any]:
        """The values of a key, a list or one alone, each of the kind if one is given."""
        value = self.content.get(key, default)
        listed = list(value) if isinstance(value, (list, tuple)) else [value]
        if value is None or not listed:
            self.fail(key, "a value or a list of values", value)
        return listed if kind is None else [self.check(key, kind, item) for item in listed]


def _read_benchmark(entries: _Entries, name: str, effort: Effort) -> Benchmark:
    kinds = [key for key in ("measure", "command", "runs") if key in entries.content]
    if len(kinds) != 1:
        entries.fail("measure", "one of measure, command and runs", kinds or None)
    about = " ".join(entries.check("about", TEXT, entries.content.get("about")).split())
    if kinds != ["measure"]:
        entries.allow("about", *kinds)
        texts = tuple(entries.values(kinds[0], TEXT))
        if kinds == ["runs"]:
            return Benchmark(name, about, runs=texts)
        return Benchmark(name, about, command=texts)
    measure = entries.check("measure", choice(*MEASURES), entries.content["measure"])
    baselines = MEASURES[measure].baselines
    allowed = ["about", "measure", "grid", *options_of(Effort)]
    entries.allow(*allowed, *(["contenders"] if baselines else []))
    contenders: list[str] = []
    if baselines:
        among = list_of(choice(*baselines), f"among {', '.join(baselines)}")
        contenders = entries.values("contenders", among, MEASURES[measure].default_baselines)
    grids = entries.content.get("grid")
    cells: list[Cell] = []
    for grid in grids if isinstance(grids, list) and grids else [grids]:
        cells.extend(_read_cells(_Entries(entries.file, grid, f"{entries.where}, grid"), measure))
    return Benchmark(
        name,
        about,
        measure=measure,
        contenders=tuple(contenders),
        cells=tuple(dict.fromkeys(cells)),
        effort=_read_effort(entries, effort),
    )


def _read_effort(entries: _Entries, default: Effort) -> Effort:
    """`default` with the values of the entries."""
    known = options_of(Effort)
    changes = {
        key: entries.check(key, known[key].kind, value)
        for key, value in entries.content.items()
        if key in known
    }
    return replace(default, **changes)


def _read_cells(grid: _Entries, measure: str) -> list[Cell]:
    grid.allow("layer", *_GRID)
    layers = [_read_features(grid, value, measure) for value in grid.values("layer", None)]
    sizes = {key: grid.values(key, kind, default) for key, (kind, default) in _GRID.items()}
    count = len(layers) * math.prod(map(len, sizes.values()))
    if count > _MOST_CELLS:
        grid.fail("layer", f"at most {_MOST_CELLS:,} cells in all, in several benchmarks", count)
    # Cells that differ in the batch alone follow each other: they share a pattern.
    order = (sizes[key] for key in ("threads", "dtype", "block", "density"))
    return [
        Cell(layer, batch, density, block, thread, dtype)
        for thread, dtype, block, density, layer, batch in itertools.product(
            *order, layers, sizes["batch"]
        )
    ]


def _read_features(grid: _Entries, value: Any, measure: str) -> tuple[int, ...]:
    """1024, 784x300 (in x out), of networks 784-320-10."""
    network = measure == "network"
    if isinstance(value, int) and not isinstance(value, bool) and not network:
        value = f"{value}x{value}"
    size = "0*[1-9][0-9]{0,8}"
    form = f"{size}(-{size})+" if network else f"{size}x{size}"
    if not isinstance(value, str) or not re.fullmatch(form, value):
        expected = "features such as " + ("784-320-10" if network else "1024 or 784x300")
        grid.fail("layer", expected, value)
    return tuple(int(part) for part in value.split("-" if network else "x"))
