"""What encoding a pattern gives: the arrays for the machine, and figures about the buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from popsparse.encoding.overflow import OverflowInfo


@dataclass(frozen=True)
class EncodingInfo:
    """How full the buckets are and what spilled. Arrays are int64 [groups * buckets].

    Attributes:
        words_used: words of meta-info in each bucket, end marker included, of `words_capacity`.
        grad_a_words_used: the same of grad_input's own buckets, of `grad_a_words_capacity`;
            None when the buckets are shared.
        nz_used: values in each bucket (elements), of `nz_capacity`.
        sub_groups: how many sub-groups each bucket holds.
        spilled: blocks that are not in the bucket they started in.
        propagated: blocks that are in a bucket of another (x, y) rectangle: the distribution phase
            does not reach them, the propagation phase does.
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

    @classmethod
    def joined(cls, infos: Sequence[EncodingInfo]) -> EncodingInfo:
        """The figures of several groups of one plan as one."""
        first = infos[0]
        grad_a = [info.grad_a_words_used for info in infos if info.grad_a_words_used is not None]
        return cls(
            words_used=np.concatenate([info.words_used for info in infos]),
            words_capacity=first.words_capacity,
            grad_a_words_used=np.concatenate(grad_a) if grad_a else None,
            grad_a_words_capacity=first.grad_a_words_capacity,
            nz_used=np.concatenate([info.nz_used for info in infos]),
            nz_capacity=first.nz_capacity,
            sub_groups=np.concatenate([info.sub_groups for info in infos]),
            spilled=sum(info.spilled for info in infos),
            propagated=sum(info.propagated for info in infos),
            overflow=OverflowInfo.merged([info.overflow for info in infos]),
        )

    @property
    def propagation_steps(self) -> int:
        """Compute steps of the propagation phase."""
        return self.overflow.propagation_steps

    @property
    def nz_fill(self) -> np.ndarray:
        """Part of each bucket's values in use, float64 [groups * buckets]."""
        return self.nz_used / max(self.nz_capacity, 1)

    @property
    def words_fill(self) -> np.ndarray:
        """Part of each bucket's meta-info in use, float64 [groups * buckets]."""
        return self.words_used / self.words_capacity

    def summary(self) -> dict[str, Any]:
        """The figures a report wants, as plain numbers."""
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
            grad_input's own where it has them.
        positions: int64 [blocks of the plan]: where each block's first value lies in the values of
            all buckets. Blocks are in the pattern's order; one that the plan works in smaller
            blocks gives several, row-major inside it.
        nz_size: values of all buckets together.
        block: rows and columns of the plan's blocks.
        pattern_block: rows and columns of the pattern's blocks.
        info: figures.
    """

    meta_info: np.ndarray
    positions: np.ndarray
    nz_size: int
    block: tuple[int, int]
    pattern_block: tuple[int, int]
    info: EncodingInfo

    @property
    def _cuts(self) -> tuple[int, int, int, int]:
        (height, width), (bx, by) = self.pattern_block, self.block
        return height // bx, bx, width // by, by

    def place(self, values: np.ndarray) -> np.ndarray:
        """Values [nnz] or [nnz, height, width] in the order of buckets: [nz_size], gaps are 0.

        Needed anew at each change of values; the meta-info only when the pattern changes.
        """
        out = np.zeros(self.nz_size, values.dtype)
        if self.pattern_block == (1, 1):
            out[self.positions] = values
            return out
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
        return self.pattern.info
