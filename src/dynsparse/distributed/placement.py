"""How layers are divided among ranks: balanced shards, chains of layers, and mesh dimensions.

A layer is divided into 2-D shards: ranges of rows (out features) and of columns (in features) that
hold about equal numbers of non-zeros. In a chain one layer hands its shard of features to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dynsparse._core.checks import check_integer, check_types
from dynsparse.nn import (
    Dropout,
    SparseConv1d,
    SparseConv2d,
    SparseLinear,
    SparseMultiheadAttention,
    SparseTransformerLayer,
)
from dynsparse.pattern import SparsePattern
from dynsparse.pattern.index_arrays import slots_of
from dynsparse.ranks import Placement, RankGrid


@check_types
def balance(loads: Sequence[int], parts: int) -> tuple[int, ...]:
    """Borders 0 = c_0 < c_1 < ... < c_parts = len(loads) of contiguous parts of equal load.

    The largest load of a part is as small as it can be; where that leaves a choice, each border is
    the nearest to an even share of what remains.

    Args:
        loads: the load of each unit, an integer of at least 0.
        parts: number of parts; each has at least one unit.

    Raises:
        ValueError: fewer units than parts, or a load below 0.
    """
    check_integer("parts", parts, 1)
    weights = torch.as_tensor(loads, dtype=torch.int64)
    n = len(weights)
    if n < parts:
        raise ValueError(f"cannot cut {n} units into {parts} parts: give each part one at least")
    if n and int(weights.min()) < 0:
        raise ValueError(f"loads must be at least 0, got {int(weights.min())}")
    if not int(weights.sum()):
        weights = torch.ones_like(weights)
    ends = torch.cat([weights.new_zeros(1), weights.cumsum(0)])
    low, high = max(int(weights.max()), -(-int(ends[-1]) // parts)), int(ends[-1])
    while low < high:
        middle = (low + high) // 2
        if _latest_borders(ends, parts, middle)[-1] == n:
            high = middle
        else:
            low = middle + 1
    # The same from the other end: no border may come earlier, or what follows would not fit.
    back = (ends[-1] - ends).flip(0)
    earliest = [n - border for border in reversed(_latest_borders(back, parts, low))]
    borders = [0]
    for part in range(1, parts):
        at = borders[-1]
        share = int(ends[at]) + (int(ends[-1]) - int(ends[at])) / (parts - part + 1)
        most = min(_farthest_border(ends, at, low), n - (parts - part))
        after = min(max(int(torch.searchsorted(ends, share)), at + 1), most)
        before = max(after - 1, at + 1)
        nearer = before if share - int(ends[before]) < int(ends[after]) - share else after
        borders.append(min(max(nearer, earliest[part]), most))
    return (*borders, n)


def _farthest_border(ends: Tensor, at: int, bound: int) -> int:
    """The last border of a part that begins at the border `at` and does not exceed the bound."""
    return int(torch.searchsorted(ends, int(ends[at]) + bound, right=True)) - 1


def _latest_borders(ends: Tensor, parts: int, bound: int) -> list[int]:
    """The latest borders of parts that stay within the bound, each of one unit at least."""
    n = len(ends) - 1
    borders = [0]
    for part in range(1, parts + 1):
        borders.append(min(_farthest_border(ends, borders[-1], bound), n - (parts - part)))
    return borders


def balance_features(
    written: Iterable[SparsePattern], read: Iterable[SparsePattern], parts: int, unit: int = 1
) -> tuple[int, ...]:
    """Borders of features that some layers write and others read, in features.

    Both sides have the same shards, so that nothing is sent between them. Borders lie where every
    layer's blocks end.

    Args:
        written: patterns [features, any], whose rows the features are.
        read: patterns [any, features], whose columns they are.
        parts: how many shards.
        unit: borders are multiples of it, such as the size of a head.

    Raises:
        ValueError: too few features for so many parts.
    """
    sides = [(p, p.rows, p.shape[0]) for p in written] + [(p, p.cols, p.shape[1]) for p in read]
    features = sides[0][2]
    unit = math.lcm(unit, *(pattern.block_size for pattern, _, _ in sides))
    if features % unit or features // unit < parts:
        raise ValueError(
            f"cannot cut {features} features into {parts} shards at multiples of {unit}: "
            "use fewer ranks along this axis, or smaller blocks"
        )
    loads = torch.zeros(features // unit, dtype=torch.int64, device="cpu")
    for pattern, index, _ in sides:
        b = pattern.block_size
        loads += torch.bincount(index.long() * b // unit, minlength=len(loads)) * b**2
    return tuple(border * unit for border in balance(loads.tolist(), parts))


def slice_pattern(
    pattern: SparsePattern, rows: tuple[int, int], cols: tuple[int, int]
) -> tuple[SparsePattern, Tensor]:
    """The part of a pattern in a range of rows and one of columns, and its slots.

    Args:
        rows, cols: (first, after the last) feature; multiples of the block size.

    Returns:
        The part as a pattern, and its slots in the full pattern, int64 [part.nnz].
    """
    b = pattern.block_size
    (top, bottom), (left, right) = ((first // b, last // b) for first, last in (rows, cols))
    begin, end = int(pattern.row_ptr[top]), int(pattern.row_ptr[bottom])
    inside = (pattern.sorted_cols[begin:end] >= left) & (pattern.sorted_cols[begin:end] < right)
    slots = slots_of(inside.nonzero().flatten() + begin, pattern.slots).long()
    flat = (pattern.rows[slots].long() - top) * (right - left) + pattern.cols[slots] - left
    shape = rows[1] - rows[0], cols[1] - cols[0]
    return SparsePattern.from_flat(flat, shape=shape, block_size=b), slots


class Bundle(NamedTuple):
    """Parallel layers, which write features that belong together.

    Attributes:
        names: of the layers: one, or the three projections of an attention.
        unit: the features written are cut at multiples of it: the size of a head, else 1.
    """

    names: tuple[str, ...]
    unit: int = 1


Chain = tuple[Bundle, ...]
"""Consecutive bundles: each reads the features that the one before writes. Between them are only
elementwise functions, or the heads of an attention."""

# These compute each feature by itself, so that they work on shards.
_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
    nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.Softsign, nn.Identity,
    nn.Dropout, Dropout,
)  # fmt: skip


def find_chains(model: nn.Module) -> tuple[dict[str, SparseLinear], list[Chain]]:
    """All sparse layers of a model by name, and its chains; each layer is in one.

    A chain is a run of layers in an `nn.Sequential`, an attention, the feed-forward part of a
    `SparseTransformerLayer`, or any other layer alone.

    Raises:
        TypeError: not a module.
        ValueError: a model without sparse layers, with a convolution, or with interleaved heads.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    layers = {name: m for name, m in model.named_modules() if isinstance(m, SparseLinear)}
    if not layers:
        raise ValueError("the model has no sparse layers: make it sparse with dynsparse.sparsify")
    for name, layer in layers.items():
        if isinstance(layer, (SparseConv1d, SparseConv2d)):
            raise ValueError(
                f"the layer {name!r} is a convolution, which cannot be sharded: train the "
                "model data parallel, with replicate"
            )
    chains: list[Chain] = []
    chained: set[str] = set()
    for chain in _find_candidates(model):
        names = [name for bundle in chain for name in bundle.names]
        if all(name in layers for name in names) and not chained & {*names}:
            chained.update(names)
            chains.append(chain)
    chains += [(Bundle((name,)),) for name in layers if name not in chained]
    order = {name: i for i, name in enumerate(layers)}
    chains.sort(key=lambda chain: order[chain[0].names[0]])
    return layers, chains


def _find_candidates(model: nn.Module) -> Iterator[Chain]:
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, SparseMultiheadAttention):
            if module.interleaved:
                raise ValueError(
                    f"the attention {name!r} has interleaved=True, so that its heads cannot be "
                    "divided among ranks: make it without, or train it on one rank"
                )
            projections = (module.q_proj, module.k_proj, module.v_proj, module.out_proj)
            if all(isinstance(projection, SparseLinear) for projection in projections):
                inputs = tuple(f"{prefix}{projection}_proj" for projection in "qkv")
                yield Bundle(inputs, module.head_dim), Bundle((f"{prefix}out_proj",))
        elif isinstance(module, SparseTransformerLayer):
            yield Bundle((f"{prefix}linear1",)), Bundle((f"{prefix}linear2",))
        elif isinstance(module, nn.Sequential):
            yield from _find_sequential_chains(prefix, module)


def _find_sequential_chains(prefix: str, module: nn.Sequential) -> Iterator[Chain]:
    row: list[Bundle] = []
    last: Any = None
    for name, child in module.named_children():
        if isinstance(child, SparseLinear):
            if row and last.out_features != child.in_features:
                yield tuple(row)
                row = []
            row.append(Bundle((f"{prefix}{name}",)))
            last = child
        elif not isinstance(child, _ELEMENTWISE):
            if row:
                yield tuple(row)
            row = []
    if row:
        yield tuple(row)


class Borders:
    """The borders of the shards of a chain's layers, computed once.

    Between two bundles there is one set of borders for a number of parts, balanced over the
    non-zeros of the layers that write the features and of those that read them. So a shard that one
    layer writes is the one that the next reads, and nothing is sent.
    """

    def __init__(self, layers: Mapping[str, SparseLinear], chain: Chain) -> None:
        self._layers = layers
        self._chain = chain
        self._borders: dict[tuple[int, int, str], tuple[int, ...]] = {}

    def before(self, position: int, name: str, parts: int) -> tuple[int, ...]:
        """Borders of the features that the layer `name` of the bundle at `position` reads, or that
        of the bundle before it writes.

        Raises:
            ValueError: too few features for so many parts.
        """
        chain = self._chain
        inside = 0 < position < len(chain)
        key = position, parts, "" if inside else name
        if key not in self._borders:
            # At the ends of a chain each layer has borders of its own.
            alone = Bundle((name,), chain[-1].unit)
            writers = (chain[position - 1] if inside else alone) if position else None
            readers = (chain[position] if inside else alone) if position < len(chain) else None
            patterns = self._patterns(writers), self._patterns(readers)
            unit = writers.unit if writers else 1
            self._borders[key] = balance_features(*patterns, parts, unit)
        return self._borders[key]

    def _patterns(self, bundle: Bundle | None) -> list:
        return [] if bundle is None else [self._layers[name].pattern for name in bundle.names]


def place_layers(chain: Chain, borders: Borders, grid: RankGrid) -> dict[str, Placement]:
    """The placements of a chain's layers, by name.

    The first layer has its rows over x and its columns over y, the next the other way round, and so
    on: the shard of features that one writes is the one that the next reads. Rows or columns with
    too few blocks are not sharded.
    """
    placements: dict[str, Placement] = {}
    input_axis = None
    for position, bundle in enumerate(chain):
        rows, cols = ("x", "y") if position % 2 == 0 else ("y", "x")
        over_rows = _shardable_axis(rows, borders, position + 1, bundle, grid)
        over_cols = _shardable_axis(cols, borders, position, bundle, grid)
        is_last = position == len(chain) - 1
        placement = Placement(over_rows, over_cols, input_axis, gather_output=is_last)
        placements |= dict.fromkeys(bundle.names, placement)
        input_axis = over_rows
    return placements


def _shardable_axis(
    axis: str, borders: Borders, position: int, bundle: Bundle, grid: RankGrid
) -> str | None:
    """The axis if it has several ranks and each layer a shard for each of them; otherwise None."""
    line = grid.ranks_along(axis)
    if line.alone:
        return None
    try:
        for name in bundle.names:
            borders.before(position, name, line.size)
    except ValueError:
        return None
    return axis
