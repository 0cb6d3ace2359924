"""Over which axes of a mesh the layers of a model are split, and where the borders lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dynsparse.distributed.chains import Bundle, Chain
from dynsparse.distributed.cuts import cut_features
from dynsparse.nn import SparseLinear

__all__ = ["Borders", "Placement"]


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

    def parts(self, grid: Any) -> tuple[int, int]:
        """Into how many slabs rows and columns are cut, on something with sizes x and y."""
        rows, cols = (1 if axis is None else getattr(grid, axis) for axis in self[:2])
        return rows, cols


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

    def blocks(
        self, position: int, name: str, rows: Sequence[int], cols: Sequence[int]
    ) -> torch.Tensor:
        """How many blocks of a layer are in each rectangle, int64 [row slabs, column slabs]."""
        pattern = self._layers[name].pattern
        b = pattern.block_size
        inner = [torch.tensor(c[1:-1], dtype=torch.int32) // b for c in (rows, cols)]
        at = torch.bucketize(pattern.rows, inner[0], right=True) * (len(cols) - 1)
        at += torch.bucketize(pattern.cols, inner[1], right=True)
        size = len(rows) - 1, len(cols) - 1
        return torch.bincount(at, minlength=size[0] * size[1]).view(size)
