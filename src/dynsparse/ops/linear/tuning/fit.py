"""Constants from times: least squares that stay near a table where the times say little."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from dynsparse.ops.linear.choice import cheapest, is_full
from dynsparse.ops.linear.costs import Cost, Costs, Layer, evaluate, family
from dynsparse.ops.linear.tuning.cells import Timing

MOST_ERROR = 0.35
"""Mean error of a time above which nothing is made of the times."""

_FACTOR = 4.0  # a fitted cost is at most so many times that of the table, and at least a part of it
_PRIOR = 1.0  # what the table counts beside the times of a family, in times
_USUAL = 0.2  # an error of a time beyond which it counts the less, the further it is off
_ROUNDS = 8


class Fit(NamedTuple):
    """Constants, and the mean error of a time by them."""

    costs: Costs
    error: float


def terms(name: str, layer: Layer, batch: int, least_batch: int) -> list[float]:
    """What the constants of `Cost` (but least_batch) are multiplied with in its formula."""
    units = np.eye(5).tolist()
    costs = [Cost(a, b, c, d, least_batch, e) for a, b, c, d, e in units]
    return [evaluate(one, name, layer, batch) for one in costs]


def fit(timings: Iterable[Timing], start: Costs) -> Fit:
    """Constants that go with these times.

    Times count by their relative errors, those far off less and less, so that a disturbed machine
    spoils little. A table, at the speed of this machine, counts as one more time of each family:
    it settles what the times leave open. No cost ends up further than four times from that.

    Args:
        timings: of some layers; families without any keep their constants, at that speed.
        start: the table.

    Raises:
        ValueError: no times.
    """
    rows: dict[tuple[str, bool], list[tuple[Layer, int, float]]] = defaultdict(list)
    for one in timings:
        for kind, time in one.times.items():
            # A full pattern is not laid out; it needs no model.
            if not (kind == "dense" and is_full(one.layer)):
                name = family(kind, one.layer.block_size)
                rows[name, one.backward].append((one.layer, one.batch, time))
    if not rows:
        raise ValueError("expected times of some layers, got none")
    speed = _speed(rows, start)
    found: dict[str, list[Cost]] = {}
    errors: list[float] = []
    for name, both in start.items():
        found[name] = []
        for backward, cost in enumerate(both):
            slowed = _slowed(cost, speed)
            cells = rows.get((name, bool(backward)), [])
            fitted = _clamped(name, _fitted(name, cells, slowed), slowed) if cells else slowed
            found[name].append(fitted)
            errors += [abs(np.log(evaluate(fitted, name, at, b) / t)) for at, b, t in cells]
    costs = {name: (forward, backward) for name, (forward, backward) in found.items()}
    return Fit(costs, float(np.mean(errors)))


def _speed(rows: dict[tuple[str, bool], list[tuple[Layer, int, float]]], start: Costs) -> float:
    """How much longer this machine takes than the table says, in the median."""
    ratios = [
        time / evaluate(start[name][backward], name, layer, batch)
        for (name, backward), cells in rows.items()
        for layer, batch, time in cells
    ]
    return float(np.median(ratios))


def _slowed(cost: Cost, by: float) -> Cost:
    call, feature, entry, sample, least, far = cost
    return Cost(call * by, feature * by, entry * by, sample * by, least, far * by)


def _fitted(name: str, cells: Sequence[tuple[Layer, int, float]], prior: Cost) -> Cost:
    # Only here: who chooses kernels needs none of it.
    from scipy.optimize import nnls

    least = prior.least_batch
    matrix = np.array([np.divide(terms(name, at, b, least), t) for at, b, t in cells])
    wanted = np.ones(len(cells))
    before = np.array([*prior[:4], prior.far])
    # What a constant's own term takes of a time, off by as much as a whole time: an error of one.
    share = np.sqrt(_PRIOR * (matrix**2).mean(axis=0))
    weights = np.ones(len(cells))
    found = before
    for _ in range(_ROUNDS):
        whole = np.concatenate([matrix * weights[:, None], np.diag(share)])
        found, _ = nnls(whole, np.concatenate([wanted * weights, share * before]))
        error = np.abs(np.log(np.maximum(matrix @ found, 1e-9)))
        weights = np.sqrt(np.minimum(1.0, _USUAL / np.maximum(error, 1e-9)))
    call, feature, entry, sample, far = found.tolist()
    return Cost(call, feature, entry, sample, least, far)


_REACH = [
    (Layer(size, size, max(1, round(density * (size // 32) ** 2)), 32), batch)
    for size, density, batch in product(
        (64, 256, 1024, 4096), (0.01, 0.1, 0.5, 1.0), (1, 16, 128, 2048)
    )
]


def _clamped(name: str, found: Cost, prior: Cost) -> Cost:
    """As much of what was found as keeps all costs within reach of the table's."""
    share = 1.0
    for block in _REACH:
        layer, batch = block
        if name.endswith("elements"):
            layer = layer._replace(nnz=layer.nnz * 1024, block_size=1)
        ratio = evaluate(found, name, layer, batch) / evaluate(prior, name, layer, batch)
        # Costs are linear in the constants: so much of the way leads to the bound.
        if ratio > _FACTOR:
            share = min(share, (_FACTOR - 1) / (ratio - 1))
        elif ratio < 1 / _FACTOR:
            share = min(share, (1 - 1 / _FACTOR) / (1 - ratio))
    pairs = zip(found, prior, strict=True)
    call, feature, entry, sample, _, far = (share * new + (1 - share) * old for new, old in pairs)
    return Cost(call, feature, entry, sample, prior.least_batch, far)


def above_best(timings: Iterable[Timing], costs: Costs) -> float:
    """How much longer the kinds that the constants choose take than the best ones, on average: 0.05
    are 5 %."""
    over = []
    for one in timings:
        kind = cheapest(costs, one.layer, one.batch, one.backward)
        if not is_full(one.layer) and kind in one.times:
            over.append(one.times[kind] / min(one.times.values()) - 1)
    return float(np.mean(over)) if over else 0.0
