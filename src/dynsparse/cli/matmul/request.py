"""What `dynsparse matmul` is asked for: its options, and the checks that all methods share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynsparse.checks import check_choice, check_within
from dynsparse.cli.values import integer, number
from dynsparse.files.limits import parse_json
from dynsparse.files.shorten import shortened

if TYPE_CHECKING:
    from popsparse.machine.target import Target

_METHODS = ("dynamic", "static", "dense")
_PRODUCT, _MACHINE, _PATTERN, _OUTPUT = "Product", "Machine and plan", "Pattern", "Output"


def _option(panel: str, help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def _int(panel: str, help: str, *names: str, **more: Any) -> Any:
    return _option(panel, help, *names, parser=integer, metavar="<int>", **more)


def _float(panel: str, help: str, *names: str, **more: Any) -> Any:
    return _option(panel, help, *names, parser=number, metavar="<float>", **more)


_RANGES = {
    "rows": (1, 2**40),
    "cols": (1, 2**40),
    "batch": (1, 2**40),
    "block_size": (1, 2**40),
    "seed": (0, 2**62),
    "seeds": (1, 1_000_000),
}
_SPANS = {
    "density": "[0, 1]",
    "available_memory_proportion": "[0, 1e6]",
    "oversize": "[0, 1e6]",
    "weighted_area_weighting": "[0, 1e6]",
}


@dataclass(frozen=True)
class Request:
    """The options as they were given, and what follows from them.

    Raises:
        ValueError: an option that makes no sense, by itself or with another.
    """

    rows: Annotated[int, _int(_PRODUCT, "Rows of the sparse matrix: output features.")]
    cols: Annotated[int, _int(_PRODUCT, "Its columns: input features.")]
    batch: Annotated[int, _int(_PRODUCT, "Columns of the dense operand.")]
    density: Annotated[
        float, _float(_PRODUCT, "Present blocks over all blocks. dynamic and static.")
    ] = 0.1
    block_size: Annotated[int, _int(_PRODUCT, "Edge of the blocks. dynamic and static.")] = 1
    dtype: Annotated[
        str, _option(_PRODUCT, "Of values and operands.", metavar="float16|float32")
    ] = "float16"
    method: Annotated[
        str,
        _option(
            _PRODUCT,
            "dynamic: the pattern may change at run time; static: it is known when planning; "
            "dense: the same product with all elements.",
            metavar="|".join(_METHODS),
        ),
    ] = "dynamic"
    passes: Annotated[
        str,
        _option(
            _PRODUCT,
            "Which products run, comma-separated: forward, grad_input, grad_weight.",
            metavar="<names>",
        ),
    ] = "forward"
    update: Annotated[
        str | None,
        _option(
            _PRODUCT,
            "Count an update of the pattern, too (RigL): the dense gradient, its magnitudes pooled "
            "by block, and what goes over the host link. For dynamic products.",
            metavar="sum|avg|max|none",
            show_default="no update",
        ),
    ] = None
    target: Annotated[str, _option(_MACHINE, "The machine.", metavar="bow|mk2")] = "bow"
    tiles: Annotated[int | None, _int(_MACHINE, "Use this many tiles.", show_default="1472")] = None
    partials_type: Annotated[
        str | None,
        _option(
            _MACHINE,
            "Of partial sums; for dynamic elements and static ones there is one type alone.",
            metavar="float16|float32",
            show_default="float32; dense: as the data",
        ),
    ] = None
    available_memory_proportion: Annotated[
        float, _float(_MACHINE, "Part of a tile's memory for temporary data.")
    ] = 0.6
    oversize: Annotated[float, _float(_MACHINE, "Spare room of the buckets. dynamic.")] = 0.3
    options: Annotated[
        str,
        _option(
            _MACHINE,
            'Further options as JSON, such as {"shared_buckets": false}.',
            metavar="<json>",
        ),
    ] = "{}"
    plan_constraints: Annotated[
        str,
        _option(
            _MACHINE,
            'Fix parts of the plan, as JSON such as {"partition": {"z": 1}}.',
            metavar="<json>",
        ),
    ] = "{}"
    seed: Annotated[int, _int(_PATTERN, "Of the pattern and the values.")] = 0
    seeds: Annotated[
        int,
        _int(
            _PATTERN,
            "Run this many patterns and report the spread; the figures are those of the run with "
            "the median of cycles.",
        ),
    ] = 1
    weighted_area_begin: Annotated[
        list[int] | None,
        _int(_PATTERN, "First row and column of a denser area.", show_default="none"),
    ] = None
    weighted_area_end: Annotated[
        list[int] | None, _int(_PATTERN, "Row and column after its last.", show_default="none")
    ] = None
    weighted_area_weighting: Annotated[float, _float(_PATTERN, "How much denser the area is.")] = (
        1.0
    )
    ignore_data: Annotated[
        bool, _option(_PATTERN, "Count cycles without computing numbers.", "--ignore-data")
    ] = False
    ignore_memory: Annotated[
        bool,
        _option(
            _MACHINE, "Run also if the product does not fit the tiles. dynamic.", "--ignore-memory"
        ),
    ] = False
    plan_only: Annotated[
        bool, _option(_OUTPUT, "Plan, and stop before running.", "--plan-only")
    ] = False
    report_plan: Annotated[
        bool, _option(_OUTPUT, "Show why the plan was chosen.", "--report-plan")
    ] = False
    as_json: Annotated[bool, _option(_OUTPUT, "Print the figures as JSON.", "--json")] = False
    report: Annotated[
        Path | None,
        _option(
            _OUTPUT,
            "Write a page about plan, run, tiles and buckets: one HTML file.",
            metavar="<file.html>",
        ),
    ] = None
    profile: Annotated[
        Path | None,
        _option(
            _OUTPUT,
            "Store all that is on the page, for `dynsparse report`: JSON.",
            metavar="<file.json>",
        ),
    ] = None

    def __post_init__(self) -> None:
        check_choice("--method", self.method, _METHODS)
        _ = self.names
        for flag, (least, most) in _RANGES.items():
            value = getattr(self, flag)
            if not least <= value <= most:
                span = f"at least {least}" if value < least else f"at most {most:,}"
                raise ValueError(f"{_dashed(flag)} must be {span}, got {value}")
        for flag, value in (("rows", self.rows), ("cols", self.cols)):
            if self.method != "dense" and value % self.block_size:
                raise ValueError(
                    f"--{flag} must be a multiple of --block-size {self.block_size}, got {value}: "
                    f"use {-(-value // self.block_size) * self.block_size} or another block size"
                )
        for flag, span in _SPANS.items():
            check_within(_dashed(flag), getattr(self, flag), span)
        self._check_update()
        if self.report_plan and self.as_json and not self.plan_only:
            raise ValueError("--report-plan is text; with --json use --plan-only --json")
        for flag, file in (("report", self.report), ("profile", self.profile)):
            if file is not None and (file.is_dir() or not file.parent.is_dir()):
                raise ValueError(f"--{flag}: expected a file in a folder that exists, got {file}")
        _ = self.machine, self.area

    def _check_update(self) -> None:
        if self.update is None:
            return
        from popsparse.planning.options import POOLINGS

        check_choice("--update", self.update, POOLINGS)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The passes, in the order they run."""
        from popsparse.planning.search import parse_passes

        asked = [name.strip() for name in self.passes.split(",")]
        return tuple(name for name in parse_passes(asked) if name in asked)

    @cached_property
    def machine(self) -> Target:
        from popsparse.machine.target import Target

        return Target.named(self.target, **({} if self.tiles is None else {"tiles": self.tiles}))

    @cached_property
    def area(self) -> tuple[tuple[int, int], tuple[int, int], float] | None:
        """The denser area as `draw_pattern` takes it."""
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
        if not (0 <= top < bottom <= self.rows and 0 <= left < right <= self.cols):
            raise ValueError(
                f"--weighted-area-begin, --weighted-area-end: expected an area within {self.rows} "
                f"x {self.cols} that is not empty, got {corners[0]} to {corners[1]}"
            )
        return corners[0], corners[1], self.weighted_area_weighting

    def json_object(self, flag: str) -> dict[str, Any]:
        """The object that an option holds as JSON."""
        text = getattr(self, flag)
        try:
            value = parse_json(text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ValueError(f"{_dashed(flag)}: expected a JSON object, got {shortened(text)}")
        return value

    def draw(self, seed: int) -> Any:
        """The pattern of a seed."""
        from popsparse.measure import draw_pattern

        return draw_pattern(self.shape, self.density, self.block_size, seed, self.area)


def _dashed(flag: str) -> str:
    return "--" + flag.replace("_", "-")
