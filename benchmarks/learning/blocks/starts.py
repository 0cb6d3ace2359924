"""Initial patterns in which each layer reads what the previous one writes."""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse import SparsePattern
from dynsparse.nn import SparseLinear

# Each reads what the other writes; queries and keys are multiplied with each other.
CHAINS = (("v_proj", "out_proj"), ("linear1", "linear2"))
MEETING = ("q_proj", "k_proj")


def balanced(pattern: SparsePattern, generator: torch.Generator) -> SparsePattern:
    """As many blocks, spread over rows and columns as evenly as possible."""
    height, width = pattern.grid
    for _ in range(1000):
        rows = _each(height, pattern.nnz, generator)
        cols = _each(width, pattern.nnz, generator)
        flat = (rows * width + cols).unique()
        if len(flat) == pattern.nnz:
            return SparsePattern.from_flat(flat, shape=pattern.shape, block_size=pattern.block_size)
    raise RuntimeError("found no balanced pattern")


def wide(pattern: SparsePattern, writes: bool) -> SparsePattern:
    """As many blocks, in as few rows of blocks as possible; in columns if it `writes`."""
    height, width = pattern.grid
    step = torch.arange(pattern.nnz)
    if writes:
        return SparsePattern(
            step % height, step // height, shape=pattern.shape, block_size=pattern.block_size
        )
    return SparsePattern(
        step // width, step % width, shape=pattern.shape, block_size=pattern.block_size
    )


def _each(groups: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` group numbers in random order; how often each occurs differs by at most one."""
    turns = -(-count // groups)
    drawn = torch.cat([torch.randperm(groups, generator=generator) for _ in range(turns)])[:count]
    return drawn[torch.randperm(count, generator=generator)]


def match(layers: dict[str, SparseLinear]) -> None:
    """Renumber groups of columns (for keys: of rows) so that the groups with the most blocks are
    those with the most blocks in the previous layer's rows (for keys: in the queries' rows)."""
    for name, layer in layers.items():
        above, _, last = name.rpartition(".")
        for writes, reads in CHAINS:
            if last == reads:
                writer = layers[f"{above}.{writes}"].pattern
                rows = torch.bincount(writer.rows.long(), minlength=writer.grid[0])
                cols = torch.bincount(layer.pattern.cols.long(), minlength=layer.pattern.grid[1])
                layer.set_pattern(_renamed(layer.pattern, None, _names(cols, rows)))
        if last == MEETING[1]:
            other = layers[f"{above}.{MEETING[0]}"].pattern
            own = torch.bincount(layer.pattern.rows.long(), minlength=layer.pattern.grid[0])
            rows = torch.bincount(other.rows.long(), minlength=other.grid[0])
            layer.set_pattern(_renamed(layer.pattern, _names(own, rows), None))


def _names(own: Tensor, other: Tensor) -> Tensor:
    """The new number of each group: the fullest gets that of the other's fullest."""
    names = torch.empty_like(own)
    names[own.argsort(descending=True, stable=True)] = other.argsort(descending=True, stable=True)
    return names


def _renamed(pattern: SparsePattern, rows: Tensor | None, cols: Tensor | None) -> SparsePattern:
    new = [
        old.long() if names is None else names[old.long()]
        for old, names in ((pattern.rows, rows), (pattern.cols, cols))
    ]
    return SparsePattern(*new, shape=pattern.shape, block_size=pattern.block_size)
