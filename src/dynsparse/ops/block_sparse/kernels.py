"""The compiled attention (csrc/attention): float32 on the CPU, a row of blocks at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dynsparse import native


class Settings(NamedTuple):
    """What an attention is told beside its operands."""

    block: int
    causal: bool
    scale: float
    dropout: float
    seed: int

    @property
    def kept(self) -> float:
        """What weights that dropout leaves are multiplied by; 0: there is none."""
        return 1 / (1 - self.dropout) if 0 < self.dropout < 1 else 0.0

    @property
    def threshold(self) -> int:
        """Random int32 below it are dropped: the rate is exact to 2^-32."""
        return min(round(self.dropout * 2**32), 2**32 - 1) - 2**31


def _sizes(q: Tensor, k: Tensor, v: Tensor, s: Settings) -> np.ndarray:
    n, heads, queries, features = q.shape
    numbers = (n, heads, queries, k.shape[2], features, v.shape[3], s.block, s.causal)
    return np.array(numbers, np.int64)


def _given(tensors: Sequence[Tensor | None]) -> tuple[list[int | None], np.ndarray]:
    """Address and strides of each, one after the other, and what must live for as long."""
    strides = np.array([(0,) * 4 if t is None else t.stride() for t in tensors], np.int64)
    found: list[int | None] = []
    for tensor, row in zip(tensors, strides, strict=True):
        found += [None if tensor is None else tensor.data_ptr(), row.ctypes.data]
    return found, strides


def _by_token(shape: Sequence[int]) -> Tensor:
    """[batch, heads, tokens, features] whose heads lie beside each other, as layers want them."""
    n, heads, tokens, features = shape
    return torch.empty(n, tokens, heads, features).transpose(1, 2)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_ptr: Tensor,
    cols: Tensor,
    bias: Tensor | None,
    s: Settings,
) -> tuple[Tensor, Tensor]:
    """[batch, heads, queries, value features], and [batch, heads, queries] for `backward`."""
    library = native.load()
    assert library is not None
    out = _by_token((*q.shape[:3], v.shape[3]))
    sums = torch.empty(q.shape[:3])
    inputs, held = _given((q, k, v))
    output, held_too = _given((out,))
    sizes = _sizes(q, k, v, s)
    status = library.dynsparse_attention_forward(
        *inputs,
        row_ptr.data_ptr(),
        cols.data_ptr(),
        None if bias is None else bias.data_ptr(),
        *output,
        sums.data_ptr(),
        sizes.ctypes.data,
        s.scale,
        s.seed,
        s.threshold,
        s.kept,
        torch.get_num_threads(),
    )
    del held, held_too
    if status:
        raise MemoryError("no memory for an attention at blocks")
    return out, sums


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    row_ptr: Tensor,
    cols: Tensor,
    bias: Tensor | None,
    s: Settings,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of q, k and v, where they are needed."""
    library = native.load()
    assert library is not None
    made = [_by_token(t.shape) if n else None for t, n in zip((q, k, v), needed, strict=True)]
    inputs, held = _given((grad, q, k, v, out))
    outputs, held_too = _given(made)
    sizes = _sizes(q, k, v, s)
    status = library.dynsparse_attention_backward(
        *inputs,
        sums.data_ptr(),
        row_ptr.data_ptr(),
        cols.data_ptr(),
        None if bias is None else bias.data_ptr(),
        *outputs,
        sizes.ctypes.data,
        s.scale,
        s.seed,
        s.threshold,
        s.kept,
        torch.get_num_threads(),
    )
    del held, held_too
    if status:
        raise MemoryError("no memory for the gradients of an attention at blocks")
    return made
