"""The state of a training: collected for a checkpoint, checked, and restored in full or not at all.

Most of it is the same on all ranks. What belongs to one rank, in `collect_own`, are its random
generators and the history of gradients of its samples.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse._core.checks import shortened
from dynsparse.nn import SparseLinear
from dynsparse.nn.sharded import is_sharded, local_part, sharded_like
from dynsparse.pattern import SparsePattern
from dynsparse.ranks import Ranks, ShardSpec, check_consistent, collective_errors, digest
from dynsparse.training.checkpoint import random_state as rng
from dynsparse.training.checkpoint.format import CheckpointError, StoredTensor
from dynsparse.training.checkpoint.rank_state import gather_coordinates, gather_history
from dynsparse.training.checkpoint.tensor_parallel import KeyPath, TensorParallelState
from dynsparse.training.layer_shards import follow_sizes, resize_shards
from dynsparse.training.trainer import SparseTrainer

_OTHERS = (
    "ranks that save together must hold the same model, as replicas or in shards: "
    "save each stage of a pipeline with ranks=group"
)


@dataclass
class TrainingState:
    """The objects whose state a checkpoint holds; see `save_checkpoint`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    trainer: SparseTrainer | None = None
    lr_scheduler: Any = None
    generators: Mapping[str, rng.Generator] = field(default_factory=dict)

    def collect(self, extra: Mapping[str, Any] | None, ranks: Ranks) -> dict[str, Any]:
        """The state that all ranks share. All ranks call this.

        Its tensors are those of the training, full or sharded, or `Chunk`s of tensor-parallel
        layers.

        Args:
            ranks: with other samples for the same weights.
        """
        assert self.optimizer is not None
        parts: dict[str, Any] = {
            "patterns": _describe_patterns(self.model),
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
        parts["coordinates"] = gather_coordinates(ranks)
        return self._tensor_parallel(parts).to_chunks(parts, ranks)

    def _tensor_parallel(self, parts: dict[str, Any]) -> TensorParallelState:
        groups = parts["optimizer"]["state"]["param_groups"]
        return TensorParallelState(self.model, self.optimizer, self.trainer, groups)

    def check(self, ranks: Ranks) -> None:
        """Raise ValueError, the same on all ranks, where no training could continue: the optimizer
        keeps NaN or infinity, or the ranks hold different layers or patterns."""
        with collective_errors(ranks):
            if self.optimizer is not None:
                _check_finite(self.optimizer.state, _parameter_names(self.model))
        layers = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(getattr(module, "pattern", None), SparsePattern)
        }
        check_consistent(ranks.all_ranks, {"the layers": ", ".join(map(repr, layers))}, _OTHERS)
        # A shard is the same along the samples, a full layer everywhere.
        sharded = {
            n for n, m in layers.items() if isinstance(getattr(m, "executor", None), ShardSpec)
        }
        for among, names in ((ranks, sharded), (ranks.all_ranks, layers.keys() - sharded)):
            patterns = {n: m.pattern for n, m in layers.items() if n in names}
            saved_patterns = {
                f"the pattern of layer {name!r}": digest(str(pattern), pattern.rows, pattern.cols)
                for name, pattern in patterns.items()
            }
            check_consistent(among, saved_patterns, _OTHERS, shown=False)

    def collect_own(self, ranks: Ranks) -> dict[str, Any]:
        """The state that belongs to this rank. All ranks call this: of the ranks that see the same
        samples the first has the history, the others have none."""
        history = None
        if self.trainer is not None:
            history = gather_history(self.trainer, ranks)
        return {
            "random": rng.global_states(),
            "generators": {n: rng.state_of(g) for n, g in self.generators.items()},
            "history": history,
        }

    def read(self, parts: dict[str, Any]) -> dict[str, Any]:
        """`parts` as they are loaded: stored tensors are read, and what goes into a sharded tensor
        becomes one of its kind, of which this rank reads its shard.

        What is not asked for is not read.

        Args:
            parts: with tensors, or `StoredTensor`s in their place.
        """
        sharded = self._sharded_tensors(parts["optimizer"]["state"]["param_groups"])
        tensor_parallel = self._tensor_parallel(parts)
        parts = tensor_parallel.take_shards(parts)
        unread = {"optimizer"} if self.optimizer is None else set()
        unread |= {"trainer"} if self.trainer is None else set()

        def read(value: Any, path: KeyPath) -> Any:
            if isinstance(value, dict):
                items = {key: read(item, (*path, key)) for key, item in value.items()}
                return Counter(items) if isinstance(value, Counter) else items
            if isinstance(value, (list, tuple)):
                return type(value)(read(item, (*path, i)) for i, item in enumerate(value))
            if not isinstance(value, (Tensor, StoredTensor)):
                return value
            # The state of an optimizer has one more key, of which any may be of this shape.
            local = sharded.get(path if path[0] == "model" else path[:-1])
            if local is not None and (
                local.shape == value.shape or path in tensor_parallel.by_slots
            ):
                rows = value.rows if isinstance(value, StoredTensor) else partial(_rows, value)
                return sharded_like(
                    local, value.dtype, rows, value.shape[0] if local.dim() else None
                )
            # A tensor of another shape is compared with the model's, and refused.
            return value.full_tensor() if isinstance(value, StoredTensor) else value

        return {k: part if k in unread else read(part, (k,)) for k, part in parts.items()}

    def _sharded_tensors(self, groups: Any) -> dict[KeyPath, Tensor]:
        """The sharded tensors by their paths: parameters, and those with an optimizer's state.

        Args:
            groups: of the optimizer's state, as it was saved.
        """
        state = self.model.state_dict().items()
        sharded: dict[KeyPath, Tensor] = {("model", k): t for k, t in state if is_sharded(t)}
        if self.optimizer is not None and sharded:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            numbers = [number for group in groups for number in group["params"]]
            for number, parameter in zip(numbers, parameters, strict=False):
                if is_sharded(parameter):
                    sharded["optimizer", "state", "state", number] = parameter
        return sharded

    def restore(self, parts: dict[str, Any], where: str, ranks: Ranks) -> None:
        """Load `parts` after everything has been checked, on all ranks or on none.

        Args:
            parts: with "random" and "generators" of this rank, None where it has none.

        Raises:
            CheckpointError: something does not fit; nothing is changed.
        """
        optimizer, trainer = self.optimizer, self.trainer
        attributes: dict[str, Any] = {}
        with shared_errors(ranks):
            try:
                attributes = self._check(parts)
            except Exception as error:  # of any kind: untrusted values are compared
                raise mismatch(where, error) from None

        # What only shows while it is loaded is undone.
        before = None
        if trainer is not None:
            before = copy.deepcopy((self.model.state_dict(), trainer.state_dict()))
        original = {} if optimizer is None else dict(optimizer.__dict__)
        sizes = {p: p.shape for p in self.model.parameters()}
        try:
            self._resize_shards(parts["model"])
            self.model.load_state_dict(parts["model"])
            if optimizer is not None:
                optimizer.__dict__.update(attributes)
            if trainer is not None:
                trainer.load_state_dict(parts["trainer"])
        except Exception as error:  # of any kind: the values are untrusted
            if before is None or trainer is None:
                raise
            self._resize_shards(before[0])
            self.model.load_state_dict(before[0])
            if optimizer is not None:
                optimizer.__dict__.update(original)
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

    def _resize_shards(self, state: Mapping[str, Any]) -> None:
        """Give the values of tensor-parallel layers the sizes that they have in a state."""
        for name, module in self.model.named_modules():
            if isinstance(module, SparseLinear) and isinstance(module.executor, ShardSpec):
                if self.trainer is not None:
                    self.trainer._forget_captures()  # until it loads its state
                resize_shards(module, len(state[f"{name}.values" if name else "values"]))

    def _check(self, parts: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's attributes with its state loaded."""
        attributes: dict[str, Any] = {}
        patterns = _check_model(parts, self.model)
        if self.optimizer is not None:
            _check_optimizer(parts["optimizer"], self.optimizer)
            attributes = _load_optimizer_state(
                self.optimizer, parts["optimizer"]["state"], _parameter_shapes(parts, self.model)
            )
            _check_finite(attributes["state"], _parameter_names(self.model))
        if parts["random"] is not None:
            rng.check_global_states(parts["random"])
        if self.trainer is not None:
            _require(parts, "trainer")
            layers = self.trainer.layers.items()
            by_layer = {name: patterns.get(id(layer)) for name, layer in layers}
            # None for a trainer of another model, or layers without a state.
            known = {name: pattern for name, pattern in by_layer.items() if pattern is not None}
            complete = known if len(known) == len(by_layer) else None
            self.trainer.check_state(parts["trainer"], complete)
        if self.lr_scheduler is not None:
            _check_kind(_require(parts, "lr_scheduler"), self.lr_scheduler)
            _check_scheduler(parts["lr_scheduler"]["state"], self.lr_scheduler)
        if parts["generators"] is not None:
            for name, generator in self.generators.items():
                if name not in parts["generators"]:
                    raise ValueError(f"it holds no generator {name!r}")
                rng.check(generator, parts["generators"][name], name)
        return attributes


def mismatch(where: str, error: Exception) -> CheckpointError:
    """The error of a checkpoint that does not fit, in one line."""
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    reason = " ".join(f"{kind}{error}".split())[:600]
    return CheckpointError(f"{where} does not fit: {reason}")


@contextmanager
def shared_errors(ranks: Ranks) -> Iterator[None]:
    """A bad file on one rank raises CheckpointError on all: see `ranks.collective_errors`."""
    if ranks.alone:
        yield
        return
    try:
        with collective_errors(ranks):
            yield
    except (RuntimeError, ValueError, TypeError) as error:
        message = str(error).replace(f"{CheckpointError.__name__}: ", "")
        raise CheckpointError(message) from None


def _rows(tensor: Tensor, first: int, last: int) -> Tensor:
    return tensor[first:last].clone() if tensor.dim() else tensor


def _parameter_shapes(parts: dict[str, Any], model: nn.Module) -> dict[int, torch.Size]:
    """The shape of each parameter of the model, by its `id`, once the parts are loaded."""
    return {
        id(parameter): parts["model"][name].shape
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if isinstance(parts["model"].get(name), Tensor)
    }


def _parameter_names(model: nn.Module) -> dict[int, str]:
    """The name of each parameter, by its `id`."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _check_optimizer(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    _check_kind(saved, optimizer)
    sizes = [len(group["params"]) for group in saved["state"]["param_groups"]]
    group_sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != group_sizes:
        raise ValueError(
            f"the optimizer was saved with groups of {sizes} tensors, here {group_sizes}"
        )


def _check_kind(saved: dict[str, Any], thing: Any) -> None:
    if saved["kind"] != type(thing).__name__:
        raise ValueError(f"it holds the state of {saved['kind']}, not of {type(thing).__name__}")


def _require(parts: dict[str, Any], part: str) -> dict[str, Any]:
    if parts[part] is None:
        raise ValueError(f"it was saved without a {part}: leave it out")
    return parts[part]


def _describe_patterns(model: nn.Module) -> dict[str, list[int]]:
    """Shape, block size and number of blocks of every module with a pattern."""
    described = {}
    for name, module in model.named_modules():
        pattern = getattr(module, "pattern", None)
        if isinstance(pattern, SparsePattern):
            described[name] = [*pattern.shape, pattern.block_size, pattern.nnz]
    return described


def _check_model(parts: dict[str, Any], model: nn.Module) -> dict[int, SparsePattern]:
    """The saved patterns by the `id` of the layer.

    Raises:
        ValueError: tensors or patterns of the checkpoint do not fit the model.
    """
    saved, current = parts["model"], model.state_dict()
    if odd := sorted(saved.keys() ^ current.keys()):
        where = "file" if odd[0] in saved else "model"
        raise ValueError(
            f"{len(odd)} entries are in only one of file and model, such as {odd[0]!r}, "
            f"which is in the {where}"
        )
    patterns: dict[int, SparsePattern] = {}
    resizable: set[str] = set()  # entries whose length follows the number of blocks
    for name, pattern in _describe_patterns(model).items():
        other = parts["patterns"].get(name)
        module = model.get_submodule(name)
        if (
            getattr(module, "may_resize", False)
            and isinstance(other, list)
            and other[:3] == pattern[:3]
        ):
            prefix = f"{name}." if name else ""
            resizable |= {prefix + key for key in ("values", "rows", "cols")}
        elif not isinstance(other, list) or other != pattern:
            raise ValueError(
                f"layer {name!r} was saved with [out, in, block size, blocks] = "
                f"{shortened(other)}, "
                f"the model has {pattern}"
            )
        saved_pattern = _check_pattern(name, module, saved)
        if saved_pattern is not None:
            patterns[id(module)] = saved_pattern
    for name, tensor in current.items():
        other = saved[name]
        if not isinstance(tensor, Tensor):
            continue
        skip = 1 if name in resizable else 0
        if not isinstance(other, Tensor):
            raise ValueError(f"{name!r} was saved as {type(other).__name__}, not as a tensor")
        if (tensor.shape[skip:], tensor.dtype) != (other.shape[skip:], other.dtype):
            raise ValueError(
                f"{name!r} was saved as {other.dtype} {list(other.shape)}, the model has "
                f"{tensor.dtype} {list(tensor.shape)}"
            )
    return patterns


def _check_pattern(name: str, module: Any, saved: dict[str, Any]) -> SparsePattern | None:
    """The saved pattern of a layer. The layers check this, too, but when the ones before them have
    changed already."""
    prefix = f"{name}." if name else ""
    rows, cols, values = (saved.get(prefix + key) for key in ("rows", "cols", "values"))
    if rows is None or cols is None:
        return None
    current = module.pattern
    try:
        pattern = SparsePattern(rows, cols, shape=current.shape, block_size=current.block_size)
        if isinstance(values, Tensor) and values.shape != pattern.values_shape:
            raise ValueError(f"{pattern.nnz} blocks with values of {list(values.shape)}")
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the pattern of {name!r} is damaged: {error}") from None
    return pattern


# States of optimizers and learning-rate schedulers, checked before anything is changed.

# What they keep for a parameter is not of its shape.
_OTHER_SHAPES = ("Adafactor", "LBFGS")


def _load_optimizer_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], shapes: Mapping[int, torch.Size]
) -> dict[str, Any]:
    """The attributes of `optimizer` with `state` loaded, made beside it.

    Args:
        shapes: those that its parameters will have, by the `id` of the parameter.

    Raises:
        ValueError: a state that is damaged, or with which it could make no step.
    """
    try:
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        if numbers != list(range(len(numbers))) or not set(state["state"]) <= set(numbers):
            raise ValueError("expected its parameters in their order")
        beside = copy.copy(optimizer)
        # Its own load puts the groups' parameters in place, but not their other entries' types.
        beside.load_state_dict(copy.deepcopy(state))
        for current, saved in zip(optimizer.param_groups, beside.param_groups, strict=True):
            _check_same_kind("its group", _options(current), _options(saved))
            _check_ranges(optimizer, current, saved)
        for group in beside.param_groups:
            for parameter in group["params"]:
                shape = shapes.get(id(parameter), parameter.shape)
                _check_entries(optimizer, beside.state.get(parameter, {}), shape)
    except Exception as error:  # of any kind: the values are untrusted
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(f"the state of the optimizer is damaged ({reason})") from None
    # Hooks belong to the optimizer itself.
    return {name: current for name, current in vars(beside).items() if not name.endswith("_hooks")}


def _check_finite(state: Mapping[Tensor, Any], names: Mapping[int, str]) -> None:
    """Raise ValueError where what an optimizer keeps of a parameter holds NaN or infinity.

    Args:
        state: of an optimizer, by parameter.
        names: of the parameters, by their `id`.
    """
    for parameter, entries in state.items():
        for key, value in entries.items():
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            value = local_part(value)
            if not bool((value.float() if value.itemsize < 2 else value).isfinite().all()):
                name = names.get(id(parameter), "a parameter that is not the model's")
                raise ValueError(
                    f"the optimizer's {key} of {name!r} holds NaN or infinity: the training has "
                    "diverged"
                )


def _options(group: dict[str, Any]) -> dict[str, Any]:
    # A scheduler adds this one when it is made.
    return {name: v for name, v in group.items() if name not in ("params", "initial_lr")}


def _check_ranges(
    optimizer: torch.optim.Optimizer, current: dict[str, Any], saved: dict[str, Any]
) -> None:
    """Torch's own optimizers know the ranges of their arguments, when they are made."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return
    taken = inspect.signature(kind).parameters
    for group in (current, saved):
        arguments = {name: value for name, value in _options(group).items() if name in taken}
        try:
            kind([torch.zeros(1, requires_grad=True)], **arguments)
        except Exception as error:  # of any kind: torch has several
            if group is current:
                return  # made in a way that is not known here
            raise ValueError(f"its group: {error}") from None


def _check_entries(
    optimizer: torch.optim.Optimizer, entries: dict[str, Any], shape: torch.Size
) -> None:
    if not isinstance(entries, dict) or not all(isinstance(name, str) for name in entries):
        raise ValueError(f"expected names and values, got {shortened(entries)}")
    needed = _required_entries(optimizer)
    if entries and (missing := needed - entries.keys()):
        raise ValueError(f"expected {sorted(missing)}, got {shortened(sorted(entries))}")
    for name, value in entries.items():
        if name == "step":
            number = value if isinstance(value, (int, float)) else _to_number(value)
            if not math.isfinite(number) or number < 0:
                raise ValueError(f"expected a step of at least 0, got {number}")
        elif isinstance(value, Tensor):
            exact = type(optimizer).__name__ not in _OTHER_SHAPES
            if exact and (value.dim() or name in needed) and value.shape != shape:
                raise ValueError(f"expected {name} of {list(shape)}, got {list(value.shape)}")
            if exact and value.is_complex():
                raise ValueError(f"expected {name} of real numbers, got {value.dtype}")
        elif name in needed and not (value is None and name == "momentum_buffer"):
            raise ValueError(f"expected {name} to be a tensor, got {shortened(value)}")


def _required_entries(optimizer: torch.optim.Optimizer) -> set[str]:
    """What a parameter's state always has, for the optimizers that trainings use most."""
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return {"step", "exp_avg", "exp_avg_sq"}
    return {"momentum_buffer"} if isinstance(optimizer, torch.optim.SGD) else set()


def _to_number(value: Any) -> float:
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
        raise ValueError(f"expected a step of one number, got {shortened(value)}")
    return float(value)


def _check_scheduler(state: Any, scheduler: Any) -> None:
    """Raise ValueError for a state of other entries, types or lengths than the scheduler's own."""
    _check_same_kind("the scheduler", scheduler.state_dict(), state)


def _check_same_kind(what: str, current: Any, saved: Any) -> None:
    """Raise ValueError if `saved` could not stand where `current` does."""
    number = (int, float, Tensor)
    if current is None or isinstance(current, bool):
        # Switches of torch's optimizers are None where they are left to it.
        if not (saved is None or isinstance(saved, bool)):
            raise ValueError(f"{what}: expected {shortened(current)}, got {shortened(saved)}")
    elif isinstance(current, number):
        alone = saved.numel() == 1 if isinstance(saved, Tensor) else isinstance(saved, number)
        if not alone or isinstance(saved, bool) or not math.isfinite(float(saved)):
            raise ValueError(f"{what}: expected a number, got {shortened(saved)}")
    elif isinstance(current, dict):
        if not isinstance(saved, dict) or not current.keys() <= saved.keys():
            raise ValueError(f"{what}: expected {shortened(current)}, got {shortened(saved)}")
        for key in current:
            _check_same_kind(f"{what}, {key}", current[key], saved[key])
    elif isinstance(current, (list, tuple)):
        if not isinstance(saved, (list, tuple)) or len(current) != len(saved):
            raise ValueError(f"{what}: expected {len(current)} values, got {shortened(saved)}")
        for one, other in zip(current, saved, strict=True):
            _check_same_kind(what, one, other)
    elif not isinstance(saved, type(current)):
        raise ValueError(f"{what}: expected {shortened(current)}, got {shortened(saved)}")
