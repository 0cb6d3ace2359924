"""`nn.SparseLinear(..., target=...)`: a layer whose products run on the simulated tile machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from dynsparse._core.checks import check_kind, check_types, shorten
from dynsparse.ops import capture
from dynsparse.ops.embedding import record_rows
from dynsparse.ops.torch_internals import refuse_transforms
from dynsparse.pattern import SparsePattern
from popsparse.embedding import EmbeddingLayer
from popsparse.layer import Layer
from popsparse.machine import Profile, Target
from popsparse.planning.options import Options, Update, to_option_name, translate_names
from popsparse.planning.plan import PASSES, Plan
from popsparse.planning.search import plan

_DTYPES = {torch.float16: "float16", torch.float32: "float32"}

# Number of batch sizes per layer whose programs are kept: an epoch's last batch is often smaller.
_KEPT = 4

Programs = TypeVar("Programs", Layer, EmbeddingLayer)

_DENSE_GRAD = ("available_memory_proportion", "partials_type")


class _Runner:
    """The programs of one layer for each batch size: products, or look-ups of a table."""

    def __init__(self, target: Target, options: TargetOptions) -> None:
        self.target, self.options = target, options
        self.layers: dict[tuple[Any, ...], Layer] = {}
        self.tables: dict[tuple[Any, ...], EmbeddingLayer] = {}
        self.profiles: dict[str, Profile] = {}
        self.patterns: dict[Any, SparsePattern] = {}
        self.update: Update | None = None

    def table(self, pattern: SparsePattern, values: Tensor, count: int) -> EmbeddingLayer:
        """The programs of a table for `count` indices, with these weights."""
        return self._load(
            self.tables, pattern, values, count, lambda planned: EmbeddingLayer(planned, count)
        )

    def _load(
        self,
        built: dict[tuple[Any, ...], Programs],
        pattern: SparsePattern,
        values: Tensor,
        batch: int,
        make: Callable[[Plan], Programs],
    ) -> Programs:
        """The programs for a batch, built if missing, with these weights."""
        dtype = _DTYPES[values.dtype]
        key = (dtype, batch, pattern.density)
        if key not in built:
            if len(built) == _KEPT:  # Forget the oldest.
                self.patterns.pop(built.pop(next(iter(built))), None)
            sizes = (*pattern.shape, batch, pattern.density, pattern.block_size, dtype)
            passes, options = self.options.passes, self.options.planned
            built[key] = make(plan(*sizes, self.target, passes=passes, options=options))
        programs = built[key]
        before = self.patterns.get(programs)
        if before is pattern:
            programs.set_values(values)
        elif before is None or self.update is None or isinstance(programs, EmbeddingLayer):
            programs.set_weights(pattern, values)
        else:
            self.profiles["rewire"] = programs.rewire(pattern, values)
        self.patterns[programs] = pattern
        return programs

    def run(self, name: str, pattern: SparsePattern, values: Tensor, *operands: Tensor) -> Tensor:
        """One pass on the machine, or "scores"; operands [batch, ...]."""
        self.check_pass(name)
        layer = self._load(
            self.layers,
            pattern,
            values,
            len(operands[0]),
            lambda planned: Layer(planned, update=self.update),
        )
        arrays = [operand.detach().to(values.dtype).cpu().numpy() for operand in operands]
        result: np.ndarray = getattr(layer, name)(*arrays)
        self.profiles[name] = layer.profiles[name]
        return torch.from_numpy(result).to(values.device)

    def check_pass(self, name: str) -> None:
        """Raise ValueError for a pass that the options leave out."""
        if name in PASSES and name not in self.options.passes:
            option = {"grad_input": "do_grad_a_pass", "grad_weight": "do_grad_w_pass"}[name]
            raise ValueError(
                f"backward needs {name}, which target_options leave out with {option}=False: "
                "remove the option, or turn off the gradient with requires_grad_(False)"
            )

    def set_update(self, update: Update) -> None:
        """Build later programs with those of this update."""
        if self.update != update:
            self.update = update
            self.layers.clear()
            self.patterns.clear()


class _MachineEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        values: Tensor,
        pattern: SparsePattern,
        runner: _Runner,
        row_ptr: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(ids, values)
        ctx.pattern, ctx.runner, ctx.row_ptr = pattern, runner, row_ptr
        table = runner.table(pattern, values, len(ids))
        rows = table.slice(ids.cpu().numpy())
        runner.profiles["slice"] = table.profiles["slice"]
        return torch.from_numpy(rows).to(values.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ids, values = ctx.saved_tensors
        dy = gradients[0].detach().to(values.dtype)
        if capture.is_open(ctx.row_ptr):
            record_rows(dy, ids, values, ctx.row_ptr)
        ctx.runner.check_pass("grad_weight")
        table = ctx.runner.table(ctx.pattern, values, len(ids))
        gradient = table.gradient(ids.cpu().numpy(), dy.cpu().numpy())
        ctx.runner.profiles["gradient"] = table.profiles["gradient"]
        return None, torch.from_numpy(gradient).to(values.device), None, None, None


class _MachineLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        pattern: SparsePattern,
        runner: _Runner,
        row_ptr: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, values)
        ctx.pattern, ctx.runner, ctx.row_ptr = pattern, runner, row_ptr
        return runner.run("forward", pattern, values, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        x, values = ctx.saved_tensors
        gradient = (tensor.detach().to(values.dtype) for tensor in (x, dy))
        capture.record(ctx.row_ptr, *gradient)
        common = (ctx.pattern, values)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = ctx.runner.run("grad_input", *common, dy).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dw = ctx.runner.run("grad_weight", *common, dy, x)
        return dx, dw, None, None, None


class TileMachine:
    """Computes the products of a layer on a simulated tile machine: see `nn.backends.Executor`.

    Programs are built at the first batch of each size. Copies start without programs.

    Args:
        target: the machine.
        dtype: dtype of the layer's values.
        options: options by name: those of `popsparse.Options`, and "dense_grad", a mapping with
            "available_memory_proportion" and "partials_type" of the dense gradient that updates
            use (see `popsparse.Update`).

    Raises:
        TypeError: values that are neither float16 nor float32.
        ValueError: an unknown option.
    """

    def __init__(
        self, target: Target, dtype: torch.dtype, options: Mapping[str, Any] | None = None
    ) -> None:
        _check_dtype(dtype)
        self.target, self.dtype = target, dtype
        self.options = TargetOptions.parse(options)
        self.runner = _Runner(target, self.options)

    def __reduce__(self) -> tuple[Any, ...]:
        return TileMachine, (self.target, self.dtype, self.options.by_name)

    def __call__(self, layer: Any, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]; torch adds the bias."""
        refuse_transforms("a layer on the tile machine", x, layer.values)
        _check_dtype(layer.values.dtype)
        if x.shape[-1:] != (layer.in_features,):
            raise ValueError(f"expected an input [..., {layer.in_features}], got {list(x.shape)}")
        if not x.numel():
            y = x.new_zeros((*x.shape[:-1], layer.out_features))
        else:
            rows = x.reshape(-1, layer.in_features)
            y = _MachineLinear.apply(
                rows, layer.values, layer.pattern, self.runner, layer.index.row_ptr
            )
            y = y.reshape(*x.shape[:-1], layer.out_features)
        return y if layer.bias is None else y + layer.bias

    def embed(self, layer: Any, ids: Tensor) -> Tensor:
        """ids [...] -> rows [..., in] of a layer that is a table.

        Raises:
            TypeError: ids that are not integers. IndexError: one outside the table.
        """
        refuse_transforms("a table on the tile machine", layer.values)
        _check_dtype(layer.values.dtype)
        check_kind("ids", ids, Tensor, "a tensor")
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise TypeError(f"ids must be integers, got {ids.dtype}")
        if not ids.numel():
            return layer.values.new_zeros((*ids.shape, layer.in_features))
        low, high = (int(end) for end in ids.aminmax())
        if low < 0 or high >= layer.out_features:
            raise IndexError(
                f"ids must be in [0, {layer.out_features}), got {low if low < 0 else high}"
            )
        common = (layer.values, layer.pattern, self.runner, layer.index.row_ptr)
        rows = _MachineEmbedding.apply(ids.reshape(-1), *common)
        return rows.reshape(*ids.shape, layer.in_features)

    def scores(self, layer: Any, pairs: Sequence[tuple[Tensor, Tensor]], pooling: str) -> Tensor:
        """Growth scores, computed on the tiles: see `nn.backends.Scores`.

        Micro-batches are joined into one product over all samples. The weights that go to the host
        with the scores are the layer's current ones.
        """
        x, dy = (torch.cat([pair[side] for pair in pairs]) for side in (0, 1))
        for name, operand in (("x", x), ("dY", dy)):
            if not bool(operand.isfinite().all()):
                raise ValueError(
                    f"{name} holds NaN or infinity, so positions cannot be ranked: the training "
                    "has diverged"
                )
        self.runner.set_update(Update.parse({"pooling": pooling, **self.options.dense_grad}))
        scores = self.runner.run("scores", layer.pattern, layer.values.detach(), dy, x)
        if not bool(scores.isfinite().all()):
            raise ValueError(
                f"growth scores overflow {self.dtype}: lower the scale of the loss, or pool by avg "
                "or max"
            )
        return scores

    def kernel(self, batch: int, backward: bool) -> str:
        return "tile machine"

    def for_pattern(self, pattern: SparsePattern) -> TileMachine:
        """Returns itself: every run uses the layer's current pattern."""
        return self


@contextmanager
def use_executors(executors: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Give layers other executors while the context lasts: pairs of a layer and its executor."""
    before = [(layer, layer.executor) for layer, _ in executors]
    try:
        for layer, executor in executors:
            layer.executor = executor
        yield
    finally:
        for layer, executor in before:
            layer.executor = executor


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        raise TypeError(f"the tile machine has float16 and float32, got {dtype}")


@dataclass(frozen=True)
class TargetOptions:
    """The options of a layer on the tile machine, by use.

    `planned` are those of the sparse products, `dense_grad` those of the dense gradient, `by_name`
    all options as passed.
    """

    by_name: dict[str, Any]
    planned: Options
    dense_grad: dict[str, Any]

    @classmethod
    def parse(cls, value: Mapping[str, Any] | None) -> TargetOptions:
        """Parse `target_options`; the error for an unknown name suggests the nearest known one."""
        by_name = translate_names({} if value is None else value, "target_options")
        rest = {name: option for name, option in by_name.items() if name != "dense_grad"}
        dense = by_name.get("dense_grad", {})
        if not isinstance(dense, Mapping) or not {*map(to_option_name, dense)} <= {*_DENSE_GRAD}:
            raise ValueError(
                f"dense_grad must be a mapping of {' and '.join(_DENSE_GRAD)}, got {shorten(dense)}"
            )
        dense = translate_names(dense)
        Update.parse(dense)
        # By default a layer trains, which needs all passes.
        passes = {"do_grad_a_pass": True, "do_grad_w_pass": True}
        return cls(by_name, Options.parse({**passes, **rest}), dense)

    @property
    def passes(self) -> tuple[str, ...]:
        planned = (True, self.planned.do_grad_a_pass, self.planned.do_grad_w_pass)
        return tuple(name for name, is_planned in zip(PASSES, planned, strict=True) if is_planned)


@check_types
def machine_profiles(layer: nn.Module) -> dict[str, Profile]:
    """The profiles of the last run of each pass of a layer with a target, by name; after a pattern
    update also those of "scores" and "rewire".

    Raises:
        TypeError: a layer without a target, or a model.
    """
    executor = getattr(layer, "executor", None)
    if not isinstance(executor, TileMachine):
        raise TypeError(
            f"expected a layer with a target, got {type(layer).__name__}: pass one layer, made "
            "with target=..."
        )
    return dict(executor.runner.profiles)
