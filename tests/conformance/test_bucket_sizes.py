"""The worked bucket sizes of the reference (section 3.3)."""

import pytest

from popsparse.machine.dtypes import FLOAT, HALF
from popsparse.planning import cost as sizes
from popsparse.planning.params import overflow_words

H, F = HALF, FLOAT
CASES = [
    # in, out, dtype, partials, ratio, block, partition, grad_weight, oversize,
    # -> values, forward words, grad_input words, overflow words
    (512, 512, H, F, 0.01, 1, (6, 4, 1), False, 0.3, (144, 408, 664, 6)),
    (512, 512, H, F, 0.1, 1, (6, 4, 1), True, 0.3, (1422, 1816, 3408, 6)),
    (512, 512, F, F, 0.1, 1, (4, 3, 2), True, 0.3, (1422, 3468, 6304, 5)),
    (1024, 1024, H, F, 0.1, 16, (8, 3, 1), True, 0.3, (5888, 116, None, 7)),
    (1024, 1024, H, H, 0.1, 4, (8, 3, 1), True, 0.3, (5696, 520, None, 7)),
    (4096, 4096, H, F, 0.05, 8, (46, 32, 1), False, 0.3, (768, 52, None, 26)),
    (784, 300, H, F, 0.1, 1, (20, 14, 4), False, 0.5, (32, 260, 484, 13)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}x{c[1]}-{c[2]}-block{c[5]}-{c[4]}")
def test_worked_bucket_sizes(case):
    in_, out, dtype, partials, ratio, edge, (px, py, pz), grad_weight, oversize, expected = case
    columns, rows = in_ // edge, out // edge
    x, y = -(-rows // px), -(-columns // py)
    groups = int(sizes.ceil_fraction(rows * columns, ratio))
    area = edge * edge
    held = sizes.groups_per_bucket(groups, px * py * pz, oversize, area, dtype, 4)
    common = (x, y, ratio, oversize, 6, 4)
    found = (
        int(sizes.value_elements(held, area, partials, grad_weight=grad_weight)),
        int(sizes.meta_info_words(*common, block=edge > 1, grad_weight=grad_weight)),
        int(sizes.separate_grad_input_words(*common)) if edge == 1 else None,
        overflow_words(px),
    )
    assert found == expected
