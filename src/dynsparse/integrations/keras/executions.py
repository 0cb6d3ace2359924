"""Many steps for one call of the callbacks: `steps_per_execution`, which Keras on torch lacks."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from dynsparse.integrations.keras.library import keras

__all__ = ["many_steps"]


def many_steps(model: Any) -> None:
    """Let `compile(steps_per_execution=n)` hold: `fit`, `evaluate` and `predict` take n batches
    between two calls of the callbacks' batch hooks, and give what single steps give.

    Keras refuses it with the torch backend. A model where n is 1 goes Keras' own way.
    """
    for name in ("train", "test", "predict"):
        made = MethodType(_maker(name, getattr(type(model), f"make_{name}_function")), model)
        vars(model)[f"make_{name}_function"] = made


def _maker(name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
    def make(model: Any, force: bool = False) -> Any:
        if model.steps_per_execution == 1:
            return usual(model, force)
        if model.jit_compile is True:
            raise ValueError(
                "expected jit_compile=False with steps_per_execution above 1, got True: leave one "
                "of them out"
            )
        step = getattr(model, f"{name}_step")

        def trained(batches: list[Any]) -> Any:
            for batch in batches:
                logs = step(batch)
            return logs

        @torch.no_grad()
        def tested(batches: list[Any]) -> Any:
            return trained(batches)

        @torch.no_grad()
        def predicted(batches: list[Any]) -> Any:
            made = [step(batch) for batch in batches]
            return keras.tree.map_structure(lambda *parts: torch.cat(parts), *made)

        functions = {"train": trained, "test": tested, "predict": predicted}
        setattr(model, f"{name}_function", functions[name])
        return functions[name]

    return make
