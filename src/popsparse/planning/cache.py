"""Plans made earlier."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

Found = TypeVar("Found")

_log = logging.getLogger("dynsparse.popsparse")


class PlanningCache:
    """Plans already made, dynamic and static, by everything they depend on.

    `hits` counts the plans that were found rather than made.
    """

    def __init__(self) -> None:
        self._plans: dict[Any, Any] = {}
        self.hits = 0

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, key: Any, make: Callable[[], Found]) -> Found:
        """The plan of `key`, made now if it is not there yet."""
        if key in self._plans:
            self.hits += 1
            _log.debug("a plan made earlier serves: %s", key)
        else:
            self._plans[key] = make()
        return self._plans[key]
