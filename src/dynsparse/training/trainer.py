"""The trainer: the optimizer's steps, and the pattern updates between them."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from dynsparse._core.checks import check_flag, check_kind
from dynsparse._core.html import html_table
from dynsparse._core.interrupts import defer_signals
from dynsparse.nn import SparseLinear
from dynsparse.nn.sharded import is_sharded
from dynsparse.ops import capture
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.ranks import ALONE, collective_errors
from dynsparse.tracing.models import watch
from dynsparse.training.budgets import Budget, LayerBudget
from dynsparse.training.deferred_checks import check_gradients, layer_errors
from dynsparse.training.drop import DropScore, magnitude
from dynsparse.training.grow import GradientStep, GrownValue, Growth
from dynsparse.training.history import History, LastStep
from dynsparse.training.layer_shards import (
    describe_layer,
    forget_hook_errors,
    rebuild_reducers,
    resolve_ranks,
)
from dynsparse.training.optimizer_state import check_optimizer, rewire_state, states_of
from dynsparse.training.rank_consistency import (
    PatternComparison,
    broadcast_initial_state,
    check_before_update,
    describe_function,
    layers_with_gradients,
)
from dynsparse.training.records.files import write_pending_updates
from dynsparse.training.schedule import Schedule, describe_next_update, is_due_within
from dynsparse.training.steps import (
    OptimizerSteps,
    refuse_private_steps,
    unscale,
    unwrap_optimizer,
)
from dynsparse.training.update import (
    Change,
    UpdateRequest,
    begin_budget,
    check_trained_by,
    count_blocks,
    keep_slots,
    plan_on_host,
    prepare_changes,
)
from dynsparse.training.update_on_device import can_update_on_device, plan_on_device
from dynsparse.training.validation import (
    check_components,
    check_description,
    find_sparse_layers,
    warn_at_end,
    warn_of_settings,
)

_log = logging.getLogger(__name__)

UpdateHook = Callable[[int, dict[str, Rewiring]], None]
"""Called as hook(step, rewirings by layer name) after each pattern update."""

_trainers: WeakSet[SparseTrainer] = WeakSet()
"""All trainers that are alive."""


class SparseTrainer:
    """Steps the optimizer, and updates the patterns when the schedule says so.

    `RigL`, `SET` and `Static` are this class with its components chosen. After the optimizer's step
    an update drops the blocks of lowest score in each layer and grows blocks elsewhere; values,
    gradients and optimizer state follow. Growth by gradient uses all micro-batches since the
    previous step; x and dY are kept only during steps whose gradient counts for an update.

    Call `step`, or let any loop call the optimizer's own `step`, which torch reports to the
    trainer. A trainer made later replaces earlier ones of the same optimizer and layers.

    An update is atomic. Everything that can fail or allocates memory comes first; an error there
    names the layer and leaves the state as it was. Ctrl-C and SIGTERM wait for the end of the step,
    where Python functions handle them.

    A budget that changes capacity makes the layers `resizable`: the Parameter objects stay, their
    size and that of the optimizer state follow the number of blocks.

    Subclasses may override the methods under "For algorithms". On several ranks each rank calls
    them, and must get the same results.

    Args:
        model: holds the `SparseLinear` layers. Layers whose values do not require a gradient keep
            their pattern. Make the trainer after moving the model to its device and dtype.
        optimizer: any optimizer of torch with state per weight, which holds the layers' values.
        schedule: when the patterns change, and how much; None never changes a pattern.
        growth: where blocks grow; None only together with no schedule.
        drop_score: from values to one score per block; the lowest are dropped.
        regrow_dropped: False: an update does not grow what it drops (the rule of Graphcore's
            application). True: it may (the rule of the RigL paper); such a block then counts as
            never dropped and keeps its weight and state, as in the authors' code. With False a
            layer with fewer free positions than it should drop drops only as many.
        initial_value: of grown weights: a number, a `GradientStep`, or a function of
            (layer, rewiring).
        budget: how many blocks each layer loses and gains; defaults to `LayerBudget`, each layer's
            share of its own blocks.
        history: which gradient growth uses; defaults to that of the last step.
        ranks: the ranks that train the model together, each with its own samples: "auto", all of
            torch.distributed if it is initialised; None, this process alone; a process group or a
            device mesh of one dimension; for tensor-parallel layers, their whole mesh. All ranks
            make the trainer and take every step. They begin with the state of the first rank, and
            make every decision once.

    Attributes:
        layers: name -> `SparseLinear`, in the order of `model.named_modules()`; a module used
            several times appears once.
        steps: optimizer steps taken; updates: pattern updates made.
        on_update: functions called as f(step, {name: Rewiring}) after each update. When one raises,
            the update has happened, the others are still called, and the first error is raised.
        warns_at_end: whether the first step after the schedule's `total_steps` causes a warning.
        own_state_holds: what the tensors of `_own_state`, one per layer name, hold: an entry for
            each of the layer's "slots", or "positions" of some of its blocks.

    Raises:
        TypeError: an `initial_value` that is neither number nor function, an optimizer that cannot
            follow (LBFGS).
        ValueError: a model without sparse layers, an optimizer that does not hold their values,
            growth by gradient with an optimizer of Opacus.
    """

    own_state_holds = "slots"
    warns_at_end = True

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
        self.ranks = resolve_ranks(ranks, model)
        with collective_errors(self.ranks):
            check_components(schedule, growth, budget, history, drop_score, initial_value)
            self.layers = find_sparse_layers(model)
            watch(model)
            for layer in self.layers.values():
                layer.shrink_index()
            self.optimizer, self._loop_optimizer = unwrap_optimizer(optimizer), optimizer
            check_optimizer(
                self.optimizer, {name: layer.values for name, layer in self.layers.items()}
            )
            self.schedule = schedule
            self.growth = growth
            self.drop_score = drop_score
            self.regrow_dropped = check_flag("regrow_dropped", regrow_dropped)
            self.initial_value = initial_value
            if self._needs_gradients:
                refuse_private_steps(optimizer)
            self.budget = LayerBudget() if budget is None else budget
            self.history: History = LastStep() if history is None else history
            self.steps = self.updates = 0
            self.on_update: list[UpdateHook] = []
        begin_budget(self.budget, self._trainable_layers(), self.ranks)
        if schedule is not None:
            keep_slots(self._trainable_layers())
        # `_own_options` are not among them, as subclasses are not initialised yet.
        settings = {
            "algorithm": type(self).__name__,
            **self._settings(),
            "drop score": describe_function(drop_score),
        }
        if self.ranks.rank == 0:
            warn_of_settings(schedule, self.optimizer, self._trainable_layers())
        broadcast_initial_state(self.ranks, self._trainable_layers(), settings, self.optimizer)
        if growth is not None:
            growth.broadcast_settings(self.ranks)
        self._begin()

    def _begin(self) -> None:
        # Steps that other trainers took before this one was made do not matter.
        self._others: Mapping[Any, int] = WeakKeyDictionary(
            {other: other.steps for other in _trainers}
        )
        self._captures: dict[str, capture.Pairs] = {}
        self._loaded_own_state = False
        self._steps = OptimizerSteps(self._loop_optimizer, self)
        _trainers.add(self)
        self._take_over()
        self._remember_patterns()
        self._start_capture()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in self.summary().items())})"

    def _repr_html_(self) -> str:
        return html_table(list(self.summary().items()), head=(type(self).__name__, ""))

    def summary(self) -> dict[str, str]:
        """The progress of the training in words: layers, density, steps, updates, next update."""
        patterns = [layer.pattern for layer in self.layers.values()]
        density = sum(p.nnz for p in patterns) / sum(p.total for p in patterns)
        total = getattr(self.schedule, "total_steps", None)
        return {
            "layers": f"{len(patterns):,}",
            "density": f"{density:.4f}",
            "steps": f"{self.steps:,}" + ("" if total is None else f" of {total:,}"),
            "updates": f"{self.updates:,}",
            "next_update": describe_next_update(
                self.schedule if self._trainable_layers() else None, self.steps + 1
            ),
        }

    def __getstate__(self) -> dict[str, Any]:
        excluded = ("_captures", "_others", "_steps", "_known", "_known_state")
        return {k: v for k, v in self.__dict__.items() if k not in excluded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()  # copies keep x and dY of their own layers

    # The optimizer's steps.

    def step(self) -> dict[str, Rewiring] | None:
        """After backward: the optimizer's step, then the pattern update if one is due.

        Returns the rewirings by layer name when patterns changed, otherwise None; None, too, while
        a library's optimizer accumulates gradients.

        Raises:
            RuntimeError, TypeError, ValueError: see `before_optimizer_step`, which raises before
                the optimizer's step, and `after_optimizer_step`, which raises after it.
        """
        return self._step_with(None)

    def _step_with(self, take: Callable[[], Any] | None) -> dict[str, Rewiring] | None:
        """`step`, with a function that steps the optimizer in place of its own `step`."""
        with defer_signals():
            self._take_over()
            return self._steps.step(take)

    def before_optimizer_step(self) -> None:
        """The part of `step` before the optimizer's, for loops whose steps torch does not report.

        Call it after backward, when the gradients are complete, and `after_optimizer_step` after
        the optimizer's step.

        Raises:
            ValueError: the step ends in an update, and a gradient that it would rank by holds NaN
                or infinity.
            RuntimeError: the gradient has been stepped with already; the step ends in an update,
                and another trainer with another optimizer trains a layer, or each rank has a
                different gradient.
        """
        with defer_signals():
            self._take_over()
            self._steps.prepare()

    def after_optimizer_step(self) -> dict[str, Rewiring] | None:
        """The part of `step` after the optimizer's, for the same loops; returns what `step` does.

        When an update fails, model, optimizer and trainer are as they were before this call, except
        for random draws that the caller's own functions made. Call it again when the cause is
        fixed, or continue: an update is then due at the next step.

        Raises:
            RuntimeError: no gradient reached any layer since the last step; another trainer with
                another optimizer; sharded values; a gradient that has been stepped with already.
            TypeError, ValueError: initial values of grown weights, scores or optimizer state do not
                fit the layer, or hold NaN.
        """
        with defer_signals():
            return self._steps.finish()

    def stop(self) -> None:
        """Ignore the optimizer's own steps from now on, until `step` is called."""
        self._steps.stop()

    def _take_over(self) -> None:
        """Make this the only trainer of its layers that follows their optimizer."""
        if self._steps.is_hooked:
            return
        values = {id(layer.values) for layer in self.layers.values()}
        others = [t for t in _trainers if t is not self and t.optimizer is self.optimizer]
        for other in others:
            if any(id(layer.values) in values for layer in other.layers.values()):
                other.stop()
        self._steps.start()

    def _begin_step(self) -> None:
        """Called before each step of the optimizer."""
        self._follow_replaced_layers()
        if self._is_update():
            check_before_update(
                self.ranks,
                self.steps + 1,
                self._update_inputs(),
                self._trainable_layers(),
                self._check,
            )
        self._before_step()

    def _finish_step(self) -> dict[str, Rewiring] | None:
        """Called after each step of the optimizer; returns what `step` does."""
        due = self._is_update()
        ranks = self.ranks if due else ALONE
        undo = self._make_undo(planning=True) if due else None
        if self.warns_at_end:
            warn_at_end(self.schedule, self.steps + 1)
        self.steps += 1
        has_gradient = [0] * len(self._trainable_layers() if due else ())
        try:
            with collective_errors(ranks, has_gradient):
                if due:
                    self._check_one_optimizer()
                self._after_step()
                # Scores of one step alone rank alike at any scale of the loss.
                is_scaled = self.history.window != 1 or isinstance(self.initial_value, GradientStep)
                for name, pairs in self._captures.items():
                    pairs.discard_last_pass_without_gradient()
                    if pairs or self.layers[name].values.requires_grad:
                        self.history.observe(name, unscale(pairs) if is_scaled else list(pairs))
                has_gradient[:] = map(self._has_gradient, self._trainable_layers() if due else ())
            changes, planned = self._plan(has_gradient) if due else ({}, None)
            rewirings = {name: change.rewiring for name, change in changes.items()}
            comparison = PatternComparison(ranks, self.steps, rewirings) if due else None
            apply_changes = prepare_changes(changes, ranks, comparison)
            if due:
                self.history.end_update()
        except BaseException:
            if undo is None:
                self.steps -= 1
            else:
                undo()
            raise
        # From here on nothing allocates memory, so nothing fails.
        self._forget_captures()
        apply_changes()
        self._known |= {name: rewiring.after for name, rewiring in rewirings.items()}
        self._known_state, self._loaded_own_state = self.optimizer.state, False
        if due:
            self._apply_own_state(planned)
        self._start_capture()
        if not changes:
            return None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # Also with one rank, where there may be a wrapper.
            resized = [name for name, rewiring in rewirings.items() if not rewiring.keeps_size]
            rebuild_reducers([self.layers[name].values for name in resized])
            forget_hook_errors([self.layers[name].values for name in rewirings])
        self.updates += 1
        _call_hooks(self.on_update, self.steps, rewirings)
        return rewirings

    def _is_update(self) -> bool:
        return self._is_due(self.steps + 1)

    def _is_due(self, step: int) -> bool:
        return self.schedule is not None and self.schedule.is_due(step)

    def _start_capture(self) -> None:
        """Begin to keep x and dY if the gradient of the coming step counts for an update."""
        counts = self.schedule is not None and self._needs_gradients
        if counts and self.schedule is not None:
            counts = is_due_within(self.schedule, self.steps + 1, self.history.window)
        # Frozen layers record nothing, and may be trainable when the gradient is computed.
        layers = self.layers if counts else {}
        self._captures = {
            name: capture.start(layer.index.row_ptr, layer.values) for name, layer in layers.items()
        }

    def _forget_captures(self) -> None:
        for pairs in self._captures.values():
            pairs.clear()
        self._captures = {}  # they hold the old values; `_start_capture` makes new ones

    def _trainable_layers(self) -> dict[str, SparseLinear]:
        return {name: layer for name, layer in self.layers.items() if layer.values.requires_grad}

    def _gradients(self) -> list[Tensor | None]:
        return [layer.values.grad for layer in self._trainable_layers().values()]

    def _remember_patterns(self) -> None:
        """Note which patterns and optimizer state belong together."""
        self._known = {name: layer.pattern for name, layer in self.layers.items()}
        self._known_state = self.optimizer.state
        for layer in self.layers.values():
            layer._was_replaced = False

    def _follow_replaced_layers(self) -> None:
        """Let the optimizer's state follow where only a layer's pattern or values were replaced.

        Connections that are in both patterns keep their state, all other state starts anew.

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
                if is_sharded(values) and any(states_of(self.optimizer, values)):
                    raise RuntimeError(
                        f"layer {name!r} was loaded with another pattern, which its sharded "
                        "optimizer state cannot follow: load the optimizer's state, too"
                    )
                with layer_errors(name):
                    rewire_state(self.optimizer, values, Rewiring.between(before, after))
            if not self._loaded_own_state:
                self._follow_loaded_values(loaded)
        self._remember_patterns()

    # The pattern update.

    @torch.no_grad()
    def _plan(self, has_gradient: Sequence[int]) -> tuple[dict[str, Change], Any]:
        """The checked changes of all layers, and those of the algorithm's own state."""
        assert self.schedule is not None
        assert self.growth is not None
        trained = self._trainable_layers()
        for layer in trained.values():
            layer.forget_panels()
        layers = layers_with_gradients(self.steps, trained, has_gradient)
        request = UpdateRequest(
            step=self.steps,
            layers=layers,
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
        on_device = {n for n, layer in layers.items() if can_update_on_device(layer, self.ranks)}
        counts = count_blocks(request, on_device=len(on_device) == len(layers))
        changes = {
            **plan_on_host(request, {n: c for n, c in counts.items() if n not in on_device}),
            **plan_on_device(request, {n: c for n, c in counts.items() if n in on_device}),
        }
        changes = {name: changes[name] for name in counts}
        return changes, self._plan_own_state(changes)

    def _scores(self, name: str, layer: SparseLinear) -> Tensor:
        """The drop scores of a layer's blocks: [nnz]."""
        return self.drop_score(layer.values)

    @property
    def _needs_gradients(self) -> bool:
        ranks_by_gradient = self.growth is not None and self.growth.needs_gradients
        return ranks_by_gradient or isinstance(self.initial_value, GradientStep)

    def _has_gradient(self, name: str) -> bool:
        layer = self.layers[name]
        if getattr(self.drop_score, "needs_gradients", False) and layer.values.grad is None:
            return False
        return not self._needs_gradients or not layer.pattern.nnz or self.history.has(name)

    def _update_inputs(self) -> dict[str, Any]:
        """The settings and states that decide the next update besides weights and gradients."""
        return {
            "options": self._description(),
            "state of the growth": None if self.growth is None else self.growth.state_dict(),
            "state of the budget": self.budget.state_dict(),
        }

    def _check(self) -> None:
        check_trained_by(self.optimizer, self._trainable_layers())
        self._check_one_optimizer()
        if self._needs_gradients:  # Opacus may have wrapped the optimizer since
            refuse_private_steps(self._loop_optimizer)
        check_gradients(self._trainable_layers(), self._captures, self.ranks.alone)

    def _check_one_optimizer(self) -> None:
        """Raise RuntimeError where another trainer steps another optimizer over one of the layers,
        whose state would not follow the pattern."""
        names = {id(layer.values): name for name, layer in self._trainable_layers().items()}
        for other in list(_trainers):
            if other.optimizer is self.optimizer or other.steps <= self._others.get(other, 0):
                continue
            for layer in other.layers.values():
                name = names.get(id(layer.values))
                state = other.optimizer.state.get(layer.values, {}).values()
                if name is not None and any(isinstance(t, Tensor) and t.dim() for t in state):
                    raise RuntimeError(
                        f"layer {name!r} is also trained by another trainer with another optimizer "
                        f"({type(other.optimizer).__name__}), whose state would not follow the new "
                        "pattern: let one optimizer train a layer"
                    )

    # The trainer's state.

    def state_dict(self) -> dict[str, Any]:
        """Counters, the state of each component, and the settings that must agree on loading; plain
        types and tensors. Take it between `step()` and the next backward pass, whose gradients are
        not part of any state."""
        write_pending_updates()  # a record leads to every state that was saved
        return {
            **self._description(),
            "steps": self.steps,
            "updates": self.updates,
            "growth_state": None if self.growth is None else self.growth.state_dict(),
            "budget_state": self.budget.state_dict(),
            "history_state": self.history.state_dict(),
            "own_state": self._own_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Model and optimizer load their own state.

        Raises:
            ValueError: the state of another algorithm, schedule, model or rule, or a damaged one;
                nothing is changed.
        """
        self.check_state(state, {name: layer.pattern for name, layer in self.layers.items()})
        with defer_signals():
            undo = self._make_undo(planning=False)
            try:
                self._load_own_state(state["own_state"])
                if self.growth is not None:
                    self.growth.load_state_dict(state["growth_state"])
                self.budget.load_state_dict(state["budget_state"])
                self.history.load_state_dict(state["history_state"])
            except BaseException:
                undo()
                raise
            self.steps, self.updates = state["steps"], state["updates"]
            self._loaded_own_state = True
            if self.optimizer.state is self._known_state:  # otherwise the model may come later
                self._remember_patterns()
            self._start_capture()

    def check_state(
        self, state: dict[str, Any], patterns: Mapping[str, SparsePattern] | None = None
    ) -> None:
        """Raise the errors of `load_state_dict` without loading.

        Args:
            state: of a trainer.
            patterns: those that the layers will have then, by name; state of single blocks is
                checked only with them.
        """
        check_description(state, self._description())
        if self.growth is not None:
            self.growth.check_state(state["growth_state"])
        self.budget.check_state(state["budget_state"])
        shapes = {name: layer.pattern.shape for name, layer in self.layers.items()}
        self.history.check_state(state["history_state"], shapes)
        if patterns is not None:
            self._check_own_state(state["own_state"], patterns)

    def _description(self) -> dict[str, Any]:
        """The settings that must agree on loading, and among all ranks; plain types."""
        return {
            "algorithm": type(self).__name__,
            **self._settings(),
            "options": self._own_options(),
        }

    def _settings(self) -> dict[str, Any]:
        """The settings of components and layers, for comparison; plain types."""
        schedule = None if self.schedule is None else {"kind": type(self.schedule).__name__}
        if schedule is not None and dataclasses.is_dataclass(self.schedule):
            schedule |= dataclasses.asdict(self.schedule)
        growth, budget, history = self.growth, self.budget, self.history
        return {
            "schedule": schedule,
            "growth": None if growth is None else {"kind": type(growth).__name__} | growth.options,
            "budget": {"kind": type(budget).__name__} | budget.options,
            "history": {"kind": type(history).__name__} | history.options,
            "layers": {name: describe_layer(layer) for name, layer in self.layers.items()},
            "regrow_dropped": self.regrow_dropped,
        }

    def _make_undo(self, *, planning: bool) -> Callable[[], None]:
        """A function that restores everything that planning, or loading a state, may change."""
        counts = self.steps, self.updates
        growth = None if self.growth is None else copy.deepcopy(self.growth.state_dict())
        budget = copy.deepcopy(self.budget.state_dict())
        history = self.history.snapshot()
        undo_own = self._make_own_undo(planning)

        def undo() -> None:
            self.steps, self.updates = counts
            if self.growth is not None and growth is not None:
                self.growth.load_state_dict(growth)
            self.budget.load_state_dict(budget)
            self.history.restore(history)
            undo_own()

        return undo

    # For algorithms: additions to a step, and state that follows the pattern. By default nothing.

    def _before_step(self) -> None:
        """Change gradients before the optimizer's step."""

    def _after_step(self) -> None:
        """Change weights after the optimizer's step."""

    def _make_own_undo(self, planning: bool) -> Callable[[], None]:
        """Return a function that restores the algorithm's present state.

        It restores what loading may change; with `planning`, what `_after_step` and
        `_plan_own_state` may change.
        """
        return lambda: None

    def _plan_own_state(self, changes: dict[str, Change]) -> Any:
        """Compute the state per block after `changes`, which `_apply_own_state` gets.

        The state follows the pattern as the weights do. Nothing has changed yet but the growth's
        generator.
        """
        return None

    def _apply_own_state(self, planned: Any) -> None:
        """Apply what was planned; must not fail."""

    def _follow_loaded_values(self, names: Collection[str]) -> None:
        """Begin the algorithm's state anew in layers whose pattern or values were replaced."""

    def _own_options(self) -> dict[str, Any]:
        """The algorithm's settings that must agree on loading; plain types."""
        return {}

    def _own_state(self) -> dict[str, Any]:
        """The algorithm's state besides that of its components; tensors and plain types."""
        return {}

    def _check_own_state(self, state: Any, patterns: Mapping[str, SparsePattern]) -> None:
        """Raise ValueError unless `state` can be loaded into layers with these patterns."""

    def _load_own_state(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""


def _call_hooks(hooks: Iterable[UpdateHook], step: int, rewirings: dict[str, Rewiring]) -> None:
    """Call all of them, whatever one of them raises; then raise the first error."""
    if _log.isEnabledFor(logging.INFO):
        _log.info("update after step %d of %d layers", step, len(rewirings))
    if _log.isEnabledFor(logging.DEBUG):
        for name, rewiring in rewirings.items():
            _log.debug(
                "layer %r: %d of %d blocks dropped, %d grown",
                name, len(rewiring.dropped), rewiring.before.nnz, len(rewiring.grown),
            )  # fmt: skip
    first: BaseException | None = None
    for hook in hooks:
        try:
            hook(step, rewirings)
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first


def scaled_step(trainer: SparseTrainer, scaler: torch.amp.GradScaler) -> dict[str, Rewiring] | None:
    """`trainer.step()` after `scaler.scale(loss).backward()`, and `scaler.update()`.

    The trainer does not count a step that the scaler skips because the scaled gradients overflow;
    an update that was due comes with the next step. A momentum, and weights that start with a
    `GradientStep`, are those of the gradient without the scale.

    Args:
        trainer: any of this library.
        scaler: `torch.amp.GradScaler`; one that is not enabled makes this `trainer.step()`.

    Returns:
        The rewirings by layer name when patterns changed, otherwise None.

    Raises:
        ValueError: an optimizer that decides itself which steps it skips (`fused=True`).
        RuntimeError, TypeError, ValueError: see `SparseTrainer.step`.
    """
    check_kind("trainer", trainer, SparseTrainer, "a trainer such as RigL")
    check_kind("scaler", scaler, torch.amp.GradScaler, "a torch.amp.GradScaler")
    rewirings = trainer._step_with(lambda: scaler.step(trainer.optimizer))
    scaler.update()
    return rewirings
