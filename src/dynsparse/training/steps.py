"""A trainer's view of its optimizer's steps, in whatever loop they are taken."""

from __future__ import annotations

import functools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from dynsparse._core import logs
from dynsparse._core.interrupts import defer_signals
from dynsparse.nn import SparseLinear
from dynsparse.nn.sharded import local_part
from dynsparse.pattern import Rewiring
from dynsparse.tracing.spans import OFF, counter, is_traced, span
from dynsparse.training.optimizer_state import nested_optimizers
from dynsparse.training.schedule import is_due_within

Rewirings = dict[str, Rewiring] | None
"""By layer name; None where no pattern changed."""

_STEP = "trainer.step()"
_OTHER_STEPS = 10
"""Steps of an optimizer that no trainer follows, after which its layers' trainer warns."""
_following: weakref.WeakValueDictionary[int, OptimizerSteps] = weakref.WeakValueDictionary()
"""Those of all trainers that follow their optimizer, by id: other threads may add to a dictionary
while this one reads its values."""


def unwrap_optimizer(optimizer: Any) -> Any:
    """torch's optimizer, inside the wrappers of Accelerate, Fabric and others, which have neither
    hooks nor state of their own. An optimizer around another that has, as Lookahead, stays."""
    inside = getattr(optimizer, "optimizer", None)
    while isinstance(inside, torch.optim.Optimizer):
        hooks = _hooks_of(optimizer)
        if hooks != _hooks_of(inside) and (hooks is not None or _has_own_state(optimizer)):
            break
        optimizer, inside = inside, getattr(inside, "optimizer", None)
    return optimizer


def _has_own_state(optimizer: Any) -> bool:
    """Whether an optimizer has state besides that of the optimizers that it holds, or may have some
    after its first step."""
    state = getattr(optimizer, "state", None)
    held = [getattr(inner, "state", None) for inner in nested_optimizers(optimizer)[1:]]
    if not isinstance(state, Mapping) or any(state is other for other in held):
        return False
    return bool(state) or isinstance(optimizer, torch.optim.Optimizer)


def _hooks_of(optimizer: Any) -> int | None:
    """The identity of the dictionary of an optimizer's hooks; None where it has none."""
    hooks = vars(optimizer).get("_optimizer_step_post_hooks")
    return None if hooks is None else id(hooks)


def refuse_private_steps(optimizer: Any) -> None:
    """Raise ValueError if an optimizer, perhaps in wrappers, or the step that is being taken is one
    of Opacus, which makes the gradients of the weights private, but not x and dY."""
    modules = [str(frame.f_globals.get("__name__")) for frame in _stack()]
    while optimizer is not None:
        modules += [kind.__module__ for kind in type(optimizer).__mro__]
        optimizer = getattr(optimizer, "optimizer", None)
    if any(module.startswith("opacus.optimizers") for module in modules):
        raise ValueError(
            "growth by gradient is not private: Opacus neither clips the gradients that it ranks "
            "nor adds noise to them, so the pattern reveals samples: use SET, which needs none"
        )


class OptimizerSteps:
    """Calls a trainer's `_begin_step` before every step of its optimizer, and its `_finish_step`
    after it, once each.

    A step is taken in one of three ways: by `step`; by the optimizer's own `step`, which torch's
    hooks report, in any loop; between `prepare` and `finish`. A gradient that was used in one way
    is rejected in another. With a closure, `_begin_step` follows each of its calls, when the
    gradients exist. A step that a CUDA graph captures does not count.

    Args:
        optimizer: the optimizer as the loop knows it, perhaps a wrapper.
        trainer: a `SparseTrainer`, which holds this object; the optimizer holds neither of them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, trainer: Any) -> None:
        self._loop_optimizer, self._optimizer = optimizer, unwrap_optimizer(optimizer)
        self._trainer = weakref.ref(trainer)
        self._hooks: _Hooks | None = None
        self._caller = ""  # the method that takes the present step
        self._depth = 0  # nested calls: of an optimizer's step, and of its base class's
        self._by_hand = self._passed = False  # after `prepare`, and after a step following it
        self._failed = False  # `_finish_step`, following the optimizer's own step
        self._result: Rewirings = None
        self._span: Any = OFF
        self._last_caller = ""
        self._marks: list[tuple[weakref.ref[Tensor], int] | None] = []
        self._other_steps = 0  # of optimizers that no trainer follows, since the last step
        self._unrelated: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    @property
    def is_hooked(self) -> bool:
        """Whether the optimizer's own steps are followed."""
        return self._hooks is not None

    def start(self) -> None:
        """Follow the optimizer's own steps from now on, and those of optimizers that it holds.

        A subclass of torch's that does not call its constructor has no hooks. It gets some if it
        has state besides that of the optimizer that it holds, or holds several; otherwise its steps
        are not followed.
        """
        optimizer, *inner = nested_optimizers(self._optimizer)
        if len(inner) > 1 or (inner and _has_own_state(optimizer)):
            _add_hooks(optimizer)
        optimizers = {_hooks_of(o): o for o in reversed([optimizer, *inner])}
        optimizers.pop(None, None)
        if self._hooks is None and optimizers:
            self._hooks = _Hooks(self, list(optimizers.values()))
            _follow_all_optimizers()
            _following[id(self)] = self

    def stop(self) -> None:
        """Stop following the optimizer's own steps."""
        if self._hooks is not None:
            self._hooks.close()
        self._hooks, self._depth = None, 0
        _following.pop(id(self), None)

    def step(self, take: Callable[[], Any] | None = None) -> Rewirings:
        """Take a step; returns what `_finish_step` returned, None where the optimizer took none.

        Args:
            take: steps the optimizer in place of its own `step`.
        """
        if self._loop_optimizer is self._optimizer and _accumulates():
            raise RuntimeError(
                "trainer.step() would step the optimizer after each micro-batch, inside "
                "accumulate() of Accelerate: call step() of the optimizer that prepare() returned, "
                "which the trainer follows"
            )
        self._caller, self._result, self._depth = _STEP, None, 0
        self._begin_span("optimizer")
        take = self._loop_optimizer.step if take is None else take
        try:
            if self.is_hooked:
                take()
            else:
                self._begin()
                take()
                self._end()
            return self._result
        finally:
            self._caller, self._result = "", None
            self._end_span()

    def prepare(self) -> None:
        """Call `_begin_step`, for a loop that steps the optimizer and then calls `finish`."""
        if self._by_hand and self._passed:
            raise RuntimeError(
                "expected after_optimizer_step() behind the optimizer's step, got another "
                "before_optimizer_step(): call both, or none of them"
            )
        self._by_hand = False
        with self._set_caller("before_optimizer_step()"):
            self._begin()
        self._by_hand, self._passed = True, False

    def finish(self) -> Rewirings:
        """Call `_finish_step`: after `prepare` and a step, again where it failed, or after a step
        that was not followed."""
        with self._set_caller("before_optimizer_step()"):
            if not (self._by_hand or self._failed):
                self._check_new("after_optimizer_step()")
            result = self._end()
        self._end_span()
        return result

    @property
    def _owner(self) -> Any:
        trainer = self._trainer()
        assert trainer is not None  # it holds this object
        return trainer

    @contextmanager
    def _set_caller(self, caller: str) -> Iterator[None]:
        self._caller = caller
        try:
            yield
        finally:
            self._caller = ""

    def _begin(self) -> None:
        self._failed = False
        if self._caller != _STEP:
            self._begin_span("optimizer")
        self._check_new(self._caller or "optimizer.step()")
        self._owner._begin_step()

    def _end(self) -> Rewirings:
        owner, steps = self._owner, self._owner.steps
        update = self._span is not OFF and owner._is_update()
        if update:
            self._span.__exit__()
            self._begin_span("update")
        try:
            result: Rewirings = owner._finish_step()
        finally:
            # The functions of `on_update` may fail after the step has counted.
            self._failed = owner.steps == steps
            if not self._failed:
                self._mark_step()
        self._result = result
        if update:
            count_density(owner.layers)
            _count_churn(() if result is None else result.values())
        return result

    def _mark_step(self) -> None:
        """Note that a step was taken with the present gradient."""
        self._by_hand, self._other_steps = False, 0
        if self._hooks is not None:
            self._hooks.used = True
        self._last_caller = self._caller or "optimizer.step()"
        self._marks = [
            None if grad is None else (weakref.ref(grad), local_part(grad)._version)
            for grad in self._owner._gradients()
        ]

    def _begin_span(self, name: str) -> None:
        """Begin a span of the trace; one that an error left open is dropped."""
        self._span = span(name)
        self._span.__enter__()

    def _end_span(self) -> None:
        self._span.__exit__()
        self._span = OFF

    def _check_new(self, caller: str) -> None:
        """Raise RuntimeError where another caller has already stepped with the present gradient.

        Two steps by the same caller are intended.
        """
        if caller == self._last_caller or not any(self._marks):
            return
        gradients: list[Tensor | None] = self._owner._gradients()
        for mark, grad in zip(self._marks, gradients, strict=True):
            if mark is None or grad is None:
                if mark is not grad:
                    return
            # torch does not count what kernels of a CUDA graph write.
            elif grad.is_cuda or mark[0]() is not grad or mark[1] != local_part(grad)._version:
                return
        raise RuntimeError(
            f"{caller} would step a second time with a gradient that {self._last_caller} has "
            "stepped with: the trainer follows the optimizer, so call one of them after each "
            "backward pass"
        )

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        # An error in the optimizer's step skips the count down, so the stack tells.
        self._depth = self._steps_on_stack() if self._depth else 1
        if self._depth > 1 or self._by_hand or _is_captured():
            return None
        if getattr(optimizer, "grad_scale", None) is not None:
            raise ValueError(
                "expected an optimizer whose steps the scaler skips, got "
                f"{type(optimizer).__name__} with fused=True, which skips them unnoticed: leave "
                "fused out"
            )
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            with defer_signals():
                self._begin()
            return None

        def closure_and_begin() -> Any:
            loss = closure()
            with defer_signals():
                self._begin()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure_and_begin}
        return (args[0], closure_and_begin, *args[2:]), kwargs

    def _steps_on_stack(self) -> int:
        """How many of torch's wrappers of the steps of these optimizers are on the stack."""
        optimizers = [] if self._hooks is None else self._hooks.optimizers
        frames = [f for f in _stack() if f.f_globals.get("__name__") == "torch.optim.optimizer"]
        steps = [f.f_locals["self"] for f in frames if f.f_code.co_name == "wrapper"]
        return sum(any(step is optimizer for optimizer in optimizers) for step in steps)

    def after_step(self) -> None:
        self._depth -= 1
        if self._depth > 0 or _is_captured():
            return
        if self._by_hand:
            self._passed = True
        else:
            with defer_signals():
                self._end()
                if self._caller != _STEP:
                    self._end_span()

    def follows(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._hooks is not None and any(o is optimizer for o in self._hooks.optimizers)

    def note_other_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn if an optimizer that no trainer follows trains the layers in place of the trainer's,
        as one that a loop, or a notebook's cell, has made anew."""
        trainer = self._trainer()
        if self._depth or self._by_hand:  # one that the trainer's optimizer has made for its step
            return
        if trainer is None or trainer.schedule is None or optimizer in self._unrelated:
            return
        values = {id(layer.values) for layer in trainer.layers.values()}
        if not any(id(p) in values for group in optimizer.param_groups for p in group["params"]):
            self._unrelated.add(optimizer)
            return
        self._other_steps += 1
        if self._other_steps == _OTHER_STEPS and is_due_within(
            trainer.schedule, trainer.steps + 1, None
        ):
            logs.warn(
                f"another optimizer ({type(optimizer).__name__}) than that of the sparse trainer "
                f"has taken {_OTHER_STEPS} steps, which the trainer does not count, so the "
                "patterns stay as they are: make a new trainer for each new optimizer"
            )


@functools.cache
def _follow_all_optimizers() -> None:
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: Any, *_: Any) -> None:
    """Called after each step of any optimizer of torch."""
    if torch.compiler.is_compiling():
        return
    following = [steps for ref in _following.valuerefs() if (steps := ref()) is not None]
    if not any(steps.follows(optimizer) for steps in following):
        for steps in following:
            steps.note_other_step(optimizer)


def _add_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer's `step` call its hooks, as torch's constructor does, which optimizers
    around others may not call. Others of its class stay as they are."""
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        vars(optimizer).setdefault(name, OrderedDict())
    step = optimizer.step
    if not any(getattr(known, "hooked", False) for known in (type(optimizer).step, step)):

        @functools.wraps(step)
        def take(_: Any, *args: Any, **kwargs: Any) -> Any:
            return step(*args, **kwargs)

        hooked = torch.optim.Optimizer.profile_hook_step(take)
        hooked.hooked = True  # type: ignore[attr-defined]
        optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]


class _Hooks:
    """The hooks of optimizers, which call a trainer's `OptimizerSteps` as long as it lives."""

    def __init__(self, steps: OptimizerSteps, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._steps: weakref.ref[OptimizerSteps] = weakref.ref(steps)
        self.optimizers = optimizers
        self.used = False
        self._handles = []
        for optimizer in optimizers:
            _add_hooks(optimizer)
            self._handles += [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        steps = self._steps()
        if steps is not None:
            self.used = True
            return _exclude_from_graph(steps.before_step)(optimizer, args, kwargs)
        if not self.used:
            self.used = True
            logs.warn(
                "the sparse trainer of this optimizer is gone before its first step, so the "
                "patterns stay as they are: keep it, as in trainer = ds.RigL(model, optimizer, "
                "...)",
            )
        return None

    def _after_step(self, *_: Any) -> None:
        steps = self._steps()
        if steps is not None:
            _exclude_from_graph(steps.after_step)()


def _exclude_from_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep `torch.compile` of an optimizer's step from tracing an update, which takes a minute."""
    # Outside of compiled code, `disable` would import all of dynamo.
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function


def unscale(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Pairs (x, dY) of the present step, dY divided by what a `GradScaler` that takes the step has
    multiplied the loss by."""
    scale = 1.0
    for frame in _stack():
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            scale = frame.f_locals["self"].get_scale()
            break
    if scale == 1:
        return list(pairs)
    # A 16-bit gradient without its scale may be too small for 16 bits.
    wide = [(x, dy if dy.dtype is torch.float64 else dy.float()) for x, dy in pairs]
    return [(x, dy / scale) for x, dy in wide]


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_captured() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _accumulates() -> bool:
    """Whether Accelerate's `accumulate` adds up gradients now, without a step."""
    module = sys.modules.get("accelerate.state")
    state = getattr(module, "GradientState", None)
    return state is not None and bool(state._shared_state) and not state().sync_gradients


def count_density(layers: Mapping[str, SparseLinear]) -> None:
    """Set the trace's counter "density": present weights over all weights of the layers together.

    It is 1 for a network without sparse layers.
    """
    if not is_traced():
        return
    present = sum(layer.values.numel() for layer in layers.values())
    total = sum(layer.in_features * layer.out_features for layer in layers.values())
    counter("density", present / total if layers else 1.0)


def _count_churn(rewirings: Iterable[Rewiring]) -> None:
    """Set the trace's counter "churn": the share of the blocks that an update dropped.

    Waits for updates on a device.
    """
    if not is_traced():
        return
    rewirings = list(rewirings)
    before = sum(rewiring.before.nnz for rewiring in rewirings)
    dropped = sum(len(rewiring.dropped) for rewiring in rewirings)
    counter("churn", dropped / before if before else 0.0)
