"""What growth over ranks sends, on paper: it decides how samples of all ranks come together."""

from __future__ import annotations

import torch


def comm_volume(
    ranks: int,
    shape: tuple[int, int],
    samples: int,
    wide: torch.dtype,
    wire: torch.dtype | None = None,
) -> tuple[float, float]:
    """What one rank sends for one layer, on average: by pieces, and by samples.

    Args:
        ranks: how many there are.
        shape: (out, in).
        samples: of all ranks together.
        wide: the type in which samples travel.
        wire: that of the pieces; None: float64 where samples are, otherwise float32.
    """
    out, in_ = shape
    others = (ranks - 1) / ranks
    if wire is None or wide == torch.float64:
        wire = torch.float64 if wide == torch.float64 else torch.float32
    pieces = others * out * in_ * wire.itemsize
    return pieces, others * samples * (in_ + out / ranks) * wide.itemsize
