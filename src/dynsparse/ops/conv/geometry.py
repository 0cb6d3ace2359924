"""The geometry of a convolution: sizes, strides, padding, and the order of its matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad


class Geometry(NamedTuple):
    """The options of a two-dimensional convolution.

    The weight [out, in / groups, kh, kw] is stored as the matrix [out, kh * kw * in / groups]: taps
    outer, channels inner, so that each block of the matrix lies in one tap.

    Attributes:
        kernel, stride, dilation: (down, across).
        padding: zeros at the (top, left, bottom, right).
        groups: number of groups of channels, as in `torch.nn.Conv2d`.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    groups: int

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1]

    def to_list(self) -> list[int]:
        """Return the options as a list, for the operators."""
        return [*self.kernel, *self.stride, *self.padding, *self.dilation, self.groups]

    @classmethod
    def from_list(cls, numbers: Sequence[int]) -> Geometry:
        """Return the geometry of a `to_list`."""
        kh, kw, sh, sw, top, left, bottom, right, dh, dw, groups = numbers
        return cls((kh, kw), (sh, sw), (top, left, bottom, right), (dh, dw), groups)

    def pad(self, x: Tensor) -> Tensor:
        """Return x [..., height, width] with the zeros of the padding; itself without padding."""
        top, left, bottom, right = self.padding
        return pad(x, (left, right, top, bottom)) if any(self.padding) else x

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of the output for an input of this size.

        Raises:
            RuntimeError: an input smaller than the kernel.
        """
        top, left, bottom, right = self.padding
        padded = height + top + bottom, width + left + right
        reach = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True)]
        if padded[0] < reach[0] or padded[1] < reach[1]:
            raise RuntimeError(
                f"the padded input is {padded[0]} x {padded[1]}, smaller than the kernel, which "
                f"reaches over {reach[0]} x {reach[1]}: give a larger input or more padding"
            )
        return (
            (padded[0] - reach[0]) // self.stride[0] + 1,
            (padded[1] - reach[1]) // self.stride[1] + 1,
        )


def to_matrix(weight: Tensor) -> Tensor:
    """Return a weight [out, in / groups, *kernel] as the matrix [out, taps * in / groups] of
    `Geometry`."""
    return weight.flatten(2).transpose(1, 2).flatten(1)


def to_weight(matrix: Tensor, kernel: Sequence[int]) -> Tensor:
    """Return the contiguous weight of a matrix: the inverse of `to_matrix`."""
    out, features = matrix.shape
    taps = math.prod(kernel)
    weight = matrix.view(out, taps, features // taps).transpose(1, 2)
    return weight.reshape(out, features // taps, *kernel)
