"""What of a model is sparse, as a table in plain text."""

from __future__ import annotations

from torch import nn

from dynsparse.nn.linear import SparseLinear
from dynsparse.nn.sites import find_sites
from dynsparse.typed import typed

__all__ = ["describe"]

_HEAD = ("layer", "shape", "block", "density", "non-zeros", "parameters")


@typed
def describe(model: nn.Module) -> str:
    """A line for each sparse layer and each dense one that could be sparse, and one for the model.

    Shapes are [out, in]; non-zeros are counted in elements; parameters are weights and biases, of
    the dense layer and now. A weight that several layers share is there once.
    """
    sites = {site.key: site for site in reversed(find_sites(model).values())}
    dense = {site.name: site for site in sites.values()}
    lines: list[tuple[str, ...]] = []
    saved = 0
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    sparse = {name: m for name, m in model.named_modules() if isinstance(m, SparseLinear)}
    order = {name: i for i, name in enumerate(names)}
    for name in sorted((*sparse, *dense), key=lambda n: order.get(n, order.get(_parent(n), 0))):
        if name in sparse:
            layer = sparse[name]
            kept, bias = layer.values.numel(), 0 if layer.bias is None else layer.bias.numel()
            full = layer.out_features * layer.in_features
            saved += full - kept
            shape, block = layer.pattern.shape, str(layer.block_size)
            lines.append(_line(name, shape, block, f"{layer.density:.4f}", kept, full, bias))
        else:
            site = dense[name]
            bias = 0 if site.bias is None else site.bias.numel()
            full = site.weight.numel()
            lines.append(_line(name, site.shape, "-", "dense", full, full, bias))
    now = sum(parameter.numel() for parameter in model.parameters())
    total = f"the model: {now + saved:,} -> {now:,} parameters ({now / max(1, now + saved):.1%})"
    return "\n".join([*_aligned([_HEAD, *lines]), total])


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _line(
    name: str, shape: tuple[int, int], block: str, density: str, kept: int, full: int, bias: int
) -> tuple[str, ...]:
    parameters = f"{full + bias:,} -> {kept + bias:,}" if kept < full else f"{full + bias:,}"
    return name, f"{shape[0]} x {shape[1]}", block, density, f"{kept:,}", parameters


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = []
    for row in rows:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([first.strip().ljust(widths[0]), *others]))
    return lines
