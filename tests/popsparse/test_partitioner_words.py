"""Meta-info of tiny matrices, compared with words written by hand from the documented layout."""

import numpy as np
import torch

from dynsparse.pattern import SparsePattern
from popsparse.encoding.buckets import BucketLayout
from popsparse.encoding.partitioner import Partitioner

# 4 x 4:  . a . .    X cut in two, so two rectangles and two buckets. The rows of a rectangle
#         b . . c    go by decreasing length.
#         . . . .
#         . . d .
PATTERN = SparsePattern([0, 1, 1, 3], [1, 0, 3, 2], shape=(4, 4))
VALUES = torch.tensor([1.0, 2.0, 3.0, 4.0])

FORWARD_0 = [
    # id, x, y, nz, next, num_z, rows - 1, first row, workers
    1, 0, 0, 3, 35, 2, 1, 28, 2,
    # per worker: first value, num_z, first z, rows - 1, to its first row from here
    0, 2, 0, 0, 28 - 9,
    2, 2, 0, 0, 32 - 14,
    # grad_weight: workers; per worker: first value, to its row, columns before, non-zeros
    2,
    0, 28 - 20, 0, 1,
    1, 28 - 24, 1, 2,
    # rows: row, columns, column * num_z * 4 bytes
    1, 2, 0, 24,
    0, 1, 8,
    0,
]  # fmt: skip
FORWARD_1 = [
    2, 1, 0, 1, 22, 2, 0, 19, 1,
    0, 2, 0, 0, 19 - 9,
    1,
    0, 19 - 15, 0, 1,
    1, 1, 16,
    0,
]  # fmt: skip
GRAD_A_0 = [
    # Rows are columns of the matrix; no work of grad_weight; values by position.
    1, 0, 0, 3, 31, 2, 2, 19, 2,
    0, 2, 0, 0, 19 - 9,
    0, 2, 0, 1, 23 - 14,
    # row, columns, then position * 4 bytes and column * num_z * 4 bytes
    0, 1, 0, 8,
    1, 1, 8, 0,
    3, 1, 4, 8,
    0,
]  # fmt: skip
GRAD_A_1 = [
    2, 0, 1, 1, 18, 2, 0, 14, 1,
    0, 2, 0, 0, 14 - 9,
    2, 1, 0, 8,
    0,
]  # fmt: skip


def _padded(words, size):
    return [*words, *[0] * (size - len(words))]


def test_element_format():
    layout = BucketLayout(
        rows=4, cols=4, batch=2, partition=(2, 1, 1), nz_elements=4, meta_info_words=40,
        grad_a_words=36, grad_w=True, batch_grain=2, data_bytes=4, workers=2,
    )  # fmt: skip
    partitioner = Partitioner(layout)
    encoded = partitioner.encode(PATTERN, VALUES)
    # Nothing spills: all distances are 0, whose flag is the first of the two in the word.
    overflow = [1, 1, 1, 0b01]
    buckets = [
        *_padded(FORWARD_0, 40), *_padded(GRAD_A_0, 36),
        *_padded(FORWARD_1, 40), *_padded(GRAD_A_1, 36),
    ]  # fmt: skip
    assert encoded.meta_info.dtype == np.uint16
    assert encoded.meta_info.tolist() == overflow + buckets
    assert encoded.nz_values.tolist() == [2, 3, 1, 0, 4, 0, 0, 0]
    assert encoded.info.words_used.tolist() == [36, 23]
    assert encoded.info.grad_a_words_used.tolist() == [32, 19]
    found, values = partitioner.decode(encoded)
    assert found == PATTERN
    assert torch.equal(values, VALUES)


def test_element_format_of_two_byte_values():
    layout = BucketLayout(
        rows=4, cols=4, batch=8, partition=(2, 1, 1), nz_elements=4, meta_info_words=40,
        batch_grain=4, data_bytes=2, workers=2,
    )  # fmt: skip
    encoded = Partitioner(layout).encode(PATTERN, VALUES.half())
    assert encoded.nz_values.dtype == np.float16
    words = encoded.meta_info[4:44].tolist()
    # Two rows x two grains of Z for two workers: a row each.
    assert words[:9] == [1, 0, 0, 3, 26, 8, 1, 19, 2]
    assert words[9:19] == [0, 8, 0, 0, 10, 2, 8, 0, 0, 9]
    assert words[19:27] == [1, 2, 0, 3 * 8 * 2, 0, 1, 1 * 8 * 2, 0]


def test_block_format():
    pattern = SparsePattern([0, 0, 1], [0, 1, 1], shape=(8, 8), block_size=4)
    values = torch.arange(48.0).reshape(3, 4, 4)
    layout = BucketLayout(
        rows=8, cols=8, batch=4, partition=(1, 2, 1), nz_elements=40, meta_info_words=24,
        block=(4, 4), grad_w=True, workers=2,
    )  # fmt: skip
    encoded = Partitioner(layout).encode(pattern, values)
    bucket_0 = [
        # id, x, y, values to the next, words to the next, rows - 1, grad_weight workers
        1, 0, 0, 16, 14, 0, 1,
        0, 11 - 7, 0, 1,
        # first row, blocks - 1, first column of each block
        0, 0, 0,
        0,
    ]  # fmt: skip
    bucket_1 = [
        2, 0, 1, 32, 21, 1, 2,
        0, 15 - 7, 0, 1,
        16, 18 - 11, 0, 1,
        0, 0, 0,
        4, 0, 0,
        0,
    ]  # fmt: skip
    expected = [1, 1, 1, 1, *_padded(bucket_0, 24), *_padded(bucket_1, 24)]
    assert encoded.meta_info.tolist() == expected
    assert encoded.nz_values.tolist() == [*range(16), *[0] * 24, *range(16, 48), *[0] * 8]


def test_spilled_sub_group_and_its_overflow_record():
    pattern = SparsePattern([0, 0, 1, 1], [0, 1, 0, 1], shape=(4, 4))
    layout = BucketLayout(
        rows=4, cols=4, batch=2, partition=(2, 2, 1), nz_elements=2, meta_info_words=24,
        batch_grain=2, workers=2,
    )  # fmt: skip
    encoded = Partitioner(layout).encode(pattern, VALUES)
    # Row 1 does not fit bucket 0 and goes to bucket 1, whose home is (0, 1): bucket 1 is at the
    # tiles of (0, 0) after one step in Y.
    assert encoded.meta_info[:4].tolist() == [1, 2, 1, 0b01]
    kept = [1, 0, 0, 2, 18, 2, 0, 14, 1, 0, 2, 0, 0, 5, 0, 2, 0, 8, 0]
    moved = [1, 0, 0, 2, 18, 2, 0, 14, 1, 0, 2, 0, 0, 5, 1, 2, 0, 8, 0]
    empty = [0] * 24
    assert encoded.meta_info[4:].tolist() == [*_padded(kept, 24), *_padded(moved, 24), *empty * 2]
    assert encoded.nz_values.tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
    assert (encoded.info.spilled, encoded.info.propagated) == (2, 2)
    assert encoded.info.propagation_steps == 1
    assert encoded.info.overflow.kept_offsets == [(0, 1)]
