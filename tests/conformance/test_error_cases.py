"""Error cases (section 8.3 of docs/popsparse-formulas.md) that the other files do not have.

Ids begin with the case's number; "padded" and the like mark cases the original refuses and this
package carries out. Cases 1-11 and 17-21 are in test_matmul_cases, 22-40, 42
and 43 in test_partitioner_formats, 44, 48, 52 and 57-65 in popsparse/test_partitioner_errors.
"""

import numpy as np
import pytest
import torch

import popsparse as ps
from dynsparse.pattern import SparsePattern
from popsparse import static
from popsparse.encoding.buckets import BucketLayout
from popsparse.encoding.spilling import BucketOverflowError
from popsparse.formats import COOMatrix, CSCMatrix, CSRMatrix
from popsparse.machine import Engine, Graph, Sequence, Target

SIZES = {
    "rows": 12, "cols": 12, "batch": 4, "partition": (2, 2, 1), "nz_elements": 12,
    "meta_info_words": 120, "workers": 2,
}  # fmt: skip


def layout(**changes):
    return BucketLayout(**{**SIZES, **changes})


def random_pattern(shape, density, block=1):
    generator = torch.Generator().manual_seed(0)
    return SparsePattern.random(shape, density, block_size=block, generator=generator)


def encode(pattern, values=None, **changes):
    """Encode through the partitioner of a layout."""
    return ps.Partitioner(layout(**changes)).encode(pattern, values)


def edited(kind, **arrays):
    """Make a valid matrix of two blocks and replace some of its arrays."""
    pattern = SparsePattern([0, 3], [1, 2], shape=(12, 12))
    matrix = kind.from_pattern(pattern, np.ones(2))
    for name, array in arrays.items():
        setattr(matrix, name, np.asarray(array))
    return matrix


# Device program: the original refuses, here the operands are padded.


def run_pass(name, out, in_, batch, block, dtype, options=None):
    """Compare a pass of one layer on one tile with the dense product in float64."""
    found = ps.plan(out, in_, batch, 1.0, block, dtype, Target(tiles=1), passes=name,
                    options=options)  # fmt: skip
    layer = ps.Layer(found, passes=[name])
    pattern = SparsePattern.full((out, in_), block_size=block)
    generator = torch.Generator().manual_seed(0)

    def operand(*shape):
        # Whole numbers: sums are exact in either type.
        return torch.randint(-2, 3, shape, generator=generator).to(getattr(torch, dtype))

    values, x, dy = operand(*pattern.values_shape), operand(batch, in_), operand(batch, out)
    layer.set_weights(pattern, values)
    if name == "grad_weight":
        got, wanted = layer.grad_weight(dy, x), pattern.values_of(dy.double().T @ x.double())
    else:
        got, wanted = layer.forward(x), x.double() @ pattern.to_dense(values).double().T
    np.testing.assert_array_equal(got.astype(np.float64), wanted.numpy())
    return layer


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("batch", [1, 3, 5])
def test_12_grad_weight_is_padded_to_the_grain(batch, block, dtype):
    run_pass("grad_weight", 8, 4, batch, block, dtype)


@pytest.mark.parametrize(("dtype", "most"), [("float16", 4 * 511), ("float32", 2 * 511)])
def test_13_grad_weight_beyond_the_stride_limit_works(dtype, most):
    layer = run_pass("grad_weight", 16, 16, most + 20, 16 if dtype == "float16" else 8, dtype)
    assert layer.plan.elements_per_tile.z > most


def test_14_partials_of_less_than_64_bits_are_padded():
    layer = run_pass("forward", 2, 2, 1, 2, "float16", {"partials_type": "float16"})
    assert layer.plan.options.partials_type.size * 2 < 8
    run_pass("forward", 1, 1, 1, 1, "float32")


def test_15_partials_beyond_one_hardware_repeat_work():
    layer = run_pass("forward", 512, 4, 128, 1, "float32")
    words = layer.plan.elements_per_tile.x * layer.plan.elements_per_tile.z * 4 / 8
    assert words / layer.plan.target.workers > 4095


# Conversions and the partitioner.

PARTITIONER = {
    "41-csr-last-offset-to-coo": (
        lambda: edited(CSRMatrix, row_indices=[0] * 12 + [3]).to_coo(),
        "row_indices must end with the number of values 2, got 3",
    ),
    "41-csr-last-offset-to-smaller-blocks": (
        lambda: edited(CSRMatrix, row_indices=[0] * 12 + [3]).with_blocks((1, 1)),
        "row_indices must end with the number of values 2, got 3",
    ),
    "45-grain-of-the-plan-does-not-divide": (
        lambda: ps.Partitioner(layout(block=(4, 4)), pattern_block=(6, 6)),
        r"the plan's blocks \(4, 4\) do not divide the pattern's \(6, 6\)",
    ),
    "46-more-rows-than-columns-coo": (
        lambda: encode(edited(COOMatrix, row_indices=[0, 3, 4])),
        "row_indices and column_indices must have the same length, got 3 and 2",
    ),
    "46-row-offsets-csr": (
        lambda: encode(edited(CSRMatrix, row_indices=[0, 1, 2])),
        "row_indices must have 13 entries, got 3",
    ),
    "46-column-offsets-csc": (
        lambda: encode(edited(CSCMatrix, column_indices=[0, 1, 2])),
        "column_indices must have 13 entries, got 3",
    ),
    "46-rows-and-columns-of-a-pattern": (
        lambda: SparsePattern([0, 3], [1], shape=(12, 12)),
        "rows",
    ),
    "47-values-of-a-coo": (
        lambda: encode(edited(COOMatrix, nz_values=np.ones(3))),
        r"nz_values must have 2 blocks x 1 = 2 values, got the shape \[3\]",
    ),
    "47-columns-of-a-csr": (
        lambda: encode(edited(CSRMatrix, column_indices=[1])),
        r"nz_values must have 1 blocks x 1 = 1 values, got the shape \[2\]",
    ),
    "47-values-of-a-pattern": (
        lambda: encode(SparsePattern([0], [1], shape=(12, 12)), torch.ones(2)),
        r"values must have the shape \[1\], got \[2\]",
    ),
    "50-element-buckets-of-blocks": (
        lambda: layout(block=(4, 4), grad_a_words=8),
        "buckets of blocks are shared by all passes",
    ),
    "53-meta-info-larger-than-the-bucket": (
        lambda: encode(random_pattern((12, 12), 0.1), torch.ones(14), meta_info_words=20),
        "buckets overflow: 14 of 14 non-zeros, .*; raise meta_info_bucket_oversize_proportion",
    ),
    "54-values-larger-than-the-bucket": (
        lambda: encode(random_pattern((12, 12), 0.1), torch.ones(14), nz_elements=2),
        "buckets overflow: 6 of 14 non-zeros, .*; raise meta_info_bucket_oversize_proportion",
    ),
    "55-word-above-65535": (
        lambda: encode(
            SparsePattern([0], [9000], shape=(12, 10000)), torch.ones(1),
            cols=10000, partition=(1, 1, 1),
        ),
        "column offset in bytes reaches 144000, a word holds at most 65535; use a plan with more",
    ),
    "56-buckets-of-a-dense-plan": (
        lambda: ps.Partitioner(dense_plan()),
        "a plan with use_dense has no buckets: use DensePartitioner",
    ),
    "56-pattern-of-a-dense-plan": (
        lambda: ps.Layer(dense_plan()).set_pattern(SparsePattern.full((8, 4))),
        "dense weights have no pattern of their own: use set_weights",
    ),
}  # fmt: skip


def dense_plan():
    options = {"plan_constraints": {"use_dense": True}}
    return ps.plan(8, 4, 4, 0.5, target=Target(tiles=2), options=options)


@pytest.mark.parametrize(("call", "message"), PARTITIONER.values(), ids=PARTITIONER)
def test_partitioner(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", ["53-meta-info-larger-than-the-bucket",
                                  "54-values-larger-than-the-bucket"])  # fmt: skip
def test_full_buckets_have_their_own_error(case):
    with pytest.raises(BucketOverflowError):
        PARTITIONER[case][0]()


@pytest.mark.parametrize(("size", "parts"), [(5, 4), (9, 7), (10, 9)])
def test_49_parts_past_the_end_are_empty(size, parts):
    found = layout(rows=size, cols=size, partition=(parts, parts, 1), nz_elements=40)
    assert (parts - 1) * found.part[0] >= size
    pattern = random_pattern((size, size), 0.4)
    values = torch.arange(1.0, 1 + pattern.nnz)
    partitioner = ps.Partitioner(found)
    decoded, back = partitioner.decode(partitioner.encode(pattern, values))
    assert decoded == pattern
    assert torch.equal(back, values)


# Static products.

PATTERN = random_pattern((16, 16), 0.2)
PARAMS = static.MatmulParams.create_for_sparse_dense(1, 16, 16, 8)
TARGET = Target(tiles=4)


def static_plan(params=PARAMS, pattern=PATTERN, options=None):
    return static.make_plan(TARGET, "float16", params, pattern, options)


def product(dense_shape=(1, 16, 8), dtype="float16", sparse=True, params=PARAMS, **arguments):
    """The static product of the pattern and a dense operand of this shape and type."""
    graph, program = Graph(TARGET), Sequence()
    lhs = static.create_sparse_dense_matmul_lhs(graph, "float16", params, PATTERN)
    dense = graph.add_variable(dtype, list(dense_shape), "dense", tiles=0)
    return static.sparse_dense_matmul(graph, lhs if sparse else dense, dense, program, **arguments)


def other_operand():
    """Make the operand of dense x sparse, for use in sparse x dense."""
    graph, program = Graph(TARGET), Sequence()
    params = static.MatmulParams.create_for_dense_sparse(1, 8, 16, 16)
    rhs = static.create_dense_sparse_matmul_rhs(graph, "float16", params, PATTERN)
    dense = graph.add_variable("float16", [1, 16, 8], "dense", tiles=0)
    static.sparse_dense_matmul(graph, rhs, dense, program)


def partitioner():
    return static.Partitioner(PARAMS, "float32", TARGET, PATTERN)


SHAPE = r"right operand must have the shape \[1, 16, 8\], got "
STATIC = {
    "66-row-offsets": (
        lambda: CSRMatrix([1.0], [0], [0, 1], (3, 3)),
        "row_indices must have 4 entries, got 2",
    ),
    "66-row-offsets-replaced": (
        lambda: static.plan(edited(CSRMatrix, row_indices=[0, 2]), 4, target=TARGET),
        "row_indices must have 13 entries, got 2",
    ),
    "67-m": (
        lambda: static_plan(pattern=random_pattern((8, 16), 0.2)),
        r"must have the shape \[16, 16\], got \[8, 16\]",
    ),
    "68-k": (
        lambda: static_plan(pattern=random_pattern((16, 8), 0.2)),
        r"must have the shape \[16, 16\], got \[16, 8\]",
    ),
    "69-block-2": (
        lambda: static_plan(pattern=random_pattern((16, 16), 0.2, 2)),
        "static products take blocks of 1, 4, 8, 16, got 2",
    ),
    "70-groups": (
        lambda: static.MatmulParams.create_for_sparse_dense(2, 16, 16, 8),
        "a static product has one group, got 2",
    ),
    "71-m-off-the-block": (
        lambda: SparsePattern([0], [0], shape=(10, 16), block_size=4),
        r"block_size 4 does not divide the shape \(10, 16\)",
    ),
    "72-types": (
        lambda: product(dtype="float32"),
        "the sparse operand is float16, the dense one float32: cast one",
    ),
    "73-groups": (lambda: product((2, 16, 8)), SHAPE + r"\[2, 16, 8\]"),
    "73-k": (lambda: product((1, 15, 8)), SHAPE + r"\[1, 15, 8\]"),
    "73-n": (lambda: product((1, 16, 7)), SHAPE + r"\[1, 16, 7\]"),
    "74-parameters-of-the-other-order": (
        lambda: product(params=static.MatmulParams.create_for_dense_sparse(1, 8, 16, 16)),
        "the parameters are of the other product: make them by create_for_sparse_dense",
    ),
    "74-operand-of-the-other-order": (
        other_operand,
        "the parameters are of the other product: make them by create_for_sparse_dense",
    ),
    "75-options": (
        lambda: product(options={"num_bands": 1}),
        "the sparse operand was made with .*, not with",
    ),
    "76-transposed": (
        lambda: product(transpose_lhs=True),
        "a static sparse operand cannot be transposed: create it from the transposed matrix",
    ),
    "77-no-plan": (lambda: product(sparse=False), "must be a static.SparseTensor"),
    "78-no-partition": (
        lambda: static_plan(options={"available_memory_proportion": 1e-5}),
        "none of .* static partitions is possible: .*; raise available_memory_proportion",
    ),
    "79-another-pattern": (
        lambda: partitioner().encode(random_pattern((16, 16), 0.3), torch.ones(77)),
        "a static pattern cannot change; make another operand or use the dynamic product",
    ),
    "80-inverse-of-another-size": (
        lambda: partitioner().decode(np.ones(PATTERN.nnz + 1)),
        rf"nz_values must have the shape \[{PATTERN.nnz}\], got \[{PATTERN.nnz + 1}\]",
    ),
}


@pytest.mark.parametrize(("call", "message"), STATIC.values(), ids=STATIC)
def test_static(call, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_71_sizes_not_multiple_of_the_vector_width_work(dtype):
    pattern = random_pattern((13, 7), 0.4)
    values = torch.randint(-3, 4, (pattern.nnz,)).to(getattr(torch, dtype))
    dense = torch.randint(-3, 4, (7, 5)).to(getattr(torch, dtype))
    graph, program = Graph(TARGET), Sequence()
    params = static.MatmulParams.create_for_sparse_dense(1, 13, 7, 5)
    lhs = static.create_sparse_dense_matmul_lhs(graph, dtype, params, pattern)
    rhs = static.create_sparse_dense_matmul_rhs(graph, dtype, params, pattern)
    out = static.sparse_dense_matmul(graph, lhs, rhs, program)
    graph.add_handle("out", out)
    engine = Engine(graph, program)
    partitioner = static.Partitioner(params, dtype, TARGET, pattern)
    engine.write(lhs.nz_values, partitioner.encode(pattern, values))
    engine.write(rhs, dense[None])
    engine.run()
    wanted = pattern.to_dense(values).double() @ dense.double()
    np.testing.assert_array_equal(engine.read("out")[0], wanted.numpy())
