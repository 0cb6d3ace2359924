"""Which positions join: by gradient (RigL), at random (SET), or none."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dynsparse.ops.grow import best_free, check_pooling, random_outside
from dynsparse.ops.grow.topk import best_positions, topk_outside
from dynsparse.pattern import SparsePattern
from dynsparse.ranks import (
    ALONE,
    GrowRequest,
    Ranks,
    broadcast_from_first,
    check_consistent,
    collective_errors,
    digest,
    topk_over_ranks,
)
from dynsparse.training.change import naming
from dynsparse.training.spread import whole_patterns


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

    def choose_all(
        self, wanted: Sequence[GrowRequest], step: int, ranks: Ranks = ALONE
    ) -> list[Tensor]:
        """What `choose` chooses for each layer, in one go and the same on all ranks.

        A growth of one's own need not define it: `choose` is asked for one layer after the other,
        on several ranks by the first of them.

        Args:
            wanted: for each layer its name, its positions that are taken, how many shall grow, and
                the pairs of this rank.
            step: that ends in the update.
            ranks: that choose together; every one of them calls this.
        """
        if not ranks.alone and self.needs_gradients:
            raise TypeError(
                f"{type(self).__name__} looks at gradients, of which each rank has a part: define "
                "choose_all to grow over several ranks"
            )
        chosen = []
        with collective_errors(ranks):
            for one in wanted:
                with naming(one.name):
                    chosen.append(self.choose(one.pattern, one.count, one.pairs))
        return broadcast_from_first(ranks, chosen)

    def choose_parts(
        self, wanted: Sequence[GrowRequest], step: int, ranks: Ranks = ALONE
    ) -> list[Tensor]:
        """As `choose_all`, also for layers in rectangles: what falls into those of this rank.

        Growth that looks at no gradient chooses for whole layers, whose patterns come together.
        """
        if all(one.part is None for one in wanted):
            return self.choose_all(wanted, step, ranks)
        if self.needs_gradients:
            raise TypeError(
                f"{type(self).__name__} looks at gradients, of which each rank has a rectangle: "
                "define choose_parts to grow layers in rectangles"
            )
        chosen = self.choose_all(whole_patterns(wanted, ranks), step, ranks)
        return [
            flat if one.part is None else one.part.to_part(flat, one.pattern.block_size)
            for one, flat in zip(wanted, chosen, strict=True)
        ]

    def meet(self, ranks: Ranks) -> None:
        """Be as on the first of the ranks where nothing was asked for; called once, by all.

        Raises:
            ValueError: the ranks were asked for different things.
        """

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

    On several ranks the gradient is that of all their samples, which none of them ever holds: see
    `ranks.topk_over_ranks`.

    Args:
        pooling: "sum", "avg", "max" or "none" (ranked as "sum") of a block's magnitudes.
        wire: torch.bfloat16 sends pieces of the gradient at half the bytes; what is chosen stays
            exact. Only several ranks send anything.
    """

    needs_gradients = True

    def __init__(self, pooling: str = "sum", wire: torch.dtype | None = None) -> None:
        self.pooling = check_pooling(pooling)
        if wire not in (None, torch.bfloat16):
            raise ValueError(f"wire must be None or torch.bfloat16, got {wire}")
        self.wire = wire
        self.options = {"pooling": self.pooling}

    def choose(
        self, taken: SparsePattern, count: int, pairs: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        return best_positions(pairs, taken, count, pooling=self.pooling)

    def choose_all(
        self, wanted: Sequence[GrowRequest], step: int, ranks: Ranks = ALONE
    ) -> list[Tensor]:
        if not ranks.alone:
            return topk_over_ranks(ranks, wanted, pooling=self.pooling, wire=self.wire)
        chosen = []
        for one in wanted:
            if one.scores is not None:
                chosen.append(self._choose_there(one))
            elif one.ranked is None or type(self).choose is not GradientGrowth.choose:
                chosen += super().choose_all([one], step)
            else:
                with naming(one.name):
                    best = topk_outside(
                        one.pairs, one.pattern, one.count, pooling=self.pooling, sort=False
                    )
                chosen.append(best.flat)
                one.ranked.append(best.scores)
        return chosen

    def choose_parts(
        self, wanted: Sequence[GrowRequest], step: int, ranks: Ranks = ALONE
    ) -> list[Tensor]:
        return self.choose_all(wanted, step, ranks)

    def _choose_there(self, wanted: GrowRequest) -> Tensor:
        """As `choose`, by scores that the layer's target computes."""
        assert wanted.scores is not None
        with naming(wanted.name):
            scores = wanted.scores(wanted.pairs, self.pooling)
            return best_free(scores, wanted.pattern, wanted.count)


class RandomGrowth(Growth):
    """Positions drawn uniformly among the free ones.

    In trainings each choice has random numbers of its own, which follow from the seed, the layer's
    name and the step. So they do not depend on the order of layers, nor on how these are spread
    over processes, and all ranks draw the same.

    Source: Mocanu et al. 2018, "Scalable training of artificial neural networks with adaptive
    sparse connectivity inspired by network science" (SET).

    Args:
        seed: of all choices, so that other random draws do not disturb them. Left out, it is drawn
            from torch's global generator; on several ranks the first rank's counts.
        generator: draws everything in place of a seed, one layer after the other (CPU). On several
            ranks it must be in the same state on each.

    Attributes:
        seed: None where a generator draws that was given.
    """

    def __init__(self, seed: int | None = None, generator: torch.Generator | None = None) -> None:
        self._asked_for = seed is not None
        if generator is None:
            seed = int(torch.randint(2**62, ())) if seed is None else seed
            generator = torch.Generator().manual_seed(seed)
        elif seed is not None:
            raise ValueError("give either seed or generator, not both")
        super().__init__()
        self.seed = seed
        self.generator = generator

    def choose(
        self, taken: SparsePattern, count: int, pairs: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        return random_outside(taken, count, generator=self.generator)

    def choose_all(
        self, wanted: Sequence[GrowRequest], step: int, ranks: Ranks = ALONE
    ) -> list[Tensor]:
        chosen = []
        for one in wanted:
            with naming(one.name):
                generator = self.generator_for(one.name, step, "positions")
                chosen.append(random_outside(one.pattern, one.count, generator=generator))
        return chosen

    def generator_for(self, layer: str, step: int, what: str) -> torch.Generator:
        """What draws `what` of a layer at a step: made anew from the seed, where there is one."""
        if self.seed is None:
            return self.generator
        key = repr((self.seed, layer, step, what)).encode()
        number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        return torch.Generator().manual_seed(number >> 1)

    def meet(self, ranks: Ranks) -> None:
        if ranks.alone:
            return
        given = str(self.seed) if self._asked_for else "none"
        given = "a generator" if self.seed is None else given
        check_consistent(ranks, {"the seed": given}, "give the same seed on every rank, or none")
        if self.seed is None:
            state = digest(self.generator.get_state())
            advice = "give generators of one state on every rank"
            check_consistent(ranks, {"the state of the generator": state}, advice, shown=False)
        elif not self._asked_for:
            seed = torch.tensor([self.seed], device=ranks.device)
            self.seed = int(ranks.broadcast(seed))
            self.generator.manual_seed(self.seed)

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]
        self.generator.set_state(state["generator"])

    def check_state(self, state: dict[str, Any]) -> None:
        saved = state.get("generator") if isinstance(state, dict) else None
        try:
            torch.Generator(self.generator.device).set_state(saved)  # type: ignore[arg-type]
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"the state of the growth's generator is damaged: {str(error).splitlines()[0]}"
            ) from None
        if "seed" not in state:
            raise ValueError("the state of the growth has no seed")
        seed = state["seed"]
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
            raise ValueError(f"the seed of the growth must be an integer, got {seed!r}")


class NoGrowth(Growth):
    """Nothing joins: for budgets that only prune."""

    def choose(
        self, taken: SparsePattern, count: int, pairs: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        if count:
            raise ValueError(f"the budget asks for {count} new blocks, but there is no growth")
        return torch.zeros(0, dtype=torch.int64)
