"""The execution model: the time of a planned product on a pattern.

The estimator's formulas (`planning.cycles`) choose the plan; these predict its time. Each is a
count of the instructions of the kernel's loops; a worker issues one instruction every `workers`
cycles, so a tile pays `workers` times the slowest worker. They differ where the estimator is known
to be off: the general kernels of unstructured sparsity set up and store for every block of the
batch, not once a row; every matched sub-group launches the workers anew; zeroing runs at the full
width of the data path; 16x16 blocks of float16 with float32 partials always load their coefficients
in two halves.

The planner assumes that every tile gets its even share and that nothing spills. The execution model
fills the buckets of a pattern: the fullest tile, the rows of each worker, the propagation steps.
The exchange moves the data a tile lacks at the target's rate, and every superstep that exchanges
anything costs the target's `sync_cycles`. No constant is fitted and nothing is simulated.

See section 3.6 of docs/popsparse-formulas.md.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from popsparse.encoding.buckets import (
    BucketLayout,
    OverflowInfo,
    SubGroups,
    distances_from_home,
)
from popsparse.encoding.partitioner import Partitioner
from popsparse.machine.dtypes import DType
from popsparse.machine.intervals import offsets_of
from popsparse.planning import cycles as tile_cycles
from popsparse.planning.cycles import (
    CONTROL_INSTRUCTIONS,
    LOOP_CONTROL,
    LOOP_STEPS,
    grid_split,
    split_rows,
)
from popsparse.planning.params import ceil_div
from popsparse.planning.plan import Method, Plan

Ints = Any


class Kernel(NamedTuple):
    """Worker instructions: `start` + rows * `row` + non-zeros (or blocks) * `each`.

    `supervisor` cycles are paid for each matched sub-group, `by_row` and `by_each` of them for
    each of its rows and blocks.
    """

    start: Ints
    row: Ints
    each: Ints
    supervisor: int
    by_row: int = 0
    by_each: int = 0

    def worker(self, rows: Ints, count: Ints) -> Ints:
        return self.start + rows * self.row + count * self.each

    def supervise(self, rows: Ints, count: Ints) -> Ints:
        return self.supervisor + rows * self.by_row + count * self.by_each


class _Rows(NamedTuple):
    """Instructions of a kernel's general case, by part. A non-zero takes 3 instructions in a full
    vector and 2 in a partial one; these are the instructions around those loops."""

    row: int
    vector: int
    rest: int  # Once a row when the batch is no multiple of the vector.
    half: int  # Half a vector: 4 of 8, or 2 of 4.
    single: int  # Each element left after that.
    singles: int  # Once a row when there are any.


# A row: its entry, pointers, the loop branch. A vector: pointers, first loads, accumulators in and
# out of memory. grad_input's kernels peel the last non-zero off the loop and so save three.
_FORWARD = {2: _Rows(13, 17, 4, 11, 10, 1), 4: _Rows(13, 12, 4, 8, 8, 0)}
_GRAD_INPUT = {2: _Rows(12, 13, 4, 9, 9, 1), 4: _Rows(12, 11, 4, 7, 7, 0)}


def element_product(z: Ints, dtype: DType, *, grad_input: bool = False) -> Kernel:
    """forward, or grad_input from buckets of its own, with `z` elements of the batch a worker."""
    z = np.asarray(z)
    counts = (_GRAD_INPUT if grad_input else _FORWARD)[dtype.size]
    vector = 16 // dtype.size
    half, singles = z & (vector // 2), z & (vector // 2 - 1)
    row = (
        counts.row
        + counts.vector * (z // vector)
        + np.where(z % vector > 0, counts.rest, 0)
        + np.where(half > 0, counts.half, 0)
        + counts.single * singles
        + np.where(singles > 0, counts.singles, 0)
    )
    each = 3 * (z // vector) + np.where(half > 0, 2, 0) + 2 * singles
    # Two batch sizes have their own kernels.
    formulas = tile_cycles.GRAD_INPUT_ROWS if grad_input else tile_cycles.FORWARD_ROWS
    wide, narrow, general = formulas[dtype.size]["z"]
    start, row, each = tile_cycles.select_by_z(
        z, {vector: (*wide, 3), vector // 2: (*narrow, 2)}, (general[0], row, each)
    )
    return Kernel(start, row, each, 46 + 46 if grad_input else 47 + 46)


def element_transposed(z: int, dtype: DType) -> Kernel:
    """grad_input from the forward buckets. `each` counts turns of a row's loop: its non-zeros
    are shared among the workers. A turn sets up its pointers anew."""
    half = dtype.size == 2
    if half and z in (4, 8):
        return Kernel(20, *((18, 10) if z == 8 else (21, 7)), 44 + 68)
    width = dtype.vector_width
    vectors, rest = z // width, z % width
    if half:
        each = 9 + (2 + 5 * vectors) * (vectors > 0) + (2 + 3 * rest) * (rest > 0)
        return Kernel(26, 22, each, 44 + 68)
    each = 8 + (2 + 3 * vectors) * (vectors > 0) + 4 * rest
    return Kernel(23, 24, each, 44 + 68)


def block_product(
    z: int,
    block: tuple[int, int],
    dtype: DType,
    partials: DType,
    conv_units: int,
    *,
    retain: bool,
) -> Kernel:
    """forward of blocks, or with `retain` False grad_input; `z` elements of the batch a worker.

    Derived from the estimator's formula, which is exact here except for 16x16 blocks with float32
    partials: their kernel always computes a block in two halves.
    """
    units = min(conv_units, 8) if partials.size == 4 and dtype.size == 2 else conv_units

    def tile(x: int, y: int, workers: int) -> int:
        sizes = (block, dtype, partials, units, workers)
        return int(tile_cycles.block_forward(x, y, z, *sizes, retain=retain))

    return _fit_kernel(tile)


def _fit_kernel(tile: Callable[[int, int, int], int]) -> Kernel:
    """The kernel that matches a formula in rows, non-zeros per row and workers, linear in each."""
    nothing = tile(0, 0, 0)
    by_row = tile(1, 0, 0) - nothing
    by_each = tile(1, 1, 0) - nothing - by_row
    start = tile(0, 0, 1) - nothing
    row = tile(1, 0, 1) - tile(1, 0, 0) - start
    each = tile(1, 1, 1) - tile(1, 1, 0) - start - row
    return Kernel(start, row, each, nothing, by_row, by_each)


MISS_CYCLES = 32
"""Supervisor cycles to skip a sub-group of another rectangle."""


@dataclass(frozen=True)
class BucketLoad:
    """Sub-groups of all buckets after spilling, of one group of the product."""

    groups: SubGroups
    layout: BucketLayout

    @classmethod
    def of(cls, plan: Plan, pattern: Any) -> BucketLoad:
        """Cut a `SparsePattern` as the partitioner does; raises the partitioner's errors."""
        partitioner = Partitioner(plan)
        return cls(partitioner.sub_groups(pattern), partitioner.layout)

    @cached_property
    def overflow(self) -> OverflowInfo:
        return OverflowInfo.of(self.groups, self.layout)

    @cached_property
    def home(self) -> np.ndarray:
        """The rectangle whose tiles hold each sub-group's bucket."""
        return self.groups.bucket // self.layout.partition[2]

    @cached_property
    def distances(self) -> tuple[np.ndarray, np.ndarray]:
        """How many partitions of x and of y sub-groups lie away from their own rectangle."""
        groups = self.groups
        return distances_from_home(groups.rectangle, groups.bucket, self.layout.partition)

    def most_cycles(self, cycles: np.ndarray, by: np.ndarray) -> float:
        """The largest sum of cycles `by` bucket or by rectangle, whose tiles each see all its
        buckets. Sub-groups outside their own rectangle cost only a skip."""
        own = np.where(self.groups.rectangle == self.home, cycles, MISS_CYCLES)
        return float(np.bincount(by, own, minlength=1).max())


_WORD = 2  # Bytes of a meta-info word.


class Step(NamedTuple):
    """A part of a pass: cycles of vertices and of exchanges on the slowest tile, and how many
    supersteps exchange anything. Vertices that follow on the same tiles need no synchronisation."""

    name: str
    compute: float
    exchange: float
    syncs: int


@dataclass(frozen=True)
class PassTime:
    """The predicted time of one pass.

    Attributes:
        steps: its parts in order.
        sync_cycles: cycles of all their synchronisations.
        propagation_steps: compute steps of the propagation phase.
        clock_hz, products: for seconds and TFLOP/s; products = 2 x non-zeros x batch.
    """

    steps: tuple[Step, ...]
    sync_cycles: float
    propagation_steps: int
    clock_hz: float
    products: float

    @property
    def compute_cycles(self) -> float:
        return sum(step.compute for step in self.steps)

    @property
    def exchange_cycles(self) -> float:
        return sum(step.exchange for step in self.steps)

    @property
    def cycles(self) -> float:
        return self.compute_cycles + self.exchange_cycles + self.sync_cycles

    @property
    def seconds(self) -> float:
        return self.cycles / self.clock_hz

    @property
    def tflops(self) -> float:
        return self.products / self.seconds / 1e12

    def to_dict(self) -> dict[str, Any]:
        """Plain figures for reports and `--json`."""
        return {
            "steps": [step._asdict() for step in self.steps],
            "compute_cycles": self.compute_cycles,
            "exchange_cycles": self.exchange_cycles,
            "sync_cycles": self.sync_cycles,
            "cycles": self.cycles,
            "seconds": self.seconds,
            "tflops": self.tflops,
            "propagation_steps": self.propagation_steps,
        }


def predict(plan: Plan, pattern: Any) -> dict[str, PassTime]:
    """The time of each pass of a dynamic plan: see `plans.predict`."""
    patterns = list(pattern) if plan.partition.groups > 1 else [pattern]
    loads = [BucketLoad.of(plan, group_pattern) for group_pattern in patterns]
    blocks = sum(int(load.groups.nz.sum()) for load in loads)
    area = plan.block_dimensions[0] * plan.block_dimensions[1]
    products = 2.0 * blocks * area * plan.params.batch_size
    times = {}
    for name in plan.costs:
        steps = tuple(_model_pass(plan, name, loads).steps())
        syncs = sum(step.syncs for step in steps) * plan.target.sync_cycles
        turns = max(load.overflow.propagation_steps for load in loads)
        times[name] = PassTime(steps, syncs, turns, plan.target.clock_hz, products)
    return times


def sub_group_cycles(plan: Plan, name: str, load: BucketLoad) -> np.ndarray:
    """Cycles of a tile in the pass `name`, for each sub-group it finds: [sub-groups]."""
    return _model_pass(plan, name, [load]).group_cycles(load)


def _model_pass(plan: Plan, name: str, loads: list[BucketLoad]) -> _Pass:
    return _GradWeight(plan, loads) if name == "grad_weight" else _Product(plan, loads, name)


class _Pass(ABC):
    """The base class of the passes."""

    def __init__(self, plan: Plan, loads: list[BucketLoad]) -> None:
        self.plan, self.loads, self.target = plan, loads, plan.target
        self.workers, self.size = plan.target.workers, plan.dtype.size
        self.partials = plan.options.partials_type
        self.z = plan.elements_per_tile.z

    def exchange_cycles(self, received: float, same: int = 1) -> float:
        """Cycles to receive this many bytes; `same` neighbouring tiles receive equal data."""
        bus = self.target.exchange_bus_tiles
        share = bus if bus > 1 and same % bus == 0 else 1
        return float(ceil_div(received, self.target.exchange_bytes_per_cycle * share))

    def home_bytes(self, *dims: str) -> float:
        """Bytes of a dense operand that a tile keeps when all tiles share it."""
        elements = math.prod(getattr(self.plan.sizes, dim) for dim in dims)
        return elements * self.plan.params.num_groups * self.size / self.plan.tiles_used

    def needed_bytes(self, *dims: str) -> int:
        """Bytes of a dense operand that a tile works on."""
        return self.size * math.prod(getattr(self.plan.elements_per_tile, dim) for dim in dims)

    def fetch_cycles(self, dims: tuple[str, str], same: int) -> float:
        """Cycles to fetch the part of an operand that a tile works on and does not keep."""
        missing = self.needed_bytes(*dims) - self.home_bytes(*dims)
        return self.exchange_cycles(max(0.0, missing), same)

    @abstractmethod
    def group_cycles(self, load: BucketLoad) -> np.ndarray:
        """Cycles of a tile for each sub-group: workers and supervisor."""

    @abstractmethod
    def steps(self) -> Iterable[Step]:
        """The parts of the pass in order."""

    def propagation_steps(self, bucket_bytes: float) -> Iterable[Step]:
        """The propagation phase: the slowest tile of each step, and the loop's control."""
        z = self.plan.partition.z
        overflow = max((load.overflow for load in self.loads), key=lambda o: o.propagation_steps)
        offsets = overflow.kept_offsets
        if not offsets:
            return
        # To find no match in the bucket with the most sub-groups.
        held = [np.bincount(load.groups.bucket, minlength=1).max() for load in self.loads]
        no_match = float(MISS_CYCLES * max(held))
        compute = 0.0
        for x, y in offsets:
            slowest = 0.0
            for load in self.loads:
                far_x, far_y = load.distances
                at_offset = (far_x == x) & (far_y == y)
                if at_offset.any():
                    # A bucket may hold several sub-groups for a rectangle that it visits.
                    cycles = self.group_cycles(load)[at_offset]
                    spent = np.bincount(load.groups.bucket[at_offset], cycles)
                    slowest = max(slowest, float(spent.max()))
            compute += z * (slowest or no_match)
        turns = z * len(offsets)
        skipped = sum(not used for used in overflow.used_x[: overflow.x])
        control = turns * LOOP_CONTROL * self.workers
        moved = (turns + skipped + 1) * self.exchange_cycles(bucket_bytes)
        # One move before the first turn, and a condition after the last.
        yield Step("propagation", compute + control, moved, LOOP_STEPS * turns + 1)

    def control_step(self) -> Step:
        """The step that casts and multiplies the end counts, and decides whether to propagate."""
        cast = float(tile_cycles.cast(3, self.plan.dtype, self.partials, self.workers))
        decide = 2 * CONTROL_INSTRUCTIONS * self.workers
        return Step("control", cast + decide, 0.0, 1)


class _Product(_Pass):
    """forward, or grad_input: the same with x and y exchanged."""

    def __init__(self, plan: Plan, loads: list[BucketLoad], name: str) -> None:
        super().__init__(plan, loads)
        self.grad_input = name == "grad_input"
        self.out, self.in_ = ("y", "x") if self.grad_input else ("x", "y")
        parts = plan.partition
        inner = parts.x * parts.z if self.grad_input else 1
        self.same = getattr(parts, self.out) if inner == 1 else 1
        self.depth = getattr(parts, self.in_)

    def kernel(self, z: Ints) -> Kernel:
        """The kernel when a worker has `z` elements of the batch (with shared element buckets,
        grad_input's workers each have the full batch of the tile)."""
        plan, partials = self.plan, self.partials
        if plan.method is not Method.ELEMENT:
            sizes = (plan.block_dimensions, plan.dtype, partials)
            units = plan.target.conv_units(plan.dtype, partials)
            return block_product(int(z), *sizes, units, retain=not self.grad_input)
        if self.grad_input and plan.shared_buckets:
            return element_transposed(int(z), plan.dtype)
        return element_product(z, plan.dtype, grad_input=self.grad_input)

    def group_cycles(self, load: BucketLoad) -> np.ndarray:
        plan, grain = self.plan, self.plan.grouping.z
        if plan.method is not Method.ELEMENT:
            pieces = grid_split(1, plan.groups_per_tile.z, self.workers)
            shares = sorted({share for *_, share in pieces})
            kernels = [self.kernel(share * grain) for share in shares]
            slowest = np.maximum.reduce([kernel.worker(0, load.groups.nz) for kernel in kernels])
            supervisor = kernels[-1].supervise(load.groups.rows, load.groups.nz)
            return self.workers * slowest + supervisor
        if self.grad_input and plan.shared_buckets:
            kernel = self.kernel(self.z)
            turns = ceil_div(load.groups.length, self.workers)
            turns = np.add.reduceat(turns, load.groups.first_row) if len(turns) else turns
            return self.workers * kernel.worker(load.groups.rows, turns) + kernel.supervisor
        groups = load.groups.transpose() if self.grad_input else load.groups
        work = split_rows(groups.rows, groups.length, plan.groups_per_tile.z, self.workers)
        before = offsets_of(groups.length)
        first = groups.first_row[work.group] + work.row
        nz = before[first + work.rows] - before[first]
        kernel = self.kernel(work.grains * grain)
        slowest = np.zeros(len(groups.rows), np.int64)
        np.maximum.at(slowest, work.group, kernel.worker(work.rows, nz))
        return self.workers * slowest + kernel.supervisor

    def steps(self) -> Iterable[Step]:
        plan, parts = self.plan, self.plan.partition
        words = plan.buckets.forward_words
        if self.grad_input and not plan.shared_buckets:
            words = plan.buckets.grad_input_words
        bucket = plan.buckets.nz_elements * self.size + _WORD * words
        edges = plan.block_dimensions
        if self.grad_input and min(edges) > 1:
            blocks = plan.buckets.nz_elements // (edges[0] * edges[1])
            turn = tile_cycles.transpose_blocks(blocks, *edges, plan.dtype, self.workers)
            yield Step("transpose buckets", float(turn), 0.0, 0)
        yield Step("fetch input", 0.0, self.fetch_cycles((self.in_, "z"), self.same), 1)
        moved = (parts.z - 1) * bucket
        same = parts.z if parts.x == 1 else 1
        results = getattr(plan.elements_per_tile, self.out) * self.z
        clear = tile_cycles.clear_memory(results * self.partials.size, self.workers)
        compute = max(load.most_cycles(self.group_cycles(load), load.home) for load in self.loads)
        yield Step(
            "distribution",
            float(clear) + compute,
            self.exchange_cycles(moved, same),
            1 if moved else 0,
        )
        yield self.control_step()
        yield from self.propagation_steps(bucket)
        outputs = ceil_div(results, self.depth)
        if self.depth > 1:
            sent = (self.depth - 1) * outputs * self.partials.size
            added = tile_cycles.reduce(outputs, self.depth, self.partials, plan.dtype, self.workers)
            yield Step("reduction", float(added), self.exchange_cycles(sent), 1)
        elif self.partials is not plan.dtype:
            cast = tile_cycles.cast(results, self.partials, plan.dtype, self.workers)
            yield Step("cast", float(cast), 0.0, 0)


class _GradWeight(_Pass):
    """grad_weight: each bucket meets all parts of the batch."""

    def kernel(self) -> Kernel:
        plan = self.plan

        def tile(x: int, y: int, workers: int) -> int:
            if plan.method is Method.ELEMENT:
                return int(tile_cycles.element_grad_weight(x, y, self.z, plan.dtype, workers))
            is_amp = plan.method is Method.BLOCK_AMP
            formula = tile_cycles.block_grad_weight_amp if is_amp else tile_cycles.block_grad_weight
            types = (plan.dtype, self.partials)
            return int(formula(x, y, self.z, plan.block_dimensions, *types, workers))

        return _fit_kernel(tile)

    def group_cycles(self, load: BucketLoad) -> np.ndarray:
        amp = self.plan.method is Method.BLOCK_AMP
        kernel = self.kernel()
        share = load.groups.nz if amp else ceil_div(load.groups.nz, self.workers)
        rows = (
            load.groups.rows
            if amp
            else np.minimum(ceil_div(load.groups.rows, self.workers) + 1, share)
        )
        supervisor = kernel.supervise(load.groups.rows, load.groups.nz)
        return self.workers * kernel.worker(rows, share) + supervisor

    def steps(self) -> Iterable[Step]:
        plan, parts = self.plan, self.plan.partition
        moves = plan.grad_w_exchange_buckets
        if moves:
            same = (parts.y if parts.x == parts.z == 1 else 1, parts.x)
        else:
            same = (
                parts.y if parts.z == 1 else 1,
                parts.x if parts.y == parts.z == 1 else 1,
            )
        fetched = self.fetch_cycles(("x", "z"), same[0]) + self.fetch_cycles(("y", "z"), same[1])
        yield Step("fetch inputs", 0.0, fetched, 1)
        if plan.method is Method.BLOCK_AMP:
            groups = plan.groups_per_tile
            edges = plan.block_dimensions
            turn = sum(
                int(tile_cycles.rearrange_batch(n, edge, self.z, plan.dtype, self.workers))
                for n, edge in ((groups.x, edges[0]), (groups.y, edges[1]))
            )
            yield Step("rearrange inputs", float(turn), 0.0, 0)
        values = plan.buckets.nz_elements
        bucket = float(values * self.partials.size + _WORD * plan.buckets.forward_words)
        inputs = self.needed_bytes("x", "z") + self.needed_bytes("y", "z")
        travels = bucket if moves else inputs
        clear = tile_cycles.clear_memory(values * self.partials.size, self.workers)
        slowest = max(
            load.most_cycles(self.group_cycles(load), load.groups.bucket) for load in self.loads
        )
        rounds = parts.z if parts.z > 1 else 0
        yield Step(
            "distribution",
            float(clear) + parts.z * slowest,
            rounds * self.exchange_cycles(travels),
            rounds,
        )
        yield self.control_step()
        yield from self.propagation_steps(travels)
        if self.partials is not plan.dtype:
            cast = tile_cycles.cast(values, self.partials, plan.dtype, self.workers)
            yield Step("cast", float(cast), 0.0, 0)
