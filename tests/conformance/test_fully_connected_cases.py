"""The 66 numbered cases of PopSparse's fully connected layer, run on the simulated machine.

Tiles are those of the cases: 24, or a whole chip. As in the original's tool, data is +1 and -1
where the sums stay exact, and results must lie within 0.01 (float32) or 0.1 (float16), relative.
"""

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from dynsparse.pattern import SparsePattern
from popsparse.layer import Layer
from popsparse.machine import Graph, Target
from popsparse.planning.params import FullyConnectedParams, SparsityParams
from popsparse.planning.plan import PlanningCache
from popsparse.planning.search import plan
from popsparse.products import fully_connected_dense_grad_w_serial_splits

TOLERANCE = {"float16": 0.1, "float32": 0.01}
ALL = ("forward", "grad_input", "grad_weight")
# A phase on its own, as the tool names it, and the pass that it checks.
PHASES = {"fwd": ALL[:1], "bwd": ALL[1:2], "wu": ALL[2:]}
TYPES = ("float16", "float32")


@dataclass(frozen=True)
class Case:
    out: int
    in_: int
    batch: int
    density: float
    block: int
    dtype: str
    passes: tuple = ALL
    tiles: int = 24
    options: dict = field(default_factory=dict)
    area: tuple | None = None  # rows, columns and weight of a denser part


def cases():
    found = {}

    def add(name, *sizes, **more):
        found[f"{len(found) + 1:02}-{name}"] = Case(*sizes, **more)

    spills = {"force_bucket_spills": True}
    full = {"available_memory_proportion": 1.0}
    types = [("float16", "float32"), ("float16", "float16"), ("float32", "float32")]
    for (dtype, partials), block, moves in itertools.product(types, (4, 8, 16), (False, True)):
        fixed = {"plan_constraints": {"exchange": {"grad_w_exchange_buckets": moves}}}
        options = {**spills, **full, **fixed, "partials_type": partials}
        how = "buckets" if moves else "operands"
        add(f"A-{dtype}-{partials}-block{block}-{how}-move", 1024, 1024, 4, 0.1, block, dtype,
            options=options)  # fmt: skip
    for family, size, batch, density in (("B", 1024, 8, 0.1), ("C", 256, 64, 0.01)):
        for (dtype, partials), block in itertools.product(types, (4, 8, 16)):
            options = {**spills, **full, "partials_type": partials}
            add(f"{family}-{dtype}-{partials}-block{block}", size, size, batch, density, block,
                dtype, options=options)  # fmt: skip
    phases = [("fwd", False), ("bwd", False), ("wu", False), ("bwd", True)]
    stay = {"plan_constraints": {"exchange": {"grad_w_exchange_buckets": False}}}
    move = {"plan_constraints": {"exchange": {"grad_w_exchange_buckets": True}}}
    for (phase, shared), dtype in itertools.product(phases, TYPES):
        options = {**spills, **stay, "shared_buckets": shared}
        name = f"D-{phase}-{'shared' if shared else 'own'}-{dtype}"
        add(name, 512, 512, 4, 0.1, 1, dtype, passes=PHASES[phase], options=options)
    for dtype in TYPES:
        options = {**spills, **move, "shared_buckets": False}
        add(f"D-wu-buckets-move-{dtype}", 512, 512, 4, 0.1, 1, dtype, passes=PHASES["wu"],
            options=options)  # fmt: skip
    for (phase, shared), dtype in itertools.product(phases, TYPES):
        options = {**full, "meta_info_bucket_oversize_proportion": 0.5, "shared_buckets": shared}
        name = f"E-{phase}-{'shared' if shared else 'own'}-{dtype}"
        add(name, 300, 784, 16, 0.1, 1, dtype, passes=PHASES[phase], tiles=1472, options=options)
    for dtype in TYPES:
        add(f"F-imbalanced-{dtype}", 1024, 1024, 8, 0.1, 1, dtype, passes=PHASES["bwd"],
            options=full, area=((384, 400), (128, 786), 8.0))  # fmt: skip
    fixed = {"plan_constraints": {"partition": {"x": 6, "y": 4, "z": 1}}}
    add("G-partition-6-4-1", 512, 512, 64, 0.01, 1, "float16", passes=PHASES["fwd"],
        options={**full, **fixed})  # fmt: skip
    add("G-serial-splits", 256, 256, 64, 0.01, 4, "float16", options={**spills, **full})
    for in_, out in itertools.product((32, 47, 512), (23, 128)):
        dense = {**full, "plan_constraints": {"use_dense": True}}
        add(f"H-dense-{in_}-{out}", out, in_, 4, 0.3, 1, "float32", passes=PHASES["fwd"],
            options=dense)  # fmt: skip
    tight = {**full, "meta_info_bucket_oversize_proportion": 0.005}
    add("I-all-dims-overflow", 1080, 1024, 4, 0.1, 1, "float16", options=tight)
    plain = {**full, "meta_info_bucket_oversize_proportion": 0.2,
             "enable_structured_rearrangements": False}  # fmt: skip
    add("I-plain-rearrangements", 544, 512, 16, 0.1, 16, "float16", options=plain)
    return found


CASES = cases()
assert len(CASES) == 66


def draw(case, generator):
    """Draw a pattern with the expected density, optionally with an area `weight` times as dense."""
    shape = (case.out, case.in_)
    if case.area is None:
        return SparsePattern.random(shape, case.density, block_size=case.block, generator=generator)
    (top, bottom), (left, right), weight = case.area
    weights = torch.ones(shape)
    weights[top:bottom, left:right] = weight
    chance = (weights * case.density * weights.numel() / weights.sum()).clamp(max=1)
    return SparsePattern.from_mask(torch.rand(shape, generator=generator) < chance)


def numbers(shape, case, sums, generator):
    """Draw +1 and -1 if sums of `sums` terms are exact, else uniform numbers in [-1, 1)."""
    exact = 2048 if case.dtype == "float16" else 1 << 24
    kind = getattr(torch, case.dtype)
    if 1.3 * sums <= 10 * exact:
        return (torch.randint(2, shape, generator=generator) * 2 - 1).to(kind)
    return (torch.rand(shape, generator=generator) * 2 - 1).to(kind)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_case(case):
    layer_plan = plan(
        case.out, case.in_, case.batch, case.density, case.block, case.dtype,
        Target.mk2(tiles=case.tiles), passes=case.passes, options=case.options,
    )  # fmt: skip
    layer = Layer(layer_plan, passes=case.passes)
    generator = torch.Generator().manual_seed(1)
    pattern = draw(case, generator)
    sums = case.density * max(case.out, case.in_)
    values = numbers(pattern.values_shape, case, sums, generator)
    layer.set_weights(pattern, values)
    if case.options.get("force_bucket_spills"):
        assert layer.encoding.info.spilled
    x = numbers((case.batch, case.in_), case, sums, generator)
    dy = numbers((case.batch, case.out), case, sums, generator)
    dense = pattern.to_dense(values).double()
    wanted = {
        "forward": lambda: x.double() @ dense.T,
        "grad_input": lambda: dy.double() @ dense,
        "grad_weight": lambda: pattern.values_of(dy.double().T @ x.double()),
    }
    arguments = {"forward": (x,), "grad_input": (dy,), "grad_weight": (dy, x)}
    tolerance = TOLERANCE[case.dtype]
    for name in case.passes:
        found = getattr(layer, name)(*arguments[name])
        np.testing.assert_allclose(found, wanted[name](), rtol=tolerance, atol=tolerance)


def splits(sizes, block, dtype, share, partials, tiles=None, cache=None):
    """Serial splits of the dense gradient of [in, batch] x [batch, out], sizes (in, batch, out)."""
    in_, batch, out = sizes
    params = FullyConnectedParams.create_with_nz_ratio(
        SparsityParams(block), 0.1, batch, 1, in_, out
    )
    target = Target.mk2() if tiles is None else Target.mk2(tiles=tiles)
    options = {"available_memory_proportion": share, "partials_type": partials}
    return fully_connected_dense_grad_w_serial_splits(Graph(target), dtype, params, options, cache)


@pytest.mark.parametrize(
    ("sizes", "block", "dtype", "share", "partials", "expected"),
    [
        ((8192, 32, 8192), 16, "float16", 0.1, "float32", (1, 6, 1)),
        ((8192, 32, 8192), 16, "float16", 0.1, "float16", (1, 3, 1)),
        ((8192, 32, 8192), 16, "float16", 0.05, "float32", (1, 12, 1)),
        ((8192, 32, 8192), 16, "float16", 0.05, "float16", (1, 8, 1)),
        ((4096, 32, 8192), 16, "float16", 0.1, "float32", (1, 3, 1)),
        ((4096, 32, 8192), 16, "float16", 0.1, "float16", (1, 2, 1)),
        ((4096, 64, 4096), 16, "float16", 0.05, "float32", (1, 5, 1)),
        ((4096, 64, 4096), 16, "float16", 0.05, "float16", (1, 4, 1)),
        ((2048, 32, 2048), 8, "float16", 0.02, "float32", (1, 2, 1)),
        ((2048, 32, 2048), 8, "float16", 0.02, "float16", (1, 1, 1)),
        ((1600, 64, 6400), 16, "float16", 0.04, "float32", (1, 4, 1)),
        ((1600, 64, 6400), 16, "float16", 0.04, "float16", (1, 2, 1)),
        # Never narrower than the data, and float32 for elements.
        ((512, 32, 2048), 1, "float16", 0.01, "float32", (1, 2, 1)),
        ((512, 32, 2048), 1, "float16", 0.01, "float16", (1, 2, 1)),
        ((3072, 32, 768), 8, "float32", 0.02, "float16", (1, 2, 1)),
    ],
)
def test_serial_splits_of_the_dense_gradient(sizes, block, dtype, share, partials, expected):
    """The dtype of the partial sums determines the splits, by their memory on a tile."""
    assert splits(sizes, block, dtype, share, partials) == expected


def test_case_58_reports_serial_splits():
    case = next(case for name, case in CASES.items() if name.startswith("58"))
    shape = case.in_, case.batch, case.out
    # The gradient fits as a whole.
    assert splits(shape, case.block, case.dtype, 0.6, "float32", case.tiles) == (1, 1, 1)


def test_cache_keeps_serial_splits():
    cache = PlanningCache()
    found = [splits((64, 8, 64), 4, "float16", 0.1, "float32", 8, cache) for _ in range(2)]
    assert found[0] == found[1]
    assert (len(cache), cache.hits) == (1, 1)
