"""Spans of the forward and backward passes of models, in loops without spans of their own.

A trainer calls `watch`; while a trace is on the model has hooks. Hooks on every module would take
longer than a small layer; these are on the model only.
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

from dynsparse.tracing.spans import active_recorder

_models: WeakSet[nn.Module] = WeakSet()
_handles: list[RemovableHandle] = []


def watch(model: nn.Module) -> None:
    """Record the calls of a model, and the backward passes through it, in traces."""
    if model not in _models:
        _models.add(model)
        if active_recorder() is not None:
            _hook(model)


def unwatch(model: nn.Module) -> None:
    """Undo `watch`, for a loop that has its own spans. Call it before a trace begins."""
    _models.discard(model)


@contextmanager
def hook_models() -> Iterator[None]:
    """Add hooks to all watched models inside the context, also to those that are watched later."""
    for model in _models:
        _hook(model)
    try:
        yield
    finally:
        for handle in _handles:
            handle.remove()
        _handles.clear()


# Functions of the module, so that a model with hooks can be copied and pickled.


def _hook(model: nn.Module) -> None:
    _handles.append(model.register_forward_pre_hook(_begin_forward, prepend=True))
    _handles.append(model.register_forward_hook(_end_forward, always_call=True))


def _begin_forward(model: nn.Module, args: Any) -> None:
    recorder = active_recorder()
    if recorder is not None and not torch.compiler.is_compiling():
        recorder.forwards.append(time.perf_counter_ns())


def _end_forward(model: nn.Module, args: Any, out: Any) -> None:
    recorder = active_recorder()
    # `forwards` is empty if the trace began inside the call.
    if recorder is None or torch.compiler.is_compiling() or not recorder.forwards:
        return
    begin = recorder.forwards.pop()
    if recorder.forwards:  # inside another
        return
    recorder.mark(("forward", begin, time.perf_counter_ns(), None))
    tensor = _find_differentiable(out)
    if tensor is not None:
        with suppress(RuntimeError):  # transforms of torch.func do not support hooks
            tensor.register_hook(_begin_backward)


def _find_differentiable(out: Any) -> Tensor | None:
    """Return the first tensor of a model's output that requires a gradient, or None."""
    if isinstance(out, Tensor):
        return out if out.requires_grad else None
    parts = out.values() if isinstance(out, Mapping) else out
    if not isinstance(out, (Mapping, tuple, list)):
        return None
    return next((t for part in parts if (t := _find_differentiable(part)) is not None), None)


def _begin_backward(gradient: Tensor) -> None:
    """Begin the span of a backward pass, which reached the model; it ends with the whole pass."""
    recorder = active_recorder()
    if recorder is None or torch.compiler.is_compiling():
        return
    mark, begin = recorder.mark, time.perf_counter_ns()

    def end() -> None:
        mark(("backward", begin, time.perf_counter_ns(), None))

    torch.autograd.Variable._execution_engine.queue_callback(end)
