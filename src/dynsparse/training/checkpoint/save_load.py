"""Saving and loading of a training's full state, in one process or over many ranks."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dynsparse._core.checks import check_flag, check_types
from dynsparse.nn.sharded import gather_full, is_sharded, rows_dimension
from dynsparse.ranks import GroupRanks, Ranks, collective_errors
from dynsparse.tracing import spanned
from dynsparse.training.checkpoint import random_state as rng
from dynsparse.training.checkpoint.format import (
    CheckpointError,
    CheckpointReader,
    Layout,
    header_of,
    write_shards,
)
from dynsparse.training.checkpoint.rank_state import Sources, add_rank_state, gather_coordinates
from dynsparse.training.checkpoint.training_state import TrainingState, load_error, shared_errors
from dynsparse.training.layer_shards import resolve_ranks
from dynsparse.training.trainer import SparseTrainer

_log = logging.getLogger(__name__)


class Saving:
    """A checkpoint that is being written.

    Attributes:
        path: its file.
    """

    def __init__(self, path: Path, write: Callable[[], None], wait: bool) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if wait:
            write()
            return

        def run() -> None:
            try:
                write()
            except BaseException as error:
                self._error = error
                _log.warning("could not save %s: %s: %s", path, type(error).__name__, error)

        self._thread = threading.Thread(target=run, name="dynsparse-checkpoint")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has been written, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Block until it is written. Call it before the process group is destroyed.

        Raises:
            OSError, RuntimeError: it could not be written; the checkpoint before is still there.
        """
        self._join()
        if self._error is not None:
            raise self._error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()


_in_flight: Saving | None = None


@check_types
@spanned("checkpoint")
def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    trainer: SparseTrainer | None = None,
    lr_scheduler: Any = None,
    generators: Mapping[str, rng.Generator] | None = None,
    extra: Mapping[str, Any] | None = None,
    ranks: Any = "auto",
    wait: bool = True,
) -> Saving:
    """Write model and patterns, optimizer, trainer, and all random generators to `path`.

    The write is atomic: a temporary file beside `path` is flushed to the disk and then replaces
    what was there. Of several ranks, which must all see the folder, each writes a file with its
    shard, the first one to `path` itself and last. Nothing is gathered on one rank, and any number
    of ranks can load the checkpoint.

    Args:
        path: the file; its folder must exist.
        model, optimizer: saved by their `state_dict`.
        trainer: step counter, schedule and the generator of random growth.
        lr_scheduler: anything with `state_dict` and `load_state_dict`.
        generators: further generators by name, of torch, NumPy or Python; the global ones of all
            three are saved in any case.
        extra: any other tensors, numbers, strings, lists, tuples and dicts; that of the first rank.
        ranks: those that train together, as trainers take them. All of them call this.
        wait: False copies the state and writes it while the training continues. The next save or
            load waits for it. If it fails, this is logged as a warning, and `wait()` of what is
            returned raises the error.

    Returns:
        The saving; its `wait()` returns once it has been written, or raises what went wrong.

    Raises:
        TypeError: something that would have to be saved as code (a class, a NumPy array), or a
            sparse or quantized tensor. Nothing is written.
        ValueError: optimizer state that holds NaN or infinity, or containers that hold themselves.
        OSError: the folder is missing, or the disk is full; what was at `path` is still there. On
            several ranks a RuntimeError, the same on all.
    """
    global _in_flight
    check_flag("wait", wait)
    if _in_flight is not None:
        _in_flight._join()
    data_ranks = resolve_ranks(ranks, model)
    all_ranks = data_ranks.all_ranks
    training = TrainingState(model, optimizer, trainer, lr_scheduler, generators or {})
    training.check(data_ranks)
    parts = _gather_unless_by_rows(training.collect(extra, data_ranks))
    local = training.collect_rank_state(data_ranks)
    token = _draw_token(all_ranks)
    header: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    with collective_errors(all_ranks):
        layout = Layout(data_ranks)
        header = header_of(layout, parts, local, token, all_ranks)
        tensors = layout.tensors
        if not wait:
            tensors = {name: t.clone() if t.is_cpu else t.cpu() for name, t in tensors.items()}
    writers = all_ranks if wait else _cpu_ranks(all_ranks)
    target = Path(path)

    def write() -> None:
        size = write_shards(writers, target, header, tensors)
        _log.info("saved %s, %d bytes", target, size)

    saving = Saving(target, write, wait)
    _in_flight = None if wait else saving
    return saving


@spanned("checkpoint")
def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    trainer: SparseTrainer | None = None,
    lr_scheduler: Any = None,
    generators: Mapping[str, rng.Generator] | None = None,
    random_state: bool = True,
    ranks: Any = "auto",
) -> dict[str, Any]:
    """Restore everything that `save_checkpoint` saved; returns `extra`.

    All or nothing: after any error everything is as before. What is left out is not loaded: for
    testing, pass the model alone. `random_state=False` leaves the global random generators as they
    are.

    On several ranks all call this, as many as there are now. Each reads its shards, and gets the
    random generators of the rank that had its number; ranks beyond those keep theirs.

    Layers that are `resizable`, as pruning trainers make them, take the saved number of blocks.

    Raises:
        CheckpointError: the file is truncated, damaged, not a checkpoint, of another format
            version, lacks something asked for, or does not fit the objects given; none of them is
            changed. The same on all ranks.
        OSError: the file cannot be read; on several ranks a CheckpointError, the same on all.
    """
    if _in_flight is not None:
        _in_flight._join()
    data_ranks = resolve_ranks(ranks, model)
    all_ranks = data_ranks.all_ranks
    training = TrainingState(model, optimizer, trainer, lr_scheduler, generators or {})
    now = gather_coordinates(data_ranks)
    with shared_errors(all_ranks):
        reader = CheckpointReader(Path(path))
        reader.verify(all_ranks.rank, all_ranks.size)
    with shared_errors(all_ranks):
        try:
            parts = reader.parts()
            sources = Sources(parts.pop("coordinates", None), reader.size, now, all_ranks.rank)
            add_rank_state(parts, reader.rank_parts(sources.ranks_to_read), trainer, sources)
            parts = training.read(parts)
        except (CheckpointError, OSError):
            raise
        except Exception as error:  # of any kind: the values are untrusted
            raise load_error(str(path), error) from None
    if not random_state:
        parts["random"] = None
    training.restore(parts, str(path), all_ranks)
    _log.info("loaded %s", path)
    extra: dict[str, Any] = parts["extra"]
    return extra


def read_extra(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The `extra` of a checkpoint, for settings that are needed before there is a model.

    Raises:
        CheckpointError: the file is truncated, damaged, not a checkpoint, or of another format
            version.
        OSError: the file cannot be read.
    """
    reader = CheckpointReader(Path(path))
    reader.verify()
    try:
        return reader.extra()
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # of any kind: the values are untrusted
        raise load_error(str(path), error) from None


def _gather_unless_by_rows(value: Any) -> Any:
    """Gather the DTensors in `value` that are sharded along another dimension than rows."""
    if isinstance(value, dict):
        return {key: _gather_unless_by_rows(item) for key, item in value.items()}
    return gather_full(value) if is_sharded(value) and rows_dimension(value) is None else value


def _draw_token(ranks: Ranks) -> str:
    """Draw the token that identifies the files of this save, the same on all ranks."""
    if ranks.alone:
        return "0" * 8
    drawn = torch.tensor([int.from_bytes(secrets.token_bytes(4), "little")], device=ranks.device)
    return f"{int(ranks.broadcast(drawn)):08x}"


_cpu_groups: WeakKeyDictionary[Any, Ranks] = WeakKeyDictionary()
"""By the process group of a training; weak, so that `destroy_process_group` ends both."""


def _cpu_ranks(ranks: Ranks) -> Ranks:
    """The same ranks with a CPU process group, for a thread beside the training."""
    if not isinstance(ranks, GroupRanks):
        return ranks
    if ranks.group not in _cpu_groups:
        dist = torch.distributed
        numbers = dist.get_process_group_ranks(ranks.group)
        group = dist.new_group(numbers, backend="gloo", use_local_synchronization=True)
        _cpu_groups[ranks.group] = GroupRanks(group)
    return _cpu_groups[ranks.group]
