"""The partitioner: converts a pattern and its values to buckets and back.

    partitioner = Partitioner(plan)
    encoded = partitioner.encode(pattern, values)
    encoded.meta_info, encoded.nz_values          # what the host writes to the machine
    pattern, values = partitioner.decode(encoded)

The method is that of PopSparse's partitioner; `meta_info` writes the words, `spilling` handles
full buckets, `buckets` makes the overflow record that the propagation phase reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dynsparse._core.checks import check_types
from dynsparse.pattern import SparsePattern
from dynsparse.tracing import spanned
from popsparse.encoding.buckets import (
    Assignment,
    BucketLayout,
    OverflowInfo,
    SubGroups,
    assign,
    bucket_layout,
)
from popsparse.encoding.meta_info import MetaInfoWriter, read_buckets
from popsparse.encoding.spilling import BucketOverflowError, spill
from popsparse.formats import Blocks, COOMatrix, SparseMatrix, split_blocks, to_numpy
from popsparse.machine.intervals import equal_runs
from popsparse.planning.options import Options
from popsparse.planning.params import FullyConnectedParams, MatmulParams
from popsparse.planning.plan import Plan, PlanningCache
from popsparse.planning.search import make_plan, matmul_plan


@dataclass(frozen=True)
class EncodingInfo:
    """The fill of the buckets and the number of spills. Arrays are int64 [groups * buckets].

    Attributes:
        words_used: words of meta-info in each bucket, end marker included, of `words_capacity`.
        grad_a_words_used: the same for grad_input's own buckets, of `grad_a_words_capacity`;
            None when the buckets are shared.
        nz_used: values in each bucket (elements), of `nz_capacity`.
        sub_groups: number of sub-groups in each bucket.
        spilled: blocks that left the bucket they started in.
        propagated: blocks in a bucket of another (x, y) rectangle: the distribution phase does not
            reach them, the propagation phase does.
        overflow: the overflow record.
    """

    words_used: np.ndarray
    words_capacity: int
    grad_a_words_used: np.ndarray | None
    grad_a_words_capacity: int
    nz_used: np.ndarray
    nz_capacity: int
    sub_groups: np.ndarray
    spilled: int
    propagated: int
    overflow: OverflowInfo

    @staticmethod
    def join(infos: Sequence[EncodingInfo]) -> EncodingInfo:
        """Join the figures of several groups of one plan."""
        grad_a = [info.grad_a_words_used for info in infos if info.grad_a_words_used is not None]
        return replace(
            infos[0],
            words_used=np.concatenate([info.words_used for info in infos]),
            grad_a_words_used=np.concatenate(grad_a) if grad_a else None,
            nz_used=np.concatenate([info.nz_used for info in infos]),
            sub_groups=np.concatenate([info.sub_groups for info in infos]),
            spilled=sum(info.spilled for info in infos),
            propagated=sum(info.propagated for info in infos),
            overflow=OverflowInfo.merge([info.overflow for info in infos]),
        )

    @property
    def propagation_steps(self) -> int:
        """Compute steps of the propagation phase."""
        return self.overflow.propagation_steps

    @property
    def nz_fill(self) -> np.ndarray:
        """Share of each bucket's values in use, float64 [groups * buckets]."""
        return self.nz_used / max(self.nz_capacity, 1)

    @property
    def words_fill(self) -> np.ndarray:
        """Share of each bucket's meta-info in use, float64 [groups * buckets]."""
        return self.words_used / self.words_capacity

    def summary(self) -> dict[str, Any]:
        """The figures for a report, as plain numbers."""
        return {
            "buckets": len(self.nz_used),
            "nz_fill_mean": float(self.nz_fill.mean()),
            "nz_fill_max": float(self.nz_fill.max()),
            "words_fill_mean": float(self.words_fill.mean()),
            "words_fill_max": float(self.words_fill.max()),
            "spilled": self.spilled,
            "propagated": self.propagated,
            "propagation_steps": self.propagation_steps,
        }


@dataclass(frozen=True)
class EncodedPattern:
    """A pattern in buckets, without values.

    Attributes:
        meta_info: uint16, the overflow record and then, for each bucket, its forward words and
            grad_input's own words if there are any.
        positions: int64 [blocks of the plan]: position of each block's first value in the values of
            all buckets. Blocks are in the pattern's order; if the plan's blocks are smaller, each
            block of the pattern has several, row-major inside it.
        nz_size: number of values of all buckets.
        block: rows and columns of the plan's blocks.
        pattern_block: rows and columns of the pattern's blocks.
        info: figures; None for dense weights, which have no buckets.
    """

    meta_info: np.ndarray
    positions: np.ndarray
    nz_size: int
    block: tuple[int, int]
    pattern_block: tuple[int, int]
    info: Any

    @property
    def _cuts(self) -> tuple[int, int, int, int]:
        (height, width), (bx, by) = self.pattern_block, self.block
        return height // bx, bx, width // by, by

    @property
    def values_shape(self) -> tuple[int, ...]:
        """[nnz], or [nnz, height, width] for blocks; the blocks of all groups."""
        count = len(self.positions) * math.prod(self.block) // math.prod(self.pattern_block)
        return (count,) if self.pattern_block == (1, 1) else (count, *self.pattern_block)

    def place(self, values: np.ndarray) -> np.ndarray:
        """Values [nnz] or [nnz, height, width] in the order of buckets: [nz_size], gaps are 0.

        Call it whenever values change; the meta-info changes only with the pattern.

        Raises:
            ValueError: values of another shape.
        """
        _check_shape(values, self.values_shape)
        out = np.zeros(self.nz_size, values.dtype)
        blocks = values.reshape(-1, *self._cuts).transpose(0, 1, 3, 2, 4)
        area = self.block[0] * self.block[1]
        at = self.positions[:, None] + np.arange(area)
        out[at] = blocks.reshape(-1, area)
        return out

    def gather(self, nz_values: np.ndarray) -> np.ndarray:
        """The inverse of `place`: values in the pattern's order, e.g. of a weight gradient."""
        if nz_values.shape != (self.nz_size,):
            raise ValueError(
                f"nz_values must have the shape [{self.nz_size}], got {list(nz_values.shape)}"
            )
        if self.pattern_block == (1, 1):
            return nz_values[self.positions]
        rows, bx, cols, by = self._cuts
        blocks = nz_values[self.positions[:, None] + np.arange(bx * by)]
        blocks = blocks.reshape(-1, rows, cols, bx, by).transpose(0, 1, 3, 2, 4)
        return blocks.reshape(-1, *self.pattern_block)


@dataclass(frozen=True)
class Encoded:
    """A pattern and its values in buckets.

    `meta_info` is uint16 [words], `nz_values` [groups * buckets * nz_elements] of the values'
    dtype, `pattern` the encoding without values.
    """

    meta_info: np.ndarray
    nz_values: np.ndarray
    pattern: EncodedPattern

    @property
    def info(self) -> EncodingInfo:
        """The figures of the buckets."""
        info: EncodingInfo = self.pattern.info
        return info


class Partitioner:
    """Encodes patterns into the buckets of one plan, and decodes them.

    Deterministic, and without state between calls.

    Args:
        plan: a `Plan`, or a `BucketLayout` for custom buckets.
        pattern_block: rows and columns of the pattern's blocks, if the layout's are smaller.
            Defaults to the layout's.
        options: how to spill, and for error messages how the buckets were made; an `Options` or a
            mapping. A plan provides both itself.

    Raises:
        ValueError: a plan that keeps its weights dense, or blocks that do not divide each other.
    """

    @check_types
    def __init__(
        self,
        plan: Plan | BucketLayout,
        *,
        pattern_block: tuple[int, int] | None = None,
        options: Any = None,
    ) -> None:
        self.groups = 1  # Matrices that share the plan, each with buckets of its own.
        if isinstance(plan, BucketLayout):
            self.layout = plan
            self.options = Options.parse(options)
        else:
            if plan.use_dense:
                raise ValueError("a plan with use_dense has no buckets: use DensePartitioner")
            self.layout = bucket_layout(plan)
            self.options = plan.options
            self.groups = plan.partition.groups
            pattern_block = plan.params.sparsity_params.block_dimensions
        self.block = self.layout.block if pattern_block is None else pattern_block
        if any(b % small for b, small in zip(self.block, self.layout.block, strict=True)):
            raise ValueError(
                f"the plan's blocks {self.layout.block} do not divide the pattern's {self.block}"
            )

    @classmethod
    @check_types
    def for_params(
        cls,
        target: Any,
        dtype: Any,
        params: FullyConnectedParams | MatmulParams,
        options: Any = None,
        cache: PlanningCache | None = None,
    ) -> Partitioner:
        """Create the partitioner for the plan of a layer or product; raises planning's errors."""
        make = matmul_plan if isinstance(params, MatmulParams) else make_plan
        return cls(make(target, dtype, params, options, cache))  # type: ignore[arg-type]

    @property
    def meta_info_size(self) -> int:
        """Number of words of the meta-info array."""
        layout = self.layout
        return layout.overflow_words + self.groups * layout.buckets * layout.bucket_stride

    @property
    def nz_size(self) -> int:
        """Number of values of all buckets."""
        return self.groups * self.layout.buckets * self.layout.nz_elements

    @spanned("encode")
    def encode(self, pattern: Any, values: Any = None) -> Encoded:
        """Encode a pattern and its values into buckets.

        Args:
            pattern: a `SparsePattern` of [rows, cols] with its `values` ([nnz] or [nnz, b, b],
                tensor or array), or a `SparseMatrix`, which has its own. With several groups a
                sequence of patterns (and one of values).

        Returns:
            Arrays for the machine; `nz_values` keeps the dtype of the values.

        Raises:
            ValueError: a shape or block size other than the plan's, values of another shape, a
                meta-info word out of range.
            BucketOverflowError: too many non-zeros (a ValueError).
        """
        patterns = self._split_groups(pattern, "pattern")
        by_group = [None] * self.groups if values is None else self._split_groups(values, "values")
        arrays: list[np.ndarray] = []
        for group, (item, own_values) in enumerate(zip(patterns, by_group, strict=True)):
            if isinstance(item, SparseMatrix):
                if own_values is not None:
                    raise ValueError(f"a {type(item).__name__} brings its own values: give none")
                patterns[group] = item = item.to_coo()  # positions refer to the canonical order
                arrays.append(item.nz_values)
                continue
            if own_values is None:
                raise ValueError("a SparsePattern needs values of its own: pass values")
            array = to_numpy(own_values)
            _check_shape(array, item.values_shape)
            arrays.append(array)
        encoded = self._encode_patterns(patterns)
        flat = np.concatenate([a.ravel() for a in arrays]).reshape(encoded.values_shape)
        return Encoded(encoded.meta_info, encoded.place(flat), encoded)

    def encode_pattern(self, pattern: Any) -> EncodedPattern:
        """Encode only the pattern: meta-info and value positions, for values written separately."""
        return self._encode_patterns(self._split_groups(pattern, "pattern"))

    def sub_groups(self, pattern: Any) -> SubGroups:
        """The content of every bucket, after spilling, for the pattern of one group.

        Raises: as `encode`.
        """
        _check_pattern(pattern)
        rows, cols, _ = self._coordinates(pattern)
        return self._fill(assign(rows, cols, self.layout))[0]

    def decode(self, meta_info: Any, nz_values: Any = None) -> Any:
        """Decode pattern and values: (SparsePattern, tensor), exactly what was encoded.

        Args:
            meta_info: an `Encoded`, or its array with `nz_values`, as read from the machine.

        Returns:
            With several groups, a list of such pairs. Blocks that are not square are returned as a
            `COOMatrix`, since a `SparsePattern` cannot hold them.

        Raises:
            ValueError: arrays of the wrong size, or words that no partitioner wrote.
        """
        if isinstance(meta_info, Encoded):
            meta_info, nz_values = meta_info.meta_info, meta_info.nz_values
        words = np.asarray(meta_info)
        if words.shape != (self.meta_info_size,):
            raise ValueError(
                f"meta_info must have the shape [{self.meta_info_size}], got {list(words.shape)}"
            )
        values = self._check_values(nz_values)
        words = words[self.layout.overflow_words :].reshape(self.groups, -1)
        decoded = [
            self._decode_group(w, v)
            for w, v in zip(words, values.reshape(self.groups, -1), strict=True)
        ]
        return decoded[0] if self.groups == 1 else decoded

    def _check_values(self, nz_values: Any) -> np.ndarray:
        values = to_numpy(nz_values, "nz_values")
        if values.shape != (self.nz_size,):
            raise ValueError(
                f"nz_values must have the shape [{self.nz_size}], got {list(values.shape)}"
            )
        return values

    def _split_groups(self, value: Any, what: str) -> list[Any]:
        if self.groups == 1:
            items = [value]
        elif isinstance(value, Sequence) and len(value) == self.groups:
            items = list(value)
        else:
            raise ValueError(f"{what} must be a sequence of {self.groups}, one for each group")
        for item in items if what == "pattern" else ():
            _check_pattern(item)
        return items

    def _encode_patterns(self, patterns: list[Any]) -> EncodedPattern:
        layout = self.layout
        meta_info = np.zeros(self.meta_info_size, np.uint16)
        body = meta_info[layout.overflow_words :].reshape(self.groups, layout.buckets, -1)
        positions: list[np.ndarray] = []
        infos: list[EncodingInfo] = []
        for group, (pattern, words) in enumerate(zip(patterns, body, strict=True)):
            at, info = self._encode_group(pattern, words)
            positions.append(at + group * layout.buckets * layout.nz_elements)
            infos.append(info)
        info = EncodingInfo.join(infos)
        meta_info[: layout.overflow_words] = info.overflow.words()
        at = np.concatenate(positions)
        return EncodedPattern(meta_info, at, self.nz_size, layout.block, self.block, info)

    def _coordinates(self, pattern: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Rows and columns in the plan's blocks, sorted row-major, and the order that sorts them
        (None: the pattern's own)."""
        slots = np.zeros(0, np.int64)
        if isinstance(pattern, SparsePattern):
            block = (pattern.block_size, pattern.block_size)
            rows, cols = pattern.rows.numpy(), pattern.cols.numpy()
            slots = pattern.slots.numpy()
        else:
            block = pattern.block_dimensions
            rows, cols, _ = pattern.to_coo().blocks()
            if len(equal_runs(rows, cols).starts) < len(rows):
                raise ValueError("a position of the matrix is stored twice")
        expected = (self.layout.rows, self.layout.cols)
        if tuple(pattern.shape) != expected or block != self.block:
            raise ValueError(
                f"expected a pattern of the shape {expected} with blocks of {self.block}, "
                f"got {tuple(pattern.shape)} with blocks of {block}"
            )
        cut_x, cut_y = (b // small for b, small in zip(block, self.layout.block, strict=True))
        if cut_x == cut_y == 1:
            return (rows[slots], cols[slots], slots) if len(slots) else (rows, cols, None)
        number = np.arange(len(rows) * cut_x * cut_y).reshape(-1, cut_x, cut_y)
        fine = split_blocks(Blocks(rows, cols, number), (cut_x, cut_y))
        return fine.row, fine.col, fine.data.ravel()

    def _encode_group(self, pattern: Any, out: np.ndarray) -> tuple[np.ndarray, EncodingInfo]:
        """Write one group's words; returns the position of each block's values, and the figures."""
        layout = self.layout
        rows, cols, order = self._coordinates(pattern)
        assignment = assign(rows, cols, layout)
        groups, spilled, forward, grad_a = self._fill(assignment)
        forward.write(out)
        if grad_a is not None:
            grad_a.write(out)
        positions = np.empty(len(rows), np.int64)
        source = groups.source if order is None else order[groups.source]
        positions[source] = groups.place(layout)
        nz = np.bincount(groups.bucket, groups.nz, layout.buckets)
        far = groups.bucket // layout.partition[2] != groups.rectangle
        info = EncodingInfo(
            words_used=forward.words,
            words_capacity=layout.meta_info_words,
            grad_a_words_used=None if grad_a is None else grad_a.words,
            grad_a_words_capacity=layout.grad_a_words,
            nz_used=nz.astype(np.int64) * layout.area,
            nz_capacity=layout.nz_elements,
            sub_groups=np.bincount(groups.bucket, minlength=layout.buckets),
            spilled=spilled,
            propagated=int(groups.nz[far].sum()),
            overflow=OverflowInfo.of(groups, layout),
        )
        return positions, info

    def _fill(
        self, assignment: Assignment
    ) -> tuple[SubGroups, int, MetaInfoWriter, MetaInfoWriter | None]:
        """Spill until every bucket fits, those of grad_input included.

        Returns the sub-groups, how many blocks moved, and their writers.
        """
        layout = self.layout
        limit = np.full(layout.buckets, layout.capacity, np.int64)
        while True:
            try:
                runs, bucket, arrival = spill(assignment, layout, limit, self.options)
            except BucketOverflowError as error:
                raise self._explain_overflow(error, limit) from None
            groups = SubGroups.collect(assignment, runs, bucket, arrival, layout)
            moved = int(runs.length[bucket != runs.piece].sum())
            forward = MetaInfoWriter(groups, layout)
            if not layout.grad_a_words:
                return groups, moved, forward, None
            grad_a = MetaInfoWriter(groups.transpose(), layout, grad_a=True)
            excess = grad_a.words - layout.grad_a_words
            if (excess <= 0).all():
                return groups, moved, forward, grad_a
            # A non-zero that leaves saves two of grad_input's words, four with its column: buckets
            # that are too full have to give up at least a quarter of their excess.
            used = np.bincount(groups.bucket, groups.nz, layout.buckets).astype(np.int64)
            limit = np.where(excess > 0, used - (excess + 3) // 4, limit)
            limit = np.maximum(limit, 0)

    def _explain_overflow(
        self, error: BucketOverflowError, limit: np.ndarray
    ) -> BucketOverflowError:
        """The error with advice on the options."""
        narrowed = int((limit < self.layout.capacity).sum())
        note = f" ({narrowed} buckets are full in grad_input's meta-info)" if narrowed else ""
        oversize = self.options.meta_info_bucket_oversize_proportion
        needed = math.ceil(100 * ((1 + oversize) * error.growth - 1)) / 100
        advice = (
            f"raise meta_info_bucket_oversize_proportion (now {oversize:g}; about {needed:g} "
            "should do), or plan for more non-zeros"
        )
        return BucketOverflowError(f"{error}{note}; {advice}", error.left, error.growth)

    def _decode_group(self, words: np.ndarray, values: np.ndarray) -> Any:
        layout = self.layout
        contents = read_buckets(words, layout)
        part_x, part_y, _ = layout.part
        x, y = np.divmod(contents.rectangle, layout.partition[1])
        rows, cols = x * part_x + contents.row, y * part_y + contents.col
        at = contents.bucket * layout.nz_elements + contents.place * layout.area
        data = values[at[:, None] + np.arange(layout.area)]
        height, width = layout.block
        matrix = COOMatrix(
            data.ravel(), cols * width, rows * height, (layout.rows, layout.cols), layout.block
        )
        if layout.block != self.block:
            matrix = matrix.with_blocks(self.block)
        if self.block[0] != self.block[1]:
            return matrix.canonical()
        return matrix.to_pattern()


def _check_shape(values: np.ndarray, expected: tuple[int, ...]) -> None:
    if values.shape != expected:
        raise ValueError(f"values must have the shape {list(expected)}, got {list(values.shape)}")


def _check_pattern(pattern: Any) -> None:
    if not isinstance(pattern, (SparsePattern, SparseMatrix)):
        raise TypeError(f"expected a SparsePattern or a SparseMatrix, got {type(pattern).__name__}")
