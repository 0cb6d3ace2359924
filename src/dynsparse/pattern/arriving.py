"""What a device knows, on its way to the CPU: who does not ask for it waits for nothing."""

from __future__ import annotations

import torch
from torch import Tensor


class Arriving:
    """Copies of tensors as they are when the device comes to this, whatever becomes of them later.

    A GPU writes them to memory that it reaches by itself. Who asks for them waits until they are
    there, and not for what the device was given after them. Of other devices they are fetched at
    once.

    Args:
        tensors: on one device.
    """

    __slots__ = ("_copies", "_event")

    def __init__(self, *tensors: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if not tensors[0].is_cuda:
            self._copies = [tensor.to("cpu", copy=True) for tensor in tensors]
            return
        self._copies = [
            torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
            for t in tensors
        ]
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(tensors[0].device))

    @property
    def is_there(self) -> bool:
        """Whether nobody would wait."""
        return self._event is None or bool(self._event.query())

    def get(self) -> list[Tensor]:
        """The copies, in plain memory."""
        if self._event is not None:
            self._event.synchronize()
            # Memory that a device reaches is scarce: what stays for long is elsewhere.
            self._copies, self._event = [copy.clone() for copy in self._copies], None
        return self._copies
