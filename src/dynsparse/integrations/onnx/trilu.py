"""Trilu, which causal attention is exported with, for onnx2torch, which lacks it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dynsparse.integrations.onnx.library import library

__all__ = ["know_trilu"]


class Trilu(nn.Module):
    """The upper or lower triangle of a matrix, zeros elsewhere."""

    def __init__(self, upper: bool) -> None:
        super().__init__()
        self.upper = upper

    def forward(self, x: Tensor, k: Tensor | None = None) -> Tensor:
        diagonal = 0 if k is None else int(k)
        return torch.triu(x, diagonal) if self.upper else torch.tril(x, diagonal)


def know_trilu() -> None:
    """Register it, unless onnx2torch has learned it since."""
    registry = library("onnx2torch.node_converters.registry")
    common = library("onnx2torch.utils.common")
    try:
        registry.get_converter("Trilu", version=14)
    except NotImplementedError:

        @registry.add_converter(operation_type="Trilu", version=14)
        def _(node: Any, graph: Any) -> Any:
            return common.OperationConverterResult(
                torch_module=Trilu(bool(node.attributes.get("upper", 1))),
                onnx_mapping=common.onnx_mapping_from_node(node=node),
            )
