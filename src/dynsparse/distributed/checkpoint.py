"""Checkpoints of many ranks: each writes and reads its part, and any number of them may go on.

A folder holds `manifest.json` and one safetensors file for each rank that saved. Tensors lie in
even pieces, as `torch.chunk` cuts them, over the ranks that hold them; so replicas, shards and one
process have one layout, and read each other's. The manifest names the files, with their digests,
and is written last: a save that was interrupted leaves the checkpoint before, whole. Nothing in
these files is code, and nothing of them is run: the format of torch.distributed.checkpoint, whose
metadata are pickled, is not used.

Layout of the manifest: "entries" has each tensor's dtype, shape and group; "groups" are lists of
ranks, of which the i-th holds the i-th piece; "parts" is what `training.save_checkpoint` has in its
file, with names of entries where tensors were. What is a rank's own is in the head of its file.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse.checks import check_flag
from dynsparse.distributed.stored import MANIFEST, StoredCheckpoint, file_name
from dynsparse.files.plain_tree import to_tree
from dynsparse.files.tensor_file import name_of_type, write_tensors
from dynsparse.files.whole import remove_left_overs, write_text_whole
from dynsparse.nn.sharded import gathered, is_sharded, local_part, rows_dimension
from dynsparse.ranks import GroupRanks, Ranks, chunk_of, collective_errors
from dynsparse.training.checkpoint.parts import Training, misfit, together
from dynsparse.training.checkpoint.places import Sources, places, take_own
from dynsparse.training.checkpoint.random_state import Generator
from dynsparse.training.checkpoint.rectangles import Piece
from dynsparse.training.spread import ranks_for
from dynsparse.training.trainer import SparseTrainer
from dynsparse.typed import typed

# Smaller tensors are written by one rank: to cut them costs more than it spares.
_SMALL = 1 << 14


class Saving:
    """A checkpoint that is being written.

    Attributes:
        path: its folder.
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

        self._thread = threading.Thread(target=run, name="dynsparse-checkpoint")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has been written, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Until it is written. Call it before the process group is destroyed.

        Raises:
            OSError, RuntimeError: it could not be written; the checkpoint before is whole.
        """
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


_in_flight: Saving | None = None


@typed
def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    trainer: SparseTrainer | None = None,
    lr_scheduler: Any = None,
    generators: Mapping[str, Generator] | None = None,
    extra: Mapping[str, Any] | None = None,
    ranks: Any = "auto",
    wait: bool = True,
) -> Saving:
    """Write what `training.save_checkpoint` writes into the folder `path`, each rank its part.

    All ranks call it, and all must see the folder. What was saved there before is whole until this
    is, and then makes room for it.

    Args:
        path: a folder, made if it is missing.
        model, optimizer, trainer, lr_scheduler, generators, extra: as in
            `training.save_checkpoint`. `extra` is that of the first rank.
        ranks: those that train together, as trainers take them.
        wait: False: what is saved is copied, and written while the training goes on. One at a time:
            the next save waits for it.

    Returns:
        The saving, whose `wait()` says when, and whether, it has been written.

    Raises:
        TypeError: something that would have to be saved as code.
        ValueError: optimizer state that holds NaN or infinity.
        OSError: the folder cannot be written; on several ranks a RuntimeError, the same on all.
    """
    global _in_flight
    check_flag("wait", wait)
    if _in_flight is not None:
        _in_flight.wait()
    line = ranks_for(ranks, model)
    everyone = line.all_ranks
    training = Training(model, optimizer, trainer, lr_scheduler, generators or {})
    training.check(line)
    parts = _rows_only(training.parts(extra, line))
    own = training.own_part(line)
    token = _token(everyone)
    with collective_errors(everyone):
        layout = _Layout(line)
        manifest = {
            "format": "dynsparse checkpoint of ranks",
            "version": 1,
            "token": token,
            "parts": to_tree(parts, layout.keep, kept=Piece),
            "entries": layout.entries,
            "groups": layout.groups,
        }
        about = {"own": json.dumps(to_tree(own, layout.keep_own, "own"))}
        pieces = layout.pieces
        if not wait:
            pieces = {name: _copied(piece) for name, piece in pieces.items()}
    writers = everyone if wait else _aside(everyone)
    folder = Path(path)
    made = Saving(folder, lambda: _write(writers, folder, pieces, about, manifest), wait)
    _in_flight = None if wait else made
    return made


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    trainer: SparseTrainer | None = None,
    lr_scheduler: Any = None,
    generators: Mapping[str, Generator] | None = None,
    random_state: bool = True,
    ranks: Any = "auto",
) -> dict[str, Any]:
    """Put everything back as `save_checkpoint` found it; returns `extra`.

    All ranks call it, as many as there are now: each reads its part, and gets the random generators
    of the rank that had its number; ranks beyond those keep theirs. Everything is checked, on all
    ranks, before anything is changed on one. See `training.load_checkpoint`.

    Raises:
        CheckpointError: there is no whole checkpoint, it is truncated, damaged or foreign, lacks
            something asked for, or does not fit the objects given; the same on all ranks.
        OSError: it cannot be read; on several ranks a CheckpointError.
    """
    if _in_flight is not None:
        _in_flight.wait()
    line = ranks_for(ranks, model)
    everyone = line.all_ranks
    training = Training(model, optimizer, trainer, lr_scheduler, generators or {})
    where = os.fspath(path)
    now = places(line)
    with together(everyone):
        stored = StoredCheckpoint(Path(path))
        stored.check_files(everyone.rank, everyone.size)
    with together(everyone):
        try:
            parts = stored.parts()
            sources = Sources(parts.pop("places", None), len(stored), now, everyone.rank)
            take_own(parts, stored.own_parts(sources.wanted), trainer, sources)
            parts = training.taken(parts)
        except OSError:
            raise
        except Exception as error:  # of any kind: it is what a stranger's values can end in
            raise misfit(where, error) from None
    if not random_state:
        parts["random"] = None
    training.put_back(parts, where, everyone)
    extra: dict[str, Any] = parts["extra"]
    return extra


class _Layout:
    """Which piece of which tensor this rank writes.

    Args:
        line: of ranks with other samples for the same weights; everyone of their mesh writes.
    """

    def __init__(self, line: Ranks) -> None:
        self._ranks = ranks = line.all_ranks
        self._leads = line.is_lead_group()
        self.groups: list[list[int]] = [[0], list(range(ranks.size))]
        self.entries: dict[str, dict[str, Any]] = {}
        self.pieces: dict[str, Tensor] = {}

    def keep(self, path: str, tensor: Tensor | Piece) -> str:
        """The name of a tensor that all ranks hold, or share out among each other."""
        held = True
        if isinstance(tensor, Piece):
            group, piece = self.groups[1], tensor.tensor
        elif is_sharded(tensor := tensor.detach()):
            # Other lines hold the same shards.
            group, piece, held = self._holders(tensor), local_part(tensor), self._leads
        elif tensor.dim() and len(tensor) >= self._ranks.size and tensor.nbytes >= _SMALL:
            group = self.groups[1]
            piece = tensor[slice(*chunk_of(self._ranks, len(tensor)))]
        else:
            group, piece = self.groups[0], tensor
        if group not in self.groups:
            self.groups.append(group)
        name = self._free(path.lstrip("/"))
        self.entries[name] = {
            "dtype": name_of_type(piece),
            "shape": list(tensor.shape),
            "group": self.groups.index(group),
        }
        if held and self._ranks.rank in group:
            self.pieces[name] = piece
        return name

    def keep_own(self, path: str, tensor: Tensor) -> str:
        """The name of a tensor that is this rank's alone."""
        name = self._free(path)
        self.pieces[name] = tensor.detach()
        return name

    def _free(self, name: str) -> str:
        while name in self.entries or name in self.pieces:
            name += "'"
        return name

    def _holders(self, tensor: Tensor) -> list[int]:
        """The ranks that hold the pieces of a DTensor, in their order."""
        mesh = tensor.device_mesh  # type: ignore[attr-defined]
        dimension = rows_dimension(tensor)
        line = mesh.mesh.movedim(dimension, 0).reshape(mesh.size(dimension), -1)[:, 0].tolist()
        if not isinstance(self._ranks, GroupRanks):
            return [0] if len(line) == 1 else line
        numbers = torch.distributed.get_process_group_ranks(self._ranks.group)
        if not set(line) <= set(numbers):
            raise ValueError(
                f"a tensor is sharded over the ranks {line}, which are not all among the ranks "
                f"{numbers} that save it: pass ranks that hold the whole model"
            )
        return [numbers.index(rank) for rank in line]


def _rows_only(value: Any) -> Any:
    """`value` with DTensors gathered that are cut in another way than by rows."""
    if isinstance(value, dict):
        return {key: _rows_only(one) for key, one in value.items()}
    return gathered(value) if is_sharded(value) and rows_dimension(value) is None else value


def _copied(piece: Tensor) -> Tensor:
    return piece.cpu() if not piece.is_cpu else piece.clone()


def _token(ranks: Ranks) -> str:
    """What the names of this save's files begin with, the same on all ranks."""
    drawn = torch.tensor([int.from_bytes(secrets.token_bytes(4), "little")], device=ranks.device)
    return f"{int(ranks.broadcast(drawn)):08x}"


def _write(
    ranks: Ranks,
    folder: Path,
    pieces: Mapping[str, Tensor],
    about: Mapping[str, str],
    manifest: dict[str, Any],
) -> None:
    token = manifest["token"]
    told = torch.zeros(40, dtype=torch.uint8)
    with collective_errors(ranks):
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / file_name(token, ranks.rank)
        digest = write_tensors(file, pieces, about)
        size = file.stat().st_size.to_bytes(8, "little")
        told = torch.frombuffer(bytearray(bytes.fromhex(digest) + size), dtype=torch.uint8)
    files = []
    for one in ranks.all_gather(told.to(ranks.device), [40] * ranks.size):
        raw = bytes(one.tolist())
        files.append({"bytes": int.from_bytes(raw[32:], "little"), "sha256": raw[:32].hex()})
    with collective_errors(ranks):
        if ranks.rank == 0:
            text = json.dumps(manifest | {"files": files}, allow_nan=False)
            write_text_whole(folder / MANIFEST, text + "\n")
    with collective_errors(ranks):
        if ranks.rank == 0:
            _remove_others(folder, token)


def _remove_others(folder: Path, token: str) -> None:
    """What the save before has left, and those that were interrupted."""
    for file in folder.iterdir():
        if re.fullmatch(r"[0-9a-f]{8}-\d+\.safetensors", file.name) and file.name[:8] != token:
            file.unlink(missing_ok=True)
    remove_left_overs(folder)


_groups_aside: dict[int, tuple[Ranks, Ranks]] = {}


def _aside(ranks: Ranks) -> Ranks:
    """The same ranks with moves of their own, over the CPU, for who writes beside the training."""
    if not isinstance(ranks, GroupRanks):
        return ranks
    known = _groups_aside.get(id(ranks))
    if known is None or known[0] is not ranks:
        dist = torch.distributed
        numbers = dist.get_process_group_ranks(ranks.group)
        group = dist.new_group(numbers, backend="gloo", use_local_synchronization=True)
        known = _groups_aside[id(ranks)] = ranks, GroupRanks(group)
    return known[1]
