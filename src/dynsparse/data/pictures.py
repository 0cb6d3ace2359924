"""What a data set of small pictures is: two pairs of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from dynsparse.checks import check_integer

SIDE = 28
PIXELS = SIDE * SIDE
"""How many pixels a picture of each of the sets has."""
CLASSES = 10
"""How many classes each of the sets has."""


@dataclass(frozen=True)
class Pictures:
    """Pictures and labels int64 [n] in [0, 10).

    Grey pictures are float32 [n, 784], rows of pixels in [0, 1]; those of CIFAR-10 are uint8
    [n, 3072], which is a quarter of the memory.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


class DataSet(NamedTuple):
    """The training and the test pictures of the data set `name`."""

    name: str
    train: Pictures
    test: Pictures

    def hold_out(self, count: int) -> DataSet:
        """The last `count` training pictures in place of the test pictures.

        For choosing settings without a look at the test set.

        Raises:
            ValueError: not 0 < count < the number of training pictures.
        """
        total = len(self.train)
        count = check_integer("count", count)
        if not 0 < count < total:
            raise ValueError(
                f"expected to hold out between 1 and {total - 1} of the {total} training pictures, "
                f"got {count}"
            )
        images, labels = self.train.images, self.train.labels
        keep = total - count
        return DataSet(
            self.name,
            Pictures(images[:keep], labels[:keep]),
            Pictures(images[keep:], labels[keep:]),
        )
