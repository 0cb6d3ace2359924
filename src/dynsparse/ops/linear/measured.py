"""What `dynsparse tune` has measured of this processor, in a file of the cache folder.

Its name is a hash of the processor's name, the bytes of the kernels, and the versions of this
library and of torch, whose dense products are among the kinds.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dynsparse import native
from dynsparse.checks import is_number
from dynsparse.files.cache import cache_folder
from dynsparse.files.json_text import parse_json
from dynsparse.files.shorten import shortened
from dynsparse.files.whole import write_text_whole
from dynsparse.ops.linear.costs import FAMILIES, Cost, Costs, Table
from dynsparse.processor import processor
from dynsparse.version import __version__

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    """What a measurement of this processor came to.

    Attributes:
        date: as 2026-01-31.
        costs: as fitted.
        error: mean error of a time, as a share of it.
        above: how much longer the kinds that each table chooses take than the best, on average
            over the cells measured: {"shipped": .., "measured": ..}.
        in_force: whether kernels are to be chosen by it.
        because: why, in words.
    """

    date: str
    costs: Costs
    error: float
    above: dict[str, float]
    in_force: bool
    because: str

    def table(self) -> Table:
        return Table(
            processor().name, f"measured here on {self.date}", self.costs, measured_here=True
        )


@cache
def _kernels() -> str:
    """A hash of the compiled kernels; empty where there are none."""
    library = native.load()
    if library is None:
        return ""
    return hashlib.sha256(Path(library._name).read_bytes()).hexdigest()


def here() -> dict[str, str]:
    """What constants depend on: this processor, its kernels, and the dense products of torch."""
    return {
        "processor": processor().name,
        "kernels": _kernels(),
        "version": __version__,
        "torch": str(torch.__version__),
    }


def _file() -> Path:
    name = hashlib.sha256(json.dumps(here(), sort_keys=True).encode()).hexdigest()
    return cache_folder() / "kernel-costs" / f"{name[:32]}.json"


def kept_measured() -> Measured | None:
    """What was measured of this processor and kept; None where nothing was."""
    if not _kernels():
        return None
    try:
        content = _file().read_bytes()
    except OSError:
        return None
    try:
        fields = dict(parse_json(content))
        costs = from_plain(fields.pop("costs"))
        measured = Measured(**fields, costs=costs)
        if not isinstance(measured.in_force, bool) or not isinstance(measured.above, dict):
            raise ValueError(f"expected the figures of a measurement, got {shortened(fields)}")
    except (KeyError, TypeError, ValueError) as error:
        _log.warning("the measured costs of kernels cannot be read, and are left out: %s", error)
        return None
    return measured


def keep_measured(measured: Measured) -> None:
    """Keep it for the processes to come.

    Raises:
        OSError: the file cannot be written.
    """
    file = _file()
    file.parent.mkdir(parents=True, exist_ok=True)
    plain = {**vars(measured), "costs": to_plain(measured.costs)}
    write_text_whole(file, json.dumps(plain, allow_nan=False))


def forget_measured() -> bool:
    """Go back to what comes with the library; whether there was anything."""
    try:
        _file().unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def to_plain(costs: Costs) -> dict[str, list[list[float]]]:
    """Plain types, for `from_plain`."""
    return {name: [list(one) for one in both] for name, both in costs.items()}


def from_plain(plain: Any) -> Costs:
    """What `to_plain` was given.

    Raises:
        ValueError: something else.
    """
    found: Costs = {}
    try:
        for name in FAMILIES:
            forward, backward = (Cost(*numbers) for numbers in plain[name])
            found[name] = forward, backward
    except (KeyError, TypeError, ValueError):
        found = {}
    numbers = [number for both in found.values() for one in both for number in one]
    if not numbers or not all(is_number(number) and 0 <= number < 1e9 for number in numbers):
        raise ValueError(f"expected costs of {len(FAMILIES)} families, got {shortened(plain)}")
    return found
