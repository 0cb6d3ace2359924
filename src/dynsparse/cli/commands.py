"""The commands of the trainings, and `dynsparse visualise`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dynsparse.apps import lm as lm_app
from dynsparse.apps.image_classification import cifar as cifar_app
from dynsparse.apps.image_classification import mnist as mnist_app
from dynsparse.apps.image_classification import transformer as transformer_app
from dynsparse.options import add_flags


@add_flags(mnist_app.Options)
def mnist(values: dict[str, Any]) -> None:
    """Train a small network with truly sparse layers on digits, MNIST or Fashion-MNIST."""
    mnist_app.run(mnist_app.Options(**values), given=set(values))


@add_flags(transformer_app.Options)
def mnist_transformer(values: dict[str, Any]) -> None:
    """Train a transformer with truly sparse projections on the rows of small images."""
    transformer_app.run(transformer_app.Options(**values), given=set(values))


@add_flags(cifar_app.Options)
def cifar(values: dict[str, Any]) -> None:
    """Train a wide residual network with sparse convolutions on CIFAR-10."""
    cifar_app.run(cifar_app.Options(**values), given=set(values))


_PRESET = Annotated[
    str | None,
    typer.Option(
        "--preset",
        help="Settings to start from; every flag below changes one of them. The defaults named "
        "here are those of tiny.",
        rich_help_panel="Network",
        metavar="|".join(lm_app.PRESETS),
        show_default="tiny",
    ),
]


@add_flags(lm_app.Options, {"preset": _PRESET})
def lm(values: dict[str, Any], preset: str | None) -> None:
    """Train a sparse GPT-2-style language model on any text, and sample from it."""
    if preset is not None and "restore" in values:
        raise ValueError(
            "--preset: the checkpoint of --restore has all settings: leave --preset out"
        )
    options = lm_app.preset("tiny" if preset is None else preset, **values)
    lm_app.run(options, given=set(values))


def visualise(
    records_path: Annotated[
        Path, typer.Option(help="Folder of the record, as given to the training.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the plots; by default `plots` in the record's folder."),
    ] = None,
    animate: Annotated[
        bool, typer.Option("--animate", help="Also write the connectivity over time as a GIF.")
    ] = False,
    cmap: Annotated[str, typer.Option(help="Colour map, by matplotlib's name.")] = "magma",
) -> None:
    """Draw how the connectivity of a recorded training evolved."""
    from dynsparse.report.training.connectivity import visualise as draw

    for path in draw(records_path, output, cmap=cmap, animate=animate):
        print(path)
