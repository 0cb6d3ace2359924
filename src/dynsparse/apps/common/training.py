"""What every training has: network, optimizer, pattern updates, counters and sums."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dynsparse._core.checks import is_number
from dynsparse.apps.common.machine import MachineSteps
from dynsparse.apps.common.options import MachineOptions, TrainingOptions
from dynsparse.nn import SparseLinear
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.ranks import ranks_of
from dynsparse.tracing.models import unwatch
from dynsparse.tracing.spans import counter, is_traced, span, spanned
from dynsparse.training import CosineSchedule, SparseTrainer, Static, scaled_step
from dynsparse.training.algorithms import BY_NAME
from dynsparse.training.steps import count_density

Groups = list[dict[str, Any]]

_FIRST_SCALE = 2.0**16  # torch's default


def make_optimizer(
    options: TrainingOptions,
    defaults: dict[str, Any],
    groups: Callable[[float], Groups],
    rate: float,
    adam: Callable[..., torch.optim.Optimizer],
) -> torch.optim.Optimizer:
    """Make the optimizer that the options name.

    Args:
        defaults: the arguments the optimizer has here, with their defaults.
        groups: the parameters for a weight decay, as torch's optimizers take them.
        rate: the first learning rate.
        adam: what "Adam" stands for.

    Raises:
        ValueError: an argument the optimizer does not have, or a value it does not take.
    """
    arguments = dict(defaults)
    for name, value in options.optimizer_arg.items():
        if name not in arguments:
            raise ValueError(
                f"--optimizer-arg: expected an argument of {options.optimizer} "
                f"({', '.join(arguments)}), got {name!r}"
            )
        switch = isinstance(arguments[name], bool)
        if not (isinstance(value, bool) if switch else is_number(value)):
            kind = "true or false" if switch else "a number"
            raise ValueError(f"--optimizer-arg: {name}: expected {kind}, got {value!r}")
        arguments[name] = value
    optimizer_class = adam
    if options.optimizer == "Adam":
        arguments["betas"] = arguments.pop("beta1"), arguments.pop("beta2")
        arguments["eps"] = arguments.pop("epsilon")
    else:
        optimizer_class = torch.optim.SGD
        if not arguments.get("momentum"):
            # torch refuses Nesterov's correction without momentum.
            arguments.pop("nesterov", None)
    # fused: one call per step for all parameters; at small batches that is what a step costs. Those
    # that a scaler skips would pass the trainer unnoticed.
    arguments["fused"] = options.data_type != "float16"
    try:
        return optimizer_class(groups(arguments["weight_decay"]), rate, **arguments)
    except ValueError as error:
        raise ValueError(f"--optimizer-arg: {error}") from None


def replace_sparse(network: nn.Module, dense: Callable[[SparseLinear], nn.Module]) -> nn.Module:
    """Replace every sparse layer inside a network by dense(layer), and return the network."""
    for module in list(network.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, SparseLinear):
                setattr(module, name, dense(layer))
    return network


def start_denser(method: str, network: nn.Module, generator: torch.Generator) -> dict[str, float]:
    """Give sparse layers denser first patterns, for methods that prune; other methods do nothing.

    The layers come with the densities that are wanted at the end. Returns these, {layer: density},
    for methods that prune, and {} for all others.
    """
    if method not in BY_NAME or BY_NAME[method].least_first is None:
        return {}
    layers = {n: m for n, m in network.named_modules() if isinstance(m, SparseLinear)}
    final = {name: layer.density for name, layer in layers.items()}
    for name, layer in layers.items():
        layer.resizable = True
        layer.set_pattern(
            SparsePattern.random(
                layer.pattern.shape,
                BY_NAME[method].first_density(final[name]),
                block_size=layer.block_size,
                generator=generator,
            )
        )
        layer.reset_parameters(generator)
    return final


def build_trainer(
    options: TrainingOptions,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    total_steps: int,
    update_interval: int,
    final: dict[str, float],
    generator: torch.Generator,
) -> SparseTrainer | None:
    """The trainer of `options.method`; None for a network without sparse layers.

    Args:
        total_steps: steps until the patterns stay; update_interval: steps between updates.
        final: what `start_denser` returned.
        generator: draws the seed of random growth.

    Raises:
        ValueError: a schedule that does not fit the steps.
    """
    if not any(isinstance(module, SparseLinear) for module in network.modules()):
        return None
    if options.method not in BY_NAME:
        return Static(network, optimizer)
    algorithm = BY_NAME[options.method]
    settings: dict[str, Any] = {
        "pooling": options.pooling_type.lower(),
        "densities": final,
        "scope": "layer",
    }
    if "schedule" in algorithm.arguments:
        settings["schedule"] = _get_schedule(options, total_steps, update_interval)
    else:
        settings |= {
            "total_steps": total_steps,
            "update_interval": update_interval,
            "drop_fraction": options.prune_ratio,
        }
    if "seed" in algorithm.arguments:
        settings["seed"] = int(torch.randint(2**62, (), generator=generator))
    arguments = {name: v for name, v in settings.items() if name in algorithm.arguments}
    trainer = algorithm.trainer(network, optimizer, **arguments)
    trainer.warns_at_end = False  # the training goes on with patterns that stay
    return trainer


def _get_schedule(
    options: TrainingOptions, total_steps: int, update_interval: int
) -> CosineSchedule:
    settings = dict(options.cosine_prune_schedule)
    # The flag counts pattern updates, the schedule counts optimizer steps.
    settings["zero_steps"] = settings.get("zero_steps", 0) * update_interval
    settings |= {"end_fraction": 1.0, "rounding": options.prune_rounding}
    try:
        return CosineSchedule(total_steps, update_interval, options.prune_ratio, **settings)
    except ValueError as error:
        raise ValueError(f"--cosine-prune-schedule: {error}") from None


NOTICE = "synthetic data, made once on {device}: time is that of compute, and scores mean nothing"


def random_ids(count: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Ids in [0, count), int64; the same in every run."""
    return torch.randint(count, shape, generator=_fixed_generator(device), device=device)


def random_shares(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Numbers in [0, 1), float32; the same in every run."""
    return torch.rand(shape, generator=_fixed_generator(device), device=device)


def _fixed_generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


class Stopped(KeyboardInterrupt):
    """A training stopped between two steps, as it was asked to; it can be saved as it is."""


@dataclass(frozen=True)
class Scores:
    """Mean cross-entropy in nats, and the share of right answers."""

    loss: float
    accuracy: float

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


class Sums:
    """Sums over some steps: losses and right answers of `count` answers, in training with dropout.

    The scores stay tensors until they are asked for. `replaced` counts the weights that pattern
    updates dropped, as the churn of records does; those of `rewirings` are still to be counted.
    `skipped` counts the steps whose scaled gradients overflowed. `seconds` are of training alone.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.skipped = 0
        self.count = 0
        self.loss = torch.zeros((), dtype=torch.float64)
        self.right = torch.zeros((), dtype=torch.int64)
        self.replaced = 0
        self.rewirings: list[Rewiring] = []
        self.seconds = 0.0

    def add(self, loss: Tensor, right: Tensor, count: int) -> None:
        """Add the summed loss of `count` answers, and how many of them are right."""
        # Not in place, so that the sum moves to the device of the losses.
        self.loss = self.loss + loss
        self.right = self.right + right
        self.count += count

    def count_replaced(self) -> None:
        for rewiring in self.rewirings:
            self.replaced += len(rewiring.dropped) * rewiring.before.block_size**2
        self.rewirings = []

    def include(self, other: Sums) -> None:
        """Add all of another's sums."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def state(self) -> dict[str, Any]:
        """The sums for a checkpoint, with all rewirings counted."""
        self.count_replaced()
        return {name: value for name, value in vars(self).items() if name != "rewirings"}

    @classmethod
    def from_state(cls, state: Any) -> Sums:
        """Make the sums that `state` was taken from; ValueError for any other state."""
        sums = cls()
        if not isinstance(state, dict) or state.keys() != sums.state().keys():
            raise ValueError(f"expected sums, the entries {', '.join(sums.state())}")
        vars(sums).update(state)
        return sums

    def scores(self) -> Scores:
        return Scores(float(self.loss) / self.count, int(self.right) / self.count)


class Training(ABC):
    """One training run. All its randomness comes from `seed`.

    An application adds its network, its steps and its description.

    Attributes:
        app: its name.
        unit, digits: what checkpoints are counted by, "epoch" or "step", and how many digits of it
            their names have.
        generator_name: how checkpoints call `generator`; counters: the attributes they keep.
        rate_flag: the option to lower where a training diverges.
        device: where it computes. What is drawn is drawn on the CPU: all devices begin alike.
        scaler: scales the loss in float16, and skips steps whose gradients overflow.
        machine: takes the steps on the target that the options name; None on the host.
        stop_asked: makes the training raise `Stopped` before its next step.
        partial: of a training that stopped inside an epoch or between two reports: the sums so far,
            and what else it goes on with; plain types and tensors, under the names
            `partial_names`.

    Args:
        total_steps: after how many steps patterns stay.
        update_interval: steps between pattern updates.
        initial: draws the first patterns and weights, and the seed of random growth; the training's
            own `generator` by default.

    Raises:
        ValueError: an optimizer argument or a schedule that does not fit.
    """

    app: ClassVar[str]
    unit: ClassVar[str]
    digits: ClassVar[int]
    generator_name: ClassVar[str]
    counters: ClassVar[tuple[str, ...]]
    partial_names: ClassVar[tuple[str, ...]]
    rate_flag: ClassVar[str]

    def __init__(
        self,
        options: TrainingOptions,
        seed: int,
        *,
        total_steps: int,
        update_interval: int,
        initial: torch.Generator | None = None,
    ) -> None:
        self.options = options
        self.ranks = ranks_of("auto")
        self.device = torch.device(options.device)
        self.seed = seed
        torch.manual_seed(seed)  # dropout draws from the global generator
        self.generator = torch.Generator().manual_seed(seed)
        initial = self.generator if initial is None else initial
        self.model, final = self.build_model(initial)
        self.model.to(self.device)
        self.optimizer = self.build_optimizer()
        self.trainer = build_trainer(
            options,
            self.model,
            self.optimizer,
            total_steps=total_steps,
            update_interval=update_interval,
            final=final,
            generator=initial,
        )
        half = options.data_type == "float16"
        first_scale = _FIRST_SCALE if options.loss_scale is None else float(options.loss_scale)
        self.scaler = torch.amp.GradScaler(self.device.type, first_scale, enabled=half)
        self._steps_taken = 0
        self.optimizer.register_step_post_hook(self._count_step)
        unwatch(self.model)  # its spans have the loss in them
        self.replica: nn.Module = self.model
        self.machine: MachineSteps | None = None
        if isinstance(options, MachineOptions) and options.target is not None:
            if not self.ranks.alone:
                raise ValueError(
                    f"--target: expected one process, got {self.ranks.size}: leave torchrun out"
                )
            trained = self.optimizer if self.trainer is None else self.trainer
            self.machine = MachineSteps(
                options, self.model, trained, self.machine_loss, self.clip_grad_norm
            )
            if self.trainer is not None:
                self.trainer.on_update.append(self._note_rewirings)
            self._rewirings: list[Rewiring] = []
        if not self.ranks.alone:
            self.replica = DistributedDataParallel(self.model)
            torch.manual_seed(seed + self.ranks.rank)  # each rank drops other activations
        self.rate = 0.0
        self.step = 0
        self.seconds = 0.0
        self.update_seconds = 0.0
        self.replaced = 0
        self.skipped = 0
        self.stop_asked = False
        self.partial: dict[str, Any] = {}

    @abstractmethod
    def build_model(self, initial: torch.Generator) -> tuple[nn.Module, dict[str, float]]:
        """The network, drawn from `initial`, and the result of `start_denser`."""

    @abstractmethod
    def build_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the options over all parameters of `model`."""

    @abstractmethod
    def machine_loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss, a scalar, where the steps are taken on a target."""

    @property
    def clip_grad_norm(self) -> float | None:
        """The largest norm of all gradients together; None for any."""
        return None

    def collect_weights(self) -> None:
        """Bring weights and optimizer state from where the steps are taken to the host."""
        if self.machine is not None:
            self.machine.copy_weights_to_host()

    def _note_rewirings(self, _: int, rewirings: dict[str, Rewiring]) -> None:
        self._rewirings += rewirings.values()

    def step_on_machine(self, sums: Sums, inputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Take a step on the target, and the pattern update if one is due: (loss, output)."""
        assert self.machine is not None
        self.step += 1
        sums.steps += 1
        self._rewirings.clear()
        with span("machine"):
            loss, output = self.machine.step(inputs, target)
        sums.rewirings += self._rewirings
        sums.count_replaced()
        return loss, output

    def extra_state(self) -> dict[str, Any]:
        """The state that a checkpoint holds besides options, seed and counters."""
        return {}

    def check_extra_state(self, path: Path, saved: dict[str, Any]) -> None:
        """Raise ValueError if the `extra_state` of a checkpoint is of another training."""
        return

    def metadata(self) -> dict[str, Any]:
        """The metadata of a record that its readers need of this application."""
        return {}

    @property
    def updates(self) -> int:
        return 0 if self.trainer is None else self.trainer.updates

    def rank_share(self, batch: Tensor) -> tuple[Tensor, float]:
        """This rank's share of a batch [n, ...], and what its mean loss weighs in the gradient.

        Where there are fewer samples than ranks, some weigh nothing.
        """
        size = self.ranks.size
        part = batch[self.ranks.rank :: size]
        return (part, len(part) * size / len(batch)) if len(part) else (batch[:1], 0.0)

    def sum_over_ranks(self, sums: Sums) -> None:
        """Replace the sums of this rank by those over all ranks."""
        if self.ranks.alone:
            return
        counts = [sums.loss.double().cpu(), sums.right.double().cpu(), torch.tensor(sums.count)]
        stacked = torch.stack([t.double() for t in counts])
        total = self.ranks.sum(stacked.to(self.ranks.device)).cpu()
        sums.loss, sums.right, sums.count = total[0], total[1].long(), int(total[2])

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the coming step."""
        self.rate = rate
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _count_step(self, *_: Any) -> None:
        self._steps_taken += 1

    def optimise(self, sums: Sums) -> None:
        """Take the optimizer's step, which the scaler may skip, and the pattern update if due."""
        self.step += 1
        sums.steps += 1
        begin = time.perf_counter()
        steps_before = self._steps_taken
        rewirings = None
        if self.trainer is None:
            with span("optimizer"):
                self.scaler.step(self.optimizer)
                self.scaler.update()
        else:
            rewirings = scaled_step(self.trainer, self.scaler)
        if self.options.loss_scale is not None:
            self.scaler.update(float(self.options.loss_scale))
        sums.skipped += self._steps_taken == steps_before
        if rewirings is None:
            return
        self.update_seconds += time.perf_counter() - begin
        with span("report"):
            sums.rewirings += rewirings.values()
            if self.device.type == "cpu":  # elsewhere counting waits for the device
                sums.count_replaced()

    @spanned("report")
    def finish_window(self, sums: Sums) -> None:
        """Count what happened since this was called last, on all ranks.

        Raises:
            ValueError: the training diverged.
        """
        begin = time.perf_counter()
        self.sum_over_ranks(sums)
        if not math.isfinite(sums.loss):
            raise ValueError(
                f"the training diverged: the loss is {float(sums.loss)} after step {self.step}: "
                f"lower --{self.rate_flag}"
            )
        # A scale that adapts itself may still be too large.
        is_final = self.options.loss_scale is not None or self.scaler.get_scale() < 1
        if is_final and sums.skipped == sums.steps:
            raise ValueError(
                f"the gradients overflow float16 in all {sums.steps} steps up to step {self.step}, "
                f"with the loss scaled by {self.scaler.get_scale():g}: lower --loss-scale or "
                f"--{self.rate_flag}"
            )
        sums.count_replaced()
        # Measured here, where the device has completed all its work.
        sums.seconds += time.perf_counter() - begin
        self.seconds += sums.seconds
        self.replaced += sums.replaced
        self.skipped += sums.skipped
        if is_traced():
            counter("loss", sums.scores().loss)
            count_density({} if self.trainer is None else self.trainer.layers)

    def figures(self) -> dict[str, Any]:
        """The part of the final figures that all trainings have."""
        self.collect_weights()
        target = {} if self.machine is None else {"target": self.machine.figures()}
        return {
            **target,
            "seconds": self.seconds,
            "updates": self.updates,
            "method": self.options.method,
            "seed": self.seed,
            "steps": self.step,
            "replaced": self.replaced,
            "skipped": self.skipped,
            "synthetic_data": self.options.synthetic_data,
            "seconds_per_step": self.seconds / max(1, self.step),
            "update_share": self.update_seconds / self.seconds if self.seconds else 0.0,
        }


def precision(data_type: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which a network of that type computes."""
    if data_type not in ("bfloat16", "float16"):
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, data_type))


def widen(logits: Tensor) -> Tensor:
    """Logits for a loss: sixteen bits are too few for the sum of exponentials."""
    return logits.float() if logits.dtype.itemsize == 2 else logits
