"""What a pattern update asks of the tile machine: how growth scores are made, and what travels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynsparse.checks import check_integer
from popsparse.planning.data_types import data_type, number
from popsparse.planning.options import parse_options

POOLINGS = ("sum", "avg", "max", "none")


@dataclass(frozen=True)
class Update:
    """How a layer's pattern is updated on the machine (RigL).

    The tiles compute the dense gradient of the weights and pool the magnitudes of each block; the
    scores go to the host, which drops and grows; new meta-info and values come back.

    Attributes:
        pooling: how magnitudes of a block become one score: "sum", "avg", "max"; "none" sends the
            gradient as it is, block rows x block columns times as many bytes. ("sum")
        optimizer_slots: tensors of optimizer state that go to the host and come back with the
            values: 1 for momentum, 2 for Adam, where the optimizer runs on the machine. (0)
        available_memory_proportion: the part of a tile's memory that temporary data of the dense
            gradient may take. (0.1, as in Graphcore's application)
        partials_type: of the dense gradient's partial sums. (float32)

    Raises:
        ValueError, TypeError: an option out of range or of the wrong type.
    """

    pooling: str = "sum"
    optimizer_slots: int = 0
    available_memory_proportion: float = 0.1
    partials_type: Any = "float32"

    def __post_init__(self) -> None:
        if not isinstance(self.pooling, str) or self.pooling.lower() not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}")
        object.__setattr__(self, "pooling", self.pooling.lower())
        slots = check_integer("optimizer_slots", self.optimizer_slots, 0)
        if slots > 16:
            raise ValueError(f"optimizer_slots must be at most 16, got {slots}")
        name = "available_memory_proportion"
        object.__setattr__(self, name, number(self.available_memory_proportion, name, 0.0, 1e6))
        partials = data_type(self.partials_type, "partials_type")
        object.__setattr__(self, "partials_type", partials)

    @classmethod
    def parse(cls, value: Update | Mapping[str, Any] | None) -> Update:
        """From a mapping; unknown names are an error that names the nearest known one."""
        return parse_options(cls, value)
