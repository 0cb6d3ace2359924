"""Parameters, options and constraints: values and errors."""

import numpy as np
import pytest
import torch

from popsparse.machine.dtypes import FLOAT, HALF
from popsparse.planning.cycles import kernel_edge
from popsparse.planning.options import Options, PlanConstraints
from popsparse.planning.params import (
    FullyConnectedParams,
    MatmulParams,
    SparsityParams,
    block_for_plan,
    data_type,
)

ELEMENT = SparsityParams()
BLOCK = SparsityParams((4, 8))


def test_ratio_and_count_agree():
    by_count = FullyConnectedParams.create_with_num_non_zero_values(ELEMENT, 3000, 4, 1, 300, 100)
    assert by_count.nz_ratio == 0.1
    assert by_count == FullyConnectedParams.create_with_nz_ratio(ELEMENT, 0.1, 4, 1, 300, 100)


def test_matmul_maps_to_fully_connected():
    params = MatmulParams.create_with_num_non_zero_values(BLOCK, 64, 1, 8, 16, 5)
    layer = params.fully_connected
    assert (layer.output_channels_per_group, layer.input_channels_per_group) == (8, 16)
    assert layer.batch_size == 5
    assert layer.nz_ratio == 0.5


def test_block_sparsity_by_one_number():
    assert SparsityParams(4).block_dimensions == (4, 4)
    assert SparsityParams((1, 1)).is_element
    assert not SparsityParams((1, 2)).is_element


@pytest.mark.parametrize(
    ("block", "half", "single"),
    [(16, 16, 8), (12, 4, 4), (32, 16, 8), (8, 8, 8), (4, 4, 4), (2, 2, 2), (1, 1, 1)],
)
def test_planned_block(block, half, single):
    assert block_for_plan((block, block), HALF) == (half, half)
    assert block_for_plan((block, block), FLOAT) == (single, single)


def test_planned_block_keeps_non_square_blocks():
    assert block_for_plan((8, 16), HALF) == (8, 16)


@pytest.mark.parametrize(
    ("block", "half", "single"),
    [((4, 4), 4, 4), ((2, 2), 4, 4), ((4, 8), 8, 8), ((16, 16), 16, 8), ((32, 32), 16, 8)],
)
def test_kernel_for_a_block(block, half, single):
    assert kernel_edge(block, HALF) == half
    assert kernel_edge(block, FLOAT) == single


@pytest.mark.parametrize("ratio", ["half", None, True])
def test_bad_ratio(ratio):
    with pytest.raises((TypeError, ValueError), match="nz_ratio"):
        FullyConnectedParams(ELEMENT, ratio, 4, 1, 8, 8)
    with pytest.raises((TypeError, ValueError), match="nz_ratio"):
        MatmulParams(ELEMENT, ratio, 1, 8, 8, 4)


@pytest.mark.parametrize("size", [0, -1, 2.5, "8", True])
def test_bad_sizes(size):
    with pytest.raises((ValueError, TypeError), match="batch_size must be an integer"):
        FullyConnectedParams(ELEMENT, 0.1, size, 1, 8, 8)
    with pytest.raises((ValueError, TypeError), match="m must be an integer"):
        MatmulParams(ELEMENT, 0.1, 1, size, 8, 8)


def test_block_must_divide():
    with pytest.raises(ValueError, match="output_channels_per_group must be a multiple"):
        FullyConnectedParams(BLOCK, 0.1, 4, 1, 16, 6)
    with pytest.raises(ValueError, match="input_channels_per_group must be a multiple"):
        FullyConnectedParams(BLOCK, 0.1, 4, 1, 12, 8)


def test_bad_sparsity():
    with pytest.raises(ValueError, match="block_dimensions must be"):
        SparsityParams((1, 2, 3))
    with pytest.raises(ValueError, match="block_dimensions of rows"):
        SparsityParams((0, 2))
    with pytest.raises(TypeError, match="SparsityParams"):
        FullyConnectedParams(4, 0.1, 4, 1, 8, 8)


@pytest.mark.parametrize("value", ["half", "float16", torch.float16, np.float16, np.dtype("f2")])
def test_data_types(value):
    assert data_type(value) is HALF
    assert HALF.vector_width == 4
    assert FLOAT.vector_width == 2


def test_unknown_data_type():
    with pytest.raises(ValueError, match="partials_type must be float16 or float32, got 'int8'"):
        Options(partials_type="int8")


def test_option_defaults():
    options = Options()
    assert options.available_memory_proportion == 0.6
    assert options.meta_info_bucket_oversize_proportion == 0.3
    assert options.partials_type is FLOAT
    assert options.shared_buckets
    assert options.optimise_for_speed
    assert not options.do_grad_a_pass
    assert not options.force_bucket_spills
    assert Options.parse(None) == options
    assert Options.parse(options) is options


def test_unknown_option_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'shared_buckets'"):
        Options.parse({"shared_bucket": True})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("available_memory_proportion", -1),
        ("meta_info_bucket_oversize_proportion", float("nan")),
        ("do_grad_w_pass", 1),
        ("plan_constraints", [1]),
    ],
)
def test_bad_option_values(name, value):
    with pytest.raises((ValueError, TypeError), match=name):
        Options.parse({name: value})


def test_partials_are_corrected():
    half = Options(partials_type="half")
    assert half.repaired(HALF, is_element=False).partials_type is HALF
    assert half.repaired(HALF, is_element=True).partials_type is FLOAT
    assert half.repaired(FLOAT, is_element=False).partials_type is FLOAT


def test_constraints_are_read():
    given = {"partition": {"x": 6, "z": 1}, "exchange": {"gradWExchangeBuckets": True}}
    expected = PlanConstraints(x=6, z=1, grad_w_exchange_buckets=True)
    assert Options(plan_constraints=given).plan_constraints == expected
    assert PlanConstraints.parse({"useDense": True}).use_dense


def test_the_spelling_of_popsparse():
    given = {
        "availableMemoryProportion": "0.5",
        "metaInfoBucketOversizeProportion": "1",
        "doGradAPass": "true",
        "doGradWPass": "false",
        "partialsType": "half",
        "partitioner.forceBucketSpills": "true",
        "planConstraints": '{"partition": {"x": 6}, "useDense": true}',
    }
    assert Options.parse(given) == Options(
        available_memory_proportion=0.5,
        meta_info_bucket_oversize_proportion=1.0,
        do_grad_a_pass=True,
        partials_type="float16",
        force_bucket_spills=True,
        plan_constraints=PlanConstraints(x=6, use_dense=True),
    )
    block_sparse = {"numberOfPass": "2", "partitionMethod": "stripv0"}
    expected = Options(number_of_pass=2, partition_method="stripv0")
    assert Options.parse(block_sparse, "block-sparse") == expected
    static = {"numBands": "3", "nSplit": 2, "enablePreprocessing": "false"}
    expected = Options(num_bands=3, n_split=2, enable_preprocessing=False)
    assert Options.parse(static, "static") == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"doGradAPass": "yes"}, "do_grad_a_pass must be True or False, got 'yes'"),
        ({"availableMemoryProportion": "much"}, "available_memory_proportion must be"),
        ({"planConstraints": "{"}, "plan_constraints must be a mapping such as .'partition"),
        ({"doGradAPass": "true", "do_grad_a_pass": True}, "do_grad_a_pass is given twice"),
        ({"verboseLogging": "true"}, "DYNSPARSE_LOG_LEVEL=DEBUG"),
        ({"dense_grad": {}}, "use Update"),
        (["doGradAPass"], "options must be a mapping such as .'available_memory_prop"),
    ],
)
def test_invalid_option_texts(value, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Options.parse(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"partitions": {}}, "did you mean 'partition'"),
        ({"partition": 4}, "plan_constraints.partition must be a mapping"),
        ({"partition": {"w": 1}}, "unknown partition constraint 'w'"),
        ({"partition": {"x": 0}}, r"plan_constraints.partition.x must be an integer"),
        ({"exchange": []}, "plan_constraints.exchange must be a mapping such as .'grad_w"),
        ({"exchange": {"bucket": True}}, "unknown exchange constraint"),
        ({"exchange": {"grad_w_exchange_buckets": 1}}, "must be True or False"),
        ({"use_dense": "no"}, "must be True or False"),
    ],
)
def test_bad_constraints(value, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Options(plan_constraints=value)
