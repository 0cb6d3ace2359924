"""Which columns of a row are present, as bits, one per element, made once per pattern.

Kernels for small batches and the laying out of single elements read them in place of column
numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse import native
from dynsparse.ops.linear.layer_index import LayerIndex


def masks_of(p: LayerIndex) -> Tensor | None:
    """int16 [out, ceil(in / 16)]: bit c % 16 of word c / 16 is column c; None for blocks."""
    masks = p.masks
    if masks is None and p.block_size == 1:
        library = native.load()
        assert library is not None
        masks = torch.empty(p.out_features, -(-p.in_features // 16), dtype=torch.int16)
        library.dynsparse_small_masks(
            p.row_ptr.data_ptr(),
            p.cols.data_ptr(),
            masks.data_ptr(),
            p.out_features,
            p.in_features,
            torch.get_num_threads(),
        )
        # Only now may other threads see them: the kernel has let them run meanwhile.
        if p.order is not None:  # of a thin index nothing stays
            p.masks = masks
    return masks
