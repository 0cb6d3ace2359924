"""Encoding and decoding: exact, complete, reached by the propagation; errors."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynsparse.pattern import SparsePattern
from popsparse.encoding.buckets import BucketLayout, OverflowInfo
from popsparse.encoding.meta_info import read_buckets
from popsparse.encoding.partitioner import Partitioner
from popsparse.encoding.spilling import BucketOverflowError
from popsparse.formats import COOMatrix
from popsparse.machine.target import Target
from popsparse.planning.params import MatmulParams, SparsityParams
from popsparse.planning.search import plan
from popsparse.programs.dense_weights import operations


def random_pattern(shape, nnz, block=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pattern = SparsePattern.random(shape, nnz=nnz, block_size=block, generator=generator)
    return pattern, torch.randn(pattern.values_shape, generator=generator)


def met(contents, overflow, layout):
    """Count how often the propagation described by the overflow record reaches each nonzero."""
    parts_x, parts_y, parts_z = layout.partition
    home = contents.bucket // parts_z
    count = np.zeros(len(home), int)
    for i, j in [(0, 0), *overflow.kept_offsets]:
        seen_x = (home // parts_y + i) % parts_x
        seen_y = (home % parts_y + j) % parts_y
        count += seen_x * parts_y + seen_y == contents.rectangle
    return count


@st.composite
def cases(draw):
    block = draw(st.sampled_from([1, 1, 2, 4]))
    grid = draw(st.tuples(st.integers(1, 30), st.integers(1, 30)))
    batch_grain = draw(st.sampled_from([1, 2, 4]))
    grains = draw(st.integers(1, 6))
    partition = (
        draw(st.integers(1, min(grid[0], 5))),
        draw(st.integers(1, min(grid[1], 5))),
        draw(st.integers(1, min(grains, 3))),
    )
    nnz = draw(st.integers(0, grid[0] * grid[1]))
    buckets = math.prod(partition)
    slack = draw(st.sampled_from([0, 0, 1, 3, 1000]))
    own = block == 1 and draw(st.booleans())
    capacity = min(-(-nnz // buckets) + slack, nnz)
    sub_groups = buckets + 1
    words = sub_groups * 64 + 3 * capacity + 8
    layout = BucketLayout(
        rows=grid[0] * block,
        cols=grid[1] * block,
        batch=grains * batch_grain,
        partition=partition,
        nz_elements=capacity * block * block + draw(st.sampled_from([0, 1])) * (block > 1),
        meta_info_words=words,
        grad_a_words=words + capacity if own else 0,
        block=(block, block),
        grad_w=draw(st.booleans()),
        batch_grain=batch_grain,
        data_bytes=draw(st.sampled_from([2, 4])),
        workers=draw(st.sampled_from([1, 2, 6])),
    )
    flags = {
        "optimise_for_speed": draw(st.booleans()),
        "use_actual_worker_split_costs": draw(st.booleans()),
    }
    return layout, block, nnz, flags, draw(st.integers(0, 2**31))


@settings(deadline=None, max_examples=300)
@given(cases())
def test_round_trip(case):
    layout, block, nnz, flags, seed = case
    pattern, values = random_pattern((layout.rows, layout.cols), nnz, block, seed)
    partitioner = Partitioner(layout, options=flags)
    encoded = partitioner.encode(pattern, values)
    found, found_values = partitioner.decode(encoded)
    assert found == pattern
    assert torch.equal(found_values, values)
    info = encoded.info
    assert int(info.nz_used.sum()) == values.numel()
    assert info.propagated <= info.spilled

    words = encoded.meta_info[layout.overflow_words :]
    overflow = OverflowInfo.from_words(encoded.meta_info, layout.partition)
    assert overflow.words().tolist() == info.overflow.words().tolist()
    contents = read_buckets(words, layout)
    assert (met(contents, overflow, layout) == 1).all()
    if layout.grad_a_words:
        own = read_buckets(words, layout, grad_a=True)
        columns = [np.stack(c)[:, np.lexsort(np.stack(c)[[4, 0]])] for c in (contents, own)]
        assert np.array_equal(*columns)


def test_spills_go_to_the_nearest_bucket():
    """One nonzero too many in (0, 2) goes to (0, 1), reached after one step of Y."""
    pattern = SparsePattern([0, 0, 1], [4, 5, 4], shape=(2, 8))
    layout = BucketLayout(
        rows=2, cols=8, batch=1, partition=(1, 4, 1), nz_elements=2, meta_info_words=99
    )
    encoded = Partitioner(layout).encode(pattern, torch.ones(3))
    assert encoded.info.nz_used.tolist() == [0, 1, 2, 0]
    assert encoded.info.overflow.kept_offsets == [(0, 1)]
    emptiest = Partitioner(layout, options={"optimise_for_speed": False}).encode(
        pattern, torch.ones(3)
    )
    assert emptiest.info.nz_used.tolist() == [1, 0, 2, 0]
    assert emptiest.info.overflow.kept_offsets == [(0, 1), (0, 2)]


def test_partners_along_z_are_filled_first_without_cost():
    pattern = SparsePattern([0, 0, 0, 1], [0, 1, 2, 0], shape=(2, 6))
    layout = BucketLayout(
        rows=2, cols=6, batch=2, partition=(1, 2, 2), nz_elements=2, meta_info_words=99
    )
    encoded = Partitioner(layout).encode(pattern, torch.ones(4))
    assert encoded.info.nz_used.tolist() == [2, 2, 0, 0]
    assert encoded.info.propagation_steps == 0


def test_equal_pieces_over_z():
    """41 blocks over 32 partners: 21 parts of about two, and 11 empty buckets."""
    pattern = SparsePattern([0] * 41, range(41), shape=(1, 41))
    layout = BucketLayout(
        rows=1, cols=41, batch=32, partition=(1, 1, 32), nz_elements=4, meta_info_words=99
    )
    encoded = Partitioner(layout).encode(pattern, torch.ones(41))
    cuts = [i * 41 // 21 for i in range(22)]
    assert encoded.info.nz_used.tolist() == [*np.diff(cuts), *[0] * 11]


def test_actual_worker_costs_make_room():
    """Sub-groups of one row use one worker of six: 25 words less each."""
    pattern = SparsePattern([0, 1, 2, 3], [0, 0, 0, 0], shape=(4, 1))
    layout = BucketLayout(
        rows=4, cols=1, batch=1, partition=(4, 1, 1), nz_elements=1, meta_info_words=20
    )
    with pytest.raises(BucketOverflowError):
        Partitioner(layout).encode(pattern, torch.ones(4))
    partitioner = Partitioner(layout, options={"use_actual_worker_split_costs": True})
    assert partitioner.decode(partitioner.encode(pattern, torch.ones(4)))[0] == pattern


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(60, 330), st.integers(0, 150))
def test_tight_buckets_of_grad_input(seed, own, others):
    """Either they fit and hold the same blocks, or the error names the buckets that overflow."""
    mask = random_pattern((24, 30), others, seed=seed)[0].to_mask()
    mask[:8, :15] = True  # A full rectangle needs 310 words.
    pattern = SparsePattern.from_mask(mask)
    values = torch.ones(pattern.nnz)
    layout = BucketLayout(
        rows=24, cols=30, batch=2, partition=(3, 2, 1), nz_elements=720, meta_info_words=4000,
        grad_a_words=own,
    )  # fmt: skip
    partitioner = Partitioner(layout)
    try:
        encoded = partitioner.encode(pattern, values)
    except BucketOverflowError as error:
        assert "are full in grad_input's meta-info" in str(error)  # noqa: PT017
        return
    assert (encoded.info.grad_a_words_used <= own).all()
    assert (encoded.info.spilled > 0) == (own < 310)
    assert partitioner.decode(encoded)[0] == pattern
    words = encoded.meta_info[layout.overflow_words :]
    forward, turned = (np.stack(read_buckets(words, layout, grad_a=own)) for own in (False, True))
    turned = turned[:, np.lexsort(turned[[4, 0]])]
    assert np.array_equal(forward, turned)


def test_groups_have_separate_buckets():
    params = MatmulParams.create_with_nz_ratio(SparsityParams(1), 0.1, 2, 64, 48, 8)
    partitioner = Partitioner.for_params(Target.mk2(tiles=16), "float32", params)
    pairs = [random_pattern((64, 48), 300, seed=seed) for seed in (1, 2)]
    encoded = partitioner.encode([p for p, _ in pairs], [v for _, v in pairs])
    for (pattern, values), (found, found_values) in zip(
        pairs, partitioner.decode(encoded), strict=True
    ):
        assert found == pattern
        assert torch.equal(found_values, values)
    matrix = COOMatrix.from_pattern(*pairs[0])
    mixed = partitioner.encode([matrix, pairs[1][0]], [None, pairs[1][1]])
    assert np.array_equal(mixed.meta_info, encoded.meta_info)
    assert np.array_equal(mixed.nz_values, encoded.nz_values)
    with pytest.raises(ValueError, match="pattern must be a sequence of 2, one for each group"):
        partitioner.encode(*pairs[0])


def test_formats_and_non_square_blocks():
    layout = BucketLayout(
        rows=24, cols=24, batch=4, partition=(3, 2, 1), nz_elements=64, meta_info_words=200,
        block=(8, 4),
    )  # fmt: skip
    partitioner = Partitioner(layout)
    data = np.arange(1.0, 1.0 + 3 * 32)
    matrix = COOMatrix(data, [4, 20, 8], [8, 0, 0], (24, 24), (8, 4))
    encoded = partitioner.encode(matrix)
    assert partitioner.decode(encoded) == matrix.canonical()
    assert partitioner.encode(matrix.to_csc()).nz_values.tolist() == encoded.nz_values.tolist()
    with pytest.raises(ValueError, match="brings its own values"):
        partitioner.encode(matrix, data)
    twice = COOMatrix(data, [4, 4, 8], [8, 8, 0], (24, 24), (8, 4))
    with pytest.raises(ValueError, match="a position of the matrix is stored twice"):
        partitioner.encode(twice)


def test_values_follow_a_pattern_without_encoding_it_again():
    pattern, values = random_pattern((20, 30), 100)
    layout = BucketLayout(
        rows=20, cols=30, batch=2, partition=(2, 3, 1), nz_elements=30, meta_info_words=200
    )
    partitioner = Partitioner(layout)
    encoded = partitioner.encode_pattern(pattern)
    again = encoded.place(2 * values.numpy())
    assert np.array_equal(again, 2 * partitioner.encode(pattern, values).nz_values)
    assert np.array_equal(encoded.gather(again), 2 * values.numpy())
    with pytest.raises(ValueError, match=r"nz_values must have the shape \[180\], got \[3\]"):
        encoded.gather(np.zeros(3))


@pytest.mark.parametrize("use_dense", [False, True])
@pytest.mark.parametrize("block", [1, 4, 16])  # 16 x 16 blocks of float32 are cut into four
def test_slots_may_have_any_order(block, use_dense):
    """As after updates on the CPU, which give dropped slots to grown blocks."""
    constraints = {"plan_constraints": {"use_dense": True}} if use_dense else {}
    planned = plan(64, 48, 8, 0.5, block, "float32", Target(tiles=4), options=constraints)
    partitioner = operations(planned).partitioner(planned)
    pattern, values = random_pattern((64, 48), 6, block)
    order = [3, 0, 5, 1, 4, 2]
    updated = SparsePattern._from_slot_coordinates(
        pattern.rows[order], pattern.cols[order], shape=(64, 48), block_size=block
    )
    encoded, expected = (
        partitioner.encode(updated, values[order]),
        partitioner.encode(pattern, values),
    )
    assert np.array_equal(encoded.meta_info, expected.meta_info)
    assert np.array_equal(encoded.nz_values, expected.nz_values)
    assert np.array_equal(encoded.pattern.gather(encoded.nz_values), values[order])


@pytest.mark.parametrize("use_dense", [False, True])
@pytest.mark.parametrize("block", [1, 4])
def test_values_of_another_shape_raise(block, use_dense):
    constraints = {"plan_constraints": {"use_dense": True}} if use_dense else {}
    planned = plan(16, 24, 8, 0.3, block, "float32", Target(tiles=4), options=constraints)
    partitioner = operations(planned).partitioner(planned)
    pattern, values = random_pattern((16, 24), 5, block)
    encoded = partitioner.encode(pattern, values).pattern
    values = values.numpy()
    assert encoded.values_shape == values.shape
    for wrong in (values[:1], values[None], np.moveaxis(values, 0, -1)[..., :3]):
        with pytest.raises(ValueError, match=r"values must have the shape \[5.*\], got \["):
            encoded.place(wrong)


def test_example_of_the_documentation_runs():
    page = Path(__file__).parents[2] / "docs" / "popsparse-partitioner.md"
    code = page.read_text().split("```python\n")[1].split("```")[0]
    exec(compile(code, str(page), "exec"), {})
