"""A linear layer, called as `nn.Linear` is, that holds only its non-zero weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn import Parameter

from dynsparse.checks import check_integer
from dynsparse.nn.active import ActiveSet
from dynsparse.nn.sparse_module import SparseModule, whole
from dynsparse.nn.start import block_count, largest_blocks, random_pattern, uniform
from dynsparse.nn.targets import executor_for
from dynsparse.nn.weight_view import WeightView
from dynsparse.ops.linear import grad_input, grad_weight, layer_linear, linear
from dynsparse.ops.linear.choice import route
from dynsparse.pattern import PatternIndex, SparsePattern
from dynsparse.ranks import Part
from dynsparse.typed import typed


class SparseLinear(SparseModule):
    """Y = X W^T + b with a sparse W [out, in] of which only the present blocks are stored.

    The forward product and both gradients cost in proportion to the non-zeros. The pattern may
    change at any time (`rewire`, `set_pattern`), inside a fixed number of blocks unless the layer
    is made `resizable`. The Parameter objects stay.

    Args:
        in_features, out_features: as in `nn.Linear`.
        density: share of the blocks that are present, in (0, 1]; rounded to the nearest block and
            to at least one. 0.1 if left out.
        block_size: edge of the square blocks; must divide both feature counts.
        bias: whether to add a learned bias [out].
        pattern: the pattern to start from, in place of a random one of `density`. Its block size
            holds.
        generator: draws the random pattern and the initial values.
        target: a `popsparse.Target`: the products run on that simulated tile machine, in float32 or
            float16, and `popsparse.machine_profiles(layer)` says what they took. Without it they
            run where the values are.
        target_options: of the target, by name: those of `popsparse.Options`, and "dense_grad", a
            mapping with "available_memory_proportion" and "partials_type" of the dense gradient
            that RigL looks at.
        device, dtype: of the values and the bias. float32 uses the compiled kernels; bfloat16 and
            float16 compute in float32; float64 goes through plain torch.

    Attributes:
        values: Parameter [nnz] or [nnz, b, b]: values[i] is the block at (pattern.rows[i],
            pattern.cols[i]).
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
            pattern of another shape, an option that the target does not have.
    """

    @typed
    def __init__(
        self,
        in_features: int,
        out_features: int,
        density: float | None = None,
        block_size: int | None = None,
        bias: bool = True,
        *,
        pattern: SparsePattern | None = None,
        generator: torch.Generator | None = None,
        target: Any = None,
        target_options: Mapping[str, Any] | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if pattern is None:
            pattern = random_pattern(
                (out_features, in_features),
                0.1 if density is None else density,
                1 if block_size is None else block_size,
                generator,
            )
        elif pattern.shape != (out_features, in_features):
            raise ValueError(
                f"the pattern must have the shape {(out_features, in_features)} "
                f"(out_features, in_features), got {pattern.shape}"
            )
        elif density is not None:
            raise ValueError(
                f"density is {density} but the pattern says which blocks are present: leave "
                "density out"
            )
        elif block_size not in (None, pattern.block_size):
            raise ValueError(
                f"block_size is {block_size} but the pattern has blocks of {pattern.block_size}: "
                "leave block_size out"
            )
        check_integer("in_features", in_features, 1)
        check_integer("out_features", out_features, 1)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if not dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating point type, got {dtype}")
        if target is not None or target_options is not None:
            self.executor = executor_for(target, dtype, target_options)
        self.in_features = in_features
        self.out_features = out_features
        self.values = nn.Parameter(torch.empty(pattern.values_shape, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self._install(pattern)
        self.reset_parameters(generator)

    @torch.no_grad()
    @typed
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw values and bias anew, uniform in +-1/sqrt(fan-in of the output's row)."""
        b = self.block_size
        fan_in = self.index.row_ptr.diff() * b
        # An output without connections has no fan-in; its bias is scaled as in a dense layer.
        bound = torch.where(fan_in > 0, fan_in, self.in_features).double().rsqrt()
        bound = bound.to(self.values.dtype)
        values = uniform(self.values, generator)
        self.values.copy_(values * bound[self.rows.long()].view(-1, *[1] * (values.dim() - 1)))
        if self.bias is not None:
            self.bias.copy_(uniform(self.bias, generator) * bound.repeat_interleave(b))

    @property
    def target(self) -> Any:
        """The target that was given, or None."""
        return None if self.executor is None else self.executor.target

    @property
    def active(self) -> ActiveSet | None:
        """The slots that the forward pass uses, where it does not use all while all values learn.

        The trainer `TopKAST` sets them; a change of the pattern takes them away.
        """
        if isinstance(self.executor, ActiveSet):
            return self.executor
        return self.executor.active if isinstance(self.executor, Part) else None

    @active.setter
    def active(self, slots: ActiveSet | None) -> None:
        executor: Any = self.executor
        if isinstance(executor, Part):
            self.executor = executor.with_active(slots)
            return
        if executor is not None and self.active is None:
            raise ValueError(
                f"the layer is computed by {self.kernel(1)}, which knows no active subset"
            )
        self.executor = slots

    @property
    def weight(self) -> Tensor:
        """The weight [out, in] for code that reads it as that of an `nn.Linear`.

        Its shape, type and device cost nothing, and `torch.nn.functional.linear` with it is the
        sparse product. Anything else computes with a dense matrix made for it, differentiable in
        the values, and warns once per layer. It cannot be written to. Compiled code gets the dense
        matrix.
        """
        return self.to_dense() if is_compiling() else WeightView(self)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the dense weight."""
        return self._pattern.shape

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        if name == "weight":
            raise AttributeError(
                f"a {type(self).__name__} has values in place of a weight, so none can be put "
                "there: build it anew, or tie the layers before sparsify"
            )
        super().register_parameter(name, param)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """`forward` with another bias [out] or none; None where an executor computes the layer."""
        if self.executor is not None:
            return None
        return linear(x, whole(self.values), self._current().index, bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]. Any number of threads may call it, while another changes the
        pattern, too: each call computes with the weights before or after the change."""
        if self.executor is not None:
            return self.executor(self, x)
        # Attributes of a module cost more than the rest of this function. Parametrizations and the
        # like take parameters out of here.
        own = self._parameters
        values = own.get("values")
        if type(values) is not Parameter or is_dynamo_compiling():
            return linear(x, whole(self.values), self.index, self.bias)
        state = self._state
        if (
            state is None
            or state.address != values.data_ptr()
            or state.version != state.watched._version
        ):
            state = self._refresh()
        try:
            bias = own["bias"]
        except KeyError:
            bias = self.bias
        return layer_linear(x, values, bias, state.read)

    def samples_of(self, shape: Sequence[int]) -> int:
        """Rows of the matrix that an input of this shape is to the layer's own."""
        return prod(shape) // self.in_features

    # The passes with values and an index of another pattern, for executors. They do not record.

    def forward_with(
        self, x: Tensor, values: Tensor, index: PatternIndex, bias: Tensor | None
    ) -> Tensor:
        """The layer's product with other values."""
        return linear(x, values, index, bias)

    def grad_input_with(
        self, dy: Tensor, shape: Sequence[int], values: Tensor, index: PatternIndex
    ) -> Tensor:
        """dX of an x of this shape."""
        return grad_input(dy, values, index)

    def grad_weight_with(
        self, dy: Tensor, x: Tensor, values: Tensor, index: PatternIndex
    ) -> Tensor:
        """The gradient of these values, which are not read."""
        return grad_weight(dy, x, values, index)

    def grad_bias_with(self, dy: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of the bias, in its type."""
        return dy.reshape(-1, dy.shape[-1]).sum(0, dtype=dtype)

    @typed
    def kernel(
        self, batch: int, *, backward: bool = False, dtype: torch.dtype | None = None
    ) -> str:
        """What computes a pass over `batch` samples: forward, or both gradients.

        One of `ops.linear.choice.ROUTES`, which execution follows: "sparse" (over the non-zeros),
        "small" (the same for small batches), "dense" (past the break-even density), "bfloat16"
        (over the non-zeros of such activations), "torch" where no compiled kernels serve the layer.
        Off the CPU "dense" (a dense product of a weight laid out for it) or "blocks" (kernels over
        the blocks).
        "tile machine" or "active subset" where these compute it.

        Args:
            dtype: of the activations; that of the values if left out.
        """
        check_integer("batch", batch, 0)
        backward = bool(backward)
        if self.executor is not None:
            return self.executor.kernel(batch, backward)
        return route(self._current().index, batch, backward, dtype or self.values.dtype)

    @classmethod
    @torch.no_grad()
    @typed
    def from_dense(cls, linear: nn.Linear, density: float, block_size: int = 1) -> SparseLinear:
        """A sparse layer with the weights of `linear` that have the largest magnitudes.

        Blocks are ranked by the sum of their magnitudes; ties go to the first in row-major order.

        Raises:
            ValueError: a density outside (0, 1], a block size that does not divide the weight, NaN
                among the weights.
        """
        weight = linear.weight
        nnz = block_count(tuple(weight.shape), density, block_size)
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

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"density={self.density:.4g}, nnz={self._pattern.nnz}, block_size={self.block_size}, "
            f"bias={self.bias is not None}"
        )
