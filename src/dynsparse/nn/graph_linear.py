"""The linear layer of PyTorch Geometric, which is no `nn.Linear`."""

from __future__ import annotations

import torch
from torch import nn

from dynsparse.nn.linear import SparseLinear


def is_graph_linear(module: nn.Module) -> bool:
    """Whether this is `torch_geometric.nn.Linear`, told without importing that library.

    Its weight is [out, in] as that of `nn.Linear`. A subclass with its own forward is something
    else.
    """
    for base in type(module).__mro__:
        if base.__name__ == "Linear" and base.__module__.startswith("torch_geometric."):
            own = "forward" in module.__dict__ or type(module).forward is not base.forward  # type: ignore[attr-defined]
            return not own and module._parameters.get("weight") is not None
    return False


class SparseGraphLinear(SparseLinear):
    """A `SparseLinear` in the place of a `torch_geometric.nn.Linear`, which `densify` brings back.

    Attributes:
        dense_class: the class of the layer it replaced; made as dense_class(in, out, bias=...).
    """

    dense_class: type[nn.Module]

    @property
    def in_channels(self) -> int:
        return self.in_features

    @property
    def out_channels(self) -> int:
        return self.out_features

    def dense(self) -> nn.Module:
        """A new layer of the replaced class with this layer's weights and its own bias."""
        with torch.device("meta"):  # its own initialisation is thrown away
            layer = self.dense_class(
                self.in_features, self.out_features, bias=self.bias is not None
            )
        weight = self.to_dense().detach()
        layer.weight = nn.Parameter(weight, requires_grad=self.values.requires_grad)
        layer.bias = self.bias
        return layer
