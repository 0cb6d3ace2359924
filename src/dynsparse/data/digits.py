"""Scikit-learn's handwritten digits, brought to MNIST's format: real data on any machine, offline.

1,797 pictures of 8x8 pixels, after E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten
Digits", UCI Machine Learning Repository, 1998.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dynsparse.data.pictures import PIXELS, SIDE, DataSet, Pictures

_INNER = 20
_TEST = 360
_SPLIT_SEED = 0


def load_digits() -> DataSet:
    """The digits as 1,437 training and 360 test pictures of 28x28.

    Like MNIST's, a digit fills the 20x20 pixels in the middle: the 8x8 pixels are interpolated
    (bilinear) and a border of four empty pixels is put around. The split is one fixed random
    choice, the same in every run: the file's order goes by writer, and a split by position would
    test on other writers than it trained on.

    Raises:
        ModuleNotFoundError: scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "the digits come with scikit-learn, which is missing: pip install 'dynsparse[apps]'"
        ) from None
    bunch = load()
    small = torch.from_numpy(bunch.images).to(torch.float32)[:, None] / 16
    inner = F.interpolate(small, size=(_INNER, _INNER), mode="bilinear", align_corners=False)
    images = F.pad(inner, [(SIDE - _INNER) // 2] * 4).reshape(-1, PIXELS).clamp(0, 1)
    labels = torch.from_numpy(bunch.target).to(torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    test, train = order[:_TEST], order[_TEST:]
    return DataSet(
        "digits", Pictures(images[train], labels[train]), Pictures(images[test], labels[test])
    )
