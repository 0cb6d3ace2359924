"""What the system reports about the processor."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Processor(NamedTuple):
    """A processor, as the system describes it.

    Attributes:
        maker: "GenuineIntel", "AuthenticAMD" and so on; empty if unknown.
        name: the model's name, with the numbers of family and model if there are any.
        family: the number of the family; 0 if there is none.
        flags: its features, by the names of /proc/cpuinfo.
    """

    maker: str
    name: str
    family: int
    flags: frozenset[str]


@cache
def processor() -> Processor:
    """Return the first processor of this machine."""
    try:
        return parse_cpuinfo(Path("/proc/cpuinfo").read_text())
    except OSError:
        return parse_cpuinfo("")


def parse_cpuinfo(cpuinfo: str) -> Processor:
    """Return the first processor in the text of /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine()
    family = fields.get("cpu family", "")
    entries = {
        "family": family,
        "model": fields.get("model", ""),
        "implementer": fields.get("CPU implementer", ""),  # of ARM, which tells no name
        "part": fields.get("CPU part", ""),
    }
    numbers = " ".join(f"{what} {value}" for what, value in entries.items() if value)
    flags = frozenset((fields.get("flags") or fields.get("Features", "")).split())
    return Processor(
        fields.get("vendor_id", ""),
        f"{name}, {numbers}" if numbers else name,
        int(family) if family.isdigit() else 0,
        flags,
    )


def available_memory() -> int | None:
    """Return the bytes that can still be allocated without swapping; None if unknown."""
    free: list[int] = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
    except OSError:
        if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
            free.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:  # a container may allow less than the machine has
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
        if limit != "max":
            free.append(int(limit) - int(used))
    except (OSError, ValueError):
        pass
    return min(free) if free else None
