"""Inconsistent hand-made Rewirings and indices raise.

Kernels read and write where `source` and the pointers point.
"""

import pytest
import torch

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.pattern import PatternIndex


def before():
    return ds.SparsePattern([0, 0, 1, 2], [0, 2, 1, 2], shape=(3, 3))


def after():
    # (0, 0) left, (1, 0) was grown: the slots come from 1, nowhere, 2, 3.
    return ds.SparsePattern([0, 1, 1, 2], [2, 0, 1, 2], shape=(3, 3))


def by_hand(*source, dtype=torch.int32):
    return ds.pattern.Rewiring(before(), after(), torch.tensor(source, dtype=dtype))


def test_valid_rewiring():
    made = by_hand(1, -1, 2, 3)
    assert repr(made) == "Rewiring(4 -> 4 blocks, 1 dropped, 1 grown)"
    assert made.apply(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [2, 0, 3, 4]
    layer = SparseLinear(3, 3, pattern=before())
    values = layer.values.detach().clone()
    layer.rewire(made)
    assert layer.pattern == after()
    assert torch.equal(layer.values.detach(), torch.stack([values[1], 0 * values[1], *values[2:]]))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ((1, -1, 2), r"source must be \[4\], got \[3\]"),
        ((), r"source must be \[4\], got \[0\]"),
        ((1, -1, 2, 3, 3), r"source must be \[4\], got \[5\]"),
        ((1, -2, 2, 3), r"source must lie in \[-1, 4\), got -2 to 3"),
        ((1, -(2**31), 2, 3), r"source must lie in \[-1, 4\), got -2147483648 to 3"),
        ((1, -1, 2, 4), r"source must lie in \[-1, 4\), got -1 to 4"),
        ((1, -1, 2, 2**31 - 1), r"source must lie in \[-1, 4\)"),
        # Slots that are there, of other positions: foreign, swapped, and one that was grown.
        ((0, -1, 2, 3), "source must lead every block to the slot that held its position"),
        ((1, -1, 3, 2), "source must lead every block to the slot that held its position"),
        ((1, 0, 2, 3), "source must lead every block to the slot that held its position"),
    ],
)
def test_wrong_source_raises(source, message):
    with pytest.raises(ValueError, match=message):
        by_hand(*source)


def test_source_of_another_type_raises():
    with pytest.raises(TypeError, match=r"int32 on the CPU, got torch\.int64"):
        by_hand(1, -1, 2, 3, dtype=torch.int64)
    with pytest.raises(TypeError, match="source must be int32 on the CPU"):
        ds.pattern.Rewiring(before(), after(), torch.zeros(4, dtype=torch.int32, device="meta"))
    with pytest.raises(TypeError, match="source must be a tensor"):
        ds.pattern.Rewiring(before(), after(), [1, -1, 2, 3])


def test_rewiring_of_another_layer_raises_and_changes_nothing():
    layer = SparseLinear(3, 3, pattern=after())
    values = layer.values.detach().clone()
    with pytest.raises(ValueError, match="the rewiring starts from"):
        layer.rewire(by_hand(1, -1, 2, 3))
    assert layer.pattern == after()
    assert torch.equal(layer.values.detach(), values)


@pytest.mark.parametrize("name", ["row_ptr", "col_ptr"])
@pytest.mark.parametrize(
    "pointers",
    [(0, 3, 2, 4), (0, 5, 3, 4), (1, 2, 3, 4), (0, 2, 3, 5), (0, -1, 3, 4), (4, 3, 2, 0)],
)
def test_decreasing_pointers_raise(name, pointers):
    index = PatternIndex(*(tensor.clone() for tensor in before().index))
    index = index._replace(**{name: torch.tensor(pointers, dtype=torch.int32)})
    x, values = torch.ones(2, 3), torch.ones(4)
    with pytest.raises(RuntimeError, match=f"{name} must ascend from 0 to the number of blocks, 4"):
        torch.ops.dynsparse.linear(x, values, *index, None)
    with pytest.raises(RuntimeError, match=f"{name} must ascend from 0 to the number of blocks, 4"):
        ds.ops.linear.linear(x, values, index)
