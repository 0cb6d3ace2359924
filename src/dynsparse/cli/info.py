"""`dynsparse info`."""

from __future__ import annotations

import platform

import torch
from rich.console import Console
from rich.table import Table

from dynsparse import __version__
from dynsparse.ops import native

__all__ = ["info"]


def info() -> None:
    """Show what computes here: version, kernels, instruction sets, threads, torch."""
    found = native.describe()
    available = found["available"]
    assert isinstance(available, list)
    rows = {
        "dynsparse": __version__,
        "kernels": {
            "native": "native: compiled C++",
            "fallback": "fallback: plain torch, several times slower",
        }[str(found["backend"])],
        "instruction set": str(found["isa"]),
        "available": ", ".join(available) or "none",
        "this machine runs": ", ".join(native.supported_isas()) or "none",
        "threads": str(found["threads"]),
        "torch": torch.__version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
    }
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", justify="right")
    table.add_column()
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table, highlight=False)
