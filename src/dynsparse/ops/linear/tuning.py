"""Measures the kernels on this processor and fits the constants that choose among them.

`dynsparse tune` calls `tune`: it times all kinds on a list of cells, fits constants to the times,
and stores them for later processes (`cost_table.py`).
"""

from __future__ import annotations

import datetime
import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from dynsparse._core import native
from dynsparse._core.files.folders import cache_folder
from dynsparse.ops.linear.cost_table import (
    Cost,
    Costs,
    Layer,
    Measurement,
    Table,
    candidate_kinds,
    cheapest_kind,
    default_table,
    evaluate,
    family,
    is_full,
    load_measurement,
    save_measurement,
)
from dynsparse.ops.linear.cpu import KERNELS
from dynsparse.ops.linear.layer_index import LayerIndex
from dynsparse.pattern import SparsePattern

_log = logging.getLogger(__name__)

MOST_ERROR = 0.35
"""Mean relative error of a time above which the fitted constants are not used."""

_FACTOR = 4.0  # a fitted cost is at most this factor from the table's
_PRIOR = 1.0  # weight of the table, in times of a family
_USUAL_ERROR = 0.2  # larger relative errors count less and less
_ROUNDS = 8  # of the reweighted fit
_LEAST_TIMINGS, _MOST_TIMINGS = 3, 9  # of a cell
_CELL_SECONDS = 0.1  # for a cell, unless its least number of timings takes longer
_SECONDS, _QUICK_SECONDS = 50.0, 1.8  # no cell begins later


# Cells: layers and batches, and the times of their kernels.


class Cell(NamedTuple):
    """A layer [out, in] and a batch."""

    out_features: int
    in_features: int
    block_size: int
    density: float
    batch: int


class Timing(NamedTuple):
    """Nanoseconds of a layer by kind, forward or both gradients."""

    layer: Layer
    batch: int
    backward: bool
    times: dict[str, float]


# Every family, small and large layers, about as many on either side of the break-evens.
QUICK = tuple(
    Cell(*cell)
    for cell in (
        (256, 256, 1, 0.1, 16), (256, 256, 1, 0.5, 128), (300, 784, 1, 0.2, 64),
        (1024, 1024, 1, 0.05, 8), (1024, 1024, 1, 0.1, 128), (1024, 1024, 1, 0.5, 64),
        (1024, 1024, 1, 0.3, 2), (2048, 2048, 1, 0.1, 16), (512, 512, 1, 0.4, 256),
        (256, 256, 4, 0.3, 16), (512, 512, 4, 0.1, 128), (512, 512, 4, 0.6, 256),
        (1024, 1024, 4, 0.3, 2), (1024, 1024, 8, 0.2, 32),
        (256, 256, 16, 0.3, 16), (512, 512, 16, 0.1, 128), (512, 512, 32, 0.6, 256),
        (1024, 1024, 16, 0.3, 2), (1024, 1024, 32, 0.2, 32),
    )
)  # fmt: skip

_LAYERS = ((256, 256), (300, 784), (1024, 1024), (2048, 2048))
_BLOCKS = (1, 4, 16, 32)
_DENSITIES = (0.03, 0.1, 0.3, 0.6)
_BATCHES = (1, 4, 16, 64, 128, 512)
# Multiply-adds of the dense product; costs of larger cells follow from smaller ones.
_MOST_WORK = 600_000_000


def _make_cells() -> tuple[Cell, ...]:
    cells = [
        Cell(out, in_, block, density, batch)
        for (out, in_), block, density, batch in product(_LAYERS, _BLOCKS, _DENSITIES, _BATCHES)
        if out % block == in_ % block == 0 and out * in_ * batch <= _MOST_WORK
    ]
    # Shuffled, so that a run that stops early has sampled all of them.
    random.Random(0).shuffle(cells)
    return tuple(cells)


MANY = _make_cells()


def time_cell(cell: Cell, seconds: float) -> list[Timing]:
    """Measure the least times of all kinds of a cell, on one thread: forward, and backward.

    The kinds are timed in turn, so that other processes disturb all of them alike; the minimum over
    rounds removes most of it. The first round only allocates memory and builds indexes.

    Args:
        seconds: no round begins later, once there are enough for a minimum.
    """
    end = time.perf_counter() + seconds
    generator = torch.Generator().manual_seed(0)
    shape = cell.out_features, cell.in_features
    with _single_thread():
        pattern = SparsePattern.random(
            shape, cell.density, block_size=cell.block_size, generator=generator
        )
        values = _randn(pattern.values_shape, generator)
        p = LayerIndex(pattern.index, values)
        x = _randn((cell.batch, cell.in_features), generator)
        dy = _randn((cell.batch, cell.out_features), generator)
        bias = _randn((cell.out_features,), generator)
        layer = Layer(*shape, pattern.nnz, cell.block_size)
        # The time of the dense product hardly depends on the density.
        kinds = dict.fromkeys([*candidate_kinds(layer, cell.batch), "dense"])
        least: list[dict[str, float]] = [{}, {}]
        for turn in range(_MOST_TIMINGS + 1):
            if turn > _LEAST_TIMINGS and time.perf_counter() > end:
                break
            for kind in kinds:
                passes = KERNELS[kind]
                calls: tuple[Callable[[], object], ...] = (
                    partial(passes.forward, x, values, p, bias),
                    partial(passes.backward, dy, x, values, p, True, True),
                )
                for times, call in zip(least, calls, strict=True):
                    begin = time.perf_counter_ns()
                    call()
                    elapsed = float(time.perf_counter_ns() - begin)
                    if turn:
                        times[kind] = min(elapsed, times.get(kind, elapsed))
    return [Timing(layer, cell.batch, bool(i), times) for i, times in enumerate(least)]


@contextmanager
def _single_thread() -> Iterator[None]:
    """Compute on one thread, without gradients and autocast.

    Several threads would wait for each other whenever another process runs.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_num_threads(threads)


def _randn(shape: tuple[int, ...] | torch.Size, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


# Fitting: least squares that stay near the table where the times say little.


class Fit(NamedTuple):
    """Constants, and the mean relative error of a predicted time."""

    costs: Costs
    error: float


def terms(name: str, layer: Layer, batch: int, least_batch: int) -> list[float]:
    """Return the factors of the constants of `Cost`, except least_batch, in its formula."""
    units = np.eye(5).tolist()
    costs = [Cost(a, b, c, d, least_batch, e) for a, b, c, d, e in units]
    return [evaluate(cost, name, layer, batch) for cost in costs]


def fit(timings: Iterable[Timing], start: Costs) -> Fit:
    """Fit constants to times.

    Relative errors count, large ones less and less, so that disturbances spoil little. The table,
    scaled to the speed of this machine, counts as one more time of each family and decides what the
    times leave open. No cost ends up more than a factor of four from it.

    Args:
        timings: the times of some layers; families without times keep the scaled constants.
        start: the table's constants.

    Raises:
        ValueError: no times.
    """
    rows: dict[tuple[str, bool], list[tuple[Layer, int, float]]] = defaultdict(list)
    for timing in timings:
        for kind, nanoseconds in timing.times.items():
            # A full pattern is always computed by a dense product and needs no model.
            if not (kind == "dense" and is_full(timing.layer)):
                name = family(kind, timing.layer.block_size)
                rows[name, timing.backward].append((timing.layer, timing.batch, nanoseconds))
    if not rows:
        raise ValueError("expected times of some layers, got none")
    ratio = _median_ratio(rows, start)
    fits: dict[str, list[Cost]] = {}
    errors: list[float] = []
    for name, passes in start.items():
        fits[name] = []
        for backward, cost in enumerate(passes):
            prior = _scale(cost, ratio)
            cells = rows.get((name, bool(backward)), [])
            fitted = _clamp(name, _fit_family(name, cells, prior), prior) if cells else prior
            fits[name].append(fitted)
            errors += [abs(np.log(evaluate(fitted, name, at, b) / t)) for at, b, t in cells]
    costs = {name: (forward, backward) for name, (forward, backward) in fits.items()}
    return Fit(costs, float(np.mean(errors)))


def _median_ratio(
    rows: dict[tuple[str, bool], list[tuple[Layer, int, float]]], start: Costs
) -> float:
    """Return the median of measured / predicted times."""
    ratios = [
        nanoseconds / evaluate(start[name][backward], name, layer, batch)
        for (name, backward), cells in rows.items()
        for layer, batch, nanoseconds in cells
    ]
    return float(np.median(ratios))


def _scale(cost: Cost, factor: float) -> Cost:
    call, feature, entry, sample, least, far = cost
    return Cost(
        call * factor, feature * factor, entry * factor, sample * factor, least, far * factor
    )


def _fit_family(name: str, cells: Sequence[tuple[Layer, int, float]], prior: Cost) -> Cost:
    from scipy.optimize import nnls

    least = prior.least_batch
    matrix = np.array([np.divide(terms(name, at, b, least), t) for at, b, t in cells])
    ones = np.ones(len(cells))
    constants = prior_constants = np.array([*prior[:4], prior.far])
    # A constant whose term is off by a whole time is an error of one.
    share = np.sqrt(_PRIOR * (matrix**2).mean(axis=0))
    weights = np.ones(len(cells))
    for _ in range(_ROUNDS):
        rows = np.concatenate([matrix * weights[:, None], np.diag(share)])
        constants, _ = nnls(rows, np.concatenate([ones * weights, share * prior_constants]))
        error = np.abs(np.log(np.maximum(matrix @ constants, 1e-9)))
        weights = np.sqrt(np.minimum(1.0, _USUAL_ERROR / np.maximum(error, 1e-9)))
    call, feature, entry, sample, far = constants.tolist()
    return Cost(call, feature, entry, sample, least, far)


_CLAMPED_AT = [
    (Layer(size, size, max(1, round(density * (size // 32) ** 2)), 32), batch)
    for size, density, batch in product(
        (64, 256, 1024, 4096), (0.01, 0.1, 0.5, 1.0), (1, 16, 128, 2048)
    )
]


def _clamp(name: str, fitted: Cost, prior: Cost) -> Cost:
    """Return the point between prior and fit that is nearest to the fit, among those with every
    cost within `_FACTOR` of the prior's."""
    share = 1.0
    for layer, batch in _CLAMPED_AT:
        if name.endswith("elements"):
            layer = layer._replace(nnz=layer.nnz * 1024, block_size=1)
        ratio = evaluate(fitted, name, layer, batch) / evaluate(prior, name, layer, batch)
        # Costs are linear in the constants.
        if ratio > _FACTOR:
            share = min(share, (_FACTOR - 1) / (ratio - 1))
        elif ratio < 1 / _FACTOR:
            share = min(share, (1 - 1 / _FACTOR) / (1 - ratio))
    pairs = zip(fitted, prior, strict=True)
    call, feature, entry, sample, _, far = (share * new + (1 - share) * old for new, old in pairs)
    return Cost(call, feature, entry, sample, prior.least_batch, far)


def mean_excess(timings: Iterable[Timing], costs: Costs) -> float:
    """Return how much longer the chosen kinds take than the best kinds, on average: 0.05 is 5 %."""
    excess = []
    for timing in timings:
        kind = cheapest_kind(costs, timing.layer, timing.batch, timing.backward)
        if not is_full(timing.layer) and kind in timing.times:
            excess.append(timing.times[kind] / min(timing.times.values()) - 1)
    return float(np.mean(excess)) if excess else 0.0


# The command: measure, evaluate, store.


def evaluate_timings(timings: Sequence[Timing], table: Table) -> Measurement:
    """Fit constants to the times of some cells, forward and backward in turn, and decide whether to
    use them.

    The quality of the choice is judged on cells that were not fitted: those of each half by the
    constants of the other.

    Args:
        table: the supplied one.

    Raises:
        ValueError: no times.
    """
    result = fit(timings, table.costs)
    halves = [[t for i, t in enumerate(timings) if i // 2 % 2 == half] for half in (0, 1)]
    measured = mean_excess(timings, result.costs)
    if all(halves):
        fits = [fit(half, table.costs) for half in halves]
        measured = sum(mean_excess(halves[1 - i], f.costs) for i, f in enumerate(fits)) / 2
    excess = {"default": mean_excess(timings, table.costs), "measured": measured}
    gain = f"{measured:.1%} over the best kinds, in place of {excess['default']:.1%}"
    enabled = False
    if result.error > MOST_ERROR:
        reason = (
            f"no constants explain the times (mean error {result.error:.0%}): measure again when "
            "nothing else runs"
        )
    elif measured >= excess["default"]:
        reason = f"the table {table.name} chooses as well: {gain}"
    else:
        enabled, reason = True, gain
    return Measurement(
        date=datetime.date.today().isoformat(),
        costs=result.costs,
        error=result.error,
        excess=excess,
        enabled=enabled,
        reason=reason,
    )


def tune(quick: bool = False, on_progress: Callable[[int, int], None] | None = None) -> Measurement:
    """Measure this processor, on one thread, and store the result for later processes.

    A result that is not to be used does not replace an earlier one that is.

    Args:
        quick: take less than two seconds rather than less than a minute.
        on_progress: called with the number of cells measured and the total.

    Raises:
        ValueError: there are no compiled kernels, or the result cannot be stored.
    """
    if native.load() is None:
        raise ValueError("nothing is measured: there are no compiled kernels here to choose from")
    cells = QUICK if quick else MANY
    limit = time.perf_counter() + (_QUICK_SECONDS if quick else _SECONDS)
    timings: list[Timing] = []
    for done, cell in enumerate(cells, 1):
        if time.perf_counter() > limit:
            break
        timings += time_cell(cell, 0.0 if quick else _CELL_SECONDS)
        if on_progress is not None:
            on_progress(done, len(cells))
    result = evaluate_timings(timings, default_table())
    before = load_measurement()
    if not result.enabled and before is not None and before.enabled:
        return replace(result, reason=f"{result.reason}; that of {before.date} stays in use")
    try:
        save_measurement(result)
    except OSError as error:
        raise ValueError(
            f"the result cannot be stored in {cache_folder()} ({error}): make the folder writable, "
            "or set DYNSPARSE_CACHE_DIR"
        ) from error
    _log.info("measured %d layers: %s", len(timings) // 2, result.reason)
    return result
