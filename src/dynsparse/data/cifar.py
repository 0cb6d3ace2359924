"""CIFAR-10 from its binary version: a folder of the user's, or downloaded once.

A. Krizhevsky, 2009, "Learning multiple layers of features from tiny images". The binary version is
read because the other one is a pickle, which may run anything.
"""

from __future__ import annotations

import tarfile
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from dynsparse.data.download import fetch
from dynsparse.data.packed import DAMAGE
from dynsparse.data.pictures import CLASSES, DataSet, Pictures
from dynsparse.files.cache import cache_folder

CIFAR_PIXELS = 3 * 32 * 32
"""Red, green and blue of 32x32 pixels."""

URLS = ("https://www.cs.toronto.edu/~kriz/",)
ARCHIVE = "cifar-10-binary.tar.gz"
CHECKSUM = "md5:c32a1d4ab5d03f1284b67883e8d87530"
"""As its authors' page has it."""

_FOLDER = "cifar-10-batches-bin"
_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST = ("test_batch.bin",)
_RECORD = 1 + CIFAR_PIXELS
_MOST = 10_000  # pictures of a file
# One byte more than there may be tells a file that is too long, without reading all of it.
_LIMIT = _MOST * _RECORD + 1


def load_cifar10(data_dir: str | Path | None = None) -> DataSet:
    """CIFAR-10: pictures uint8 [n, 3072], red, green and blue by rows; labels int64 [n].

    Args:
        data_dir: the folder with cifar-10-binary.tar.gz, or with the six .bin files that are in it
            (or with their folder). Without it the archive is downloaded once, with its checksum,
            into the user's cache folder.

    Raises:
        ValueError: a damaged file, a download with the wrong checksum.
        OSError: a file that is missing or cannot be read, no connection.
    """
    if data_dir is None:
        return _from_archive(fetch(URLS, ARCHIVE, CHECKSUM, cache_folder() / "cifar-10"))
    folder = Path(data_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"expected a folder with {ARCHIVE} or its files, got {folder}")
    for place in (folder, folder / _FOLDER):
        if (place / _TEST[0]).is_file():
            return _from_folder(place)
    if (folder / ARCHIVE).is_file():
        return _from_archive(folder / ARCHIVE)
    raise FileNotFoundError(
        f"expected {ARCHIVE}, or {_TEST[0]} and {_TRAIN[0]} to {_TRAIN[-1]}, in {folder}, got "
        "neither: put them there, or name no data folder to download them"
    )


def _from_folder(folder: Path) -> DataSet:
    files: dict[str, bytes] = {}
    for name in (*_TRAIN, *_TEST):
        with open(folder / name, "rb") as file:
            files[name] = file.read(_LIMIT)
    return _data_set(files, folder)


def _from_archive(path: Path) -> DataSet:
    """The files are read where they are: nothing is unpacked onto the disk."""
    files: dict[str, bytes] = {}
    with open(path, "rb") as raw:
        try:
            with tarfile.open(fileobj=raw, mode="r:gz") as archive:
                for member in archive:
                    name = PurePosixPath(member.name).name
                    content = archive.extractfile(member) if member.isfile() else None
                    if content is not None and name in (*_TRAIN, *_TEST):
                        files[name] = content.read(_LIMIT)
        except (tarfile.TarError, *DAMAGE) as error:
            raise ValueError(f"{path}: damaged archive ({error}); get the file again") from None
    missing = [name for name in (*_TRAIN, *_TEST) if name not in files]
    if missing:
        raise ValueError(f"{path}: expected {missing[0]} in it, got none: get the file again")
    return _data_set(files, path)


def _records(content: bytes, path: Path) -> np.ndarray:
    """uint8 [n, 3073]: labels and pixels."""
    if not content or len(content) % _RECORD:
        size = f"{len(content):,} bytes" if len(content) < _LIMIT else "more"
        raise ValueError(
            f"{path}: expected 1 to {_MOST:,} records of {_RECORD} bytes, got {size}: get the file "
            "again"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, _RECORD)
    if records[:, 0].max() >= CLASSES:
        at = int((records[:, 0] >= CLASSES).argmax())
        raise ValueError(
            f"{path}: expected labels below {CLASSES}, got {records[at, 0]} at position {at}"
        )
    return records


def _data_set(files: dict[str, bytes], place: Path) -> DataSet:
    def pictures(names: tuple[str, ...]) -> Pictures:
        records = np.concatenate([_records(files[name], place / name) for name in names])
        labels = torch.from_numpy(records[:, 0].astype(np.int64))
        return Pictures(torch.from_numpy(records[:, 1:].copy()), labels)

    return DataSet("cifar-10", pictures(_TRAIN), pictures(_TEST))
