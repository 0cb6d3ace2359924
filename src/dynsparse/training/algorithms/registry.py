"""The algorithms by name, with what an application must know to make one."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cached_property

from dynsparse.training.algorithms.basic import SET, RigL, Static
from dynsparse.training.algorithms.deepr import DeepR
from dynsparse.training.algorithms.gradual import GMP, GraNet
from dynsparse.training.algorithms.mest import MEST
from dynsparse.training.algorithms.momentum import SNFS
from dynsparse.training.algorithms.topkast import TopKAST
from dynsparse.training.trainer import SparseTrainer


@dataclass(frozen=True)
class Algorithm:
    """One algorithm.

    Attributes:
        trainer: its class, made as trainer(model, optimizer, **arguments).
        least_first: it prunes: layers begin at this density at least, and end at the one asked for.
            None where they begin at the density asked for.
        trains_embeddings: whether sparse embedding tables may be among the layers.
    """

    trainer: type[SparseTrainer]
    least_first: float | None = None
    trains_embeddings: bool = True

    @cached_property
    def arguments(self) -> frozenset[str]:
        """The names of what the trainer takes besides model, optimizer and ranks."""
        taken = inspect.signature(self.trainer).parameters
        return frozenset(taken) - {"model", "optimizer", "ranks"}

    def first_density(self, final: float) -> float:
        """The density to begin with for a layer that is to end at `final`."""
        return final if self.least_first is None else max(self.least_first, final)


BY_NAME: dict[str, Algorithm] = {
    "rigl": Algorithm(RigL),
    "set": Algorithm(SET),
    "snfs": Algorithm(SNFS),
    "mest": Algorithm(MEST),
    "deepr": Algorithm(DeepR),
    "topkast": Algorithm(TopKAST, trains_embeddings=False),
    "gmp": Algorithm(GMP, least_first=1.0),
    "granet": Algorithm(GraNet, least_first=0.5),
    "static": Algorithm(Static),
}
"""Every algorithm, in the order in which applications list them."""
