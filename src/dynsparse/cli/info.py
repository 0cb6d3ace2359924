"""`dynsparse info`."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from json import dumps
from typing import Annotated, Any

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

# From a layer, a batch and whether it is the backward pass to the kind of kernel.
Choose = Callable[[Layer, int, bool], str]


def info(
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON instead.")] = False,
) -> None:
    """Show what computes on this machine: version, kernels and their choice, threads."""
    if json:
        print(dumps(facts(), indent=2))
        return
    kernels = native.describe()
    rows = {
        "dynsparse": __version__,
        "kernels": {
            "native": "native: compiled C++",
            "fallback": "fallback: plain torch, several times slower",
        }[kernels["backend"]],
        "because": kernels["reason"],
        "instruction set": kernels["isa"],
        "bfloat16 blocks": kernels["bfloat16"],
        "available": ", ".join(kernels["available"]) or "none",
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
    for choices in _choices():
        console.print()
        console.print(_table(choices), highlight=False)


def facts() -> dict[str, Any]:
    """The facts that `dynsparse info` shows, as plain types.

    `choices` say what computes a layer: for each block, pass and batch the kinds, each with the
    density from which on it computes.
    """
    kernels, costs = native.describe(), cost_table.active_table()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
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
        "gpus": [torch.cuda.get_device_name(device) for device in devices],
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("DYNSPARSE_")},
        "choices": _choices(),
    }


def _describe_costs() -> str:
    """The origin of the constants by which kernels are chosen."""
    now = cost_table.active_table()
    words = now.origin if now.measured_here else f"{now.name}: {now.origin}"
    measurement = cost_table.load_measurement()
    if measurement is not None and not measurement.enabled:
        words += f"; measured on {measurement.date}, and not used: {measurement.reason}"
    return words


def _choices() -> list[dict[str, Any]]:
    """The kernels that compute layers on the CPU, and on a GPU if there is one; see `facts`."""
    choices = []
    if native.describe()["backend"] == "native":
        title = f"What computes a float32 layer {_FEATURES} x {_FEATURES}, from which density on"
        layers = _layers(_FEATURES, (1, 4, 16, 64), _BATCHES, cost_table.choose)
        choices.append({"device": "cpu", "features": _FEATURES, "dtype": "float32"})
        choices[-1] |= {"title": title, "layers": layers}
    if torch.cuda.is_available():
        device = torch.device("cuda")
        chip = chip_of(device)
        rates = rates_of(chip)

        def choose_gpu(layer: Layer, batch: int, backward: bool) -> str:
            if not runs_triton(device):
                return "dense"
            return costs.choose(layer, batch, backward, torch.bfloat16, chip)

        title = (
            f"What computes a bfloat16 layer {_GPU_FEATURES} x {_GPU_FEATURES} on the GPU, from "
            f"which density on ({'measured on' if rates.measured else 'predicted for'} chips like "
            f"{rates.name})"
        )
        layers = _layers(_GPU_FEATURES, (1, 16, 32, 64, 128), _GPU_BATCHES, choose_gpu)
        choices.append({"device": "cuda", "features": _GPU_FEATURES, "dtype": "bfloat16"})
        choices[-1] |= {"title": title, "layers": layers}
    return choices


def _layers(
    features: int, blocks: Sequence[int], batches: Sequence[int], choose: Choose
) -> list[dict[str, Any]]:
    return [
        {
            "block_size": block,
            "pass": "backward" if backward else "forward",
            "batch": batch,
            "kinds": [
                {"kind": kind, "from_density": at}
                for kind, at in _ranges(features, block, batch, backward, choose)
            ],
        }
        for block in blocks
        for backward in (False, True)
        for batch in batches
    ]


def _table(choices: dict[str, Any]) -> Table:
    """A row per block and pass, a column per batch; the kinds in the order of density."""
    sparse = "sparse, and small for few samples" if choices["device"] == "cpu" else "blocks"
    caption = (
        f"{sparse}: products over the non-zeros; dense: products with the weight as a dense matrix"
    )
    table = Table(
        title=choices["title"], title_justify="left", title_style="bold", box=None, padding=(0, 2),
        caption=caption, caption_justify="left",
    )  # fmt: skip
    rows: dict[tuple[str, str], list[str]] = {}
    for layer in choices["layers"]:
        kinds = [
            f"{kind['kind']} {kind['from_density']:.2f}" if kind["from_density"] else kind["kind"]
            for kind in layer["kinds"]
        ]
        rows.setdefault((str(layer["block_size"]), layer["pass"]), []).append(", ".join(kinds))
    batches = dict.fromkeys(f"batch {layer['batch']}" for layer in choices["layers"])
    for name in ("block", "pass", *batches):
        table.add_column(name)
    for head, cells in rows.items():
        table.add_row(*head, *cells)
    return table


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
