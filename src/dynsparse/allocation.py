"""How an overall density is divided among layers: uniform, ER, ERK, with exact totals.

Everything is computed in whole elements and exact fractions, so nothing is lost to rounding: the
blocks of all layers add up to the requested density, to the nearest block.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynsparse._core.checks import check_types, check_within, shorten

if TYPE_CHECKING:
    from fractions import Fraction

__all__ = ["METHODS", "allocate"]

METHODS: dict[str, Callable[[tuple[int, ...]], int]] = {
    "uniform": math.prod,
    "er": lambda shape: (shape[0] + shape[1]) * math.prod(shape[2:]),
    "erk": sum,
}
"""name -> a layer's share of the non-zero elements, as a function of its shape.

Before layers reach density 1 their non-zeros are in these proportions: density times elements.
"""


@dataclass(frozen=True)
class _Layer:
    name: str
    share: int
    elements: int
    block: int  # elements of one block

    @property
    def blocks(self) -> int:
        return self.elements // self.block


@check_types
def allocate(
    shapes: Mapping[str, Sequence[int]],
    density: float | None,
    *,
    method: str = "erk",
    block_size: int | Mapping[str, int] = 1,
    densities: Mapping[str, float] | None = None,
) -> dict[str, int]:
    """Divide an overall density among layers; return the number of blocks of each.

    The non-zero elements of all layers together are `density` times all elements, to the nearest
    block. A layer that would exceed density 1 becomes dense and the rest is shared again among the
    others; a layer that would get less than one block gets one.

    Args:
        shapes: layer name -> [out, in] or [out, in, *kernel], in elements.
        density: density of all layers together, in (0, 1]. None only if `densities` names every
            layer.
        method: "uniform", one density everywhere; "er", density in proportion to
            (in + out) / (in * out), Mocanu et al. 2018, "Scalable training of artificial neural
            networks with adaptive sparse connectivity inspired by network science"; "erk", the
            same with the kernel's dimensions in sum and product, Evci et al. 2020, "Rigging the
            Lottery: Making All Tickets Winners", section 3. For linear layers "er" and "erk" are
            the same.
        block_size: edge of the blocks, one for all or by layer name (defaults to 1).
        densities: layer name -> its own density in (0, 1], to its nearest block. These come first;
            the other layers share what is left of the overall density.

    Returns:
        layer name -> number of blocks, in [1, all of them], in the order of `shapes`.

    Raises:
        ValueError: a density outside (0, 1], an unknown method or name, a block size that does not
            divide out and in, an overall density that one block per layer or `densities` make
            impossible.
    """
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"allocation must be one of {sorted(METHODS)}, got {shorten(method)}")
    fixed = dict(densities or {})
    layers = _make_layers(shapes, method, block_size)
    for name, value in fixed.items():
        if name not in shapes:
            raise ValueError(
                f"densities names {name!r}, which is not a layer: {_list_names(shapes)}"
            )
        check_within(f"the density of {name!r}", value, "(0, 1]")
    counts = {
        layer.name: max(1, round(fixed[layer.name] * layer.blocks))
        for layer in layers
        if layer.name in fixed
    }
    free = [layer for layer in layers if layer.name not in fixed]
    if density is None:
        if free:
            raise ValueError(
                f"density may be None only when densities names every layer; {free[0].name!r} "
                "has none: give an overall density"
            )
    else:
        check_within("density", density, "(0, 1]")
        taken = sum(counts[layer.name] * layer.block for layer in layers if layer.name in fixed)
        counts |= _distribute(free, _budget(layers, free, density, taken))
    return {name: counts[name] for name in shapes}


def _make_layers(
    shapes: Mapping[str, Sequence[int]], method: str, block_size: int | Mapping[str, int]
) -> list[_Layer]:
    if not shapes:
        raise ValueError("there is no layer to share a density among")
    if isinstance(block_size, Mapping):
        for name in block_size:
            if name not in shapes:
                raise ValueError(
                    f"block_size names {name!r}, which is not a layer: {_list_names(shapes)}"
                )
    layers = []
    for name, given in shapes.items():
        shape = tuple(given)
        if len(shape) < 2 or not all(isinstance(n, int) and n >= 1 for n in shape):
            raise ValueError(
                f"the shape of {name!r} must be [out, in] or [out, in, *kernel] of positive "
                f"integers, got {list(shape)}"
            )
        edge = block_size.get(name, 1) if isinstance(block_size, Mapping) else block_size
        check_block(name, shape, edge)
        layers.append(_Layer(name, METHODS[method](shape), math.prod(shape), edge * edge))
    return layers


def check_block(name: str, shape: Sequence[int], edge: int) -> None:
    """Raise ValueError unless blocks of this size fit the layer."""
    if isinstance(edge, bool) or not isinstance(edge, int) or edge < 1:
        raise ValueError(f"the block size of {name!r} must be an integer >= 1, got {edge!r}")
    if shape[0] % edge or shape[1] % edge:
        common = math.gcd(shape[0], shape[1])
        fitting = [n for n in range(1, common + 1) if common % n == 0]
        raise ValueError(
            f"block size {edge} does not divide the layer {name!r} of shape {list(shape)}: "
            f"choose one of {fitting[-8:]} for it, or leave the layer out"
        )


def _list_names(names: Mapping[str, object]) -> str:
    first = ", ".join(repr(name) for name in list(names)[:4])
    return f"expected one of {first}{', ...' if len(names) > 4 else ''}"


def _budget(layers: list[_Layer], free: list[_Layer], density: float, taken: int) -> int:
    """Return the number of elements that the free layers share.

    Raises:
        ValueError: they cannot have so many or so few, by more than one block.
    """
    everything = sum(layer.elements for layer in layers)
    least = sum(layer.block for layer in free)
    most = sum(layer.elements for layer in free)
    budget = round(density * everything) - taken
    # Layers with a density of their own are each rounded to a block, so each may be off by one.
    slack = max(layer.block for layer in free) if free else sum(layer.block for layer in layers)
    if least - slack <= budget <= most + slack:
        return min(max(budget, least), most)
    low, high = (taken + least) / everything, (taken + most) / everything
    if not free:
        raise ValueError(
            f"every layer has a density of its own, {low:.4g} together, but density is {density}: "
            "leave a layer free, or pass density=None"
        )
    reason = "one block is the least a layer can have"
    if taken:
        reason = f"the layers with a density of their own take {taken / everything:.4g}, and " + (
            reason if budget < least else "the others cannot exceed 1"
        )
    raise ValueError(
        f"the overall density {density} is impossible: {reason}; "
        f"choose one between {low:.4g} and {high:.4g}"
    )


def _distribute(layers: list[_Layer], budget: int) -> dict[str, int]:
    """Return the blocks of each layer, at least one, which add up to the budget to the nearest
    block."""
    targets = _targets(layers, budget)
    counts = [int(target // layer.block) for layer, target in zip(layers, targets, strict=True)]
    left = budget - sum(n * layer.block for n, layer in zip(counts, layers, strict=True))
    # Largest remainder first; a block is skipped where it is larger than what is left.
    remainder = [
        target / layer.block - n for target, n, layer in zip(targets, counts, layers, strict=True)
    ]
    order = sorted((i for i, r in enumerate(remainder) if r > 0), key=lambda i: -remainder[i])
    skipped = []
    for i in order:
        if layers[i].block <= left:
            counts[i] += 1
            left -= layers[i].block
        else:
            skipped.append(i)
    if skipped:
        smallest = min(skipped, key=lambda i: layers[i].block)
        if 2 * left > layers[smallest].block:
            counts[smallest] += 1
    return {layer.name: n for layer, n in zip(layers, counts, strict=True)}


def _targets(layers: list[_Layer], budget: int) -> list[Fraction]:
    """Return the elements of each layer, in proportion to the shares and within [one block, all].

    They add up to exactly `budget`.

    The sum of clamp(scale * share, one block, all) rises with the scale and is linear between the
    scales at which a layer reaches one of its bounds: those are searched, the rest is solved for.
    This is where the procedure of Evci et al. ends, which makes layers dense one after another.
    """
    from fractions import Fraction  # also imports decimal: much of this package's import time

    def clamp(scale: Fraction) -> list[Fraction]:
        return [min(max(scale * x.share, Fraction(x.block)), Fraction(x.elements)) for x in layers]

    def total(scale: Fraction) -> Fraction:
        return sum(clamp(scale), Fraction(0))

    if not layers:
        return []
    bends = sorted({Fraction(n, x.share) for x in layers for n in (x.block, x.elements)})
    k = bisect_left(bends, Fraction(budget), key=total)
    if k == 0:
        return clamp(bends[0])
    low, high = bends[k - 1], bends[k]
    moving = [
        x
        for x in layers
        if Fraction(x.block, x.share) <= low and high <= Fraction(x.elements, x.share)
    ]
    return clamp(low + (budget - total(low)) / sum(x.share for x in moving))
