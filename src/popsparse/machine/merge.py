"""Joining vertices that were added one by one, so that they too run as one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from popsparse.machine.tensor import Tensor
from popsparse.machine.vertex import VertexSet


def _key(vertices: VertexSet) -> Any:
    """Single vertices with equal keys can run as one set; None keeps a set apart."""
    if vertices.grid.shape != (1,) or vertices.offsets:
        return None
    scalars = tuple(sorted(vertices.scalars.items()))
    if any(np.ndim(value) for _, value in scalars):
        return None
    edges = tuple((name, t.dtype, t.shape) for name, t in sorted(vertices.edges.items()))
    return vertices.codelet, edges, scalars


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors [1, ...] of one shape as one [n, ...]; a regular view if they are evenly apart."""
    first = tensors[0]
    shape = (len(tensors), *first.shape[1:])
    inner = {t._strides[1:] if t._strides is not None else None for t in tensors}
    if len(inner) == 1 and None not in inner:
        gaps = np.unique(np.diff([t._offset for t in tensors]))
        if len(gaps) == 1:
            strides = (int(gaps[0]), *inner.pop())  # type: ignore[misc]
            return Tensor(first.graph, first.dtype, shape, first._offset, strides)
    addresses = np.concatenate([t.addresses() for t in tensors])
    return Tensor(first.graph, first.dtype, shape, addresses=addresses)


def merge_vertices(sets: Sequence[VertexSet]) -> list[VertexSet]:
    """The same vertices in fewer sets."""
    groups: dict[Any, list[VertexSet]] = {}
    for i, vertices in enumerate(sets):
        key = _key(vertices)
        groups.setdefault(i if key is None else key, []).append(vertices)
    out = []
    for group in groups.values():
        first = group[0]
        if len(group) > 1:
            edges = {name: _stack([v.edges[name] for v in group]) for name in first.edges}
            tiles = np.concatenate([v.tiles for v in group])
            first = VertexSet(first.codelet, tiles, edges, {}, first.scalars)
        out.append(first)
    return out
