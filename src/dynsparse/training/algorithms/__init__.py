"""The algorithms: `SparseTrainer` with its components chosen; DeepR and Top-KAST add steps."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cached_property

from dynsparse.training.algorithms.composed import GMP, MEST, SET, SNFS, GraNet, RigL, Static
from dynsparse.training.algorithms.deepr import DeepR
from dynsparse.training.algorithms.topkast import TopKAST
from dynsparse.training.trainer import SparseTrainer

__all__ = [
    "BY_NAME",
    "GMP",
    "MEST",
    "SET",
    "SNFS",
    "Algorithm",
    "DeepR",
    "GraNet",
    "RigL",
    "Static",
    "TopKAST",
]


@dataclass(frozen=True)
class Algorithm:
    """A training algorithm, as applications choose it by name.

    Attributes:
        trainer: the trainer class, called as trainer(model, optimizer, **arguments).
        least_first: for algorithms that prune, whose layers end with the requested density: they
            begin with at least this one. None if layers begin with the requested density.
        trains_embeddings: whether sparse embedding tables may be among the layers.
    """

    trainer: type[SparseTrainer]
    least_first: float | None = None
    trains_embeddings: bool = True

    @cached_property
    def arguments(self) -> frozenset[str]:
        """Names of the arguments of the trainer besides model, optimizer and ranks."""
        parameters = inspect.signature(self.trainer).parameters
        return frozenset(parameters) - {"model", "optimizer", "ranks"}

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
