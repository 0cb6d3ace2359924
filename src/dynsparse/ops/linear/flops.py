"""What the operators cost, for torch's `FlopCounterMode`: two for each non-zero and sample, or
place of a convolution's output."""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def _forward(x: Any, values: Any, *_: Any, **__: Any) -> int:
    return 2 * prod(x[:-1]) * prod(values)


def _backward(dy: Any, x: Any, values: Any, *rest: Any, **_: Any) -> int:
    products = (x is not None) + bool(rest[-1])
    return products * 2 * prod(dy[:-1]) * prod(values)


def _conv(x: Any, values: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * out_shape[0] * prod(out_shape[2:]) * prod(values)


def _conv_backward(dy: Any, x: Any, values: Any, *rest: Any, **_: Any) -> int:
    products = (x is not None) + bool(rest[-1])
    return products * 2 * dy[0] * prod(dy[2:]) * prod(values)


def tell_counters() -> None:
    """Give the formulas to `FlopCounterMode`, and to those that count already.

    Loading it takes longer than loading torch, so that it is told where somebody has it: called
    where modes watch.
    """
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None:
        return
    registries = [counter.flop_registry]
    for mode in _get_current_dispatch_mode_stack():
        mode = getattr(mode, "counter", mode)
        if isinstance(mode, counter.FlopCounterMode):
            registries.append(mode.flop_registry)  # made of the first one when it began
    operators = torch.ops.dynsparse
    for registry in registries:
        if operators.linear not in registry:
            registry[operators.linear] = counter.shape_wrapper(_forward)
            registry[operators.linear_backward] = counter.shape_wrapper(_backward)
            registry[operators.conv] = counter.shape_wrapper(_conv)
            registry[operators.conv_backward] = counter.shape_wrapper(_conv_backward)
