"""Drop-ins for `nn.Conv2d` and `nn.Conv1d` that store only their non-zero weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn import functional

from dynsparse._core.checks import check_choice, check_integer, check_kind, check_types
from dynsparse.nn.init import count_blocks, select_largest_blocks
from dynsparse.nn.linear import SparseLinear
from dynsparse.nn.sparse_module import trace_call
from dynsparse.ops import conv as ops
from dynsparse.ops.conv.choice import route
from dynsparse.ops.conv.geometry import Geometry, to_matrix, to_weight
from dynsparse.pattern import PatternIndex, SparsePattern

_MODES = ("zeros", "reflect", "replicate", "circular")


class _SparseConv(SparseLinear):
    """Base class of the 1-D and 2-D convolutions.

    A convolution is a `SparseLinear` over the inputs of the kernel, with a matrix
    [out, taps * in / groups] (see `ops.conv.Geometry`), so trainers, records and files treat it
    like any linear layer.
    """

    dimensions: ClassVar[int]
    dense_class: ClassVar[type[nn.Conv1d] | type[nn.Conv2d]]
    # The memory format of the outputs; set by `to(memory_format=...)`, as for a dense weight.
    memory_format: torch.memory_format = torch.contiguous_format

    @check_types
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | str | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        density: float | None = None,
        block_size: int | None = None,
        pattern: SparsePattern | None = None,
        generator: torch.Generator | None = None,
        values: Tensor | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_integer("in_channels", in_channels, 1)
        check_integer("out_channels", out_channels, 1)
        check_integer("groups", groups, 1)
        if in_channels % groups or out_channels % groups:
            raise ValueError(
                f"groups must divide the channels, got {groups} for {in_channels} and "
                f"{out_channels} channels"
            )
        kernel = self._check_sizes("kernel_size", kernel_size, 1)
        stride = self._check_sizes("stride", stride, 1)
        dilation = self._check_sizes("dilation", dilation, 1)
        around = self._resolve_padding(padding, kernel, stride, dilation)
        check_choice("padding_mode", padding_mode, _MODES)
        if block_size is not None:
            check_integer("block_size", block_size, 1)
        b = block_size if pattern is None else pattern.block_size
        if b is not None and (in_channels // groups % b or out_channels // groups % b):
            raise ValueError(
                f"block size {b} must divide the channels of a group, got "
                f"{in_channels // groups} in and {out_channels // groups} out: blocks cover "
                "channels of one tap of the kernel"
            )
        super().__init__(
            prod(kernel) * in_channels // groups,
            out_channels,
            density,
            block_size,
            bias,
            pattern=pattern,
            generator=generator,
            values=values,
            device=device,
            dtype=dtype,
        )
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride, self.dilation = kernel, stride, dilation
        self.padding = (
            padding if isinstance(padding, str) else self._check_sizes("padding", padding, 0)
        )
        self.padding_mode = padding_mode
        # In the order of torch.nn.functional.pad: the last dimension first.
        self._around = [n for pair in reversed(around) for n in pair]
        zeros = padding_mode == "zeros"
        before, after = zip(*(around if zeros else [(0, 0)] * self.dimensions), strict=True)
        self.geometry = Geometry(
            self._to_2d(kernel, 1),
            self._to_2d(stride, 1),
            (*self._to_2d(before, 0), *self._to_2d(after, 0)),
            self._to_2d(dilation, 1),
            groups,
        )

    @classmethod
    def _check_sizes(cls, name: str, given: int | Sequence[int], least: int) -> tuple[int, ...]:
        if isinstance(given, str) or not isinstance(given, Sequence):
            return (check_integer(name, given, least),) * cls.dimensions
        if len(given) != cls.dimensions:
            raise ValueError(
                f"{name} must be an integer or {cls.dimensions} of them, got {tuple(given)}"
            )
        return tuple(check_integer(name, n, least) for n in given)

    @classmethod
    def _resolve_padding(
        cls,
        padding: int | str | Sequence[int],
        kernel: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int],
    ) -> list[tuple[int, int]]:
        """Return the padding (before, after) of every dimension."""
        if not isinstance(padding, str):
            return [(n, n) for n in cls._check_sizes("padding", padding, 0)]
        if padding == "valid":
            return [(0, 0)] * cls.dimensions
        if padding != "same":
            raise ValueError(f"padding must be a size, 'same' or 'valid', got {padding!r}")
        if any(step != 1 for step in stride):
            raise ValueError(
                f"padding 'same' is for a stride of 1, got {tuple(stride)}: give sizes"
            )
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]

    @classmethod
    def _to_2d(cls, sizes: Sequence[int], missing: int) -> tuple[int, int]:
        """Return sizes for two dimensions; a 1-D convolution gets `missing` for the first."""
        return (sizes[0], sizes[1]) if cls.dimensions == 2 else (missing, sizes[0])

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.in_channels // self.groups, *self.kernel_size)

    def to_dense(self) -> Tensor:
        """Return the weight [out, in / groups, *kernel], differentiable in the values."""
        return to_weight(super().to_dense(), self.kernel_size)

    def to_dense_layer(self) -> nn.Module:
        dense = self.dense_class(
            self.in_channels,
            self.out_channels,
            self.kernel_size,  # type: ignore[arg-type]
            self.stride,  # type: ignore[arg-type]
            self.padding,  # type: ignore[arg-type]
            self.dilation,  # type: ignore[arg-type]
            self.groups,
            False,
            self.padding_mode,  # type: ignore[arg-type]
            device="meta",
        )
        weight = self.to_dense()
        if self.dimensions == 2:
            weight = weight.contiguous(memory_format=self.memory_format)
        dense.weight = self._make_parameter(weight)
        dense.register_parameter("bias", self.bias)
        return dense.train(self.training)

    def _apply(self, fn: Any, recurse: bool = True) -> _SparseConv:
        # The values have no memory format; a tensor of four dimensions in their place gets the one
        # that `to(memory_format=...)` asks for.
        probe = torch.empty(2, 2, 2, 2, device="cpu").to(memory_format=self.memory_format)
        probe = fn(probe)
        is_last = probe.is_contiguous(memory_format=torch.channels_last)
        self.memory_format = torch.channels_last if is_last else torch.contiguous_format
        super()._apply(fn, recurse)
        return self

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        return None  # not a linear layer

    # The passes with other values, for executors.

    def forward_with(
        self, x: Tensor, values: Tensor, index: PatternIndex, bias: Tensor | None
    ) -> Tensor:
        return ops.conv(x, values, index, self.geometry, bias)

    def grad_input_with(
        self, dy: Tensor, shape: Sequence[int], values: Tensor, index: PatternIndex
    ) -> Tensor:
        return ops.grad_input(dy, values, index, self.geometry, shape[2:])

    def grad_weight_with(
        self, dy: Tensor, x: Tensor, values: Tensor, index: PatternIndex
    ) -> Tensor:
        return ops.grad_weight(dy, x, values, index, self.geometry)

    def grad_bias_with(self, dy: Tensor, dtype: torch.dtype) -> Tensor:
        return dy.sum((0, 2, 3), dtype=dtype)

    def samples_of(self, shape: Sequence[int]) -> int:
        if self.groups > 1:
            raise ValueError("a convolution with groups is not a single matrix product")
        size = (1, *shape)[-self.dimensions :]
        height, width = self.geometry.output_size(*self._to_2d(size, 1))
        batch = shape[0] if len(shape) == self.dimensions + 2 else 1
        return batch * height * width

    def forward(self, x: Tensor) -> Tensor:
        """Return y [batch, out, ...] for x [batch, in, *size], or without batch, as `nn.Conv2d`."""
        if isinstance(x, Proxy):
            return trace_call(self, x)
        check_kind("x", x, Tensor, "a tensor")
        single = x.dim() == self.dimensions + 1
        if x.dim() != self.dimensions + 2 and not single:
            size = "height, width" if self.dimensions == 2 else "length"
            raise RuntimeError(
                f"x must be [batch, {self.in_channels}, {size}], with or without the batch, got "
                f"the shape {list(x.shape)}"
            )
        if single:
            x = x.unsqueeze(0)
        if self.padding_mode != "zeros":
            x = functional.pad(x, self._around, self.padding_mode)
        if self.dimensions == 1:
            x = x.unsqueeze(2)
        elif self.memory_format is not torch.contiguous_format:
            x = x.contiguous(memory_format=self.memory_format)
        if self.executor is not None:
            y = self.executor(self, x)
        else:
            values, index = self.snapshot()
            y = ops.conv(x, values, index, self.geometry, self.bias)
        if self.dimensions == 1:
            y = y.squeeze(2)
        return y.squeeze(0) if single else y

    @check_types
    def kernel(
        self,
        batch: int,
        size: int | Sequence[int] | None = None,
        *,
        backward: bool = False,
        dtype: torch.dtype | None = None,
    ) -> str:
        """Return the name of the kernel that computes a pass over `batch` samples.

        Args:
            batch: number of samples.
            size: size of the input, (height, width) or one number for both; required unless the
                layer has an executor.
            backward: False for the forward pass, True for both gradients.
            dtype: dtype of the activations; defaults to that of the values.

        Returns:
            "sparse" (over the non-zeros) or "dense" (a convolution with the dense weight); with an
            executor "active subset".
        """
        check_integer("batch", batch, 0)
        if self.executor is not None:
            return self.executor.kernel(batch, bool(backward))
        if size is None:
            raise ValueError("size must be the size of the input, such as 32 or (32, 32), got None")
        height, width = self._to_2d(self._check_sizes("size", size, 1), 1)
        if self.padding_mode != "zeros":
            left, right, *rest = self._around
            top, bottom = rest or (0, 0)
            height, width = height + top + bottom, width + left + right
        index, g = self._current().index, self.geometry
        output_size = g.output_size(height, width)
        return route(index, g, batch, output_size, bool(backward), dtype or self.values.dtype)

    def extra_repr(self) -> str:
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}",
                 f"stride={self.stride}"]  # fmt: skip
        if isinstance(self.padding, str) or any(self.padding):
            parts.append(f"padding={self.padding}")
        if any(n != 1 for n in self.dilation):
            parts.append(f"dilation={self.dilation}")
        if self.groups != 1:
            parts.append(f"groups={self.groups}")
        if self.padding_mode != "zeros":
            parts.append(f"padding_mode={self.padding_mode}")
        return ", ".join([
            *parts, f"density={self.density:.4g}", f"nnz={self.pattern.nnz}",
            f"block_size={self.block_size}", f"bias={self.bias is not None}",
        ])  # fmt: skip

    @classmethod
    @torch.no_grad()
    @check_types
    def from_dense(cls, conv: nn.Module, density: float, block_size: int = 1) -> _SparseConv:
        """Make a sparse layer that keeps the weights of `conv` with the largest magnitudes.

        Blocks are ranked by the sum of their magnitudes; ties go to the first in the order of
        outputs, taps, inputs.

        Raises:
            TypeError: another kind of layer.
            ValueError: a density outside (0, 1], a block size that does not divide the channels of
                a group, NaN in the weights.
        """
        if not isinstance(conv, cls.dense_class):
            raise TypeError(f"conv must be an nn.{cls.dense_class.__name__}, got {conv!r:.80}")
        matrix = to_matrix(conv.weight)
        nnz = count_blocks(tuple(matrix.shape), density, block_size)
        pattern = select_largest_blocks(matrix, nnz, block_size)
        layer = from_dense_conv(conv, pattern, pattern.values_of(matrix))
        if conv.bias is not None:
            layer.bias = nn.Parameter(conv.bias.detach().clone())
        return layer


class SparseConv2d(_SparseConv):
    """A convolution that stores only the present blocks of its weight.

    The weight [out, in / groups, kh, kw] is a sparse matrix [out, kh * kw * in / groups]; a block
    covers b outputs times b inputs of one tap of the kernel.

    Args:
        in_channels, out_channels, kernel_size, stride, padding: as in `nn.Conv2d`.
        dilation, groups, bias, padding_mode: likewise.
        density: fraction of the blocks that are present, in (0, 1]; rounded to the nearest block
            and to at least one. Defaults to 0.1.
        block_size: edge of the square blocks; must divide the input and output channels of a group.
            Defaults to 1.
        pattern: the initial pattern of the matrix, instead of a random one of `density`. It
            determines the block size.
        generator: random generator for the pattern and the initial values.
        values: the initial values, of the shape of the attribute, instead of random ones; copied.
        device, dtype: device and dtype of the values and the bias.

    Attributes:
        values, bias, resizable, executor: as in `SparseLinear`.
        geometry: kernel, stride, padding, dilation and groups as `ops.conv.conv` takes them.

    The values start as those of `SparseLinear`: uniform in +-1/sqrt(fan-in), where the fan-in of an
    output is its number of connections.

    Raises:
        ValueError: options that `nn.Conv2d` rejects, a density outside (0, 1], a block size that
            does not divide the channels of a group, a pattern of another shape.
    """

    dimensions = 2
    dense_class = nn.Conv2d


class SparseConv1d(_SparseConv):
    """A 1-D convolution: a drop-in for `nn.Conv1d`, otherwise as `SparseConv2d`.

    The weight [out, in / groups, k] is a sparse matrix [out, k * in / groups].
    """

    dimensions = 1
    dense_class = nn.Conv1d


def from_dense_conv(
    conv: nn.Module, pattern: SparsePattern, values: Tensor, device: Any = None
) -> _SparseConv:
    """Make a sparse layer with the options of a dense one, without bias.

    Args:
        device: defaults to that of the dense layer.
    """
    assert isinstance(conv, (nn.Conv1d, nn.Conv2d))
    kind = SparseConv2d if isinstance(conv, nn.Conv2d) else SparseConv1d
    layer = kind(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.groups,
        False,
        conv.padding_mode,
        pattern=pattern,
        values=values,
        device=conv.weight.device if device is None else device,
        dtype=conv.weight.dtype,
    )
    weight, last = conv.weight, torch.channels_last
    is_2d = isinstance(conv, nn.Conv2d)
    if is_2d and not weight.is_contiguous() and weight.is_contiguous(memory_format=last):
        layer.memory_format = last
    return layer


@check_types
@torch.no_grad()
def fuse_conv_bn_eval(
    conv: SparseConv1d | SparseConv2d, bn: nn.BatchNorm1d | nn.BatchNorm2d
) -> SparseConv1d | SparseConv2d:
    """Fuse a sparse convolution and the batch norm after it, for evaluation.

    It is `torch.nn.utils.fusion.fuse_conv_bn_eval` for sparse layers. The pattern stays the same: a
    batch norm scales each output, which scales the values and changes the bias.

    Args:
        conv: the convolution, in evaluation mode.
        bn: the batch norm after it, in evaluation mode and with running statistics.

    Returns:
        A copy of `conv` that computes both.

    Raises:
        ValueError: a layer in training mode, or a batch norm without running statistics or with
            another number of channels or dimensions.
    """
    if conv.training or bn.training:
        raise ValueError("fusing is for inference: call eval() on both layers first")
    if isinstance(conv, SparseConv2d) != isinstance(bn, nn.BatchNorm2d):
        raise ValueError(f"{type(bn).__name__} does not fit {type(conv).__name__}")
    if bn.num_features != conv.out_channels:
        raise ValueError(
            f"the batch norm must have {conv.out_channels} channels, got {bn.num_features}"
        )
    if bn.running_mean is None or bn.running_var is None:
        raise ValueError("the batch norm has no running statistics to fold: it normalises batches")
    fused = copy.deepcopy(conv)
    scale = (bn.running_var + bn.eps).rsqrt()
    if bn.weight is not None:
        scale = scale * bn.weight
    shift = -bn.running_mean * scale
    if conv.bias is not None:
        shift = shift + conv.bias * scale
    if bn.bias is not None:
        shift = shift + bn.bias
    values, b = fused.values, fused.block_size
    rows = scale.view(-1, b)[fused.rows.long()]  # [nnz, b]
    values.mul_(rows.squeeze(1) if b == 1 else rows[:, :, None])
    fused.bias = nn.Parameter(shift.to(values.dtype), requires_grad=values.requires_grad)
    return fused
