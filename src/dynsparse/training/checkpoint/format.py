"""The file format of checkpoints: safetensors, with JSON in the metadata.

A checkpoint of one process is one safetensors file. Of several ranks, the file at the path is that
of the first rank, and the others write `NAME.TOKEN-RANK` beside it. A tensor is divided by rows, as
`torch.chunk` divides it, among the ranks that hold it, so that replicas, shards and one process
have one layout and read each other's checkpoints.

The metadata has one entry, "dynsparse", with this JSON:

    format, version   "dynsparse checkpoint", 1
    token, rank, ranks   which save the file belongs to, and which of its files it is
    own       what belongs to this rank alone: random generators and the history of gradients
    state     in the first file: model, patterns, optimizer, trainer, lr_scheduler, extra
    entries   in the first file: dtype, shape and group of each tensor of "state"
    groups    in the first file: lists of ranks, of which the i-th holds the i-th chunk
    sha256    of all of the above and of the tensors of this file

In "own" and "state", {"$": ["tensor", NAME]} stands for a tensor. Nothing in these files is code,
and none is run: the pickled metadata of torch.distributed.checkpoint are not used.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dynsparse._core.checks import describe_error, shorten
from dynsparse._core.files.atomic_write import replace_file
from dynsparse._core.files.limits import check_regular, parse_json
from dynsparse.nn.sharded import is_sharded, local_part, rows_dimension
from dynsparse.ranks import GroupRanks, Ranks, chunk, chunk_of, collective_errors
from dynsparse.training.checkpoint.tensor_parallel import Chunk

_KEY = "dynsparse"
_FORMAT, _VERSION = "dynsparse checkpoint", 1
_MARK = "$"  # the one key of an object that stands for what JSON does not have
_SMALL = 1 << 14  # bytes; smaller tensors are written by one rank

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class CheckpointError(ValueError):
    """A file that is damaged, not a checkpoint or of another model; the message is one line."""


def to_tree(value: Any, keep: Callable[[str, Any], str], path: str = "") -> Any:
    """Convert a value of plain types and tensors to JSON.

    Args:
        keep: called with the path in the tree and the tensor (or `Chunk`); returns its name.

    Raises:
        TypeError: any other type.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_MARK: ["float", repr(float(value))]}
    if isinstance(value, (Tensor, Chunk)):
        return {_MARK: ["tensor", keep(path, value)]}
    if isinstance(value, torch.dtype):
        return {_MARK: ["dtype", str(value).removeprefix("torch.")]}
    if isinstance(value, (list, tuple)):
        items = [to_tree(item, keep, f"{path}/{i}") for i, item in enumerate(value)]
        return items if type(value) is list else {_MARK: ["tuple", items]}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and _MARK not in value:
            return {key: to_tree(item, keep, f"{path}/{key}") for key, item in value.items()}
        pairs = [
            [to_tree(key, keep, path), to_tree(item, keep, f"{path}/{key}")]
            for key, item in value.items()
        ]
        return {_MARK: ["counter" if isinstance(value, Counter) else "dict", pairs]}
    raise TypeError(
        "a checkpoint holds only tensors, numbers, strings and containers of them; found "
        f"{type(value)} at {path or 'its root'}: convert it first"
    )


def from_tree(tree: Any, tensor: Callable[[str], Any]) -> Any:
    """Convert JSON of `to_tree` back; `tensor` returns what takes the place of a name.

    Raises:
        ValueError: JSON that `to_tree` does not make.
    """
    if isinstance(tree, list):
        return [from_tree(item, tensor) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _MARK not in tree:
        return {key: from_tree(item, tensor) for key, item in tree.items()}
    marked = tree[_MARK]
    kind, content = marked if isinstance(marked, list) and len(marked) == 2 else (None, None)
    if kind == "tensor" and isinstance(content, str):
        return tensor(content)
    if kind == "float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if kind == "tuple" and isinstance(content, list):
        return tuple(from_tree(item, tensor) for item in content)
    if kind == "dtype" and isinstance(content, str):
        dtype = vars(torch).get(content)
        if isinstance(dtype, torch.dtype):
            return dtype
    if kind in ("dict", "counter") and isinstance(content, list):
        pairs = [from_tree(pair, tensor) for pair in content]
        try:
            items = {key: item for key, item in pairs}  # noqa: C416  a pair has two parts
            return items if kind == "dict" else Counter(items)
        except (TypeError, ValueError):
            pass
    raise ValueError(f"expected a tree of plain types, got {shorten(marked)}")


class Layout:
    """The tensors that this rank writes: their names, and its chunk of each.

    Args:
        ranks: with other samples for the same weights; all ranks of their mesh write.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = all_ranks = ranks.all_ranks
        self._leads = ranks.is_lead_group()
        self.groups: list[list[int]] = [[0], list(range(all_ranks.size))]
        self.entries: dict[str, dict[str, Any]] = {}
        self.tensors: dict[str, Tensor] = {}

    def keep(self, path: str, tensor: Tensor | Chunk) -> str:
        """Add a tensor that all ranks hold, or of which each holds a shard; returns its name."""
        holds = True
        _check_savable(tensor.tensor if isinstance(tensor, Chunk) else local_part(tensor))
        if isinstance(tensor, Chunk):
            group, part = self.groups[1], tensor.tensor
        elif is_sharded(tensor := tensor.detach()):
            # Ranks with other samples may hold the same shards.
            group, part, holds = self._holders(tensor), local_part(tensor), self._leads
        elif tensor.dim() and len(tensor) >= self._ranks.size and tensor.nbytes >= _SMALL:
            group = self.groups[1]
            part = tensor[slice(*chunk_of(self._ranks, len(tensor)))]
        else:
            group, part = self.groups[0], tensor
        if group not in self.groups:
            self.groups.append(group)
        name = self._unique_name(path.lstrip("/"))
        self.entries[name] = {
            "dtype": _DTYPE_NAMES[part.dtype],
            "shape": list(tensor.shape),
            "group": self.groups.index(group),
        }
        if holds and self._ranks.rank in group:
            self.tensors[name] = part
        return name

    def keep_rank_tensor(self, path: str, tensor: Tensor) -> str:
        """Add a tensor that belongs to this rank alone; returns its name."""
        _check_savable(tensor)
        name = self._unique_name(path)
        self.tensors[name] = tensor.detach()
        return name

    def _unique_name(self, name: str) -> str:
        while name in self.entries or name in self.tensors:
            name += "'"
        return name

    def _holders(self, tensor: Tensor) -> list[int]:
        """The ranks that hold the shards of a DTensor, in their order."""
        mesh = tensor.device_mesh  # type: ignore[attr-defined]
        dimension = rows_dimension(tensor)
        holders = mesh.mesh.movedim(dimension, 0).reshape(mesh.size(dimension), -1)[:, 0].tolist()
        if not isinstance(self._ranks, GroupRanks):
            return [0] if len(holders) == 1 else holders
        numbers = torch.distributed.get_process_group_ranks(self._ranks.group)
        if not set(holders) <= set(numbers):
            raise ValueError(
                f"a tensor is sharded over the ranks {holders}, which are not all among the ranks "
                f"{numbers} that save it: pass ranks that hold the full model"
            )
        return [numbers.index(rank) for rank in holders]


def _check_savable(tensor: Tensor) -> None:
    if is_traceable_wrapper_subclass(tensor):
        raise TypeError(f"a checkpoint holds no tensors of the class {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.dtype not in _DTYPE_NAMES:
        raise TypeError(f"a checkpoint holds no tensors of {tensor.dtype}, {tensor.layout}")


def header_of(layout: Layout, state: Any, own: Any, token: str, ranks: Ranks) -> dict[str, Any]:
    """The JSON of this rank's file; the tensors of `state` and `own` are kept in `layout`.

    Raises:
        TypeError: something that would have to be saved as code.
        ValueError: nested too deep, or too much besides the tensors.
    """
    try:
        tree = to_tree(state, layout.keep)
        header = {
            "format": _FORMAT,
            "version": _VERSION,
            "token": token,
            "rank": ranks.rank,
            "ranks": ranks.size,
            "own": to_tree(own, layout.keep_rank_tensor, "own"),
        }
    except RecursionError:
        raise ValueError("expected containers, got one that holds itself") from None
    if ranks.rank == 0:
        header |= {"state": tree, "entries": layout.entries, "groups": layout.groups}
    try:
        parse_json(json.dumps(header, allow_nan=False))
    except ValueError as error:
        raise ValueError(f"load_checkpoint could not read this checkpoint: {error}") from None
    return header


def write_shards(
    ranks: Ranks, path: Path, header: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> int:
    """Write the files of a checkpoint, the first rank's last; returns the bytes of this rank's.

    Raises:
        OSError: a file cannot be written; the checkpoint before is still there. On several ranks a
            RuntimeError, the same on all.
    """
    token = header["token"]
    with ExitStack() as stack:
        size = 0
        with collective_errors(ranks):
            content = to_bytes(header, tensors)
            size = len(content)
            file = stack.enter_context(replace_file(shard_path(path, token, ranks.rank)))
            with open(file, "xb") as stream:
                stream.write(content)
            del content
        with collective_errors(ranks):
            if ranks.rank:
                stack.close()
        with collective_errors(ranks):
            stack.close()
    with collective_errors(ranks):
        if ranks.rank == 0:
            _remove_shards(path, token)
    return size


def to_bytes(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Serialise one file of a checkpoint."""
    plain: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        # safetensors refuses tensors that share memory; a single entry may have any stride.
        storage = tensor.untyped_storage().data_ptr()
        if storage in storages or tensor.numel() == 1:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        plain[name] = tensor
        storages.add(storage)
    header = {**header, "sha256": _digest(header, plain, plain.__getitem__)}
    return save(plain, {_KEY: json.dumps(header, allow_nan=False)})


def _digest(
    header: Mapping[str, Any], names: Iterable[str], tensor_of: Callable[[str], Tensor]
) -> str:
    digest = hashlib.sha256(json.dumps(header, allow_nan=False).encode())
    for name in sorted(names):
        tensor = tensor_of(name)
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def shard_path(path: Path, token: str, rank: int) -> Path:
    """The path of a rank's file."""
    return path if rank == 0 else path.with_name(f"{path.name}.{token}-{rank}")


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint with the files of all its ranks."""
    path.unlink()
    _remove_shards(path, None)


def _remove_shards(path: Path, token: str | None) -> None:
    """Delete the shards of all saves to `path` but that of `token`, unfinished ones too."""
    name = re.compile(rf"\.?{re.escape(path.name)}\.([0-9a-f]{{8}})-\d+(\.[0-9a-f]{{8}}\.tmp)?")
    for file in path.parent.iterdir():
        match = name.fullmatch(file.name)
        if match is not None and match[1] != token:
            file.unlink(missing_ok=True)


class CheckpointReader:
    """A checkpoint of which only the JSON of the first file has been read.

    Attributes:
        size: how many ranks saved it.

    Raises:
        CheckpointError: the file is truncated, damaged, not a checkpoint, or of another format
            version.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = {0: _File(path)}
        header = self._files[0].header
        try:
            token, size, groups = header["token"], header["ranks"], header["groups"]
            if not re.fullmatch(r"[0-9a-f]{8}", token):
                raise ValueError(f"expected a token of 8 digits, got {shorten(token)}")
            if type(size) is not int or size < 1:
                raise ValueError(f"expected a number of ranks, got {shorten(size)}")
            if not all(type(n) is int and 0 <= n < size for group in groups for n in group):
                raise ValueError("its groups name ranks that it has no files of")
            self._token: str = token
            self.size: int = size
            self._groups: list[list[int]] = groups
            self._entries: dict[str, dict[str, Any]] = header["entries"]
            self._state = header["state"]
            if not isinstance(self._entries, dict) or not isinstance(self._state, dict):
                raise ValueError("expected entries and a state")
        except Exception as error:  # of any kind: the JSON is untrusted
            raise CheckpointError(f"{path} is damaged: {describe_error(error)}") from None
        self._read: set[tuple[int | None, str]] = set()

    def verify(self, rank: int = 0, size: int = 1) -> None:
        """Compare the digests of every `size`-th file from `rank` on.

        Raises:
            CheckpointError: a file is missing, truncated or damaged.
        """
        for number in range(rank, self.size, size):
            self._file(number).verify()

    def parts(self) -> dict[str, Any]:
        """The state that all ranks share, with `StoredTensor`s in the place of tensors.

        Raises:
            ValueError: it is not what a training's checkpoint has.
        """
        parts: dict[str, Any] = from_tree(self._state, self._entry)
        _check_parts(parts)
        return parts

    def rank_parts(self, numbers: Set[int]) -> list[dict[str, Any]]:
        """The state of each rank alone: read for the ranks `numbers`, empty for the others.

        Raises:
            ValueError: it is not the state of a rank.
        """
        parts: list[dict[str, Any]] = [{"random": {}, "generators": {}, "history": None}]
        parts *= self.size
        for number in numbers:
            file = self._file(number)

            def tensor(name: str, file: _File = file, number: int = number) -> Tensor:
                self._check_once(number, name)
                return file.read(name)

            parts[number] = from_tree(file.header["own"], tensor)
            _check_rank_part(parts[number])
        return parts

    def extra(self) -> dict[str, Any]:
        """The `extra` of `save_checkpoint`, with its tensors read."""
        return _full_tensors(self.parts()["extra"])

    def _file(self, number: int) -> _File:
        if number not in self._files:
            path = shard_path(self.path, self._token, number)
            if not path.exists():
                raise CheckpointError(f"{path} is missing: expected the files of {self.size} ranks")
            file = _File(path)
            if (file.header.get("token"), file.header.get("rank")) != (self._token, number):
                raise CheckpointError(f"{path} belongs to another checkpoint")
            self._files[number] = file
        return self._files[number]

    def _check_once(self, number: int | None, name: str) -> None:
        """Raise ValueError for a tensor named twice: a small file must not expand without limit."""
        if (number, name) in self._read:
            raise ValueError(f"the tensor {shorten(name)} is named twice")
        self._read.add((number, name))

    def _entry(self, name: str) -> StoredTensor:
        self._check_once(None, name)
        entry = self._entries[name]
        shape, dtype = entry["shape"], _DTYPES[entry["dtype"]]
        group = self._groups[entry["group"]]
        if not group or not all(type(n) is int and 0 <= n < 2**62 for n in shape):
            raise ValueError(f"{shorten(name)}: expected a shape and ranks, got {shorten(entry)}")
        return StoredTensor(name, torch.Size(shape), dtype, [self._file(n) for n in group])


def _full_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value)({key: _full_tensors(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(_full_tensors(item) for item in value)
    return value.full_tensor() if isinstance(value, StoredTensor) else value


class _File:
    """One file of a checkpoint, whose tensors are read on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        check_regular(path)
        path.open("rb").close()  # an OSError that names the file
        try:
            self._file = safetensors.safe_open(path, framework="pt")
            metadata = self._file.metadata() or {}
        except safetensors.SafetensorError as error:
            reason = describe_error(error)
            raise CheckpointError(f"{path} is truncated or not a checkpoint: {reason}") from None
        try:
            header = parse_json(metadata[_KEY])
            if header["format"] != _FORMAT:
                raise ValueError(
                    f"expected the format {_FORMAT!r}, got {shorten(header['format'])}"
                )
        except Exception as error:  # of any kind: the JSON is untrusted
            reason = describe_error(error)
            raise CheckpointError(f"{path} is not a dynsparse checkpoint ({reason})") from None
        self.header: dict[str, Any] = header
        if header.get("version") != _VERSION:
            raise CheckpointError(
                f"{path} has format version {shorten(header.get('version'))}, this dynsparse "
                f"reads version {_VERSION}: load it with the dynsparse that wrote it"
            )

    def verify(self) -> None:
        header = dict(self.header)
        saved = header.pop("sha256", None)
        try:
            actual = _digest(header, self._file.keys(), self._file.get_tensor)
        except ValueError:  # numbers that JSON does not have
            actual = ""
        if actual != saved:
            raise CheckpointError(f"{self.path} is damaged: its SHA-256 does not match its content")

    def describe(self, name: str) -> tuple[torch.dtype, list[int]]:
        """Type and shape of a tensor.

        Raises:
            ValueError: there is none.
        """
        stored = self._slice(name)
        return _DTYPES[stored.get_dtype()], list(stored.get_shape())

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """A copy of a tensor, or of its rows [first, last)."""
        stored = self._slice(name)
        rows: Tensor = stored[first:last] if stored.get_shape() else self._file.get_tensor(name)
        return rows.clone()

    def _slice(self, name: str) -> Any:
        try:
            return self._file.get_slice(name)
        except safetensors.SafetensorError as error:
            raise ValueError(f"{self.path.name} is damaged: {error}") from None


class StoredTensor:
    """A tensor that has not been read yet, in the files of several ranks."""

    def __init__(
        self, name: str, shape: torch.Size, dtype: torch.dtype, files: list[_File]
    ) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
        self._files = files
        # Checked before anything of that size is allocated: the chunks are there, each in its file.
        for i, file in enumerate(files):
            part = list(shape)
            if shape:
                first, last = chunk(shape[0], len(files), i)
                part[0] = last - first
            if file.describe(name) != (dtype, part):
                raise ValueError(
                    f"{shorten(name)}: expected a chunk of {dtype} {part} in {file.path.name}, "
                    f"got {file.describe(name)}"
                )

    def rows(self, first: int, last: int) -> Tensor:
        """Read rows [first, last) from the files that hold them."""
        chunks = []
        for i, file in enumerate(self._files):
            begin, end = chunk(self.shape[0], len(self._files), i)
            if max(first, begin) < min(last, end):
                rows = file.read(self.name, max(first, begin) - begin, min(last, end) - begin)
                chunks.append(rows)
        if not chunks:
            return torch.empty((0, *self.shape[1:]), dtype=self.dtype, device="cpu")
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)

    def full_tensor(self) -> Tensor:
        """Read the full tensor."""
        return self.rows(0, self.shape[0]) if self.shape else self._files[0].read(self.name)


# The types of each part; None is the type of a part that was not saved.
_PARTS: dict[str, tuple[type, ...]] = {
    "model": (dict,),
    "patterns": (dict,),
    "optimizer": (dict,),
    "trainer": (dict, type(None)),
    "lr_scheduler": (dict, type(None)),
    "extra": (dict,),
}


def _check_parts(parts: Any) -> None:
    """Raise ValueError unless all parts are present and of their types."""
    for part, kinds in _PARTS.items():
        if part not in parts or not isinstance(parts[part], kinds):
            kind = type(parts[part]).__name__ if part in parts else "nothing"
            raise ValueError(f"expected a dict as its {part}, got {kind}")
    for part in ("optimizer", "lr_scheduler"):
        if parts[part] is not None and not _has_kind(parts[part]):
            raise ValueError(
                f"expected a kind and a state as its {part}, got {shorten(parts[part])}"
            )
    state = parts["optimizer"]["state"]
    # Optimizers that wrap others have no groups in their state.
    groups = state.get("param_groups", []) if isinstance(state, dict) else None
    if not isinstance(groups, list) or not all(
        isinstance(_entry(group, "params"), list) for group in groups
    ):
        raise ValueError("expected the optimizer's groups of parameters, got others")
    for name in parts["model"]:
        if not isinstance(name, str):
            raise ValueError(f"expected names of the model's tensors, got {shorten(name)}")


def _check_rank_part(part: Any) -> None:
    """Raise ValueError unless `part` is the state of a rank."""
    types = {"random": dict, "generators": dict, "history": object}
    if not all(isinstance(part, dict) and isinstance(part.get(k), t) for k, t in types.items()):
        raise ValueError(f"expected {', '.join(types)} of each rank, got {shorten(part)}")
    for state in part["generators"].values():
        if not _has_kind(state):
            raise ValueError(f"expected a kind and a state, got {shorten(state)}")


def _has_kind(state: Any) -> bool:
    return isinstance(_entry(state, "kind"), str) and "state" in state


def _entry(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None
