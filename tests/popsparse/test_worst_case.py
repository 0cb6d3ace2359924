"""All nonzeros in one X/Y partition: correct, in the predicted number of propagation steps."""

import numpy as np
import pytest
import torch

from dynsparse.pattern import SparsePattern
from popsparse.layer import Layer
from popsparse.machine import Target
from popsparse.planning.search import plan

ALL = ("forward", "grad_input", "grad_weight")


def loop_runs(layer, name):
    """Return how often the compute steps of the propagation ran."""
    runs = {"compute": 0, "visit": 0}
    for step in layer.profiles[name].steps:
        what = step.name.split("/")[-1].split(" ")
        if what[0] in runs and what[-1].isdigit():
            runs[what[0]] += step.runs
    if name != "grad_weight":
        return runs["compute"]
    if not layer.plan.grad_w_exchange_buckets:
        return runs["visit"]
    # The same vertices serve the Z partners before.
    return runs["compute"] - (layer.plan.partition.z - 1)


def check(layer, pattern, dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    sizes = layer.plan.sizes
    values = torch.randn(pattern.values_shape, generator=generator).to(kind)
    x = torch.randn(sizes.z, sizes.y, generator=generator).to(kind)
    dy = torch.randn(sizes.z, sizes.x, generator=generator).to(kind)
    layer.set_weights(pattern, values)
    dense = pattern.to_dense(values).double()
    wanted = {
        "forward": x.double() @ dense.T,
        "grad_input": dy.double() @ dense,
        "grad_weight": pattern.values_of(dy.double().T @ x.double()),
    }
    arguments = {"forward": (x,), "grad_input": (dy,), "grad_weight": (dy, x)}
    for name in layer.plan.costs:
        found = getattr(layer, name)(*arguments[name])
        scale = float(wanted[name].abs().max())
        np.testing.assert_allclose(found, wanted[name], rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("moves", [False, True], ids=["operands", "buckets"])
@pytest.mark.parametrize("partition", [(4, 3, 1), (3, 2, 2), (6, 1, 2), (1, 6, 2)])
def test_all_nonzeros_in_one_partition(partition, moves):
    constraints = {
        "partition": dict(zip("xyz", partition, strict=True)),
        "exchange": {"grad_w_exchange_buckets": moves},
    }
    nx, ny, _ = partition
    rows, cols = 48, 48
    # The rectangle holds as many non-zeros as all buckets are meant for, so every bucket is needed.
    density = 1 / (nx * ny)
    layer = Layer(
        plan(
            rows, cols, 8, density, 1, "float32", Target.mk2(tiles=12), passes=ALL,
            options={"plan_constraints": constraints, "meta_info_bucket_oversize_proportion": 1.5},
        )
    )  # fmt: skip
    mask = torch.zeros(rows, cols, dtype=torch.bool)
    mask[: rows // nx, : cols // ny] = True
    pattern = SparsePattern.from_mask(mask)
    check(layer, pattern, "float32", 1e-5)
    info = layer.encoding.info
    assert info.spilled
    for name in ALL:
        assert loop_runs(layer, name) == info.propagation_steps


def test_worst_case_takes_a_step_per_other_bucket():
    """Full buckets, all filled from one partition: Nz (Nx Ny - 1) steps."""
    nx, ny, nz = 4, 3, 2
    edge, height, width = 4, 12, 8  # of a rectangle, in blocks
    blocks = height * width
    shape = (nx * height * edge, ny * width * edge)
    layer = Layer(
        plan(
            *shape, 8, 1 / (nx * ny), edge, "float32", Target.mk2(tiles=24), passes=ALL,
            options={
                "plan_constraints": {"partition": {"x": nx, "y": ny, "z": nz}},
                "meta_info_bucket_oversize_proportion": 0.0,
            },
        )
    )  # fmt: skip
    assert layer.plan.buckets.nz_elements * layer.plan.tiles_used == blocks * edge * edge
    rows, cols = np.divmod(np.arange(blocks), width)
    pattern = SparsePattern(rows, cols, shape=shape, block_size=edge)
    check(layer, pattern, "float32", 1e-5)
    info = layer.encoding.info
    assert info.propagation_steps == nz * (nx * ny - 1)
    for name in ALL:
        assert loop_runs(layer, name) == info.propagation_steps
