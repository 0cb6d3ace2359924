"""How far spilled sub-groups have to travel, and what the propagation phase needs to know of it.

Bucket and operand meet when the bucket of (x - i, y - j) is at the tiles of (x, y), offset (i, j)
cyclic in the partition. The distribution phase covers offset (0, 0) for every Z partner; each
further offset that the overflow record keeps costs one step for each Z partner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from popsparse.encoding.layout import BucketLayout
from popsparse.encoding.sub_groups import SubGroups
from popsparse.planning.parts import ceil_div

FLAGS_PER_WORD = 2


@dataclass(frozen=True)
class OverflowInfo:
    """The overflow record: where the loops of the propagation phase end.

    Attributes:
        x, y, z: loop end counts: x is the farthest distance in X plus 1; y is Ny when x > 1, else
            the farthest distance in Y plus 1; z is Nz always.
        used_x: bool [Nx]; whether anything travels distance i in X (0 included).
        partition: Nx, Ny, Nz.
    """

    x: int
    y: int
    z: int
    used_x: np.ndarray
    partition: tuple[int, int, int]

    @classmethod
    def of(cls, groups: SubGroups, layout: BucketLayout) -> OverflowInfo:
        parts_x, parts_y, parts_z = layout.partition
        home = groups.bucket // parts_z
        far_x = (groups.rectangle // parts_y - home // parts_y) % parts_x
        far_y = (groups.rectangle % parts_y - home % parts_y) % parts_y
        used = np.zeros(parts_x, bool)
        used[far_x] = True
        # Compared as pairs: distance in X decides.
        farthest = int((far_x * parts_y + far_y).max(initial=0))
        x = farthest // parts_y + 1
        y = farthest % parts_y + 1 if x == 1 else parts_y
        return cls(x, y, parts_z, used, layout.partition)

    @classmethod
    def merged(cls, infos: Sequence[OverflowInfo]) -> OverflowInfo:
        """One record that serves several groups of one plan."""
        x = max(info.x for info in infos)
        y = infos[0].partition[1] if x > 1 else max(info.y for info in infos)
        used = np.logical_or.reduce([info.used_x for info in infos])
        return cls(x, y, infos[0].z, used, infos[0].partition)

    @classmethod
    def from_words(cls, words: np.ndarray, partition: tuple[int, int, int]) -> OverflowInfo:
        """Read the record at the start of the meta-info."""
        flags = np.asarray(words[3 : 3 + ceil_div(partition[0], FLAGS_PER_WORD)])
        used = (flags[:, None] >> np.arange(FLAGS_PER_WORD)) & 1
        x, y, z = (int(word) for word in words[:3])
        return cls(x, y, z, used.ravel()[: partition[0]].astype(bool), partition)

    def words(self) -> np.ndarray:
        """x, y, z and the flags of X, two to a word: uint16 [3 + ceil(Nx / 2)]."""
        padded = np.zeros(ceil_div(len(self.used_x), FLAGS_PER_WORD) * FLAGS_PER_WORD, np.uint16)
        padded[: len(self.used_x)] = self.used_x
        flags = padded.reshape(-1, FLAGS_PER_WORD) << np.arange(FLAGS_PER_WORD, dtype=np.uint16)
        counts = np.array([self.x, self.y, self.z], np.uint16)
        return np.concatenate([counts, flags.sum(1).astype(np.uint16)])

    @property
    def kept_offsets(self) -> list[tuple[int, int]]:
        """The (X, Y) offsets the propagation visits, in order; (0, 0) is not among them."""
        return [
            (i, j) for i in range(self.x) if self.used_x[i] for j in range(self.y) if i or j
        ]  # fmt: skip

    @property
    def propagation_steps(self) -> int:
        """Compute steps of the propagation phase: kept offsets times the Z partners.

        Step numbers of the note: skipped X offsets still cost one exchange each, not counted here.
        """
        return self.z * len(self.kept_offsets)
