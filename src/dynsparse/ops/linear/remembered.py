"""What was made or found out of index tensors, known again while these are unchanged.

Calls through torch's dispatcher bring index tensors alone, without the layer they belong to.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class _Entry(NamedTuple):
    sources: list[weakref.ref[Tensor]]
    versions: list[int]
    value: Any


class Remembered:
    """Values by the tensors they were made of, as long as these live and nobody writes to them.

    What is kept is whole before it is seen: threads may look things up at the same time.
    """

    def __init__(self) -> None:
        # By the first tensor; weak, and no value may hold it.
        self._entries: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, sources: Sequence[Tensor]) -> Any:
        """The value for exactly these tensors, or None."""
        entry = self._entries.get(sources[0])
        if entry is None or len(entry.sources) != len(sources):
            return None
        for known, version, source in zip(entry.sources, entry.versions, sources, strict=True):
            if known() is not source or source._version != version:
                return None
        return entry.value

    def put(self, sources: Sequence[Tensor], value: Any) -> None:
        """Keep a value; not for inference tensors, which do not tell when they are changed."""
        if any(source.is_inference() for source in sources):
            return
        versions = [source._version for source in sources]
        self._entries[sources[0]] = _Entry([weakref.ref(s) for s in sources], versions, value)

    def forget(self, first: Tensor) -> None:
        """Give up what was made of tensors that begin with this one."""
        self._entries.pop(first, None)
