"""`nn.SparseLinear(..., target=...)`: a layer whose products run on the simulated tile machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dynsparse.machine import Profile, Target
from dynsparse.ops import capture
from dynsparse.ops.eager import refuse_transforms
from dynsparse.pattern import SparsePattern
from dynsparse.popsparse.layer import Layer
from dynsparse.popsparse.planner.planning import plan
from dynsparse.popsparse.product.plan import PASSES
from dynsparse.typed import typed

__all__ = ["TileMachine", "machine_profiles"]

_DTYPES = {torch.float16: "float16", torch.float32: "float32"}

# Programs are kept for so many batch sizes of a layer: an epoch's last batch is often smaller.
_KEPT = 4


class _Runner:
    """The programs of one layer, one for each batch size."""

    def __init__(self) -> None:
        self.layers: dict[tuple[Any, ...], Layer] = {}
        self.profiles: dict[str, Profile] = {}
        self.patterns: dict[tuple[Any, ...], SparsePattern] = {}

    def run(
        self,
        name: str,
        target: Target,
        pattern: SparsePattern,
        values: Tensor,
        *operands: Tensor,
    ) -> Tensor:
        """One pass on the machine; operands [batch, ...]."""
        dtype = _DTYPES[values.dtype]
        key = (target, dtype, len(operands[0]), pattern.density)
        layer = self.layers.get(key)
        if layer is None:
            if len(self.layers) == _KEPT:
                oldest = next(iter(self.layers))
                del self.layers[oldest]
                self.patterns.pop(oldest, None)
            sizes = (*pattern.shape, len(operands[0]), pattern.density, pattern.block_size, dtype)
            layer = self.layers[key] = Layer(plan(*sizes, target, passes=PASSES))
        if self.patterns.get(key) is not pattern:
            layer.set_pattern(pattern)
            self.patterns[key] = pattern
        layer.set_values(values)
        arrays = [operand.detach().to(values.dtype).cpu().numpy() for operand in operands]
        found: np.ndarray = getattr(layer, name)(*arrays)
        self.profiles[name] = layer.profiles[name]
        return torch.from_numpy(found).to(values.device)


class _MachineLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        pattern: SparsePattern,
        target: Target,
        runner: _Runner,
        row_ptr: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, values)
        ctx.pattern, ctx.target, ctx.runner, ctx.row_ptr = pattern, target, runner, row_ptr
        return runner.run("forward", target, pattern, values, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        x, values = ctx.saved_tensors
        found = (tensor.detach().to(values.dtype) for tensor in (x, dy))
        capture.record(ctx.row_ptr, *found)
        common = (ctx.target, ctx.pattern, values)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = ctx.runner.run("grad_input", *common, dy).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dw = ctx.runner.run("grad_weight", *common, dy, x)
        return dx, dw, None, None, None, None


class TileMachine:
    """Computes the products of a layer on a simulated tile machine: see `nn.targets.Executor`.

    Programs are built at the first batch of each size. Copies begin without any.

    Args:
        target: the machine.
        dtype: of the layer's values.

    Raises:
        TypeError: not a `Target`, or values that are neither float16 nor float32.
    """

    def __init__(self, target: Any, dtype: torch.dtype) -> None:
        if not isinstance(target, Target):
            raise TypeError(f"target must be a machine.Target such as Target.bow(), got {target!r}")
        _check_dtype(dtype)
        self.target, self.dtype = target, dtype
        self.runner = _Runner()

    def __reduce__(self) -> tuple[Any, ...]:
        return TileMachine, (self.target, self.dtype)

    def __call__(self, layer: Any, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]; the bias is added by torch."""
        refuse_transforms("a layer on the tile machine", x, layer.values)
        _check_dtype(layer.values.dtype)
        if x.shape[-1:] != (layer.in_features,):
            raise ValueError(f"expected an input [..., {layer.in_features}], got {list(x.shape)}")
        if not x.numel():
            y = x.new_zeros((*x.shape[:-1], layer.out_features))
        else:
            rows = x.reshape(-1, layer.in_features)
            y = _MachineLinear.apply(
                rows, layer.values, layer.pattern, self.target, self.runner, layer.index.row_ptr
            )
            y = y.reshape(*x.shape[:-1], layer.out_features)
        return y if layer.bias is None else y + layer.bias

    def kernel(self, batch: int, backward: bool) -> str:
        return "tile machine"

    def after(self, pattern: SparsePattern) -> TileMachine:
        """The same: it takes the pattern of the layer at every run."""
        return self


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        raise TypeError(f"the tile machine has float16 and float32, got {dtype}")


@typed
def machine_profiles(layer: nn.Module) -> dict[str, Profile]:
    """The profile of the last run of each pass of a layer with a target, by name."""
    executor = getattr(layer, "executor", None)
    return dict(executor.runner.profiles) if isinstance(executor, TileMachine) else {}
