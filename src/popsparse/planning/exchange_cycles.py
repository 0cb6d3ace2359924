"""What the planner expects an exchange to take (section 3.5 of docs/popsparse-formulas.md)."""

from __future__ import annotations

from typing import Any

import numpy as np

Ints = Any
_SCALE = 16  # The original works in sixteenths of a byte a cycle.


class ExchangeCost:
    """Cycles of an exchange in which each tile receives so many bytes."""

    def __init__(self, target: Any) -> None:
        rate = float(target.exchange_bytes_per_cycle)
        self.rate = max(1, int(np.floor(rate * _SCALE + 0.5)))
        self.bus_tiles = int(target.exchange_bus_tiles)

    def __call__(self, received: Ints) -> Ints:
        return -(-np.asarray(received) * _SCALE // self.rate)

    def broadcast(self, received: Ints, same: Ints, receiving: Ints) -> Ints:
        """The same when `same` neighbouring tiles, of `receiving` in all, get equal data.

        Tiles that share a bus receive common data at the sum of their rates.
        """
        share = np.where(
            np.asarray(same) == receiving, self.bus_tiles, np.gcd(same, self.bus_tiles)
        )
        return -(-np.asarray(received) * _SCALE // (self.rate * share))
