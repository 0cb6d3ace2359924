"""One training step of a model with sparse layers, and the pattern updates in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dynsparse.checks import check_flag
from dynsparse.files.html import html_table
from dynsparse.nn import SparseLinear
from dynsparse.nn.sharded import is_sharded
from dynsparse.ops import capture
from dynsparse.pattern import Rewiring
from dynsparse.ranks import ALONE, collective_errors
from dynsparse.tracing.models import watch
from dynsparse.training.advice import advise
from dynsparse.training.budgets import Budget, LayerBudget
from dynsparse.training.change import Change, check_gradients, naming, prepared
from dynsparse.training.drop import DropScore, magnitude
from dynsparse.training.following import FollowsOptimizer, trainers
from dynsparse.training.grow import Growth
from dynsparse.training.history import History, LastStep
from dynsparse.training.hooks import UpdateHook, call_all
from dynsparse.training.initial import GradientStep, check_unscaled
from dynsparse.training.layers import sparse_layers
from dynsparse.training.optimizer_state import check_optimizer, rewire_state, state_of
from dynsparse.training.pieces import check_drop_score, check_initial_value, check_kinds_of_pieces
from dynsparse.training.plan import GrownValue, begin_budget, hold_slots, plan_changes
from dynsparse.training.reducers import follow_sizes
from dynsparse.training.schedule import Schedule, is_due_within, said_of_next
from dynsparse.training.single import check_one_optimizer
from dynsparse.training.spread import ranks_for
from dynsparse.training.steps import bare
from dynsparse.training.together import (
    PatternsAfter,
    agree_before,
    begin_alike,
    name_of,
    reached_by,
)
from dynsparse.training.trainer_state import HasState


class SparseTrainer(FollowsOptimizer, HasState):
    """Follows the optimizer's steps, and changes the patterns when the schedule says so.

    `RigL`, `SET` and `Static` are this class with their pieces chosen. After the optimizer's step
    an update drops each layer's blocks of lowest score, grows blocks elsewhere, and lets values,
    gradients and optimizer state follow. Growth by gradient looks at all micro-batches since the
    step before; x and dY are kept only during steps whose gradient counts for an update.

    `step` steps the optimizer; its own `step` does as well, called by whatever loop, since torch
    tells of it. Trainers made later take the place of those of the same optimizer and layers.

    An update happens as a whole or not at all. What can fail is done beforehand, as is all that
    takes memory, and an error there names the layer and leaves everything as it was before the
    update. Ctrl-C and SIGTERM wait until the step has ended, where Python functions handle them.

    A budget that changes capacity makes the layers `resizable`: the Parameter objects stay, their
    size and that of the optimizer state follow the number of blocks.

    Args:
        model: holds the `SparseLinear` layers. Layers whose values do not require a gradient keep
            their pattern. Make the trainer after moving the model to its device and type.
        optimizer: any of torch's whose state is per weight, holding the layers' values.
        schedule: when, and which share is replaced; None never changes a pattern.
        growth: where blocks grow; None only together with no schedule.
        drop_score: from values to one score per block; the lowest leave.
        regrow_dropped: False: what an update drops, it does not grow again (the rule of Graphcore's
            application). True: it may (the rule of the RigL paper); such a block then counts as
            never dropped and keeps its weight and state, as in the authors' code. Under the first
            rule a layer with fewer free positions than it should drop drops only as many.
        initial_value: what grown weights start with: a number, a `GradientStep`, or a function of
            (layer, rewiring).
        budget: how many blocks each layer loses and gains; each the share of its own when left out.
        history: which gradient growth looks at; that of the last step when left out.
        ranks: that train the model together, each with its own samples: "auto", all of
            torch.distributed where it is initialised; None, this process alone; a process group or
            a device mesh of one dimension; of layers in rectangles, their whole mesh. All ranks
            make the trainer, and take every step. What they begin with is put right from the first
            rank; what they decide, they decide once.

    Attributes:
        layers: name -> `SparseLinear`, in the order of `model.named_modules()`; a module used
            several times is there once.
        steps: optimizer steps taken; updates: pattern updates made.
        on_update: functions called as f(step, {name: Rewiring}) after each update. When one raises,
            the update has happened and the others are called all the same; then the first error is
            raised.

    Raises:
        TypeError: an `initial_value` that is neither number nor function, an optimizer that cannot
            follow (LBFGS).
        ValueError: a model without sparse layers, an optimizer that does not hold their values.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Schedule | None,
        growth: Growth | None,
        drop_score: DropScore = magnitude,
        regrow_dropped: bool = False,
        initial_value: GrownValue = 0.0,
        budget: Budget | None = None,
        history: History | None = None,
        ranks: Any = "auto",
    ) -> None:
        self.ranks = ranks_for(ranks, model)
        with collective_errors(self.ranks):  # that the arguments are right on all of them
            check_kinds_of_pieces(schedule=schedule, growth=growth, budget=budget, history=history)
            check_initial_value(initial_value)
            check_drop_score(drop_score)
            self.layers = sparse_layers(model)
            watch(model)
            for layer in self.layers.values():
                layer.thin_index()
            self.optimizer, self._given = bare(optimizer), optimizer
            check_optimizer(
                self.optimizer, {name: layer.values for name, layer in self.layers.items()}
            )
            self.schedule = schedule
            self.growth = growth
            self.drop_score = drop_score
            self.regrow_dropped = check_flag("regrow_dropped", regrow_dropped)
            self.initial_value = initial_value
            self.budget = LayerBudget() if budget is None else budget
            self.history: History = LastStep() if history is None else history
            self.steps = self.updates = 0
            self.on_update: list[UpdateHook] = []
        begin_budget(self.budget, self._trained(), self.ranks)
        if schedule is not None:
            hold_slots(self._trained())
        # Without what the algorithms add: that comes after this.
        said = {"algorithm": type(self).__name__, **self._said(), "drop score": name_of(drop_score)}
        if self.ranks.rank == 0:
            advise(schedule, self.optimizer, self._trained())
        begin_alike(self.ranks, self._trained(), said, self.optimizer)
        if growth is not None:
            growth.meet(self.ranks)
        self._begin()

    def _begin(self) -> None:
        # Those that are there already may have stepped before; that is no matter any more.
        self._others: Mapping[Any, int] = WeakKeyDictionary(
            {other: other.steps for other in trainers}
        )
        self._captures: dict[str, capture.Pairs] = {}
        self._follow_optimizer(self._given)
        self._remember_patterns()
        self._arm()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in self.summary().items())})"

    def _repr_html_(self) -> str:
        return html_table(list(self.summary().items()), head=(type(self).__name__, ""))

    def summary(self) -> dict[str, str]:
        """Where the training is, in words: layers, density, steps, updates, and the next one."""
        patterns = [layer.pattern for layer in self.layers.values()]
        density = sum(p.nnz for p in patterns) / sum(p.total for p in patterns)
        total = getattr(self.schedule, "total_steps", None)
        return {
            "layers": f"{len(patterns):,}",
            "density": f"{density:.4f}",
            "steps": f"{self.steps:,}" + ("" if total is None else f" of {total:,}"),
            "updates": f"{self.updates:,}",
            "next_update": said_of_next(self.schedule, self.steps + 1),
        }

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_captures", "_others", "_steps", "_known", "_known_state")
        return {k: v for k, v in self.__dict__.items() if k not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()  # copies keep x and dY of their own layers

    def _remember_patterns(self) -> None:
        """The patterns, and the optimizer's state, that belong together."""
        self._known = {name: layer.pattern for name, layer in self.layers.items()}
        self._known_state = self.optimizer.state
        for layer in self.layers.values():
            layer._was_replaced = False

    def _follow_loaded(self) -> None:
        """Where another pattern was loaded into a layer, and no optimizer state with it: state of
        connections that are in both stays theirs, all other state starts anew.

        Raises:
            RuntimeError: the state is sharded, so that it cannot follow.
        """
        loaded = {n: layer for n, layer in self.layers.items() if layer._was_replaced}
        if not loaded:
            return
        if self.optimizer.state is self._known_state:
            for name, layer in loaded.items():
                before, after, values = self._known[name], layer.pattern, layer.values
                if before._has_slots_of(after):
                    continue
                if is_sharded(values) and state_of(self.optimizer, values):
                    raise RuntimeError(
                        f"layer {name!r} was loaded with another pattern, which its sharded "
                        "optimizer state cannot follow: load the optimizer's state, too"
                    )
                with naming(name):
                    rewiring = Rewiring.between(before, after)
                    rewire_state(self.optimizer, values, rewiring)
                    self._follow_loaded_pattern(name, rewiring)
        self._remember_patterns()

    def _follow_loaded_pattern(self, name: str, rewiring: Rewiring) -> None:
        """The algorithm's own state of a layer that another pattern was loaded into."""

    def _before(self) -> None:
        self._follow_loaded()
        check_unscaled(self.initial_value)
        if self._is_due(self.steps + 1):
            agree_before(
                self.ranks, self.steps + 1, self._decided_by(), self._trained(), self._check
            )
        self._before_step()

    def _after(self) -> dict[str, Rewiring] | None:
        due = self._is_due(self.steps + 1)
        together = self.ranks if due else ALONE
        undo = self._undo(planning=True) if due else None
        self.steps += 1
        reached = [0] * len(self._trained() if due else ())
        try:
            with collective_errors(together, reached):
                if due:
                    self._check_one_optimizer()
                self._after_step()
                for name in self._captures:
                    self.history.observe(name, list(self._captures[name]))
                reached[:] = map(self._is_reached, self._trained() if due else ())
            changes, own = self._plan(reached) if due else ({}, None)
            rewirings = {name: change.rewiring for name, change in changes.items()}
            patterns = PatternsAfter(together, self.steps, rewirings) if due else None
            change_over = prepared(changes, self.optimizer, together, patterns)
            if due:
                self.history.end_update()
        except BaseException:
            if undo is None:
                self.steps -= 1
            else:
                undo()
            raise
        # From here on nothing takes memory, so nothing fails.
        self._forget_captures()
        change_over()
        self._known |= {name: rewiring.after for name, rewiring in rewirings.items()}
        if due:
            self._change_own(own)
        self._arm()
        if not changes:
            return None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # A wrapper in a world of one, too.
            follow_sizes([c.layer.values for c in changes.values() if c.changes_size])
        self.updates += 1
        call_all(self.on_update, self.steps, rewirings)
        return rewirings

    def _is_due(self, step: int) -> bool:
        return self.schedule is not None and self.schedule.is_due(step)

    def _arm(self) -> None:
        """Begin to keep x and dY if the gradient of the coming step counts for an update."""
        schedule = self.schedule
        counts = (
            schedule is not None
            and self._needs_gradients
            and is_due_within(schedule, self.steps + 1, self.history.window)
        )
        layers = self._trained() if counts else {}
        self._captures = {
            name: capture.start(layer.index.row_ptr, layer.values) for name, layer in layers.items()
        }

    def _forget_captures(self) -> None:
        for pairs in self._captures.values():
            pairs.clear()
        self._captures = {}  # they hold on to the values as these were; `_arm` begins anew

    def _trained(self) -> dict[str, SparseLinear]:
        return {name: layer for name, layer in self.layers.items() if layer.values.requires_grad}

    def _gradients(self) -> list[Tensor | None]:
        return [layer.values.grad for layer in self._trained().values()]

    def _decided_by(self) -> dict[str, Any]:
        """What the next update follows from beside weights and gradients."""
        growth = None if self.growth is None else self.growth.state_dict()
        return {
            "options": self._agreement(),
            "state of the growth": growth,
            "state of the budget": self.budget.state_dict(),
        }

    def _check(self) -> None:
        self._check_one_optimizer()
        check_gradients(self._trained(), self._captures, self.ranks.alone)

    def _check_one_optimizer(self) -> None:
        check_one_optimizer(self.optimizer, self._trained(), self._others, trainers)

    @torch.no_grad()
    def _plan(self, reached: Sequence[int]) -> tuple[dict[str, Change], Any]:
        """What the update does to each layer, and to the algorithm's own state; all is checked."""
        assert self.schedule is not None
        assert self.growth is not None
        trained = self._trained()
        for layer in trained.values():
            layer.forget_panels()
        changes = plan_changes(
            self.steps,
            reached_by(self.steps, trained, reached),
            schedule=self.schedule,
            growth=self.growth,
            budget=self.budget,
            history=self.history,
            optimizer=self.optimizer,
            regrow_dropped=self.regrow_dropped,
            initial_value=self.initial_value,
            scores=self._scores,
            ranks=self.ranks,
        )
        return changes, self._plan_own(changes)

    @property
    def _needs_gradients(self) -> bool:
        wanted = self.growth is not None and self.growth.needs_gradients
        return wanted or isinstance(self.initial_value, GradientStep)

    def _is_reached(self, name: str) -> bool:
        empty = not self.layers[name].pattern.nnz
        return not self._needs_gradients or empty or self.history.has(name)

    def _scores(self, name: str, layer: SparseLinear) -> Tensor:
        """The drop scores of a layer's blocks: [nnz]."""
        return self.drop_score(layer.values)
