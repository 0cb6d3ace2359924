"""MNIST and Fashion-MNIST from IDX files: a folder of the user's, or downloaded once.

MNIST: Y. LeCun, L. Bottou, Y. Bengio and P. Haffner, 1998. Fashion-MNIST: H. Xiao, K. Rasul and
R. Vollgraf, arXiv:1708.07747.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from dynsparse.data.download import fetch
from dynsparse.data.idx import read_idx
from dynsparse.data.pictures import CLASSES, PIXELS, SIDE, DataSet, Pictures
from dynsparse.files.cache import cache_folder

_TRAIN_IMAGES = "train-images-idx3-ubyte"
_TRAIN_LABELS = "train-labels-idx1-ubyte"
_TEST_IMAGES = "t10k-images-idx3-ubyte"
_TEST_LABELS = "t10k-labels-idx1-ubyte"


class Source(NamedTuple):
    """Where a data set is downloaded from: folders to try in order, and the files' checksums.

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
        paths = {file: _find(file, Path(data_dir), name) for file in SOURCES[name].checksums}
    train = _pictures(paths[_TRAIN_IMAGES], paths[_TRAIN_LABELS])
    test = _pictures(paths[_TEST_IMAGES], paths[_TEST_LABELS])
    return DataSet(name, train, test)


def _find(file: str, data_dir: Path, name: str) -> Path:
    if not data_dir.is_dir():
        raise FileNotFoundError(f"expected a folder with the {name} files, got {data_dir}")
    # A folder of its own comes first: it tells two data sets with equal file names apart.
    for folder in (data_dir / name, data_dir):
        for ending in ("", ".gz"):
            if (path := folder / (file + ending)).is_file():
                return path
    raise FileNotFoundError(
        f"expected {file} or {file}.gz in {data_dir} or {data_dir / name}, got neither: "
        "put the file there, or name no data folder to download it"
    )


def _pictures(images_path: Path, labels_path: Path) -> Pictures:
    images = read_idx(images_path, 3)
    labels = read_idx(labels_path, 1)
    if images.shape[1:] != (SIDE, SIDE):
        raise ValueError(
            f"{images_path}: expected pictures of {SIDE}x{SIDE} pixels, "
            f"got {images.shape[1]}x{images.shape[2]}"
        )
    if len(images) != len(labels) or len(images) == 0:
        raise ValueError(
            f"expected as many labels as pictures and at least one, got {len(images)} pictures in "
            f"{images_path} and {len(labels)} labels in {labels_path}"
        )
    if labels.max() >= CLASSES:
        at = int((labels >= CLASSES).argmax())
        raise ValueError(
            f"{labels_path}: expected labels below {CLASSES}, got {labels[at]} at position {at}"
        )
    # torch.tensor copies: the arrays are read-only views of the file's bytes.
    return Pictures(
        torch.tensor(images).reshape(-1, PIXELS).to(torch.float32) / 255,
        torch.tensor(labels).to(torch.int64),
    )
