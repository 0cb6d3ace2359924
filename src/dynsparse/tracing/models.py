"""Forward and backward of models in loops that know of no spans.

A trainer shows its model to `watch`; while a trace is on the model carries hooks. Hooks on every
module would cost more than a small layer does; these are on the whole model alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dynsparse.tracing.spans import current

_models: WeakSet[nn.Module] = WeakSet()
_handles: list[RemovableHandle] = []


def watch(model: nn.Module) -> None:
    """Let traces tell how long the calls of a model take, and the backward passes through it."""
    if model not in _models:
        _models.add(model)
        if current() is not None:
            _hook(model)


def unwatch(model: nn.Module) -> None:
    """Take back `watch`, for a loop that has spans of its own; before a trace begins to hook it."""
    _models.discard(model)


@contextmanager
def hooked() -> Iterator[None]:
    """Inside, all models carry hooks: those that are watched now, and those that will be."""
    for model in _models:
        _hook(model)
    try:
        yield
    finally:
        for handle in _handles:
            handle.remove()
        _handles.clear()


# Functions of the module: a model that is copied or pickled meanwhile takes them along.


def _hook(model: nn.Module) -> None:
    _handles.append(model.register_forward_pre_hook(_begins, prepend=True))
    _handles.append(model.register_forward_hook(_ends, always_call=True))


def _begins(model: nn.Module, args: Any) -> None:
    recorder = current()
    if recorder is not None and not torch.compiler.is_compiling():
        recorder.forwards.append(time.perf_counter_ns())


def _ends(model: nn.Module, args: Any, out: Any) -> None:
    recorder = current()
    # None, where the trace began inside the call.
    if recorder is None or torch.compiler.is_compiling() or not recorder.forwards:
        return
    begin = recorder.forwards.pop()
    if recorder.forwards:  # inside another
        return
    recorder.mark(("forward", begin, time.perf_counter_ns(), None))
    tensor = _with_gradient(out)
    if tensor is not None:
        with suppress(RuntimeError):  # transforms of torch.func know no hooks
            tensor.register_hook(_goes_back)


def _with_gradient(out: Any) -> Tensor | None:
    """The first tensor of what a model returned that a backward pass may begin at."""
    if isinstance(out, Tensor):
        return out if out.requires_grad else None
    parts = out.values() if isinstance(out, Mapping) else out
    if not isinstance(out, (Mapping, tuple, list)):
        return None
    return next((found for part in parts if (found := _with_gradient(part)) is not None), None)


def _goes_back(gradient: Tensor) -> None:
    """A backward pass has come to the model; it ends where the whole pass does."""
    recorder = current()
    if recorder is None or torch.compiler.is_compiling():
        return
    mark, begin = recorder.mark, time.perf_counter_ns()

    def ended() -> None:
        mark(("backward", begin, time.perf_counter_ns(), None))

    torch.autograd.Variable._execution_engine.queue_callback(ended)
