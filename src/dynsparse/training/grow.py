"""Which positions join: by gradient (RigL), at random (SET), or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dynsparse.ops.grow import check_pooling, random_outside, topk_outside
from dynsparse.pattern import SparsePattern

__all__ = ["GradientGrowth", "Growth", "NoGrowth", "RandomGrowth"]


class Growth:
    """Chooses the positions to grow: the one piece in which RigL and SET differ.

    Attributes:
        needs_gradients: whether `choose` looks at `pairs`; they are recorded only if so.
        options: what must agree when a training is resumed; plain types.
    """

    needs_gradients = False

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def choose(
        self, taken: SparsePattern, count: int, pairs: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """`count` flat block positions outside `taken`, int64 [count], in any order.

        `pairs` holds (x [batch, in], dY [batch, out]) whose dY^T X add up to the gradient: that of
        the step, or its momentum, as the trainer's history has it.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What changes from one choice to the next; tensors and plain types."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless `state` can be loaded."""


class GradientGrowth(Growth):
    """The positions of the largest gradient magnitude, pooled per block.

    Source: Evci et al. 2020, "Rigging the Lottery: Making All Tickets Winners", section 3.

    Args:
        pooling: "sum", "avg", "max" or "none" (ranked as "sum") of a block's magnitudes.
    """

    needs_gradients = True

    def __init__(self, pooling: str = "sum") -> None:
        self.pooling = check_pooling(pooling)
        self.options = {"pooling": self.pooling}

    def choose(
        self, taken: SparsePattern, count: int, pairs: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        return topk_outside(pairs, taken, count, pooling=self.pooling, sort=False).flat


class RandomGrowth(Growth):
    """Positions drawn uniformly among the free ones.

    Source: Mocanu et al. 2018, "Scalable training of artificial neural networks with adaptive
    sparse connectivity inspired by network science" (SET).

    Args:
        seed: of the growth's own generator, so that other random draws do not disturb it. Left
            out, it is drawn from torch's global generator.
        generator: draws the positions in place of an own generator (CPU).
    """

    def __init__(self, seed: int | None = None, generator: torch.Generator | None = None) -> None:
        if generator is None:
            seed = int(torch.randint(2**62, ())) if seed is None else seed
            generator = torch.Generator().manual_seed(seed)
        elif seed is not None:
            raise ValueError("give either seed or generator, not both")
        super().__init__()
        self.generator = generator

    def choose(
        self, taken: SparsePattern, count: int, pairs: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        return random_outside(taken, count, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])

    def check_state(self, state: dict[str, Any]) -> None:
        saved = state.get("generator") if isinstance(state, dict) else None
        try:
            torch.Generator(self.generator.device).set_state(saved)  # type: ignore[arg-type]
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"the state of the growth's generator is damaged: {str(error).splitlines()[0]}"
            ) from None


class NoGrowth(Growth):
    """Nothing joins: for budgets that only prune."""

    def choose(
        self, taken: SparsePattern, count: int, pairs: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        if count:
            raise ValueError(f"the budget asks for {count} new blocks, but there is no growth")
        return torch.zeros(0, dtype=torch.int64)
