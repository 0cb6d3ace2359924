"""Errors of the partitioner: capacity, shapes, damaged words."""

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynsparse.pattern import SparsePattern
from popsparse.encoding.buckets import BucketLayout
from popsparse.encoding.partitioner import Partitioner
from popsparse.encoding.spilling import BucketOverflowError
from popsparse.machine.target import Target
from popsparse.planning.params import FullyConnectedParams, SparsityParams

SIZES = {
    "rows": 12, "cols": 12, "batch": 4, "partition": (2, 2, 1), "nz_elements": 12,
    "meta_info_words": 120, "workers": 2,
}  # fmt: skip


def layout(**changes):
    return BucketLayout(**{**SIZES, **changes})


def pattern_of(nnz, shape=(12, 12), block=1):
    generator = torch.Generator().manual_seed(nnz)
    return SparsePattern.random(shape, nnz=nnz, block_size=block, generator=generator)


def test_52_more_nonzeros_than_capacity():
    with pytest.raises(BucketOverflowError) as caught:
        Partitioner(layout()).encode_pattern(pattern_of(60))
    message = str(caught.value)
    assert "buckets overflow: 12 of 60 non-zeros" in message
    assert "all buckets together hold 476 words and 48 values" in message
    assert "48 of them taken" in message
    assert "raise meta_info_bucket_oversize_proportion (now 0.3; about 0.71 should do)" in message
    assert caught.value.left == 12


@pytest.mark.parametrize("block", [1, 8])
def test_52_advised_proportion_works(block):
    """With twice the planned nonzeros, follow the advice until they fit."""
    params = FullyConnectedParams.create_with_nz_ratio(SparsityParams(block), 0.05, 16, 1, 256, 256)
    pattern = pattern_of(6554 // block**2, (256, 256), block)
    options = {"meta_info_bucket_oversize_proportion": 0.1, "do_grad_a_pass": True,
               "shared_buckets": False}  # fmt: skip
    for _ in range(4):
        partitioner = Partitioner.for_params(Target.mk2(tiles=24), "float32", params, options)
        try:
            encoded = partitioner.encode_pattern(pattern)
        except BucketOverflowError as error:
            advised = float(str(error).split("about ")[1].split(" ")[0])
            assert advised > options["meta_info_bucket_oversize_proportion"]
            options["meta_info_bucket_oversize_proportion"] = advised
    assert options["meta_info_bucket_oversize_proportion"] > 0.1
    assert partitioner.decode(encoded.meta_info, np.ones(encoded.nz_size))[0] == pattern


def test_52_forced_spills_with_one_bucket():
    one = layout(partition=(1, 1, 1))
    with pytest.raises(BucketOverflowError, match="nothing may stay in its own bucket"):
        Partitioner(one, options={"force_bucket_spills": True}).encode_pattern(pattern_of(3))


def test_48_more_parts_than_grains():
    with pytest.raises(ValueError, match="Y has 3 grains and cannot be cut into 4 parts"):
        layout(cols=12, block=(4, 4), partition=(2, 4, 1))
    with pytest.raises(ValueError, match="Z has 1 grains and cannot be cut into 2 parts"):
        layout(batch=4, batch_grain=4, partition=(1, 1, 2))


def test_44_another_block_or_shape():
    partitioner = Partitioner(layout())
    with pytest.raises(ValueError, match=r"with blocks of \(1, 1\), got .*\(4, 4\)"):
        partitioner.encode(pattern_of(2, block=4), torch.ones(2, 4, 4))
    with pytest.raises(ValueError, match=r"got \(12, 13\)"):
        partitioner.encode(pattern_of(2, (12, 13)), torch.ones(2))


def test_wrong_types():
    partitioner = Partitioner(layout())
    with pytest.raises(TypeError, match="expected a SparsePattern or a SparseMatrix, got list"):
        partitioner.encode([1, 2], torch.ones(2))


def test_57_58_sizes_of_decoded_arrays():
    partitioner = Partitioner(layout())
    encoded = partitioner.encode(pattern_of(9), torch.ones(9))
    with pytest.raises(ValueError, match=r"meta_info must have the shape \[484\], got \[483\]"):
        partitioner.decode(encoded.meta_info[1:], encoded.nz_values)
    with pytest.raises(ValueError, match=r"nz_values must have the shape \[48\], got \[47\]"):
        partitioner.decode(encoded.meta_info, encoded.nz_values[1:])


# Word of bucket 0's first sub-group (element format, one worker entry before the rows) -> message.
BROKEN = {
    "59-id": (0, 5, r"sub-group id outside 2 x 2"),
    "59-id-and-x": (1, 1, "sub-group id and its x, y differ"),
    "60-rows": (6, 6, "more rows than the rectangle has"),
    "61-row": (19, 6, "row outside its rectangle"),
    "62-columns": (20, 7, "number of columns out of range"),
    "63-column": (21, 6 * 16, "column outside its rectangle"),
    "63-column-grain": (21, 5, "a column that is not a multiple of 16"),
    "64-next-short": (4, 8, "offset to the next sub-group shorter than its header"),
    "64-next-far": (4, 120, "offset to the next sub-group past the bucket"),
    "65-nz": (3, 13, "more non-zeros than 12"),
    "nz-and-rows-differ": (3, 5, "number of non-zeros and rows differ"),
    "first-row-far": (7, 100, "a row reaches past its end"),
}


@pytest.mark.parametrize(("word", "value", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_words(word, value, message):
    partitioner = Partitioner(layout())
    rows, cols = [0, 0, 0, 1], [0, 2, 4, 1]
    encoded = partitioner.encode(SparsePattern(rows, cols, shape=(12, 12)), torch.ones(4))
    broken = encoded.meta_info.copy()
    assert broken[4 + 7] == 19
    broken[4 + word] = value
    with pytest.raises(ValueError, match=f"meta-info of bucket 0: {message}"):
        partitioner.decode(broken, encoded.nz_values)


def test_broken_end():
    partitioner = Partitioner(layout(meta_info_words=9))
    with pytest.raises(ValueError, match="bucket 0: a sub-group header reaches past the bucket"):
        partitioner.decode(np.ones(40, np.uint16), np.ones(48))


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_damaged_word_raises_or_decodes_to_a_pattern(data):
    """No other error is raised, whatever the words."""
    block = data.draw(st.sampled_from([1, 4]))
    partitioner = Partitioner(layout(block=(block, block), nz_elements=12 * block**2))
    pattern = pattern_of(6, block=block)
    encoded = partitioner.encode(pattern, torch.ones(pattern.values_shape))
    broken = encoded.meta_info.copy()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 60)) + 4 + 120 * data.draw(st.integers(0, 3))
        broken[at] = data.draw(st.integers(0, 65535) | st.integers(0, 30))
    with contextlib.suppress(ValueError):
        partitioner.decode(broken, encoded.nz_values)
