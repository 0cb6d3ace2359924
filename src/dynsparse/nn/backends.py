"""Backends: what may compute a layer's products instead of the operator of `ops.linear`.

`SparseLinear.executor` holds the executor of a layer: the active subset of Top-KAST, or one that a
backend made. Backends call `register_backend`; `import popsparse` registers the tile machine.
`make_target` imports what the entry points `dynsparse.backends` name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import entry_points
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dynsparse._core.checks import check_choice, shorten
from dynsparse.pattern import SparsePattern

Scores = Callable[[Sequence[tuple[Tensor, Tensor]], str], Tensor]
"""Function of pairs (x [batch, in], dY [batch, out]), whose products dY^T X sum to the gradient,
and of the pooling "sum", "avg", "max" or "none" (the same as "sum"). Returns the magnitudes of the
blocks [out / b, in / b]."""


class Executor(Protocol):
    """Computes the products of one layer.

    An executor with a target also has `embed(layer, ids)`, which looks up rows of a table, and may
    have `scores(layer, pairs, pooling)`, see `Scores`.
    """

    @property
    def target(self) -> Any:
        """The target that it computes on; None for the device of the values."""

    def __call__(self, layer: Any, x: Tensor) -> Tensor:
        """Return y [..., out] of a `SparseLinear` for x [..., in], differentiable in x, values and
        bias.

        Backward records x and dY in `ops.capture` when growth needs them.
        """

    def kernel(self, batch: int, backward: bool) -> str:
        """Return the name of the kernel that computes a pass over `batch` samples."""

    def for_pattern(self, pattern: SparsePattern) -> Executor | None:
        """Return the executor for another pattern of the layer; None for that of `ops.linear`."""


MakeExecutor = Callable[[Any, torch.dtype, Mapping[str, Any] | None], Executor]
"""Function of a target, the dtype of the values and options by name; returns the executor."""


class CompiledSteps(Protocol):
    """The training steps of a whole model on a target, made by a `CompileSteps`."""

    def step(self, *data: Tensor) -> Any:
        """Train on a batch: the model's inputs, and the targets of the loss.

        All batches have one shape. Returns (loss, output).
        """

    def copy_weights_to_device(self) -> None:
        """Copy weights, patterns and the optimizer's state to the target."""

    def copy_weights_to_host(self) -> None:
        """Copy weights and the optimizer's state back into the model and the optimizer."""

    def figures(self) -> dict[str, dict[str, float]]:
        """Return the costs of the last run of each program, "step" and those of updates.

        These are cycles, seconds, tflops, max_tile_bytes, to_host_bytes and from_host_bytes.
        """

    def operations(self) -> dict[str, dict[str, float]]:
        """Return the costs of each operation of the last step, such as cycles and flops."""


CompileSteps = Callable[..., CompiledSteps]
"""Function of a model, an optimizer or sparse trainer, a loss of (output, target), a target, and
by name `clip_grad_norm`, None or the largest norm of all gradients, and `return_output=True`."""


class _Backend(NamedTuple):
    target_class: type
    make: MakeExecutor
    targets: Mapping[str, Callable[..., Any]]
    compile: CompileSteps | None


_backends: dict[str, _Backend] = {}


def register_backend(
    name: str,
    target_class: type,
    make: MakeExecutor,
    targets: Mapping[str, Callable[..., Any]],
    compile: CompileSteps | None = None,
) -> None:
    """Let layers compute on a `target=` of the class `target_class`.

    Args:
        name: name of the backend; registering a name again replaces the backend.
        target_class: the class of its targets.
        make: makes the executor of a layer.
        targets: functions that make a target, by the name that `make_target` takes.
        compile: compiles the training steps of a whole model, if the backend can.
    """
    _backends[name] = _Backend(target_class, make, targets, compile)


def make_target(name: str, **settings: Any) -> Any:
    """Make a target by its name, such as "bow", of any installed backend.

    Args:
        name: the name of the target.
        settings: passed to the backend's function, such as `tiles=64`.

    Raises:
        ValueError: no installed backend has a target of this name.
    """
    for point in entry_points(group="dynsparse.backends"):
        point.load()  # registers the backend
    makers = {key: make for backend in _backends.values() for key, make in backend.targets.items()}
    return makers[check_choice("target", name, makers)](**settings)


def make_executor(
    target: Any, dtype: torch.dtype, options: Mapping[str, Any] | None = None
) -> Executor | None:
    """Make the executor of a layer of this dtype on `target`; None without a target.

    Args:
        target: a target of a registered backend, such as `popsparse.Target.bow()`.
        dtype: dtype of the layer's values.
        options: options of the target by name, see `SparseLinear`.

    Raises:
        TypeError: not a target of a registered backend, or a dtype that it does not support.
        ValueError: an unknown option; options without a target.
    """
    if target is None:
        if options is not None:
            raise ValueError("target_options need a target: pass target= too, or leave them out")
        return None
    for backend in _backends.values():
        if isinstance(target, backend.target_class):
            return backend.make(target, dtype, options)
    missing = "" if _backends else ", after `import popsparse` registered its backend"
    raise TypeError(
        f"target must be a target such as popsparse.Target.bow(){missing}, got {shorten(target)}"
    )


def find_step_compiler(target: Any) -> CompileSteps:
    """Return the function that compiles the training steps of a whole model for `target`.

    Raises:
        TypeError: the target's backend compiles no steps, or is not registered.
    """
    for backend in _backends.values():
        if isinstance(target, backend.target_class) and backend.compile is not None:
            return backend.compile
    raise TypeError(f"no backend compiles training steps for {shorten(target)}")


def scores_of(layer: Any) -> Scores | None:
    """Return the function that computes a layer's growth scores on its target.

    None if the host computes them.
    """
    scores = getattr(layer.executor, "scores", None)
    return None if scores is None else partial(scores, layer)
