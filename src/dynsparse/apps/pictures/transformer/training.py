"""The training of the MNIST transformer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rich.console import Console

from dynsparse.apps import pictures
from dynsparse.apps.pictures.transformer.network import Network, build_network
from dynsparse.apps.pictures.transformer.options import Options

__all__ = ["TransformerTraining", "run"]


class TransformerTraining(pictures.Training):
    """A transformer on the rows of pictures."""

    app = "mnist-transformer"
    options: Options

    def build_network(self) -> Network:
        return build_network(self.options, self.generator)

    def headline(self) -> str:
        o = self.options
        return (
            f"{o.encoder_layers} transformer layer{'' if o.encoder_layers == 1 else 's'} of "
            f"{o.hidden_length} features, {o.attention_heads} heads of {o.qkv_length}, "
            f"{o.ff_length} hidden"
        )


def run(
    options: Options, console: Console | None = None, *, given: Collection[str] = ()
) -> dict[str, Any]:
    """Train and test as `options` say; see `dynsparse.apps.pictures.run`."""
    return pictures.run(TransformerTraining, options, console, given=given)
