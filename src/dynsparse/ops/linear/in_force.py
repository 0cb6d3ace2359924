"""Which constants of the kernels' costs are in force in this process.

Those that `dynsparse tune` measured of this processor, else those that come with the library. It is
settled once, at the first choice of a kernel, and stays: another kernel may add in another order,
and a training must not change its kernels under way. What is measured later serves the next
process.

Ranks compute with the tables that come with the library: what each of them would have measured
differs by chance, and a job that is started again may find its ranks on other machines.
"""

from __future__ import annotations

import logging
import os

import torch

from dynsparse.ops.linear.costs import Costs, Table
from dynsparse.ops.linear.tables import shipped

_log = logging.getLogger(__name__)

_in_force: Table | None = None


def table() -> Table:
    """The table in force, settled when it is first asked for."""
    global _in_force
    if _in_force is None:
        found = None
        if not _is_one_of_many():
            # Loaded when a kernel is first chosen: who imports the library does not wait for it.
            from dynsparse.ops.linear.measured import kept_measured

            found = kept_measured()
        _in_force = found.table() if found is not None and found.in_force else shipped()
        _log.info("kernels are chosen by the table %s: %s", _in_force.name, _in_force.origin)
    return _in_force


def constants() -> Costs:
    """Those in force."""
    return table().costs


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
