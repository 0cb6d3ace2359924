"""Run the kernels in Triton's interpreter with its bugs patched, and restore Triton afterwards.

Triton decides for a whole process whether kernels are interpreted (`TRITON_INTERPRET=1`), when they
are defined. Here all of them are replaced by interpreted ones temporarily, so that other tests in
the process use Triton unchanged.

Bugs of the interpreter (seen in 3.6 to 3.9):

- `tl.dot` multiplies bfloat16 operands as the 16-bit integers it keeps them in: silently wrong;
- float32 becomes bfloat16 by cutting off instead of rounding: twice the error of a GPU;
- before 3.7.1, NumPy 2.4 refuses its one-element arrays as bounds of loops;
- it exchanges the language anew for every function that a kernel calls, most of the time of a small
  launch, and leaves some of it exchanged afterwards. Here that is done once.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np

# Imported at the first launch otherwise, when it would not find the kernels it wants.
import triton.experimental.gluon  # noqa: F401
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from dynsparse.ops.grow import cuda as _growth
from dynsparse.ops.linear.cuda import launch as _products

LAUNCHES = (_products, _growth)
"""Imported before `kernels` looks for what there is to exchange."""

core = tl.core  # the interpreter exchanges what modules of the language it finds here


@contextmanager
def kernels() -> Iterator[None]:
    """Interpret all kernels of Triton, dynsparse and its benchmark inside this context."""
    with ExitStack() as stack:
        for place in (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base):
            stack.callback(_restore, place, dict(vars(place)))
        for name, module in list(sys.modules.items()):
            if name.startswith(("triton.language", "dynsparse.ops.", "gpu_parts.")):
                for key, value in list(vars(module).items()):
                    if isinstance(value, JITFunction):
                        _set(stack, module, key, interpreter.InterpretedFunction(value.fn))
        builder = interpreter.InterpreterBuilder
        _set(stack, builder, "create_dot", _dot(builder.create_dot))
        _set(stack, builder, "cast_impl", _cast(builder.cast_impl))
        # Whether int32 overflows is looked at in every sum and product otherwise: half the time.
        options = dataclasses.replace(
            interpreter.interpreter_builder.options, sanitize_overflow=False
        )
        _set(stack, interpreter.interpreter_builder, "options", options)
        interpreter._patch_lang(_set)
        tl.tensor.__index__ = lambda self: self.handle.data.item()
        _set(stack, interpreter, "_patch_lang", lambda kernel: interpreter._LangPatchScope())
        yield


def _set(stack: ExitStack, target: Any, name: str, value: Any) -> None:
    stack.enter_context(mock.patch.object(target, name, value))


def _restore(place: Any, before: dict[str, Any]) -> None:
    """Undo additions and replacements in a module or class."""
    for name in [name for name in vars(place) if name not in before]:
        delattr(place, name)
    for name, value in before.items():
        if vars(place)[name] is not value:
            setattr(place, name, value)


def _dot(dot):
    def wide(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    return lambda self, a, b, *rest: dot(self, wide(a), wide(b), *rest)


def _cast(cast):
    def rounded(self, source, target):
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return cast(self, source, target)
        bits = np.ascontiguousarray(source.data, np.float32).view(np.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        data = np.where(np.isnan(source.data), 0x7FC0, nearest).astype(np.uint16)
        return interpreter.TensorHandle(data.reshape(source.data.shape), tl.bfloat16)

    return rounded
