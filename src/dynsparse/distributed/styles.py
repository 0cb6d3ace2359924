"""Parallel styles of sparse layers for torch's `parallelize_module`."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from dynsparse._core.checks import check_types
from dynsparse.distributed.distribute import check_same_layers, check_unsharded, make_shards
from dynsparse.distributed.placement import Bundle, Chain
from dynsparse.distributed.sharded_layer import keep_shard, split_heads
from dynsparse.nn import SparseLinear, SparseMultiheadAttention
from dynsparse.ranks import Placement, RankGrid, collective_errors, ranks_of

__all__ = ["SplitCols", "SplitHeads", "SplitPair", "SplitRows"]


class _Style(ParallelStyle):
    """Splits layers over the one axis of a mesh, called x in here."""

    def _chain(self, module: nn.Module) -> tuple[Chain, dict[str, Placement]]:
        """The chain of layers in `module`, and the placement of each by its name."""
        raise NotImplementedError

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        line = ranks_of(device_mesh)
        grid = RankGrid(x=line, all_ranks=line)
        with collective_errors(line):
            chain, placements = self._chain(module)
            layers = {name: _find_layer(module, name) for name in placements}
            shards = make_shards(layers, chain, placements, grid)
        check_same_layers(grid, layers)
        for name, shard in shards.items():
            keep_shard(layers[name], shard)
        if isinstance(module, SparseMultiheadAttention):
            split_heads(module)
        return module


def _find_layer(module: nn.Module, name: str) -> SparseLinear:
    layer: Any = module
    for part in filter(None, name.split(".")):
        layer = getattr(layer, part, None)
    if not isinstance(layer, SparseLinear):
        raise TypeError(
            f"expected a SparseLinear{f' named {name!r}' if name else ''} in "
            f"{type(module).__name__}, got {type(layer).__name__}"
        )
    check_unsharded(name or type(module).__name__, layer)
    return layer


class SplitRows(_Style):
    """Each rank computes a shard of a `SparseLinear`'s outputs, from all inputs.

    Like torch's `ColwiseParallel`, named after the columns of the transposed weight. Shards hold
    about equal numbers of non-zeros. Outputs are gathered at once; to keep them sharded between
    layers, use `SplitPair` or `split`.
    """

    def _chain(self, module: nn.Module) -> tuple[Chain, dict[str, Placement]]:
        return (Bundle(("",)),), {"": Placement(rows="x")}


class SplitCols(_Style):
    """Each rank computes with a shard of a `SparseLinear`'s inputs; the results are added up.

    Like torch's `RowwiseParallel`. Takes all features of the input, and uses a shard of them.
    """

    def _chain(self, module: nn.Module) -> tuple[Chain, dict[str, Placement]]:
        return (Bundle(("",)),), {"": Placement(cols="x")}


class SplitPair(_Style):
    """Splits two `SparseLinear` layers of a module, with one all-reduce for both.

    The first writes shards of features, elementwise functions may follow, and the second reads the
    same shards, whose borders balance the non-zeros of both. Source: Shoeybi et al. 2019,
    "Megatron-LM", section 3.

    Args:
        first, second: names in the module that the style is applied to.
    """

    @check_types
    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.first, self.second = first, second

    def _chain(self, module: nn.Module) -> tuple[Chain, dict[str, Placement]]:
        chain = Bundle((self.first,)), Bundle((self.second,))
        out = _find_layer(module, self.first).out_features
        into = _find_layer(module, self.second).in_features
        if out != into:
            raise ValueError(
                f"{self.first!r} writes {out} features and {self.second!r} reads {into}: they are "
                "not a pair"
            )
        return chain, {
            self.first: Placement("x", None, None, gather_output=False),
            self.second: Placement(None, "x", "x", gather_output=True),
        }


class SplitHeads(_Style):
    """Splits the heads of a `SparseMultiheadAttention` over the ranks, with one all-reduce."""

    def _chain(self, module: nn.Module) -> tuple[Chain, dict[str, Placement]]:
        if not isinstance(module, SparseMultiheadAttention):
            raise TypeError(f"expected a SparseMultiheadAttention, got {type(module).__name__}")
        if module.interleaved:
            raise ValueError(
                "expected an attention whose heads are side by side, got one with "
                "interleaved=True, whose heads cannot be divided among ranks: make it without"
            )
        inputs = tuple(f"{name}_proj" for name in "qkv")
        placements = dict.fromkeys(inputs, Placement("x", None, None, gather_output=False))
        chain = Bundle(inputs, module.head_dim), Bundle(("out_proj",))
        return chain, placements | {"out_proj": Placement(None, "x", "x", gather_output=True)}
