"""Data sets: scikit-learn's digits, MNIST, Fashion-MNIST and CIFAR-10 as tensors in memory.

`load(name)` gives a `LabelledImages` pair; nothing here touches the network unless a set has to be
downloaded.
"""

from __future__ import annotations

import logging
from pathlib import Path

from dynsparse._core.checks import check_types
from dynsparse.data.images import (
    CIFAR_PIXELS,
    CLASSES,
    PIXELS,
    SOURCES,
    DataSet,
    LabelledImages,
    load_cifar10,
    load_digits,
    load_mnist,
    read_idx,
)

__all__ = [
    "CIFAR_PIXELS",
    "CLASSES",
    "COUNTS",
    "GREY",
    "NAMES",
    "PIXELS",
    "DataSet",
    "LabelledImages",
    "load",
    "read_idx",
]

_log = logging.getLogger(__name__)


GREY = ("digits", *SOURCES)
"""The data sets of grey images of 28x28."""

NAMES = (*GREY, "cifar-10")
"""The data sets that `load` knows."""

COUNTS = {
    "digits": (1437, 360),
    **dict.fromkeys(SOURCES, (60_000, 10_000)),
    "cifar-10": (50_000, 10_000),
}
"""How many training and test images each of them has."""


@check_types
def load(name: str, data_dir: str | Path | None = None) -> DataSet:
    """The data set `name`: "digits", "mnist", "fashion-mnist" or "cifar-10".

    Args:
        name: one of `NAMES`.
        data_dir: for the MNIST sets, the folder with the four IDX files (plain or .gz), or one
            with a folder of that name in it; for CIFAR-10, see `load_cifar10`. Without it they are
            downloaded once, with their checksums, into the user's cache folder. The digits come
            with scikit-learn.

    Raises:
        ValueError: an unknown name, a damaged file, a download with the wrong checksum, or digits
            with a `data_dir`, which they have no use for.
        OSError: a file that is missing or cannot be read, no connection.
    """
    if name not in NAMES:
        raise ValueError(f"expected a data set among {', '.join(NAMES)}, got {name!r}")
    if name == "digits":
        data_set = load_digits()
    elif name == "cifar-10":
        data_set = load_cifar10(data_dir)
    else:
        data_set = load_mnist(name, data_dir)
    _log.info("%s: %d and %d images", name, len(data_set.train), len(data_set.test))
    return data_set
