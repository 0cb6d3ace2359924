"""Plans in the cache of results, each under everything that it depends on."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import numpy as np

from dynsparse.files.cache import open_cache
from dynsparse.files.plain_objects import PlainObjects

__all__ = ["KeptPlans", "hash_of_sources"]

Made = TypeVar("Made")

_log = logging.getLogger(__name__)

_KIND = "plans"


@cache
def hash_of_sources(sources: tuple[str, ...]) -> str:
    """A hash of the source text of a planner; a plan of another is not this one's.

    Args:
        sources: files and folders of the package, without the folders in these.

    Raises:
        OSError: there is no source text here.
    """
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for source in sources:
        place = package / source
        for file in sorted(place.glob("*.py")) if place.is_dir() else [place]:
            digest.update(f"{file.name}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class KeptPlans(Generic[Made]):
    """The plans of one planner.

    Attributes:
        planner: what tells this planner from another of the same name, as by `hash_of_sources`.
        objects: what requests and plans are made of.
        is_plan: whether something made of these is a plan, and what its annotations leave open
            is what a planner puts there.
        words: what is planned, and what came of it, for the log.
    """

    planner: Callable[[], str]
    objects: PlainObjects
    is_plan: Callable[[Any], bool]
    words: Callable[[Any, Made], tuple[str, str]]

    def read(self, content: Any) -> Made:
        """The plan of which `objects.to_plain` made `content`.

        Raises:
            ValueError, TypeError, OverflowError: anything else.
        """
        found = self.objects.from_plain(content)
        if not self.is_plan(found):
            raise ValueError("expected a plan as dynsparse saves it, got something else")
        return cast(Made, found)

    def find(self, request: Any, make: Callable[[], Made]) -> Made:
        """The plan that is asked for by a tuple of what it depends on: from the cache, or made and
        kept there. The log says which."""
        kept = open_cache()
        try:
            asked = {"planner": self.planner(), "numpy": np.__version__}
            key = json.dumps({**asked, "request": self.objects.to_plain(request)}, sort_keys=True)
        except (OSError, TypeError):  # no source text here, or a class of the user's own
            return self._made(request, make)
        content = kept.get_json(_KIND, key)
        if content is not None:
            try:
                found = self.read(content)
            except (ValueError, TypeError, OverflowError) as error:
                _log.info("a plan in the cache cannot be read: %s", error)
            else:
                _log.info("plan of %s from the cache: %s", *self.words(request, found))
                return found
        made = self._made(request, make)
        kept.put_json(_KIND, key, self.objects.to_plain(made))
        return made

    def _made(self, request: Any, make: Callable[[], Made]) -> Made:
        made = make()
        _log.info("planned %s: %s", *self.words(request, made))
        return made
