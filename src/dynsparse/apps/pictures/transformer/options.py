"""The settings of the MNIST transformer: names, defaults and what may go together.

Names and sizes are those of `sparse_transformer_rigl_mnist.py` of Graphcore's dynamic sparsity
application; docs/mnist-transformer.md lists the differences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dynsparse.apps.common import attention
from dynsparse.apps.common.option import SWITCH, again, between, number
from dynsparse.apps.common.options import panel
from dynsparse.apps.pictures.options import PictureOptions
from dynsparse.data.pictures import CLASSES, SIDE
from dynsparse.training.algorithms import BY_NAME

_network = panel("Network", "network")
_SIZE = between(1, 100_000)


@dataclass(kw_only=True)
class Options(PictureOptions):
    """One training; the flags of `dynsparse mnist-transformer`."""

    rates: ClassVar[dict[str, float]] = PictureOptions.rates | {"Adam": 0.004}

    epochs: int | None = again(
        PictureOptions, "epochs", default=None, by_default="12 of digits, 1 of the others"
    )
    sparsity: float = _network(
        0.9, "Share of zeros in every matrix; 0 is dense.", number(0, 1, below=True),
        methods=tuple(BY_NAME), complement="density",
    )  # fmt: skip
    encoder_layers: int = _network(1, "Number of transformer layers.", _SIZE)
    hidden_length: int = _network(96, "Features of a token.", _SIZE)
    ff_length: int = _network(48, "Width of the feed-forward part.", _SIZE)
    attention_heads: int = _network(16, "Heads of the attention.", _SIZE)
    qkv_length: int = _network(32, "Features of one head's queries, keys and values.", _SIZE)
    interleave_heads: bool = attention.interleave_heads(_network)
    match_blocks: bool = attention.match_blocks(_network)
    dropout_keep_prob: float = _network(
        1.0, "Share that dropout keeps, in training; 1 for no dropout.",
        number(0, 1, above="a number above 0 and up to 1"),
    )  # fmt: skip
    exclude_attention_biases: bool = _network(False, "Attention without biases.", SWITCH)

    def check_network(self) -> None:
        if not self.has_sparse_layers:
            return
        inner = self.attention_heads * self.qkv_length
        for what, size in (
            ("--hidden-length", self.hidden_length),
            ("--ff-length", self.ff_length),
            ("--attention-heads times --qkv-length", inner),
        ):
            if size % self.block_size:
                raise ValueError(
                    f"--block-size {self.block_size}: expected it to divide {what}, got {size}: "
                    f"choose a multiple of {self.block_size} for it"
                )

    @property
    def label(self) -> str:
        return f"Sparsity_{self.sparsity:g}"

    @property
    def has_sparse_layers(self) -> bool:
        return self.method != "dense" and self.sparsity > 0

    @property
    def in_features(self) -> int:
        """Pixels of a row, and zeros up to the next multiple of the block size."""
        return self._padded(SIDE)

    @property
    def out_features(self) -> int:
        """Classes, and unused outputs up to the next multiple of the block size."""
        return self._padded(CLASSES)

    def _padded(self, size: int) -> int:
        block = self.block_size if self.has_sparse_layers else 1
        return -(-size // block) * block
