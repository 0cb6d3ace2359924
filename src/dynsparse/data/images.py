"""Data sets of small images: the digits, MNIST, Fashion-MNIST and CIFAR-10."""

from __future__ import annotations

import math
import struct
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dynsparse._core.checks import check_integer, check_types
from dynsparse._core.files.folders import cache_folder
from dynsparse._core.files.limits import check_regular
from dynsparse.data.download import DAMAGE, fetch, read_unpacked

SIDE = 28
PIXELS = SIDE * SIDE
"""How many pixels an image of each of the sets has."""
CLASSES = 10
"""How many classes each of the sets has."""


@dataclass(frozen=True)
class LabelledImages:
    """Images and labels int64 [n] in [0, 10).

    Grey images are float32 [n, 784], rows of pixels in [0, 1]; those of CIFAR-10 are uint8
    [n, 3072], which is a quarter of the memory.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


class DataSet(NamedTuple):
    """The training and the test images of the data set `name`."""

    name: str
    train: LabelledImages
    test: LabelledImages

    def hold_out(self, count: int) -> DataSet:
        """The last `count` training images in place of the test images.

        For choosing settings without a look at the test set.

        Raises:
            ValueError: not 0 < count < the number of training images.
        """
        total = len(self.train)
        count = check_integer("count", count)
        if not 0 < count < total:
            raise ValueError(
                f"expected to hold out between 1 and {total - 1} of the {total} training images, "
                f"got {count}"
            )
        images, labels = self.train.images, self.train.labels
        keep = total - count
        return DataSet(
            self.name,
            LabelledImages(images[:keep], labels[:keep]),
            LabelledImages(images[keep:], labels[keep:]),
        )


_UNSIGNED_BYTE = 8


@check_types
def read_idx(path: str | Path, dimensions: int) -> np.ndarray:
    """The array in an IDX file of unsigned bytes, plain or gzip (detected by content): uint8.

    Args:
        path: the file.
        dimensions: how many dimensions the array must have; 3 for images, 1 for labels.

    Raises:
        ValueError: not such a file: wrong magic number, another number of dimensions, fewer or
            more bytes than its header promises, a damaged gzip stream, or one that unpacks to more
            than `dynsparse._core.files.limits.read_limit` allows.
        OSError: the file is missing or cannot be read.
    """
    path = Path(path)
    content = read_unpacked(path)
    if len(content) < 4:
        raise ValueError(f"{path}: expected an IDX file, got only {len(content)} bytes")
    zero, code, rank = struct.unpack_from(">HBB", content)
    if zero != 0 or code != _UNSIGNED_BYTE or rank != dimensions:
        raise ValueError(
            f"{path}: expected an IDX file of unsigned bytes with {dimensions} dimension(s) "
            f"(magic 0000080{dimensions}), got the magic {content[:4].hex()}"
        )
    start = 4 + 4 * rank
    if len(content) < start:
        raise ValueError(f"{path}: truncated inside the header; get the file again")
    shape = struct.unpack_from(f">{rank}I", content, 4)
    size, stored = math.prod(shape), len(content) - start
    if stored != size:
        raise ValueError(
            f"{path}: {'truncated' if stored < size else 'damaged'}: expected {size} bytes for the "
            f"shape {shape}, got {stored}; get the file again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


_INNER = 20
_TEST_COUNT = 360
_SPLIT_SEED = 0


def load_digits() -> DataSet:
    """The digits as 1,437 training and 360 test images of 28x28.

    Like MNIST's, a digit fills the 20x20 pixels in the middle: the 8x8 pixels are interpolated
    (bilinear) and surrounded by a border of four empty pixels. The split is random but fixed, the
    same in every run: the file is ordered by writer, and a split by position would test on other
    writers than it trained on.

    Raises:
        ModuleNotFoundError: scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "the digits come with the package scikit-learn: pip install scikit-learn"
        ) from None
    bunch = load()
    small = torch.from_numpy(bunch.images).to(torch.float32)[:, None] / 16
    inner = F.interpolate(small, size=(_INNER, _INNER), mode="bilinear", align_corners=False)
    images = F.pad(inner, [(SIDE - _INNER) // 2] * 4).reshape(-1, PIXELS).clamp(0, 1)
    labels = torch.from_numpy(bunch.target).to(torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    test, train = order[:_TEST_COUNT], order[_TEST_COUNT:]
    return DataSet(
        "digits",
        LabelledImages(images[train], labels[train]),
        LabelledImages(images[test], labels[test]),
    )


_TRAIN_IMAGES = "train-images-idx3-ubyte"
_TRAIN_LABELS = "train-labels-idx1-ubyte"
_TEST_IMAGES = "t10k-images-idx3-ubyte"
_TEST_LABELS = "t10k-labels-idx1-ubyte"


class Source(NamedTuple):
    """The source of a download: folders to try in order, and the checksums of the files.

    `checksums` maps an IDX name to "algorithm:hex" of the file NAME.gz in those folders.
    """

    urls: tuple[str, ...]
    checksums: dict[str, str]


SOURCES = {
    "mnist": Source(
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        {
            _TRAIN_IMAGES: "sha256:"
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            _TRAIN_LABELS: "sha256:"
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            _TEST_IMAGES: "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            _TEST_LABELS: "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
    ),
    "fashion-mnist": Source(
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        {
            _TRAIN_IMAGES: "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            _TRAIN_LABELS: "md5:25c81989df183df01b3e8a0aad5dffbe",
            _TEST_IMAGES: "md5:bef4ecab320f06d8554ea6380940ec79",
            _TEST_LABELS: "md5:bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
}


def load_mnist(name: str, data_dir: str | Path | None = None) -> DataSet:
    """The data set `name` of `SOURCES`; see `dynsparse.data.load`."""
    if data_dir is None:
        folder = cache_folder() / name
        source = SOURCES[name]
        paths = {
            file: fetch(source.urls, file + ".gz", checksum, folder)
            for file, checksum in source.checksums.items()
        }
    else:
        paths = {file: _find_file(file, Path(data_dir), name) for file in SOURCES[name].checksums}
    train = _read_images(paths[_TRAIN_IMAGES], paths[_TRAIN_LABELS])
    test = _read_images(paths[_TEST_IMAGES], paths[_TEST_LABELS])
    return DataSet(name, train, test)


def _find_file(file: str, data_dir: Path, name: str) -> Path:
    if not data_dir.is_dir():
        raise FileNotFoundError(f"expected a folder with the {name} files, got {data_dir}")
    # A folder with the data set's name comes first: file names are the same for two data sets.
    for folder in (data_dir / name, data_dir):
        for ending in ("", ".gz"):
            if (path := folder / (file + ending)).is_file():
                return path
    raise FileNotFoundError(
        f"expected {file} or {file}.gz in {data_dir} or {data_dir / name}, got neither: "
        "put the file there, or leave the data folder out to download it"
    )


def _read_images(images_path: Path, labels_path: Path) -> LabelledImages:
    images = read_idx(images_path, 3)
    labels = read_idx(labels_path, 1)
    if images.shape[1:] != (SIDE, SIDE):
        raise ValueError(
            f"{images_path}: expected images of {SIDE}x{SIDE} pixels, "
            f"got {images.shape[1]}x{images.shape[2]}"
        )
    if len(images) != len(labels) or len(images) == 0:
        raise ValueError(
            f"expected as many labels as images and at least one, got {len(images)} images in "
            f"{images_path} and {len(labels)} labels in {labels_path}"
        )
    if labels.max() >= CLASSES:
        at = int((labels >= CLASSES).argmax())
        raise ValueError(
            f"{labels_path}: expected labels below {CLASSES}, got {labels[at]} at position {at}"
        )
    # torch.tensor copies: the arrays are read-only views of the file's bytes.
    return LabelledImages(
        torch.tensor(images).reshape(-1, PIXELS).to(torch.float32) / 255,
        torch.tensor(labels).to(torch.int64),
    )


CIFAR_PIXELS = 3 * 32 * 32
"""Red, green and blue of 32x32 pixels."""

CIFAR_URLS = ("https://www.cs.toronto.edu/~kriz/",)
CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"
CIFAR_CHECKSUM = "md5:c32a1d4ab5d03f1284b67883e8d87530"
"""As its authors' page has it."""

_FOLDER = "cifar-10-batches-bin"
_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST = ("test_batch.bin",)
_RECORD = 1 + CIFAR_PIXELS
_MOST = 10_000  # images of a file
# One more byte than valid is read, which detects a file that is too long without reading all.
_LIMIT = _MOST * _RECORD + 1


def load_cifar10(data_dir: str | Path | None = None) -> DataSet:
    """CIFAR-10: images uint8 [n, 3072], red, green and blue by rows; labels int64 [n].

    Args:
        data_dir: the folder with cifar-10-binary.tar.gz, or with the six .bin files that are in it
            (or with their folder). Without it the archive is downloaded once, with its checksum,
            into the user's cache folder.

    Raises:
        ValueError: a damaged file, a download with the wrong checksum.
        OSError: a file that is missing or cannot be read, no connection.
    """
    if data_dir is None:
        return _from_archive(
            fetch(CIFAR_URLS, CIFAR_ARCHIVE, CIFAR_CHECKSUM, cache_folder() / "cifar-10")
        )
    folder = Path(data_dir)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"expected a folder with {CIFAR_ARCHIVE} or its files, got {folder}"
        )
    for place in (folder, folder / _FOLDER):
        if (place / _TEST[0]).is_file():
            return _from_folder(place)
    if (folder / CIFAR_ARCHIVE).is_file():
        return _from_archive(folder / CIFAR_ARCHIVE)
    raise FileNotFoundError(
        f"expected {CIFAR_ARCHIVE}, or {_TEST[0]} and {_TRAIN[0]} to {_TRAIN[-1]}, in {folder}, "
        "got neither: put them there, or leave the data folder out to download them"
    )


def _from_folder(folder: Path) -> DataSet:
    files: dict[str, bytes] = {}
    for name in (*_TRAIN, *_TEST):
        check_regular(folder / name)
        with open(folder / name, "rb") as file:
            files[name] = file.read(_LIMIT)
    return _make_data_set(files, folder)


def _from_archive(path: Path) -> DataSet:
    """Read the files inside the archive; nothing is unpacked onto the disk."""
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
    return _make_data_set(files, path)


def _read_records(content: bytes, path: Path) -> np.ndarray:
    """The checked records of a file: uint8 [n, 3073], a label and the pixels each."""
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


def _make_data_set(files: dict[str, bytes], place: Path) -> DataSet:
    def images(names: tuple[str, ...]) -> LabelledImages:
        records = np.concatenate([_read_records(files[name], place / name) for name in names])
        labels = torch.from_numpy(records[:, 0].astype(np.int64))
        return LabelledImages(torch.from_numpy(records[:, 1:].copy()), labels)

    return DataSet("cifar-10", images(_TRAIN), images(_TEST))
