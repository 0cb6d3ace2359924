"""How a trainer hears of its optimizer's steps, whoever takes them."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from dynsparse.interrupts import uninterrupted
from dynsparse.nn import SparseLinear
from dynsparse.pattern import Rewiring
from dynsparse.tracing.spans import OFF, counter, is_traced, span

T_co = TypeVar("T_co", covariant=True)

_STEP = "trainer.step()"


class Steps(Protocol[T_co]):
    """What a trainer does in a step of its optimizer."""

    def _before(self) -> None: ...

    def _after(self) -> T_co: ...

    def _is_update(self) -> bool:
        """Whether the step under way ends in an update."""
        ...

    def _count(self, made: Any) -> None:
        """Tell a trace of an update."""
        ...

    def _gradients(self) -> Sequence[Tensor | None]:
        """Those that the coming step takes, as they are now; None where there is none."""
        ...


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer that really steps, inside what Accelerate, Fabric and others put around it."""
    inside = getattr(optimizer, "optimizer", None)
    while isinstance(inside, torch.optim.Optimizer):
        optimizer, inside = inside, getattr(inside, "optimizer", None)
    return optimizer


class OptimizerSteps(Generic[T_co]):
    """Calls `_before` ahead of every step of an optimizer, and `_after` behind it, once each.

    A step comes in one of three ways: by `step`; by the optimizer's own `step`, which torch's hooks
    tell of, in whatever loop; between `prepare` and `finish`. A gradient that was taken in one way
    is refused in another. With a closure, `_before` follows each of its calls, when the
    gradients are there. What a CUDA graph captures is no step yet.

    Args:
        given: the optimizer as the loop knows it, perhaps one around that which really steps.
        trainer: holds this object; the optimizer holds neither of them.
    """

    def __init__(self, given: torch.optim.Optimizer, trainer: Steps[T_co]) -> None:
        self._given, self._optimizer = given, unwrap_optimizer(given)
        self._trainer = weakref.ref(trainer)
        self._hooks: _Hooks | None = None
        self._way = ""  # of the step that `step` takes just now
        self._depth = 0  # steps within one another: of a class of optimizers, and of its base
        self._by_hand = self._passed = False  # after `prepare`, and after a step behind it
        self._failed = False  # `after`, behind the optimizer's own step
        self._made: T_co | None = None
        self._span: Any = OFF
        self._taken_by = ""
        self._marks: list[tuple[weakref.ref[Tensor], int] | None] = []

    @property
    def is_hooked(self) -> bool:
        """Whether the optimizer's own steps are is_hooked."""
        return self._hooks is not None

    def start(self) -> None:
        """Hear the optimizer's own steps from now on.

        One derived from torch's without its constructor has no hooks, and is not is_hooked.
        """
        if self._hooks is None and hasattr(self._optimizer, "_optimizer_step_post_hooks"):
            self._hooks = _Hooks(self, self._optimizer)

    def stop(self) -> None:
        """Hear them no more."""
        if self._hooks is not None:
            self._hooks.close()
        self._hooks, self._depth = None, 0

    def step(self, take: Callable[[], Any] | None = None) -> T_co | None:
        """A step; what `after` returned, None where the optimizer took none.

        Args:
            take: what steps the optimizer, in place of its own `step`.
        """
        if self._given is self._optimizer and _accumulates():
            raise RuntimeError(
                "trainer.step() would step the optimizer after each micro-batch, inside "
                "accumulate() of Accelerate: call step() of the optimizer that prepare() returned, "
                "which the trainer follows"
            )
        self._way, self._made, self._depth = _STEP, None, 0
        self._begin_span("optimizer")
        take = self._given.step if take is None else take
        try:
            if self.is_hooked:
                take()
            else:
                self._begin()
                take()
                self._end()
            return self._made
        finally:
            self._way, self._made = "", None
            self._end_span()

    def prepare(self) -> None:
        """`before`, for a loop that steps the optimizer and then calls `finish`."""
        if self._by_hand and self._passed:
            raise RuntimeError(
                "expected after_optimizer_step() behind the optimizer's step, got another "
                "before_optimizer_step(): call both, or none of them"
            )
        self._by_hand = False
        with self._on_the_way("before_optimizer_step()"):
            self._begin()
        self._by_hand, self._passed = True, False

    def finish(self) -> T_co:
        """`after`, behind `prepare` and a step; again where it failed; behind a step unheard of."""
        with self._on_the_way("before_optimizer_step()"):
            if not (self._by_hand or self._failed):
                self._check_new("after_optimizer_step()")
            made = self._end()
        self._end_span()
        self._by_hand = False
        return made

    @property
    def _owner(self) -> Steps[T_co]:
        trainer = self._trainer()
        assert trainer is not None  # who holds this object
        return trainer

    @contextmanager
    def _on_the_way(self, way: str) -> Iterator[None]:
        self._way = way
        try:
            yield
        finally:
            self._way = ""

    def _begin(self) -> None:
        self._failed = False
        if self._way != _STEP:
            self._begin_span("optimizer")
        self._check_new(self._way or "optimizer.step()")
        self._owner._before()

    def _end(self) -> T_co:
        self._failed = True
        owner = self._owner
        update = self._span is not OFF and owner._is_update()
        if update:
            self._span.__exit__()
            self._begin_span("update")
        self._made = made = owner._after()
        if update:
            owner._count(made)
        self._failed = False
        if self._hooks is not None:
            self._hooks.used = True
        self._taken_by = self._way or "optimizer.step()"
        self._marks = [
            None if grad is None else (weakref.ref(grad), grad._version)
            for grad in owner._gradients()
        ]
        return made

    def _begin_span(self, name: str) -> None:
        """In the trace; what an error has left open is forgotten."""
        self._span = span(name)
        self._span.__enter__()

    def _end_span(self) -> None:
        self._span.__exit__()
        self._span = OFF

    def _check_new(self, way: str) -> None:
        """Raise RuntimeError where the last step took the gradient that is there, in another way.

        Twice in the same way is what somebody means who steps twice.
        """
        if way == self._taken_by or not any(self._marks):
            return
        for mark, grad in zip(self._marks, self._owner._gradients(), strict=True):
            if mark is None or grad is None:
                if mark is not grad:
                    return
            # Kernels of a CUDA graph write gradients without torch's counting it.
            elif grad.is_cuda or mark[0]() is not grad or mark[1] != grad._version:
                return
        raise RuntimeError(
            f"{way} would step a second time with a gradient that {self._taken_by} has stepped "
            "with: the trainer follows the optimizer, so call one of them after each backward pass"
        )

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        # Behind an error in the optimizer's step nobody counted down: then the stack is asked.
        self._depth = _steps_under_way(optimizer) if self._depth else 1
        if self._depth > 1 or self._by_hand or _is_captured():
            return None
        if getattr(optimizer, "grad_scale", None) is not None:
            raise ValueError(
                "expected an optimizer whose steps the scaler skips, got "
                f"{type(optimizer).__name__} with fused=True, which skips them unheard: after_step "
                "fused out"
            )
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            with uninterrupted():
                self._begin()
            return None

        def whole() -> Any:
            loss = closure()
            with uninterrupted():
                self._begin()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": whole}
        return (args[0], whole, *args[2:]), kwargs

    def after_step(self) -> None:
        self._depth -= 1
        if self._depth > 0 or _is_captured():
            return
        if self._by_hand:
            self._passed = True
        else:
            with uninterrupted():
                self._end()
                if self._way != _STEP:
                    self._end_span()


class _Hooks:
    """The hooks of an optimizer; what they tell is for a trainer that lives."""

    def __init__(self, steps: OptimizerSteps[Any], optimizer: torch.optim.Optimizer) -> None:
        self._steps: weakref.ref[OptimizerSteps[Any]] = weakref.ref(steps)
        self.used = False
        self._handles = [
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
            return steps.before_step(optimizer, args, kwargs)
        if not self.used:
            self.used = True
            warnings.warn(
                "the sparse trainer of this optimizer is gone before its first step, so the "
                "patterns stay as they are: keep it, as in trainer = ds.RigL(model, optimizer, "
                "...)",
                stacklevel=4,
            )
        return None

    def _after_step(self, *_: Any) -> None:
        steps = self._steps()
        if steps is not None:
            steps.after_step()


def is_scaled() -> bool:
    """Whether a `GradScaler` takes the step under way."""
    return any(f.f_globals.get("__name__") == "torch.amp.grad_scaler" for f in _stack())


def _steps_under_way(optimizer: torch.optim.Optimizer) -> int:
    """How many of torch's calls of an optimizer's step and hooks have begun and not ended."""
    here = [f for f in _stack() if f.f_globals.get("__name__") == "torch.optim.optimizer"]
    return sum(f.f_code.co_name == "wrapper" and f.f_locals["self"] is optimizer for f in here)


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_captured() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _accumulates() -> bool:
    """Whether Accelerate's `accumulate` just now adds up gradients, rather than step."""
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


def count_churn(rewirings: Iterable[Rewiring]) -> None:
    """Set the trace's counter "churn": the share of the blocks that an update dropped.

    Waits for updates on a device.
    """
    if not is_traced():
        return
    rewirings = list(rewirings)
    before = sum(rewiring.before.nnz for rewiring in rewirings)
    dropped = sum(len(rewiring.dropped) for rewiring in rewirings)
    counter("churn", dropped / before if before else 0.0)
