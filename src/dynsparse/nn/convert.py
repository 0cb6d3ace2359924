"""Make a model sparse, and dense again, in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse.allocation import allocate
from dynsparse.checks import check_flag, check_generator
from dynsparse.files.shorten import shortened
from dynsparse.nn.attend import deinterleaved_order
from dynsparse.nn.attention import PROJECTIONS, SparseMultiheadAttention
from dynsparse.nn.backends import executor_for
from dynsparse.nn.candidates import Site, find_sites, first_matches, select, tied
from dynsparse.nn.conv import SparseConv1d, SparseConv2d, dense_conv, from_dense_conv
from dynsparse.nn.embedding import SparseEmbedding
from dynsparse.nn.exclusions import BY_CHOICE, default_exclusions
from dynsparse.nn.init import largest_blocks
from dynsparse.nn.linear import SparseConv1D, SparseGraphLinear, SparseLinear
from dynsparse.nn.models import describe
from dynsparse.pattern import SparsePattern
from dynsparse.ranks import Part


@torch.no_grad()
def sparsify(
    model: nn.Module,
    density: float | None = 0.1,
    block_size: int = 1,
    allocation: str = "erk",
    *,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] = (),
    densities: Mapping[str, float] | None = None,
    block_sizes: Mapping[str, int] | None = None,
    start: str = "random",
    generator: torch.Generator | None = None,
    keep_sparse: bool = False,
    target: Any = None,
    target_options: Mapping[str, Any] | None = None,
    verbose: bool = True,
) -> nn.Module:
    """Replace a model's linear layers and convolutions by sparse ones, in place.

    Converted are `nn.Linear`, `nn.Conv2d` and `nn.Conv1d`, the `Conv1D` of GPT-2 implementations,
    the `Linear` of PyTorch Geometric, and the projections of `nn.MultiheadAttention`, which becomes
    a `SparseMultiheadAttention`. A layer that is to have density 1 stays the dense module it is,
    unless `keep_sparse` says otherwise. Dense stay, too, layers whose weight is also an embedding's
    or cannot stay tied for another reason, the adapters of LoRA and its kin, depthwise
    convolutions, and layers with hooks; the table names them. dtype, device, `requires_grad`, the
    training flag and the biases stay; the weights' Parameters are new ones, so make the optimizer
    afterwards.

    Names are those of `model.named_modules()`; an attention's projections are its `q_proj`,
    `k_proj`, `v_proj` and `out_proj`. A pattern is a glob in which `*` matches dots too. It names
    every module it matches, and everything below: "head" is the module `head` and its parts, but
    not `lm_head` or `decoder.head`, which "*head" matches.

    Args:
        density: non-zeros / elements of all converted layers together, in (0, 1], met to the
            nearest block. None when `densities` names every layer.
        block_size: edge of the blocks.
        allocation: how the density is shared among the layers: "uniform", "er" or "erk", see
            `dynsparse.allocation.allocate`.
        include: patterns of what to convert; None for everything that can be but adapters and
            depthwise convolutions.
        exclude: patterns of what stays dense, whatever `include` says.
        densities: pattern -> density of each layer it matches. The first match counts; these
            layers take their non-zeros first and the others share the rest.
        block_sizes: pattern -> block size, in place of `block_size`; the first match counts.
        start: "magnitude" keeps the blocks whose magnitudes have the largest sum, with their
            values: for a trained model. "random" draws the patterns; the model's own values there
            are scaled by sqrt(in / connections of the row), so that outputs vary as much as those
            of the dense layer (Evci et al. 2022, "Gradient Flow in Sparse Neural Networks and How
            Lottery Tickets Win", section 3.1): for a model just initialised.
        generator: draws the random patterns.
        keep_sparse: layers that are to have density 1 become sparse layers with every weight
            present. With density=1 this is where gradual pruning begins (`GMP`, `GraNet`), and
            every layer then counts for its final density.
        target, target_options: of the linear layers, as in `SparseLinear`; convolutions have none.
        verbose: print the table of `dynsparse.nn.describe`.

    Returns:
        The model.

    Raises:
        TypeError, ValueError: a density outside (0, 1] or one that cannot be met, a block size that
            does not divide a layer, a pattern that matches nothing, an included module that cannot
            be converted, nothing to convert, a weight shared with a layer that is treated
            differently, a target that does not take a layer. Nothing is changed then.
    """
    _check_model(model)
    check_generator(generator)
    check_flag("keep_sparse", keep_sparse)
    if not isinstance(start, str) or start not in ("random", "magnitude"):
        raise ValueError(f"start must be 'random' or 'magnitude', got {shortened(start)}")
    every = find_sites(model)
    left = default_exclusions(model, every)
    chosen = select(model, every, left, include, exclude)
    own_density = first_matches("densities", {} if densities is None else densities, chosen)
    own_block = first_matches("block_sizes", {} if block_sizes is None else block_sizes, chosen)
    treatment = {name: (own_density.get(name), own_block.get(name, block_size)) for name in chosen}
    fixed = {name: reason for name, reason in left.items() if reason not in BY_CHOICE}
    groups = {group[0].name: group for group in tied(every, fixed, treatment)}
    for group in groups.values():
        for site in group:
            _check_site(site)
    blocks = {name: treatment[name][1] for name in groups}
    counts = allocate(
        {name: group[0].shape for name, group in groups.items()},
        density,
        method=allocation,
        block_size=blocks,
        densities={name: own_density[name] for name in groups if name in own_density},
    )
    layers: dict[str, SparseLinear] = {}
    for name, group in groups.items():
        site = group[0]
        if counts[name] * blocks[name] ** 2 == site.weight.numel() and not keep_sparse:
            continue
        layer = _start(site, counts[name], blocks[name], start, generator)
        layers |= {other.name: layer for other in group}
    if target is not None or target_options is not None:
        _put_on_target(layers, target, target_options)
    replace(model, every, layers)
    forbid_fast_paths(model)
    if verbose:
        elements = sum(group[0].weight.numel() for group in groups.values())
        nnz = sum(counts[name] * blocks[name] ** 2 for name in groups)
        asked = "by layer" if density is None else f"{density:g}"
        print(describe(model))
        achieved = f"{nnz / elements:.6g} (asked for: {asked})"
        print(f"density of the {len(groups)} layers chosen: {achieved}")
    return model


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")


def _check_site(site: Site) -> None:
    check_replaceable(site)
    if not site.weight.is_floating_point():
        raise TypeError(
            f"the weight of {site.name!r} must be floating point, got {site.weight.dtype}"
        )
    if not bool(site.weight.isfinite().all()):
        raise ValueError(f"the weight of {site.name!r} has entries that are NaN or infinite")


def _put_on_target(
    layers: Mapping[str, SparseLinear], target: Any, options: Mapping[str, Any] | None
) -> None:
    """Give each layer a target of its own."""
    for name, layer in layers.items():
        if isinstance(layer, (SparseConv1d, SparseConv2d)):
            raise ValueError(
                f"the convolution {name!r} has no target, only linear layers have: exclude it, or "
                "leave target out"
            )
        layer.executor = executor_for(target, layer.values.dtype, options)


def _start(
    site: Site, nnz: int, block_size: int, start: str, generator: torch.Generator | None
) -> SparseLinear:
    """The sparse layer for a site, with the pattern and the values it starts from."""
    matrix, shape = site.matrix, site.matrix_shape
    if start == "magnitude":
        pattern = largest_blocks(matrix, nnz, block_size)
        return sparse_layer(site, pattern, pattern.values_of(matrix), generator)
    pattern = SparsePattern.random(shape, nnz=nnz, block_size=block_size, generator=generator)
    values = pattern.values_of(matrix)
    fan_in = torch.bincount(pattern.rows.long(), minlength=pattern.grid[0]).clamp(min=1)
    scale = (shape[1] / (fan_in * block_size)).sqrt()[pattern.rows.long()]
    scale = scale.to(values.device, values.dtype)
    values = values * scale.view(-1, *[1] * (values.dim() - 1))
    return sparse_layer(site, pattern, values, generator)


@torch.no_grad()
def densify(model: nn.Module) -> nn.Module:
    """Replace a model's sparse layers by dense ones with the same weights, in place.

    The inverse of `sparsify`: `SparseLinear` becomes `nn.Linear`, or the other kind of linear layer
    it was, `SparseConv2d` and `SparseConv1d` become `nn.Conv2d` and `nn.Conv1d`,
    `SparseMultiheadAttention` becomes `nn.MultiheadAttention`, `SparseEmbedding` becomes
    `nn.Embedding`. dtype, device, `requires_grad`, the training flag and the biases stay; the
    weights' Parameters are new ones, so make the optimizer afterwards.

    Returns:
        The model.

    Raises:
        TypeError: not a module. ValueError: a model without sparse layers, one that is a single
            sparse layer and so cannot be changed in place, or an attention with a `head_dim` that
            `nn.MultiheadAttention` cannot have, or with an `attention_pattern`. Nothing is changed
            then.
    """
    _check_model(model)
    made: dict[int, nn.Module] = {}
    names: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, SparseLinear) and isinstance(module.executor, Part):
            raise ValueError(
                f"densify needs full layers, but this rank holds only a shard of {name!r}: take "
                "dynsparse.distributed.gather(model), the state of the full model"
            )
        inside = any(name.startswith(f"{other}.") for other in names)
        if not inside and isinstance(module, (SparseLinear, SparseMultiheadAttention)):
            names[name] = module
    if not names:
        raise ValueError("the model has no sparse layers")
    if "" in names:
        raise ValueError(
            f"the model is a single {type(model).__name__}, which cannot be replaced in place: "
            "put it into a torch.nn.Sequential"
        )
    for name, module in names.items():
        if isinstance(module, SparseMultiheadAttention):
            if module.attention_pattern is not None:
                raise ValueError(
                    f"the attention {name!r} has an attention_pattern, which nn.MultiheadAttention "
                    "cannot have: set it to None first, or pass the dense one a mask in its place"
                )
            inner = module.num_heads * module.head_dim
            if inner != module.embed_dim:
                raise ValueError(
                    f"the attention {name!r} has {module.num_heads} heads of {module.head_dim} for "
                    f"{module.embed_dim} features, which nn.MultiheadAttention cannot have: make "
                    "its head_dim embed_dim / num_heads, or densify the model without it"
                )
    for name, module in names.items():
        if id(module) not in made:
            dense = (
                _dense_attention(module)
                if isinstance(module, SparseMultiheadAttention)
                else _dense(module)
            )
            made[id(module)] = dense.train(module.training)
        model.set_submodule(name, made[id(module)])
    allow_fast_paths(model)
    return model


def _dense(layer: nn.Module) -> nn.Module:
    """A dense layer for a sparse one; a dense one is given back."""
    if isinstance(layer, (SparseConv1D, SparseGraphLinear)):
        return layer.dense()
    if isinstance(layer, (SparseConv1d, SparseConv2d)):
        return dense_conv(layer)
    if isinstance(layer, SparseEmbedding):
        freeze = not layer.values.requires_grad
        return nn.Embedding.from_pretrained(layer.to_dense(), freeze, layer.padding_idx)
    if isinstance(layer, SparseLinear):
        weight = nn.Parameter(layer.to_dense(), requires_grad=layer.values.requires_grad)
        return linear_of(weight, layer.bias, layer.training)
    return layer


def _dense_attention(attention: SparseMultiheadAttention) -> nn.MultiheadAttention:
    parts: dict[str, Any] = {part: _dense(getattr(attention, part)) for part in PROJECTIONS}
    bias_k, bias_v = attention.bias_k, attention.bias_v
    run = attention.interleave_length
    if run is not None:
        order = deinterleaved_order(attention.embed_dim, attention.num_heads, run)
        for part, layer in parts.items():
            dim = 1 if part == "out_proj" else 0
            bias = layer.bias if dim else _turned(layer.bias, order, 0)
            parts[part] = linear_of(_turned(layer.weight, order, dim), bias, layer.training)
        bias_k, bias_v = _turned(bias_k, order, 2), _turned(bias_v, order, 2)
    out = parts.pop("out_proj")
    dense = nn.MultiheadAttention(
        attention.embed_dim,
        attention.num_heads,
        attention.dropout,
        bias=out.bias is not None,
        add_bias_kv=attention.bias_k is not None,
        add_zero_attn=attention.add_zero_attn,
        kdim=attention.kdim,
        vdim=attention.vdim,
        batch_first=attention.batch_first,
        device="meta",
    )
    if dense.in_proj_weight is None:
        for part, layer in parts.items():
            setattr(dense, f"{part}_weight", layer.weight)
    else:
        dense.in_proj_weight = _joined([layer.weight for layer in parts.values()])
    if dense.in_proj_bias is not None:
        dense.in_proj_bias = _joined([layer.bias for layer in parts.values()])
    dense.out_proj.weight, dense.out_proj.bias = out.weight, out.bias
    dense.bias_k, dense.bias_v = bias_k, bias_v
    return dense


def _turned(parameter: Any, order: torch.Tensor, dim: int) -> Any:
    """A Parameter with its features in another order; None stays."""
    if parameter is None:
        return None
    turned = parameter.detach().index_select(dim, order.to(parameter.device))
    return nn.Parameter(turned, requires_grad=parameter.requires_grad)


def _joined(parameters: list[nn.Parameter]) -> nn.Parameter:
    trained = any(parameter.requires_grad for parameter in parameters)
    return nn.Parameter(torch.cat([p.detach() for p in parameters]), requires_grad=trained)


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


_FLAGS: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu"),  # read for the fused path alone
    (nn.TransformerEncoder, "use_nested_tensor"),
)
_BEFORE = "_fast_path_before_sparsify"


def forbid_fast_paths(model: nn.Module) -> None:
    """Keep every encoder with a sparse part from the fused path."""
    for module in model.modules():
        for cls, flag in _FLAGS:
            if not isinstance(module, cls) or hasattr(module, _BEFORE):
                continue
            if any(isinstance(part, SparseLinear) for part in module.modules()):
                setattr(module, _BEFORE, getattr(module, flag))
                setattr(module, flag, type(getattr(module, flag))(0))


def allow_fast_paths(model: nn.Module) -> None:
    """Undo `forbid_fast_paths`."""
    for module in model.modules():
        for cls, flag in _FLAGS:
            if isinstance(module, cls) and hasattr(module, _BEFORE):
                setattr(module, flag, getattr(module, _BEFORE))
                delattr(module, _BEFORE)
