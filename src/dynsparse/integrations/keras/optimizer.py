"""Keras optimizers as torch optimizers, whose steps trainers follow and whose state they change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import torch
from torch import Tensor

from dynsparse.ops.capture import Pairs
from dynsparse.ranks import ALONE


def update_shape(variable: Any) -> None:
    """Update the shape of a Keras variable after that of its tensor has changed."""
    variable._shape = tuple(variable._value.shape)


class KerasOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose steps are those of a Keras optimizer.

    Its parameters are those of Keras' trainable variables. Its state is the tensors that Keras
    keeps for them, momenta and averages, so that trainers change the state of Keras in place.

    Args:
        optimizer: a Keras optimizer that is built. Its `apply` is replaced until `release`.

    Attributes:
        fresh: name of a state -> its initial value, where that is not zero.
        batches: number of batches whose gradients Keras averages for a step.
        captures: returns the pairs that a sparse trainer captures now, by layer name.
        ranks: those that average their gradients before each step.

    Raises:
        TypeError: not a Keras optimizer, or one that treats weights as matrices.
        ValueError: one that scales the loss, or has state that cannot be assigned to weights.
    """

    def __init__(self, optimizer: Any) -> None:
        _check(optimizer)
        self.keras = optimizer
        self.batches = optimizer.gradient_accumulation_steps or 1
        self.captures: Callable[[], Mapping[str, Pairs]] = dict
        self.ranks = ALONE
        self._accumulated: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.release()
        variables = optimizer._trainable_variables
        super().__init__([v.value for v in variables], {"lr": 0.0})
        known = {id(v) for v in variables}
        for name, slots in vars(optimizer).items():
            if isinstance(slots, list) and len(slots) == len(variables):
                for variable, slot in zip(variables, slots, strict=True):
                    if isinstance(slot, keras.Variable) and id(slot) not in known and slot.shape:
                        known.add(id(slot))
                        self.state.setdefault(variable.value, _Slots()).add(name, slot)
        unknown = [v.path for v in optimizer.variables if v.shape and id(v) not in known]
        if unknown:
            raise ValueError(
                f"{type(optimizer).__name__} has the state {unknown[0]!r}, which cannot be "
                "assigned to weights: use Adam, AdamW, SGD or similar"
            )
        self.fresh = {"_accumulators": float(getattr(optimizer, "initial_accumulator_value", 0.0))}
        self._pending: Callable[[], Any] | None = None
        self._apply = optimizer.apply
        optimizer.apply = self._apply_through_step
        self._update_learning_rate()

    def release(self) -> None:
        """Restore the `apply` of the Keras optimizer."""
        vars(self.keras).pop("apply", None)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take the step that Keras has started."""
        if self._pending is None or closure is not None:
            raise RuntimeError("Keras takes the steps: call model.fit() instead of step()")
        self._pending()

    def _apply_through_step(
        self, grads: Sequence[Tensor | None], trainable_variables: Any = None
    ) -> None:
        """The replacement of Keras' `apply`."""
        self._update_learning_rate()
        apply = partial(self._apply, grads, trainable_variables)
        if self.batches > 1:
            self._accumulate_pairs()
            if (int(self.keras._iterations.value) + 1) % self.batches:
                apply()  # Keras adds to its sums
                return
        self._average_over_ranks(grads)
        if self.batches > 1:
            self._finish_accumulation()
        self._pending = apply
        try:
            self.step()
        finally:
            self._pending = None

    def _average_over_ranks(self, grads: Sequence[Tensor | None]) -> None:
        """Average the gradients, and those of earlier batches of this step, in place."""
        if self.ranks.alone:
            return
        tensors = [grad for grad in grads if grad is not None]
        if self.batches > 1:
            tensors += [v.value for v in self.keras._accumulated_gradients if v is not None]
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            parts = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = self.ranks.sum(torch.cat([part.flatten() for part in parts]))
            means = (flat / self.ranks.size).split([part.numel() for part in parts])
            for part, mean in zip(parts, means, strict=True):
                part.copy_(mean.view_as(part))

    def _accumulate_pairs(self) -> None:
        """Keep what growth reads of this batch, whose gradients Keras is about to clear."""
        for name, pairs in self.captures().items():
            accumulated = self._accumulated.setdefault(name, [])
            accumulated += [(x, dy / self.batches) for x, dy in pairs]

    def _finish_accumulation(self) -> None:
        """Show the trainer the pairs of all batches, and their average as the gradient."""
        for name, pairs in self.captures().items():
            pairs[:] = self._accumulated[name]
        self._accumulated.clear()
        variables = self.keras._trainable_variables
        sums = self.keras._accumulated_gradients
        for variable, added in zip(variables, sums, strict=True):
            tensor = variable.value
            if tensor.grad is not None and added is not None:
                # A new tensor: Keras has the gradient of the last batch to add.
                tensor.grad = (tensor.grad + added.value) / self.batches

    def _update_learning_rate(self) -> None:
        rate = float(keras.ops.convert_to_numpy(self.keras.learning_rate))
        for group in self.param_groups:
            group["lr"] = rate


class _Slots(dict[str, Tensor]):
    """The state of one variable by name; assignment replaces the tensor of the Keras variable."""

    def __init__(self) -> None:
        super().__init__()
        self._variables: dict[str, Any] = {}

    def add(self, name: str, variable: Any) -> None:
        self._variables[name] = variable
        super().__setitem__(name, variable.value)

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        variable = self._variables[name]
        variable.value.data = tensor
        update_shape(variable)


def _check(optimizer: Any) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"expected an optimizer of Keras, got {type(optimizer).__name__}")
    if isinstance(optimizer, keras.optimizers.Muon):
        raise TypeError("Muon requires weights that are matrices, not lists of non-zeros")
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scales or optimizer.loss_scale_factor is not None:
        raise ValueError(
            "expected a loss that is not scaled, since growth compares gradients with weights, got "
            f"{type(optimizer).__name__} with a scale: use the policy mixed_bfloat16"
        )
    if not optimizer.built:
        raise ValueError("expected an optimizer that is built: call optimizer.build() first")
