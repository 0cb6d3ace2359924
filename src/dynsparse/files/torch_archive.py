"""Whether what `torch.save` wrote can be read within its own size.

`torch.load(weights_only=True)` runs no code. What it does not bound is memory: an archive may hold
deflated members, a hundred bytes may ask for a buffer of gigabytes by its number, and a few lists
of lists stand for more values than there are atoms.
"""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from typing import Any

import torch
from torch import Tensor

from dynsparse.files.limits import HOW_TO_RAISE, LimitError, read_limit

_START, _END = b"PK\x03\x04", b"PK\x05\x06"
_END_SIZE = 22
_MOST_DEPTH = 100
_VALUE = 16  # bytes of memory for one value, roughly
# What makes memory from a number, or from a text in more than linear time. torch.load lets them
# through; no tensor, number, text or container of them is saved by these names.
_REFUSED = {
    "builtins.bytearray", "torch.Tensor", "torch.storage.TypedStorage",
    "torch._utils._rebuild_qtensor", "torch._utils._rebuild_wrapper_subclass",
}  # fmt: skip
_SLOW_CODECS = ("punycode", "idna")
_NAMES = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINGET", "LONG_BINGET"}


def check_archive(content: bytes) -> None:
    """Raise unless `torch.load` takes no more memory for `content` than its size.

    Raises:
        ValueError: no archive of torch.save, members that are packed or overlap, names that make
            memory from numbers.
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
        members = archive.infolist()
        # Python's and torch's reader must see one directory: the last thing there is.
        if content[:4] != _START or content[-_END_SIZE:][:4] != _END:
            raise ValueError("its archive has something before or after it")
        for member in members:
            if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
                raise ValueError(f"expected members that are not packed, got {member.filename!r}")
            if member.file_size != member.compress_size:
                raise ValueError(f"the sizes of {member.filename!r} do not agree")
        if sum(member.file_size for member in members) > len(content):
            raise ValueError("its members promise more than the file has")
        pickles = [one for one in members if one.filename.endswith("/data.pkl")]
        if len(pickles) != 1 or len({one.filename for one in members}) != len(members):
            raise ValueError("expected the members that torch.save writes")
        _check_names(archive.read(pickles[0]))
    except (OSError, EOFError, RuntimeError, struct.error, zipfile.BadZipFile) as error:
        raise ValueError(str(error)) from None


def _check_names(content: bytes) -> None:
    """The names that the data is made by, looked at without making anything."""
    after_storage = encodes = False
    storages: set[Any] = set()  # places in the memo that hold the untyped storage
    slow = None
    for operation, argument, _ in pickletools.genops(content):
        name = operation.name
        if after_storage and name in ("BINPUT", "LONG_BINPUT"):
            storages.add(argument)
            continue
        if after_storage and name not in _NAMES:
            # As the type of a stored tensor it is followed by the tensor's key; called, by a size.
            raise ValueError("expected tensors, got torch.storage.UntypedStorage by itself")
        after_storage = name in ("BINGET", "LONG_BINGET") and argument in storages
        if name == "GLOBAL":
            argument = _full_name(str(argument))
            if argument in _REFUSED or (
                argument.startswith("torch") and argument.endswith("Tensor")
            ):
                raise ValueError(f"expected tensors, got {argument[:80]}")
            after_storage = argument == "torch.storage.UntypedStorage"
            encodes |= argument == "_codecs.encode"
        elif isinstance(argument, str) and any(one in argument.lower() for one in _SLOW_CODECS):
            slow = argument
    if encodes and slow is not None:
        raise ValueError(f"expected bytes as torch.save writes them, got {slow[:40]!r}")


def _full_name(argument: str) -> str:
    """What torch looks up for "module name": the names of Python 2 are other ones of the same, and
    where the module ends does not matter."""
    module, _, name = argument.partition(" ")
    return ".".join(NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name)))


def check_content(value: Any, size: int) -> None:
    """Raise unless `value`, read from `size` bytes, stands for what `size` allows.

    Containers within themselves, deeper than 100, or shared so often that they stand for millions
    of values; tensors that stand for far more elements than are stored.

    Raises:
        ValueError: see above.
    """
    limit = read_limit(size)
    bytes_left = limit
    # values that each container stands for, and its depth; None while it is being looked into
    known: dict[int, tuple[int, int] | None] = {}
    stack = [(value, False)]
    while stack:
        one, entered = stack.pop()
        inner = _inner(one)
        if inner is None:
            if isinstance(one, Tensor) and one.layout == torch.strided:
                bytes_left -= one.numel() * one.element_size()
                if bytes_left < 0:
                    raise LimitError(
                        f"expected tensors of at most {limit:,} bytes, got more: {HOW_TO_RAISE}"
                    )
            continue
        if entered:
            parts = [known.get(id(part)) or (1, 0) for part in inner]
            count = 1 + sum(part[0] for part in parts)
            depth = 1 + max((part[1] for part in parts), default=0)
            if count > limit // _VALUE or depth > _MOST_DEPTH:
                raise LimitError(
                    f"expected at most {limit // _VALUE:,} values nested at most {_MOST_DEPTH} "
                    "deep, got more"
                )
            known[id(one)] = count, depth
        elif id(one) not in known:
            known[id(one)] = None
            stack.append((one, True))
            stack.extend((part, False) for part in inner)
        elif known[id(one)] is None:
            raise ValueError("expected containers, got one that holds itself")


def _inner(value: Any) -> list[Any] | None:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set)):
        return list(value)
    return None
