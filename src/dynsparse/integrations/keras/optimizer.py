"""Keras optimizers as trainers expect those of torch: steps they follow, state they can change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import torch
from torch import Tensor


def resized(variable: Any) -> None:
    """Tell a Keras variable that its tensor has got another length."""
    variable._shape = tuple(variable._value.shape)


class KerasOptimizer(torch.optim.Optimizer):
    """Stands for an optimizer of Keras, whose steps become steps of this one.

    Its parameters are those of Keras' trainable variables. Its state is the tensors that Keras
    keeps for them, momenta and averages: what a trainer changes is Keras' own.

    Args:
        optimizer: a Keras optimizer that has been built. From now on its `apply` comes here.

    Attributes:
        fresh: by name of a state, what a fresh entry holds where that is not zero.

    Raises:
        TypeError: no optimizer of Keras, or one that treats weights as matrices.
        ValueError: one that scales the loss or accumulates gradients, or keeps state of which
            nobody can tell to which weights it belongs.
    """

    def __init__(self, optimizer: Any) -> None:
        _check(optimizer)
        self.keras = optimizer
        self.let_go()
        variables = optimizer._trainable_variables
        super().__init__([v.value for v in variables], {"lr": 0.0})
        known = {id(v) for v in variables}
        for name, slots in vars(optimizer).items():
            if isinstance(slots, list) and len(slots) == len(variables):
                for variable, slot in zip(variables, slots, strict=True):
                    if isinstance(slot, keras.Variable) and id(slot) not in known and slot.shape:
                        known.add(id(slot))
                        self.state.setdefault(variable.value, _Slots()).add(name, slot)
        strange = [v.path for v in optimizer.variables if v.shape and id(v) not in known]
        if strange:
            raise ValueError(
                f"{type(optimizer).__name__} keeps {strange[0]!r}, of which nobody can tell to "
                "which weights it belongs: use Adam, AdamW, SGD or their like"
            )
        self.fresh = {"_accumulators": float(getattr(optimizer, "initial_accumulator_value", 0.0))}
        self._take: Callable[[], Any] | None = None
        self._apply = optimizer.apply
        optimizer.apply = self._applied
        self._look_up_rate()

    def let_go(self) -> None:
        """Let Keras take its steps by itself again."""
        vars(self.keras).pop("apply", None)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The step that Keras is about to take."""
        if self._take is None or closure is not None:
            raise RuntimeError("Keras takes the steps: call model.fit() in place of step()")
        self._take()

    def _applied(self, grads: Sequence[Tensor | None], trainable_variables: Any = None) -> None:
        """In the place of Keras' `apply`."""
        self._look_up_rate()
        self._take = partial(self._apply, grads, trainable_variables)
        try:
            self.step()
        finally:
            self._take = None

    def _look_up_rate(self) -> None:
        rate = float(keras.ops.convert_to_numpy(self.keras.learning_rate))
        for group in self.param_groups:
            group["lr"] = rate


class _Slots(dict[str, Tensor]):
    """The state of one variable by name; what is put in place of a tensor gets into Keras' own."""

    def __init__(self) -> None:
        super().__init__()
        self._variables: dict[str, Any] = {}

    def add(self, name: str, variable: Any) -> None:
        self._variables[name] = variable
        super().__setitem__(name, variable.value)

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        variable = self._variables[name]
        variable.value.data = tensor
        resized(variable)


def _check(optimizer: Any) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"expected an optimizer of Keras, got {type(optimizer).__name__}")
    if isinstance(optimizer, keras.optimizers.Muon):
        raise TypeError("Muon takes weights for matrices, which a list of non-zeros is not")
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scales or optimizer.loss_scale_factor is not None:
        raise ValueError(
            "expected a loss that is not scaled, since growth compares gradients with weights, got "
            f"{type(optimizer).__name__} with a scale: use the policy mixed_bfloat16"
        )
    if optimizer.gradient_accumulation_steps:
        raise ValueError(
            "expected a gradient for every step, since Keras clears those of single batches before "
            "growth has seen them, got gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps}: leave it out"
        )
    if not optimizer.built:
        raise ValueError("expected an optimizer that is built: call optimizer.build() before")
