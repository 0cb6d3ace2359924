"""`dynsparse info`."""

from __future__ import annotations

import platform

import torch
from rich.console import Console
from rich.table import Table

from dynsparse import __version__, native
from dynsparse.ops.linear import choice
from dynsparse.ops.linear.costs import Layer

__all__ = ["info"]

# The layer and the batches whose kernels are shown.
_FEATURES = 1024
_BATCHES = (1, 16, 128, 1024)


def info() -> None:
    """Show what computes here: version, kernels and their choice, instruction sets, threads."""
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
        "bfloat16 blocks": str(found["bfloat16"]),
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
    console = Console()
    console.print(table, highlight=False)
    if found["backend"] == "native":
        console.print()
        console.print(_choices(), highlight=False)


def _choices() -> Table:
    """What computes layers of `_FEATURES` features, and from which density on."""
    table = Table(
        title=f"What computes a float32 layer {_FEATURES} x {_FEATURES}, from which density on",
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 2),
    )
    for name in ("block", "pass", *(f"batch {batch}" for batch in _BATCHES)):
        table.add_column(name)
    for block in (1, 4, 16, 64):
        for backward in (False, True):
            table.add_row(
                str(block),
                "backward" if backward else "forward",
                *(_ranges(block, batch, backward) for batch in _BATCHES),
            )
    return table


def _ranges(block: int, batch: int, backward: bool) -> str:
    """The kinds in the order of density: `sparse, dense 0.55`."""
    total = (_FEATURES // block) ** 2
    parts: list[str] = []
    last = ""
    for percent in range(1, 101):
        layer = Layer(_FEATURES, _FEATURES, total * percent // 100, block)
        kind = choice.choose(layer, batch, backward)
        if kind != last:
            parts.append(kind if percent == 1 else f"{kind} {percent / 100:.2f}")
            last = kind
    return ", ".join(parts)
