"""`dynsparse onnx`: models of any framework made sparse, and their weights out and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dynsparse.options import parse_integer, parse_number

onnx = typer.Typer(help="Make ONNX models sparse; take their weights out and put them back.")


def _option(help: str, **more: Any) -> Any:
    return typer.Option(help=help, show_default=False, **more)


_WEIGHTS = _option(
    "How the file holds sparse weights: by their positions (sparse), or as matrices with zeros "
    "(dense), which every runtime reads. sparse if left out.",
    metavar="sparse|dense",
)


@onnx.command("sparsify")
def sparsify_command(
    source: Annotated[Path, typer.Argument(help="An ONNX model.", metavar="MODEL.onnx")],
    output: Annotated[Path, typer.Argument(help="The file to write.", metavar="SPARSE.onnx")],
    density: Annotated[
        float,
        _option(
            "Part of the linear layers' weights that stays.", parser=parse_number, metavar="<float>"
        ),
    ] = 0.1,
    block_size: Annotated[
        int, _option("Edge of the blocks. 1 if left out.", parser=parse_integer, metavar="<int>")
    ] = 1,
    allocation: Annotated[
        str,
        _option("How the layers share the density. erk if left out.", metavar="erk|er|uniform"),
    ] = "erk",
    weights: Annotated[str, _WEIGHTS] = "sparse",
) -> None:
    """Keep the largest weights of a model's linear layers: 0.1 of them if left out."""
    from dynsparse.integrations.onnx import sparsify_onnx

    densities = sparsify_onnx(
        source, output, density, block_size=block_size, allocation=allocation, weights=weights
    )
    for name, kept in densities.items():
        _say(f"{name}: {kept:.4g}")
    _say(f"{len(densities)} sparse weights, written to {output}")


@onnx.command("import")
def import_command(
    source: Annotated[Path, typer.Argument(help="An ONNX model.", metavar="MODEL.onnx")],
    output: Annotated[
        Path, typer.Argument(help="The safetensors file to write.", metavar="WEIGHTS.safetensors")
    ],
) -> None:
    """Take the weights out, patterns as they are: for dynsparse.load_pretrained, or any reader."""
    from dynsparse.integrations.onnx import weights_from_onnx

    _say(f"{len(weights_from_onnx(source, output))} sparse layers, written to {output}")


@onnx.command("export")
def export_command(
    source: Annotated[
        Path, typer.Argument(help="A file of save_safetensors.", metavar="WEIGHTS.safetensors")
    ],
    output: Annotated[Path, typer.Argument(help="The file to write.", metavar="MODEL.onnx")],
    graph: Annotated[
        Path, _option("The ONNX model whose operators are kept.", metavar="GRAPH.onnx")
    ],
    weights: Annotated[str, _WEIGHTS] = "sparse",
) -> None:
    """Put weights and patterns into the graph they belong to."""
    from dynsparse.integrations.onnx import weights_to_onnx

    layers = weights_to_onnx(source, graph, output, weights=weights)
    _say(f"{len(layers)} sparse layers, written to {output}")


def _say(text: str) -> None:
    Console(highlight=False, soft_wrap=True).print(text, markup=False)
