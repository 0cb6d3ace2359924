"""Over which axes of a mesh the layers of a model are split, and where the borders lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dynsparse.distributed.chains import Bundle, Chain
from dynsparse.distributed.cuts import cut_features
from dynsparse.nn import SparseLinear
from dynsparse.ranks import RankGrid, Ranks


class Placement(NamedTuple):
    """Where a layer's rows and columns lie, and what it is given and gives.

    Attributes:
        rows, cols: the axis ("x" or "y") over which the slabs of rows (out) and columns (in) are
            spread; None: every rank along the axis has all of them.
        given: the axis over which the features that come in are spread; None: they are whole.
        whole: whether the features that go out are gathered; otherwise each rank has those of its
            rows.
    """

    rows: str | None = None
    cols: str | None = None
    given: str | None = None
    whole: bool = True


class Borders:
    """The borders of a chain's layers, made where they are asked for and remembered.

    Between two bundles there is one set of borders for a number of parts: equal in the non-zeros of
    those who write the features and those who read them. So a slab that one layer writes is the
    one that the next reads, and nothing moves.
    """

    def __init__(self, layers: Mapping[str, SparseLinear], chain: Chain) -> None:
        self._layers = layers
        self._chain = chain
        self._known: dict[tuple[int, int, str], tuple[int, ...]] = {}

    def of_rows(self, position: int, name: str, parts: int) -> tuple[int, ...]:
        """Of what the layer `name` of the bundle at `position` writes, in features."""
        return self._between(position + 1, name, parts)

    def of_cols(self, position: int, name: str, parts: int) -> tuple[int, ...]:
        """Of what it reads."""
        return self._between(position, name, parts)

    def _between(self, position: int, name: str, parts: int) -> tuple[int, ...]:
        """Before the bundle at `position`, or behind the last.

        Raises:
            ValueError: too few features for so many parts.
        """
        chain = self._chain
        inside = 0 < position < len(chain)
        key = position, parts, "" if inside else name
        if key not in self._known:
            # At the ends of a chain each layer is for itself.
            alone = Bundle((name,), chain[-1].unit)
            before = (chain[position - 1] if inside else alone) if position else None
            behind = (chain[position] if inside else alone) if position < len(chain) else None
            self._known[key] = cut_features(
                self._patterns(before), self._patterns(behind), parts, before.unit if before else 1
            )
        return self._known[key]

    def _patterns(self, bundle: Bundle | None) -> list:
        return [] if bundle is None else [self._layers[name].pattern for name in bundle.names]


def placed(chain: Chain, borders: Borders, grid: RankGrid) -> dict[str, Placement]:
    """Where the layers of a chain lie, by name.

    The first has its rows over x and its columns over y, the next the other way round, and so on:
    the slab of features that one writes is the slab that the next reads. Rows or columns that
    cannot be cut into as many slabs stay whole.
    """
    found: dict[str, Placement] = {}
    given = None
    for position, bundle in enumerate(chain):
        rows, cols = ("x", "y") if position % 2 == 0 else ("y", "x")
        over_rows = rows if _is_cut(borders.of_rows, position, bundle, grid.line(rows)) else None
        over_cols = cols if _is_cut(borders.of_cols, position, bundle, grid.line(cols)) else None
        is_last = position == len(chain) - 1
        found.update(
            dict.fromkeys(bundle.names, Placement(over_rows, over_cols, given, whole=is_last))
        )
        given = over_rows
    return found


def _is_cut(
    borders_of: Callable[[int, str, int], Any],
    position: int,
    bundle: Bundle,
    line: Ranks,
) -> bool:
    """Whether there are several ranks, and a slab for each."""
    if line.alone:
        return False
    try:
        for name in bundle.names:
            borders_of(position, name, line.size)
    except ValueError:
        return False
    return True
