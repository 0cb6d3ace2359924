"""The settings of the MNIST transformer: names, defaults and what may go together.

Names and sizes are those of `sparse_transformer_rigl_mnist.py` of Graphcore's dynamic sparsity
application; docs/mnist-transformer.md lists the differences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dynsparse.apps.pictures.options import PictureOptions, check_number, is_integer
from dynsparse.data.pictures import CLASSES, SIDE

__all__ = ["Options"]

_WIDEST = 100_000


@dataclass(kw_only=True)
class Options(PictureOptions):
    """One training; the flags of `dynsparse mnist-transformer`."""

    rates: ClassVar[dict[str, float]] = PictureOptions.rates | {"Adam": 0.004}

    epochs: int = 1
    sparsity: float = 0.9
    encoder_layers: int = 1
    hidden_length: int = 96
    ff_length: int = 48
    attention_heads: int = 16
    qkv_length: int = 32
    dropout_keep_prob: float = 1.0
    exclude_attention_biases: bool = False

    def check_network(self) -> None:
        check_number("sparsity", self.sparsity, 0, 1, open_end=True)
        check_number("dropout-keep-prob", self.dropout_keep_prob, 0, 1)
        if self.dropout_keep_prob == 0:
            raise ValueError("--dropout-keep-prob: expected a number above 0 and up to 1, got 0")
        sizes = ("encoder_layers", "hidden_length", "ff_length", "attention_heads", "qkv_length")
        for name in sizes:
            value = getattr(self, name)
            if not is_integer(value, 1) or value > _WIDEST:
                raise ValueError(
                    f"--{name.replace('_', '-')}: expected an integer between 1 and {_WIDEST}, "
                    f"got {value!r}"
                )
        if not self.is_sparse:
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
    def is_sparse(self) -> bool:
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
        block = self.block_size if self.is_sparse else 1
        return -(-size // block) * block
