"""The options of `dynsparse matmul`, and values derived from them for all methods."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynsparse.options import (
    OUTPUT_FILE,
    SWITCH,
    TEXT,
    Need,
    check_values,
    choice,
    integer,
    json_object,
    list_of,
    number,
    option,
)

if TYPE_CHECKING:
    from dynsparse.pattern import SparsePattern
    from popsparse.machine.target import Target

_SPARSE = ("dynamic", "static")
_LARGE = integer(1, 2**40)
_CORNER = list_of(integer(0), "a row and a column")
_product = partial(option, panel="Product")
_machine = partial(option, panel="Machine and plan")
_pattern = partial(option, panel="Pattern")
_output = partial(option, panel="Output")


def _runs(*methods: str) -> tuple[Need, ...]:
    """The methods with which an option applies only to runs, not to plans."""
    return (
        Need(
            "products that run",
            lambda r: not (r.plan_only and r.method in methods),
            lambda r: "--plan-only",
            is_shown=False,
        ),
    )


_RUNS = _runs("dynamic", "static", "dense")
_RUNS_PATTERN = _runs("dynamic", "dense")  # a static product is planned for its pattern


@dataclass(frozen=True)
class Request:
    """The given options, and values derived from them.

    Raises:
        ValueError: an option that is invalid, by itself or with another.
    """

    rows: int = _product(MISSING, "Rows of the sparse matrix: output features.", _LARGE)
    cols: int = _product(MISSING, "Its columns: input features.", _LARGE)
    batch: int = _product(MISSING, "Columns of the dense operand.", _LARGE)
    density: float = _product(0.1, "Present blocks over all blocks.", number(0, 1), methods=_SPARSE)
    block_size: int = _product(1, "Edge of the blocks.", _LARGE, methods=_SPARSE)
    dtype: str = _product("float16", "Type of values and operands.", choice("float16", "float32"))
    method: str = _product(
        "dynamic",
        "dynamic: the pattern may change at run time; static: it is known when planning; dense: "
        "the same product with all elements present.",
        choice("dynamic", "static", "dense"),
    )
    passes: str = _product(
        "forward",
        "Passes to run, comma-separated: forward, grad_input, grad_weight.",
        TEXT,
    )
    update: str | None = _product(
        None,
        "Also measure a pattern update (RigL): the dense gradient, its magnitudes pooled by block, "
        "and the transfers over the host link.",
        choice("sum", "avg", "max", "none"),
        methods=("dynamic",),
        needs=_RUNS,
        by_default="no update",
    )
    target: str = _machine("bow", "The machine.", choice("mk2", "bow"))
    tiles: int | None = _machine(None, "Use this many tiles.", integer(1), by_default="1472")
    partials_type: str | None = _machine(
        None,
        "Type of partial sums; fixed for dynamic elements and for static products.",
        choice("float16", "float32"),
        by_default="float32; dense: as the data",
    )
    available_memory_proportion: float = _machine(
        0.6, "Part of a tile's memory for temporary data.", number(0, 1e6)
    )
    oversize: float = _machine(
        0.3, "Spare room of the buckets.", number(0, 1e6), methods=("dynamic",)
    )
    options: dict[str, Any] = _machine(
        {},
        'Further options as JSON, such as {"shared_buckets": false}.',
        json_object('{"shared_buckets": false}'),
        methods=_SPARSE,
    )
    plan_constraints: dict[str, Any] = _machine(
        {},
        'Fix parts of the plan, as JSON such as {"partition": {"z": 1}}.',
        json_object('{"partition": {"z": 1}}'),
        methods=("dynamic",),
    )
    seed: int = _pattern(
        0, "Seed of the pattern and the values.", integer(0, 2**62), needs=_RUNS_PATTERN
    )
    seeds: int = _pattern(
        1,
        "Run this many patterns and report the spread; the figures are those of the run with "
        "median cycles.",
        integer(1, 1_000_000),
        methods=_SPARSE,
        needs=_RUNS,
    )
    weighted_area_begin: tuple[int, ...] | None = _pattern(
        None, "First row and column of a denser area.", _CORNER, methods=_SPARSE,
        needs=_RUNS_PATTERN, by_default="none",
    )  # fmt: skip
    weighted_area_end: tuple[int, ...] | None = _pattern(
        None, "End of that area (exclusive).", _CORNER, methods=_SPARSE, needs=_RUNS_PATTERN,
        by_default="none",
    )  # fmt: skip
    weighted_area_weighting: float = _pattern(
        1.0, "How much denser the area is.", number(0, 1e6), methods=_SPARSE, needs=_RUNS_PATTERN
    )
    check: str | None = _pattern(
        None, "Use normally distributed numbers, and report the rounding of the type.",
        choice("normal"), needs=_RUNS, by_default="numbers whose sums round little",
    )  # fmt: skip
    ignore_data: bool = _pattern(
        False, "Count cycles without computing numbers.", SWITCH, needs=_RUNS
    )
    ignore_memory: bool = _machine(
        False, "Run even if the product does not fit the tiles.", SWITCH, methods=("dynamic",),
        needs=_RUNS,
    )  # fmt: skip
    plan_only: bool = _output(False, "Plan, and stop before running.", SWITCH)
    report_plan: bool = _output(False, "Show why the plan was chosen.", SWITCH, methods=_SPARSE)
    json: bool = _output(False, "Print the figures as JSON.", SWITCH)
    report: Path | None = _output(
        None, "Write a report on plan, run, tiles and buckets: one HTML file.", OUTPUT_FILE
    )
    profile: Path | None = _output(
        None, "Store the report's contents as JSON, for `dynsparse report`.", OUTPUT_FILE,
        needs=_RUNS,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_values(self)
        for flag, value in (("rows", self.rows), ("cols", self.cols)):
            if self.method != "dense" and value % self.block_size:
                raise ValueError(
                    f"--{flag} must be a multiple of --block-size {self.block_size}, got {value}: "
                    f"use {-(-value // self.block_size) * self.block_size} or another block size"
                )
        if self.report_plan and self.json and not self.plan_only:
            raise ValueError("--report-plan is text; with --json use --plan-only --json")
        if self.check is not None and self.ignore_data:
            raise ValueError("--check compares numbers: leave --ignore-data out")
        _ = self.names, self.machine, self.area

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The passes, in the order they run."""
        from popsparse.planning.search import parse_passes

        selected = [name.strip() for name in self.passes.split(",")]
        return tuple(name for name in parse_passes(selected) if name in selected)

    @cached_property
    def machine(self) -> Target:
        from popsparse.machine.target import Target

        return Target.named(self.target, **({} if self.tiles is None else {"tiles": self.tiles}))

    @cached_property
    def area(self) -> tuple[tuple[int, int], tuple[int, int], float] | None:
        """Two corners of the denser area, (row, column), and how much more likely its blocks are.
        The second corner is exclusive."""
        begin, end = self.weighted_area_begin, self.weighted_area_end
        if begin is None and end is None:
            if self.weighted_area_weighting != 1.0:
                raise ValueError(
                    "--weighted-area-weighting needs --weighted-area-begin and --weighted-area-end"
                )
            return None
        corners = []
        for name, corner in (("begin", begin), ("end", end)):
            if corner is None or len(corner) != 2:
                raise ValueError(
                    f"--weighted-area-{name}: expected a row and a column, got {corner}"
                )
            corners.append((corner[0], corner[1]))
        (top, left), (bottom, right) = corners
        if not (top < bottom <= self.rows and left < right <= self.cols):
            raise ValueError(
                f"--weighted-area-begin, --weighted-area-end: expected an area within {self.rows} "
                f"x {self.cols} that is not empty, got {corners[0]} to {corners[1]}"
            )
        return corners[0], corners[1], self.weighted_area_weighting

    def draw(self, seed: int) -> SparsePattern:
        """The pattern of a seed: with a denser area each block is drawn independently, so the
        density holds on average; otherwise the number of blocks is exact.

        Raises:
            ValueError: a weighting that gives a block a probability above 1.
        """
        import torch

        from dynsparse.pattern import SparsePattern

        generator, block = torch.Generator().manual_seed(seed), self.block_size
        if self.area is None:
            return SparsePattern.random(
                self.shape, self.density, block_size=block, generator=generator
            )
        (top, left), (bottom, right), weight = self.area
        grid = torch.ones(self.rows // block, self.cols // block)
        grid[top // block : bottom // block, left // block : right // block] = weight
        chance = grid * (self.density * grid.numel() / grid.sum())
        if float(chance.max()) > 1:
            raise ValueError(
                f"a weighting of {weight:g} needs a probability of {float(chance.max()):.2f} in "
                "the weighted area: lower the weighting or the density"
            )
        drawn = torch.rand(grid.shape, generator=generator) < chance
        return SparsePattern.from_flat(
            drawn.flatten().nonzero().flatten(), shape=self.shape, block_size=block
        )
