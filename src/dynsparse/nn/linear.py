"""A drop-in for `nn.Linear` that holds only its non-zero weights."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import Parameter

from dynsparse.interrupts import uninterrupted
from dynsparse.nn.active import ActiveSet
from dynsparse.nn.layer_state import LayerState, changing
from dynsparse.nn.targets import Executor, executor_for
from dynsparse.ops.grow.select import select
from dynsparse.ops.linear import layer_linear, linear
from dynsparse.ops.linear.choice import route
from dynsparse.ops.linear.kernels import panels
from dynsparse.pattern import PatternIndex, Rewiring, SparsePattern

__all__ = ["SparseLinear"]


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

    resizable: bool = False
    executor: Executor | None = None

    # The index is no buffer: buffers are averaged, broadcast and written to by others. It is made
    # of the pattern for the device of the values, and `rows` and `cols` are in the state dict.
    _state: LayerState | None = None
    # Rows and columns that were put in place of the layer's own, as `functional_call` does it.
    _given: dict[str, Tensor] | None = None

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
        self._install(pattern)
        self.reset_parameters(generator)

    def _install(self, pattern: SparsePattern, values: Tensor | None = None) -> None:
        """Change over to a pattern, and to values of its own where there are any."""
        with uninterrupted():
            with changing:
                if values is not None:
                    self._store(values)
                self._pattern = pattern
                self._state = self._given = None
                if self.executor is not None:
                    self.executor = self.executor.after(pattern)
            # Now, and not in the next call, which a compiler may watch.
            self._refresh()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw values and bias anew, uniform in +-1/sqrt(fan-in of the output's row)."""
        b = self.block_size
        fan_in = self.index.row_ptr.diff() * b
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
        """The kernels' index tensors, on the device of the values; not to be written to."""
        state = self._state
        return (self._refresh() if state is None else state).index.index

    @property
    def rows(self) -> Tensor:
        """Block rows of the slots, int32 [nnz], on the device of the values."""
        return self._shown("rows")

    @rows.setter
    def rows(self, rows: Tensor) -> None:
        self._give("rows", rows)

    @property
    def cols(self) -> Tensor:
        """Block columns of the slots, int32 [nnz], on the device of the values."""
        return self._shown("cols")

    @cols.setter
    def cols(self, cols: Tensor) -> None:
        self._give("cols", cols)

    def _shown(self, name: str) -> Tensor:
        given = None if self._given is None else self._given.get(name)
        own: Tensor = getattr(self._pattern, name)
        return own.to(self.values.device) if given is None else given

    def _give(self, name: str, tensor: Tensor) -> None:
        # torch's functional calls put the tensors of a state dict in place for one call, and put
        # back what they found. Others change the pattern through `set_pattern`.
        given = {**(self._given or {}), name: tensor}
        own = {n: t for n, t in given.items() if torch.equal(t.cpu(), getattr(self._pattern, n))}
        self._given = None if len(own) == len(given) else given
        self._state = None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]. Any number of threads may call it, while another changes the
        pattern, too: each call computes with the weights before or after the change."""
        if self.executor is not None:
            return self.executor(self, x)
        # Attributes of a module cost more than the rest of this function. Parametrizations and the
        # like take parameters out of here.
        own = self._parameters
        values = own.get("values")
        if type(values) is not Parameter or is_compiling():
            return linear(x, _whole(self.values), self.index, self.bias)
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
        return layer_linear(x, values, bias, state.index, state.memory)

    def held(self) -> tuple[Tensor, PatternIndex]:
        """Values and index tensors that belong together, whatever other threads do.

        The values are the Parameter where gradients are recorded, which only the thread that
        changes the pattern should do, and its memory otherwise.
        """
        if torch.is_grad_enabled() or is_compiling():
            return self.values, self.index
        state = self._current()
        return state.memory, state.index.index

    def _current(self) -> LayerState:
        state, values = self._state, self.values
        if (
            state is None
            or state.address != values.data_ptr()
            or state.version != state.watched._version
        ):
            state = self._refresh()
        return state

    def _refresh(self) -> LayerState:
        """The state as it is now: after a change, a move, or memory that was replaced."""
        with changing:
            values = _whole(self.values)
            pattern, before = self._pattern, self._state
            if before is not None and before.version != before.watched._version:
                raise RuntimeError(
                    "somebody has written to the index of this layer, which then no longer belongs "
                    "to its values: change patterns with set_pattern() or rewire(), and load the "
                    "layer anew"
                )
            if self._given is not None:
                found = {"rows": pattern.rows, "cols": pattern.cols, **self._given}
                pattern = SparsePattern(**found, shape=pattern.shape, block_size=self.block_size)
                if not torch.equal(pattern.rows, found["rows"].cpu()):
                    raise RuntimeError("rows and cols must be in row-major order")
                return LayerState(pattern, values, None)
            state = LayerState(pattern, values, None if before is None else before.index)
            self._state = state
            return state

    def _apply(self, fn: Any, recurse: bool = True) -> SparseLinear:
        super()._apply(fn, recurse)
        self._refresh()
        return self

    def forget_panels(self) -> None:
        """Give up what kernels for many samples have made of the index, 12 bytes per weight.

        The next product that wants it makes it anew. Trainers do this before they change the
        pattern, after which it would be of no use.
        """
        if self._state is not None:
            panels.forget(self._state.index)

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
        return route(self._current().index, batch, backward, dtype or self.values.dtype)

    def __getstate__(self) -> dict[str, Any]:
        # What was made of the pattern stays with this layer: copies have memory of their own.
        return {k: v for k, v in self.__dict__.items() if k != "_state"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._refresh()

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
        # Beside the old values, which other threads may be reading. The order by columns is given
        # up before: it is the largest array here.
        self._pattern.forget_index()
        values = _whole(self.values)
        if rewiring.keeps_size:
            moved = values.clone()
            rewiring.apply_(moved, fill=fill)
        else:
            moved = rewiring.apply(values, fill)
        self._install(rewiring.after, moved)

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
        self._install(pattern, values.to(self.values, copy=True))

    def _store(self, values: Tensor) -> None:
        """Take over the memory of values [any] or [any, b, b]; the Parameter stays the same."""
        own = self.values
        if values.shape != own.shape:
            own.grad = None  # it belongs to the old length
            # A graph that is still alive, as that of the last loss, keeps the node that accumulates
            # the gradient, and with it the old length. Autograd makes a new one when the type
            # changes.
            other = torch.float32 if own.dtype == torch.float64 else torch.float64
            own.data = own.data.new_empty(0, dtype=other)
        else:
            own[:0].zero_()  # a graph that waits for its backward pass learns of the change
        own.data = values

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
            with torch.no_grad():
                if values is None or values.shape == self.values.shape:
                    self._install(pattern)
                elif values.shape == pattern.values_shape and self.resizable:
                    self._install(pattern, values.to(self.values, copy=True))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for name in ("rows", "cols"):
            if prefix + name in unexpected_keys:
                unexpected_keys.remove(prefix + name)
            if strict and prefix + name not in state_dict:
                missing_keys.append(prefix + name)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # Copies: who loads into a state dict in place does not write into the pattern.
        for name in ("rows", "cols"):
            destination[prefix + name] = getattr(self._pattern, name).to(
                self.values.device, copy=True
            )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"density={self.density:.4g}, nnz={self._pattern.nnz}, block_size={self.block_size}, "
            f"bias={self.bias is not None}"
        )


def _whole(values: Tensor) -> Tensor:
    """The values, unless they are sharded: a shard's entries have no place in the pattern."""
    # Whoever shards has loaded that module, which takes a second.
    sharding = sys.modules.get("torch.distributed.tensor")
    if sharding is not None and isinstance(values, sharding.DTensor):
        raise RuntimeError(
            "the values of a sparse layer are sharded (a DTensor, as fully_shard makes them), and "
            "their pattern is not: keep sparse layers whole, as replicas"
        )
    return values


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
