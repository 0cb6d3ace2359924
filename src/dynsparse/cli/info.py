"""`dynsparse info`."""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from dynsparse import __version__, native
from dynsparse.ops.linear import choice
from dynsparse.ops.linear.costs import Layer
from dynsparse.ops.linear.cuda import costs
from dynsparse.ops.linear.cuda.chip import chip_of, runs_triton
from dynsparse.ops.linear.cuda.rates import rates_of

__all__ = ["info"]

# The layer and the batches whose kernels are shown.
_FEATURES = 1024
_BATCHES = (1, 16, 128, 1024)
_GPU_FEATURES = 4096
_GPU_BATCHES = (16, 512, 8192)

# What computes a layer, a batch, and forward or backward.
Choose = Callable[[Layer, int, bool], str]


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
        "because": str(found["reason"]),
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
        if value:
            table.add_row(name, value)
    console = Console()
    console.print(table, highlight=False)
    if found["backend"] == "native":
        console.print()
        console.print(_choices(), highlight=False)
    if torch.cuda.is_available():
        console.print()
        console.print(_choices_on_gpu(torch.device("cuda")), highlight=False)


def _choices() -> Table:
    """What computes layers of `_FEATURES` features, and from which density on."""
    title = f"What computes a float32 layer {_FEATURES} x {_FEATURES}, from which density on"
    return _table(title, _FEATURES, _BATCHES, (1, 4, 16, 64), choice.choose)


def _choices_on_gpu(device: torch.device) -> Table:
    """Likewise on a GPU, where layers are larger."""
    chip = chip_of(device)
    rates = rates_of(chip)
    origin = "measured on" if rates.measured else "predicted for"
    title = (
        f"What computes a bfloat16 layer {_GPU_FEATURES} x {_GPU_FEATURES} on the GPU, from which "
        f"density on ({origin} chips like {rates.name})"
    )

    def choose(layer: Layer, batch: int, backward: bool) -> str:
        if not runs_triton(device):
            return "dense"
        return costs.choose(layer, batch, backward, torch.bfloat16, chip)

    return _table(title, _GPU_FEATURES, _GPU_BATCHES, (1, 16, 32, 64, 128), choose)


def _table(
    title: str,
    features: int,
    batches: tuple[int, ...],
    blocks: tuple[int, ...],
    choose: Choose,
) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2))
    for name in ("block", "pass", *(f"batch {batch}" for batch in batches)):
        table.add_column(name)
    for block in blocks:
        for backward in (False, True):
            table.add_row(
                str(block),
                "backward" if backward else "forward",
                *(_ranges(features, block, batch, backward, choose) for batch in batches),
            )
    return table


def _ranges(features: int, block: int, batch: int, backward: bool, choose: Choose) -> str:
    """The kinds in the order of density: `sparse, dense 0.55`."""
    total = (features // block) ** 2
    parts: list[str] = []
    last = ""
    for percent in range(1, 101):
        layer = Layer(features, features, total * percent // 100, block)
        kind = choose(layer, batch, backward)
        if kind != last:
            parts.append(kind if percent == 1 else f"{kind} {percent / 100:.2f}")
            last = kind
    return ", ".join(parts)
