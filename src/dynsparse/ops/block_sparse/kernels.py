"""The compiled attention (csrc/attention): float32 on the CPU, a row of blocks at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dynsparse._core import native


class Settings(NamedTuple):
    """The options of an attention."""

    block: int
    causal: bool
    scale: float
    dropout: float
    seed: int

    @property
    def keep_scale(self) -> float:
        """The scale of the weights that dropout keeps; 0 without dropout."""
        return 1 / (1 - self.dropout) if 0 < self.dropout < 1 else 0.0

    @property
    def threshold(self) -> int:
        """Weights whose random int32 is below it are dropped; the rate is exact to 2^-32."""
        return min(round(self.dropout * 2**32), 2**32 - 1) - 2**31


def _sizes(q: Tensor, k: Tensor, v: Tensor, s: Settings) -> np.ndarray:
    n, heads, queries, features = q.shape
    numbers = (n, heads, queries, k.shape[2], features, v.shape[3], s.block, s.causal)
    return np.array(numbers, np.int64)


def _append_strides(tensors: Sequence[Tensor | None]) -> list[Tensor | np.ndarray | None]:
    """Return each tensor followed by its strides."""
    arguments: list[Tensor | np.ndarray | None] = []
    for tensor in tensors:
        strides = (0,) * 4 if tensor is None else tensor.stride()
        arguments += [tensor, np.array(strides, np.int64)]
    return arguments


def _options(s: Settings) -> tuple[float, int, int, float, int]:
    return s.scale, s.seed, s.threshold, s.keep_scale, torch.get_num_threads()


def empty_by_token(q: Tensor, shape: Sequence[int]) -> Tensor:
    """Allocate [batch, heads, tokens, features], like q, the heads of a token adjacent."""
    n, heads, tokens, features = shape
    return q.new_empty(n, tokens, heads, features).transpose(1, 2)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_ptr: Tensor,
    cols: Tensor,
    bias: Tensor | None,
    s: Settings,
) -> tuple[Tensor, Tensor]:
    """Return the output [batch, heads, queries, value features], and sums for `backward`.

    The sums [batch, heads, queries] are the logarithms of the sums of exponentials.
    """
    out = empty_by_token(q, (*q.shape[:3], v.shape[3]))
    sums = torch.empty(q.shape[:3], device="cpu")
    status = native.call(
        "dynsparse_attention_forward",
        *_append_strides((q, k, v)),
        *(row_ptr, cols, bias),
        *_append_strides((out,)),
        *(sums, _sizes(q, k, v, s)),
        *_options(s),
    )
    if status:
        raise MemoryError("no scratch memory for an attention")
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
    """Return the gradients of q, k and v, or None for those that are not needed."""
    tensors = zip((q, k, v), needed, strict=True)
    gradients = [empty_by_token(q, t.shape) if n else None for t, n in tensors]
    status = native.call(
        "dynsparse_attention_backward",
        *_append_strides((grad, q, k, v, out)),
        *(sums, row_ptr, cols, bias),
        *_append_strides(gradients),
        _sizes(q, k, v, s),
        *_options(s),
    )
    if status:
        raise MemoryError("no scratch memory for the gradients of an attention")
    return gradients
