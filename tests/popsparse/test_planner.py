"""The planner equals a brute-force scalar implementation of its formulas."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from popsparse.machine.target import Target
from popsparse.planning import cycles as tile_cycles
from popsparse.planning import cycles as vertex_cycles
from popsparse.planning.cycles import grid_split
from popsparse.planning.options import Options
from popsparse.planning.params import (
    FullyConnectedParams,
    MatmulParams,
    SparsityParams,
    all_partitions,
    data_type,
)
from popsparse.planning.plan import Method, PlanningCache
from popsparse.planning.search import make_plan, matmul_plan

W = 6


def cd(a, b):
    return -(-a // b)


class Slow:
    """The cost of one partition of one method, in plain integers."""

    def __init__(self, params, options, dtype, target, method, partition):
        self.p, self.o, self.dt, self.target, self.method = params, options, dtype, target, method
        edge = params.sparsity_params.block_dimensions[0]
        if dtype.size == 4 and edge == 16:
            edge = 8
        self.edge = edge
        self.gz = {"element": dtype.vector_width, "block": 1, "block-amp": 32 // dtype.size}[
            method.value
        ]
        self.n = {
            "x": cd(params.output_channels_per_group, edge),
            "y": cd(params.input_channels_per_group, edge),
            "z": cd(params.batch_size, self.gz),
        }
        self.parts = dict(zip("xyz", partition, strict=True))
        self.t = {d: cd(self.n[d], self.parts[d]) for d in "xyz"}
        self.tiles = math.prod(partition)
        self.psz = options.partials_type.size
        self.cast = dtype is not options.partials_type
        self.block = edge > 1

    def allowed(self):
        even = all(self.parts[d] * self.t[d] < self.n[d] + self.t[d] for d in "xy")
        reach = max((self.t["y"] - 1) * self.t["z"] * self.gz * self.dt.size, self.t["x"] - 1)
        if self.o.do_grad_a_pass and not self.o.shared_buckets:
            other = (self.t["x"] - 1) * self.t["z"] * self.gz * self.dt.size
            reach = max(reach, other, self.t["y"] - 1)
        return (
            even
            and all((self.parts[d] - 1) * self.t[d] < self.n[d] for d in "xy")
            and self.n["z"] % self.parts["z"] == 0
            and self.tiles <= self.target.tiles
            and (self.block or reach <= 65535)
        )

    def expect(self, x, y):
        r = self.p.nz_ratio
        rows = math.ceil(x * (1 - (1 - r) ** y))
        return rows, cd(math.ceil(x * y * r), rows)

    def buckets(self):
        over = 1 + self.o.meta_info_bucket_oversize_proportion
        total = math.ceil(self.n["x"] * self.n["y"] * self.p.nz_ratio)
        grain = math.lcm(self.edge**2 * self.dt.size, 4) // (self.edge**2 * self.dt.size)
        self.held = cd(math.floor(cd(total, self.tiles) * over + 0.5), grain) * grain
        grad_w = self.o.do_grad_w_pass
        header = 7 + W * 4 * grad_w if self.block else 9 + W * (5 + 5 * grad_w)
        rows, cols = self.expect(self.t["x"], self.t["y"])
        self.words = cd(2 * header + math.ceil(rows * (2 + cols) * over), 4) * 4
        self.own_words = self.words
        if not self.block and not self.o.shared_buckets:
            rows, cols = self.expect(self.t["y"], self.t["x"])
            self.own_words = cd(2 * (9 + 5 * W) + math.ceil(rows * (2 + 2 * cols) * over), 4) * 4

    def send(self, size, same=1, everyone=None):
        everyone = self.tiles if everyone is None else everyone
        return cd(size, 8 if same % 2 == 0 or same == everyone else 4)

    def z_shares(self, groups):
        return {c for *_, c in grid_split(1, groups, W)}

    def product(self, a, b):
        """forward with (a, b) = ("x", "y"), grad_input with ("y", "x")."""
        forward = a == "x"
        pz, tz, e, sz = self.parts["z"], self.t["z"], self.edge, self.dt.size
        words = self.words if forward else self.own_words
        bucket = self.held * e * e * sz + 2 * words
        transposed = 0 if forward or not self.block else self.held * e * e * sz
        cycles = 0
        if transposed:
            cycles = int(tile_cycles.transpose_blocks(self.held, e, e, self.dt, W))
        s_home = cd(self.n[b] * self.n["z"], self.tiles) * e * self.gz * sz
        s = self.t[b] * tz * e * self.gz * sz
        s = s if s > s_home else 0
        inner = 1 if forward else pz * self.parts["x"]
        same = self.parts[a] if inner == 1 else 1
        cycles += self.send(s, same)
        if pz > 1:
            cycles += self.send(pz * bucket, pz if self.parts["x"] == 1 else 1)
        results = self.t[a] * tz * e * self.gz
        cycles += cd(results, W) * W + self.multiply(a, b)
        depth = self.parts[b]
        sent = results * self.psz if depth > 1 else 0
        cycles += cd(sent, 4)
        outputs = cd(results, depth)
        if depth > 1:
            cycles += int(tile_cycles.reduce(outputs, depth, self.o.partials_type, self.dt, W))
        elif self.cast:
            cycles += int(tile_cycles.cast(outputs, self.o.partials_type, self.dt, W))
        gathered = s + (pz - 1) * bucket
        held = results * self.psz if self.cast or pz > 1 else 0
        stored = outputs * sz if self.cast or depth > 1 else 0
        memory = max(transposed + max(gathered + held, 2 * bucket + s + held), held + sent + stored)
        return cycles, memory

    def multiply(self, a, b):
        pz, tz = self.parts["z"], self.t["z"]
        rows, cols = self.expect(self.t[a], self.t[b])
        if self.block:
            if a == "y":
                rows, cols = cols, rows
            units = {(2, 2): 16, (2, 4): 8, (4, 4): 16}[self.dt.size, self.psz]
            return max(
                int(
                    vertex_cycles.block_forward(
                        rows,
                        cols,
                        z * self.gz,
                        (self.edge, self.edge),
                        self.dt,
                        self.o.partials_type,
                        units,
                        W,
                        pz,
                        retain=a == "x",
                    )
                )
                for z in self.z_shares(tz)
            )
        if a == "y" and self.o.shared_buckets:
            z = tz * self.gz
            cycles = vertex_cycles.element_transposed(cols, self.t[a], z, self.dt, W, pz)
            return int(cycles)
        formula = vertex_cycles.element_forward if a == "x" else vertex_cycles.element_grad_input
        return max(
            int(formula(x, cols, z * self.gz, self.dt, W, pz))
            for _, x, _, z in grid_split(rows, tz, W)
        )

    def grad_weight(self, move_buckets):
        parts, t, e, sz = self.parts, self.t, self.edge, self.dt.size
        px, py, pz = (parts[d] for d in "xyz")
        q, s = (t[d] * t["z"] * e * self.gz * sz for d in "xy")
        homes = [cd(self.n[d] * self.n["z"], self.tiles) * e * self.gz * sz for d in "xy"]
        moved = [n if n > h else 0 for n, h in zip((q, s), homes, strict=True)]
        if move_buckets:
            same = (py if px == pz == 1 else 1, px)
            z_same = pz if px == 1 else 1
        else:
            same = (py if pz == 1 else 1, px if py == pz == 1 else 1)
            z_same = pz
        cycles = sum(self.send(m, k) for m, k in zip(moved, same, strict=True))
        memory = sum(moved)
        if self.method is Method.BLOCK_AMP:
            for d in "xy":
                cycles += int(tile_cycles.rearrange_batch(t[d], e, t["z"] * self.gz, self.dt, W))
            memory = max(memory, q + s + sum(moved))
            moved = [q, s]
        values = self.held * e * e
        bucket = 2 * self.words + values * self.psz
        if pz > 1:
            cycles += pz * (
                self.send(bucket, 1, 0)
                if move_buckets
                else self.send(q, z_same) + self.send(s, z_same)
            )
        cycles += cd(values, W) * W + pz * self.multiply_grad_weight()
        kept = 2 * self.words if self.cast else 0
        if move_buckets:
            memory = max(memory, sum(moved) + 2 * bucket)
        else:
            memory = max(memory, 2 * sum(moved) + kept)
        if self.cast:
            cycles += int(tile_cycles.cast(values, self.o.partials_type, self.dt, W))
            memory = max(memory, kept + values * sz)
        return cycles, memory

    def multiply_grad_weight(self):
        rows, cols = self.expect(cd(self.t["x"], self.parts["z"]), self.t["y"])
        z, block = self.t["z"] * self.gz, (self.edge, self.edge)
        if self.method is Method.BLOCK_AMP:
            return int(
                vertex_cycles.block_grad_weight_amp(
                    rows, cols, z, block, self.dt, self.o.partials_type, W
                )
            )
        total = rows * cols
        share = cd(total, W)
        worst = 0
        for begin in range(0, total, share):
            count = min(share, total - begin)
            touched = cd(begin + count, cols) - begin // cols
            if self.block:
                one = vertex_cycles.block_grad_weight(
                    touched, count, z, block, self.dt, self.o.partials_type, W
                )
            else:
                one = vertex_cycles.element_grad_weight(touched, count, z, self.dt, W)
            worst = max(worst, cd(int(one), cd(count, cols)))
        return worst

    def price(self, move_buckets):
        self.buckets()
        costs = [self.product("x", "y")]
        if self.o.do_grad_a_pass:
            costs.append(self.product("y", "x"))
        if self.o.do_grad_w_pass:
            costs.append(self.grad_weight(move_buckets))
        return sum(c for c, _ in costs), max(m for _, m in costs)


def slow_best(params, options, dtype, target):
    edge = params.sparsity_params.block_dimensions[0]
    methods = [Method.ELEMENT] if edge == 1 else [Method.BLOCK]
    if edge > 1 and params.batch_size % (32 // dtype.size) == 0:
        methods.append(Method.BLOCK_AMP)
    found = []
    for method in methods:
        for move_buckets in (False, True) if options.do_grad_w_pass else (False,):
            for x in range(1, target.tiles + 1):
                for y in range(1, target.tiles // x + 1):
                    for z in range(1, target.tiles // (x * y) + 1):
                        one = Slow(params, options, dtype, target, method, (x, y, z))
                        if one.allowed():
                            place = (methods.index(method), move_buckets, (x, y, z))
                            found.append((*one.price(move_buckets), place))
    bound = int(target.bytes_per_tile * options.available_memory_proportion)
    fitting = [f for f in found if f[1] <= bound]
    return min(fitting) if fitting else None


@settings(deadline=None, max_examples=25)
@given(
    edge=st.sampled_from([1, 4, 8, 16]),
    out=st.integers(1, 12),
    in_=st.integers(1, 12),
    batch=st.sampled_from([1, 3, 8, 16, 48]),
    ratio=st.sampled_from([0.02, 0.1, 0.37, 1.0]),
    dtype=st.sampled_from(["float16", "float32"]),
    partials=st.sampled_from(["float16", "float32"]),
    grad_a=st.booleans(),
    grad_w=st.booleans(),
    shared=st.booleans(),
    tiles=st.sampled_from([1, 4, 6, 13]),
)
def test_brute_force_finds_no_better_plan(
    edge, out, in_, batch, ratio, dtype, partials, grad_a, grad_w, shared, tiles
):
    scale = edge if edge > 1 else 9
    params = FullyConnectedParams(SparsityParams(edge), ratio, batch, 1, scale * in_, scale * out)
    target = Target(tiles=tiles)
    options = Options(
        do_grad_a_pass=grad_a, do_grad_w_pass=grad_w, shared_buckets=shared, partials_type=partials
    )
    plan = make_plan(target, dtype, params, options)
    kind = data_type(dtype)
    best = slow_best(params, options.repaired(kind, edge == 1), kind, target)
    assert best is not None
    cycles, memory, (_, move_buckets, partition) = best
    assert (plan.cycles, plan.temporary_bytes) == (cycles, memory)
    assert (plan.grad_w_exchange_buckets, plan.partition[1:]) == (move_buckets, partition)


def test_all_partitions_of_the_whole_chip():
    found = all_partitions(1472)
    assert found.shape == (3, 47795)
    assert found.prod(axis=0).max() <= 1472
    assert len(np.unique(found, axis=1).T) == 47795


def layer(batch=64, size=512, edge=1, ratio=0.1, groups=1):
    return FullyConnectedParams(SparsityParams(edge), ratio, batch, groups, size, size)


def test_matmul_plans_forward_and_grad_input_jointly():
    params = MatmulParams(SparsityParams(4), 0.1, 1, 512, 256, 64)
    plan = matmul_plan(Target(tiles=24), "float16", params, {"do_grad_w_pass": True})
    assert list(plan.costs) == ["forward", "grad_input"]


def test_tight_memory_limit_is_doubled_then_removed():
    roomy = make_plan(Target(tiles=8), "float16", layer())
    tight = Target(tiles=8, bytes_per_tile=4 * roomy.temporary_bytes)
    options = {"available_memory_proportion": 0.001}
    plan = make_plan(tight, "float16", layer(), options)
    bounds = plan.search.bounds
    assert all(b == 2 * a for a, b in itertools.pairwise(bounds) if b)
    assert plan.temporary_bytes <= plan.memory_bound
    tiny = make_plan(tight.with_(bytes_per_tile=64), "float16", layer())
    assert tiny.memory_bound is None
    assert tiny.cycles == roomy.cycles


def test_proportion_zero_minimizes_memory():
    target = Target(tiles=8)
    least = make_plan(target, "float16", layer(), {"available_memory_proportion": 0})
    roomy = make_plan(target, "float16", layer())
    assert least.temporary_bytes < roomy.temporary_bytes
    assert least.cycles > roomy.cycles


def test_constraints_are_kept():
    options = {"plan_constraints": {"partition": {"x": 6, "y": 4, "z": 1}}}
    plan = make_plan(Target.mk2(), "float16", layer(ratio=0.01), options)
    assert plan.partition == (1, 6, 4, 1)
    assert plan.buckets == (144, 408, 0, 6)


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ({"x": 5000}, "ask for 5000 tiles a group, the target has 1472"),
        ({"x": 500}, "x=500 leaves parts empty: 512 groups already fit 256 parts"),
        ({"z": 5}, "z=5 must divide the 16 groups of the batch"),
    ],
)
def test_unsatisfiable_constraints_raise(partition, message):
    with pytest.raises(ValueError, match=message):
        make_plan(Target.mk2(), "float16", layer(), {"plan_constraints": {"partition": partition}})


def test_more_groups_than_tiles():
    with pytest.raises(ValueError, match="each of the 9 groups needs a tile of its own"):
        make_plan(Target(tiles=8), "float16", layer(groups=9))


def test_groups_share_the_tiles():
    plan = make_plan(Target(tiles=24), "float16", layer(groups=3))
    assert plan.partition.groups == 3
    assert plan.tiles_used <= 24


def test_batch_too_large_for_16_bit_offsets():
    params = MatmulParams(SparsityParams(), 1 / 16, 1, 4096, 4096, 16384)
    with pytest.raises(ValueError, match=r"offsets exceed 16 bits.*use a smaller batch"):
        matmul_plan(Target.mk2(), "float16", params)


def test_cache_keys_contain_every_input():
    cache = PlanningCache()
    target = Target(tiles=8)
    first = make_plan(target, "float16", layer(), cache=cache)
    assert make_plan(target, "half", layer(), cache=cache) is first
    assert cache.hits == 1
    make_plan(target, "float32", layer(), cache=cache)
    make_plan(Target(tiles=9), "float16", layer(), cache=cache)
    make_plan(target, "float16", layer(groups=2), cache=cache)
    make_plan(target, "float16", layer(), {"plan_constraints": {"partition": {"x": 2}}}, cache)
    assert (len(cache), cache.hits) == (5, 1)
