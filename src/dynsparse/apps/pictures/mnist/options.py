"""The settings of the MNIST training: names, defaults and what may go together.

Names and most defaults are those of the program this one descends from, `sparse_mnist.py` of
Graphcore's dynamic sparsity application; docs/mnist.md lists the differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynsparse.apps.common.applies import SPARSE
from dynsparse.apps.common.option import Need, again, between, choice, integer, many, number
from dynsparse.apps.common.options import panel
from dynsparse.apps.pictures.options import PictureOptions
from dynsparse.data.pictures import CLASSES, SIDE
from dynsparse.training.algorithms import BY_NAME

_network = panel("Network", "network")
_FIRST = Need(
    "a sparse first layer", lambda o: o.is_sparse(0), lambda o: f"density {o.densities[0]:g}"
)
_SINGLE = Need(
    "--data-type float32",
    lambda o: o.data_type == "float32",
    lambda o: f"--data-type {o.data_type}",
)
_TARGET = Need("runs with --target", lambda o: o.target is not None)
# Its forward pass uses a part of the weights, which no target computes.
_ON_TARGETS = tuple(name for name in BY_NAME if name != "topkast")


@dataclass(kw_only=True)
class Options(PictureOptions):
    """One training; the flags of `dynsparse mnist`."""

    permute_input: str = panel("Data", "network")(
        "none",
        "Order of the pixels; with block, a block of weights covers a tile of the picture.",
        choice("none", "block", "random"),
    )
    densities: Sequence[float] = _network(
        (0.1, 0.3),
        "Density of each layer, first to last; 1 is dense.",
        many(number(0, 1, above="more than 0"), "numbers above 0 and up to 1 (1 is a dense layer)"),
        methods=tuple(BY_NAME),
        also=("density",),
    )
    hidden_sizes: Sequence[int] = _network(
        (320,),
        "Widths of the hidden layers, such as 300 100.",
        many(between(1, 1_000_000), "integers between 1 and 1000000"),
        single="hidden_size",
    )
    block_size: int = again(
        PictureOptions,
        "block_size",
        help="Edge of the blocks of the first layer.",
        needs=(_FIRST,),
    )
    droprate: float = _network(0.1, "Dropout after every hidden layer.", number(0, 1, below=True))
    tiles: int | None = _network(
        None,
        "Use this many tiles of --target.",
        integer(1),
        methods=_ON_TARGETS,
        needs=(_TARGET,),
        by_default="all",
    )
    target: str | None = _network(
        None,
        "Compute the sparse layers, and their growth, on a simulated tile machine.",
        choice("bow", "mk2"),
        methods=_ON_TARGETS,
        needs=(SPARSE, _SINGLE),
    )

    def check_network(self) -> None:
        expected = len(self.hidden_sizes) + 1
        if not self.hidden_sizes or len(self.densities) != expected:
            raise ValueError(
                f"--densities: expected one density per layer, {expected} for "
                f"{len(self.hidden_sizes)} hidden layer(s), got {len(self.densities)}: "
                "match --densities and --hidden-sizes"
            )
        first = self.hidden_sizes[0]
        if self.is_sparse(0) and first % self.block_size:
            raise ValueError(
                f"--block-size {self.block_size} does not divide the first hidden size {first}: "
                f"choose a hidden size such as {-(-first // self.block_size) * self.block_size}"
            )

    @property
    def label(self) -> str:
        return "Density_" + "_".join(f"{density:g}" for density in self.densities)

    @property
    def has_sparse_layers(self) -> bool:
        return any(self.is_sparse(layer) for layer in range(len(self.densities)))

    def is_sparse(self, layer: int) -> bool:
        return self.method != "dense" and self.densities[layer] < 1


@dataclass(frozen=True)
class LayerShape:
    """One layer of the network as the options give it; sizes in elements, counts in blocks."""

    name: str
    in_features: int
    out_features: int
    density: float
    block_size: int
    sparse: bool

    @property
    def total(self) -> int:
        return self.in_features * self.out_features // self.block_size**2

    @property
    def nnz(self) -> int:
        return max(1, round(self.density * self.total)) if self.sparse else self.total


def layer_shapes(options: Options) -> list[LayerShape]:
    """The layers, first to last: fc1, fc2, ...

    Only the first has blocks.
    """
    block = options.block_size if options.is_sparse(0) else 1
    widths = [picture_side(block) ** 2, *options.hidden_sizes, CLASSES]
    return [
        LayerShape(
            name=f"fc{i + 1}",
            in_features=widths[i],
            out_features=widths[i + 1],
            density=options.densities[i] if options.is_sparse(i) else 1.0,
            block_size=block if i == 0 else 1,
            sparse=options.is_sparse(i),
        )
        for i in range(len(options.densities))
    ]


def picture_side(block_size: int) -> int:
    """Edge of the pictures the network reads: 28, or 32 where blocks do not divide 28 x 28.

    The border of two empty pixels all around keeps the picture square and in the middle.
    """
    return SIDE if SIDE * SIDE % block_size == 0 else 32
