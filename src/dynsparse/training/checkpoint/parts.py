"""The parts of a checkpoint: what each is taken from, and how all are put back or none.

Most parts are the same on all ranks. Those that are a rank's own, in `own_part`, are its random
generators and what its samples have left in the trainer's history.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse.nn import SparseLinear
from dynsparse.nn.sharded import is_sharded, sharded_like
from dynsparse.pattern import SparsePattern
from dynsparse.ranks import Part, Ranks, check_consistent, collective_errors, digest
from dynsparse.training.checkpoint import random_state as rng
from dynsparse.training.checkpoint.format import CheckpointError, StoredTensor
from dynsparse.training.checkpoint.model_state import check_model, patterns_of
from dynsparse.training.checkpoint.optimizing import check_finite, check_scheduler, loaded_optimizer
from dynsparse.training.checkpoint.places import places, whole_history
from dynsparse.training.checkpoint.rectangles import Rectangles
from dynsparse.training.layer_shards import follow_sizes, resize_shards
from dynsparse.training.trainer import SparseTrainer

_OTHERS = (
    "ranks that save together must hold the same model, as replicas, in shards or in rectangles: "
    "save each stage of a pipeline with ranks=group"
)


@dataclass
class Training:
    """What a checkpoint is taken from and put back into; see `save_checkpoint`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    trainer: SparseTrainer | None = None
    lr_scheduler: Any = None
    generators: Mapping[str, rng.Generator] = field(default_factory=dict)

    def parts(self, extra: Mapping[str, Any] | None, ranks: Ranks) -> dict[str, Any]:
        """What all ranks hold alike; tensors are those of the training, whole or sharded, or, of
        layers in rectangles, `Piece`s. All ranks call this.

        Args:
            ranks: with other samples for the same weights; everyone of their mesh moves.
        """
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
        if parts["trainer"] is not None:
            parts["trainer"]["history_state"] = {}  # each has its own
        parts["places"] = places(ranks)
        return self._rectangles(parts).brought_together(parts, ranks)

    def _rectangles(self, parts: dict[str, Any]) -> Rectangles:
        groups = parts["optimizer"]["state"]["param_groups"]
        return Rectangles(self.model, self.optimizer, self.trainer, groups)

    def check(self, ranks: Ranks) -> None:
        """Raise ValueError, the same on all ranks, where what there is cannot be gone on from: the
        optimizer keeps NaN or infinity, or the ranks hold other layers or patterns."""
        with collective_errors(ranks):
            if self.optimizer is not None:
                check_finite(self.optimizer.state, _names(self.model))
        layers = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(getattr(module, "pattern", None), SparsePattern)
        }
        check_consistent(ranks.all_ranks, {"the layers": ", ".join(map(repr, layers))}, _OTHERS)
        # A rectangle is the same along the samples, a whole layer everywhere.
        cut = {n for n, m in layers.items() if isinstance(getattr(m, "executor", None), Part)}
        for among, names in ((ranks, cut), (ranks.all_ranks, layers.keys() - cut)):
            patterns = {n: m.pattern for n, m in layers.items() if n in names}
            found = {
                f"the pattern of layer {name!r}": digest(str(own), own.rows, own.cols)
                for name, own in patterns.items()
            }
            check_consistent(among, found, _OTHERS, shown=False)

    def own_part(self, ranks: Ranks) -> dict[str, Any]:
        """What is this rank's own. All ranks call this: of layers in rectangles, the first of those
        with the same samples has the whole history, the others none."""
        history = None
        if self.trainer is not None:
            history = whole_history(self.trainer, ranks)
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
            parts: with tensors, or `StoredTensor`s in their place.
        """
        target = self.targets(parts["optimizer"]["state"]["param_groups"])
        rectangles = self._rectangles(parts)
        parts = rectangles.taken(parts)
        unread = {"optimizer"} if self.optimizer is None else set()
        unread |= {"trainer"} if self.trainer is None else set()

        def take(value: Any, way: tuple[Any, ...]) -> Any:
            if isinstance(value, dict):
                return {key: take(one, (*way, key)) for key, one in value.items()}
            if isinstance(value, (list, tuple)):
                return type(value)(take(one, (*way, i)) for i, one in enumerate(value))
            if not isinstance(value, (Tensor, StoredTensor)):
                return value
            own = target(way)
            if own is not None and (own.shape == value.shape or way in rectangles.by_slots):
                rows = value.rows if isinstance(value, StoredTensor) else partial(_rows, value)
                return sharded_like(own, value.dtype, rows, value.shape[0] if own.dim() else None)
            # One of another shape is compared with the model's, and refused.
            return value.full_tensor() if isinstance(value, StoredTensor) else value

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
        sizes = {p: p.shape for p in self.model.parameters()}
        try:
            self._fit_shards(parts["model"])
            self.model.load_state_dict(parts["model"])
            if optimizer is not None:
                optimizer.__dict__.update(attributes)
            if trainer is not None:
                trainer.load_state_dict(parts["trainer"])
        except Exception as error:  # of any kind: it is what a stranger's file makes them do
            if before is None or trainer is None:
                raise
            self._fit_shards(before[0])
            self.model.load_state_dict(before[0])
            if optimizer is not None:
                optimizer.__dict__.update(own)
            trainer.load_state_dict(before[1])
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise CheckpointError(f"{where} does not fit: its trainer's state: {reason}") from None
        if not ranks.alone:
            follow_sizes([p for p, shape in sizes.items() if p.shape != shape])
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(parts["lr_scheduler"]["state"])
        if parts["generators"] is not None:
            for name, generator in self.generators.items():
                rng.restore(generator, parts["generators"][name])
        if parts["random"] is not None:
            rng.restore_global_states(parts["random"])

    def _fit_shards(self, state: Mapping[str, Any]) -> None:
        """Values that are shards of rectangles get the sizes that they have in a model's state."""
        for name, module in self.model.named_modules():
            if isinstance(module, SparseLinear) and isinstance(module.executor, Part):
                if self.trainer is not None:
                    self.trainer._forget_captures()  # until it loads its state
                resize_shards(module, len(state[f"{name}.values" if name else "values"]))

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


def misfit(where: str, error: Exception) -> CheckpointError:
    """What was raised while the content of a checkpoint was compared, in one line."""
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    reason = " ".join(f"{kind}{error}".split())[:600]
    return CheckpointError(f"{where} does not fit: {reason}")


@contextmanager
def together(ranks: Ranks) -> Iterator[None]:
    """A bad file on one rank raises CheckpointError on all: see `ranks.collective_errors`."""
    if ranks.alone:
        yield
        return
    try:
        with collective_errors(ranks):
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
