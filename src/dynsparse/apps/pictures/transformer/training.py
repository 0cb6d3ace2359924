"""The training of the MNIST transformer."""

from __future__ import annotations

from functools import partial

from dynsparse.apps import pictures
from dynsparse.apps.pictures.transformer.network import Network, build_network
from dynsparse.apps.pictures.transformer.options import Options


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


run = partial(pictures.run, TransformerTraining)
"""Train and test as options say: `run(options, console, given=...)`, see `pictures.run`."""
