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

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

from dynsparse.files.shorten import shortened
from dynsparse.ops.linear.costs import Costs, Table
from dynsparse.ops.linear.tables import shipped

__all__ = [
    "VARIABLE", "check_state", "constants", "mode", "put", "resumed", "state", "table",
]  # fmt: skip

_log = logging.getLogger(__name__)

VARIABLE = "DYNSPARSE_TUNE"
_MODES = ("auto", "load", "off")

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
        found = None
        if mode() != "off" and not _is_one_of_many():
            found = _measured().kept_measured()
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


def _measured() -> Any:
    """`measured`, loaded when a kernel is first chosen: who imports the library waits for none of
    it."""
    from dynsparse.ops.linear import measured

    return measured


# What a training takes along.


def state() -> dict[str, Any]:
    """What is in force, for `resumed`: plain types."""
    now = table()
    if not now.measured_here:
        return {"table": now.name}
    kept = _measured()
    costs = kept.to_plain(now.costs)
    return {"table": now.name, "here": kept.here(), "origin": now.origin, "costs": costs}


def check_state(told: Any) -> None:
    """Raise ValueError where `told` is nothing that `state` gives."""
    if told is None:
        return
    if not isinstance(told, Mapping) or not isinstance(told.get("table"), str):
        raise ValueError(f"expected the costs of kernels, got {shortened(told)}")
    if "costs" in told:
        _measured().from_plain(told["costs"])
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
        same = dict(told["here"]) == _measured().here()
        costs = _measured().from_plain(told["costs"])
        return Table(told["table"], told["origin"], costs, measured_here=True) if same else table()
    return shipped() if told["table"] == shipped().name else table()
