"""How long a plan takes on a pattern: the execution model.

Where the planner assumes that every tile gets its even share and that nothing spills, this looks
at the buckets a pattern really makes: the fullest tile, the rows each worker gets, the steps of
the propagation phase. It needs no simulation, so it serves for predictions; the device program,
run on the simulated machine, gives the same kind of figures step by step.

No constant is fitted. Kernels are instruction counts (`timing.kernels`), the exchange moves what
a tile lacks at the target's rate, and every superstep that exchanges anything costs the target's
`sync_cycles`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dynsparse.typed import typed
from popsparse.planning import tile_cycles
from popsparse.planning.control_cycles import CONTROL_INSTRUCTIONS, LOOP_CONTROL, LOOP_STEPS
from popsparse.planning.plan import Method, Plan
from popsparse.timing import kernels as execution_cycles
from popsparse.timing.kernels import Kernel
from popsparse.timing.load import BucketLoad

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
        sync_cycles: what their synchronisations take together.
        propagation_steps: compute steps of the propagation phase.
        clock_hz, products: to state seconds and TFLOP/s; products = 2 x non-zeros x batch.
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


@typed
def predict(plan: Plan, pattern: Any) -> dict[str, PassTime]:
    """The time of each pass the plan is for.

    Args:
        plan: as `make_plan` or `matmul_plan` give it.
        pattern: a `SparsePattern` of the plan's shape and block size; for several groups a
            sequence of them.

    Raises:
        ValueError: a pattern of another shape or block size, or one whose buckets overflow.
    """
    patterns = list(pattern) if plan.partition.groups > 1 else [pattern]
    loads = [BucketLoad.of(plan, one) for one in patterns]
    blocks = sum(load.blocks for load in loads)
    area = plan.block_dimensions[0] * plan.block_dimensions[1]
    products = 2.0 * blocks * area * plan.params.batch_size
    found = {}
    for name in plan.costs:
        model: _Pass = (
            _GradWeight(plan, loads) if name == "grad_weight" else _Product(plan, loads, name)
        )
        steps = tuple(model.steps())
        syncs = sum(step.syncs for step in steps) * plan.target.sync_cycles
        turns = max(load.overflow.propagation_steps for load in loads)
        found[name] = PassTime(steps, syncs, turns, plan.target.clock_hz, products)
    return found


def sub_group_cycles(plan: Plan, name: str, load: BucketLoad) -> np.ndarray:
    """Cycles of a tile, in the pass of this name, for each sub-group it finds: [sub-groups]."""
    model = _GradWeight(plan, [load]) if name == "grad_weight" else _Product(plan, [load], name)
    return model.group_cycles(load)


class _Pass(ABC):
    """What the passes have in common."""

    def __init__(self, plan: Plan, loads: list[BucketLoad]) -> None:
        self.plan, self.loads, self.target = plan, loads, plan.target
        self.workers, self.size = plan.target.workers, plan.dtype.size
        self.partials = plan.options.partials_type
        self.z = plan.elements_per_tile.z

    def exchange(self, received: float, same: int = 1) -> float:
        """Cycles to receive so many bytes; `same` neighbouring tiles receive equal data."""
        bus = self.target.exchange_bus_tiles
        share = bus if bus > 1 and same % bus == 0 else 1
        return float(-(-received // (self.target.exchange_bytes_per_cycle * share)))

    def home(self, *dims: str) -> float:
        """Bytes of a dense operand that a tile keeps when all tiles share it."""
        size = 1.0
        for dim in dims:
            size *= getattr(self.plan.sizes, dim)
        return size * self.plan.params.num_groups * self.size / self.plan.tiles_used

    def needed(self, *dims: str) -> float:
        """Bytes of a dense operand that a tile works on."""
        size = 1.0
        for dim in dims:
            size *= getattr(self.plan.elements_per_tile, dim)
        return size * self.size

    def fetch(self, dims: tuple[str, str], same: int) -> float:
        return self.exchange(max(0.0, self.needed(*dims) - self.home(*dims)), same)

    @abstractmethod
    def group_cycles(self, load: BucketLoad) -> np.ndarray:
        """Cycles of a tile for each sub-group: workers and supervisor."""

    @abstractmethod
    def steps(self) -> Iterable[Step]:
        """The parts of the pass in order."""

    def propagate(self, bucket_bytes: float) -> Iterable[Step]:
        """The propagation phase: the slowest tile at each step, and the loop around it."""
        z = self.plan.partition.z
        overflow = max((load.overflow for load in self.loads), key=lambda o: o.propagation_steps)
        offsets = overflow.kept_offsets
        if not offsets:
            return
        compute = 0.0
        for offset in offsets:
            slowest = 0.0
            for load in self.loads:
                there = load.at_offset(*offset)
                if there.any():
                    # A bucket may hold several sub-groups for the rectangle it passes.
                    spent = np.bincount(load.groups.bucket[there], self.group_cycles(load)[there])
                    slowest = max(slowest, float(spent.max()))
            compute += z * (slowest or float(max(load.scan for load in self.loads)))
        turns = z * len(offsets)
        skipped = sum(not used for used in overflow.used_x[: overflow.x])
        control = turns * LOOP_CONTROL * self.workers
        moved = (turns + skipped + 1) * self.exchange(bucket_bytes)
        # One move before the first turn, and a condition after the last.
        yield Step("propagation", compute + control, moved, LOOP_STEPS * turns + 1)

    def control(self) -> Step:
        """The end counts cast, multiplied, and the decision whether to propagate."""
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

    def kernel(self, z: Any) -> Kernel:
        return execution_cycles.product_kernel(self.plan, z, grad_input=self.grad_input)

    def group_cycles(self, load: BucketLoad) -> np.ndarray:
        plan, grain = self.plan, self.plan.grouping.z
        if plan.method is not Method.ELEMENT:
            shares = load.batch_shares(plan.groups_per_tile.z)
            by_share = []
            for share in shares:
                kernel = self.kernel(share * grain)
                by_share.append(self.workers * kernel.worker(0, load.nz))
            own = kernel.supervisor + load.rows * kernel.by_row + load.nz * kernel.by_each
            return np.maximum.reduce(by_share) + own
        if self.grad_input and plan.shared_buckets:
            kernel = self.kernel(self.z)
            work = kernel.worker(load.rows, load.shared_turns(self.workers))
            return self.workers * work + kernel.supervisor
        pieces = load.pieces(plan.groups_per_tile.z, self.workers, transposed=self.grad_input)
        kernel = self.kernel(pieces.grains * grain)
        work = load.slowest(pieces.group, kernel.worker(pieces.rows, pieces.nz))
        return self.workers * work + kernel.supervisor

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
        yield Step("fetch input", 0.0, self.fetch((self.in_, "z"), self.same), 1)
        moved = (parts.z - 1) * bucket
        same = parts.z if parts.x == 1 else 1
        results = getattr(plan.elements_per_tile, self.out) * self.z
        clear = execution_cycles.zero(results * self.partials.size, self.workers)
        compute = max(load.distribution(self.group_cycles(load)) for load in self.loads)
        yield Step(
            "distribution", float(clear) + compute, self.exchange(moved, same), 1 if moved else 0
        )
        yield self.control()
        yield from self.propagate(bucket)
        outputs = -(-results // self.depth)
        if self.depth > 1:
            sent = (self.depth - 1) * outputs * self.partials.size
            added = tile_cycles.reduce(outputs, self.depth, self.partials, plan.dtype, self.workers)
            yield Step("reduction", float(added), self.exchange(sent), 1)
        elif self.partials is not plan.dtype:
            cast = tile_cycles.cast(results, self.partials, plan.dtype, self.workers)
            yield Step("cast", float(cast), 0.0, 0)


class _GradWeight(_Pass):
    """grad_weight: each bucket meets all parts of the batch."""

    def group_cycles(self, load: BucketLoad) -> np.ndarray:
        plan = self.plan
        amp = plan.method is Method.BLOCK_AMP
        kernel = execution_cycles.grad_weight_kernel(plan, self.z)
        share = load.nz if amp else -(-load.nz // self.workers)
        rows = load.rows if amp else np.minimum(-(-load.rows // self.workers) + 1, share)
        own = kernel.supervisor + load.rows * kernel.by_row + load.nz * kernel.by_each
        return self.workers * kernel.worker(rows, share) + own

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
        fetched = self.fetch(("x", "z"), same[0]) + self.fetch(("y", "z"), same[1])
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
        inputs = self.needed("x", "z") + self.needed("y", "z")
        travels = bucket if moves else inputs
        clear = execution_cycles.zero(values * self.partials.size, self.workers)
        slowest = max(load.slowest_bucket(self.group_cycles(load)) for load in self.loads)
        rounds = parts.z if parts.z > 1 else 0
        yield Step(
            "distribution",
            float(clear) + parts.z * slowest,
            rounds * self.exchange(travels),
            rounds,
        )
        yield self.control()
        yield from self.propagate(travels)
        if self.partials is not plan.dtype:
            cast = tile_cycles.cast(values, self.partials, plan.dtype, self.workers)
            yield Step("cast", float(cast), 0.0, 0)
