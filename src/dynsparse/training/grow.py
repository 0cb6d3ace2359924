"""Which positions grow: by gradient (RigL), at random (SET), or none; and their initial values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dynsparse._core.checks import check_integer, check_not_negative
from dynsparse.nn import SparseLinear
from dynsparse.ops.grow import best_free, check_pooling, random_outside
from dynsparse.ops.grow.free_positions import check_free_positions
from dynsparse.ops.grow.topk import best_positions, check_pairs, topk_of_layers
from dynsparse.pattern import Rewiring
from dynsparse.ranks import (
    ALONE,
    GrowRequest,
    Ranks,
    check_consistent,
    topk_over_ranks,
)
from dynsparse.training.deferred_checks import layer_errors
from dynsparse.training.layer_shards import gather_full_patterns


class Growth:
    """Chooses the positions to grow: the one component in which RigL and SET differ.

    Attributes:
        needs_gradients: whether `choose` needs x and dY; they are recorded only then.
        options: settings that must agree when a training is resumed; plain types.
    """

    needs_gradients = False

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def choose(
        self, requests: Sequence[GrowRequest], step: int, ranks: Ranks = ALONE
    ) -> list[Tensor]:
        """For each layer `count` flat block positions outside its pattern, int64, in any order.

        A request's `pairs` hold (x [batch, in], dY [batch, out]) whose dY^T X add up to the
        gradient: that of the step, or its momentum, as the trainer's history has it. Of a
        tensor-parallel layer the positions in this rank's shard are returned.

        Args:
            requests: for each layer its name, the pattern where nothing can grow, how many blocks
                to grow, and the pairs of this rank.
            step: the step that ends in the update.
            ranks: that choose together; every one of them calls this, and gets the same positions.
        """
        raise NotImplementedError

    def broadcast_settings(self, ranks: Ranks) -> None:
        """Take defaults from the first rank; called once, by all ranks.

        Raises:
            ValueError: the ranks have different settings.
        """

    def state_dict(self) -> dict[str, Any]:
        """The state that changes from one choice to the next; tensors and plain types."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless `state` can be loaded."""


class GradientGrowth(Growth):
    """The positions of the largest gradient magnitude, pooled per block.

    Source: Evci et al. 2020, "Rigging the Lottery: Making All Tickets Winners", section 3.

    On several ranks the gradient is that of all their samples, which no rank ever holds: see
    `ranks.topk_over_ranks`.

    Args:
        pooling: "sum", "avg", "max" or "none" (ranked as "sum") of a block's magnitudes.
    """

    needs_gradients = True

    def __init__(self, pooling: str = "sum") -> None:
        self.pooling = check_pooling(pooling)
        self.options = {"pooling": self.pooling}

    def choose(
        self, requests: Sequence[GrowRequest], step: int, ranks: Ranks = ALONE
    ) -> list[Tensor]:
        if not ranks.alone:
            return topk_over_ranks(ranks, requests, pooling=self.pooling)
        if all(r.ranked is not None and r.scores is None for r in requests):
            return self._choose_on_devices(requests)
        return [self._choose_alone(request) for request in requests]

    def _choose_alone(self, request: GrowRequest) -> Tensor:
        with layer_errors(request.name):
            pattern, count = request.pattern, request.count
            if request.scores is not None:  # computed on the layer's target
                return best_free(request.scores(request.pairs, self.pooling), pattern, count)
            return best_positions(request.pairs, pattern, count, pooling=self.pooling)

    def _choose_on_devices(self, requests: Sequence[GrowRequest]) -> list[Tensor]:
        pairs, patterns, counts, dtypes = [], [], [], []
        for request in requests:
            with layer_errors(request.name):
                counts.append(check_free_positions(request.pattern, request.count))
                pairs.append(request.pairs)
                patterns.append(request.pattern)
                checked = (
                    check_pairs(request.pairs, request.pattern) if counts[-1] else torch.float32
                )
                dtypes.append(checked)
        best = topk_of_layers(pairs, patterns, counts, dtypes, self.pooling)
        for request, found in zip(requests, best, strict=True):
            assert request.ranked is not None
            request.ranked.append(found.scores)
        return [found.flat for found in best]


class RandomGrowth(Growth):
    """Positions drawn uniformly among the free ones.

    Each choice draws random numbers that follow from the seed, the layer's name and the step. So
    they depend neither on the order of layers nor on how these are sharded, and all ranks draw the
    same.

    Source: Mocanu et al. 2018, "Scalable training of artificial neural networks with adaptive
    sparse connectivity inspired by network science" (SET).

    Args:
        seed: of all choices, so that other random draws do not affect them. By default drawn from
            torch's global generator; several ranks take that of the first.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self._has_seed = seed is not None
        if seed is None:
            seed = int(torch.randint(2**62, (), device="cpu"))
        self.seed = check_integer("seed", seed)

    def choose(
        self, requests: Sequence[GrowRequest], step: int, ranks: Ranks = ALONE
    ) -> list[Tensor]:
        chosen = []
        for local, request in zip(requests, gather_full_patterns(requests, ranks), strict=True):
            with layer_errors(request.name):
                generator = self.generator_for(request.name, step, "positions")
                flat = random_outside(request.pattern, request.count, generator=generator)
            part = local.spec
            chosen.append(flat if part is None else part.to_local(flat, local.pattern.block_size))
        return chosen

    def generator_for(self, layer: str, step: int, what: str) -> torch.Generator:
        """The generator for `what` of a layer at a step."""
        key = repr((self.seed, layer, step, what)).encode()
        number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        return torch.Generator().manual_seed(number >> 1)

    def broadcast_settings(self, ranks: Ranks) -> None:
        if ranks.alone:
            return
        given = str(self.seed) if self._has_seed else "none"
        check_consistent(ranks, {"the seed": given}, "give the same seed on every rank, or none")
        if not self._has_seed:
            self.seed = int(ranks.broadcast(torch.tensor([self.seed], device=ranks.device)))

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]

    def check_state(self, state: dict[str, Any]) -> None:
        seed = state.get("seed") if isinstance(state, dict) else None
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise ValueError(
                f"the state of the growth must hold an integer as its seed, got {seed!r}"
            )


class NoGrowth(Growth):
    """Nothing grows: for budgets that only prune."""

    def choose(
        self, requests: Sequence[GrowRequest], step: int, ranks: Ranks = ALONE
    ) -> list[Tensor]:
        for request in requests:
            if request.count:
                raise ValueError(
                    f"layer {request.name!r}: the budget asks for {request.count} new blocks, but "
                    "there is no growth"
                )
        return [torch.zeros(0, dtype=torch.int64, device="cpu") for _ in requests]


class GradientStep:
    """A grown weight starts with -scale * learning rate * its gradient.

    With scale 1 this is one step of plain gradient descent from zero. The gradient is that of the
    trainer's history: of the step that ends in the update, or its momentum. The learning rate is
    the optimizer's for the layer at the update.

    Raises:
        ValueError: a scale that is negative or not finite.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = check_not_negative("scale", scale)

    def of(self, gradient: Tensor, learning_rate: float) -> Tensor:
        """The initial values of weights with this gradient."""
        return gradient * (-self.scale * learning_rate)


GrownValue = float | GradientStep | Callable[[SparseLinear, Rewiring], Tensor]
"""Initial values of grown weights: a number, a `GradientStep`, or a function that returns [grown]
or [grown, b, b]; or, on a device, where the host would wait to know which slots are grown, an
entry for each slot, [after.nnz] or [after.nnz, b, b]."""
