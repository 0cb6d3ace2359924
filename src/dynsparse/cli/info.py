"""`dynsparse info`."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from json import dumps
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table

from dynsparse import __version__
from dynsparse._core import native
from dynsparse._core.processor import processor
from dynsparse.ops.linear import cost_table
from dynsparse.ops.linear.cost_table import Layer
from dynsparse.ops.linear.cuda import costs
from dynsparse.ops.linear.cuda.chip import chip_of, runs_triton
from dynsparse.ops.linear.cuda.costs import rates_of

# The layer and the batches whose kernels are shown.
_FEATURES = 1024
_BATCHES = (1, 16, 128, 1024)
_GPU_FEATURES = 4096
_GPU_BATCHES = (16, 512, 8192)

# What computes a layer, a batch, and forward or backward.
Choose = Callable[[Layer, int, bool], str]


def info(
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON instead.")] = False,
) -> None:
    """Show what computes here: version, kernels and their choice, instruction sets, threads."""
    if json:
        print(dumps(facts(), indent=2))
        return
    kernels = native.describe()
    available = kernels["available"]
    assert isinstance(available, list)
    rows = {
        "dynsparse": __version__,
        "kernels": {
            "native": "native: compiled C++",
            "fallback": "fallback: plain torch, several times slower",
        }[str(kernels["backend"])],
        "because": str(kernels["reason"]),
        "instruction set": str(kernels["isa"]),
        "bfloat16 blocks": str(kernels["bfloat16"]),
        "available": ", ".join(available) or "none",
        "this machine runs": ", ".join(native.supported_isas()) or "none",
        "processor": processor().name,
        "kernels' costs": _describe_costs(),
        "threads": str(kernels["threads"]),
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
    if kernels["backend"] == "native":
        console.print()
        console.print(_table(*_cpu_layers()), highlight=False)
    if torch.cuda.is_available():
        console.print()
        console.print(_table(*_gpu_layers(torch.device("cuda"))), highlight=False)


def facts() -> dict[str, Any]:
    """What `dynsparse info` shows, as plain types.

    `choices` say what computes a layer: for each block, pass and batch the kinds, each with the
    density from which on it computes.
    """
    kernels, costs = native.describe(), cost_table.active()
    choices = [_to_dict("cpu", *_cpu_layers())] if kernels["backend"] == "native" else []
    gpus = []
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(one) for one in range(torch.cuda.device_count())]
        choices.append(_to_dict("cuda", *_gpu_layers(torch.device("cuda"))))
    return {
        "version": __version__,
        "kernels": {name: kernels[name] for name in ("backend", "isa", "reason", "bfloat16")}
        | {"available": kernels["available"], "supported": list(native.supported_isas())},
        "processor": processor().name,
        "kernel_costs": {
            "table": costs.name,
            "origin": costs.origin,
            "measured": costs.measured_here,
        },
        "cores": os.cpu_count(),
        "threads": kernels["threads"],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "gpus": gpus,
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("DYNSPARSE_")},
        "choices": choices,
    }


def _describe_costs() -> str:
    """By which constants kernels are chosen."""
    now = cost_table.active()
    words = now.origin if now.measured_here else f"{now.name}: {now.origin}"
    kept = cost_table.load_measurement()
    if kept is not None and not kept.enabled:
        words += f"; measured on {kept.date}, and not used: {kept.reason}"
    return words


class _Layers(NamedTuple):
    """The layers whose kernels are shown."""

    title: str
    features: int
    dtype: str
    batches: tuple[int, ...]
    blocks: tuple[int, ...]


def _cpu_layers() -> tuple[_Layers, Choose]:
    title = f"What computes a float32 layer {_FEATURES} x {_FEATURES}, from which density on"
    return _Layers(title, _FEATURES, "float32", _BATCHES, (1, 4, 16, 64)), cost_table.choose


def _gpu_layers(device: torch.device) -> tuple[_Layers, Choose]:
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

    return _Layers(title, _GPU_FEATURES, "bfloat16", _GPU_BATCHES, (1, 16, 32, 64, 128)), choose


def _table(layers: _Layers, choose: Choose) -> Table:
    table = Table(
        title=layers.title, title_justify="left", title_style="bold", box=None, padding=(0, 2)
    )
    for name in ("block", "pass", *(f"batch {batch}" for batch in layers.batches)):
        table.add_column(name)
    for block in layers.blocks:
        for backward in (False, True):
            table.add_row(
                str(block),
                "backward" if backward else "forward",
                *(
                    _describe_ranges(layers.features, block, b, backward, choose)
                    for b in layers.batches
                ),
            )
    return table


def _describe_ranges(features: int, block: int, batch: int, backward: bool, choose: Choose) -> str:
    """The kinds in the order of density: `sparse, dense 0.55`."""
    ranges = _ranges(features, block, batch, backward, choose)
    return ", ".join(f"{kind} {at:.2f}" if i else kind for i, (kind, at) in enumerate(ranges))


def _to_dict(device: str, layers: _Layers, choose: Choose) -> dict[str, Any]:
    rows = [
        {
            "block_size": block,
            "pass": "backward" if backward else "forward",
            "batch": batch,
            "kinds": [
                {"kind": kind, "from_density": at}
                for kind, at in _ranges(layers.features, block, batch, backward, choose)
            ],
        }
        for block in layers.blocks
        for backward in (False, True)
        for batch in layers.batches
    ]
    return {"device": device, "features": layers.features, "dtype": layers.dtype, "layers": rows}


def _ranges(
    features: int, block: int, batch: int, backward: bool, choose: Choose
) -> list[tuple[str, float]]:
    """Each kind, and the density, in percents, from which on it computes; the first from 0 on."""
    total = (features // block) ** 2
    ranges: list[tuple[str, float]] = []
    for percent in range(1, 101):
        layer = Layer(features, features, total * percent // 100, block)
        kind = choose(layer, batch, backward)
        if not ranges or kind != ranges[-1][0]:
            ranges.append((kind, percent / 100 if ranges else 0.0))
    return ranges
