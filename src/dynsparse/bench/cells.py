"""What is measured: the cells of a grid of sizes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Cell:
    """Sizes of one measurement.

    `features` are the feature counts, the input's first: two for a layer, more for a network.
    """

    features: tuple[int, ...]
    batch: int
    density: float
    block: int = 1
    threads: int = 1
    dtype: str = "float32"

    @property
    def layer(self) -> str:
        """How the features are written in the YAML file: 1024, 784x300 (in x out), 784-320-10."""
        if len(self.features) != 2:
            return "-".join(map(str, self.features))
        out_features, other = self.features
        return str(out_features) if out_features == other else f"{out_features}x{other}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def matches(self, words: str) -> bool:
        """Whether the cell has all properties in `words`: "1024, block 16, bfloat16"."""
        properties = {
            self.layer,
            f"batch {self.batch}",
            f"density {self.density:g}",
            f"block {self.block}",
            self.dtype,
        }
        return {word.strip() for word in words.split(",")} <= properties

    def __str__(self) -> str:
        block = f", block {self.block}" if self.block > 1 else ""
        dtype = f", {self.dtype}" if self.dtype != "float32" else ""
        return f"{self.layer}, batch {self.batch}, density {self.density:g}{block}{dtype}"


def refusal(cell: Cell, available: int | None) -> str | None:
    """Why `cell` cannot be measured, in one line; None where it can.

    `available` is the free memory in bytes, None if unknown.
    """
    for features in cell.features[:-1] if len(cell.features) > 2 else cell.features:
        if features % cell.block:
            return f"block {cell.block} does not divide {features} features"
    need = _bytes_needed(cell)
    if available is not None and need > available:
        return (
            f"needs about {need / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are free: "
            "take a smaller layer or batch"
        )
    return None


def _bytes_needed(cell: Cell) -> int:
    """A generous estimate, all contenders together."""
    elements = sum(a * b for a, b in itertools.pairwise(cell.features))
    # Dense: weight and gradient. Masked: weight, mask, product, both gradients. Growth: one more.
    dense = 4 * 9 * elements
    # Values, gradient, optimizer state, CSR, CSC and MKL's copies of it, 64-bit positions on the
    # way there.
    sparse = int(100 * cell.density * elements)
    # Inputs, outputs and their gradients, and a layout of each.
    activations = 4 * 12 * cell.batch * sum(cell.features)
    return dense + sparse + activations
