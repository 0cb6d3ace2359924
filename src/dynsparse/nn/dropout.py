"""`nn.Dropout` that is fast on a CPU."""

from __future__ import annotations

from torch import Tensor, nn

from dynsparse.checks import check_fraction
from dynsparse.ops.dropout import dropout
from dynsparse.typed import typed


class Dropout(nn.Dropout):
    """A drop-in for `nn.Dropout` that draws its masks many numbers at a time.

    See `dynsparse.ops.dropout.dropout` for where it is used and what differs. Beside sparse layers
    torch's own dropout would be a large part of a training step on a CPU.
    """

    @typed
    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__(check_fraction("p", p, zero=True), inplace)

    def forward(self, x: Tensor) -> Tensor:
        if self.inplace:
            return super().forward(x)
        return dropout(x, self.p, self.training)
