"""The variants to compare: the language model's training with one change at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Variant:
    """Differences from RigL in `dynsparse lm`."""

    growth: str | None = "gradient"
    """"gradient", "random" (SET), None (static), or "correlation": each weight's gradient divided
    by the root mean squares of its input and of its output's gradient."""
    masked: bool = False
    """Dense weights with masks, a second implementation."""
    batches: int = 1
    """Number of batches whose gradients are summed for growth, all at the weights of the update."""
    window: int = 1
    """Number of past steps whose gradients growth sums, weighted by 0.99^age: costs only memory,
    while `batches` costs extra passes."""
    second_moment: str = "zero"
    """Adam's second moment of grown weights: "zero", or the "median" of the layer's others."""
    initial_step: float = 0.0
    """Grown weights start with this multiple of a gradient descent step."""
    protect: bool = False
    """An update does not drop what the previous one grew."""
    regrow: bool = False
    """An update may regrow what it drops, as in the RigL paper."""
    interval: float = 1.0
    """Steps between updates, as a multiple of a twentieth of the training."""
    share: float = 0.3
    first: float = 0.0
    """Share of the training before the first update."""
    end: float = 0.75
    sparsity: float = 0.9
    allocation: str = "uniform"
    only: str = ""
    """Update only the layers with this in their names."""
    noise: bool = False
    """Measure how growth depends on the batch, at some updates."""


METHODS: dict[str, dict[str, Any]] = {
    "rigl": {},
    "set": {"growth": "random"},
    "static": {"growth": None},
    "masked rigl": {"masked": True},
}
CHANGES: dict[str, dict[str, Any]] = {
    "16 batches": {"batches": 16},
    "window 16": {"window": 16},
    "second moment": {"second_moment": "median"},
    "initial step": {"initial_step": 1.0},
    "protected": {"protect": True},
    "regrow": {"regrow": True},
    "late start": {"first": 0.25},
    "early end": {"end": 0.4},
    "interval / 2": {"interval": 0.5},
    "interval x 3": {"interval": 3.0},
    "share 0.1": {"share": 0.1},
    "erk": {"allocation": "erk"},
    "97 %": {"sparsity": 0.97},
    "99 %": {"sparsity": 0.99},
    "attention only": {"only": "_proj"},
    "feed-forward only": {"only": ".linear"},
    "correlation": {"growth": "correlation"},
    "noise": {"noise": True},
}


def variant(name: str) -> Variant:
    """The variant of a name such as "set" or "set, 97 %": a method and its changes."""
    method, *changes = name.split(", ")
    made = replace(Variant(), **METHODS[method])
    for change in changes:
        made = replace(made, **CHANGES[change])
    return made
