"""What is compared: the language model's training with one thing changed at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

__all__ = ["CHANGES", "METHODS", "Variant", "variant"]


@dataclass(frozen=True)
class Variant:
    """RigL as `dynsparse lm` trains it, but for what is said here."""

    growth: str | None = "gradient"
    """"gradient", "random" (SET), None (static), or "correlation": the gradient of each weight
    over the root mean squares of its input and of the gradient of its output."""
    masked: bool = False
    """Dense weights under masks: a second implementation."""
    batches: int = 1
    """Whose gradients are added up for growth, all at the weights of the update."""
    window: int = 1
    """Growth looks at the gradients of so many last steps, nearly alike (0.99 to the age): for
    nothing but memory, while `batches` costs passes of its own."""
    second_moment: str = "zero"
    """Adam's, of grown weights: "zero", or "median", that of the layer's other weights."""
    initial_step: float = 0.0
    """Grown weights start with as many steps of gradient descent."""
    protect: bool = False
    """What one update grows the next does not drop."""
    regrow: bool = False
    """What an update drops it may grow again, the rule of RigL's paper."""
    interval: float = 1.0
    """Steps between updates, as a multiple of a twentieth of the training."""
    share: float = 0.3
    first: float = 0.0
    """No update before this share of the training."""
    end: float = 0.75
    sparsity: float = 0.9
    allocation: str = "uniform"
    only: str = ""
    """Update only the layers with this in their names."""
    noise: bool = False
    """Measure at some updates how growth depends on the batch."""


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
    """The variant of a name such as "set", or "set, 97 %": a method and what is changed of it."""
    method, *changes = name.split(", ")
    made = replace(Variant(), **METHODS[method])
    for change in changes:
        made = replace(made, **CHANGES[change])
    return made
