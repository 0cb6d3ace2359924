"""Training steps on a simulated tile machine: what `--target` and `--tiles` ask for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse.apps.common.options import MachineOptions
from dynsparse.nn.backends import CompiledSteps, find_step_compiler, make_target
from dynsparse.training import SparseTrainer


class MachineSteps:
    """Takes training steps on the machine: forward, backward and the optimizer's, one program.

    A program is of one size of batch. The last batch of an epoch may have another one and a program
    of its own: the host's model hands the weights on.

    Args:
        options: their target, tiles, device.
        trained: the sparse trainer, or the optimizer where there is none.
        loss: called with the model's output and what it is compared with.
        clip_grad_norm: the largest norm of all gradients together; None for any.

    Raises:
        ValueError: tiles that the target does not have.
    """

    def __init__(
        self,
        options: MachineOptions,
        model: nn.Module,
        trained: SparseTrainer | torch.optim.Optimizer,
        loss: Callable[[Tensor, Tensor], Tensor],
        clip_grad_norm: float | None = None,
    ) -> None:
        assert options.target is not None
        tiles = {} if options.tiles is None else {"tiles": options.tiles}
        target = make_target(options.target, **tiles)
        self._compile: Callable[[], CompiledSteps] = partial(
            find_step_compiler(target), model, trained, loss, target,
            clip_grad_norm=clip_grad_norm, return_output=True,
        )  # fmt: skip
        self._programs: dict[tuple[torch.Size, ...], CompiledSteps] = {}
        self._current: CompiledSteps | None = None

    def step(self, inputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Train on a batch: (loss, the model's output).

        Raises:
            ValueError: a program that does not fit the tiles, or that the machine does not have.
        """
        shapes = (inputs.shape, target.shape)
        is_new = shapes not in self._programs
        if is_new:
            self._programs[shapes] = self._compile()
        program = self._programs[shapes]
        if program is not self._current:
            self.copy_weights_to_host()
            if not is_new:
                program.copy_weights_to_device()
        try:
            loss, output = program.step(inputs, target)
        except NotImplementedError as error:
            raise ValueError(f"--target: {error}: leave --target out") from None
        self._current = program
        return loss, output

    def copy_weights_to_host(self) -> None:
        """Write weights and the optimizer's state into the model and the optimizer."""
        if self._current is not None:
            self._current.copy_weights_to_host()

    def figures(self) -> dict[str, Any]:
        """ "programs": what the last run of each took, "step" that of the largest batch, those of
        updates by layer; "operations": the same of those of a step, the costliest first."""
        largest_last = sorted(self._programs.items(), key=lambda item: item[0][0].numel())
        programs: dict[str, dict[str, float]] = {}
        operations: dict[str, dict[str, float]] = {}
        for _, program in largest_last:
            programs |= program.figures()
            operations = program.operations()
        if operations:
            seconds_per_cycle = programs["step"]["seconds"] / programs["step"]["cycles"]
            for cost in operations.values():
                cost["seconds"] = cost["cycles"] * seconds_per_cycle
                cost["tflops"] = cost["flops"] / cost["seconds"] / 1e12
        return {"programs": programs, "operations": operations}
