"""Sparse layers in the places of a model's dense ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dynsparse.nn.attention import PROJECTIONS, SparseMultiheadAttention
from dynsparse.nn.conv import from_dense_conv
from dynsparse.nn.conv1d import SparseConv1D
from dynsparse.nn.graph_linear import SparseGraphLinear
from dynsparse.nn.linear import SparseLinear
from dynsparse.nn.sites import Site
from dynsparse.pattern import SparsePattern

_CLASSES: dict[str, type[SparseLinear]] = {"Conv1D": SparseConv1D, "graph": SparseGraphLinear}


def check_replaceable(site: Site) -> None:
    """Raise ValueError where another layer cannot take this one's place."""
    if not site.module_name:
        raise ValueError(
            f"the model is a single {type(site.module).__name__}, which cannot be replaced in "
            "place: put it into a torch.nn.Sequential"
        )
    if site.weight.is_meta:
        raise ValueError(
            f"the layer {site.name!r} is on the meta device: give the model its weights first"
        )


@torch.no_grad()
def sparse_layer(
    site: Site, pattern: SparsePattern, values: Tensor, generator: torch.Generator | None
) -> SparseLinear:
    """The layer that takes the place of `site`: its bias, type, device and flags, other weights.

    `generator` draws what `values` then take the place of.
    """
    weight = site.weight
    layer: SparseLinear
    if site.kind == "conv":
        layer = from_dense_conv(site.module, pattern, generator)
    else:
        layer = _CLASSES.get(site.kind, SparseLinear)(
            site.shape[1],
            site.shape[0],
            bias=False,
            pattern=pattern,
            generator=generator,
            device=weight.device,
            dtype=weight.dtype,
        )
    layer.values.copy_(values)
    layer.known_as = site.name
    layer.register_parameter("bias", _own(site.bias, site.bias_parameter))
    layer.values.requires_grad_(site.parameter.requires_grad)
    if isinstance(layer, (SparseConv1D, SparseGraphLinear)):
        layer.dense_class = type(site.module)
    return layer.train(site.owner.training)


def _own(tensor: Tensor | None, parameter: Tensor | None) -> nn.Parameter | None:
    """The Parameter itself, or a new one for a part of it."""
    if tensor is None or parameter is None or isinstance(tensor, nn.Parameter):
        return tensor  # type: ignore[return-value]
    return nn.Parameter(tensor.detach().clone(), requires_grad=parameter.requires_grad)


def linear_of(weight: nn.Parameter, bias: nn.Parameter | None, training: bool) -> nn.Linear:
    """An `nn.Linear` of the given Parameters; nothing is drawn."""
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, bias=False, device="meta")
    linear.weight = weight
    linear.register_parameter("bias", bias)
    return linear.train(training)


def _dense_part(site: Site) -> nn.Module:
    """A projection of an attention as a layer of its own, which the last one is already."""
    if site.owner is not site.module:
        return site.owner
    weight = _own(site.weight, site.parameter)
    assert weight is not None
    return linear_of(weight, _own(site.bias, site.bias_parameter), site.module.training)


def replace(
    model: nn.Module, every: Mapping[str, Site], layers: Mapping[str, SparseLinear]
) -> dict[str, nn.Module]:
    """Put `layers` in the places of the sites of their names.

    An attention of which a projection becomes sparse becomes a `SparseMultiheadAttention`, whose
    other projections are dense layers.

    Returns:
        name -> the module that was there.
    """
    made: dict[int, SparseMultiheadAttention] = {}
    before: dict[str, nn.Module] = {}
    for name, layer in layers.items():
        site = every[name]
        before[site.module_name] = site.module
        attention = site.module
        if not isinstance(attention, nn.MultiheadAttention):
            model.set_submodule(name, layer)
            continue
        if id(attention) not in made:
            projections: dict[str, nn.Module] = {}
            for part in PROJECTIONS:
                name_of_part = f"{site.module_name}.{part}"
                sparse = layers.get(name_of_part)
                projections[part] = _dense_part(every[name_of_part]) if sparse is None else sparse
            made[id(attention)] = SparseMultiheadAttention.from_projections(attention, projections)
        model.set_submodule(site.module_name, made[id(attention)])
    return before
