"""The ways in which a trainer's steps come, and who leads where there are several trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from dynsparse.interrupts import uninterrupted
from dynsparse.nn import SparseLinear
from dynsparse.pattern import Rewiring
from dynsparse.training.counted import count_churn, count_density
from dynsparse.training.steps import OptimizerSteps


class FollowsOptimizer:
    """A trainer that takes its part in the steps of `optimizer`, whoever takes them."""

    optimizer: torch.optim.Optimizer
    layers: dict[str, SparseLinear]
    steps: int
    _steps: OptimizerSteps[dict[str, Rewiring] | None]

    def _before(self) -> None:
        """What is done before each step."""
        raise NotImplementedError

    def _after(self) -> dict[str, Rewiring] | None:
        """What is done after it; returns what `step` does."""
        raise NotImplementedError

    def _is_due(self, step: int) -> bool:
        """Whether a step ends in an update."""
        raise NotImplementedError

    def _is_update(self) -> bool:
        return self._is_due(self.steps + 1)

    def _count(self, made: dict[str, Rewiring] | None) -> None:
        count_density(self.layers)
        count_churn((made or {}).values())

    def _gradients(self) -> list[Tensor | None]:
        """Those that the coming step takes."""
        raise NotImplementedError

    def _follow_optimizer(self, given: torch.optim.Optimizer) -> None:
        """From now on; `given` may have `optimizer` inside."""
        self._steps = OptimizerSteps(given, self)
        trainers.add(self)
        self._take_over()

    def _take_over(self) -> None:
        """Leave one trainer for every layer of an optimizer: this one."""
        if self._steps.heard:
            return
        own = {id(layer.values) for layer in self.layers.values()}
        others = [t for t in trainers if t is not self and t.optimizer is self.optimizer]
        for other in others:
            if any(id(layer.values) in own for layer in other.layers.values()):
                other.stop()
        self._steps.start()

    def stop(self) -> None:
        """Take no part in the optimizer's own steps any more, until `step` is called."""
        self._steps.stop()

    def step(self) -> dict[str, Rewiring] | None:
        """After backward: the optimizer's step, then the pattern update if one is due.

        Returns the rewirings by layer name when patterns changed, otherwise None; None, too, where
        the optimizer is one of a library that accumulates gradients just now.

        Raises:
            RuntimeError, TypeError, ValueError: see `before_optimizer_step`, which raises before
                the optimizer's step, and `after_optimizer_step`, which raises after it.
        """
        return self._step_by(None)

    def _step_by(self, take: Callable[[], Any] | None) -> dict[str, Rewiring] | None:
        """`step`, with a call that steps the optimizer in place of its own `step`."""
        with uninterrupted():
            self._take_over()
            return self._steps.step(take)

    def before_optimizer_step(self) -> None:
        """The part of `step` before the optimizer's, for loops whose steps torch does not tell of.

        Call it after backward, when the gradients are whole, and `after_optimizer_step` behind the
        step.

        Raises:
            ValueError: the step ends in an update, and a gradient that it would rank by holds NaN
                or infinity; weights that start with a step against a gradient that is scaled.
            RuntimeError: the gradient has been stepped with already; the step ends in an update,
                and another trainer with another optimizer trains a layer, or the ranks each have a
                gradient of their own.
        """
        with uninterrupted():
            self._take_over()
            self._steps.prepare()

    def after_optimizer_step(self) -> dict[str, Rewiring] | None:
        """The part of `step` after the optimizer's, for the same loops; returns what `step` does.

        When an update fails, model, optimizer and trainer are as they were before this call, except
        for random draws that the caller's own functions made. Call it when the cause is mended, or
        go on with the next step, which then is the one that is due.

        Raises:
            RuntimeError: no gradient reached any layer since the last step; another trainer with
                another optimizer; sharded values; a gradient that has been stepped with already.
            TypeError, ValueError: what grown weights start with, scores or optimizer state do not
                fit the layer, or hold NaN.
        """
        with uninterrupted():
            return self._steps.finish()


trainers: WeakSet[FollowsOptimizer] = WeakSet()
"""All that are alive."""
