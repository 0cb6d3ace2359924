"""The pairs of a convolution that growth reads: the unfolded input as a view.

A pair (x, dY) of a linear layer is two matrices whose product dY^T X is the gradient of the weight.
That of a convolution is the same with the unfolded input, which is as many times larger as the
kernel has taps. Here it is a strided view of the padded input, of which `matrices` copies a
part at a time.

A pair of patches is x [groups, batch, height, width, kh, kw, channels] and dY [groups, batch,
height, width, outputs], channels and outputs being those of a group, heights and widths those of
the output.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from dynsparse.ops.conv.geometry import Geometry

# Dimensions of x and of dY.
_DIMENSIONS = (7, 5)

# Size of a part of the unfolded input.
CHUNK_BYTES = 8 << 20


def patches_of(x: Tensor, dy: Tensor, g: Geometry) -> tuple[Tensor, Tensor]:
    """Return x [batch, in, height, width] and dY [batch, out, ...] as a pair of patches."""
    padded = g.pad(x)
    batch, channels = x.shape[:2]
    n, c, h, w = padded.stride()
    (sh, sw), (dh, dw) = g.stride, g.dilation
    height, width = dy.shape[2:]
    patches = padded.as_strided(
        (g.groups, batch, height, width, *g.kernel, channels // g.groups),
        (channels // g.groups * c, n, sh * h, sw * w, dh * h, dw * w, c),
    )
    return patches, dy.unflatten(1, (g.groups, -1)).permute(1, 0, 3, 4, 2)


def are_patches(x: Tensor, dy: Tensor) -> bool:
    """Whether a pair is one of patches, of a convolution."""
    return (x.dim(), dy.dim()) == _DIMENSIONS and x.shape[:4] == dy.shape[:4]


def features_of(x: Tensor, dy: Tensor) -> tuple[int, int]:
    """Return (out, in) of the matrix whose gradient a pair, of any layer, makes."""
    if not are_patches(x, dy):
        return dy.shape[1], x.shape[1]
    return dy.shape[0] * dy.shape[4], x.shape[4:].numel()


def samples_of(x: Tensor) -> int:
    """Return the number of rows of the matrices that a pair stands for."""
    return len(x) if x.dim() == 2 else x.shape[1:4].numel()


def clone_view(x: Tensor) -> Tensor:
    """Copy one side of a pair, in no more memory than that of the tensor that it is a view of."""
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    if x.dim() == 2 or not x.numel() or span >= x.numel():
        return x.detach().clone()
    flat = x.detach().as_strided((span,), (1,))
    return flat.clone().as_strided(x.shape, x.stride(), 0)


def matrices(x: Tensor, dy: Tensor, begin: int, end: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (first, left [rows, samples], right [samples, in]) of the rows [begin, end).

    The products left @ right, added up at the rows from `first` on, are these rows of the gradient
    of the matrix.
    """
    if not are_patches(x, dy):
        yield 0, dy.narrow(1, begin, end - begin).t(), x
        return
    groups, batch, height, width, outputs = dy.shape
    features = x.shape[4:].numel()
    each = max(1, CHUNK_BYTES // max(1, features * width * x.itemsize))  # rows of the output
    for group in range(groups):
        first, last = max(begin, group * outputs), min(end, (group + 1) * outputs)
        if first >= last:
            continue
        inside = slice(first - group * outputs, last - group * outputs)
        many = max(1, each // max(1, height))
        for n in range(0, batch, many):
            for h in range(0, height, each):
                part = (group, slice(n, n + many), slice(h, h + each))
                left = dy[part][..., inside].reshape(-1, last - first).t()
                yield first - begin, left, x[part].reshape(left.shape[1], features)
