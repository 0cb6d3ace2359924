"""The overflow record: words, kept offsets, predicted steps."""

import numpy as np
import pytest

from popsparse.encoding.buckets import OverflowInfo


def info(x, y, z, used, partition):
    return OverflowInfo(x, y, z, np.array(used, bool), partition)


def test_words_by_hand():
    # Nx = 5: distances 0, 1 and 4 are used; two flags a word, the lower distance in the lower bit.
    record = info(5, 3, 2, [1, 1, 0, 0, 1], (5, 3, 2))
    assert record.words().tolist() == [5, 3, 2, 0b11, 0b00, 0b01]
    back = OverflowInfo.from_words(record.words(), (5, 3, 2))
    assert (back.x, back.y, back.z) == (5, 3, 2)
    assert back.used_x.tolist() == record.used_x.tolist()


@pytest.mark.parametrize(
    ("record", "offsets", "steps"),
    [
        pytest.param(info(1, 1, 4, [1, 0], (2, 3, 4)), [], 0, id="nothing-travels"),
        pytest.param(info(1, 3, 4, [1, 0], (2, 3, 4)), [(0, 1), (0, 2)], 8, id="in-y"),
        pytest.param(info(3, 2, 1, [1, 0, 1], (3, 2, 1)), [(0, 1), (2, 0), (2, 1)], 3, id="skip-x"),
        pytest.param(info(2, 2, 1, [0, 1], (2, 2, 1)), [(1, 0), (1, 1)], 2, id="all-leave-x"),
        pytest.param(info(3, 1, 2, [1, 1, 1], (3, 1, 2)), [(1, 0), (2, 0)], 4, id="one-part-of-y"),
    ],
)
def test_kept_offsets(record, offsets, steps):
    assert record.kept_offsets == offsets
    assert record.propagation_steps == steps


def test_groups_are_merged_to_the_maximum():
    first = info(1, 2, 1, [1, 0, 0], (3, 4, 1))
    second = info(2, 4, 1, [1, 1, 0], (3, 4, 1))
    merged = OverflowInfo.merge([first, second])
    assert (merged.x, merged.y) == (2, 4)
    assert merged.used_x.tolist() == [True, True, False]
    assert OverflowInfo.merge([first, first]).y == 2
