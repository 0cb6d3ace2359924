"""The linear layer of GPT-2 implementations, which keeps its weight as [in, out]."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from dynsparse.nn.linear import SparseLinear
from dynsparse.nn.weight_view import WeightView


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is a `Conv1D` as `transformers` has it, told without importing that library.

    By the class name and by what it holds: `nf`, a weight [in, nf] and a bias [nf].
    """
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    return (
        any(base.__name__ == "Conv1D" for base in type(module).__mro__)
        and isinstance(weight, Tensor)
        and weight.dim() == 2
        and weight.shape[1] == getattr(module, "nf", None)
        and (bias is None or bias.shape == weight.shape[1:])
    )


class SparseConv1D(SparseLinear):
    """A `SparseLinear` in the place of a `Conv1D`, which `densify` brings back.

    Attributes:
        dense_class: the class of the layer it replaced; made as dense_class(nf, nx).
    """

    dense_class: type[nn.Module]

    @property
    def weight(self) -> Tensor:
        """The weight [in, out], for code that reads it; see `SparseLinear.weight`."""
        return self.to_dense().t() if is_compiling() else WeightView(self, transposed=True)

    def dense(self) -> nn.Module:
        """A new layer of the replaced class with this layer's weights and its own bias."""
        with torch.device("meta"):  # its own initialisation is thrown away
            layer = self.dense_class(self.out_features, self.in_features)
        weight = self.to_dense().detach().t().contiguous()
        layer.weight = nn.Parameter(weight, requires_grad=self.values.requires_grad)
        layer.bias = self.bias
        return layer
