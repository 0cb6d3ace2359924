"""A drop-in for `nn.Linear` that holds only its non-zero weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from dynsparse.nn.active import ActiveSet
from dynsparse.nn.targets import Executor, executor_for
from dynsparse.ops.grow.select import select
from dynsparse.ops.linear import LayerIndex, linear
from dynsparse.ops.linear.choice import route
from dynsparse.ops.linear.kernels import panels
from dynsparse.pattern import PatternIndex, Rewiring, SparsePattern

__all__ = ["SparseLinear"]

_DERIVED = ("row_ptr", "col_ptr", "csc_rows", "csc_perm")


class SparseLinear(nn.Module):
    """Y = X W^T + b with a sparse W [out, in] of which only the present blocks are stored.

    The forward product and both gradients cost in proportion to the non-zeros. The pattern may
    change at any time (`rewire`, `set_pattern`), inside a fixed number of blocks unless the layer
    is made `resizable`. The Parameter objects stay.

    Args:
        in_features, out_features: as in `nn.Linear`.
        density: share of the blocks that are present, in (0, 1]; rounded to the nearest block and
            to at least one.
        block_size: edge of the square blocks; must divide both feature counts.
        bias: whether to add a learned bias [out].
        pattern: the pattern to start from, in place of a random one of `density`. Its block size
            holds.
        generator: draws the random pattern and the initial values.
        target: a `machine.Target`: the products run on that simulated tile machine, in float32 or
            float16, and `popsparse.machine_profiles(layer)` says what they took. Without it they
            run where the values are.
        device, dtype: of the values and the bias. float32 uses the compiled kernels; bfloat16 and
            float16 compute in float32; float64 goes through plain torch.

    Attributes:
        values: Parameter [nnz] or [nnz, b, b]: the blocks in row-major order of the pattern.
        bias: Parameter [out] or None.
        resizable: False. True: `rewire`, `set_pattern` and `load_state_dict` take patterns with
            another number of blocks, and the values change their length in place. Trainers that
            prune or move blocks between layers set it.
        executor: None, or what computes the products in place of `ops.linear`: a target, or an
            `ActiveSet`. See `nn.targets.Executor`.

    The values start uniform in +-1/sqrt(fan-in), as those of `nn.Linear` do, but with the fan-in
    each output really has in the pattern (Evci et al. 2022, "Gradient Flow in Sparse Neural
    Networks and How Lottery Tickets Win", section 3.1).

    Raises:
        ValueError: a density outside (0, 1], a block size that does not divide the features, a
            pattern of another shape.
    """

    # The index tensors, all int32: buffers, so that they move with the module.
    rows: Tensor
    cols: Tensor
    row_ptr: Tensor
    col_ptr: Tensor
    csc_rows: Tensor
    csc_perm: Tensor

    resizable: bool = False
    executor: Executor | None = None

    # The index tensors as the operator takes them, made when first needed.
    _layer_index: LayerIndex | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        density: float = 0.1,
        block_size: int | None = None,
        bias: bool = True,
        *,
        pattern: SparsePattern | None = None,
        generator: torch.Generator | None = None,
        target: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if pattern is None:
            pattern = _random_pattern(
                (out_features, in_features), density, block_size or 1, generator
            )
        elif pattern.shape != (out_features, in_features):
            raise ValueError(
                f"the pattern must have the shape {(out_features, in_features)} "
                f"(out_features, in_features), got {pattern.shape}"
            )
        elif block_size not in (None, pattern.block_size):
            raise ValueError(
                f"block_size is {block_size} but the pattern has blocks of {pattern.block_size}: "
                "leave block_size out"
            )
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if not dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating point type, got {dtype}")
        if target is not None:
            self.executor = executor_for(target, dtype)
        self.in_features = in_features
        self.out_features = out_features
        self.values = nn.Parameter(torch.empty(pattern.values_shape, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        for name in ("rows", "cols", *_DERIVED):
            self.register_buffer(name, None, persistent=name not in _DERIVED)
        self._install(pattern)
        self.reset_parameters(generator)

    def _install(self, pattern: SparsePattern) -> None:
        # New tensors rather than copies into the old ones: a graph that still waits for its
        # backward pass keeps the indices it was built with.
        self._pattern = pattern
        self._layer_index = None
        if self.executor is not None:
            self.executor = self.executor.after(pattern)
        self.rows = pattern.rows.to(self.values.device)
        for name, tensor in pattern.index._asdict().items():
            setattr(self, name, tensor.to(self.values.device))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw values and bias anew, uniform in +-1/sqrt(fan-in of the output's row)."""
        b = self.block_size
        fan_in = self.row_ptr.diff() * b
        # An output without connections has no fan-in; its bias is scaled as in a dense layer.
        bound = torch.where(fan_in > 0, fan_in, self.in_features).double().rsqrt()
        bound = bound.to(self.values.dtype)
        values = _uniform(self.values, generator)
        self.values.copy_(values * bound[self.rows.long()].view(-1, *[1] * (values.dim() - 1)))
        if self.bias is not None:
            self.bias.copy_(_uniform(self.bias, generator) * bound.repeat_interleave(b))

    @property
    def pattern(self) -> SparsePattern:
        """Which blocks are present; change it with `set_pattern` or `rewire`."""
        return self._pattern

    @property
    def target(self) -> Any:
        """The target that was given, or None."""
        return None if self.executor is None else self.executor.target

    @property
    def active(self) -> ActiveSet | None:
        """The slots that the forward pass uses, where it does not use all while all values learn.

        The trainer `TopKAST` sets them; a change of the pattern takes them away.
        """
        return self.executor if isinstance(self.executor, ActiveSet) else None

    @active.setter
    def active(self, slots: ActiveSet | None) -> None:
        self.executor = slots

    @property
    def block_size(self) -> int:
        return self._pattern.block_size

    @property
    def density(self) -> float:
        """Present blocks / all blocks."""
        return self._pattern.density

    @property
    def index(self) -> PatternIndex:
        """The kernels' index tensors, on the device of the values."""
        return PatternIndex(self.row_ptr, self.cols, self.col_ptr, self.csc_rows, self.csc_perm)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        if self.executor is not None:
            return self.executor(self, x)
        index = self.index if is_compiling() else self._prepare()
        # Attributes of a module cost more than the rest of this function. Parametrizations and the
        # like take parameters out of here.
        own = self._parameters
        values = own.get("values")
        if values is not None and "bias" in own:
            return linear(x, values, index, own["bias"])
        return linear(x, self.values, index, self.bias)

    def _prepare(self) -> LayerIndex:
        # The tensors may have been replaced, as `to` does it: they are compared at every call.
        made = self._layer_index
        if made is None or not made.holds(self._buffers):
            self._layer_index = made = LayerIndex(self.index, self.values)
        return made

    def forget_panels(self) -> None:
        """Give up what kernels for many samples have made of the index, 12 bytes per weight.

        The next product that wants it makes it anew. Trainers do this before they change the
        pattern, after which it would be of no use.
        """
        if self._layer_index is not None:
            panels.forget(self._layer_index)

    def kernel(
        self, batch: int, *, backward: bool = False, dtype: torch.dtype | None = None
    ) -> str:
        """What computes a pass over `batch` samples: forward, or both gradients.

        One of `ops.linear.choice.ROUTES`, which execution follows: "sparse" (over the non-zeros),
        "small" (the same for small batches), "dense" (past the break-even density), "bfloat16"
        (over the non-zeros of such activations), "torch" where no compiled kernels serve the layer.
        "tile machine" or "active subset" where these compute it.

        Args:
            dtype: of the activations; that of the values if left out.
        """
        if self.executor is not None:
            return self.executor.kernel(batch, backward)
        return route(self._prepare(), batch, backward, dtype or self.values.dtype)

    def __getstate__(self) -> dict[str, Any]:
        # What was made of the index stays with this layer: copies have tensors of their own.
        return {k: v for k, v in self.__dict__.items() if k != "_layer_index"}

    @torch.no_grad()
    def rewire(self, rewiring: Rewiring, fill: float | Tensor = 0.0) -> None:
        """Apply one pattern update in place: survivors keep their values, grown slots get `fill`.

        The Parameter object stays the same. Optimizer state is not touched; trainers do that.

        Raises:
            ValueError: the rewiring starts from another pattern, or changes the number of blocks of
                a layer that is not `resizable`.
        """
        if rewiring.before is not self._pattern and rewiring.before != self._pattern:
            raise ValueError(
                f"the rewiring starts from {rewiring.before}, the layer holds {self._pattern}"
            )
        self._check_capacity(rewiring.after)
        if rewiring.keeps_size:
            rewiring.apply_(self.values, fill=fill)
        else:
            self._store(rewiring.apply(self.values, fill))
        # The old index is given up before the new one is made: they are the largest arrays here.
        self._pattern.forget_index()
        self._layer_index = None
        for name in _DERIVED:
            setattr(self, name, None)
        self._install(rewiring.after)

    @torch.no_grad()
    def set_pattern(self, pattern: SparsePattern, values: Tensor | None = None) -> None:
        """Change the pattern in place, to one of the same shape and block size, and of the same
        number of blocks unless the layer is `resizable`.

        Without `values` ([nnz] or [nnz, b, b]) blocks present before and after keep theirs and new
        ones start at zero.
        """
        self._check_capacity(pattern)
        if values is None:
            self.rewire(Rewiring.between(self._pattern, pattern))
            return
        pattern._check_values(values)
        self._store(values)
        self._install(pattern)

    def _store(self, values: Tensor) -> None:
        """Take over values [any] or [any, b, b]; the Parameter stays the same object."""
        own = self.values
        if values.shape == own.shape:
            own.copy_(values)
            return
        own.grad = None  # it belongs to the old length
        device, dtype = own.device, own.dtype
        # A graph that is still alive, as that of the last loss, keeps the node that accumulates
        # the gradient, and with it the old length. Autograd makes a new one when the type changes.
        other = torch.float32 if dtype == torch.float64 else torch.float64
        own.data = own.data.new_empty(0, dtype=other)
        own.data = values.detach().to(device, dtype, copy=True)

    def _check_capacity(self, pattern: SparsePattern) -> None:
        own = self._pattern
        alike = (pattern.shape, pattern.block_size) == (own.shape, own.block_size)
        if not alike or (pattern.nnz != own.nnz and not self.resizable):
            raise ValueError(
                f"the layer holds {own}; the new pattern must have the same shape, block size and "
                f"number of blocks, got {pattern}"
            )

    def to_dense(self) -> Tensor:
        """The weight as an [out, in] tensor, differentiable in the values."""
        return self._pattern.to_dense(self.values)

    @classmethod
    @torch.no_grad()
    def from_dense(cls, linear: nn.Linear, density: float, block_size: int = 1) -> SparseLinear:
        """A sparse layer with the weights of `linear` that have the largest magnitudes.

        Blocks are ranked by the sum of their magnitudes; ties go to the first in row-major order.

        Raises:
            ValueError: a density outside (0, 1], a block size that does not divide the weight, NaN
                among the weights.
        """
        weight = linear.weight
        nnz = _count(tuple(weight.shape), density, block_size)
        pattern = largest_blocks(weight, nnz, block_size)
        layer = cls(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            pattern=pattern,
            device=weight.device,
            dtype=weight.dtype,
        )
        layer.values.copy_(pattern.values_of(weight))
        if linear.bias is not None:
            layer.bias.copy_(linear.bias)
        return layer

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        # The pattern is in the state too: it is taken over when all of it fits, or nothing is.
        rows, cols = state_dict.get(prefix + "rows"), state_dict.get(prefix + "cols")
        if rows is not None and cols is not None:
            try:
                pattern = SparsePattern(
                    rows, cols, shape=self._pattern.shape, block_size=self.block_size
                )
                self._check_capacity(pattern)
                if not torch.equal(pattern.flat, rows.cpu().long() * pattern.grid[1] + cols.cpu()):
                    raise ValueError("rows and cols are not in row-major order")
            except (TypeError, ValueError) as error:
                error_msgs.append(f"the pattern of {prefix or 'the layer'!r} does not fit: {error}")
                return
            values = state_dict.get(prefix + "values")
            if values is None or values.shape == self.values.shape:
                self._install(pattern)
            elif values.shape == pattern.values_shape and self.resizable:
                with torch.no_grad():
                    self._store(values)
                self._install(pattern)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"density={self.density:.4g}, nnz={self._pattern.nnz}, block_size={self.block_size}, "
            f"bias={self.bias is not None}"
        )


def largest_blocks(weight: Tensor, nnz: int, block_size: int) -> SparsePattern:
    """The `nnz` blocks of `weight` [out, in] whose magnitudes have the largest sum.

    Ties go to the first in row-major order.
    """
    b = block_size
    height, width = weight.shape[0] // b, weight.shape[1] // b
    magnitude = weight.detach().abs().double()
    score = magnitude.view(height, b, width, b).sum((1, 3)).flatten()
    if bool(torch.isnan(score).any()):
        raise ValueError("the weights hold NaN, so blocks cannot be ranked by magnitude")
    flat = select(score, nnz).cpu()
    return SparsePattern.from_flat(flat, shape=tuple(weight.shape), block_size=b)


def _count(shape: tuple[int, ...], density: float, block_size: int) -> int:
    if isinstance(density, bool) or not isinstance(density, (int, float)) or not 0 < density <= 1:
        raise ValueError(f"density must be a number in (0, 1], got {density!r}")
    total = SparsePattern([], [], shape=shape, block_size=block_size).total
    return max(1, round(density * total))


def _random_pattern(
    shape: tuple[int, int], density: float, block_size: int, generator: torch.Generator | None
) -> SparsePattern:
    nnz = _count(shape, density, block_size)
    return SparsePattern.random(shape, nnz=nnz, block_size=block_size, generator=generator)


def _uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Uniform in [-1, 1), drawn where the generator lives."""
    device = like.device if generator is None else generator.device
    dtype = like.dtype if like.dtype == torch.float64 else torch.float32
    noise = torch.rand(like.shape, generator=generator, dtype=dtype, device=device)
    return (2 * noise - 1).to(device=like.device, dtype=like.dtype)
