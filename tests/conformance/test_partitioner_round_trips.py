"""Family J of the conformance cases: 128 round trips through the partitioner, host only."""

import itertools
import math

import numpy as np
import pytest
import torch

from dynsparse.pattern import SparsePattern
from popsparse.encoding.buckets import BucketLayout
from popsparse.encoding.partitioner import Partitioner

SIZES = {"100x100x8": (100, 100, 8), "1000x1000x16": (1000, 1000, 16)}
CASES = list(itertools.product(SIZES, (1, 4), (2, 7), (2, 7), (2, 4), (0.1, 0.05), (0.1, 0.001)))


def _id(case):
    size, block, x, y, z, density, excess = case
    return f"J-{size}-block{block}-x{x}-y{y}-z{z}-density{density}-excess{excess}"


def _round_trip(case, share):
    """Encode and decode; buckets hold the whole matrix divided by `share`, plus the excess."""
    size, block, *partition, density, excess = case
    rows, cols, batch = SIZES[size]
    generator = torch.Generator().manual_seed(CASES.index(case))
    pattern = SparsePattern.random((rows, cols), density, block_size=block, generator=generator)
    values = torch.randn(pattern.values_shape, generator=generator)
    # Room for three sub-groups in each bucket.
    fixed = 7 + 4 * 6 if block > 1 else 9 + 5 * 6 + 4 * 6 + 1
    blocks = math.ceil(pattern.nnz / share)
    layout = BucketLayout(
        rows=rows,
        cols=cols,
        batch=batch,
        partition=tuple(partition),
        nz_elements=math.ceil(blocks * block * block * (1 + excess)),
        meta_info_words=math.ceil((3 * fixed + 2 * rows / block + blocks) * (1 + excess)),
        block=(block, block),
        grad_w=True,
        workers=6,
    )
    partitioner = Partitioner(layout)
    encoded = partitioner.encode(pattern, values)
    found, found_values = partitioner.decode(encoded)
    assert torch.equal(found.rows, pattern.rows)
    assert torch.equal(found.cols, pattern.cols)
    assert torch.equal(found_values, values)
    assert np.count_nonzero(encoded.nz_values) == values.numel()
    assert encoded.info.words_used.max() <= layout.meta_info_words
    assert encoded.info.nz_used.max() <= layout.nz_elements
    return encoded.info


@pytest.mark.parametrize("case", CASES, ids=map(_id, CASES))
def test_round_trip(case):
    """Sizes of the original: every bucket has room for the full matrix, so nothing spills."""
    assert _round_trip(case, share=1).spilled == 0


TIGHT = [case for case in CASES if case[-1] == 0.1]


@pytest.mark.parametrize("case", TIGHT, ids=map(_id, TIGHT))
def test_round_trip_of_tight_buckets(case):
    """The same with an equal share of the matrix per bucket, so that some buckets spill."""
    _round_trip(case, share=math.prod(case[2:5]))


def test_number_of_cases():
    assert len(set(map(_id, CASES))) == 128
