"""A linear layer that stores only its non-zero weights, and its variants for other libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.fx import Proxy
from torch.nn import Parameter, functional

from dynsparse._core import logs
from dynsparse._core.checks import check_integer, check_types
from dynsparse.nn.active_set import ActiveSet
from dynsparse.nn.backends import make_executor
from dynsparse.nn.init import count_blocks, random_pattern, select_largest_blocks, uniform
from dynsparse.nn.owners import check_given
from dynsparse.nn.sharded import device_of, require_unsharded
from dynsparse.nn.sparse_module import SparseModule, trace_call
from dynsparse.ops.linear.autograd import grad_input, grad_weight, layer_linear, linear
from dynsparse.ops.linear.products import route
from dynsparse.ops.linear.sparse_input import sparse_input_linear
from dynsparse.pattern import PatternIndex, SparsePattern
from dynsparse.ranks import ShardSpec

# Properties of a `WeightView` need no entries of the weight, except for these.
_ENTRY_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
_METADATA_METHODS = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex",
    "is_contiguous", "stride", "element_size", "get_device", "__len__", "__hash__",
})  # fmt: skip
_WRITING_METHODS = frozenset({
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__imatmul__", "__set__",
    "data_ptr", "untyped_storage", "storage",
})  # fmt: skip


class WeightView(Tensor):
    """The read-only weight of a sparse layer, such as [out, in], which stores no entries.

    Most code that reads `weight` asks for its dtype or device, or calls
    `torch.nn.functional.linear` with it. Neither needs the dense matrix: the view answers the first
    and computes the second as the layer's sparse product. Any other operation uses a dense matrix,
    differentiable in the values, and warns once per layer.

    Attributes:
        layer: the `SparseLinear` whose weight it is.
        transposed: whether it is [in, out].
    """

    layer: Any
    transposed: bool

    @staticmethod
    def __new__(cls, layer: Any, transposed: bool = False) -> WeightView:
        values, shape = layer.values, layer.weight_shape
        view = Tensor._make_wrapper_subclass(
            cls,
            shape[::-1] if transposed else shape,
            dtype=values.dtype,
            device=values.device,
            requires_grad=values.requires_grad,
        )
        view.layer, view.transposed = layer, transposed
        return view

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        name = func.__name__
        attribute = None
        if name == "__get__":
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if attribute == "data":
            return args[0]
        if name in _METADATA_METHODS or (
            attribute is not None and attribute not in _ENTRY_PROPERTIES
        ):
            return super().__torch_function__(func, types, args, kwargs)
        if name in _WRITING_METHODS or (name.endswith("_") and not name.endswith("__")):
            if isinstance(args[0], cls):
                raise RuntimeError(args[0]._write_error())
        elif isinstance(kwargs.get("out"), cls):
            raise RuntimeError(kwargs["out"]._write_error())
        if func is functional.linear and (product := cls._product(*args, **kwargs)) is not None:
            return product
        layers: set[Any] = set()
        args, kwargs = _substitute_dense(args, layers), _substitute_dense(kwargs, layers)
        for layer in layers:
            if not layer._has_warned:
                layer._has_warned = True
                logs.warn(_dense_weight_warning(layer))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Only calls that bypass torch's Python functions come here, after autograd.
        views = (arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, cls))
        raise RuntimeError(next(views)._write_error())

    @classmethod
    def _product(cls, input: Any, weight: Any, bias: Any = None) -> Tensor | None:
        """Return the layer's own product, or None where a dense matrix is needed."""
        if not isinstance(weight, cls) or isinstance(input, cls) or isinstance(bias, cls):
            return None
        if weight.transposed:
            return None
        return weight.layer.product(input, bias)

    def _write_error(self) -> str:
        layer = self.layer
        return (
            f"the dense weight of {_display_name(layer)} cannot be written to: write to the "
            f"layer's values, or {_advice(layer)}"
        )


def _substitute_dense(argument: Any, layers: set[Any]) -> Any:
    """Replace every view in `argument` by a dense weight; add their layers to `layers`."""
    if isinstance(argument, WeightView):
        layers.add(argument.layer)
        dense = argument.layer.to_dense()
        return dense.t() if argument.transposed else dense
    if type(argument) in (list, tuple):
        return type(argument)(_substitute_dense(item, layers) for item in argument)
    if type(argument) is dict:
        return {key: _substitute_dense(item, layers) for key, item in argument.items()}
    return argument


def _dense_weight_warning(layer: Any) -> str:
    return (
        f"a computation uses the dense weight of {_display_name(layer)}, which costs as "
        f"much as a dense layer at every call and is invisible to growth by gradient: "
        f"{_advice(layer)}"
    )


def _display_name(layer: Any) -> str:
    name = type(layer).__name__
    return f"a {name}" if layer._module_name is None else f"{layer._module_name!r} ({name})"


def _advice(layer: Any) -> str:
    if layer._module_name is None:
        return "use an nn.Linear in its place"
    return f"keep it dense with sparsify(..., exclude=[{layer._module_name!r}])"


def make_linear(weight: Parameter, bias: Parameter | None, training: bool) -> nn.Linear:
    """Make an `nn.Linear` with the given Parameters, without initialising others."""
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, bias=False, device="meta")
    linear.weight = weight
    linear.register_parameter("bias", bias)
    return linear.train(training)


class SparseLinear(SparseModule):
    """Y = X W^T + b with a sparse W [out, in] of which only the present blocks are stored.

    The cost of forward, grad_input and grad_weight is proportional to the number of non-zeros. The
    pattern may change at any time (`rewire`, `set_pattern`); the number of blocks is fixed unless
    the layer is `resizable`. The Parameter objects stay the same.

    Args:
        in_features, out_features: as in `nn.Linear`.
        density: fraction of the blocks that are present, in (0, 1]; rounded to the nearest block
            and to at least one. Defaults to 0.1.
        block_size: edge of the square blocks; must divide both feature counts. Defaults to 1.
        bias: whether to add a learned bias [out].
        pattern: the initial pattern, instead of a random one of `density`. It determines the block
            size.
        generator: random generator for the pattern and the initial values.
        values: the initial values, of the shape of the attribute, instead of random ones; copied.
        target: a `popsparse.Target`: the products run on that simulated tile machine, in float32 or
            float16; `popsparse.machine_profiles(layer)` returns their profiles. By default they
            run on the device of the values.
        target_options: options of the target by name: those of `popsparse.Options`, and
            "dense_grad", a mapping with "available_memory_proportion" and "partials_type" for the
            dense gradient that RigL uses.
        device, dtype: device and dtype of the values and the bias. float32 uses the compiled
            kernels; bfloat16 and float16 compute in float32; float64 uses plain torch operators.

    Attributes:
        values: Parameter [nnz] or [nnz, b, b]: values[i] is the block at (pattern.rows[i],
            pattern.cols[i]).
        bias: Parameter [out] or None.
        resizable: False. True: `rewire`, `set_pattern` and `load_state_dict` take patterns with
            another number of blocks, and the values change their length in place. Trainers that
            prune or move blocks between layers set it.
        executor: None, or what computes the products in place of `ops.linear`: a target, or an
            `ActiveSet`. See `nn.backends.Executor`.

    The values start uniform in +-1/sqrt(fan-in), as those of `nn.Linear` do, but with the fan-in
    that each output has in the pattern (Evci et al. 2022, "Gradient Flow in Sparse Neural Networks
    and How Lottery Tickets Win", section 3.1).

    Raises:
        ValueError: a density outside (0, 1], a block size that does not divide the features, a
            pattern of another shape, an option that the target does not have.
    """

    @check_types
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
        values: Tensor | None = None,
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
                f"density is {density} but the pattern determines which blocks are present: leave "
                "density out"
            )
        elif block_size not in (None, pattern.block_size):
            raise ValueError(
                f"block_size is {block_size} but the pattern has blocks of {pattern.block_size}: "
                "leave block_size out"
            )
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if not dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating point type, got {dtype}")
        if target is not None or target_options is not None:
            self.executor = make_executor(target, dtype, target_options)
        self.in_features = in_features
        self.out_features = out_features
        self.values = nn.Parameter(torch.empty(pattern.values_shape, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self._install(pattern)
        if values is None:
            self.reset_parameters(generator)
            return
        pattern._check_values(values)
        with torch.no_grad():
            self.values.copy_(values)
            if self.bias is not None:
                self._reset_bias(self._initial_bounds(), generator)

    @torch.no_grad()
    @check_types
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Redraw values and bias, uniform in +-1/sqrt(fan-in of the output)."""
        bound = self._initial_bounds()
        values = uniform(self.values, generator)
        self.values.copy_(values * bound[self.rows.long()].view(-1, *[1] * (values.dim() - 1)))
        if self.bias is not None:
            self._reset_bias(bound, generator)

    def _reset_bias(self, bound: Tensor, generator: torch.Generator | None) -> None:
        self.bias.copy_(uniform(self.bias, generator) * bound.repeat_interleave(self.block_size))

    def _initial_bounds(self) -> Tensor:
        """Return 1/sqrt(fan-in) of each block row: [out/b], the dtype of the values."""
        fan_in = self.index.row_ptr.diff() * self.block_size
        # An output without connections has no fan-in; its bias is scaled as in a dense layer.
        bound = torch.where(fan_in > 0, fan_in, self.in_features).double().rsqrt()
        return bound.to(self.values.dtype)

    @property
    def target(self) -> Any:
        """The target passed to the constructor, or None."""
        return None if self.executor is None else self.executor.target

    @property
    def active(self) -> ActiveSet | None:
        """The slots that the forward pass uses, or None if it uses all of them.

        The trainer `TopKAST` sets them; a change of the pattern resets them to None. Averages that
        follow the layer's patterns get the same slots.
        """
        if self.executor is None or isinstance(self.executor, ActiveSet):
            return self.executor
        return self.executor.active if isinstance(self.executor, ShardSpec) else None

    @active.setter
    def active(self, slots: ActiveSet | None) -> None:
        executor: Any = self.executor
        if isinstance(executor, ShardSpec):
            self.executor = executor.replace_active(slots)
            return
        if executor is not None and self.active is None:
            raise ValueError(
                f"the layer is computed by {self.kernel(1)}, which has no active subset"
            )
        self.executor = slots
        for follower in self._find_followers():
            self._share_active(follower)

    def add_follower(self, other: SparseModule) -> None:
        super().add_follower(other)
        self._share_active(other)

    def _share_active(self, other: Any) -> None:
        """Let another layer of the same pattern compute with this layer's active slots."""
        active, device = self.active, device_of(other.values)
        if active is not None and active.slots.device != device:
            active = ActiveSet(self.pattern, active.slots, device)
        if active is not other.active:
            other.active = active

    @property
    def weight(self) -> Tensor:
        """The weight [out, in], read-only, for code that expects that of an `nn.Linear`.

        Reading its shape, dtype or device costs nothing, and `torch.nn.functional.linear` with it
        is the sparse product. Any other operation uses a dense matrix, differentiable in the
        values, and warns once per layer. Compiled code gets the dense matrix.
        """
        return self.to_dense() if is_compiling() else WeightView(self)

    @weight.setter
    def weight(self, weight: Any) -> None:
        raise self._assignment_error()

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the dense weight."""
        return self._pattern.shape

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        if name == "weight":
            raise self._assignment_error()
        super().register_parameter(name, param)

    def _assignment_error(self) -> AttributeError:
        return AttributeError(
            f"the weight of {_display_name(self)} cannot be assigned, since it stores values "
            "instead: build a new layer, or tie the layers before sparsify"
        )

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return `forward` with another bias [out] or None; None if an executor computes it."""
        if self.executor is not None:
            return None
        return linear(x, require_unsharded(self.values), self._current().index, bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out].

        x may be sparse, [batch, in] in CSR or COO. On the CPU in float32 the work is then in
        proportion to its non-zeros, if these are at most a fortieth; otherwise x is made dense.

        Threads may call it while another thread changes the pattern: each call computes with the
        weights before or after the change.
        """
        if self.executor is not None:
            return self.executor(self, x)
        # Looking up attributes of a module costs more than the rest of this function.
        # Parametrizations remove parameters from this dictionary.
        parameters = self._parameters
        values = parameters.get("values")
        if type(values) is not Parameter or is_dynamo_compiling():
            given = require_unsharded(self.values)
            if is_compiling():
                return linear(x, given, self.index, self.bias)
            check_given(self, given)  # before the state takes their address
            index = self.index
            if given.device != index.cols.device:  # of a base on the meta device
                index = self._pattern._index_on(given.device)
            return linear(x, given, index, self.bias)
        state = self._state
        if (
            state is None
            or state.address != values.data_ptr()
            or state.version != state.watched._version
        ):
            state = self._refresh()
        try:
            bias = parameters["bias"]
        except KeyError:
            bias = self.bias
        if type(x) is Tensor and x.layout is not torch.strided:
            return sparse_input_linear(x, values, bias, state.read)
        try:
            return layer_linear(x, values, bias, state.read)
        except TypeError:
            if isinstance(x, Proxy):
                return trace_call(self, x)
            raise

    def samples_of(self, shape: Sequence[int]) -> int:
        """Return the number of samples of an input of this shape."""
        return prod(shape) // self.in_features

    # The passes with other values and the index of another pattern, for executors. They do not
    # record x and dY for growth.

    def forward_with(
        self, x: Tensor, values: Tensor, index: PatternIndex, bias: Tensor | None
    ) -> Tensor:
        """Compute the forward pass with other values."""
        return linear(x, values, index, bias)

    def grad_input_with(
        self, dy: Tensor, shape: Sequence[int], values: Tensor, index: PatternIndex
    ) -> Tensor:
        """Compute the gradient of an x of this shape."""
        return grad_input(dy, values, index)

    def grad_weight_with(
        self, dy: Tensor, x: Tensor, values: Tensor, index: PatternIndex
    ) -> Tensor:
        """Compute the gradient of `values`, whose entries are not read."""
        return grad_weight(dy, x, values, index)

    def grad_bias_with(self, dy: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the gradient of the bias, in its dtype."""
        return dy.reshape(-1, dy.shape[-1]).sum(0, dtype=dtype)

    @check_types
    def kernel(
        self, batch: int, *, backward: bool = False, dtype: torch.dtype | None = None
    ) -> str:
        """Return the name of the kernel that computes a pass over `batch` samples.

        Args:
            batch: number of samples.
            backward: False for the forward pass, True for both gradients.
            dtype: dtype of the activations; defaults to that of the values.

        Returns:
            On the CPU "sparse" (over the non-zeros), "small" (likewise, for small batches),
            "dense" (above the break-even density), "bfloat16" (over the non-zeros, for such
            activations), or "torch" (no compiled kernel supports the layer). On other devices
            "dense" (a product with the dense weight) or "blocks" (kernels over the blocks). With an
            executor "tile machine", "active subset" or "tensor parallel".
        """
        check_integer("batch", batch, 0)
        backward = bool(backward)
        if self.executor is not None:
            return self.executor.kernel(batch, backward)
        return route(self._current().index, batch, backward, dtype or self.values.dtype)

    @classmethod
    @torch.no_grad()
    @check_types
    def from_dense(cls, linear: nn.Linear, density: float, block_size: int = 1) -> SparseLinear:
        """Make a sparse layer that keeps the weights of `linear` with the largest magnitudes.

        Blocks are ranked by the sum of their magnitudes; ties go to the first in row-major order.

        Raises:
            ValueError: a density outside (0, 1], a block size that does not divide the weight, NaN
                in the weights.
        """
        weight = linear.weight
        nnz = count_blocks(tuple(weight.shape), density, block_size)
        pattern = select_largest_blocks(weight, nnz, block_size)
        layer = cls(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            pattern=pattern,
            values=pattern.values_of(weight),
            device=weight.device,
            dtype=weight.dtype,
        )
        if linear.bias is not None:
            layer.bias.copy_(linear.bias)
        return layer

    def to_dense_layer(self) -> nn.Module:
        """Make a dense layer with this layer's weights and its bias Parameter."""
        return make_linear(self._make_parameter(self.to_dense()), self.bias, self.training)

    def _make_parameter(self, weight: Tensor) -> Parameter:
        """Make a Parameter of a dense weight, which is trained if the values are."""
        return Parameter(weight.detach(), requires_grad=self.values.requires_grad)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"density={self.density:.4g}, nnz={self._pattern.nnz}, block_size={self.block_size}, "
            f"bias={self.bias is not None}"
        )


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is the `Conv1D` of `transformers`, without importing that library.

    It goes by the class name and the attributes: `nf`, a weight [in, nf] and a bias [nf].
    """
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    return (
        any(base.__name__ == "Conv1D" for base in type(module).__mro__)
        and isinstance(weight, Tensor)
        and weight.dim() == 2
        and weight.shape[1] == getattr(module, "nf", None)
        and (bias is None or bias.shape == weight.shape[1:])
    )


class SparseConv1D(SparseLinear):
    """A `SparseLinear` that replaces a `Conv1D` of GPT-2, whose weight is [in, out].

    Attributes:
        dense_class: the class of the layer it replaced, called as dense_class(nf, nx).
    """

    dense_class: type[nn.Module]

    @property
    def weight(self) -> Tensor:
        """The weight [in, out], read-only; see `SparseLinear.weight`."""
        return self.to_dense().t() if is_compiling() else WeightView(self, transposed=True)

    @weight.setter
    def weight(self, weight: Any) -> None:
        raise self._assignment_error()

    def to_dense_layer(self) -> nn.Module:
        with torch.device("meta"):  # skips the initialisation
            layer = self.dense_class(self.out_features, self.in_features)
        layer.weight = self._make_parameter(self.to_dense().t().contiguous())
        layer.bias = self.bias
        return layer


def is_graph_linear(module: nn.Module) -> bool:
    """Whether this is `torch_geometric.nn.Linear`, without importing that library.

    Its weight is [out, in], as that of `nn.Linear`. Subclasses that override `forward` are not
    accepted.
    """
    for base in type(module).__mro__:
        if base.__name__ == "Linear" and base.__module__.startswith("torch_geometric."):
            overridden = "forward" in module.__dict__ or type(module).forward is not base.forward  # type: ignore[attr-defined]
            return not overridden and module._parameters.get("weight") is not None
    return False


class SparseGraphLinear(SparseLinear):
    """A `SparseLinear` that replaces a `torch_geometric.nn.Linear`.

    Attributes:
        dense_class: the class of the layer it replaced, called as dense_class(in, out, bias=...).
    """

    dense_class: type[nn.Module]

    @property
    def in_channels(self) -> int:
        return self.in_features

    @property
    def out_channels(self) -> int:
        return self.out_features

    def to_dense_layer(self) -> nn.Module:
        with torch.device("meta"):  # skips the initialisation
            layer = self.dense_class(
                self.in_features, self.out_features, bias=self.bias is not None
            )
        layer.weight = self._make_parameter(self.to_dense())
        layer.bias = self.bias
        return layer
