"""The triplet layer of Graphcore's application equals NumPy."""

import numpy as np
import pytest
import torch

import dynsparse as ds
import popsparse
from popsparse import SparseFcLayer, Triplets

OPTIONS = {"metaInfoBucketOversizeProportion": "1"}


def triplets(block=1, seed=0, count=6, grid=(4, 3)):
    """Make random unsorted triplets, and the dense [in, out] matrix in NumPy."""
    generator = np.random.default_rng(seed)
    flat = generator.choice(grid[0] * grid[1], count, replace=False)
    rows, cols = np.divmod(flat, grid[1])
    values = generator.normal(size=(count, block, block)).astype(np.float32)
    dense = np.zeros((grid[0] * block, grid[1] * block), np.float32)
    for row, col, value in zip(rows, cols, values, strict=True):
        at = slice(row * block, row * block + block), slice(col * block, col * block + block)
        dense[at] = value
    return Triplets(rows, cols, values.reshape(count) if block == 1 else values), dense


@pytest.mark.parametrize("block", [1, 4])
def test_round_trip(block):
    given, dense = triplets(block)
    np.testing.assert_array_equal(popsparse.dense_from_triplets(dense.shape, *given), dense)
    np.testing.assert_array_equal(popsparse.mask_from_triplets(dense.shape, *given), dense != 0)
    found = popsparse.triplets_from_dense(dense, block)
    order = np.lexsort((given.col_indices, given.row_indices))
    for part, expected in zip(found, given, strict=True):
        np.testing.assert_array_equal(part, expected[order])
    assert found.block_size == block


@pytest.mark.parametrize("target", [None, popsparse.Target.mk2(tiles=6)])
@pytest.mark.parametrize("block", [1, 4])
def test_layer_of_triplets(block, target):
    given, dense = triplets(block)
    shape, options = [2, dense.shape[0]], None if target is None else OPTIONS
    layer = SparseFcLayer.from_triplets(
        dense.shape[1], shape, *given, options, relu=True, use_bias=True, target=target
    )
    x = torch.randn(shape)
    np.testing.assert_allclose(
        layer(x).detach(), np.maximum(x.numpy() @ dense, 0), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_array_equal(layer.extract_dense(), dense)
    np.testing.assert_array_equal(layer.extract_mask(), dense != 0)
    other, dense = triplets(block, seed=1)
    layer.update_triplets(other)
    np.testing.assert_array_equal(layer.extract_dense(), dense)
    np.testing.assert_array_equal(
        popsparse.dense_from_triplets(dense.shape, *layer.get_triplets()), dense
    )


@pytest.mark.parametrize("block", [1, 4])
def test_slots_follow_their_triplets(block):
    given, dense = triplets(block)
    layer = SparseFcLayer.from_triplets(dense.shape[1], [2, dense.shape[0]], *given)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(2, dense.shape[0])).square().sum().backward()
    optimizer.step()
    slots = layer.extract_slot_triplets(optimizer)
    assert slots.keys() == {"exp_avg", "exp_avg_sq"}
    other, _ = triplets(block, seed=1)
    layer.update_triplets(other)
    kept = Triplets(other.row_indices, other.col_indices, np.abs(other.values))
    layer.update_slots_from_triplets(optimizer, {"exp_avg": kept})
    found = layer.extract_slot_triplets(optimizer)["exp_avg"]
    np.testing.assert_array_equal(
        popsparse.dense_from_triplets(dense.shape, *found), np.abs(layer.extract_dense())
    )
    with pytest.raises(ValueError, match="slot exp_avg: its indices are not those"):
        layer.update_slots_from_triplets(optimizer, {"exp_avg": given})
    with pytest.raises(ValueError, match="slot"):
        layer.update_slots_from_triplets(optimizer, {"momentum": kept})


def test_random_layers_and_a_trainer():
    def values(size):
        return np.ones(size)

    made = SparseFcLayer.from_random_generator
    layer = made(16, [2, 24], 0.3, 4, values, np.random.default_rng(0))
    assert layer.pattern.nnz == 8  # ceil(0.3 x 24 blocks)
    few = made(16, [2, 24], None, 1, values, np.random.default_rng(0), max_non_zeros=5)
    assert few.extract_mask().sum() == few.extract_dense().sum() == 5
    before = layer.extract_mask()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    trainer = ds.RigL(layer, optimizer, total_steps=4, update_interval=1)
    for _ in range(2):
        layer(torch.randn(2, 24)).square().sum().backward()
        trainer.step()
        optimizer.zero_grad()
    assert layer.extract_mask().sum() == before.sum()
    assert (layer.extract_mask() != before).any()


def test_slots_of_updated_patterns_return_to_their_places():
    layer = SparseFcLayer(24, 16, 0.3)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
    trainer = ds.RigL(layer, optimizer, total_steps=8, update_interval=1)
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.randn(2, 24)).square().sum().backward()
        trainer.step()
    assert len(layer.pattern.slots)  # not row-major any more
    momentum = optimizer.state[layer.values]["momentum_buffer"]
    expected = momentum.clone()
    slots = layer.extract_slot_triplets(optimizer)
    momentum.zero_()
    layer.update_slots_from_triplets(optimizer, slots)
    assert torch.equal(momentum, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"density": None}, "expected density or max_non_zeros"),
        ({"density": 1.5}, "density must be .*1.5"),
        ({"density": None, "max_non_zeros": 99}, "max_non_zeros must be at most 24, got 99"),
        ({"indices_initialiser_gen": 3}, "indices_initialiser_gen"),
        ({"matmul_options": OPTIONS}, "target_options need a target"),
    ],
)
def test_invalid_layers_raise(change, message):
    given = {
        "density": 0.5,
        "block_size": 4,
        "values_initialiser_gen": lambda size: np.ones(size),
        "indices_initialiser_gen": np.random.default_rng(0),
    } | change
    with pytest.raises((ValueError, TypeError), match=message):
        SparseFcLayer.from_random_generator(16, [2, 24], **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([0], [0, 1], [1.0]), "differ in length"),
        (([0, 1], [0, 1], [1.0]), "expected a value for each of 2 indices, got 1"),
        (([0], [0], np.ones((1, 2, 3))), "must be .n. or .n, b, b., got .1, 2, 3."),
        (([9], [0], [1.0]), "rows|cols"),
    ],
)
def test_invalid_triplets_raise(given, message):
    with pytest.raises(ValueError, match=message):
        popsparse.dense_from_triplets((4, 4), *given)
