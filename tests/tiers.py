"""Assign parameters of a test to the quick or the slow tier."""

from collections.abc import Iterable
from typing import Any

import pytest

QUICK = ("rigl", "granet", "topkast")


def algorithms(names: Iterable[str]) -> list[Any]:
    """Return the parameters of a test that holds for all algorithms by construction.

    They are one trainer with exchangeable parts, so three of different kinds are enough in the
    quick tier: a fixed number of blocks, a changing one, and an active subset.
    """
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]
