"""The state of a sparse training, in the files that Keras writes of its model."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = ["Passenger"]

_NAME = "training"


class Passenger:
    """Travels with a layer: Keras keeps the variables of layers, and nothing of callbacks.

    Attributes:
        state: gives the state that is to be saved; None where there is no training.
        found: the state that was in the file, for a training to come or one under way.
    """

    def __init__(self) -> None:
        self.state: Callable[[], dict[str, Any]] | None = None
        self.found: dict[str, Any] | None = None

    def save(self, store: Any) -> None:
        """Add the state to what is stored of the layer."""
        state = self.found if self.state is None else self.state()
        if state is not None:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            store[_NAME] = np.frombuffer(buffer.getvalue(), np.uint8)

    def read(self, store: Any) -> Callable[[], None]:
        """Look at what is stored; what is returned takes it over.

        Raises:
            ValueError: it is damaged.
        """
        state = _decoded(np.array(store[_NAME])) if _NAME in set(store.keys()) else None

        def take() -> None:
            self.found = state

        return take


def _decoded(stored: np.ndarray) -> dict[str, Any]:
    try:
        content = stored.astype(np.uint8, casting="equiv").tobytes()
        state = torch.load(io.BytesIO(content), weights_only=True)
        if not isinstance(state, dict) or set(state) != {"trainer", "random"}:
            raise ValueError("expected the entries trainer and random")
    except Exception as error:  # of any kind: torch.load has several
        raise ValueError(f"the state of the sparse training in the file is damaged: {error}") from (
            None
        )
    return state
