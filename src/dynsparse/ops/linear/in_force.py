"""Which constants of the kernels' costs are in force in this process.

Those of this processor where it was measured (`tuning`), else those that come with the library. It
is settled once, at the first choice of a kernel, and stays: another kernel may add in another
order, and a training must not change its kernels under way. What is measured later is for the next
process, and a training that is resumed goes on with what it had (`state`, `resume`).

Ranks compute with the tables that come with the library: what each of them would have measured
differs by chance, and a job that is started again may find its ranks on other machines.

`DYNSPARSE_TUNE`: `auto` as above, and the first long training measures; `load`: nothing is measured
unless `dynsparse tune` is called; `off`: the tables that come with the library.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dynsparse import native
from dynsparse.checks import is_number
from dynsparse.files.cache import Cache, open_cache
from dynsparse.files.shorten import shortened
from dynsparse.ops.linear.costs import FAMILIES, Cost, Costs, Table
from dynsparse.ops.linear.tables import shipped
from dynsparse.processor import processor
from dynsparse.version import __version__

__all__ = [
    "VARIABLE", "Measured", "check_state", "constants", "forget_measured", "from_plain",
    "keep_measured", "kept_measured", "mode", "put", "resumed", "state", "table", "to_plain",
]  # fmt: skip

_log = logging.getLogger(__name__)

VARIABLE = "DYNSPARSE_TUNE"
_MODES = ("auto", "load", "off")
_KIND = "kernel-costs"

_in_force: Table | None = None


def mode() -> str:
    """What the environment asks for.

    Raises:
        ValueError: DYNSPARSE_TUNE is something else.
    """
    given = os.environ.get(VARIABLE, "").strip().lower() or _MODES[0]
    if given not in _MODES:
        raise ValueError(f"{VARIABLE}: expected {', '.join(_MODES)}, got {shortened(given)}")
    return given


def table() -> Table:
    """The table in force, settled when it is first asked for.

    Raises:
        ValueError: a variable of the environment that says nothing that is known.
    """
    global _in_force
    if _in_force is None:
        found = None if mode() == "off" or _is_one_of_many() else kept_measured()
        if found is not None and found.in_force:
            _in_force = found.table()
        else:
            _in_force = shipped()
        _log.info("kernels are chosen by the table %s: %s", _in_force.name, _in_force.origin)
    return _in_force


def constants() -> Costs:
    """Those in force."""
    return table().costs


def put(chosen: Table | None) -> None:
    """Put a table in force; None: what the next choice finds."""
    global _in_force
    _in_force = chosen


def _is_one_of_many() -> bool:
    """Whether other processes train with this one."""
    if os.environ.get("WORLD_SIZE", "1").strip() not in ("", "0", "1"):
        return True
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


# What is kept of a measurement.


@dataclass(frozen=True)
class Measured:
    """What a measurement of this processor came to.

    Attributes:
        date: as 2026-01-31.
        asked: whether somebody called for it.
        costs: as fitted.
        error: mean error of a time, as a share of it.
        above: how much longer the kinds that each table chooses take than the best, on average
            over the cells measured: {"shipped": .., "measured": ..}.
        in_force: whether kernels are to be chosen by it.
        because: why, in words.
    """

    date: str
    asked: bool
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


def _key() -> str:
    return json.dumps(here(), sort_keys=True)


def kept_measured(cache: Cache | None = None) -> Measured | None:
    """What was measured of this processor and kept; None where nothing was."""
    content = (cache or open_cache()).get_json(_KIND, _key()) if _kernels() else None
    if content is None:
        return None
    try:
        fields = dict(content)
        costs = from_plain(fields.pop("costs"))
        measured = Measured(**fields, costs=costs)
        if not isinstance(measured.in_force, bool) or not isinstance(measured.above, dict):
            raise ValueError(f"expected the figures of a measurement, got {shortened(content)}")
    except (KeyError, TypeError, ValueError) as error:
        _log.warning("the measured costs of kernels cannot be read, and are left out: %s", error)
        return None
    return measured


def keep_measured(measured: Measured) -> bool:
    """Keep it for the processes to come; whether there is a cache that does."""
    plain = {**vars(measured), "costs": to_plain(measured.costs)}
    return open_cache().put_json(_KIND, _key(), plain)


def forget_measured() -> bool:
    """Go back to what comes with the library; whether there was anything."""
    return open_cache().remove(_KIND, _key())


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


# What a training takes along.


def state() -> dict[str, Any]:
    """What is in force, for `resumed`: plain types."""
    now = table()
    if not now.measured_here:
        return {"table": now.name}
    return {"table": now.name, "here": here(), "origin": now.origin, "costs": to_plain(now.costs)}


def check_state(told: Any) -> None:
    """Raise ValueError where `told` is nothing that `state` gives."""
    if told is None:
        return
    if not isinstance(told, Mapping) or not isinstance(told.get("table"), str):
        raise ValueError(f"expected the costs of kernels, got {shortened(told)}")
    if "costs" in told:
        from_plain(told["costs"])
        if not isinstance(told.get("here"), Mapping) or not isinstance(told.get("origin"), str):
            raise ValueError(f"expected where costs were measured, got {shortened(told)}")


def resumed(told: Any) -> Table:
    """The table to go on with after a training in which `told` was in force.

    That one, if it belongs to this machine; on another one what is in force there. A training of
    before tables were told had one of those that come with the library.
    """
    if told is None:
        return shipped()
    if "costs" in told:
        same = dict(told["here"]) == here()
        costs = from_plain(told["costs"])
        return Table(told["table"], told["origin"], costs, measured_here=True) if same else table()
    return shipped() if told["table"] == shipped().name else table()
