"""The kernels of each instruction set beside float64, on shapes and numbers drawn anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dynsparse import native
from dynsparse.nn import SparseConv2d
from dynsparse.ops.block_sparse import scaled_dot_product_attention
from dynsparse.ops.grow import topk_outside
from dynsparse.ops.linear import linear
from dynsparse.ops.linear.choice import KINDS, MOST_SAMPLES, SMALL_BLOCKS, use_kernel
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.selfcheck.result import Check, checked, distance

__all__ = ["BLOCKS", "check_kernels", "check_products", "product_error"]

BLOCKS = (1, 4, 8, 16, 32, 64, 128)
# Errors over sums of magnitudes: some roundings of the type that is summed in or put out.
_TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-14, torch.bfloat16: 8e-3, torch.float16: 2e-3}
_ROUNDS = 2


def check_kernels(isa: str, generator: torch.Generator) -> Iterator[Check]:
    """All that computes with one instruction set, "none" for plain torch."""
    if isa != "none":
        loaded = checked("kernels", isa, "library", 0.0, lambda: 0.0 * bool(native.load_isa(isa)))
        yield loaded
        if not loaded.matches:
            return
    with native.use_isa(isa):
        for block in BLOCKS:
            yield from check_products(isa, block, generator)
        others: dict[str, tuple[Callable[[torch.Generator], float], float]] = {
            "convolution": (_convolution, _TOLERANCE[torch.float32]),
            "attention": (_attention, _TOLERANCE[torch.float32]),
            "growth": (_growth, _TOLERANCE[torch.float32]),
            "pattern update": (_update, 0.0),
        }
        for name, (compare, tolerance) in others.items():
            for _ in range(_ROUNDS):
                yield checked(
                    "kernels", isa, name, tolerance, lambda f=compare: f(generator)  # type: ignore[misc]
                )  # fmt: skip


def check_products(isa: str, block: int, generator: torch.Generator) -> Iterator[Check]:
    """Forward and both gradients of a layer with these blocks, by each kind that may compute it."""
    routes = [(kind, torch.float32) for kind in KINDS if kind != "small" or block in SMALL_BLOCKS]
    routes.append(("sparse", torch.bfloat16))
    if isa == "none":  # it has one way for all, and does float64, which kernels leave to it
        routes = [("sparse", torch.float32), ("sparse", torch.float64), ("sparse", torch.bfloat16)]
    for kind, dtype in routes:
        way = kind if dtype is torch.float32 else str(dtype).removeprefix("torch.")
        what = "elements" if block == 1 else f"blocks of {block}"
        for _ in range(_ROUNDS):
            most = MOST_SAMPLES if kind == "small" else 200
            batch = _between(1, most, generator)

            def compare(kind: str = kind, dtype: torch.dtype = dtype, batch: int = batch) -> float:
                with use_kernel(kind):
                    return product_error(block, batch, dtype, torch.device("cpu"), generator)

            yield checked("kernels", isa, f"{what}: {way}", _TOLERANCE[dtype], compare)


def product_error(
    block: int,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> float:
    """The error of forward, of the gradients of x, of the values and of the bias."""
    largest = max(2, 320 // block)
    grid = _between(1, largest, generator), _between(1, largest, generator)
    total = grid[0] * grid[1]
    pattern = SparsePattern.random(
        (grid[0] * block, grid[1] * block),
        nnz=_between(1, total, generator),
        block_size=block,
        generator=generator,
    )
    kept = torch.float32 if dtype is torch.bfloat16 and device.type == "cpu" else dtype
    x = torch.randn(batch, grid[1] * block, generator=generator).to(dtype)
    dy = torch.randn(batch, grid[0] * block, generator=generator).to(dtype)
    values = torch.randn(pattern.values_shape, generator=generator).to(dtype).to(kept)
    bias = torch.randn(grid[0] * block, generator=generator).to(dtype).to(kept)
    ours = [t.clone().to(device).requires_grad_() for t in (x, values, bias)]
    y = linear(ours[0], ours[1], pattern, ours[2])
    y.backward(dy.to(device))
    weight = _dense(pattern, values)
    wide, back = x.double(), dy.double()
    expected = {
        "y": (y.detach(), wide @ weight.t() + bias.double(), wide.abs() @ weight.abs().t() + 1),
        "dx": (ours[0].grad, back @ weight, back.abs() @ weight.abs()),
        "dvalues": (ours[1].grad, *(_at(pattern, m) for m in _products(back, wide))),
        "dbias": (ours[2].grad, back.sum(0), back.abs().sum(0)),
    }
    return max(distance(got, right, size) for got, right, size in expected.values())  # type: ignore[arg-type]


def _products(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return dy.t() @ x, dy.abs().t() @ x.abs()


def _dense(pattern: SparsePattern, values: Tensor) -> Tensor:
    """Float64 [out, in], by indexing alone."""
    (height, width), b = pattern.grid, pattern.block_size
    weight = torch.zeros(height, b, width, b, dtype=torch.float64)
    weight[pattern.rows.long(), :, pattern.cols.long()] = values.double().view(-1, b, b)
    return weight.view(pattern.shape)


def _at(pattern: SparsePattern, matrix: Tensor) -> Tensor:
    (height, width), b = pattern.grid, pattern.block_size
    found = matrix.view(height, b, width, b)[pattern.rows.long(), :, pattern.cols.long()]
    return found.reshape(pattern.values_shape)


def _convolution(generator: torch.Generator) -> float:
    block = (1, 4, 8)[_between(0, 2, generator)]
    channels = [block * _between(1, 32 // block, generator) for _ in range(2)]
    size, kernel, stride = (_between(*span, generator) for span in ((5, 12), (1, 3), (1, 2)))
    layer = SparseConv2d(
        channels[0], channels[1], kernel, stride=stride, padding=kernel // 2, density=0.5,
        block_size=block, generator=generator,
    )  # fmt: skip
    x = torch.randn(_between(1, 6, generator), channels[0], size, size, generator=generator)
    x.requires_grad_()
    y = layer(x)
    dy = torch.randn(y.shape, generator=generator)
    y.backward(dy)
    weight = layer.to_dense().detach().double().requires_grad_()
    wide = x.detach().double().requires_grad_()
    assert layer.bias is not None
    right = F.conv2d(wide, weight, layer.bias.double(), stride, kernel // 2)
    right.backward(dy.double())
    assert x.grad is not None
    assert wide.grad is not None
    sizes = [torch.tensor(float(t.abs().max()) * 4 + 1) for t in (right.detach(), wide.grad)]
    return max(
        distance(y.detach(), right.detach(), sizes[0]), distance(x.grad, wide.grad, sizes[1])
    )


def _attention(generator: torch.Generator) -> float:
    """Of the output and of all gradients, where each query sees the keys in its blocks."""
    block = (4, 16, 32)[_between(0, 2, generator)]
    queries, keys = (block * _between(1, 96 // block, generator) for _ in range(2))
    pattern = SparsePattern.random((queries, keys), 0.6, block_size=block, generator=generator)
    n, heads, e, v = (_between(1, most, generator) for most in (3, 4, 40, 40))
    shapes = ((n, heads, queries, e), (n, heads, keys, e), (n, heads, keys, v))
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    ours = [t.clone().requires_grad_() for t in drawn]
    wide = [t.double().requires_grad_() for t in drawn]
    out = scaled_dot_product_attention(ours[0], ours[1], ours[2], pattern)
    seen = pattern.to_mask()
    scores = (wide[0] @ wide[1].transpose(2, 3) / e**0.5).masked_fill(~seen, -torch.inf)
    # A query that sees nothing gets zeros.
    weights = scores.softmax(-1).masked_fill(~seen.any(1)[:, None], 0.0)
    right = weights @ wide[2]
    dy = torch.randn(out.shape, generator=generator)
    ours_back = torch.autograd.grad(out, ours, dy)
    right_back = torch.autograd.grad(right, wide, dy.double())
    found = [(out.detach(), right.detach()), *zip(ours_back, right_back, strict=True)]
    # Sums of magnitudes are some times as large as the largest sum.
    return max(distance(a, b, 4 * b.abs().max() + 1) for a, b in found)


def _growth(generator: torch.Generator) -> float:
    """How far the weakest position that was chosen lies below the weakest that is right."""
    block = (1, 4, 16)[_between(0, 2, generator)]
    grid = _between(2, 256 // block, generator), _between(2, 256 // block, generator)
    total = grid[0] * grid[1]
    pattern = SparsePattern.random(
        (grid[0] * block, grid[1] * block),
        nnz=_between(1, total // 2, generator),
        block_size=block,
        generator=generator,
    )
    free = total - pattern.nnz
    k = _between(1, free, generator)
    batch = _between(1, 64, generator)
    x = torch.randn(batch, pattern.shape[1], generator=generator)
    dy = torch.randn(batch, pattern.shape[0], generator=generator)
    chosen = topk_outside([(x, dy)], pattern, k).flat
    gradient = (dy.double().t() @ x.double()).abs()
    (height, width), b = pattern.grid, block
    scores = gradient.view(height, b, width, b).sum((1, 3)).flatten()
    if len(set(chosen.tolist())) != k or bool(pattern.contains(chosen).any()):
        return float("inf")
    scores[pattern.flat] = -1
    right = scores.sort(descending=True).values[:k]
    return max(0.0, float(right[-1] - scores[chosen].min())) / float(right[0])


def _update(generator: torch.Generator) -> float:
    """How many entries of a pattern's arrays after an update are wrong; all are whole numbers."""
    height, width = (_between(1, 300, generator) for _ in range(2))
    before = SparsePattern.random(
        (height, width), nnz=_between(0, height * width, generator), generator=generator
    )
    order = torch.randperm(before.nnz, generator=generator)
    drop = order[: _between(0, before.nnz, generator)]
    taken = torch.zeros(height * width, dtype=torch.bool)
    taken[before.flat] = True
    taken[before.flat[drop]] = False
    free = (~taken).nonzero().flatten()
    free = free[torch.randperm(len(free), generator=generator)]
    grow = free[: _between(0, len(free), generator)]
    made = Rewiring.make(before, drop, grow).after
    taken[grow] = True
    flat = taken.nonzero().flatten()
    rows, cols = flat // width, flat % width
    if made.nnz != len(flat):
        return float("inf")
    by_columns = torch.argsort(cols * height + rows, stable=True)
    index = made.index
    pairs = [
        (made.rows, rows),
        (made.cols, cols),
        (index.row_ptr, torch.searchsorted(rows, torch.arange(height + 1))),
        (index.col_ptr, torch.searchsorted(cols.sort().values, torch.arange(width + 1))),
        (index.csc_rows, rows[by_columns]),
        (index.csc_perm, by_columns),
    ]
    return float(sum(int((got.long() != right).sum()) for got, right in pairs))


def _between(least: int, most: int, generator: torch.Generator) -> int:
    return int(torch.randint(least, most + 1, (), generator=generator))
