"""The state of a training: collected for a checkpoint, checked, and restored in full or not at all.

Most of it is the same on all ranks. `collect_rank_state` collects what belongs to one rank: its
random generators, and the history of gradients of its samples.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dynsparse._core.checks import describe_error, shorten
from dynsparse.nn import SparseLinear
from dynsparse.nn.sharded import is_sharded, local_part, shard_like
from dynsparse.pattern import SparsePattern
from dynsparse.ranks import Ranks, ShardSpec, check_consistent, collective_errors, digest
from dynsparse.training.checkpoint import random_state as rng
from dynsparse.training.checkpoint.format import CheckpointError, StoredTensor
from dynsparse.training.checkpoint.rank_state import gather_coordinates, gather_history
from dynsparse.training.checkpoint.tensor_parallel import KeyPath, TensorParallelState
from dynsparse.training.layer_shards import rebuild_reducers, resize_shards
from dynsparse.training.trainer import SparseTrainer

_SAME_MODEL = (
    "ranks that save together must hold the same model, as replicas or in shards: "
    "save each stage of a pipeline with ranks=group"
)


@dataclass
class TrainingState:
    """The objects whose state a checkpoint holds; see `save_checkpoint`."""

    model: nn.Module
    optimizer: Optimizer | None = None
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
        kind, state = type(self.optimizer).__name__, self.optimizer.state_dict()
        if "param_groups" not in state and not ranks.all_ranks.alone:
            raise ValueError(
                f"the state of {kind} is not by parameter, as that of torch's optimizers: only a "
                "training in one process can save it"
            )
        parts: dict[str, Any] = {
            "patterns": _describe_patterns(self.model),
            "model": self.model.state_dict(),
            "optimizer": {"kind": kind, "state": state},
            "trainer": None if self.trainer is None else self.trainer.state_dict(),
            "lr_scheduler": None,
            "extra": dict(extra or {}),
        }
        if self.lr_scheduler is not None:
            state = self.lr_scheduler.state_dict()
            parts["lr_scheduler"] = {"kind": type(self.lr_scheduler).__name__, "state": state}
        if parts["trainer"] is not None:
            parts["trainer"]["history_state"] = {}  # every rank saves its own
        parts["coordinates"] = gather_coordinates(ranks)
        return self._tensor_parallel(parts).to_chunks(parts, ranks)

    def _tensor_parallel(self, parts: dict[str, Any]) -> TensorParallelState:
        return TensorParallelState(self.model, self.optimizer, self.trainer, _saved_groups(parts))

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
        check_consistent(ranks.all_ranks, {"the layers": ", ".join(map(repr, layers))}, _SAME_MODEL)
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
            check_consistent(among, saved_patterns, _SAME_MODEL, shown=False)

    def collect_rank_state(self, ranks: Ranks) -> dict[str, Any]:
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
        sharded = self._sharded_tensors(_saved_groups(parts))
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
                return shard_like(local, value.dtype, rows, value.shape[0] if local.dim() else None)
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
        with shared_errors(ranks):
            try:
                self._check(parts)
            except Exception as error:  # of any kind: untrusted values are compared
                raise load_error(where, error) from None

        # Errors that only show during loading undo it.
        sizes = {p: p.shape for p in self.model.parameters()}
        undo = self._remember()
        try:
            with shared_errors(ranks):
                try:
                    self._load(parts)
                except Exception as error:  # of any kind: the values are untrusted
                    raise load_error(where, error) from None
        except BaseException:
            undo()
            raise
        if not ranks.alone:
            rebuild_reducers([p for p, shape in sizes.items() if p.shape != shape])
        if parts["generators"] is not None:
            for name, generator in self.generators.items():
                rng.restore(generator, parts["generators"][name])
        if parts["random"] is not None:
            rng.restore_global_states(parts["random"])

    def _load(self, parts: dict[str, Any]) -> None:
        """Load `parts` but for random generators."""
        self._resize_shards(parts["model"])
        self.model.load_state_dict(parts["model"])
        if self.optimizer is not None:
            try:
                self.optimizer.load_state_dict(parts["optimizer"]["state"])
                _check_finite(self.optimizer.state, _parameter_names(self.model))
                _check_step(self.optimizer)
            except Exception as error:  # of any kind: the values are untrusted
                reason = describe_error(error)
                raise ValueError(f"the state of the optimizer is damaged ({reason})") from None
        if self.trainer is not None:
            self.trainer.load_state_dict(parts["trainer"])
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(parts["lr_scheduler"]["state"])

    def _remember(self) -> Callable[[], None]:
        """Return a function that undoes `_load`."""
        if self.optimizer is None and self.trainer is None:
            return lambda: None  # the model has been checked
        model = copy.deepcopy(self.model.state_dict())
        trainer = copy.deepcopy({} if self.trainer is None else self.trainer.state_dict())
        restore_attributes = _remember_attributes(self.optimizer, self.lr_scheduler)

        def undo() -> None:
            self._resize_shards(model)
            self.model.load_state_dict(model)
            restore_attributes()
            if self.trainer is not None:
                self.trainer.load_state_dict(trainer)

        return undo

    def _resize_shards(self, state: Mapping[str, Any]) -> None:
        """Give the values of tensor-parallel layers the sizes that they have in a state."""
        for name, module in self.model.named_modules():
            if isinstance(module, SparseLinear) and isinstance(module.executor, ShardSpec):
                if self.trainer is not None:
                    self.trainer._forget_captures()  # until it loads its state
                resize_shards(module, len(state[f"{name}.values" if name else "values"]))

    def _check(self, parts: dict[str, Any]) -> None:
        """Raise an error for what can be told from `parts` before they are loaded."""
        _check_model(parts, self.model)
        if self.optimizer is not None:
            _check_optimizer(parts, self.optimizer)
        if parts["random"] is not None:
            rng.check_global_states(parts["random"])
        if self.trainer is not None:
            self.trainer.check_state(_require(parts, "trainer"))
        if self.lr_scheduler is not None:
            _check_kind(_require(parts, "lr_scheduler"), self.lr_scheduler)
            if type(self.lr_scheduler).__module__ == LRScheduler.__module__:
                state = parts["lr_scheduler"]["state"]
                _check_alike("the scheduler", self.lr_scheduler.state_dict(), state)
        if parts["generators"] is not None:
            for name, generator in self.generators.items():
                if name not in parts["generators"]:
                    raise ValueError(f"it holds no generator {name!r}")
                rng.check(generator, parts["generators"][name], name)


def load_error(where: str, error: Exception) -> CheckpointError:
    """The error of a checkpoint that does not fit, in one line."""
    return CheckpointError(f"{where} does not fit: {describe_error(error, 600)}")


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


def _saved_groups(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups of parameters in an optimizer's saved state; none where it names them otherwise,
    as wrapping optimizers do."""
    groups: list[dict[str, Any]] = parts["optimizer"]["state"].get("param_groups", [])
    return groups


def _parameter_names(model: nn.Module) -> dict[int, str]:
    """The name of each parameter, by its `id`."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _check_optimizer(parts: dict[str, Any], optimizer: Optimizer) -> None:
    """Raise ValueError for the state of another class, or of other groups of parameters."""
    _check_kind(parts["optimizer"], optimizer)
    if not (groups := _saved_groups(parts)):
        return
    sizes = [len(group["params"]) for group in groups]
    group_sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != group_sizes:
        raise ValueError(
            f"the optimizer was saved with groups of {sizes} tensors, here {group_sizes}"
        )
    if [n for group in groups for n in group["params"]] != list(range(sum(sizes))):
        raise ValueError("the state of the optimizer is damaged: its parameters are not in order")


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


def _unwrapped_names(state: Iterable[str]) -> set[str]:
    return {re.sub(r"(?<![^.])(module|_orig_mod)\.", "", name) for name in state}


def _check_model(parts: dict[str, Any], model: nn.Module) -> None:
    """Raise ValueError where tensors or patterns of the checkpoint do not fit the model."""
    saved, current = parts["model"], model.state_dict()
    if odd := sorted(saved.keys() ^ current.keys()):
        where = "file" if odd[0] in saved else "model"
        line = (
            f"{len(odd)} entries are in only one of file and model, such as {odd[0]!r}, "
            f"which is in the {where}"
        )
        if _unwrapped_names(saved) == _unwrapped_names(current):
            line += (
                ": DistributedDataParallel and torch.compile put 'module.' and '_orig_mod.' before "
                "the names, so save and load the model inside"
            )
        raise ValueError(line)
    resizable: set[str] = set()  # entries whose length follows the number of blocks
    for name, pattern in _describe_patterns(model).items():
        other = parts["patterns"].get(name)
        module = model.get_submodule(name)
        if (
            getattr(module, "can_resize", False)
            and isinstance(other, list)
            and other[:3] == pattern[:3]
        ):
            prefix = f"{name}." if name else ""
            resizable |= {prefix + key for key in ("values", "rows", "cols")}
        elif not isinstance(other, list) or other != pattern:
            raise ValueError(
                f"layer {name!r} was saved with [out, in, block size, blocks] = "
                f"{shorten(other)}, "
                f"the model has {pattern}"
            )
        _check_pattern(name, module, saved)
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


def _check_pattern(name: str, module: Any, saved: dict[str, Any]) -> None:
    """Raise ValueError for the saved pattern of a layer. The layers check this, too, but when the
    ones before them have changed already."""
    prefix = f"{name}." if name else ""
    rows, cols, values = (saved.get(prefix + key) for key in ("rows", "cols", "values"))
    if rows is None or cols is None:
        return
    current = module.pattern
    try:
        pattern = SparsePattern(rows, cols, shape=current.shape, block_size=current.block_size)
        if isinstance(values, Tensor) and values.shape != pattern.values_shape:
            raise ValueError(f"{pattern.nnz} blocks with values of {list(values.shape)}")
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the pattern of {name!r} is damaged: {error}") from None


def _remember_attributes(*objects: Any) -> Callable[[], None]:
    """Return a function that restores the attributes of optimizers and schedulers, and of those
    that they hold; lists and dictionaries stay the same objects.

    Tensors are not copied: `load_state_dict` puts others in their place.
    """
    contents: dict[int, tuple[Any, Any]] = {}

    def visit(value: Any) -> None:
        if isinstance(value, (Optimizer, LRScheduler)):
            value = vars(value)
        if isinstance(value, (dict, list)) and id(value) not in contents:
            contents[id(value)] = value, copy.copy(value)
            for item in value.values() if isinstance(value, dict) else value:
                visit(item)

    def restore() -> None:
        for value, content in contents.values():
            value.clear()
            value.update(content) if isinstance(value, dict) else value.extend(content)

    for each in objects:
        visit(getattr(each, "__dict__", None))
    return restore


def _check_finite(state: Mapping[Any, Any], names: Mapping[int, str]) -> None:
    """Raise ValueError where what an optimizer keeps of a parameter holds NaN or infinity.

    Args:
        state: of an optimizer, by parameter; what it has by other keys is not looked at.
        names: of the parameters, by their `id`.
    """
    for parameter, entries in state.items():
        for key, value in entries.items() if isinstance(entries, dict) else ():
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            value = local_part(value)
            if is_traceable_wrapper_subclass(value):
                continue  # quantized
            if not bool((value.float() if value.itemsize < 2 else value).isfinite().all()):
                name = names.get(id(parameter), "a parameter that is not the model's")
                raise ValueError(
                    f"the optimizer's {key} of {name!r} holds NaN or infinity: the training has "
                    "diverged"
                )


def _check_step(optimizer: Optimizer) -> None:
    """Raise an error, of any kind, where one of torch's optimizers can make no step.

    Each parameter makes it alone, as zeros with a gradient of ones and a copy of its state. What
    other libraries' optimizers need is not known here.
    """
    kind: Any = type(optimizer)
    needs_more = kind in (torch.optim.LBFGS, torch.optim.SparseAdam)  # a closure, other gradients
    if needs_more or not kind.__module__.startswith("torch.optim."):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            trial = torch.zeros_like(parameter).requires_grad_()
            trial.grad = torch.ones_like(parameter)
            fresh = kind([trial])
            fresh.param_groups = [{**group, "params": [trial]}]
            fresh.state[trial] = copy.deepcopy(optimizer.state.get(parameter, {}))
            fresh.step()
            if not bool(local_part(trial.detach()).isfinite().all()):
                raise ValueError("its options give NaN or infinity")


def _check_alike(where: str, current: Any, saved: Any) -> None:
    """Raise ValueError unless `saved` has the keys, the lengths and the types of `current`."""
    number = (int, float, Tensor)
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(current, dict):
        fits = isinstance(saved, dict) and current.keys() <= saved.keys()
        items = ((current[key], saved[key]) for key in current)
    elif isinstance(current, (list, tuple)):
        fits = isinstance(saved, (list, tuple)) and len(current) == len(saved)
        items = zip(current, saved, strict=True)
    elif isinstance(current, (bool, NoneType)):
        fits = isinstance(saved, (bool, NoneType))
    elif isinstance(current, number):
        fits = isinstance(saved, number) and (not isinstance(saved, Tensor) or saved.numel() == 1)
    else:
        fits = isinstance(saved, type(current))
    if not fits:
        raise ValueError(f"{where}: expected {shorten(current)}, got {shorten(saved)}")
    for current_item, saved_item in items:
        _check_alike(where, current_item, saved_item)
