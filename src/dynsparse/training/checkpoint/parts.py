"""The parts of a checkpoint: what each is taken from, and how all are put back or none.

Most parts are the same on all ranks. Those that are a rank's own, in `own_part`, are its random
generators and what its samples have left in the trainer's history.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from dynsparse.nn.sharded import gathered, is_sharded, sharded_like
from dynsparse.nn.whole import check_whole
from dynsparse.pattern import SparsePattern
from dynsparse.ranks import Ranks, agree_on, agreeing, digest
from dynsparse.training.checkpoint import random_state as rng
from dynsparse.training.checkpoint.model_state import check_model, patterns_of
from dynsparse.training.checkpoint.optimizing import check_finite, check_scheduler, loaded_optimizer
from dynsparse.training.checkpoint.reading import CheckpointError
from dynsparse.training.trainer import SparseTrainer

__all__ = ["Stored", "Training", "all_gathered", "misfit", "take_own", "together"]


_OTHERS = (
    "ranks that save together must hold the same model, as replicas or in shards: save each stage "
    "of a pipeline with ranks=group, and of layers in rectangles what distributed.gather gives"
)


@runtime_checkable
class Stored(Protocol):
    """A tensor that has not been read yet."""

    shape: torch.Size
    dtype: torch.dtype

    def rows(self, first: int, last: int) -> Tensor:
        """Its rows [first, last)."""

    def whole(self) -> Tensor:
        """All of it."""


@dataclass
class Training:
    """What a checkpoint is taken from and put back into; see `save_checkpoint`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    trainer: SparseTrainer | None = None
    lr_scheduler: Any = None
    generators: Mapping[str, rng.Generator] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_whole(self.model, "a checkpoint holds")

    def parts(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        """What all ranks hold alike; tensors are those of the training, whole or sharded."""
        assert self.optimizer is not None
        parts: dict[str, Any] = {
            "patterns": patterns_of(self.model),
            "model": self.model.state_dict(),
            "optimizer": {
                "kind": type(self.optimizer).__name__,
                "state": self.optimizer.state_dict(),
            },
            "trainer": None if self.trainer is None else self.trainer.state_dict(),
            "lr_scheduler": None,
            "extra": dict(extra or {}),
        }
        if self.lr_scheduler is not None:
            state = self.lr_scheduler.state_dict()
            parts["lr_scheduler"] = {"kind": type(self.lr_scheduler).__name__, "state": state}
        return parts

    def check(self, ranks: Ranks) -> None:
        """Raise ValueError, the same on all ranks, where what there is cannot be gone on from: the
        optimizer keeps NaN or infinity, or the ranks hold other layers or patterns."""
        with agreeing(ranks):
            if self.optimizer is not None:
                check_finite(self.optimizer.state, _names(self.model))
        patterns = {
            name: module.pattern
            for name, module in self.model.named_modules()
            if isinstance(getattr(module, "pattern", None), SparsePattern)
        }
        agree_on(ranks, {"the layers": ", ".join(map(repr, patterns))}, _OTHERS)
        found = {
            f"the pattern of layer {name!r}": digest(str(pattern), pattern.rows, pattern.cols)
            for name, pattern in patterns.items()
        }
        agree_on(ranks, found, _OTHERS, shown=False)

    def own_part(self) -> dict[str, Any]:
        """What is this rank's own."""
        history = None if self.trainer is None else self.trainer.history.state_dict()
        return {
            "random": rng.global_states(),
            "generators": {n: rng.state_of(g) for n, g in self.generators.items()},
            "history": history,
        }

    def targets(self, groups: Any) -> Callable[[tuple[Any, ...]], Tensor | None]:
        """From the way to a tensor among the parts to the sharded one it is to be loaded into.

        Args:
            groups: of the optimizer's state, as it was saved.
        """
        own = {name: t for name, t in self.model.state_dict().items() if is_sharded(t)}
        numbered: dict[Any, Tensor] = {}
        if self.optimizer is not None and own:
            held = [p for group in self.optimizer.param_groups for p in group["params"]]
            numbers = [number for group in groups for number in group["params"]]
            numbered = {n: p for n, p in zip(numbers, held, strict=False) if is_sharded(p)}

        def target(way: tuple[Any, ...]) -> Tensor | None:
            if way[0] == "model" and len(way) == 2:
                return own.get(way[1])
            if way[:3] == ("optimizer", "state", "state") and len(way) == 5:
                return numbered.get(way[3])
            return None

        return target

    def taken(self, parts: dict[str, Any]) -> dict[str, Any]:
        """`parts` as they are loaded: what is stored is read, what goes into a sharded tensor
        becomes one of its kind, of which this rank has read its part.

        What is not asked for is not read.

        Args:
            parts: with tensors, or what is `Stored` in their place.
        """
        target = self.targets(parts["optimizer"]["state"]["param_groups"])
        unread = {"optimizer"} if self.optimizer is None else set()
        unread |= {"trainer"} if self.trainer is None else set()

        def take(value: Any, way: tuple[Any, ...]) -> Any:
            if isinstance(value, dict):
                return {key: take(one, (*way, key)) for key, one in value.items()}
            if isinstance(value, (list, tuple)):
                return type(value)(take(one, (*way, i)) for i, one in enumerate(value))
            if not isinstance(value, (Tensor, Stored)):
                return value
            own = target(way)
            if own is not None and own.shape == value.shape:
                rows = value.rows if isinstance(value, Stored) else partial(_rows, value)
                return sharded_like(own, value.dtype, rows)
            # One of another shape is compared with the model's, and refused.
            return value.whole() if isinstance(value, Stored) else value

        return {k: part if k in unread else take(part, (k,)) for k, part in parts.items()}

    def put_back(self, parts: dict[str, Any], where: str, ranks: Ranks) -> None:
        """Load what `parts` holds, after everything has been looked at, on all ranks or on none.

        Args:
            parts: with "random" and "generators" of this rank, None where it has none.

        Raises:
            CheckpointError: something does not fit; nothing is changed.
        """
        optimizer, trainer = self.optimizer, self.trainer
        attributes: dict[str, Any] = {}
        with together(ranks):
            try:
                attributes = self._check(parts)
            except Exception as error:  # of any kind: a stranger's values are compared
                raise misfit(where, error) from None

        # What only shows while it is loaded is undone: a trainer's own pieces know their states
        # best.
        before = None
        if trainer is not None:
            before = copy.deepcopy((self.model.state_dict(), trainer.state_dict()))
        own = {} if optimizer is None else dict(optimizer.__dict__)
        try:
            self.model.load_state_dict(parts["model"])
            if optimizer is not None:
                optimizer.__dict__.update(attributes)
            if trainer is not None:
                trainer.load_state_dict(parts["trainer"])
        except Exception as error:  # of any kind: it is what a stranger's file makes them do
            if before is None or trainer is None:
                raise
            self.model.load_state_dict(before[0])
            if optimizer is not None:
                optimizer.__dict__.update(own)
            trainer.load_state_dict(before[1])
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise CheckpointError(f"{where} does not fit: its trainer's state: {reason}") from None
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(parts["lr_scheduler"]["state"])
        if parts["generators"] is not None:
            for name, generator in self.generators.items():
                rng.restore(generator, parts["generators"][name])
        if parts["random"] is not None:
            rng.restore_global_states(parts["random"])

    def _check(self, parts: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's attributes with its state loaded."""
        attributes: dict[str, Any] = {}
        check_model(parts, self.model)
        if self.optimizer is not None:
            _check_optimizer(parts["optimizer"], self.optimizer)
            attributes = loaded_optimizer(
                self.optimizer, parts["optimizer"]["state"], _parameter_shapes(parts, self.model)
            )
            check_finite(attributes["state"], _names(self.model))
        if parts["random"] is not None:
            rng.check_global_states(parts["random"])
        if self.trainer is not None:
            _wanted(parts, "trainer")
            patterns = _saved_patterns(parts, self.model, self.trainer)
            self.trainer.check_state(parts["trainer"], patterns)
        if self.lr_scheduler is not None:
            _check_kind(_wanted(parts, "lr_scheduler"), self.lr_scheduler)
            check_scheduler(parts["lr_scheduler"]["state"], self.lr_scheduler)
        if parts["generators"] is not None:
            for name, generator in self.generators.items():
                if name not in parts["generators"]:
                    raise ValueError(f"it holds no generator {name!r}")
                rng.check(generator, parts["generators"][name], name)
        return attributes


def take_own(
    parts: dict[str, Any],
    everyone: Sequence[Mapping[str, Any]],
    trainer: SparseTrainer | None,
    ranks: Ranks,
) -> None:
    """Put what is a rank's own among the parts.

    Args:
        parts: changed in place.
        everyone: what every rank's `own_part` was when they were saved. Ranks that were not there
            keep their generators.
    """
    own = everyone[ranks.rank] if ranks.rank < len(everyone) else None
    parts["random"] = None if own is None else own["random"]
    parts["generators"] = None if own is None else own["generators"]
    saved = parts["trainer"]
    if trainer is not None and isinstance(saved, dict) and "history_state" in saved:
        histories = [one.get("history", saved["history_state"]) for one in everyone]
        state = trainer.history.share_of(histories, ranks.rank, ranks.size)
        parts["trainer"] = {**saved, "history_state": state}


def all_gathered(value: Any, keep: bool) -> Any:
    """`value` with sharded tensors whole, which all ranks gather; None for them unless `keep`."""
    if isinstance(value, dict):
        return {key: all_gathered(one, keep) for key, one in value.items()}
    if not is_sharded(value):
        return value
    whole = gathered(value.detach())
    return whole if keep else None


def misfit(where: str, error: Exception) -> CheckpointError:
    """What was raised while the content of a checkpoint was compared, in one line."""
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    reason = " ".join(f"{kind}{error}".split())[:600]
    return CheckpointError(f"{where} does not fit: {reason}")


@contextmanager
def together(ranks: Ranks) -> Iterator[None]:
    """What is wrong with a file on one rank is a CheckpointError on all; see `ranks.agreeing`."""
    if ranks.alone:
        yield
        return
    try:
        with agreeing(ranks):
            yield
    except (RuntimeError, ValueError, TypeError) as error:
        said = str(error).replace(f"{CheckpointError.__name__}: ", "")
        raise CheckpointError(said) from None


def _rows(tensor: Tensor, first: int, last: int) -> Tensor:
    return tensor[first:last].clone() if tensor.dim() else tensor


def _saved_patterns(
    parts: dict[str, Any], model: nn.Module, trainer: SparseTrainer
) -> dict[str, SparsePattern] | None:
    """The patterns that the trainer's layers are going to have, after `check_model`."""
    saved, found = parts["model"], {}
    prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    for name, layer in trainer.layers.items():
        prefix = prefixes.get(id(layer))
        if prefix is None or prefix + "rows" not in saved:
            return None  # a trainer of another model, or layers without a state
        rows, cols = saved[prefix + "rows"], saved[prefix + "cols"]
        found[name] = SparsePattern(
            rows, cols, shape=layer.pattern.shape, block_size=layer.block_size
        )
    return found


def _parameter_shapes(parts: dict[str, Any], model: nn.Module) -> dict[int, torch.Size]:
    """The shape of each parameter of the model, by its `id`, once the parts are loaded."""
    return {
        id(parameter): parts["model"][name].shape
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if isinstance(parts["model"].get(name), Tensor)
    }


def _names(model: nn.Module) -> dict[int, str]:
    """The name of each parameter, by its `id`."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _check_optimizer(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    _check_kind(saved, optimizer)
    sizes = [len(group["params"]) for group in saved["state"]["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != own:
        raise ValueError(f"the optimizer was saved with groups of {sizes} tensors, here {own}")


def _check_kind(saved: dict[str, Any], thing: Any) -> None:
    if saved["kind"] != type(thing).__name__:
        raise ValueError(f"it holds the state of {saved['kind']}, not of {type(thing).__name__}")


def _wanted(parts: dict[str, Any], part: str) -> dict[str, Any]:
    if parts[part] is None:
        raise ValueError(f"it was saved without a {part}: leave it out")
    return parts[part]
