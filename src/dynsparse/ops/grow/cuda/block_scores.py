"""Growth scores of all blocks, without the dense gradient: the door to the Triton kernel.

Each tile of dY^T X is pooled where it was computed, so that the work is that of one dense product
and what is written is one number per block.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from dynsparse.ops.grow.scores import Pair
from dynsparse.ops.linear.cuda.blocks import readable
from dynsparse.ops.linear.cuda.chip import runs_triton

BLOCKS = (4, 8, 16, 32, 64, 128)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def serves(pairs: Sequence[Pair], b: int) -> bool:
    """Whether the kernel scores blocks of `b` from these pairs: not single elements, no float64."""
    tensors = [tensor for pair in pairs for tensor in pair]
    return (
        b in BLOCKS
        and all(t.dtype in _DTYPES for t in tensors)
        and all(runs_triton(t.device) for t in tensors)
    )


def block_scores(pairs: Sequence[Pair], b: int, pooling: str = "sum") -> Tensor:
    """|sum over pairs of dY^T X|, pooled per block: float32 [out / b, in / b], on their device.

    Nothing waits for the device. float32 counts as in the products of a layer, as three products
    of tf32 or as one; pairs of mixed types count as the type that holds all of them.

    Args:
        pairs: (x [batch, in], dY [batch, out]) of every micro-batch; any strides, and batches may
            differ in size. Several are read where they lie if their strides are alike.
        b: the block size, one of `BLOCKS`; divides both numbers of features.
        pooling: "sum", "avg" or "max" of the magnitudes in a block.

    Source: Evci et al. 2020, "Rigging the Lottery", section 3; the pooling is that of Graphcore's
    dynamic sparsity application.
    """
    from dynsparse.ops.grow.cuda import launch

    dtype = functools.reduce(torch.promote_types, (t.dtype for pair in pairs for t in pair))
    xs = [readable(x.to(dtype)) for x, _ in pairs]
    dys = [readable(dy.to(dtype)) for _, dy in pairs]
    return launch.scores(dys, xs, b, pooling)
