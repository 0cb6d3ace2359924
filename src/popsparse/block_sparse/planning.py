"""Plans of block-sparse products: which tile does what, before there is a program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dynsparse.checks import check_kind
from popsparse.block_sparse.params import MatmulParams, Options
from popsparse.block_sparse.partition import Pieces, partition


@dataclass(frozen=True, eq=False)
class BlockSparsePlan:
    """Which tile multiplies which blocks of a product. Made by `plan`.

    Attributes:
        params: as given; options: likewise. target: the machine.
    """

    params: MatmulParams
    options: Options
    target: Any

    @cached_property
    def pieces(self) -> Pieces:
        return partition(self.params.forward(), self.options, self.target.tiles)

    @property
    def tiles_used(self) -> int:
        """Tiles that multiply."""
        return len(np.unique(self.pieces.tile))

    @property
    def imbalance(self) -> float:
        """PopSparse's measure of a partition: max(load / mean, mean / load) over the tiles that
        multiply, plus how many do not."""
        return self.pieces.imbalance(self.target.tiles)

    @property
    def multiplications(self) -> int:
        return self.params.multiplications

    def __repr__(self) -> str:
        params = self.params
        return (
            f"BlockSparsePlan({params.kind}, dim={params.dim}, block_size={params.block_size}, "
            f"nnz={params.nnz}, {self.options.partition_method}, {self.tiles_used} tiles)"
        )


def plan(params: MatmulParams, target: Any = None, options: Any = None) -> BlockSparsePlan:
    """Deal the products of blocks to the tiles of a machine.

    Args:
        params: by a class method of `MatmulParams`.
        target: a `popsparse.machine.Target`; by default the Mk2.
        options: `Options` or a mapping.

    Raises:
        TypeError: other things. ValueError: options that do not go with the product.
    """
    from popsparse.machine import Target

    check_kind("params", params, MatmulParams, "block_sparse.MatmulParams")
    target = Target.mk2() if target is None else check_kind("target", target, Target, "a Target")
    made = BlockSparsePlan(params, Options.parse(options), target)
    made.pieces  # noqa: B018  what is wrong shows now
    return made
