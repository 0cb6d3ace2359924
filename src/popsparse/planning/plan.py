"""Plans, and the cache of plans.

Dimensions: x = rows of the sparse matrix (output channels), y = its columns (input channels),
z = the batch. A *group* of a dimension is its unit of division (`grouping`): an element or a block
edge in x and y, the vector width or 1 or the accumulators' width in z.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from popsparse.machine.dtypes import DType
from popsparse.planning.options import Options
from popsparse.planning.params import FullyConnectedParams, ceil_div

PASSES = ("forward", "grad_input", "grad_weight")


class Sizes(NamedTuple):
    """One number for each dimension of the forward product."""

    groups: int
    x: int
    y: int
    z: int


class Method(Enum):
    """A set of vertices for the three passes."""

    ELEMENT = "element"
    """Unstructured; z in vectors. grad_input reads the forward buckets transposed when shared."""
    BLOCK = "block"
    """Blocks in the accumulators; any batch; grad_weight without them."""
    BLOCK_AMP = "block-amp"
    """Blocks; grad_weight in the accumulators too, z in 16 (float16) or 8 (float32)."""

    def grouping(self, block: tuple[int, int], dtype: DType) -> Sizes:
        z = {
            Method.ELEMENT: dtype.vector_width,
            Method.BLOCK: 1,
            Method.BLOCK_AMP: 32 // dtype.size,
        }[self]
        return Sizes(1, block[0], block[1], z)


class BucketSizes(NamedTuple):
    """Fixed sizes of one bucket. Words are 16 bits; elements are values of the data type."""

    nz_elements: int
    forward_words: int
    grad_input_words: int
    """0 when grad_input reads the forward buckets."""
    overflow_words: int
    """Words of the tensor's single overflow record (not one per bucket)."""

    @property
    def words(self) -> int:
        """Meta-info words of a bucket: the forward part and grad_input's own."""
        return self.forward_words + self.grad_input_words


class Term(NamedTuple):
    """One term of the estimate: cycles, and the temporary bytes of a tile during it."""

    name: str
    cycles: int
    temporary_bytes: int


@dataclass(frozen=True)
class PassCost:
    """The planner's estimate of one pass."""

    terms: tuple[Term, ...]
    temporary_bytes: int

    @property
    def cycles(self) -> int:
        return sum(term.cycles for term in self.terms)


class Search(NamedTuple):
    """Statistics of a search, for the report.

    Attributes:
        counts: numbers of partitions priced, and of those that are possible, by name.
        bounds: the memory bounds tried, bytes; None: without bound.
        runners_up: the next best plans as plain dictionaries.
    """

    counts: dict[str, int]
    bounds: tuple[int | None, ...]
    runners_up: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Plan:
    """The planner's result. Made by `popsparse.planning`.

    Attributes:
        params, options: the request; the options are the effective ones (partials repaired).
        dtype: type of the values and the dense operands.
        target: the machine.
        method, grouping, partition: see above; partition's product is the number of tiles in use.
        grad_w_exchange_buckets: grad_weight moves the buckets (else the dense operands).
        block_dimensions: the block of the plan; smaller than the parameters' for e.g. 16x16 blocks
            of float32.
        buckets: the bucket sizes.
        costs: the estimate by pass name, in `PASSES` order, only for planned passes.
        dense: the dense product of each pass (`dense.DensePlan`), if the plan is constrained to
            keep its weights dense; else empty.
        memory_bound: the bound on a tile's temporary memory, bytes; None: no bound.
        search: the `Search`, for the report.
    """

    params: FullyConnectedParams
    options: Options
    dtype: DType
    target: Any = field(compare=False, repr=False)
    method: Method
    grouping: Sizes
    partition: Sizes
    grad_w_exchange_buckets: bool
    block_dimensions: tuple[int, int]
    buckets: BucketSizes
    costs: dict[str, PassCost] = field(hash=False)
    dense: dict[str, Any] = field(compare=False, repr=False)
    memory_bound: int | None
    search: Any = field(default=None, compare=False, repr=False)

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything the plan depends on: its key in a `PlanningCache`."""
        return self.target, self.dtype, self.params, self.options

    @property
    def use_dense(self) -> bool:
        """Whether the weights are kept dense."""
        return bool(self.dense)

    @property
    def shared_buckets(self) -> bool:
        """Whether grad_input reads the forward buckets."""
        return self.options.shared_buckets or self.method is not Method.ELEMENT

    @property
    def tiles_used(self) -> int:
        return self.partition.groups * self.partition.x * self.partition.y * self.partition.z

    @property
    def cycles(self) -> int:
        """The estimated cycles of all planned passes."""
        return sum(cost.cycles for cost in self.costs.values())

    @property
    def cycles_by_term(self) -> dict[str, int]:
        """The estimated cycles by pass and term."""
        return {
            f"{name} {term.name}": term.cycles
            for name, cost in self.costs.items()
            for term in cost.terms
        }

    @property
    def temporary_bytes(self) -> int:
        return max(cost.temporary_bytes for cost in self.costs.values())

    @property
    def sizes(self) -> Sizes:
        """Elements of each dimension: groups, out, in, batch."""
        p = self.params
        return Sizes(
            p.num_groups, p.output_channels_per_group, p.input_channels_per_group, p.batch_size
        )

    @property
    def groups_per_tile(self) -> Sizes:
        """Groups of each dimension on the fullest tile."""
        return Sizes(
            *(
                ceil_div(ceil_div(size, grain), parts)
                for size, grain, parts in zip(
                    self.sizes, self.grouping, self.partition, strict=True
                )
            )
        )

    @property
    def elements_per_tile(self) -> Sizes:
        """Elements of each dimension on the fullest tile, padded to full groups."""
        return Sizes(*(t * g for t, g in zip(self.groups_per_tile, self.grouping, strict=True)))


@dataclass(frozen=True)
class TileMemory:
    """Bytes of the fullest tile.

    `buckets`: values and meta-info; `operands`: its share of input and output; `temporary`: the
    planner's estimate; `code`; `available`: the tile's memory.
    """

    buckets: int
    operands: int
    temporary: int
    code: int
    available: int

    @property
    def needed(self) -> int:
        return self.buckets + self.operands + self.temporary + self.code

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "needed": self.needed, "fits": self.fits}


Made = TypeVar("Made")

RUNNERS_UP = 10
"""How many of the next best plans a search reports."""

_log = logging.getLogger("dynsparse.popsparse")


class PlanningCache:
    """A cache of plans, dynamic and static, by everything they depend on.

    `hits` counts the requests answered from the cache.
    """

    def __init__(self) -> None:
        self._plans: dict[Any, Any] = {}
        self.hits = 0

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, key: Any, make: Callable[[], Made]) -> Made:
        """The plan of `key`, made if missing."""
        if key in self._plans:
            self.hits += 1
            _log.debug("using a plan made earlier: %s", key)
        else:
            self._plans[key] = make()
        return self._plans[key]


def store_plan(cache: PlanningCache | None, plan: Any) -> None:
    """Store the plan of an operand in the cache passed to a function that uses the operand."""
    if cache is not None:
        cache.find(plan.key, lambda: plan)
