"""Which layers of a model stand in a row, so that one hands its slab of features to the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from dynsparse.nn import (
    Dropout,
    SparseConv1d,
    SparseConv2d,
    SparseLinear,
    SparseMultiheadAttention,
    SparseTransformerLayer,
)


class Bundle(NamedTuple):
    """Layers side by side, which write features that belong together.

    Attributes:
        names: of the layers: one, or the three projections of an attention.
        unit: the features written are cut at multiples of it: the size of a head, else 1.
    """

    names: tuple[str, ...]
    unit: int = 1


Chain = tuple[Bundle, ...]
"""What one bundle writes the next reads, feature by feature: only elementwise functions, or the
heads of an attention, are in between."""

# These look at each feature for itself, so that a slab is as good as all.
_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
    nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.Softsign, nn.Identity,
    nn.Dropout, Dropout,
)  # fmt: skip


def find_chains(model: nn.Module) -> tuple[dict[str, SparseLinear], list[Chain]]:
    """All sparse layers of a model by name, and the chains they stand in, each in one.

    Found are rows of layers in an `nn.Sequential`, attentions, and the feed-forward part of a
    `SparseTransformerLayer`; a layer that stands in no such row is a chain of its own.

    Raises:
        TypeError: no module.
        ValueError: a model without sparse layers, with a convolution, or with interleaved heads.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    layers = {name: m for name, m in model.named_modules() if isinstance(m, SparseLinear)}
    if not layers:
        raise ValueError("the model has no sparse layers: make it sparse with dynsparse.sparsify")
    for name, layer in layers.items():
        if isinstance(layer, (SparseConv1d, SparseConv2d)):
            raise ValueError(
                f"the layer {name!r} is a convolution, which has no rectangles: train the model "
                "data parallel, with replicate"
            )
    found: list[Chain] = []
    taken: set[str] = set()
    for chain in _seen(model):
        names = [name for bundle in chain for name in bundle.names]
        if all(name in layers for name in names) and not taken & {*names}:
            taken.update(names)
            found.append(chain)
    found += [(Bundle((name,)),) for name in layers if name not in taken]
    order = {name: i for i, name in enumerate(layers)}
    found.sort(key=lambda chain: order[chain[0].names[0]])
    return layers, found


def _seen(model: nn.Module) -> Iterator[Chain]:
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, SparseMultiheadAttention):
            if module.interleaved:
                raise ValueError(
                    f"the attention {name!r} has interleaved=True, and no rank could hold heads of "
                    "its own: make it without, or train it on one rank"
                )
            projections = (module.q_proj, module.k_proj, module.v_proj, module.out_proj)
            if all(isinstance(one, SparseLinear) for one in projections):
                inputs = tuple(f"{prefix}{one}_proj" for one in "qkv")
                yield Bundle(inputs, module.head_dim), Bundle((f"{prefix}out_proj",))
        elif isinstance(module, SparseTransformerLayer):
            yield Bundle((f"{prefix}linear1",)), Bundle((f"{prefix}linear2",))
        elif isinstance(module, nn.Sequential):
            yield from _in_a_row(prefix, module)


def _in_a_row(prefix: str, module: nn.Sequential) -> Iterator[Chain]:
    row: list[Bundle] = []
    last: Any = None
    for name, child in module.named_children():
        if isinstance(child, SparseLinear):
            if row and last.out_features != child.in_features:
                yield tuple(row)
                row = []
            row.append(Bundle((f"{prefix}{name}",)))
            last = child
        elif not isinstance(child, _ELEMENTWISE):
            if row:
                yield tuple(row)
            row = []
    if row:
        yield tuple(row)
