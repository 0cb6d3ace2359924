"""Family R: the formats' reference vectors, block changes, and one error for each broken rule.

The numbers in the ids of the errors are those of the list of validations.
"""

import numpy as np
import pytest

from popsparse.formats import COOMatrix, CSCMatrix, CSRMatrix

# The 4 x 6 matrix DENSE, and 2 x 3 blocks at the same places of an 8 x 18 one.
VALUES = [10, 20, 30, 40, 50, 60, 70, 80]
CSR_COLUMNS, CSR_ROWS = [0, 1, 1, 3, 2, 3, 4, 5], [0, 2, 4, 7, 8]
CSC_COLUMNS, CSC_ROWS = [0, 1, 3, 4, 6, 7, 8], [0, 0, 1, 2, 1, 2, 2, 3]
CSC_VALUES = [10, 20, 30, 50, 40, 60, 70, 80]
DENSE = [
    [10, 20, 0, 0, 0, 0],
    [0, 30, 0, 40, 0, 0],
    [0, 0, 50, 60, 70, 0],
    [0, 0, 0, 0, 0, 80],
]
BLOCK_COLUMNS, BLOCK_ROWS = [0, 3, 3, 9, 6, 9, 12, 15], [0, 12, 24, 42, 48]


def blocks_of_2x3():
    return CSRMatrix(np.arange(48.0), BLOCK_COLUMNS, BLOCK_ROWS, (8, 18), (2, 3))


def test_reference_elements():
    csr = CSRMatrix(VALUES, CSR_COLUMNS, CSR_ROWS, (4, 6))
    csc = CSCMatrix(CSC_VALUES, CSC_COLUMNS, CSC_ROWS, (4, 6))
    assert csr.to_dense().tolist() == DENSE
    assert csr.to_csc() == csc
    assert csc.to_csr() == csr
    assert csr.to_coo().row_indices.tolist() == [0, 0, 1, 1, 2, 2, 2, 3]


def test_reference_blocks():
    csr = blocks_of_2x3()
    csc = csr.to_csc()
    assert csc.column_indices.tolist() == [0, 6, 18, 24, 36, 42, 48]
    assert csc.row_indices.tolist() == [0, 0, 2, 4, 2, 4, 4, 6]
    # Column-major inside a block.
    assert csc.nz_values[:6].tolist() == [0, 3, 1, 4, 2, 5]
    assert csc.to_csr() == csr
    dense = csr.to_dense()
    assert dense[:2, 3:6].tolist() == [[6, 7, 8], [9, 10, 11]]


@pytest.mark.parametrize(
    ("matrix", "block"),
    [
        pytest.param(lambda b: CSRMatrix(np.arange(24.0), [0, 6], [0, 12, 24], (4, 12), b), (1, 2),
                     id="2x6-to-1x2"),
        pytest.param(lambda b: CSRMatrix(np.arange(32.0), [4, 0], [0, 16, 32], (8, 8), b), (2, 2),
                     id="4x4-to-2x2"),
    ],
)  # fmt: skip
def test_block_change_and_back(matrix, block):
    large = (2, 6) if block == (1, 2) else (4, 4)
    csr = matrix(large)
    for kind in ("to_csr", "to_csc", "to_coo"):
        small = getattr(csr, kind)().with_blocks(block)
        assert small.block_dimensions == block
        assert np.array_equal(small.to_dense(), csr.to_dense())
        assert small.to_coo().with_blocks(large).to_csr() == csr


CASES = {
    "22-rows": (
        COOMatrix,
        ([], [], [], (5, 4), (2, 2)),
        "rows must be a multiple of the block's 2, got 5",
    ),
    "23-columns": (
        COOMatrix,
        ([], [], [], (4, 5), (2, 2)),
        "columns must be a multiple of the block's 2",
    ),
    "24-csr-row-count": (
        CSRMatrix,
        ([1], [0], [0, 1], (2, 2)),
        "row_indices must have 3 entries, got 2",
    ),
    "25-csr-last": (
        CSRMatrix,
        ([1], [0], [0, 1, 2], (2, 2)),
        "row_indices must end with the number of values 1, got 2",
    ),
    "26-csr-column-grain": (
        CSRMatrix,
        (np.ones(4), [1], [0, 4], (2, 4), (2, 2)),
        "column_indices must be multiples of the block's 2, got 1",
    ),
    "27-csr-row-area": (
        CSRMatrix,
        (np.ones(4), [0], [0, 2, 4], (4, 4), (2, 2)),
        "row_indices must be multiples of the block area 4, got 2",
    ),
    "28-csr-column-range": (
        CSRMatrix,
        ([1], [2], [0, 1], (1, 2)),
        "column_indices must lie in \\[0, 2\\), got 2",
    ),
    "29-csc-column-count": (
        CSCMatrix,
        (np.ones(8), [0, 8], [0], (2, 8), (2, 4)),
        "column_indices must have 3 entries, got 2",
    ),
    "30-csc-last": (
        CSCMatrix,
        ([1], [0, 1, 2], [0], (2, 2)),
        "column_indices must end with the number of values 1, got 2",
    ),
    "31-csc-row-range": (
        CSCMatrix,
        ([1], [0, 1], [2], (2, 1)),
        "row_indices must lie in \\[0, 2\\), got 2",
    ),
    "32-csc-row-grain": (
        CSCMatrix,
        (np.ones(4), [0, 4], [1], (4, 2), (2, 2)),
        "row_indices must be multiples of the block's 2, got 1",
    ),
    "33-csc-column-area": (
        CSCMatrix,
        (np.ones(4), [0, 3, 4], [0], (4, 4), (2, 2)),
        "column_indices must be multiples of the block area 4, got 3",
    ),
    "34-coo-lengths": (
        COOMatrix,
        ([1], [0], [0, 0], (2, 2)),
        "must have the same length, got 2 and 1",
    ),
    "35-coo-values": (
        COOMatrix,
        (np.ones(3), [0], [0], (2, 2), (2, 2)),
        "1 blocks x 4 = 4 values, got the shape \\[3\\]",
    ),
    "36-coo-row-grain": (
        COOMatrix,
        (np.ones(4), [0], [1], (4, 4), (2, 2)),
        "row_indices must be multiples of the block's 2, got 1",
    ),
    "37-coo-column-grain": (
        COOMatrix,
        (np.ones(4), [1], [0], (4, 4), (2, 2)),
        "column_indices must be multiples of the block's 2, got 1",
    ),
    "38-coo-row-range": (
        COOMatrix,
        ([1], [0], [2], (2, 2)),
        "row_indices must lie in \\[0, 2\\), got 2",
    ),
    "39-coo-column-range": (
        COOMatrix,
        ([1], [-1], [0], (2, 2)),
        "column_indices must lie in \\[0, 2\\), got -1",
    ),
}


@pytest.mark.parametrize(("kind", "arguments", "message"), CASES.values(), ids=CASES)
def test_validation(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(*arguments)


def test_40_and_42_block_change_not_a_divisor():
    with pytest.raises(ValueError, match=r"blocks of \(2, 3\) can only become smaller"):
        blocks_of_2x3().with_blocks((4, 3))
    with pytest.raises(ValueError, match="do not divide each other"):
        blocks_of_2x3().to_coo().with_blocks((3, 3))
    with pytest.raises(ValueError, match=r"blocks of \(16, 3\) do not divide the matrix"):
        blocks_of_2x3().to_coo().with_blocks((16, 3))


def test_43_merge_with_missing_parts():
    with pytest.raises(ValueError, match="not all 4 parts of the block at block row 0, column 0"):
        blocks_of_2x3().to_coo().with_blocks((4, 6))
